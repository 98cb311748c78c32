"""Benchmarks: collectives, bandwidth, symmetric memory, baseline against optimized."""

from collections.abc import Iterator, Sequence
from typing import Any

from tutti.measure.units import format_bytes
from tutti.report import plot
from tutti.report.plot import Figure, Table
from tutti.report.sources import Result


def collectives(result: Result) -> Iterator[Figure]:
    """Bus bandwidth and time of every backend over message size, for each operation."""
    yield from _collective_curves(result.content["rows"], _sharing_note(result))


def _sharing_note(result: Result) -> str:
    return (result.content.get("world") or {}).get("sharing_note") or ""


def _collective_curves(
    rows: Sequence[dict[str, Any]], note: str = "", prefix: str = ""
) -> Iterator[Figure]:
    """For rows in the format of `tutti bench collectives`."""
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
                *("backend", "ranks", "bytes", "type", "placement", "p50 µs", "p95 µs", "min µs"),
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
            ("bus bandwidth", "GB/s", "Higher is better."),
            ("time", "µs", "p50 over calls; lower is better."),
        ):
            # The bandwidth of a few bytes rounds to 0, which has no logarithm.
            values = {
                name: [
                    (row["busbw_gbs"] or None) if unit == "GB/s" else row["time_us"]["p50"]
                    for row in each
                ]
                for name, each in lines.items()
            }
            yield Figure(
                f"{prefix}{operation}: {title}",
                f"{ranks} ranks. {about} {note}".strip(),
                table,
                [
                    plot.curve(
                        name,
                        number,
                        [row["bytes"] for row in each],
                        values[name],
                        f"%{{text}}: %{{y:.4g}} {unit}",
                        text=[format_bytes(row["bytes"]) for row in each],
                    )
                    for number, (name, each) in enumerate(lines.items())
                ],
                {
                    "xaxis": plot.size_axis([row["bytes"] for row in own]),
                    "yaxis": plot.log_axis(
                        unit, [value for each in values.values() for value in each]
                    ),
                    "showlegend": True,
                },
                half=True,
            )


def bandwidth(result: Result) -> Iterator[Figure]:
    """Pairs of ranks for each size; then copies, all-to-all, ring and tree, and slow links."""
    pairs = result.content.get("pairs") or []
    for size in dict.fromkeys(row["bytes"] for row in pairs):
        yield from _pair_matrix([row for row in pairs if row["bytes"] == size], size)
    if copies := result.content.get("copies"):
        yield _copies(copies)
    yield from _collective_curves(result.content.get("all_to_all") or [])
    yield from _collective_curves(
        result.content.get("ring_vs_tree") or [], prefix="Ring and tree, "
    )
    if findings := result.content.get("findings"):
        yield Figure(
            "Slow links",
            "Compared with links of their class, or with published figures.",
            Table(
                ["what", "verdict", "GB/s", "usual GB/s", "compared with", "causes"],
                [
                    (
                        *(row["what"], row["verdict"], row["gbs"], row["against_gbs"]),
                        *(row["against"], row["causes"]),
                    )
                    for row in findings
                ],
            ),
        )


def _pair_matrix(rows: list[dict[str, Any]], size: int) -> Iterator[Figure]:
    ranks = sorted({row[end] for row in rows for end in ("src", "dst")})
    labels = [f"rank {rank}" for rank in ranks]
    table = Table(
        ["from", "to", "class", "one way GB/s", "both ways GB/s", "spread %", "verdict", "wrong"],
        [
            (
                *(row["src"], row["dst"], row["class"], row["gbs_uni"], row["gbs_bi"]),
                *(100 * row["spread"], row["verdict"], row["wrong"]),
            )
            for row in rows
        ],
    )
    for way, key in (("one way", "gbs_uni"), ("both ways at once", "gbs_bi")):
        speed = {(row["src"], row["dst"]): row[key] for row in rows}
        if not any(speed.values()):
            continue
        yield Figure(
            f"Pairs, {way}, {format_bytes(size)}",
            "GB/s from the rank of the row to the rank of the column.",
            table,
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
            half=True,
        )


def _copies(rows: list[dict[str, Any]]) -> Figure:
    speeds = [row["gbs"] for row in rows]
    return Figure(
        "Copies between host and device",
        "The table has the expected figures of the catalogue with their source.",
        Table(
            ["device", "copy", "bytes", "GB/s", "spread %", "expected GB/s", "source", "verdict"],
            [
                (
                    *(row["device"], row["kind"], row["bytes"], row["gbs"], 100 * row["spread"]),
                    *(row["expected_gbs"], row["expected_source"], row["verdict"]),
                )
                for row in rows
            ],
        ),
        [
            plot.bar(
                "",
                [f"{row['kind']}, {row['device']}" for row in rows],
                speeds,
                plot.BLUE,
                "GB/s",
                text=speeds,
                texttemplate="%{x:,.3~r}",
                width=0.6,
            )
        ],
        plot.bar_layout("GB/s", 140 + 34 * len(rows)),
    )


def symmetric(result: Result) -> Iterator[Figure]:
    """Time of one-sided operations and of structures on symmetric memory."""
    rows = result.content["rows"]
    yield Figure(
        "Symmetric memory: time of an operation",
        f"p50; error bars end at p99. {_sharing_note(result)}".strip(),
        Table(
            ["operation", "backend", "bytes", "p50 µs", "p99 µs", "min µs", "calls", "wrong"],
            [
                (
                    *(row["name"], row["backend"], row["bytes"], row["p50_us"], row["p99_us"]),
                    *(row.get("min_us"), row.get("calls"), row.get("wrong")),
                )
                for row in rows
            ],
        ),
        [
            _marks(
                [f"{row['name']} {format_bytes(row['bytes'])}, {row['backend']}" for row in rows],
                [(row["p50_us"], row["p50_us"], row["p99_us"]) for row in rows],
                "%{y}: %{x:.4g} µs<extra></extra>",
            )
        ],
        {
            "height": 130 + 22 * len(rows),
            "xaxis": plot.log_axis(
                "µs", [row[key] for row in rows for key in ("p50_us", "p99_us")]
            ),
            "yaxis": {"type": "category", "range": [len(rows) - 0.4, -0.6]},
        },
    )


def pairs(result: Result) -> Iterator[Figure]:
    """Speed-up of each optimized version over its baseline, with its spread."""
    rows = [row for row in result.content["rows"] if row["speedup"] is not None]
    skipped = [row["name"] for row in result.content["rows"] if row["speedup"] is None]
    if not rows:
        return
    bounds = [(row["speedup"], row["spread"]["p25"], row["spread"]["p75"]) for row in rows]
    yield Figure(
        "Baseline and optimized",
        (f"Not measured here: {', '.join(skipped)}. " if skipped else "")
        + "Speed-up of the optimized version: the median over rounds, with its quartiles; the "
        "dotted line is no gain. The results of both versions are checked to be equal.",
        Table(
            [
                *("pair", "baseline ms", "optimized ms", "speed-up", "p25", "p75", "verdict"),
                *("check", "about", "case"),
            ],
            [
                (
                    *(row["name"], row["baseline_ms"], row["optimized_ms"], row["speedup"]),
                    *(row["spread"]["p25"], row["spread"]["p75"], row["verdict"], row["check"]),
                    *(row["about"], row.get("note")),
                )
                for row in rows
            ],
        ),
        [_marks([row["name"] for row in rows], bounds, "%{y}: %{x:.2f} times<extra></extra>")],
        {
            "height": 140 + 34 * max(3, len(rows)),
            "xaxis": plot.log_axis(
                "speed-up", [1.0, *(value for each in bounds for value in each)]
            ),
            "yaxis": {"type": "category", "range": [len(rows) - 0.4, -0.6]},
            "shapes": [plot.dotted_line(x=1)],
        },
    )


def _marks(
    labels: list[str], bounds: list[tuple[float, float, float]], hover: str
) -> dict[str, Any]:
    """A mark with error bars for each label; `bounds`: value, low, high."""
    return {
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
        "hovertemplate": hover,
    }
