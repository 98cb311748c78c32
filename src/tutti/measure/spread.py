"""Statistics of samples: percentiles, summaries for JSON, and robust measures of spread."""

from collections.abc import Callable, Sequence
from statistics import fmean, median, pstdev
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return a percentile by linear interpolation. The samples need not be sorted."""
    return float(np.percentile(samples, percent))


def middle_half(values: Sequence[T], key: Callable[[T], float]) -> list[T]:
    """Return the values without the lowest quarter and the highest quarter.

    The mean of the middle half is robust to outliers, like the median. Unlike medians, means can be
    added: if each value is a sum of parts, the means of the parts add up to the mean of the values.
    """
    dropped = len(values) // 4
    return sorted(values, key=key)[dropped : len(values) - dropped]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    return percentile(values, 25), percentile(values, 75)


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Return mean, p50, min and max in the unit of the values."""
    return {"mean": fmean(values), "p50": median(values), "min": min(values), "max": max(values)}


def summarize_us(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p95, p99, min and mean in µs, and cv, the standard deviation / mean."""
    mean = fmean(seconds)
    p50, p95, p99 = np.percentile(seconds, (50, 95, 99)).tolist()
    times = {"p50": p50, "p95": p95, "p99": p99, "min": min(seconds), "mean": mean}
    return {name: round(value * 1e6, 3) for name, value in times.items()} | {
        "cv": round(pstdev(seconds, mean) / mean, 4) if mean > 0 else 0.0
    }


def relative_mad(samples: Sequence[float]) -> float:
    """Return 1.4826 × median absolute deviation / median, a robust estimate of σ / mean."""
    middle = median(samples)
    deviation = median(abs(sample - middle) for sample in samples)
    return 1.4826 * deviation / abs(middle) if middle else 0.0


def relative_range(values: Sequence[float]) -> float | None:
    """Return (max - min) / mean, or None if there are no values or the mean is 0."""
    mean = fmean(values) if values else 0.0
    return (max(values) - min(values)) / mean if mean else None


def round_significant(value: float, digits: int = 5) -> float:
    """Return the value rounded to this number of significant digits."""
    return float(f"{value:.{digits}g}")
