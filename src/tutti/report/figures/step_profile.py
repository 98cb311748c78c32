"""Figures of profiled steps: parts, waiting, stragglers, utilization, memory, communication."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from tutti.measure.spread import relative_range
from tutti.measure.units import format_bytes
from tutti.profile.explain import COMM_RATIO_LIMIT
from tutti.profile.step_breakdown import PARTS
from tutti.report import plot
from tutti.report.plot import Figure, Row, column
from tutti.report.sources import Run

# Maximum numbers of ranks, stragglers and operations in one plot. Tables contain all rows.
_MAX_RANKS, _MAX_STRAGGLERS, _MAX_OPERATIONS = 48, 24, 12
_GIB = 1 << 30


def _drawn_ranks(profile: dict[str, Any]) -> tuple[list[Row], str]:
    """Return (rows of the ranks to draw, sentence about the number of ranks that are drawn).

    If there are more than _MAX_RANKS ranks, the first ranks and the stragglers are drawn.
    """
    rows: list[Row] = profile["ranks"]
    if len(rows) <= _MAX_RANKS:
        return rows, ""
    late = {row["rank"] for row in (profile.get("stragglers") or [])[: _MAX_RANKS // 4]}
    first = [row for row in rows if row["rank"] not in late][: _MAX_RANKS - len(late)]
    drawn = first + [row for row in rows if row["rank"] in late]
    about = f" {len(drawn)} of {len(rows)} ranks are drawn, with all stragglers."
    return sorted(drawn, key=lambda row: int(row["rank"])), about


def _rank_bars(
    rows: list[Row], name: str, source: str, colour: str, unit: str, **more: Any
) -> dict[str, Any]:
    """Return one bar per rank. plot.column describes the format of `source`."""
    labels = [f"rank {row['rank']}" for row in rows]
    return plot.bar(name, labels, column(rows, source), colour, unit, **more)


def _bars_height(rows: Sequence[Any], pixels: int = 34) -> int:
    """Return the height in pixels of a plot with one bar per row."""
    return 150 + min(max(2, len(rows)) * pixels, max(420, 16 * len(rows)))


def parts(run: Run) -> Iterator[Figure]:
    """Yield the parts of a step on each rank, in per cent and in milliseconds."""
    profile = run.profile or {}
    rows, left_out = _drawn_ranks(profile)
    steps = max(row["steps"] for row in rows)
    layout = plot.bar_layout("ms", _bars_height(rows, 26), barmode="stack")
    percent = layout | {"xaxis": plot.axis("%", range=[0, 100])}
    with_whole = [row | {"whole": 100.0} for row in profile["ranks"]]
    for figure, unit, key, unit_layout in (
        ("parts_percent", "%", "100*parts_share", percent),
        ("parts_ms", "ms", "1e3*parts_s", layout),
    ):
        bars = [
            _rank_bars(rows, plot.NAMES[name], f"{key}.{name}", plot.PART_COLOURS[name], unit)
            for name in PARTS
            if any(column(profile["ranks"], f"{key}.{name}"))
        ]
        columns = ", ".join(f"{plot.NAMES[name]} {unit}={key}.{name}" for name in PARTS)
        words: dict[str, Any] = {"left_out": left_out, "steps": steps, "parts": columns}
        yield plot.figure(figure, with_whole, bars, unit_layout, **words)


def waits(run: Run) -> Iterator[Figure]:
    """Yield the time that each rank waited for each other rank, and the stragglers."""
    profile = run.profile or {}
    ranks = [row["rank"] for row in profile["ranks"]]
    if len(ranks) < 2:
        return
    total: dict[tuple[int, int], float] = defaultdict(float)
    steps: dict[int, int] = defaultdict(int)
    for step in profile["steps"]:
        steps[step["rank"]] += 1
        for late, seconds in step["waited_for_s"].items():
            total[step["rank"], int(late)] += seconds
    cost = {late: sum(total[rank, late] for rank in ranks) for late in ranks}
    columns = sorted(sorted(ranks, key=lambda rank: -cost[rank])[:_MAX_RANKS])
    only = f" Only the {len(columns)} ranks for which others waited longest have a column."
    drawn = "" if columns == ranks else only
    cells = [
        [None if a == b else 1e3 * total[a, b] / max(1, steps[a]) for b in columns] for a in ranks
    ]
    heatmap = plot.heatmap(
        [f"for {rank}" for rank in columns],
        [f"rank {rank}" for rank in ranks],
        cells,
        "ms",
        "%{y} waited %{z:.2f} ms per step %{x}",
    )
    table_rows = [{"rank": rank, "ms": row} for rank, row in zip(ranks, cells, strict=True)]
    titles = ", ".join(f"for rank {rank} ms=ms.{n}" for n, rank in enumerate(columns))
    yield plot.figure("waits", table_rows, *heatmap, left_out=drawn, columns=titles)
    if rows := profile.get("stragglers"):
        yield _stragglers(rows, len(ranks))


def _stragglers(rows: list[Row], ranks: int) -> Figure:
    drawn = rows[:_MAX_STRAGGLERS]
    costs = [row["cost_s"] for row in drawn]
    bars = {
        "type": "bar",
        "x": [f"rank {row['rank']}" for row in drawn],
        "y": column(costs, "1e3*mean"),
        "error_y": {
            "array": [1e3 * (cost["max"] - cost["mean"]) for cost in costs],
            "arrayminus": [1e3 * (cost["mean"] - cost["min"]) for cost in costs],
        },
        "marker": {"color": plot.VERMILION},
        "width": 0.5,
        "hovertemplate": "others wait %{y:.2f} ms per step for %{x}<extra></extra>",
    }
    layout = {
        "height": min(620, 190 + 34 * ranks),
        "xaxis": {"type": "category"},
        "yaxis": plot.axis("ms per step", rangemode="tozero"),
    }
    parts = [row["excess"]["part"] for row in rows]
    named = [row | {"part": plot.NAMES.get(p, p)} for row, p in zip(rows, parts, strict=True)]
    return plot.figure("late_ranks", named, [bars], layout)


def utilization(run: Run) -> Iterator[Figure]:
    """Yield the share of the step in which each rank computes."""
    profile = run.profile or {}
    rows, left_out = _drawn_ranks(profile)
    imbalance = _imbalance([row["busy"] for row in profile["ranks"]])
    bars = _rank_bars(rows, "computing", "100*busy", plot.BLUE, "% of the step", width=0.6)
    layout = plot.bar_layout("%", _bars_height(rows), xaxis=plot.axis("%", range=[0, 100]))
    words: dict[str, Any] = {"imbalance": imbalance, "left_out": left_out}
    yield plot.figure("utilization", profile["ranks"], [bars], layout, **words)


def memory(run: Run) -> Iterator[Figure]:
    """Yield the peak memory of device and process, if the profile contains these values."""
    profile = run.profile or {}
    rows, left_out = _drawn_ranks(profile)
    imbalances, columns, bars = [], [], []
    for name, key, colour in (
        ("device", "memory_bytes", plot.PURPLE),
        ("process", "host_memory_bytes", plot.SKY),
    ):
        if values := [row[key] for row in profile["ranks"] if row.get(key)]:
            imbalances.append(f"{name}: {_imbalance(values)}")
            columns.append(f"{name} GiB={1 / _GIB}*{key}?")
            bars.append(_rank_bars(rows, name, f"{1 / _GIB}*{key}?", colour, "GiB"))
    if bars:
        layout = plot.bar_layout("GiB", _bars_height(rows), barmode="group", showlegend=True)
        layout["xaxis"] |= {"rangemode": "tozero"}
        imbalance = "; ".join(imbalances).capitalize()
        words: dict[str, Any] = {
            "imbalance": imbalance,
            "left_out": left_out,
            "kinds": ", ".join(columns),
        }
        yield plot.figure("memory", profile["ranks"], bars, layout, **words)


def _imbalance(values: list[float]) -> str:
    difference = relative_range(values)
    if len(values) < 2:
        return "there is only one rank"
    if difference is None:
        return "there is nothing to compare"
    return f"ranks differ by {100 * difference:.1f} %"


def overlap(run: Run) -> Iterator[Figure]:
    """Yield the hidden share of communication, and the share of a step in which data moves."""
    profile = run.profile or {}
    if profile["world_size"] < 2 or all(row["overlap"] is None for row in profile["ranks"]):
        return
    rows, left_out = _drawn_ranks(profile)
    limit = 100 * COMM_RATIO_LIMIT
    bars = [
        _rank_bars(rows, "hidden, of communication and waiting", "100*overlap", plot.SKY, "%"),
        _rank_bars(rows, "moving data, of the step", "100*comm_ratio", plot.ORANGE, "%"),
    ]
    layout = plot.bar_layout("%", _bars_height(rows), barmode="group")
    layout["xaxis"] |= {"range": [0, 100]}
    layout["shapes"] = [plot.dotted_line(plot.ORANGE, x=limit)]
    words: dict[str, Any] = {"limit": f"{limit:.0f}", "left_out": left_out}
    yield plot.figure("overlap", profile["ranks"], bars, layout, **words)


def communication(run: Run) -> Iterator[Figure]:
    """Yield the communication time by mesh axis, then by operation, and then the bus bandwidth."""
    profile = run.profile or {}
    if profile.get("axes"):
        yield _by_axis(profile["axes"])
    rows = profile["comm"]
    if not rows:
        return
    steps = max(row["steps"] for row in profile["ranks"])
    drawn = rows[:_MAX_OPERATIONS]
    left_out = f" {len(drawn)} of {len(rows)} rows are drawn." * (len(drawn) < len(rows))
    labels = _operation_labels(drawn)
    transfers = [1e3 * row["transfer_s"]["total"] / steps for row in drawn]
    waiting = [1e3 * row["wait_s"]["mean"] * row["count"] / steps for row in drawn]
    height = 150 + 28 * max(3, len(drawn))
    bars = [
        plot.bar("moving data", labels, transfers, plot.ORANGE, "ms per step"),
        plot.bar("waiting", labels, waiting, plot.VERMILION, "ms per step"),
    ]
    layout = plot.bar_layout("ms per step", height, barmode="stack")
    described = [row | {"group": row["description"] or row["group"]} for row in rows]
    yield plot.figure("by_operation", described, bars, layout, left_out=left_out)
    with_bandwidth = [
        row | {"operation": f"{row['op']} {row.get('axis') or ''}".strip()}
        for row in sorted(rows, key=lambda row: row["bytes"] or 0)
        if row["bytes"] and row["busbw_gbs"]
    ]
    if with_bandwidth:
        groups = plot.grouped(with_bandwidth, lambda row: row["operation"])
        curves, layout = plot.size_curves(groups, "busbw_gbs", "GB/s", line={"width": 1})
        group_rows = [row for group in groups.values() for row in group]
        yield plot.figure("bus_bandwidth", group_rows, curves, layout | {"height": height})


def _by_axis(rows: list[Row]) -> Figure:
    labels = [row["axis"] or "unknown" for row in rows]
    bars = []
    for name in ("hidden", "exposed", "wait"):
        values, colour = column(rows, f"1e3*{name}_s"), plot.PART_COLOURS[name]
        bars.append(plot.bar(name, labels, values, colour, "ms per step"))
    layout = plot.bar_layout("ms per step", 150 + 30 * max(2, len(rows)), barmode="stack")
    return plot.figure("by_axis", rows, bars, layout)


def _operation_labels(rows: list[Row]) -> list[str]:
    """Return labels with operation and size. If labels are equal, add axis, group and dtype."""
    labels = []
    for row in rows:
        size = "size unknown" if row["bytes"] is None else format_bytes(row["bytes"])
        labels.append(f"{row['op']} {size}")
    return [
        f"{label} {row.get('axis') or ''} {row['group']} {row['dtype']}".replace("  ", " ")
        if labels.count(label) > 1
        else label
        for label, row in zip(labels, rows, strict=True)
    ]
