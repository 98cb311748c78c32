"""Many figures as four."""

from collections.abc import Sequence
from statistics import mean, median


def spread(values: Sequence[float]) -> dict[str, float]:
    """As the JSON has it."""
    return {"mean": mean(values), "p50": median(values), "min": min(values), "max": max(values)}
