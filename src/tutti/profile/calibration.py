"""Computes the parts of a typical step from recorded steps, and corrects them for the profiler.

Recording slows the host. On a CPU operators and the short gaps around them take longer. On a GPU
only the short gaps between kernels grow, because the host launches kernels later. Recording
does not change how long a program sleeps, waits for data or moves data. Therefore only the slowed
parts are scaled, and all of them by the same factor. The factor is chosen so that the sum of all
parts is the time of a typical step without the profiler.
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
    factor: float  # for the slowed parts: seconds without the profiler / recorded seconds
    slowed: tuple[str, ...]
    unexplained: float  # seconds without the profiler minus the sum of the parts

    def scaled(self, name: str, seconds: float) -> float:
        return seconds * (self.factor if name in self.slowed else 1.0)


def typical_parts(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sort the steps by length, and return the mean of each part over the middle half."""
    return mean_parts(middle_half(steps, key=lambda parts: sum(parts.values())))


def mean_parts(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(parts[name] for parts in steps) for name in steps[0]}


def timed_steps(step_times: Sequence[float]) -> Sequence[float]:
    """Return the second half of the step times before the recording, or () if it is too short.

    The first half is left out, because the first steps of a program are slower than later steps.
    """
    later = step_times[len(step_times) // 2 :]
    return later if len(later) >= _MIN_TIMED_STEPS else ()


def typical_seconds(step_times: Sequence[float]) -> float:
    return fmean(middle_half(step_times, key=float))


def calibrate(
    recorded: Mapping[str, float], seconds: float, on_device: bool, max_factor: float
) -> CalibratedStep:
    """Scale the slowed parts so that all parts add up to `seconds`.

    The factor is limited to credible values, so a difference may remain (`unexplained`). The part
    `pause` has the gaps that are too long to be caused by recording. It is added to `host_gap`
    without scaling.
    """
    slowed = ("host_gap",) if on_device else ("compute", "hidden", "host_gap", "rest")
    slowed_seconds = sum(recorded.get(name, 0.0) for name in slowed)
    excess = seconds - sum(recorded.values())
    factor = 1 + excess / slowed_seconds if slowed_seconds else 1.0
    factor = min(max(factor, _MIN_FACTOR), max_factor)
    parts = {name: part * (factor if name in slowed else 1) for name, part in recorded.items()}
    parts["host_gap"] += parts.pop("pause", 0.0)
    return CalibratedStep(parts, factor, slowed, seconds - sum(parts.values()))
