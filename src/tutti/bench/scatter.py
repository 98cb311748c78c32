"""A few samples in short: how far they scatter about their middle, in digits that count."""

from collections.abc import Sequence
from statistics import median


def scatter(samples: Sequence[float]) -> float:
    """1.4826 × MAD / median: for a normal distribution, σ as a part of the middle; 0 for one."""
    middle = median(samples)
    deviation = median(abs(each - middle) for each in samples)
    return 1.4826 * deviation / abs(middle) if middle else 0.0


def significant(value: float) -> float:
    """Five digits: a slow link's figure keeps as many as a fast one's."""
    return float(f"{value:.5g}")
