"""Divides a batch among ranks: every rank computes the same list with one count per rank.

The counts always add up to the batch, so no sample is lost or duplicated.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from tutti.data import DataError


def even(count: int, ranks: int) -> list[int]:
    """Divide `count` samples evenly. If a remainder is left, the first ranks get one more."""
    if ranks < 1 or count < 0:
        raise DataError(f"a batch of {count} samples cannot be divided over {ranks} ranks")
    quotient, remainder = divmod(count, ranks)
    return [quotient + (rank < remainder) for rank in range(ranks)]


def weighted(count: int, shares: Sequence[float], minimum: int = 0) -> list[int]:
    """Divide `count` samples in proportion to `shares`, by the method of largest remainders.

    Ties go to the lower rank. No rank gets less than `minimum`. If there are too few samples (in
    the short last batch of an epoch), the minimum is 0.
    """
    return list(_weighted(count, tuple(shares), minimum))


# Cache the result, because exact fractions are slow, and each step of a run makes the same call.
@lru_cache(maxsize=256)
def _weighted(count: int, shares: tuple[float, ...], minimum: int) -> tuple[int, ...]:
    _check_shares(shares)
    if count < 0:
        raise DataError(f"a batch cannot have {count} samples")
    if count < minimum * len(shares):
        minimum = 0
    weights = [Fraction(share) for share in shares]
    free = list(range(len(shares)))
    # Ranks that would get less than the minimum get the minimum. The other ranks divide the rest.
    # Each iteration fixes at least one more rank, so the loop ends.
    while True:
        fixed = len(shares) - len(free)
        parts = _largest_remainder(count - fixed * minimum, [weights[rank] for rank in free])
        counts = dict(zip(free, parts, strict=True))
        if all(part >= minimum for part in parts):
            return tuple(counts.get(rank, minimum) for rank in range(len(shares)))
        free = [rank for rank in free if counts[rank] >= minimum]


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
    """Return shares, which sum to 1, from each rank's measured samples per second.

    A slow rank gets fewer samples, so that all ranks reach the all-reduce at the same time.
    `smoothing` is the weight of `previous`. All ranks must pass the same rates.
    """
    if not 0 <= smoothing < 1:
        raise DataError(f"smoothing must be at least 0 and less than 1, got {smoothing}")
    _check_shares(rates, "measured samples/s")
    if previous is None:
        previous, smoothing = rates, 0.0
    _check_shares(previous)
    if len(previous) != len(rates):
        raise DataError(f"{len(rates)} measured ranks but {len(previous)} previous shares")
    total, previous_total = math.fsum(rates), math.fsum(previous)
    mixed = [
        (1 - smoothing) * rate / total + smoothing * share / previous_total
        for rate, share in zip(rates, previous, strict=True)
    ]
    return [share / math.fsum(mixed) for share in mixed]


def bounds(counts: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the start and stop of the samples of `rank` in a batch divided into `counts`."""
    start = sum(counts[:rank])
    return start, start + counts[rank]


def _check_shares(shares: Sequence[float], what: str = "shares") -> None:
    if not shares:
        raise DataError(f"there are no {what}: give one per rank")
    for rank, share in enumerate(shares):
        if not (math.isfinite(share) and share > 0):
            raise DataError(f"{what} must be finite and above 0, but rank {rank} has {share}")
