"""Symmetric memory: how long one-sided operations and the structures on them take."""

from collections.abc import Iterator

from tutti.measure.units import format_bytes
from tutti.report.collect import Result
from tutti.report.figure import Figure, Table, log_axis
from tutti.report.palette import BLUE


def figures(result: Result) -> Iterator[Figure]:
    """A mark for each operation and size, with its p99."""
    rows = result.content["rows"]
    labels = [f"{row['name']} {format_bytes(row['bytes'])}, {row['backend']}" for row in rows]
    sharing = (result.content.get("world") or {}).get("sharing_note")
    yield Figure(
        "Symmetric memory: time of an operation",
        f"p50; the whisker ends at p99. {sharing or ''}".strip(),
        Table(
            ["operation", "backend", "bytes", "p50 µs", "p99 µs", "least µs", "calls", "wrong"],
            [
                (
                    *(row["name"], row["backend"], row["bytes"], row["p50_us"], row["p99_us"]),
                    *(row.get("min_us"), row.get("calls"), row.get("wrong")),
                )
                for row in rows
            ],
        ),
        [
            {
                "type": "scatter",
                "mode": "markers",
                "y": labels,
                "x": [row["p50_us"] for row in rows],
                "error_x": {
                    "type": "data",
                    "array": [row["p99_us"] - row["p50_us"] for row in rows],
                    "arrayminus": [0 for _ in rows],
                    "thickness": 1.2,
                },
                "marker": {"color": BLUE, "size": 8},
                "hovertemplate": "%{y}: %{x:.4g} µs<extra></extra>",
            }
        ],
        {
            "height": 130 + 22 * len(rows),
            "xaxis": log_axis("µs", dtick=1),
            "yaxis": {"type": "category", "range": [len(rows) - 0.4, -0.6]},
        },
    )
