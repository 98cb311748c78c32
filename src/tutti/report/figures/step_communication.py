"""Communication in profiled steps: overlap, time by mesh axis, operation and size, bandwidth."""

from collections.abc import Iterator

from tutti.measure.units import format_bytes
from tutti.profile.explain import COMM_RATIO_LIMIT
from tutti.report import plot
from tutti.report.figures.step_profile import bars_height, rank_bars, ranks_left_out, shown_ranks
from tutti.report.plot import Figure, HalfFigure, Row, column, table
from tutti.report.sources import Run

_MOST_BARS = 12


def overlap(run: Run) -> Iterator[Figure]:
    """How much communication is hidden, and how much of a step moves data, on each rank."""
    profile = run.profile or {}
    if profile["world_size"] < 2 or all(row["overlap"] is None for row in profile["ranks"]):
        return
    limit = 100 * COMM_RATIO_LIMIT
    yield HalfFigure(
        "Overlap and communication",
        "Overlap is hidden / (hidden + exposed + wait + bubble). Above the dotted line at "
        f"{limit:.0f} %, look at moving data first.{ranks_left_out(profile)}",
        table(
            profile["ranks"],
            "rank, overlap %=100*overlap, communication % of the step=100*comm_ratio, "
            f"within {limit:.0f} %=comm_ratio_ok",
        ),
        [
            rank_bars(
                profile, "hidden, of communication and waiting", "100*overlap", plot.SKY, "%"
            ),
            rank_bars(profile, "moving data, of the step", "100*comm_ratio", plot.ORANGE, "%"),
        ],
        plot.bar_layout(
            "%",
            bars_height(shown_ranks(profile)),
            xaxis=plot.axis("%", range=[0, 100]),
            barmode="group",
            shapes=[plot.dotted_line(plot.ORANGE, x=limit)],
        ),
    )


def communication(run: Run) -> Iterator[Figure]:
    """Time by mesh axis and by operation, then bandwidth."""
    profile = run.profile or {}
    if profile.get("axes"):
        yield _by_axis(profile["axes"])
    rows = profile["comm"]
    if not rows:
        return
    steps = max(row["steps"] for row in profile["ranks"])
    shown = rows[:_MOST_BARS]
    drawn = f" {len(shown)} of {len(rows)} rows are drawn." * (len(shown) < len(rows))
    labels = _labels(shown)
    transfers = [1e3 * row["transfer_s"]["total"] / steps for row in shown]
    waits = [1e3 * row["wait_s"]["mean"] * row["count"] / steps for row in shown]
    yield HalfFigure(
        "Communication by operation and size",
        f"Milliseconds per step: moving data, and the waiting of a rank before.{drawn}",
        table(
            [row | {"group": row["description"] or row["group"]} for row in rows],
            "operation=op, axis?, group, ranks, bytes, type=dtype, count, "
            "p50 ms=1e3*transfer_s.p50, total ms=1e3*transfer_s.total, wait ms=1e3*wait_s.mean, "
            "algbw GB/s=algbw_gbs, busbw GB/s=busbw_gbs",
        ),
        [
            plot.bar("moving data", labels, transfers, plot.ORANGE, "ms per step"),
            plot.bar("waiting", labels, waits, plot.VERMILION, "ms per step"),
        ],
        plot.bar_layout("ms per step", 150 + 28 * max(3, len(shown)), barmode="stack"),
    )
    by_size = sorted(rows, key=lambda row: row["bytes"] or 0)
    known = [
        row | {"operation": f"{row['op']} {row.get('axis') or ''}".strip()}
        for row in by_size
        if row["bytes"] and row["busbw_gbs"]
    ]
    if known:
        curves = plot.grouped(known, lambda row: row["operation"])
        yield plot.size_figure(
            "Bus bandwidth in the step",
            "By message size, from the last rank's arrival to the end, as in nccl-tests.",
            table(
                [row for each in curves.values() for row in each],
                "operation, bytes, busbw GB/s=busbw_gbs, p50 ms=1e3*transfer_s.p50",
            ),
            curves,
            "busbw_gbs",
            "GB/s",
            height=150 + 28 * max(3, len(shown)),
            line={"width": 1},
        )


def _by_axis(rows: list[Row]) -> Figure:
    parts = (("hidden", plot.SKY), ("exposed", plot.ORANGE), ("wait", plot.VERMILION))
    labels = [row["axis"] or "unknown" for row in rows]
    return HalfFigure(
        "Communication by axis",
        "Milliseconds per step, mean over ranks: dp replicas, shard parameters, tp tensors, pp "
        "stages.",
        table(
            rows,
            "axis, hidden ms=1e3*hidden_s, exposed ms=1e3*exposed_s, wait ms=1e3*wait_s, "
            "of the step %=100*share?",
        ),
        [
            plot.bar(name, labels, column(rows, f"1e3*{name}_s"), colour, "ms per step")
            for name, colour in parts
        ],
        plot.bar_layout("ms per step", 150 + 30 * max(2, len(rows)), barmode="stack"),
    )


def _labels(rows: list[Row]) -> list[str]:
    """Operation and size; the group is added if rows would have the same label and share a bar."""
    sizes = [
        "size unknown" if size is None else format_bytes(size) for size in column(rows, "bytes")
    ]
    labels = [f"{row['op']} {size}" for row, size in zip(rows, sizes, strict=True)]
    return [
        f"{label} {row.get('axis') or ''} {row['group']} {row['dtype']}".replace("  ", " ")
        if labels.count(label) > 1
        else label
        for label, row in zip(labels, rows, strict=True)
    ]
