"""What a reduction may be asked for, and how a tensor is cut into one piece per rank."""

import itertools

import torch

from tutti.world.errors import UsageError, did_you_mean

OPS = ("sum", "mean", "product", "min", "max", "band", "bor", "bxor")
_LINE = 64  # bytes of a cache line


def check_reduction(dtype: torch.dtype, op: str) -> None:
    """Refuse what has no meaning, before any rank has begun."""
    if op not in OPS:
        raise UsageError(f"op={op!r}: {did_you_mean(op, OPS)}")
    if dtype.is_floating_point and op in ("band", "bor", "bxor"):
        raise UsageError(f"op={op!r} has no meaning for {dtype}: use it with whole numbers")
    if not dtype.is_floating_point and op == "mean":
        raise UsageError(f"op='mean' of {dtype} would round: use sum, or a floating-point tensor")


def pieces(count: int, size: int, itemsize: int) -> list[tuple[int, int]]:
    """First element and end of each rank's piece of `count`; pieces begin on cache lines."""
    per_line = _LINE // itemsize
    lines = -(-count // per_line)
    cuts = [min(lines * rank // size * per_line, count) for rank in range(size + 1)]
    return list(itertools.pairwise(cuts))


def must_be_shared(algorithm: str) -> UsageError:
    """The error when a result that peers must fetch would lie outside the heap."""
    return UsageError(
        f"algorithm={algorithm!r} leaves its result in the heap, for peers to fetch: give as out= "
        "a symmetric tensor of the same heap, or use one_shot"
    )
