"""Collectives on symmetric tensors: every rank reads the others' memory, nothing is sent."""

import torch

from tutti.comm.symmetric.memory import Algorithm
from tutti.comm.symmetric.tensor import SymmetricTensor
from tutti.world.errors import UsageError, did_you_mean

_ALGORITHMS = ("auto", "one_shot", "two_shot", "ring")


def all_reduce(
    t: SymmetricTensor,
    op: str = "sum",
    algorithm: Algorithm = "auto",
    out: torch.Tensor | SymmetricTensor | None = None,
) -> torch.Tensor:
    """Reduce `t` over all ranks of its heap, in place unless `out` is given; returns the result.

    op: sum, mean, product, min, max, band, bor, bxor. All ranks get the same bits. algorithm:
    one_shot has every rank read everything, for small tensors; two_shot has each rank reduce one
    piece and fetch the others', for large ones; ring passes sums between neighbours. auto chooses
    by size. All but ring add in rank order, and give the same bits.

    `out` may be any tensor of the shape and dtype of `t`; two_shot and ring need one that peers can
    read, a symmetric tensor of the same heap. Call it on all ranks; one collective of a heap at a
    time. On CUDA it is enqueued on the current stream.
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
    t.memory.all_reduce(t.local, t.offset, op, algorithm, target, offset, t.heap.timeout)
    return target


def all_gather(t: SymmetricTensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """All ranks' tensors one after the other along the first dimension, in rank order.

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
    t.memory.all_gather(t.local, t.offset, out, t.heap.timeout)
    return out


def reduce_scatter(
    t: SymmetricTensor, op: str = "sum", out: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's part, along the first dimension, of `t` reduced over all ranks. `t` stays."""
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
    t.memory.reduce_scatter(t.local, t.offset, op, out, t.heap.timeout)
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
