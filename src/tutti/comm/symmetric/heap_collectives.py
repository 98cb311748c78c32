"""Collectives on symmetric tensors: every rank reads the other ranks' memory, nothing is sent.

all_reduce_staged reduces ordinary tensors through a symmetric buffer, for small tensors on GPUs.
"""

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tutti.comm.symmetric.heap import Heap
from tutti.comm.symmetric.symmetric_tensor import Algorithm, SymmetricTensor
from tutti.world.errors import UsageError, did_you_mean

_ALGORITHMS = ("auto", "one_shot", "two_shot", "ring")


def all_reduce(
    t: SymmetricTensor,
    op: str = "sum",
    algorithm: Algorithm = "auto",
    out: torch.Tensor | SymmetricTensor | None = None,
) -> torch.Tensor:
    """Reduce `t` over all ranks of its heap, in place unless `out` is given; returns the result.

    op: sum, mean, product, min, max, band, bor, bxor. All ranks get the same bits. algorithm: with
    one_shot every rank reads the tensors of all ranks (for small tensors); with two_shot each rank
    reduces one part and reads the other ranks' parts (for large tensors); ring passes sums between
    neighbours; auto chooses by size. All algorithms except ring add in rank order, and so give the
    same bits.

    `out` may be any tensor of the shape and dtype of `t`; two_shot and ring need a tensor that
    peers can read: a symmetric tensor of the same heap. Call it on all ranks. A heap runs only one
    collective at a time. On CUDA the collective is enqueued on the current stream.
    """
    _check_symmetric("all_reduce", t)
    if out is None and t.sum_in_place and op == "sum" and algorithm in ("auto", "two_shot"):
        t.sum_in_place()
        return t.local
    if algorithm not in _ALGORITHMS:
        raise UsageError(f"algorithm={algorithm!r}: {did_you_mean(algorithm, _ALGORITHMS)}")
    target, offset = t.local, None
    if isinstance(out, SymmetricTensor):
        if out.heap is not t.heap:
            raise UsageError("out= lies in another heap: give a tensor of the same one")
        target, offset = out.local, out.offset
    elif out is not None:
        target = out
    if target is not t.local:
        _check(target, tuple(t.shape), t)
    t.memory.collectives.all_reduce(
        t.local, t.offset, op, algorithm, target, offset, t.heap.timeout
    )
    return target


def all_gather(t: SymmetricTensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Concatenate all ranks' tensors along the first dimension, in rank order.

    `out`, if given, is contiguous and has size × the elements of `t`, in any shape.
    """
    _check_symmetric("all_gather", t)
    size = t.heap.size
    shape = (size * t.shape[0], *t.shape[1:]) if t.shape else (size,)
    if out is None:
        out = torch.empty(shape, dtype=t.dtype, device=t.local.device)
    elif out.numel() != size * t.count:
        raise UsageError(
            f"out= has {out.numel()} elements: {size} ranks × {t.count} = {size * t.count} needed"
        )
    _check(out, tuple(out.shape), t)
    t.memory.collectives.all_gather(t.local, t.offset, out, t.heap.timeout)
    return out


def reduce_scatter(
    t: SymmetricTensor, op: str = "sum", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Reduce `t` over all ranks; returns this rank's part along the first dimension.

    `t` keeps its values.
    """
    _check_symmetric("reduce_scatter", t)
    size = t.heap.size
    if not t.shape or t.shape[0] % size:
        raise UsageError(
            f"reduce_scatter of shape {tuple(t.shape)} over {size} ranks: the first dimension must "
            f"be a multiple of {size}"
        )
    shape = (t.shape[0] // size, *t.shape[1:])
    if out is None:
        out = torch.empty(shape, dtype=t.dtype, device=t.local.device)
    _check(out, shape, t)
    t.memory.collectives.reduce_scatter(t.local, t.offset, op, out, t.heap.timeout)
    return out


def _check_symmetric(name: str, t: object) -> None:
    if not isinstance(t, SymmetricTensor):
        raise UsageError(
            f"symmetric.{name} of a {type(t).__name__}: make it with heap.empty or heap.zeros, or "
            f"give it to comm.{name}, which takes ordinary tensors"
        )


def _check(out: torch.Tensor, shape: tuple[int, ...], t: SymmetricTensor) -> None:
    if tuple(out.shape) != shape or out.dtype is not t.dtype or out.device != t.local.device:
        raise UsageError(
            f"out= is {tuple(out.shape)} {out.dtype} on {out.device}: {shape} {t.dtype} on "
            f"{t.local.device} needed"
        )
    if not out.is_contiguous():
        raise UsageError("out= is not contiguous: give a contiguous tensor")


# ---- Ordinary tensors through a symmetric buffer ----

STAGED_BYTES = 1 << 20  # above this size NCCL is faster, or nearly as fast

# The buffer of each group, by the group's name: creating one takes milliseconds.
_stages: dict[tuple[str, torch.device], "Stage"] = {}


def all_reduce_staged(
    tensor: torch.Tensor, op: str = "sum", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Reduce an ordinary tensor of at most 1 MiB in place, through a buffer in symmetric memory.

    The first call of a group creates the buffer, on all its ranks; the buffer lives as long as the
    group. With `Stage` you create and close such a buffer yourself.
    """
    world = dist.group.WORLD if group is None else group
    if world is None:
        raise UsageError("all_reduce_staged needs a world: call tutti.init() first")
    key = (world.group_name, tensor.device)
    stage = _stages.get(key)
    if stage is None or stage.heap.group is not world:  # an earlier group had the name
        for old, unused in list(_stages.items()):
            if unused.heap.group not in distributed_c10d._world.pg_map:  # destroyed
                del _stages[old]
                unused.heap.leave()
        stage = _stages[key] = Stage(world, tensor.device)
    return stage.all_reduce(tensor, op)


class Stage:
    """A symmetric buffer of a group for `all_reduce` of ordinary tensors.

    All ranks create and close it together. Use it for gradients and activations of at most 1 MiB
    that are not in symmetric memory; the copy into the buffer is part of the kernel.
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
            return tensor.copy_(self.all_reduce(tensor.contiguous(), op))
        view = self._view(tensor)
        staged = view.memory.collectives.all_reduce_staged
        staged(view.local, view.offset, tensor, op, self.heap.timeout)
        return tensor

    def close(self) -> None:
        """Free the buffer, on all ranks together."""
        self.heap.close()

    def _view(self, tensor: torch.Tensor) -> SymmetricTensor:
        """The buffer's first bytes in the shape of `tensor`."""
        key = (tensor.dtype, tensor.shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= 64:
                self._views.clear()
            buffer = self._buffer
            view = self._views[key] = SymmetricTensor(
                self.heap, buffer.memory, buffer.offset, tuple(tensor.shape), tensor.dtype
            )
        return view
