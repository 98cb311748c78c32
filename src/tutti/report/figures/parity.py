"""Layouts against one device: how far losses and gradients are apart, and what is allowed."""

from collections.abc import Iterator
from typing import Any

from tutti.report.collect import Result
from tutti.report.figure import Figure, Table, axis
from tutti.report.palette import BLUE, GREEN, VERMILION

# An error of nothing has no logarithm: it is drawn here.
_LEAST = 1e-17


def figures(result: Result) -> Iterator[Figure]:
    """A mark for each layout and quantity, and the tolerance as a line."""
    content = result.content
    rows = [row for row in content["rows"] if not row.get("not_applicable")]
    failed = [row for row in rows if not row["ok"]]
    said = f"{len(failed)} of {len(rows)} layouts fail" if failed else "every layout agrees"
    limit = (content.get("tolerance") or {}).get("gradient")
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [row["layout"] for row in rows],
            "y": [max(_LEAST, row[key]) if row[key] is not None else None for row in rows],
            "marker": {"color": colour, "symbol": symbol, "size": 9},
            "hovertemplate": "%{x}: %{y:.2g}<extra>%{fullData.name}</extra>",
        }
        for name, key, colour, symbol in (
            ("loss", "loss_rel_err", GREEN, "diamond"),
            ("gradient", "grad_rel_err", BLUE, "circle"),
        )
    ]
    layout: dict[str, Any] = {
        "xaxis": {"type": "category", "tickangle": -45},
        "yaxis": axis("relative error", type="log", exponentformat="power"),
        "height": 400,
        "showlegend": True,
    }
    if limit:
        layout["shapes"] = [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": limit,
                "y1": limit,
                "line": {"dash": "dot", "width": 1.5, "color": VERMILION},
            }
        ]
    yield Figure(
        "Layouts against one device",
        f"{content.get('precision', '')}: {said}. The dotted line is the gradient's tolerance.",
        Table(
            ["layout", "ranks", "loss error", "gradient error", "worst parameter", "ok", "finding"],
            [
                (
                    *(row["layout"], row["ranks"], row.get("loss_rel_err")),
                    *(row.get("grad_rel_err"), row.get("worst_parameter"), row["ok"]),
                    row.get("not_applicable") or row.get("diagnosis"),
                )
                for row in content["rows"]
            ],
        ),
        traces if rows else (),
        layout,
    )
