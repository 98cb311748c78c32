"""Collectives on symmetric tensors. Every rank directly reads the memory of the other ranks.

all_reduce_staged reduces ordinary tensors through a symmetric buffer, for small tensors on GPUs.
"""

import itertools
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tutti.comm.ledger import REDUCTIONS
from tutti.comm.symmetric.heap import Heap
from tutti.comm.symmetric.symmetric_tensor import SymmetricTensor
from tutti.world.errors import UsageError, did_you_mean

Algorithm = Literal["auto", "one_shot", "two_shot", "ring"]
_ALGORITHMS = get_args(Algorithm)


def all_reduce(
    t: SymmetricTensor,
    op: str = "sum",
    algorithm: Algorithm = "auto",
    out: torch.Tensor | SymmetricTensor | None = None,
) -> torch.Tensor:
    """Reduce `t` over all ranks of its heap, in place unless `out` is given, and return the result.

    `op` is sum, mean, product, min, max, band, bor or bxor. The result is bitwise equal on all
    ranks. With algorithm "one_shot", every rank reads the tensors of all ranks (for small tensors).
    With "two_shot", each rank reduces one part and reads the reduced parts of the other ranks (for
    large tensors). With "ring", each rank passes partial results to its neighbour. "auto" chooses
    by size. All algorithms except "ring" reduce in rank order, so their results are equal.

    `out` may be any tensor with the shape and dtype of `t`. For two_shot and ring, `out` must be a
    symmetric tensor of the same heap, because peers read it. All ranks must call this function. A
    heap runs only one collective at a time. On CUDA the collective is enqueued on the current
    stream.
    """
    _check_symmetric("all_reduce", t)
    if out is None and t.sum_in_place and op == "sum" and algorithm in ("auto", "two_shot"):
        t.sum_in_place()
        return t.local
    if algorithm not in _ALGORITHMS:
        raise UsageError(f"algorithm={algorithm!r}: {did_you_mean(algorithm, _ALGORITHMS)}")
    offset = None
    if isinstance(out, SymmetricTensor):
        if out.heap is not t.heap:
            raise UsageError("out= is in another heap: use a tensor of the same heap")
        offset, out = out.offset, out.local
    target = t.local if out is None else _output(out, tuple(t.shape), t)
    t.memory.collectives.all_reduce(t.local, t.offset, op, algorithm, target, offset)
    return target


def all_gather(t: SymmetricTensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Concatenate all ranks' tensors along the first dimension, in rank order.

    `out`, if given, must be contiguous and have heap.size × t.count elements, in any shape.
    """
    _check_symmetric("all_gather", t)
    size = t.heap.size
    shape = (size * t.shape[0], *t.shape[1:]) if t.shape else (size,)
    if out is not None and out.numel() != size * t.count:
        raise UsageError(
            f"out= must have {size} ranks × {t.count} = {size * t.count} elements, "
            f"got {out.numel()}"
        )
    out = _output(out, shape if out is None else tuple(out.shape), t)
    t.memory.collectives.all_gather(t.local, t.offset, out)
    return out


def reduce_scatter(
    t: SymmetricTensor, op: str = "sum", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Reduce `t` over all ranks, split the result along dim 0, and return this rank's part.

    `t` keeps its values.
    """
    _check_symmetric("reduce_scatter", t)
    size = t.heap.size
    if not t.shape or t.shape[0] % size:
        raise UsageError(
            f"reduce_scatter over {size} ranks: the first dimension must be a multiple of {size}, "
            f"got shape {tuple(t.shape)}"
        )
    out = _output(out, (t.shape[0] // size, *t.shape[1:]), t)
    t.memory.collectives.reduce_scatter(t.local, t.offset, op, out)
    return out


def _check_symmetric(name: str, t: object) -> None:
    if not isinstance(t, SymmetricTensor):
        raise UsageError(
            f"symmetric.{name} needs a SymmetricTensor, got {type(t).__name__}. Create it with "
            f"heap.empty or heap.zeros, or use comm.{name} for ordinary tensors"
        )


def _output(out: torch.Tensor | None, shape: tuple[int, ...], t: SymmetricTensor) -> torch.Tensor:
    """Return `out` after checking it, or a new tensor if `out` is None."""
    if out is None:
        return torch.empty(shape, dtype=t.dtype, device=t.local.device)
    if tuple(out.shape) != shape or out.dtype is not t.dtype or out.device != t.local.device:
        raise UsageError(
            f"out= is {tuple(out.shape)} {out.dtype} on {out.device}, but must be {shape} "
            f"{t.dtype} on {t.local.device}"
        )
    if not out.is_contiguous():
        raise UsageError("out= must be contiguous")
    return out


# ---- Shared by the collectives on CPU and CUDA ----


def check_reduction(dtype: torch.dtype, op: str) -> None:
    """Raise UsageError if the reduction `op` is not defined for this dtype."""
    if op not in REDUCTIONS:
        raise UsageError(f"op={op!r}: {did_you_mean(op, REDUCTIONS)}")
    if dtype.is_floating_point and op in ("band", "bor", "bxor"):
        raise UsageError(f"op={op!r} is not defined for {dtype}: use an integer dtype")
    if not dtype.is_floating_point and op == "mean":
        raise UsageError(
            f"op='mean' of {dtype} would round the result: use op='sum' or a float tensor"
        )


def rank_parts(count: int, size: int, itemsize: int) -> list[tuple[int, int]]:
    """Return (first, end) of each rank's part of `count` elements.

    Parts begin at multiples of a cache line (64 bytes).
    """
    per_line = 64 // itemsize
    lines = -(-count // per_line)
    cuts = [min(lines * rank // size * per_line, count) for rank in range(size + 1)]
    return list(itertools.pairwise(cuts))


def out_must_be_symmetric(algorithm: str) -> UsageError:
    """Return the error for an `out` outside the heap, from which peers cannot read the result."""
    return UsageError(
        f"algorithm={algorithm!r} needs an out= that peers can read: use a symmetric tensor of the "
        "same heap, or algorithm='one_shot'"
    )


# ---- Ordinary tensors through a symmetric buffer ----

STAGED_BYTES = 1 << 20  # above this size NCCL is faster, or nearly as fast

# The buffers are kept for later calls, because creating a buffer takes milliseconds.
_stages: dict[tuple[str, torch.device], "Stage"] = {}


def all_reduce_staged(
    tensor: torch.Tensor, op: str = "sum", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Reduce an ordinary tensor of at most 1 MiB in place, through a buffer in symmetric memory.

    The first call for a group creates the buffer on all ranks of the group. The buffer exists as
    long as the group. To create and close the buffer yourself, use `Stage`.
    """
    world = dist.group.WORLD if group is None else group
    if world is None:
        raise UsageError("all_reduce_staged needs a process group: call tutti.init() first")
    key = (world.group_name, tensor.device)
    stage = _stages.get(key)
    if stage is None or stage.heap.group is not world:  # an earlier group had the same name
        for old_key, old_stage in list(_stages.items()):
            if old_stage.heap.group not in distributed_c10d._world.pg_map:  # destroyed group
                del _stages[old_key]
                old_stage.heap.leave()
        stage = _stages[key] = Stage(world, tensor.device)
    return stage.all_reduce(tensor, op)


class Stage:
    """A symmetric buffer of a group for `all_reduce` of ordinary tensors.

    All ranks create and close the Stage together. Use a Stage for gradients and activations of at
    most 1 MiB that are not in symmetric memory. On GPUs, one kernel copies the tensor into the
    buffer and reduces it.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: str | torch.device | None = None
    ) -> None:
        self.heap = Heap(group, bytes=STAGED_BYTES + 4096, device=device, signals=1)
        self._buffer = self.heap.empty(STAGED_BYTES, torch.uint8)
        # Views of the buffer's first bytes, by the dtype and shape of the tensors to reduce.
        self._views: dict[tuple[torch.dtype, torch.Size], SymmetricTensor] = {}

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce `tensor` over all ranks in place, and return `tensor`."""
        if tensor.nbytes > STAGED_BYTES:
            raise UsageError(
                f"a tensor of {tensor.nbytes} bytes exceeds the buffer of {STAGED_BYTES} bytes: "
                "use comm.all_reduce"
            )
        if not tensor.is_contiguous():
            return tensor.copy_(self.all_reduce(tensor.contiguous(), op))
        key = (tensor.dtype, tensor.shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= 64:
                self._views.clear()
            shape, offset = tuple(tensor.shape), self._buffer.offset
            view = self._views[key] = SymmetricTensor(self.heap, offset, shape, tensor.dtype)
        view.memory.collectives.all_reduce_staged(view.local, view.offset, tensor, op)
        return tensor

    def close(self) -> None:
        """Free the buffer on all ranks (collective)."""
        self.heap.close()
