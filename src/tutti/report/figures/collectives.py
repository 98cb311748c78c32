"""Collectives by size: time and bus bandwidth of every backend, on logarithmic axes."""

from collections.abc import Iterator, Sequence
from typing import Any

from tutti.measure.units import format_bytes
from tutti.report.collect import Result
from tutti.report.figure import Figure, Table, log_axis, size_axis
from tutti.report.palette import series, sign


def figures(result: Result) -> Iterator[Figure]:
    """Two plots for each operation."""
    sharing = (result.content.get("world") or {}).get("sharing_note")
    yield from curves(result.content["rows"], sharing or "")


def curves(rows: Sequence[dict[str, Any]], note: str = "", prefix: str = "") -> Iterator[Figure]:
    """Of rows as `tutti bench collectives` has them."""
    for operation in dict.fromkeys(row["op"] for row in rows):
        own = [row for row in rows if row["op"] == operation]
        varying = [
            key for key in ("dtype", "placement", "ranks") if len({row.get(key) for row in own}) > 1
        ]
        lines: dict[str, list[dict[str, Any]]] = {}
        for row in sorted(own, key=lambda row: int(row["bytes"])):
            name = " ".join(str(each) for each in (row["backend"], *(row[key] for key in varying)))
            lines.setdefault(name, []).append(row)
        table = Table(
            [
                *("backend", "ranks", "bytes", "type", "placement", "p50 µs", "p95 µs", "least µs"),
                *("cv %", "algbw GB/s", "busbw GB/s", "wrong"),
            ],
            [
                (
                    *(row["backend"], row["ranks"], row["bytes"], row["dtype"]),
                    *(row["placement"], *(row["time_us"][key] for key in ("p50", "p95", "min"))),
                    100 * row["time_us"]["cv"],
                    *(row["algbw_gbs"], row["busbw_gbs"], row["wrong"]),
                )
                for row in own
            ],
        )
        ranks = " and ".join(sorted({str(row["ranks"]) for row in own}))
        for title, unit, about in (
            (f"{operation}: bus bandwidth", "GB/s", "The higher, the better."),
            (f"{operation}: time", "µs", "p50 over calls; the lower, the better."),
        ):
            fast = unit == "GB/s"
            yield Figure(
                prefix + title,
                f"{ranks} ranks. {about} {note}".strip(),
                table,
                [
                    {
                        "type": "scatter",
                        "mode": "lines+markers",
                        "name": name,
                        "x": [row["bytes"] for row in each],
                        # Bandwidth of a few bytes rounds to nothing, which has no logarithm.
                        "y": [
                            (row["busbw_gbs"] or None) if fast else row["time_us"]["p50"]
                            for row in each
                        ],
                        "text": [format_bytes(row["bytes"]) for row in each],
                        "line": {"color": series(number), "width": 2},
                        "marker": {"color": series(number), "symbol": sign(number), "size": 7},
                        "hovertemplate": f"%{{text}}: %{{y:.4g}} {unit}"
                        "<extra>%{fullData.name}</extra>",
                    }
                    for number, (name, each) in enumerate(lines.items())
                ],
                {
                    "xaxis": size_axis([row["bytes"] for row in own]),
                    "yaxis": log_axis(unit, dtick=1),
                    "showlegend": True,
                },
                half=True,
            )
