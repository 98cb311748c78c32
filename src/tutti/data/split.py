"""How a batch is divided among ranks: pure arithmetic on counts, the same on every rank.

A division is a list with one count per rank. The counts always add up to the batch, so no sample
is lost or duplicated; the gradient is exact if each rank's sum is divided by the global count.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from tutti.data import DataError


def even(count: int, ranks: int) -> list[int]:
    """Divide `count` samples evenly; if there is a remainder, the first ranks take one more."""
    if ranks < 1:
        raise DataError(f"a batch of {count} samples over {ranks} ranks: use 1 rank or more")
    if count < 0:
        raise DataError(f"a batch of {count} samples: use 0 or more")
    least, extra = divmod(count, ranks)
    return [least + (rank < extra) for rank in range(ranks)]


def weighted(count: int, shares: Sequence[float], minimum: int = 0) -> list[int]:
    """Divide `count` samples in proportion to `shares`: largest remainder, ties to the lower rank.

    No rank gets less than `minimum`, unless there are too few samples for that (the short last
    batch of an epoch): then the minimum is 0.
    """
    return list(_weighted(count, tuple(shares), minimum))


# Cached, because exact arithmetic with fractions is slow and a run makes the same call every step.
@lru_cache(maxsize=256)
def _weighted(count: int, shares: tuple[float, ...], minimum: int) -> tuple[int, ...]:
    _check_shares(shares)
    if count < 0:
        raise DataError(f"a batch of {count} samples: use 0 or more")
    if count < minimum * len(shares):
        minimum = 0
    weights = [Fraction(share) for share in shares]
    counts = [minimum] * len(shares)
    free = list(range(len(shares)))
    # Ranks that would get less than the minimum get the minimum, and the others divide the rest.
    # Each iteration fixes at least one more rank, so the loop ends.
    while True:
        fixed = len(shares) - len(free)
        division = _largest_remainder(count - fixed * minimum, [weights[rank] for rank in free])
        short = {rank for rank, part in zip(free, division, strict=True) if part < minimum}
        if not short:
            break
        free = [rank for rank in free if rank not in short]
    for rank, part in zip(free, division, strict=True):
        counts[rank] = part
    return tuple(counts)


def _largest_remainder(count: int, weights: Sequence[Fraction]) -> list[int]:
    total = sum(weights)
    quotas = [count * weight / total for weight in weights]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(counts)), key=lambda i: (counts[i] - quotas[i], i))
    for i in by_remainder[: count - sum(counts)]:
        counts[i] += 1
    return counts


def measured_shares(
    rates: Sequence[float], previous: Sequence[float] | None = None, smoothing: float = 0.5
) -> list[float]:
    """Shares, summing to 1, from each rank's measured samples per second.

    `smoothing` is the weight of `previous`: with 0 only the new measurement counts, with values
    near 1 the shares change slowly. A slow rank gets fewer samples, so that all ranks reach the
    all-reduce at the same time. Pass the same gathered rates on every rank: otherwise the ranks
    would divide the batch differently.
    """
    if not 0 <= smoothing < 1:
        raise DataError(f"smoothing {smoothing}: it must be in [0, 1)")
    _check_shares(rates, "measured samples/s")
    total = math.fsum(rates)
    now = [rate / total for rate in rates]
    if previous is None:
        return now
    _check_shares(previous)
    if len(previous) != len(now):
        raise DataError(f"{len(now)} measured ranks but {len(previous)} previous shares")
    previous_total = math.fsum(previous)
    mixed = [
        (1 - smoothing) * new + smoothing * old / previous_total
        for new, old in zip(now, previous, strict=True)
    ]
    return [share / math.fsum(mixed) for share in mixed]


def bounds(counts: Sequence[int], rank: int) -> tuple[int, int]:
    """The start and stop of the samples of `rank` in a batch divided into `counts`."""
    start = sum(counts[:rank])
    return start, start + counts[rank]


def _check_shares(shares: Sequence[float], what: str = "shares") -> None:
    if not shares:
        raise DataError(f"no {what}: give one per rank")
    for rank, share in enumerate(shares):
        if not (math.isfinite(share) and share > 0):
            raise DataError(f"{what}: rank {rank} has {share}, each must be finite and above 0")
