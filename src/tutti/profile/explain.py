"""Explains traces: aligns the clocks, matches the collectives, and splits the steps into parts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tutti.measure.spread import middle_half, quartiles, summarize
from tutti.profile.advice import ProfiledRun, advise, findings_without_gain
from tutti.profile.calibration import (
    calibrate,
    mean_parts,
    recording_cost,
    timed_steps,
    typical_seconds,
)
from tutti.profile.collective_matching import (
    Clock,
    MatchedCollective,
    align_clocks,
    collectives_without_group,
    match_collectives,
    name_axes,
)
from tutti.profile.rank_trace import RankTrace
from tutti.profile.step_breakdown import (
    PARTS,
    StepBreakdown,
    axis_rows,
    bucket_rows,
    comm_rows,
    overlap,
    parts_with_pauses,
    split_step,
    straggler_rows,
)
from tutti.profile.trace_file import is_merged
from tutti.profile.trace_reader import read_rank
from tutti.world.errors import UsageError

# If moving data takes more than this share of the step, communication should be optimized first.
COMM_RATIO_LIMIT = 0.20


@dataclass
class Explanation:
    """The analysis of the recorded steps. `rows()` returns the JSON."""

    traces: list[RankTrace]
    clocks: list[Clock]
    matched: list[MatchedCollective]
    steps: list[StepBreakdown]
    notes: list[str]

    def rows(self) -> dict[str, Any]:
        """Return the content of the JSON: `ranks[]`, `steps[]`, `comm[]`, `stragglers[]`, …"""
        ranks = [self._rank_row(*pair) for pair in zip(self.traces, self.clocks, strict=True)]
        stragglers = straggler_rows([trace.rank for trace in self.traces], self.steps, self.matched)
        run = ProfiledRun(self.traces, self.steps, self.matched, stragglers)
        return {
            "world_size": max(trace.world_size for trace in self.traces),
            "ranks": ranks,
            "steps": [
                {
                    "rank": step.rank,
                    "step": step.step,
                    "seconds": step.seconds,
                    "parts_s": step.parts,
                    "overlap": overlap(step.parts),
                    "gradients_s": step.gradients,
                    "waited_for_s": {str(rank): wait for rank, wait in step.waited_for.items()},
                }
                for step in self.steps
            ],
            "comm": comm_rows(self.traces, self.matched),
            "axes": axis_rows([step for trace in self.traces for step in self._typical(trace)]),
            "buckets": bucket_rows(self.traces),
            "stragglers": stragglers,
            "advice": advise(run),
            "notes": self.notes + _imbalance_notes(ranks) + findings_without_gain(run),
        }

    def _typical(self, trace: RankTrace) -> list[StepBreakdown]:
        """Return the steps of a rank without the shortest quarter and the longest quarter."""
        steps = [step for step in self.steps if step.rank == trace.rank]
        return middle_half(steps, key=lambda step: step.seconds)

    def _rank_row(self, trace: RankTrace, clock: Clock) -> dict[str, Any]:
        steps = [step for step in self.steps if step.rank == trace.rank]
        recorded = mean_parts([parts_with_pauses(step) for step in self._typical(trace)])
        times = timed_steps(trace.capture_info.get("step_s") or [])
        seconds = typical_seconds(times) if times else sum(recorded.values())
        cost = None
        if not trace.on_device:
            cost = recording_cost([trace.capture_info], [trace.operators_in_input])
        # Recording never makes a step faster. If unrecorded steps are slower than recorded steps,
        # the difference is random, so the factor is at most 1.
        typical = calibrate(recorded, seconds, trace.on_device, 1.0, cost)
        parts, length = typical.parts, sum(typical.parts.values())
        spread = {
            name: [typical.scaled(name, part) for part in quartiles([s.parts[name] for s in steps])]
            for name in PARTS
        }
        ratio = (parts["hidden"] + parts["exposed"]) / length
        return {
            "rank": trace.rank,
            "host": trace.host,
            "backend": trace.backend,
            "clock_of": "device" if trace.on_device else "host",
            "steps": len(steps),
            "step_s": summarize([step.seconds for step in steps]) | {"typical": length},
            "recording_overhead": trace.capture_info.get("overhead"),
            "calibration": typical.factor if times or cost else None,
            "parts_s": parts,
            "parts_quartiles_s": spread,
            "parts_share": {name: seconds / length for name, seconds in parts.items()},
            "busy": (parts["compute"] + parts["hidden"]) / length,
            "overlap": overlap(parts),
            "comm_ratio": ratio,
            "comm_ratio_ok": ratio <= COMM_RATIO_LIMIT,
            "memory_bytes": trace.memory_bytes,
            "host_memory_bytes": trace.host_memory_bytes,
            "memory": trace.memory,
            "clock": asdict(clock),
            "trace": str(trace.path),
        }


def trace_files(path: Path) -> list[Path]:
    """Return the trace files in a folder or its subfolder `traces`, or `path` if it is a file."""
    if path.is_file():
        if is_merged(path):
            raise UsageError(
                f"--trace {path} is a merged trace of all ranks, which is only for viewers. Use "
                "the folder that has one trace for each rank."
            )
        return [path]
    inner = path / "traces"
    found = sorted((inner if inner.is_dir() else path).glob("[!.]*"))
    files = [file for file in found if file.name.endswith((".json", ".json.gz"))]
    if files := [file for file in files if not is_merged(file)]:
        return files
    raise UsageError(
        f"--trace {path} contains no trace (*.json or *.json.gz). Use the folder that has one "
        "trace for each rank."
    )


def explain(files: Sequence[Path]) -> Explanation:
    """Read one trace for each rank, and explain the steps."""
    traces: list[RankTrace] = []
    notes: list[str] = []
    for path in files:
        try:
            trace = read_rank(path)
        except (ValueError, OSError) as error:
            notes.append(f"{path.name} is omitted, because it cannot be read: {error}")
            continue
        notes += trace.notes
        if trace.steps:
            traces.append(trace)
        else:
            notes.append(f"{path.name} is omitted, because the trace has no events")
    if not traces:
        raise UsageError(f"no trace could be read in {files[0].parent}: {'; '.join(notes)}")
    traces = _one_trace_per_rank(traces, notes)
    world_size = max(trace.world_size for trace in traces)
    present = {trace.rank for trace in traces}
    if missing := [rank for rank in range(world_size) if rank not in present]:
        shown = ", ".join(map(str, missing[:8])) + " …" * (len(missing) > 8)
        notes.append(
            f"traces of rank{'s' * (len(missing) > 1)} {shown} are missing ({len(present)} of "
            f"{world_size} were found). Time in which a rank waits for a missing rank counts as "
            "moving data."
        )
    if modules := sorted({str(t.capture_info.get("steps_of_module") or "") for t in traces} - {""}):
        notes.append(f"the program has no optimizer, so a step is one call of {', '.join(modules)}")
    for trace in traces:
        name_axes(trace)
    clocks = align_clocks(traces)
    matched = match_collectives(traces)
    hosts = {trace.rank: trace.host for trace in traces}
    if unknown := sorted({hosts[clock.rank] for clock in clocks if clock.measured_s is None}):
        notes.append(
            f"the clock of {', '.join(unknown)} cannot be compared with the clock of "
            f"{traces[0].host}, because no synchronizing collective connects these hosts. The "
            "waiting times between these hosts are correct only if their clocks agree."
        )
    if len(traces) > 1 and (ambiguous := collectives_without_group(traces)):
        notes.append(
            f"{len(ambiguous)} collectives do not name their group in the trace, and the program "
            "has several groups. These collectives are not matched, and waiting in them counts as "
            "moving data. To record gloo's groups, set TORCH_FR_BUFFER_SIZE=20000 before the ranks "
            "start."
        )
    if len(traces) > 1 and not matched:
        notes.append("no collective could be matched between ranks, so stragglers are unknown")
    steps = [split_step(trace, step) for trace in traces for step in trace.steps]
    return Explanation(traces, clocks, matched, steps, notes)


def _one_trace_per_rank(traces: Sequence[RankTrace], notes: list[str]) -> list[RankTrace]:
    """Return the newest trace of each rank, in rank order.

    A torch profiler schedule with `repeat` writes several traces per rank. Traces that do not name
    their rank get the unused rank numbers, in file order.
    """
    newest: dict[int, RankTrace] = {}
    older: list[str] = []
    without_rank = [trace for trace in traces if trace.rank < 0]
    with_rank = [trace for trace in traces if trace.rank >= 0]
    for trace in sorted(with_rank, key=lambda trace: trace.base_ns / 1e9 + trace.steps[0].start):
        if trace.rank in newest:
            older.append(newest[trace.rank].path.name)
        newest[trace.rank] = trace
    if older:
        names = ", ".join(sorted(older))
        notes.append(f"{names} are not used, because newer traces of the same ranks were found")
    if without_rank:
        notes.append("some traces do not name their rank, so ranks are assigned in file order")
    free = [rank for rank in range(len(traces)) if rank not in newest]
    for rank, trace in zip(free, without_rank, strict=False):
        trace.rank = rank
        newest[rank] = trace
    return [newest[rank] for rank in sorted(newest)]


def _imbalance_notes(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Return notes about large differences between ranks in memory and busy time."""
    notes = []
    for name, key in (("memory", "memory_bytes"), ("process memory", "host_memory_bytes")):
        with_memory = sorted((row for row in ranks if row[key]), key=lambda row: row[key])
        if with_memory and with_memory[-1][key] > 1.25 * with_memory[0][key]:
            lowest, highest = with_memory[0], with_memory[-1]
            notes.append(
                f"{name} is uneven: rank {highest['rank']} has {highest[key] / 1e6:,.0f} MB, but "
                f"rank {lowest['rank']} has {lowest[key] / 1e6:,.0f} MB"
            )
    by_busy = sorted(ranks, key=lambda row: row["busy"])
    lowest, highest = by_busy[0], by_busy[-1]
    if highest["busy"] - lowest["busy"] > 0.1 and highest["busy"] > 1.25 * lowest["busy"]:
        notes.append(
            f"ranks are unevenly busy: rank {highest['rank']} computes for "
            f"{100 * highest['busy']:.0f} % of the step, but rank {lowest['rank']} only for "
            f"{100 * lowest['busy']:.0f} %"
        )
    return notes
