"""A sample of times, in short: the middle, the tail and how far they scatter."""

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between the two nearest samples, in proportion; `ordered` ascends."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread_us(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99, min and mean in µs, and cv: the standard deviation as a part of the mean."""
    ordered = sorted(seconds)
    mean = sum(ordered) / len(ordered)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in ordered) / len(ordered))
    microseconds = {
        "p50": percentile(ordered, 50),
        "p95": percentile(ordered, 95),
        "p99": percentile(ordered, 99),
        "min": ordered[0],
        "mean": mean,
    }
    return {name: round(value * 1e6, 3) for name, value in microseconds.items()} | {
        "cv": round(deviation / mean, 4) if mean > 0 else 0.0
    }
