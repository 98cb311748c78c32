"""Figures of a step: a timeline of all ranks with a common clock, and the longest operators."""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tutti.measure.units import format_bytes
from tutti.profile.explain import Explanation
from tutti.profile.rank_trace import Intervals, NamedSpans, RankTrace, Step
from tutti.profile.step_breakdown import StepBreakdown
from tutti.report import plot
from tutti.report.plot import Figure
from tutti.report.sources import Run

_MAX_BARS = 1500  # limited, because a browser draws each bar as a separate element
_MAX_RANKS = 16
_MAX_STEPS = 8
_MAX_SPANS = 600  # maximum number of operators that have a bar
_MAX_OPERATORS, _MAX_ROWS = 15, 200  # maximum number of names in the plot and in its table
_RESOLUTION = 2000  # a pause of less than 1 / 2000 of the step is not visible
_LANES = ("computes", "operators", "communicates", "waits", "buckets")
_BUCKETS = {"ready": "bucket ready, not started", "reduced": "bucket reduced"}
_NAMES = {part: plot.NAMES[part] for part in plot.PART_COLOURS} | _BUCKETS
_NAMES["operator"] = "operators"
_COLOURS = plot.PART_COLOURS | {"operator": "#3d7ea6", "ready": "#f0c674", "reduced": "#9a6fb0"}


class _Bar(NamedTuple):
    rank: int
    lane: str
    part: str
    start: float  # seconds since the step began
    length: float
    details: str


def timeline(run: Run) -> Iterator[Figure]:
    """Yield a timeline of one step. The reader can choose the step.

    Yield nothing if the run has no traces, because the JSON of a profile contains no intervals.
    """
    if run.explanation is None:
        return
    buckets = (run.profile or {}).get("buckets") or []
    drawn = {
        label: _Drawing(run.explanation, buckets, number, steps)
        for label, number, steps in _chosen_steps(run.explanation)
    }
    first = next(iter(drawn.values()))
    steps, ranks = len(first.steps), len(first.ranks)
    yield plot.figure(
        "timeline",
        [bar._asdict() | {"part": _NAMES[bar.part]} for bar in first.bars],
        *first.plotly(),
        variants={label: drawing.plotly() for label, drawing in drawn.items()},
        number=first.number,
        shortest=f"{1e6 * first.shortest:.0f}",
        left_out=f" {ranks} of {steps} ranks are drawn." * (ranks < steps),
    )


def operators(run: Run) -> Iterator[Figure]:
    """Yield the operators or kernels that take the most time."""
    if run.explanation is None:
        return
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for trace in run.explanation.traces:
        for step in trace.steps:
            for name, time, number in operator_times(trace.operators.between(step.start, step.end)):
                seconds[name] += time
                calls[name] += number
    if not seconds:
        return
    steps = len(run.explanation.steps)
    length = sum(step.seconds for step in run.explanation.steps) / steps
    rows = [
        {
            "name": name,
            "ms": 1e3 * seconds[name] / steps,
            "share": 100 * seconds[name] / steps / length,
            "calls": calls[name] / steps,
        }
        for name in sorted(seconds, key=lambda name: -seconds[name])
    ]
    top = rows[:_MAX_OPERATORS]
    left_out = f" {len(top)} of {len(rows)} names are drawn." * (len(top) < len(rows))
    labels, values = plot.column(top, "name"), plot.column(top, "ms")
    bars = plot.bar("operators", labels, values, _COLOURS["compute"], "ms per step")
    layout = plot.bar_layout("ms per step", 90 + 24 * len(top))
    yield plot.figure("operators", rows[:_MAX_ROWS], [bars], layout, left_out=left_out)


def operator_times(spans: NamedSpans) -> list[tuple[str, float, int]]:
    """Return (short name, total seconds, number of spans) of each name, longest time first."""
    times = np.bincount(spans.name, spans.ends - spans.starts, len(spans.names))
    counts = np.bincount(spans.name, minlength=len(spans.names))
    order = np.argsort(-times, kind="stable")
    return [
        (short_name(spans.names[n]), float(times[n]), int(counts[n])) for n in order if counts[n]
    ]


def short_name(name: str) -> str:
    """Return the name of a kernel without return type, namespaces and arguments."""
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    head = re.split(r"[<(]", plain)[0]
    if head == name:
        return name[:60]  # an operator, such as aten::mm
    return head.rpartition("::")[2][:60] or name[:60]


def _chosen_steps(explanation: Explanation) -> Iterator[tuple[str, int, dict[int, Step]]]:
    """Yield (label, number, {rank: Step}) of the median, fastest and slowest step, then of others.

    Steps that only some of the ranks have recorded are omitted.
    """
    steps: dict[int, dict[int, Step]] = defaultdict(dict)
    for trace in explanation.traces:
        for step in trace.steps:
            steps[step.number][trace.rank] = step
    max_ranks = max(map(len, steps.values()))
    lengths = {
        number: max(s.end for s in ranks.values()) - min(s.start for s in ranks.values())
        for number, ranks in steps.items()
        if len(ranks) == max_ranks
    }
    by_length = sorted(lengths, key=lambda number: lengths[number])
    names = {by_length[-1]: "slowest", by_length[0]: "fastest"}
    names[by_length[(len(by_length) - 1) // 2]] = "median"
    first = [by_length[(len(by_length) - 1) // 2], by_length[0], by_length[-1]]
    for number in list(dict.fromkeys([*first, *sorted(lengths)]))[:_MAX_STEPS]:
        about = f", {names[number]}" if number in names else ""
        yield f"{number}: {1e3 * lengths[number]:.4g} ms{about}", number, steps[number]


class _Drawing:
    """The bars of one step."""

    def __init__(
        self,
        explanation: Explanation,
        buckets: list[dict[str, Any]],
        number: int,
        steps: dict[int, Step],
    ) -> None:
        self.number, self.steps = number, steps
        self.ranks = sorted(steps)[:_MAX_RANKS]
        begin = min(steps[rank].start for rank in self.ranks)
        self.length = max(steps[rank].end for rank in self.ranks) - begin
        end = begin + self.length
        rank_traces = [trace for trace in explanation.traces if trace.rank in self.ranks]
        split = {step.rank: step for step in explanation.steps if step.step == number}
        # Join bars that are separated by pauses too short to see. If there are still more than
        # _MAX_BARS bars, also join bars that are separated by longer pauses.
        self.shortest = self.length / _RESOLUTION
        while True:
            self.bars = [
                bar
                for trace in rank_traces
                for bar in _part_bars(trace, split[trace.rank], begin, end, self.shortest)
            ]
            if len(self.bars) <= _MAX_BARS:
                break
            self.shortest *= 2
        for trace in rank_traces:
            step = steps[trace.rank]
            spans = trace.operators.between(step.start, step.end)
            self.bars += _operator_bars(trace.rank, spans, begin, _MAX_SPANS // len(self.ranks))
        bucket_bars = _bucket_bars(buckets, number, steps, begin)
        self.bars += [bar for bar in bucket_bars if bar.rank in self.ranks]

    def plotly(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return (traces, layout)."""
        used = {(bar.rank, bar.lane) for bar in self.bars}
        labels = [f"rank {r} {lane}" for r in self.ranks for lane in _LANES if (r, lane) in used]
        traces = [
            _plotly_bars(part, bars)
            for part in _NAMES
            if (bars := [bar for bar in self.bars if bar.part == part])
        ]
        height = 140 + 22 * len(labels)
        layout = plot.bar_layout("ms since the step began", height, barmode="overlay")
        layout |= {"bargap": 0.12, "uniformtext": {"mode": "hide", "minsize": 9}}
        layout["xaxis"] |= {"range": [0, 1e3 * self.length]}
        layout["yaxis"] |= {"categoryorder": "array", "categoryarray": labels, "showgrid": False}
        return traces, layout


def _operator_bars(rank: int, spans: NamedSpans, begin: float, limit: int) -> Iterator[_Bar]:
    """Yield the bars of the `limit` longest operators, in the order of their start times."""
    lengths = spans.ends - spans.starts
    for n in sorted(np.argsort(-lengths, kind="stable")[:limit].tolist()):
        name = short_name(spans.names[spans.name[n]])
        start = float(spans.starts[n]) - begin
        yield _Bar(rank, "operators", "operator", start, float(lengths[n]), name)


def _part_bars(
    trace: RankTrace, split: StepBreakdown, begin: float, end: float, shortest: float
) -> Iterator[_Bar]:
    """Yield the bars of the lanes `computes`, `communicates` and `waits`."""
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
            elif part == "compute":
                times = operator_times(trace.operators.between(start, stop))
                details = ", ".join(f"{name} {1e3 * time:.3g} ms" for name, time, _ in times[:3])
            yield _Bar(trace.rank, lane, part, start - begin, stop - start, details[:120])


def _visible(intervals: Intervals, shortest: float) -> list[tuple[float, float]]:
    """Return the intervals. Intervals that are at most `shortest` seconds apart are joined."""
    if not len(intervals.starts):
        return []
    pauses = intervals.starts[1:] - intervals.ends[:-1] > shortest
    opens = np.concatenate([[True], pauses])
    closes = np.concatenate([pauses, [True]])
    return list(zip(intervals.starts[opens].tolist(), intervals.ends[closes].tolist(), strict=True))


def _bucket_bars(
    rows: list[dict[str, Any]], number: int, steps: dict[int, Step], begin: float
) -> Iterator[_Bar]:
    """Yield two bars per DDP bucket: the time from ready to all-reduce, and the all-reduce."""
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
    named = part == "operator"
    look = {"text": [bar.details for bar in bars], "textposition": "inside", "textangle": 0}
    look |= {"insidetextanchor": "start", "textfont": {"color": "#fff"}, "cliponaxis": True}
    return {
        "type": "bar",
        "orientation": "h",
        "name": _NAMES[part],
        "y": [f"rank {bar.rank} {bar.lane}" for bar in bars],
        "base": [1e3 * bar.start for bar in bars],
        "x": [1e3 * bar.length for bar in bars],
        # For a bar with a base, %{x} in plotly is the end of the bar, not its length.
        "customdata": [[1e3 * bar.length, bar.details] for bar in bars],
        # A border separates operators that follow each other without a pause.
        "marker": {"color": _COLOURS[part], "line": {"width": 0.5 * named}},
        "hovertemplate": (
            "%{y}: %{customdata[0]:.3f} ms from %{base:.3f} ms<br>%{customdata[1]}"
            "<extra>%{fullData.name}</extra>"
        ),
        **(look if named else {}),
    }
