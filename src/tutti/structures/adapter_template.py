"""AdapterTemplate: which tensors an adapter has, and where each lies in a slot."""

from collections.abc import Mapping

import torch

from tutti.world.errors import UsageError

_APART = 64  # bytes: tensors begin at multiples of it


class AdapterTemplate:
    """Names, shapes and dtypes, packed one after the other into `bytes` bytes."""

    def __init__(
        self, tensors: Mapping[str, tuple[int, ...] | torch.Tensor], dtype: torch.dtype
    ) -> None:
        if not tensors:
            raise UsageError("the template is empty: name the tensors of an adapter")
        self._places: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        self.bytes = 0
        for name, like in tensors.items():
            shape = like.shape if isinstance(like, torch.Tensor) else torch.Size(like)
            kind = like.dtype if isinstance(like, torch.Tensor) else dtype
            self._places[name] = (self.bytes, shape, kind)
            self.bytes += max(1, -(-shape.numel() * kind.itemsize // _APART)) * _APART

    def views(self, slot: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in the bytes of a slot."""
        return {
            name: slot[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (at, shape, dtype) in self._places.items()
        }

    def check(self, adapter: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse an adapter that has other tensors."""
        for name, (_, shape, dtype) in self._places.items():
            given = tensors.get(name)
            if given is None or given.shape != shape or given.dtype is not dtype:
                what = "missing" if given is None else f"{given.dtype} of {tuple(given.shape)}"
                raise UsageError(
                    f"adapter {adapter!r}: {name} is {what}, the template has {dtype} of "
                    f"{tuple(shape)}"
                )
        if extra := sorted(set(tensors) - set(self._places)):
            raise UsageError(f"adapter {adapter!r} has {extra}, which the template has not")
