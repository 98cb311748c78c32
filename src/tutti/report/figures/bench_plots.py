"""Benchmarks: collectives, bandwidth, symmetric memory, baseline compared with optimized."""

from collections.abc import Iterator
from typing import Any

from tutti.measure.units import format_bytes
from tutti.report import plot
from tutti.report.plot import Figure, HalfFigure, Row, table
from tutti.report.sources import Result


def collectives(result: Result) -> Iterator[Figure]:
    """Bus bandwidth and time of every backend over message size, for each operation."""
    yield from _collective_curves(result.content["rows"], _sharing_note(result))


def _sharing_note(result: Result) -> str:
    return (result.content.get("world") or {}).get("sharing_note") or ""


def _collective_curves(rows: list[Row], note: str = "", prefix: str = "") -> Iterator[Figure]:
    """Figures of bandwidth and time, for rows in the format of `tutti bench collectives`."""
    for operation, own in plot.grouped(rows, lambda row: row["op"]).items():
        varying = [
            key for key in ("dtype", "placement", "ranks") if len({row.get(key) for row in own}) > 1
        ]
        lines: dict[str, list[Row]] = {}
        for row in sorted(own, key=lambda row: int(row["bytes"])):
            name = " ".join(str(row[key]) for key in ("backend", *varying))
            lines.setdefault(name, []).append(row)
        numbers = table(
            own,
            "backend, ranks, bytes, type=dtype, placement, p50 µs=time_us.p50, p95 µs=time_us.p95, "
            "min µs=time_us.min, cv %=100*time_us.cv, algbw GB/s=algbw_gbs, busbw GB/s=busbw_gbs, "
            "wrong",
        )
        ranks = " and ".join(sorted({str(row["ranks"]) for row in own}))
        for title, unit, source, about in (
            ("bus bandwidth", "GB/s", "busbw_gbs", "Higher is better."),
            ("time", "µs", "time_us.p50", "p50 over calls; lower is better."),
        ):
            about = f"{ranks} ranks. {about} {note}".strip()
            yield plot.size_figure(
                f"{prefix}{operation}: {title}", about, numbers, lines, source, unit
            )


def bandwidth(result: Result) -> Iterator[Figure]:
    """Pairs of ranks by message size; then copies, all-to-all, ring and tree, slow links."""
    content = result.content
    for size, rows in plot.grouped(content.get("pairs") or [], lambda row: row["bytes"]).items():
        yield from _pair_matrix(rows, size)
    if copies := content.get("copies"):
        yield _copies(copies)
    yield from _collective_curves(content.get("all_to_all") or [])
    yield from _collective_curves(content.get("ring_vs_tree") or [], prefix="Ring and tree, ")
    if findings := content.get("findings"):
        yield Figure(
            "Slow links",
            "Compared with links of their class, or with published figures.",
            table(
                findings,
                "what, verdict, GB/s=gbs, usual GB/s=against_gbs, compared with=against, causes",
            ),
        )


def _pair_matrix(rows: list[Row], size: int) -> Iterator[Figure]:
    ranks = sorted({row[end] for row in rows for end in ("src", "dst")})
    labels = [f"rank {rank}" for rank in ranks]
    numbers = table(
        rows,
        "from=src, to=dst, class, one way GB/s=gbs_uni, both ways GB/s=gbs_bi, "
        "spread %=100*spread, verdict, wrong",
    )
    for way, key in (("one way", "gbs_uni"), ("both ways at once", "gbs_bi")):
        speed = {(row["src"], row["dst"]): row[key] for row in rows}
        if any(speed.values()):
            yield HalfFigure(
                f"Pairs, {way}, {format_bytes(size)}",
                "GB/s from the rank of the row to the rank of the column.",
                numbers,
                [
                    plot.heatmap(
                        [f"to {rank}" for rank in ranks],
                        labels,
                        [[speed.get((a, b)) for b in ranks] for a in ranks],
                        "GB/s",
                        hovertemplate="%{y} %{x}: %{z:.3g} GB/s<extra></extra>",
                    )
                ],
                plot.heatmap_layout(labels),
            )


def _copies(rows: list[Row]) -> Figure:
    labels = [f"{row['kind']}, {row['device']}" for row in rows]
    speeds = [row["gbs"] for row in rows]
    text = {"text": speeds, "texttemplate": "%{x:,.3~r}"}
    return Figure(
        "Copies between host and device",
        "The table has the expected figures of the catalogue with their source.",
        table(
            rows,
            "device, copy=kind, bytes, GB/s=gbs, spread %=100*spread, expected GB/s=expected_gbs, "
            "source=expected_source, verdict",
        ),
        [plot.bar("", labels, speeds, plot.BLUE, "GB/s", width=0.6, **text)],
        plot.bar_layout("GB/s", 140 + 34 * len(rows)),
    )


def symmetric(result: Result) -> Iterator[Figure]:
    """Time of one-sided operations and of data structures in symmetric memory."""
    rows = result.content["rows"]
    yield _marks(
        "Symmetric memory: time of an operation",
        f"p50; error bars end at p99. {_sharing_note(result)}".strip(),
        table(
            rows,
            "operation=name, backend, bytes, p50 µs=p50_us, p99 µs=p99_us, min µs=min_us?, calls?, "
            "wrong?",
        ),
        [f"{row['name']} {format_bytes(row['bytes'])}, {row['backend']}" for row in rows],
        [(row["p50_us"], row["p50_us"], row["p99_us"]) for row in rows],
        "µs",
        "%{x:.4g} µs",
        {"height": 130 + 22 * len(rows)},
    )


def pairs(result: Result) -> Iterator[Figure]:
    """Speed-up of each optimized version over its baseline, with its spread."""
    rows = [row for row in result.content["rows"] if row["speedup"] is not None]
    skipped = [row["name"] for row in result.content["rows"] if row["speedup"] is None]
    if not rows:
        return
    yield _marks(
        "Baseline and optimized",
        (f"Not measured here: {', '.join(skipped)}. " if skipped else "")
        + "Speed-up of the optimized version: the median over rounds, with its quartiles; the "
        "dotted line is no gain. The results of both versions are checked to be equal.",
        table(
            rows,
            "pair=name, baseline ms=baseline_ms, optimized ms=optimized_ms, speed-up=speedup, "
            "p25=spread.p25, p75=spread.p75, verdict, check, about, case=note?",
        ),
        [row["name"] for row in rows],
        [(row["speedup"], row["spread"]["p25"], row["spread"]["p75"]) for row in rows],
        "speed-up",
        "%{x:.2f} times",
        {"height": 140 + 34 * max(3, len(rows)), "shapes": [plot.dotted_line(x=1)]},
        [1.0],
    )


def _marks(
    title: str,
    about: str,
    numbers: plot.Table,
    labels: list[str],
    bounds: list[tuple[float, float, float]],
    unit: str,
    hover: str,
    layout: dict[str, Any],
    ticks: list[float] | None = None,
) -> Figure:
    """A mark with error bars for each label; `bounds`: value, low, high."""
    values = [*(ticks or []), *(value for each in bounds for value in each)]
    mark = {
        "type": "scatter",
        "mode": "markers",
        "y": labels,
        "x": [value for value, _, _ in bounds],
        "error_x": {
            "type": "data",
            "array": [high - value for value, _, high in bounds],
            "arrayminus": [value - low for value, low, _ in bounds],
            "thickness": 1.4,
        },
        "marker": {"color": plot.BLUE, "size": 9},
        "hovertemplate": f"%{{y}}: {hover}<extra></extra>",
    }
    axes = {
        "xaxis": plot.log_axis(unit, values),
        "yaxis": {"type": "category", "range": [len(labels) - 0.4, -0.6]},
    }
    return Figure(title, about, numbers, [mark], axes | layout)
