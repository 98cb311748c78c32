"""Bandwidth between ranks: a matrix of pairs, copies between host and device, and the rest."""

from collections.abc import Iterator
from typing import Any

from tutti.measure.units import format_bytes
from tutti.report.collect import Result
from tutti.report.figure import Figure, Table, axis
from tutti.report.figures.collectives import curves
from tutti.report.palette import BLUE


def figures(result: Result) -> Iterator[Figure]:
    """Pairs one way and both ways, for each size; then copies, all-to-all, ring and tree."""
    pairs = result.content.get("pairs") or []
    for size in dict.fromkeys(row["bytes"] for row in pairs):
        yield from _matrix([row for row in pairs if row["bytes"] == size], size)
    if copies := result.content.get("copies"):
        yield _copies(copies)
    for part in ("all_to_all", "ring_vs_tree"):
        name = "Ring and tree, " if part == "ring_vs_tree" else ""
        yield from curves(result.content.get(part) or [], prefix=name)
    if findings := result.content.get("findings"):
        yield Figure(
            "Slow links",
            "Held against their class, or against published figures.",
            Table(
                ["what", "verdict", "GB/s", "usual GB/s", "held against", "causes"],
                [
                    (
                        *(row["what"], row["verdict"], row["gbs"], row["against_gbs"]),
                        *(row["against"], row["causes"]),
                    )
                    for row in findings
                ],
            ),
        )


def _matrix(rows: list[dict[str, Any]], size: int) -> Iterator[Figure]:
    ranks = sorted({row[end] for row in rows for end in ("src", "dst")})
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
                {
                    "type": "heatmap",
                    "x": [f"to {rank}" for rank in ranks],
                    "y": [f"rank {rank}" for rank in ranks],
                    "z": [[speed.get((a, b)) for b in ranks] for a in ranks],
                    "zmin": 0,
                    "zmax": max(filter(None, speed.values())),
                    "hoverongaps": False,
                    "xgap": 2,
                    "ygap": 2,
                    "hovertemplate": "%{y} %{x}: %{z:.3g} GB/s<extra></extra>",
                    "texttemplate": "%{z:.3g}" if len(ranks) <= 10 else "",
                    "colorbar": {"title": {"text": "GB/s"}, "thickness": 10},
                }
            ],
            {
                "height": min(620, 190 + 34 * len(ranks)),
                "xaxis": {"type": "category", "side": "top", "showgrid": False},
                "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
            },
            half=True,
        )


def _copies(rows: list[dict[str, Any]]) -> Figure:
    labels = [f"{row['kind']}, {row['device']}" for row in rows]
    return Figure(
        "Copies between host and device",
        "Expected figures, where the catalogue has one, are in the table with their source.",
        Table(
            ["device", "copy", "bytes", "GB/s", "spread %", "expected GB/s", "by", "verdict"],
            [
                (
                    *(row["device"], row["kind"], row["bytes"], row["gbs"], 100 * row["spread"]),
                    *(row["expected_gbs"], row["expected_source"], row["verdict"]),
                )
                for row in rows
            ],
        ),
        [
            {
                "type": "bar",
                "orientation": "h",
                "y": labels,
                "x": [row["gbs"] for row in rows],
                "text": [row["gbs"] for row in rows],
                "texttemplate": "%{x:,.3~r}",
                "marker": {"color": BLUE},
                "width": 0.6,
                "hovertemplate": "%{y}: %{x:.4g} GB/s<extra></extra>",
            }
        ],
        {
            "height": 140 + 34 * len(rows),
            "xaxis": axis("GB/s"),
            "yaxis": {"type": "category", "autorange": "reversed"},
        },
    )
