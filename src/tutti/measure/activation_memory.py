"""Counts the bytes of tensors, and the bytes of activations that autograd keeps, by module.

This file imports only torch and the standard library, because `tutti profile --memory -- COMMAND`
loads it into programs whose environment may not have tutti.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

OUTSIDE = "loss"  # the name for activations that are saved outside of all modules


class ActivationCounter:
    """Counts the activations that autograd keeps for backward, in total and by module.

    `pack` and `unpack` are hooks for torch.autograd.graph.saved_tensors_hooks. Module hooks call
    `begin_module` and `end_module`.
    """

    def __init__(self) -> None:
        self.activations = 0  # bytes that autograd keeps now
        self.by_module: Counter[str] = Counter()  # the same bytes by module
        self.last_unpacked = ""  # the module whose activations backward has used last
        self.excluded: set[int] = set()  # storages of parameters and buffers
        self.grown = False  # whether memory has grown since the last call of `consider`
        # Modules whose forward is running: the name, and the storages of gathered parameters.
        self.stack: list[tuple[str, set[int]]] = []
        self._live: dict[int, list[Any]] = {}  # storage → [number of uses, bytes, module]

    def consider(self) -> None:
        """Record the peak. Called before activations are freed. Subclasses implement this."""

    def begin_module(self, name: str, module: nn.Module) -> None:
        """Begin the forward of a module."""
        weights: Iterable[Tensor] = ()
        if hasattr(module, "_get_fsdp_state"):  # FSDP gathers its parameters until forward ends
            weights = module.parameters()
        self.stack.append((name, {storage_of(weight).data_ptr() for weight in weights}))

    def end_module(self) -> None:
        """End the forward of the module that began last."""
        self.stack.pop()

    def pack(self, tensor: Tensor) -> Any:
        storage = storage_of(tensor)
        key, size = storage.data_ptr(), storage.nbytes()
        is_weight = key in self.excluded or any(key in weights for _, weights in self.stack)
        if not size or is_weight:
            return tensor
        if key not in self._live:
            module = self.stack[-1][0] if self.stack else OUTSIDE
            self._live[key] = [0, size, module]
            self.activations += size
            self.by_module[module] += size
            self.grown = True
        self._live[key][0] += 1
        return _Saved(tensor, self._release, key)

    def unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            return saved  # type: ignore[no-any-return]
        if (entry := self._live.get(saved.key)) is not None:
            self.last_unpacked = entry[2]
        return saved.tensor

    def _release(self, key: int) -> None:
        self.consider()
        entry = self._live[key]
        entry[0] -= 1
        if entry[0] == 0:
            del self._live[key]
            self.activations -= entry[1]
            self.by_module[entry[2]] -= entry[1]


class _Saved:
    """A tensor that autograd keeps for backward. When autograd frees it, `release` is called."""

    __slots__ = ("_release", "key", "tensor")

    def __init__(self, tensor: Tensor, release: Callable[[int], None], key: int) -> None:
        self.tensor, self._release, self.key = tensor, release, key

    def __del__(self) -> None:
        self._release(self.key)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor. Also unwrap the result of an async collective."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(tensor, "elem", tensor)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of this rank's shard."""
    return local_tensor(tensor).untyped_storage()


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's shards of `tensors`. A tensor on meta has 0 bytes."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for tensor in map(local_tensor, tensors)
        if not tensor.is_meta
        for storage in [tensor.untyped_storage()]
    }
    return sum(storages.values())


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of this rank's shards of the optimizer's state."""
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    values = [value for state in states for value in state.values()]
    return tensor_bytes(value for value in values if isinstance(value, Tensor))


def gathered_by_fsdp(model: nn.Module) -> list[Tensor]:
    """Return the tensors that FSDP2 now holds for communication: parameters and gradients."""
    return [
        tensor
        for module in model.modules()
        if (state := getattr(module, "_get_fsdp_state", None)) is not None
        and (group := state()._fsdp_param_group) is not None
        for parameter in group.fsdp_params
        for tensor in (
            *parameter.all_gather_outputs,
            parameter.unsharded_accumulated_grad,
            getattr(getattr(parameter, "_unsharded_param", None), "grad", None),
        )
        if isinstance(tensor, Tensor)
    ]
