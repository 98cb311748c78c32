"""Communication in profiled steps: overlap, time by mesh axis, operation and size, bandwidth."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tutti.measure.units import format_bytes
from tutti.profile.explain import COMM_RATIO_LIMIT
from tutti.report import plot
from tutti.report.figures.step_profile import (
    bars_height,
    rank_labels,
    ranks_left_out,
    shown_ranks,
)
from tutti.report.plot import Figure, Table, milliseconds, percent
from tutti.report.sources import Run

_MOST_BARS = 12


def overlap(run: Run) -> Iterator[Figure]:
    """How much communication is hidden, and how much of a step moves data, on each rank."""
    profile = run.profile or {}
    if profile["world_size"] < 2 or all(row["overlap"] is None for row in profile["ranks"]):
        return
    rows = shown_ranks(profile)
    limit = 100 * COMM_RATIO_LIMIT
    yield Figure(
        "Overlap and communication",
        "Overlap is hidden / (hidden + exposed + wait + bubble). Above the dotted line at "
        f"{limit:.0f} %, look at moving data first.{ranks_left_out(profile)}",
        Table(
            ["rank", "overlap %", "communication % of the step", f"within {limit:.0f} %"],
            [
                (
                    *(row["rank"], percent(row["overlap"]), percent(row["comm_ratio"])),
                    row["comm_ratio_ok"],
                )
                for row in profile["ranks"]
            ],
        ),
        [
            plot.bar(name, rank_labels(rows), [percent(row[key]) for row in rows], colour, "%")
            for name, key, colour in (
                ("hidden, of communication and waiting", "overlap", plot.SKY),
                ("moving data, of the step", "comm_ratio", plot.ORANGE),
            )
        ],
        plot.bar_layout(
            "%",
            bars_height(rows),
            xaxis=plot.axis("%", range=[0, 100]),
            barmode="group",
            shapes=[plot.dotted_line(plot.ORANGE, x=limit)],
        ),
        half=True,
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
    yield Figure(
        "Communication by operation and size",
        f"Milliseconds per step: moving data, and the waiting of a rank before.{drawn}",
        Table(
            [
                *("operation", "axis", "group", "ranks", "bytes", "type", "count", "p50 ms"),
                *("total ms", "wait ms", "algbw GB/s", "busbw GB/s"),
            ],
            [
                (
                    *(row["op"], row.get("axis"), row["description"] or row["group"], row["ranks"]),
                    *(row["bytes"], row["dtype"], row["count"]),
                    milliseconds(row["transfer_s"]["p50"]),
                    milliseconds(row["transfer_s"]["total"]),
                    milliseconds(row["wait_s"]["mean"]),
                    *(row["algbw_gbs"], row["busbw_gbs"]),
                )
                for row in rows
            ],
        ),
        [
            plot.bar("moving data", labels, transfers, plot.ORANGE, "ms per step"),
            plot.bar("waiting", labels, waits, plot.VERMILION, "ms per step"),
        ],
        plot.bar_layout("ms per step", 150 + 28 * max(3, len(shown)), barmode="stack"),
        half=True,
    )
    yield from _bandwidth(rows)


def _by_axis(rows: list[dict[str, Any]]) -> Figure:
    parts = (("hidden", plot.SKY), ("exposed", plot.ORANGE), ("wait", plot.VERMILION))
    labels = [row["axis"] or "unknown" for row in rows]
    return Figure(
        "Communication by axis",
        "Milliseconds per step, mean over ranks: dp replicas, shard parameters, tp tensors, pp "
        "stages.",
        Table(
            ["axis", "hidden ms", "exposed ms", "wait ms", "of the step %"],
            [
                (
                    row["axis"],
                    *(milliseconds(row[f"{name}_s"]) for name, _ in parts),
                    percent(row.get("share")),
                )
                for row in rows
            ],
        ),
        [
            plot.bar(
                name,
                labels,
                [milliseconds(row[f"{name}_s"]) for row in rows],
                colour,
                "ms per step",
            )
            for name, colour in parts
        ],
        plot.bar_layout("ms per step", 150 + 30 * max(2, len(rows)), barmode="stack"),
        half=True,
    )


def _bandwidth(rows: list[dict[str, Any]]) -> Iterator[Figure]:
    curves: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["bytes"] or 0):
        if row["bytes"] and row["busbw_gbs"]:
            curves[f"{row['op']} {row.get('axis') or ''}".strip()].append(row)
    if not curves:
        return
    drawn = [row for each in curves.values() for row in each]
    yield Figure(
        "Bus bandwidth in the step",
        "By message size, from the last rank's arrival to the end, as in nccl-tests.",
        Table(
            ["operation", "bytes", "busbw GB/s", "p50 ms"],
            [
                (name, row["bytes"], row["busbw_gbs"], milliseconds(row["transfer_s"]["p50"]))
                for name, each in curves.items()
                for row in each
            ],
        ),
        [
            plot.curve(
                name,
                number,
                [row["bytes"] for row in each],
                [row["busbw_gbs"] for row in each],
                "%{text}: %{y:.4g} GB/s",
                text=[format_bytes(row["bytes"]) for row in each],
                line={"width": 1},
            )
            for number, (name, each) in enumerate(curves.items())
        ],
        {
            "height": 150 + 28 * max(3, min(len(rows), _MOST_BARS)),
            "xaxis": plot.size_axis([row["bytes"] for row in drawn]),
            "yaxis": plot.log_axis("GB/s", [row["busbw_gbs"] for row in drawn]),
            "showlegend": True,
        },
        half=True,
    )


def _labels(rows: list[dict[str, Any]]) -> list[str]:
    """Operation and size; rows with the same label would be one bar, so they get their group."""

    def plain(row: dict[str, Any]) -> str:
        size = "size unknown" if row["bytes"] is None else format_bytes(row["bytes"])
        return f"{row['op']} {size}"

    labels = [plain(row) for row in rows]
    return [
        f"{label} {row.get('axis') or ''} {row['group']} {row['dtype']}".replace("  ", " ")
        if labels.count(label) > 1
        else label
        for label, row in zip(labels, rows, strict=True)
    ]
