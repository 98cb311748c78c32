"""Figures of benchmarks: collectives, link bandwidth, symmetric memory, and pairs."""

from collections.abc import Iterator
from typing import Any

from tutti.measure.units import format_bytes
from tutti.report import plot
from tutti.report.plot import Figure, Row
from tutti.report.sources import Result


def collectives(result: Result) -> Iterator[Figure]:
    """Yield, for each operation, the bus bandwidth and time of every backend over message size."""
    yield from _collective_curves(result.content["rows"], _sharing_note(result))


def _sharing_note(result: Result) -> str:
    return (result.content.get("world") or {}).get("sharing_note") or ""


def _collective_curves(all_rows: list[Row], note: str = "", prefix: str = "") -> Iterator[Figure]:
    """Yield figures of bandwidth and time for rows in the format of `tutti bench collectives`."""
    for operation, rows in plot.grouped(all_rows, lambda row: row["op"]).items():
        keys = ["backend"]
        for key in ("dtype", "placement", "ranks"):
            if len({row.get(key) for row in rows}) > 1:
                keys.append(key)
        lines: dict[str, list[Row]] = {}
        for row in sorted(rows, key=lambda row: int(row["bytes"])):
            lines.setdefault(" ".join(str(row[key]) for key in keys), []).append(row)
        words: dict[str, Any] = {"prefix": prefix, "operation": operation, "note": note}
        words["ranks"] = " and ".join(sorted({str(row["ranks"]) for row in rows}))
        for quantity, unit, source, direction in (
            ("bus bandwidth", "GB/s", "busbw_gbs", "Higher is better."),
            ("time", "µs", "time_us.p50", "The time is the p50 over calls. Lower is better."),
        ):
            curves = plot.size_curves(lines, source, unit)
            yield plot.figure(
                "collective", rows, *curves, quantity=quantity, direction=direction, **words
            )


def bandwidth(result: Result) -> Iterator[Figure]:
    """Yield figures of rank pairs, copies, all-to-all, ring and tree all-reduce, and slow links."""
    content = result.content
    for size, rows in plot.grouped(content.get("pairs") or [], lambda row: row["bytes"]).items():
        yield from _pair_matrix(rows, size)
    if copies := content.get("copies"):
        speeds = [row["gbs"] for row in copies]
        labels = [f"{row['kind']}, {row['device']}" for row in copies]
        text = {"text": speeds, "texttemplate": "%{x:,.3~r}"}
        bars = [plot.bar("", labels, speeds, plot.BLUE, "GB/s", width=0.6, **text)]
        yield plot.figure("copies", copies, bars, plot.bar_layout("GB/s", 140 + 34 * len(copies)))
    yield from _collective_curves(content.get("all_to_all") or [])
    yield from _collective_curves(content.get("ring_vs_tree") or [], prefix="Ring and tree, ")
    if findings := content.get("findings"):
        yield plot.figure("slow_links", findings)


def _pair_matrix(rows: list[Row], size: int) -> Iterator[Figure]:
    ranks = sorted({row[end] for row in rows for end in ("src", "dst")})
    for direction, key in (("one way", "gbs_uni"), ("both ways at once", "gbs_bi")):
        speed = {(row["src"], row["dst"]): row[key] for row in rows}
        if any(speed.values()):
            heatmap = plot.heatmap(
                [f"to {rank}" for rank in ranks],
                [f"rank {rank}" for rank in ranks],
                [[speed.get((a, b)) for b in ranks] for a in ranks],
                "GB/s",
                "%{y} %{x}: %{z:.3g} GB/s",
            )
            words: dict[str, Any] = {"direction": direction, "size": format_bytes(size)}
            yield plot.figure("rank_pairs", rows, *heatmap, **words)


def symmetric(result: Result) -> Iterator[Figure]:
    """Yield the time of one-sided operations and of data structures in symmetric memory."""
    rows = result.content["rows"]
    labels = [f"{row['name']} {format_bytes(row['bytes'])}, {row['backend']}" for row in rows]
    bounds = [(row["p50_us"], row["p50_us"], row["p99_us"]) for row in rows]
    traces, layout = _marks(labels, bounds, "µs", "%{x:.4g} µs")
    layout["height"] = 130 + 22 * len(rows)
    yield plot.figure("symmetric", rows, traces, layout, note=_sharing_note(result))


def pairs(result: Result) -> Iterator[Figure]:
    """Yield the speed-up of each optimized version over its baseline, with its spread."""
    rows = [row for row in result.content["rows"] if row["speedup"] is not None]
    skipped = [row["name"] for row in result.content["rows"] if row["speedup"] is None]
    if not rows:
        return
    labels = [row["name"] for row in rows]
    bounds = [(row["speedup"], row["spread"]["p25"], row["spread"]["p75"]) for row in rows]
    traces, layout = _marks(labels, bounds, "speed-up", "%{x:.2f} times", tick=1.0)
    layout |= {"height": 140 + 34 * max(3, len(rows)), "shapes": [plot.dotted_line(x=1)]}
    not_measured = f"Not measured here: {', '.join(skipped)}. " if skipped else ""
    yield plot.figure("optimized", rows, traces, layout, skipped=not_measured)


def _marks(
    labels: list[str],
    bounds: list[tuple[float, float, float]],
    unit: str,
    hover: str,
    tick: float | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (traces, layout) with one mark and error bar per label.

    `bounds` contains (value, low, high) for each label.
    """
    mark = {
        "type": "scatter",
        "mode": "markers",
        "y": labels,
        "x": [value for value, _, _ in bounds],
        "error_x": {
            "array": [high - value for value, _, high in bounds],
            "arrayminus": [value - low for value, low, _ in bounds],
        },
        "marker": {"color": plot.BLUE, "size": 9},
        "hovertemplate": f"%{{y}}: {hover}<extra></extra>",
    }
    layout = {
        "xaxis": plot.log_axis(unit, [tick, *(value for limits in bounds for value in limits)]),
        "yaxis": {"type": "category", "range": [len(labels) - 0.4, -0.6]},
    }
    return [mark], layout
