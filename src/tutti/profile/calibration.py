"""Computes the parts of a typical step from recorded steps, and removes the cost of recording.

Recording slows the host. On a CPU, operators and the short gaps around them take longer. On a GPU,
only the short gaps between kernels grow, because the host launches kernels later. Recording does
not change how long a program sleeps, waits for data or moves data. Therefore only the slowed parts
are scaled, all by the same factor.

On a CPU, the factor is computed from the CPU seconds of recorded and unrecorded steps
(`recording_cpu_seconds`). CPU seconds do not include waiting, and other programs hardly change
them. On a GPU, and in traces without CPU seconds, the factor is chosen so that the parts add up to
the time of a typical step without the profiler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from tutti.measure.spread import middle_half

# The smallest accepted factor. Recording does not slow operators by more than 1 / _MIN_FACTOR.
_MIN_FACTOR = 0.4
_DIFFERENT_COST = 0.25  # recording costs of ranks that differ by a smaller share count as equal
_STEPS_BEFORE = 3  # page faults are taken from this many steps before the recording
_MIN_TIMED_STEPS = 3  # with fewer steps, one slow step would change the median


@dataclass(frozen=True)
class CalibratedStep:
    """The parts of a typical step in seconds, and the step time that the parts do not explain."""

    parts: dict[str, float]
    factor: float  # of the slowed parts: (seconds without the profiler) / (recorded seconds)
    slowed: tuple[str, ...]
    unexplained: float  # seconds without the profiler minus the sum of the parts

    def scaled(self, name: str, seconds: float) -> float:
        return seconds * (self.factor if name in self.slowed else 1.0)


def typical_parts(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each part over the steps whose length is in the middle half."""
    return mean_parts(middle_half(steps, key=lambda parts: sum(parts.values())))


def mean_parts(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(parts[name] for parts in steps) for name in steps[0]}


def timed_steps(step_times: Sequence[float]) -> Sequence[float]:
    """Return the second half of the step times, or () if this is fewer than _MIN_TIMED_STEPS steps.

    The first half is left out, because the first steps of a program are slower than later steps.
    """
    later = step_times[len(step_times) // 2 :]
    return later if len(later) >= _MIN_TIMED_STEPS else ()


def typical_seconds(step_times: Sequence[float]) -> float:
    return fmean(middle_half(step_times, key=float))


@dataclass(frozen=True)
class RecordingCost:
    """The seconds that recording adds to the parts of a step.

    Recording slows some ranks more than others. `own` and `input` are the seconds on the rank that
    is slowed least. The other ranks are slowed by up to `wait` seconds more, and the least slowed
    rank waits for them.
    """

    own: float  # added to compute, gaps and the code around operators
    input: float  # added to operators inside the data loader
    wait: float


def recording_cost(
    infos: Sequence[Mapping[str, Any]], operators_in_input: Sequence[float]
) -> RecordingCost | None:
    """Return the cost of recording, or None if it is unknown.

    `infos` and `operators_in_input` have the `capture_info` and `operators_in_input` of each trace.
    The cost is proportional to the number of operators, so ranks that run more operators are slowed
    more. If the costs of the ranks are about equal, their differences are random and count as 0.
    """
    costs = [recording_cpu_seconds(info) for info in infos]
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs) or not known:
        return None
    least, most = min(known), max(known)
    share = fmean(operators_in_input)
    different = most - least if most - least > _DIFFERENT_COST * most else 0.0
    return RecordingCost(least * (1 - share), least * share, different)


def recording_cpu_seconds(info: Mapping[str, Any]) -> float | None:
    """Return the CPU seconds that recording adds to a step, or None if unknown.

    `info` is the `capture_info` of a trace. Steps before the recording may have page faults that
    later steps do not have (see `avoided_page_fault_seconds`). The time of these page faults is
    subtracted from the unrecorded steps.
    """
    unrecorded, recorded = info.get("cpu_s") or ((), ())
    faults, later_faults = info.get("page_faults") or ((), ())
    if count := info.get("interleaved", 0):
        unrecorded, faults = unrecorded[-count:], ()
    else:
        unrecorded, faults = timed_steps(unrecorded), timed_steps(faults)
    if not unrecorded or not recorded:
        return None
    before = float(median(unrecorded))
    if faults and later_faults:
        avoided = max(0.0, float(median(faults)) - float(median(later_faults)))
        before -= avoided * float(info.get("page_fault_s") or 0.0)
    return max(0.0, float(median(recorded)) - before)


def avoided_page_fault_seconds(info: Mapping[str, Any]) -> float:
    """Return the seconds per step of page faults that interleaved steps no longer have.

    Before the recording, capture.py adds memory to the heap for the profiler's events. The program
    can also use this memory, so page faults of its earlier steps no longer occur.
    """
    if not (count := info.get("interleaved", 0)):
        return 0.0
    faults, _ = info["page_faults"]
    before = faults[:-count][-_STEPS_BEFORE:]
    if not before:
        return 0.0
    avoided = float(median(before)) - float(median(faults[-count:]))
    return max(0.0, avoided) * float(info.get("page_fault_s") or 0.0)


def calibrate(
    recorded: Mapping[str, float],
    seconds: float,
    on_device: bool,
    max_factor: float,
    recording: RecordingCost | None = None,
) -> CalibratedStep:
    """Scale the slowed parts by one factor, to remove the time that recording adds.

    If `recording` is None, the added time is unknown, and the factor is chosen so that all parts
    add up to `seconds`. The factor is limited to the range from _MIN_FACTOR to `max_factor`.
    `unexplained` is `seconds` minus the sum of the scaled parts. The part `pause` has the gaps that
    are too long to be caused by recording. It is added to `host_gap` without scaling.
    """
    slowed = ("host_gap",) if on_device else ("compute", "hidden", "host_gap", "rest")
    slowed_seconds = sum(recorded.get(name, 0.0) for name in slowed)
    excess = seconds - sum(recorded.values()) if recording is None else -recording.own
    factor = 1 + excess / slowed_seconds if slowed_seconds else 1.0
    factor = min(max(factor, _MIN_FACTOR), max_factor)
    parts = {name: part * (factor if name in slowed else 1) for name, part in recorded.items()}
    if recording is not None:
        parts["input"] -= min(parts["input"], recording.input)
        parts["wait"] -= min(max(0.0, parts["wait"]), recording.wait)
    parts["host_gap"] += parts.pop("pause", 0.0)
    return CalibratedStep(parts, factor, slowed, seconds - sum(parts.values()))
