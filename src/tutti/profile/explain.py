"""From a folder of traces to an explanation: read, align, match, split, count."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from tutti.measure.spread import summarize
from tutti.profile.advice import Case, advise
from tutti.profile.axes import by_axis, name_axes
from tutti.profile.buckets import bucket_rows
from tutti.profile.clocks import Clock, align
from tutti.profile.matching import Meeting, match, without_group
from tutti.profile.parts import PARTS, StepParts, split_step
from tutti.profile.rank_trace import RankTrace
from tutti.profile.reading import read_rank
from tutti.profile.stragglers import stragglers
from tutti.profile.trace_file import is_merged
from tutti.profile.traffic import traffic
from tutti.world.errors import UsageError

# Above this share of the step, communication deserves attention before anything else.
RATIO_LIMIT = 0.20


@dataclass
class Explanation:
    """All that is known of the steps; `rows()` is its JSON."""

    traces: list[RankTrace]
    clocks: list[Clock]
    meetings: list[Meeting]
    steps: list[StepParts]
    notes: list[str]

    def rows(self) -> dict[str, Any]:
        """ranks[], steps[], comm[], stragglers[], advice[], and what stands beside them."""
        ranks = [self._rank(*each) for each in zip(self.traces, self.clocks, strict=True)]
        late = stragglers([trace.rank for trace in self.traces], self.steps, self.meetings)
        return {
            "world_size": max(trace.world_size for trace in self.traces),
            "ranks": ranks,
            "steps": [_step_row(each) for each in self.steps],
            "comm": traffic(self.traces, self.meetings),
            "axes": by_axis(self.steps),
            "buckets": bucket_rows(self.traces),
            "stragglers": late,
            "advice": advise(Case(self.traces, self.steps, self.meetings, late)),
            "notes": self.notes + _uneven(ranks),
        }

    def _rank(self, trace: RankTrace, clock: Clock) -> dict[str, Any]:
        mine = [each for each in self.steps if each.rank == trace.rank]
        lengths = [each.seconds for each in mine]
        parts = {name: mean(each.parts[name] for each in mine) for name in PARTS}
        whole = mean(lengths)
        talking = sum(parts[name] for name in ("hidden", "exposed", "wait", "bubble"))
        ratio = (parts["hidden"] + parts["exposed"]) / whole
        return {
            "rank": trace.rank,
            "host": trace.host,
            "backend": trace.backend,
            "clock_of": "device" if trace.on_device else "host",
            "steps": len(mine),
            "step_s": summarize(lengths),
            "recording_overhead": trace.about.get("overhead"),
            "parts_s": parts,
            "parts_share": {name: seconds / whole for name, seconds in parts.items()},
            "busy": (parts["compute"] + parts["hidden"]) / whole,
            "overlap": parts["hidden"] / talking if talking else None,
            "comm_ratio": ratio,
            "comm_ratio_ok": ratio <= RATIO_LIMIT,
            "memory_bytes": trace.memory_bytes,
            "host_memory_bytes": trace.host_memory_bytes,
            "clock": asdict(clock),
            "trace": str(trace.path),
        }


def trace_files(directory: Path) -> list[Path]:
    """The traces in a folder, or in the folder `traces` of a run; or the one file named."""
    if directory.is_file() and is_merged(directory):
        raise UsageError(
            f"--trace {directory}: it holds all ranks together, for a viewer: name the folder of "
            "the traces that it was made from"
        )
    if directory.is_file():
        return [directory]
    inner = directory / "traces"
    folder = inner if inner.is_dir() else directory
    files = [
        path
        for path in sorted(folder.glob("*"))
        if re.search(r"\.json(\.gz)?$", path.name)
        and not path.name.startswith(".")
        and not is_merged(path)
    ]
    if not files:
        raise UsageError(
            f"--trace {directory}: no *.json or *.json.gz there: name the folder that holds one "
            "trace for each rank"
        )
    return files


def explain(files: Sequence[Path]) -> Explanation:
    """Read traces, one for each rank, and explain their steps."""
    traces: list[RankTrace] = []
    notes: list[str] = []
    for path in files:
        try:
            trace = read_rank(path)
        except (ValueError, OSError) as error:
            notes.append(f"{path.name} is left out: {error}")
            continue
        notes += trace.notes
        if not trace.steps:
            notes.append(f"{path.name} is left out: it has no events")
        else:
            traces.append(trace)
    if not traces:
        raise UsageError("no trace could be read: " + "; ".join(notes))
    traces = _one_of_each(traces, notes)
    size = max(trace.world_size for trace in traces)
    there = {trace.rank for trace in traces}
    missing = [rank for rank in range(size) if rank not in there]
    if missing:
        notes.append(
            f"traces of {_ranks(missing)} are missing ({len(there)} of {size} are here): waiting "
            "for those counts as moving data"
        )
    for trace in traces:
        name_axes(trace)
    clocks = align(traces)
    hosts = {trace.rank: trace.host for trace in traces}
    meetings = match(traces)
    if lost := sorted({hosts[each.rank] for each in clocks if each.measured_s is None}):
        notes.append(
            f"the clock of {', '.join(lost)} cannot be compared with that of {traces[0].host}, for "
            "no synchronising collective leads there: between them waiting is as the clocks say"
        )
    if len(traces) > 1 and (unclear := without_group(traces)):
        notes.append(
            f"{len(unclear)} communications do not say which group they are of, and there are "
            "several: they are not matched, and waiting in them counts as moving data; with "
            "TORCH_FR_BUFFER_SIZE=20000 set before ranks start, gloo's say it to `tutti profile`"
        )
    if len(traces) > 1 and not meetings:
        notes.append("no collective could be matched between ranks: nobody is called late")
    steps = [split_step(trace, step) for trace in traces for step in trace.steps]
    return Explanation(traces, clocks, meetings, steps, notes)


def _uneven(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """What differs between ranks more than chance would have it."""
    notes = []
    for name, key in (("memory", "memory_bytes"), ("process memory", "host_memory_bytes")):
        known = [each for each in ranks if each[key]]
        least, most = _ends(known, key)
        if known and most[key] > 1.25 * least[key]:
            notes.append(
                f"{name} is uneven: rank {most['rank']} has {most[key] / 1e6:,.0f} MB, rank "
                f"{least['rank']} {least[key] / 1e6:,.0f} MB"
            )
    least, most = _ends(ranks, "busy")
    if most["busy"] - least["busy"] > 0.1 and most["busy"] > 1.25 * least["busy"]:
        notes.append(
            f"ranks are unevenly busy: rank {most['rank']} computes {100 * most['busy']:.0f} % of "
            f"the step, rank {least['rank']} {100 * least['busy']:.0f} %"
        )
    return notes


def _ends(rows: Sequence[dict[str, Any]], key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    ordered = sorted(rows, key=lambda each: float(each[key]))
    return (ordered[0], ordered[-1]) if ordered else ({}, {})


def _one_of_each(traces: Sequence[RankTrace], notes: list[str]) -> list[RankTrace]:
    """Of several traces of a rank (a profiler with `repeat` writes them) the newest, by rank; a
    trace that does not say whose it is gets a rank that is free, in the order of the files.
    """
    newest: dict[int, RankTrace] = {}
    older: list[RankTrace] = []
    unknown = [trace for trace in traces if trace.rank < 0]
    for trace in sorted(traces, key=lambda each: each.base_ns / 1e9 + each.steps[0].start):
        if trace.rank < 0:
            continue
        if trace.rank in newest:
            older.append(newest[trace.rank])
        newest[trace.rank] = trace
    if older:
        names = ", ".join(sorted(trace.path.name for trace in older))
        notes.append(f"{names}: left out, as newer traces of the same ranks are here")
    if unknown:
        notes.append("traces do not say which rank is which: files are numbered in their order")
    free = (rank for rank in range(len(traces)) if rank not in newest)
    for rank, trace in zip(list(free), unknown, strict=False):
        trace.rank = rank
        newest[rank] = trace
    return [newest[rank] for rank in sorted(newest)]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{' …' if len(ranks) > 8 else ''}"


def _step_row(each: StepParts) -> dict[str, Any]:
    return {
        "rank": each.rank,
        "step": each.step,
        "seconds": each.seconds,
        "parts_s": each.parts,
        "overlap": each.overlap,
        "gradients_s": each.gradients,
        "waited_for_s": {str(rank): seconds for rank, seconds in each.waited_for.items()},
    }
