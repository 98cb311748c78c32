"""One step of all ranks on one clock: what computes, what moves, who waits; DDP's buckets."""

from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from tutti.measure.units import format_bytes
from tutti.profile.explain import Explanation
from tutti.profile.intervals import Intervals
from tutti.profile.rank_trace import RankTrace, Step
from tutti.profile.step_breakdown import StepBreakdown
from tutti.report.collect import Run
from tutti.report.figure import Figure, Table, axis
from tutti.report.palette import PART_NAMES, PARTS

# Bars in the whole figure; a browser draws each as an element of its own.
_MOST_BARS = 1500
_MOST_RANKS = 16
_FINEST = 2000  # parts of the step that can be told apart

# (rank, lane, part, start, length, what), seconds from the step's start
_Bar = tuple[int, str, str, float, float, str]


def figures(run: Run) -> Iterator[Figure]:
    """The step whose length is the median; it needs the traces themselves."""
    if run.explanation is None:
        return
    chosen = _choose(run.explanation)
    if chosen is None:
        return
    number, steps = chosen
    ranks = sorted(steps)[:_MOST_RANKS]
    begin = min(steps[rank].start for rank in ranks)
    length = max(steps[rank].end for rank in ranks) - begin
    traces = [trace for trace in run.explanation.traces if trace.rank in ranks]
    split = {each.rank: each for each in run.explanation.steps if each.step == number}
    # Pauses that no screen shows are left out first, then longer ones, until it is few bars.
    shortest = length / _FINEST
    while True:
        bars = [bar for t in traces for bar in _bars(t, split[t.rank], begin, shortest)]
        if len(bars) <= _MOST_BARS:
            break
        shortest *= 2
    buckets = _buckets((run.profile or {}).get("buckets") or [], number, steps, begin)
    bars += [each for each in buckets if each[0] in ranks]
    lanes = [f"rank {rank} {lane}" for rank in ranks for lane in _lanes(bars, rank)]
    left = f" {len(ranks)} of {len(steps)} ranks are drawn." if len(ranks) < len(steps) else ""
    yield Figure(
        f"Timeline of step {number}",
        f"All ranks on one clock; the step whose length is the median. Pauses under "
        f"{1e6 * shortest:.0f} µs are not drawn.{left}",
        Table(
            ["rank", "lane", "part", "start ms", "length ms", "what"],
            [
                (rank, lane, PART_NAMES.get(part, part), 1e3 * start, 1e3 * long, what)
                for rank, lane, part, start, long, what in bars
            ],
        ),
        [_trace(part, [each for each in bars if each[2] == part]) for part in _used(bars)],
        {
            "barmode": "overlay",
            "bargap": 0.12,
            "height": 140 + 22 * len(lanes),
            "xaxis": axis("ms since the step began", range=[0, 1e3 * length]),
            "yaxis": {
                "type": "category",
                "categoryorder": "array",
                "categoryarray": lanes,
                "autorange": "reversed",
                "showgrid": False,
            },
        },
    )


def _choose(explanation: Explanation) -> tuple[int, dict[int, Step]] | None:
    """Of the steps that most ranks recorded, the one whose length is in the middle."""
    steps: dict[int, dict[int, Step]] = {}
    for trace in explanation.traces:
        for step in trace.steps:
            steps.setdefault(step.number, {})[trace.rank] = step
    if not steps:
        return None
    most = max(len(each) for each in steps.values())
    lengths = {
        number: max(step.end - step.start for step in each.values())
        for number, each in steps.items()
        if len(each) == most
    }
    middle = median(lengths.values())
    number = min(lengths, key=lambda each: abs(lengths[each] - middle))
    return number, steps[number]


def _bars(trace: RankTrace, split: StepBreakdown, begin: float, shortest: float) -> Iterator[_Bar]:
    """The parts of a step in three lanes."""
    parts = split.intervals
    last = max((float(each.ends[-1]) for each in parts.values() if len(each.ends)), default=begin)
    during = [each for each in trace.collectives if each.end > begin and each.arrival < last]
    for lane, part, times, what in (
        ("computes", "compute", parts["compute"] | parts["hidden"], ""),
        ("computes", "input", parts["input"], "the data loader"),
        ("computes", "rest", parts["rest"], ""),
        ("moves", "hidden", parts["hidden"], ""),
        ("moves", "exposed", parts["exposed"], ""),
        ("waits", "wait", parts["wait"], ""),
        ("waits", "bubble", parts["bubble"], "for the other side"),
    ):
        for start, end in _drawn(times, shortest):
            if lane == "moves":
                what = ", ".join(
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
                what = f"for rank {', '.join(map(str, sorted(late - {trace.rank})))}"
            yield trace.rank, lane, part, start - begin, end - start, what[:120]


def _drawn(times: Intervals, shortest: float) -> list[tuple[float, float]]:
    """Intervals with pauses between them that can be seen."""
    if not len(times.starts):
        return []
    apart = times.starts[1:] - times.ends[:-1] > shortest
    opens = np.concatenate([[True], apart])
    closes = np.concatenate([apart, [True]])
    return list(zip(times.starts[opens].tolist(), times.ends[closes].tolist(), strict=True))


def _buckets(
    rows: list[dict[str, Any]], number: int, steps: dict[int, Step], begin: float
) -> list[_Bar]:
    """Gradients of DDP: a bucket is ready, its all-reduce starts, it is done."""
    found: list[_Bar] = []
    for row in rows:
        rank = row["rank"]
        if row["step"] != number or rank not in steps:
            continue
        first = steps[rank].start - begin
        what = f"bucket {row['index']}, {format_bytes(row['bytes']) if row['bytes'] else 'size ?'}"
        ready, started, done = (row[key] for key in ("ready_s", "started_s", "done_s"))
        if started > ready:
            found.append((rank, "buckets", "ready", first + ready, started - ready, what))
        found.append((rank, "buckets", "reduced", first + started, done - started, what))
    return found


def _lanes(bars: list[_Bar], rank: int) -> list[str]:
    there = {lane for one, lane, *_ in bars if one == rank}
    return [lane for lane in ("computes", "moves", "waits", "buckets") if lane in there]


def _used(bars: list[_Bar]) -> list[str]:
    there = {part for _, _, part, *_ in bars}
    return [part for part in (*PARTS, "ready", "reduced") if part in there]


def _trace(part: str, bars: list[_Bar]) -> dict[str, Any]:
    own = {
        "ready": ("bucket ready, not started", "#f0c674"),
        "reduced": ("bucket reduced", "#9a6fb0"),
    }
    name, colour = own.get(part) or (PART_NAMES[part], PARTS[part])
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [f"rank {rank} {lane}" for rank, lane, *_ in bars],
        "base": [1e3 * start for _, _, _, start, _, _ in bars],
        "x": [1e3 * length for _, _, _, _, length, _ in bars],
        "customdata": [what for *_, what in bars],
        "marker": {"color": colour, "line": {"width": 0}},
        "hovertemplate": (
            "%{y}: %{x:.3f} ms from %{base:.3f} ms<br>%{customdata}<extra>%{fullData.name}</extra>"
        ),
    }
