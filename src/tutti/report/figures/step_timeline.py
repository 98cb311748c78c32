"""Timeline of one step, with all ranks on one clock, in lanes, with DDP buckets."""

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from tutti.measure.units import format_bytes
from tutti.profile.explain import Explanation
from tutti.profile.rank_trace import Intervals, RankTrace, Step
from tutti.profile.step_breakdown import StepBreakdown
from tutti.report import plot
from tutti.report.plot import Figure
from tutti.report.sources import Run

_MAX_BARS = 1500  # a browser draws each bar as a separate element
_MAX_RANKS = 16
_RESOLUTION = 2000  # a pause of less than 1 / 2000 of the step is too short for a screen
_LANES = ("computes", "communicates", "waits", "buckets")
_BUCKETS = {"ready": "bucket ready, not started", "reduced": "bucket reduced"}
_NAMES = {part: plot.NAMES[part] for part in plot.PART_COLOURS} | _BUCKETS
_COLOURS = plot.PART_COLOURS | {"ready": "#f0c674", "reduced": "#9a6fb0"}


class _Bar(NamedTuple):
    rank: int
    lane: str
    part: str
    start: float  # seconds since the step began
    length: float
    details: str


def timeline(run: Run) -> Iterator[Figure]:
    """Yield the step of median length. This needs the traces, not only the JSON of a profile."""
    if run.explanation is None:
        return
    number, steps = _median_step(run.explanation)
    ranks = sorted(steps)[:_MAX_RANKS]
    begin = min(steps[rank].start for rank in ranks)
    length = max(steps[rank].end for rank in ranks) - begin
    rank_traces = [trace for trace in run.explanation.traces if trace.rank in ranks]
    split = {step.rank: step for step in run.explanation.steps if step.step == number}
    # Join bars across pauses that are too short to see. While there are more than _MAX_BARS bars,
    # also join across longer pauses.
    shortest = length / _RESOLUTION
    while True:
        bars = [
            bar
            for trace in rank_traces
            for bar in _part_bars(trace, split[trace.rank], begin, begin + length, shortest)
        ]
        if len(bars) <= _MAX_BARS:
            break
        shortest *= 2
    buckets = (run.profile or {}).get("buckets") or []
    bars += [bar for bar in _bucket_bars(buckets, number, steps, begin) if bar.rank in ranks]
    used = {(bar.rank, bar.lane) for bar in bars}
    labels = [f"rank {rank} {lane}" for rank in ranks for lane in _LANES if (rank, lane) in used]
    drawn = f" {len(ranks)} of {len(steps)} ranks are drawn." * (len(ranks) < len(steps))
    traces = [
        _plotly_bars(part, part_bars)
        for part in _NAMES
        if (part_bars := [bar for bar in bars if bar.part == part])
    ]
    layout = plot.bar_layout("ms since the step began", 140 + 22 * len(labels), barmode="overlay")
    layout["bargap"] = 0.12
    layout["xaxis"] |= {"range": [0, 1e3 * length]}
    layout["yaxis"] |= {"categoryorder": "array", "categoryarray": labels, "showgrid": False}
    rows = [bar._asdict() | {"part": _NAMES[bar.part]} for bar in bars]
    words: dict[str, Any] = {"number": number, "shortest": f"{1e6 * shortest:.0f}"}
    yield plot.figure("timeline", rows, traces, layout, left_out=drawn, **words)


def _median_step(explanation: Explanation) -> tuple[int, dict[int, Step]]:
    """Return the number of the step of median length, and the Step of each rank.

    Only the steps that most ranks have recorded are considered.
    """
    steps: dict[int, dict[int, Step]] = defaultdict(dict)
    for trace in explanation.traces:
        for step in trace.steps:
            steps[step.number][trace.rank] = step
    max_ranks = max(map(len, steps.values()))
    lengths = {
        number: max(step.end - step.start for step in ranks.values())
        for number, ranks in steps.items()
        if len(ranks) == max_ranks
    }
    middle = median(lengths.values())
    number = min(lengths, key=lambda number: abs(lengths[number] - middle))
    return number, steps[number]


def _part_bars(
    trace: RankTrace, split: StepBreakdown, begin: float, end: float, shortest: float
) -> Iterator[_Bar]:
    """Yield the parts of a step in three lanes."""
    parts = split.intervals
    in_step = [c for c in trace.collectives if c.end > begin and c.arrival < end]
    for lane, part, intervals, details in (
        ("computes", "compute", parts["compute"] | parts["hidden"], ""),
        ("computes", "input", parts["input"], "the data loader"),
        ("computes", "rest", parts["rest"], ""),
        ("communicates", "hidden", parts["hidden"], ""),
        ("communicates", "exposed", parts["exposed"], ""),
        ("waits", "wait", parts["wait"], ""),
        ("waits", "bubble", parts["bubble"], "for the peer"),
    ):
        for start, stop in _visible(intervals, shortest):
            if lane == "communicates":
                details = ", ".join(
                    f"{c.operation} {format_bytes(c.bytes) if c.bytes else ''}".strip()
                    for c in in_step
                    if c.arrival < stop and c.end > start
                )
            elif part == "wait":
                waited = [c for c in in_step if c.arrival < stop and c.transfer_start > start]
                late = {c.last_rank for c in waited if c.last_rank not in (None, trace.rank)}
                details = f"for rank {', '.join(map(str, sorted(late)))}"
            yield _Bar(trace.rank, lane, part, start - begin, stop - start, details[:120])


def _visible(intervals: Intervals, shortest: float) -> list[tuple[float, float]]:
    """Return the intervals, joined over pauses of at most `shortest` seconds."""
    if not len(intervals.starts):
        return []
    pauses = intervals.starts[1:] - intervals.ends[:-1] > shortest
    opens = np.concatenate([[True], pauses])
    closes = np.concatenate([pauses, [True]])
    return list(zip(intervals.starts[opens].tolist(), intervals.ends[closes].tolist(), strict=True))


def _bucket_bars(
    rows: list[dict[str, Any]], number: int, steps: dict[int, Step], begin: float
) -> Iterator[_Bar]:
    """Yield two bars for each DDP bucket: until the start of the all-reduce, and until its end."""
    for row in rows:
        rank = row["rank"]
        if row["step"] != number or rank not in steps:
            continue
        offset = steps[rank].start - begin
        size = format_bytes(row["bytes"]) if row["bytes"] else "size unknown"
        details = f"bucket {row['index']}, {size}"
        ready, started, done = row["ready_s"], row["started_s"], row["done_s"]
        if started > ready:
            yield _Bar(rank, "buckets", "ready", offset + ready, started - ready, details)
        yield _Bar(rank, "buckets", "reduced", offset + started, done - started, details)


def _plotly_bars(part: str, bars: list[_Bar]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": _NAMES[part],
        "y": [f"rank {bar.rank} {bar.lane}" for bar in bars],
        "base": [1e3 * bar.start for bar in bars],
        "x": [1e3 * bar.length for bar in bars],
        # For a bar with a base, plotly's %{x} is the end of the bar, not its length.
        "customdata": [[1e3 * bar.length, bar.details] for bar in bars],
        "marker": {"color": _COLOURS[part], "line": {"width": 0}},
        "hovertemplate": (
            "%{y}: %{customdata[0]:.3f} ms from %{base:.3f} ms<br>%{customdata[1]}"
            "<extra>%{fullData.name}</extra>"
        ),
    }
