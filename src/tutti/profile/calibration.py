"""Parts of a typical step: from recorded steps, calibrated to steps without the profiler.

Recording slows the host. On a CPU operators and the short gaps around them take longer. On a GPU
only the short gaps between kernels grow, because the host launches kernels later. Recording
does not change how long a program sleeps, waits for data or moves data. Therefore only the slowed
parts are scaled, all by one factor, until the parts add up to a typical step without the profiler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from tutti.measure.spread import middle_half

# A smaller factor is not credible, because recording does not slow operators so much.
_MIN_FACTOR = 0.4
_MIN_TIMED_STEPS = 3  # a median of fewer steps is not robust to one slow step


@dataclass(frozen=True)
class CalibratedStep:
    """The parts of a typical step, in seconds, and the time that they do not explain."""

    parts: dict[str, float]
    factor: float  # seconds without the profiler / recorded seconds, of the slowed parts
    slowed: tuple[str, ...]
    unexplained: float  # seconds without the profiler minus the sum of the parts

    def scaled(self, name: str, seconds: float) -> float:
        return seconds * (self.factor if name in self.slowed else 1.0)


def typical_parts(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean parts over the middle half of the steps by length."""
    return mean_parts(middle_half(steps, key=lambda parts: sum(parts.values())))


def mean_parts(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(parts[name] for parts in steps) for name in steps[0]}


def timed_steps(step_times: Sequence[float]) -> Sequence[float]:
    """Return the second half of the steps before the recording, or nothing if they are too few.

    The first steps of a program are slower than the others.
    """
    later = step_times[len(step_times) // 2 :]
    return later if len(later) >= _MIN_TIMED_STEPS else ()


def typical_seconds(step_times: Sequence[float]) -> float:
    return fmean(middle_half(step_times, key=float))


def calibrate(
    recorded: Mapping[str, float], seconds: float, on_device: bool, max_factor: float
) -> CalibratedStep:
    """Scale the slowed parts, so that all parts add up to `seconds`, if the factor is credible.

    The part `pause`, the gaps that are too long to be due to recording, is added to `host_gap`.
    """
    slowed = ("host_gap",) if on_device else ("compute", "hidden", "host_gap", "rest")
    slowed_seconds = sum(recorded.get(name, 0.0) for name in slowed)
    excess = seconds - sum(recorded.values())
    factor = 1 + excess / slowed_seconds if slowed_seconds else 1.0
    factor = min(max(factor, _MIN_FACTOR), max_factor)
    parts = {name: part * (factor if name in slowed else 1) for name, part in recorded.items()}
    parts["host_gap"] += parts.pop("pause", 0.0)
    return CalibratedStep(parts, factor, slowed, seconds - sum(parts.values()))
