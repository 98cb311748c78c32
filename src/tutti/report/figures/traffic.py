"""What was communicated: by axis of the layout, by operation and size, and how fast."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tutti.measure.units import format_bytes
from tutti.report.collect import Run
from tutti.report.figure import (
    Figure,
    Table,
    axis,
    log_axis,
    milliseconds,
    percent,
    size_axis,
)
from tutti.report.palette import ORANGE, SKY, VERMILION, series, sign

_MOST_BARS = 12


def figures(run: Run) -> Iterator[Figure]:
    """Axes where the layout is known, then operations."""
    profile = run.profile or {}
    if profile.get("axes"):
        yield _axes(profile["axes"])
    rows = profile["comm"]
    if not rows:
        return
    steps = max(row["steps"] for row in profile["ranks"])
    table = Table(
        [
            *("operation", "axis", "group", "ranks", "bytes", "type", "count", "p50 ms"),
            *("total ms", "waits ms", "algbw GB/s", "busbw GB/s"),
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
    )
    most = rows[:_MOST_BARS]
    left = f" {len(most)} of {len(rows)} rows are drawn." if len(most) < len(rows) else ""
    labels = [_label(row, [_plain_label(each) for each in most]) for row in most]
    yield Figure(
        "Communication by operation and size",
        f"Milliseconds of a step: data moving, and a rank's waiting before it.{left}",
        table,
        [
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": labels,
                "x": amounts,
                "marker": {"color": colour},
                "hovertemplate": "%{y}: %{x:.3f} ms of a step<extra>%{fullData.name}</extra>",
            }
            for name, colour, amounts in (
                ("moving", ORANGE, [1e3 * row["transfer_s"]["total"] / steps for row in most]),
                (
                    "waiting",
                    VERMILION,
                    [1e3 * row["wait_s"]["mean"] * row["count"] / steps for row in most],
                ),
            )
        ],
        {
            "barmode": "stack",
            "height": 150 + 28 * max(3, len(most)),
            "xaxis": axis("ms of a step"),
            "yaxis": {"autorange": "reversed", "type": "category"},
        },
        half=True,
    )
    yield from _speeds(rows)


def _axes(rows: list[dict[str, Any]]) -> Figure:
    parts = (
        ("hidden", "hidden_s", SKY),
        ("exposed", "exposed_s", ORANGE),
        ("wait", "wait_s", VERMILION),
    )
    return Figure(
        "Communication by axis",
        "Milliseconds of a step, mean over ranks: dp replicas, shard parameters, tp tensors, pp "
        "stages.",
        Table(
            ["axis", "hidden ms", "exposed ms", "wait ms", "of the step %"],
            [
                (
                    row["axis"],
                    *(milliseconds(row[key]) for _, key, _ in parts),
                    percent(row.get("share")),
                )
                for row in rows
            ],
        ),
        [
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [row["axis"] or "unknown" for row in rows],
                "x": [milliseconds(row[key]) for row in rows],
                "marker": {"color": colour},
                "hovertemplate": "%{y}: %{x:.3f} ms of a step<extra>%{fullData.name}</extra>",
            }
            for name, key, colour in parts
        ],
        {
            "barmode": "stack",
            "height": 150 + 30 * max(2, len(rows)),
            "xaxis": axis("ms of a step"),
            "yaxis": {"autorange": "reversed", "type": "category"},
        },
        half=True,
    )


def _speeds(rows: list[dict[str, Any]]) -> Iterator[Figure]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["bytes"] and row["busbw_gbs"]:
            found[row["op"] if not row.get("axis") else f"{row['op']} {row['axis']}"].append(row)
    if not found:
        return
    ordered = {name: sorted(each, key=lambda row: row["bytes"]) for name, each in found.items()}
    yield Figure(
        "Bus bandwidth in the step",
        "By size of the message, from the last rank's arrival to the end, as nccl-tests counts.",
        Table(
            ["operation", "bytes", "busbw GB/s", "p50 ms"],
            [
                (name, row["bytes"], row["busbw_gbs"], milliseconds(row["transfer_s"]["p50"]))
                for name, each in ordered.items()
                for row in each
            ],
        ),
        [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [row["bytes"] for row in each],
                "y": [row["busbw_gbs"] for row in each],
                "text": [format_bytes(row["bytes"]) for row in each],
                "line": {"color": series(number), "width": 1},
                "marker": {"color": series(number), "symbol": sign(number), "size": 9},
                "hovertemplate": "%{text}: %{y:.4g} GB/s<extra>%{fullData.name}</extra>",
            }
            for number, (name, each) in enumerate(ordered.items())
        ],
        {
            "height": 150 + 28 * max(3, min(len(rows), _MOST_BARS)),
            "xaxis": size_axis([row["bytes"] for each in ordered.values() for row in each]),
            "yaxis": log_axis("GB/s"),
            "showlegend": True,
        },
        half=True,
    )


def _plain_label(row: dict[str, Any]) -> str:
    size = "size unknown" if row["bytes"] is None else format_bytes(row["bytes"])
    return f"{row['op']} {size}"


def _label(row: dict[str, Any], others: list[str]) -> str:
    """Two rows of one name would be one bar: the axis or the group tells them apart."""
    name = _plain_label(row)
    if others.count(name) > 1:
        name += f" {row.get('axis') or ''} {row['group']} {row['dtype']}".replace("  ", " ")
    return name
