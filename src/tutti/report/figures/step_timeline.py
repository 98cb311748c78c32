"""The timeline of one step: all ranks on one clock, in lanes, with DDP buckets."""

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from tutti.measure.units import format_bytes
from tutti.profile.explain import Explanation
from tutti.profile.rank_trace import Intervals, RankTrace, Step
from tutti.profile.step_breakdown import StepBreakdown
from tutti.report import plot
from tutti.report.plot import Figure, Table
from tutti.report.sources import Run

_MOST_BARS = 1500  # a browser draws each bar as a separate element
_MOST_RANKS = 16
_RESOLUTION = 2000  # a pause of less than 1 / 2000 of the step is too short for a screen
_LANES = ("computes", "communicates", "waits", "buckets")
_NAMES = plot.PART_NAMES | {"ready": "bucket ready, not started", "reduced": "bucket reduced"}
_COLOURS = plot.PART_COLOURS | {"ready": "#f0c674", "reduced": "#9a6fb0"}

# (rank, lane, part, start, length, details); seconds from the step's start
_Bar = tuple[int, str, str, float, float, str]


def timeline(run: Run) -> Iterator[Figure]:
    """The step of median length; needs the traces, not only the JSON of `tutti profile`."""
    if run.explanation is None:
        return
    number, steps = _median_step(run.explanation)
    ranks = sorted(steps)[:_MOST_RANKS]
    begin = min(steps[rank].start for rank in ranks)
    length = max(steps[rank].end for rank in ranks) - begin
    traces = [trace for trace in run.explanation.traces if trace.rank in ranks]
    split = {each.rank: each for each in run.explanation.steps if each.step == number}
    # Join bars over pauses too short for a screen, then over longer pauses until bars are few.
    shortest = length / _RESOLUTION
    while True:
        bars = [bar for t in traces for bar in _part_bars(t, split[t.rank], begin, shortest)]
        if len(bars) <= _MOST_BARS:
            break
        shortest *= 2
    buckets = (run.profile or {}).get("buckets") or []
    bars += [bar for bar in _bucket_bars(buckets, number, steps, begin) if bar[0] in ranks]
    used = {(rank, lane) for rank, lane, *_ in bars}
    labels = [f"rank {rank} {lane}" for rank in ranks for lane in _LANES if (rank, lane) in used]
    drawn = f" {len(ranks)} of {len(steps)} ranks are drawn." * (len(ranks) < len(steps))
    yield Figure(
        f"Timeline of step {number}",
        f"All ranks on one clock, in the step of median length. Pauses shorter than "
        f"{1e6 * shortest:.0f} µs are not drawn.{drawn}",
        Table(
            ["rank", "lane", "part", "start ms", "length ms", "details"],
            [
                (rank, lane, _NAMES[part], 1e3 * start, 1e3 * seconds, details)
                for rank, lane, part, start, seconds, details in bars
            ],
        ),
        [
            _plotly_bars(part, own)
            for part in _NAMES
            if (own := [bar for bar in bars if bar[2] == part])
        ],
        {
            "barmode": "overlay",
            "bargap": 0.12,
            "height": 140 + 22 * len(labels),
            "xaxis": plot.axis("ms since the step began", range=[0, 1e3 * length]),
            "yaxis": plot.LABEL_AXIS
            | {"categoryorder": "array", "categoryarray": labels, "showgrid": False},
        },
    )


def _median_step(explanation: Explanation) -> tuple[int, dict[int, Step]]:
    """The number of the step of median length, and the Step of each rank.

    Only steps that the largest number of ranks recorded are considered.
    """
    steps: dict[int, dict[int, Step]] = defaultdict(dict)
    for trace in explanation.traces:
        for step in trace.steps:
            steps[step.number][trace.rank] = step
    most = max(len(each) for each in steps.values())
    lengths = {
        number: max(step.end - step.start for step in each.values())
        for number, each in steps.items()
        if len(each) == most
    }
    middle = median(lengths.values())
    number = min(lengths, key=lambda each: abs(lengths[each] - middle))
    return number, steps[number]


def _part_bars(
    trace: RankTrace, split: StepBreakdown, begin: float, shortest: float
) -> Iterator[_Bar]:
    """The parts of a step in three lanes."""
    parts = split.intervals
    last = max((float(each.ends[-1]) for each in parts.values() if len(each.ends)), default=begin)
    during = [each for each in trace.collectives if each.end > begin and each.arrival < last]
    for lane, part, intervals, details in (
        ("computes", "compute", parts["compute"] | parts["hidden"], ""),
        ("computes", "input", parts["input"], "the data loader"),
        ("computes", "rest", parts["rest"], ""),
        ("communicates", "hidden", parts["hidden"], ""),
        ("communicates", "exposed", parts["exposed"], ""),
        ("waits", "wait", parts["wait"], ""),
        ("waits", "bubble", parts["bubble"], "for the peer"),
    ):
        for start, end in _visible(intervals, shortest):
            if lane == "communicates":
                details = ", ".join(
                    f"{each.operation} {format_bytes(each.bytes) if each.bytes else ''}".strip()
                    for each in during
                    if each.arrival < end and each.end > start
                )
            elif part == "wait":
                late = {
                    each.last_rank
                    for each in during
                    if each.last_rank is not None
                    and each.arrival < end
                    and each.transfer_start > start
                }
                details = f"for rank {', '.join(map(str, sorted(late - {trace.rank})))}"
            yield trace.rank, lane, part, start - begin, end - start, details[:120]


def _visible(intervals: Intervals, shortest: float) -> list[tuple[float, float]]:
    """The intervals, joined over pauses of at most `shortest` seconds."""
    if not len(intervals.starts):
        return []
    pauses = intervals.starts[1:] - intervals.ends[:-1] > shortest
    opens = np.concatenate([[True], pauses])
    closes = np.concatenate([pauses, [True]])
    return list(zip(intervals.starts[opens].tolist(), intervals.ends[closes].tolist(), strict=True))


def _bucket_bars(
    rows: list[dict[str, Any]], number: int, steps: dict[int, Step], begin: float
) -> Iterator[_Bar]:
    """DDP buckets: a bar from ready to the start of the all-reduce, and one to its end."""
    for row in rows:
        rank = row["rank"]
        if row["step"] != number or rank not in steps:
            continue
        offset = steps[rank].start - begin
        size = format_bytes(row["bytes"]) if row["bytes"] else "size unknown"
        details = f"bucket {row['index']}, {size}"
        ready, started, done = (row[key] for key in ("ready_s", "started_s", "done_s"))
        if started > ready:
            yield rank, "buckets", "ready", offset + ready, started - ready, details
        yield rank, "buckets", "reduced", offset + started, done - started, details


def _plotly_bars(part: str, bars: list[_Bar]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": _NAMES[part],
        "y": [f"rank {rank} {lane}" for rank, lane, *_ in bars],
        "base": [1e3 * start for _, _, _, start, _, _ in bars],
        "x": [1e3 * length for _, _, _, _, length, _ in bars],
        # For a bar with a base, plotly's %{x} is the end of the bar, not its length.
        "customdata": [[1e3 * length, details] for _, _, _, _, length, details in bars],
        "marker": {"color": _COLOURS[part], "line": {"width": 0}},
        "hovertemplate": (
            "%{y}: %{customdata[0]:.3f} ms from %{base:.3f} ms<br>%{customdata[1]}"
            "<extra>%{fullData.name}</extra>"
        ),
    }
