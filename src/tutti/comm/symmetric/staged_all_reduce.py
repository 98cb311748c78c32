"""All-reduce of ordinary tensors by way of a symmetric buffer, for small tensors on GPUs."""

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tutti.comm.symmetric.heap import Heap
from tutti.comm.symmetric.tensor import SymmetricTensor
from tutti.world.errors import UsageError

STAGED_BYTES = 1 << 20  # above this NCCL's own path wins, or nearly


# The buffer of each group, by the group's name: making one takes milliseconds, using one
# microseconds.
_stages: dict[tuple[str, torch.device], "Stage"] = {}


def all_reduce_staged(
    tensor: torch.Tensor, op: str = "sum", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Reduce an ordinary tensor of at most 1 MB in place, through a buffer in symmetric memory.

    The first call of a group makes the buffer, together with all its ranks; it lives as long as the
    group, or until another group makes one. `Stage` is the same with a life of its own.
    """
    world = dist.group.WORLD if group is None else group
    if world is None:
        raise UsageError("all_reduce_staged needs a world: call tutti.init() first")
    key = (world.group_name, tensor.device)
    stage = _stages.get(key)
    if stage is None or stage.heap.group is not world:  # the name may be that of an earlier world
        _leave_destroyed_groups()
        stage = _stages[key] = Stage(world, tensor.device)
    return stage.all_reduce(tensor, op)


def _leave_destroyed_groups() -> None:
    for key, stage in list(_stages.items()):
        if stage.heap.group not in distributed_c10d._world.pg_map:
            del _stages[key]
            stage.heap.leave()


class Stage:
    """A symmetric buffer of a group for `all_reduce` of ordinary tensors.

    Made and closed on all ranks together. When to use it: for gradients and activations of at most
    a megabyte that do not live in symmetric memory; the copy into the buffer is part of the kernel.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: str | torch.device | None = None
    ) -> None:
        self.heap = Heap(group, bytes=STAGED_BYTES + 4096, device=device, signals=1)
        self._buffer = self.heap.empty(STAGED_BYTES, torch.uint8)
        self._views: dict[tuple[torch.dtype, torch.Size], SymmetricTensor] = {}

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce `tensor` over all ranks, in place; returns it."""
        if tensor.nbytes > STAGED_BYTES:
            raise UsageError(
                f"{tensor.nbytes} bytes: the buffer holds {STAGED_BYTES}: use dist.all_reduce"
            )
        if not tensor.is_contiguous():
            whole = tensor.contiguous()
            return tensor.copy_(self.all_reduce(whole, op))
        view = self._view(tensor)
        view.memory.all_reduce_staged(view.local, view.offset, tensor, op, self.heap.timeout)
        return tensor

    def close(self) -> None:
        """End the buffer, on all ranks together."""
        self.heap.close()

    def _view(self, tensor: torch.Tensor) -> SymmetricTensor:
        """The buffer's first bytes in the shape of `tensor`."""
        key = (tensor.dtype, tensor.shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= 64:
                self._views.clear()
            buffer = self._buffer
            view = SymmetricTensor(
                self.heap, buffer.memory, buffer.offset, tuple(tensor.shape), tensor.dtype
            )
            self._views[key] = view
        return view
