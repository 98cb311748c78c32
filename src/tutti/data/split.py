"""How a batch is cut among ranks: pure arithmetic on counts, the same on every rank.

A cut is a list with one count per rank. The counts always add up to the batch, so no sample is lost
or doubled; the gradient stays exact as long as each rank's sum is divided by the global count.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from tutti.data.errors import DataError


def even(count: int, ranks: int) -> list[int]:
    """`count` samples for `ranks` ranks; the first ones take one more where it does not divide."""
    if ranks < 1:
        raise DataError(f"a batch of {count} samples cannot be cut among {ranks} ranks: use >= 1")
    if count < 0:
        raise DataError(f"a batch cannot have {count} samples: use 0 or more")
    least, extra = divmod(count, ranks)
    return [least + (rank < extra) for rank in range(ranks)]


def weighted(count: int, shares: Sequence[float], minimum: int = 0) -> list[int]:
    """`count` samples in proportion to `shares`, by largest remainder; ties go to the lower rank.

    No rank falls below `minimum`, unless there are too few samples for that (the ragged end of an
    epoch): then the minimum is waived.
    """
    return list(_weighted(count, tuple(shares), minimum))


# Cached: the arithmetic is in fractions, to be exact, and a run asks the same question every step.
@lru_cache(maxsize=256)
def _weighted(count: int, shares: tuple[float, ...], minimum: int) -> tuple[int, ...]:
    _check_shares(shares)
    if count < 0:
        raise DataError(f"a batch cannot have {count} samples: use 0 or more")
    if count < minimum * len(shares):
        minimum = 0
    weights = [Fraction(share) for share in shares]
    parts = [minimum] * len(shares)
    free = list(range(len(shares)))
    # Whoever would get less than the minimum is held at it, and the others share what is left.
    # Each round holds at least one more rank, so this ends.
    while True:
        held = len(shares) - len(free)
        cut = _largest_remainder(count - held * minimum, [weights[rank] for rank in free])
        short = {rank for rank, part in zip(free, cut, strict=True) if part < minimum}
        if not short:
            break
        free = [rank for rank in free if rank not in short]
    for rank, part in zip(free, cut, strict=True):
        parts[rank] = part
    return tuple(parts)


def _largest_remainder(count: int, weights: Sequence[Fraction]) -> list[int]:
    total = sum(weights)
    quotas = [count * weight / total for weight in weights]
    parts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - quotas[i], i))
    for i in by_remainder[: count - sum(parts)]:
        parts[i] += 1
    return parts


def measured_shares(
    rates: Sequence[float], previous: Sequence[float] | None = None, smoothing: float = 0.5
) -> list[float]:
    """Shares, summing to 1, from what each rank was measured to do in samples per second.

    `smoothing` is how much of `previous` is kept: 0 follows each measurement, values near 1 change
    slowly. A slow rank gets fewer samples, so all ranks reach the all-reduce together. The rates of
    all ranks must be the same on all ranks (gather them), or the ranks would cut differently.
    """
    if not 0 <= smoothing < 1:
        raise DataError(f"smoothing {smoothing} is outside 0 <= smoothing < 1")
    _check_shares(rates, "measured samples/s")
    total = math.fsum(rates)
    now = [rate / total for rate in rates]
    if previous is None:
        return now
    _check_shares(previous)
    if len(previous) != len(now):
        raise DataError(f"{len(now)} measured ranks against {len(previous)} earlier shares")
    whole = math.fsum(previous)
    mixed = [
        (1 - smoothing) * new + smoothing * old / whole
        for new, old in zip(now, previous, strict=True)
    ]
    return [share / math.fsum(mixed) for share in mixed]


def microbatches(count: int, accumulation: int) -> list[int]:
    """One rank's samples of a step in `accumulation` runs, sizes differing by at most one.

    Each weighs its size over the step's global count, not 1/accumulation.
    """
    return even(count, accumulation)


def bounds(parts: Sequence[int], rank: int) -> tuple[int, int]:
    """Where rank `rank` starts and stops in a batch cut into `parts`."""
    start = sum(parts[:rank])
    return start, start + parts[rank]


def shard(count: int, rank: int, ranks: int) -> range:
    """The samples of a data set that `rank` looks at once; empty where there are more ranks."""
    if not 0 <= rank < ranks:
        raise DataError(f"rank {rank} is not one of {ranks} ranks")
    return range(*bounds(even(count, ranks), rank))


def _check_shares(shares: Sequence[float], what: str = "shares") -> None:
    if not shares:
        raise DataError(f"no {what}: give one per rank")
    for rank, share in enumerate(shares):
        if not (math.isfinite(share) and share > 0):
            raise DataError(f"{what}: rank {rank} has {share}, each must be finite and above 0")
