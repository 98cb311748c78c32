"""A baseline and its optimized form, measured in turn: how much faster, and how surely."""

from collections.abc import Iterator

from tutti.report.collect import Result
from tutti.report.figure import Figure, Table, log_axis
from tutti.report.palette import BLUE, GREY


def figures(result: Result) -> Iterator[Figure]:
    """One bar for each pair."""
    rows = [row for row in result.content["rows"] if row["speedup"] is not None]
    skipped = [row["name"] for row in result.content["rows"] if row["speedup"] is None]
    if not rows:
        return
    speedups = [row["speedup"] for row in rows]
    yield Figure(
        "Baseline and optimized",
        (f"Not measured here: {', '.join(skipped)}. " if skipped else "")
        + "How many times faster the optimized form is: the median over rounds, whiskers are its "
        "quartiles; the dotted line is no gain. Results of both are checked equal.",
        Table(
            [
                *("pair", "baseline ms", "optimized ms", "times faster", "p25", "p75", "verdict"),
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
        [
            {
                "type": "scatter",
                "mode": "markers",
                "y": [row["name"] for row in rows],
                "x": speedups,
                "error_x": {
                    "type": "data",
                    "array": [row["spread"]["p75"] - row["speedup"] for row in rows],
                    "arrayminus": [row["speedup"] - row["spread"]["p25"] for row in rows],
                    "thickness": 1.5,
                },
                "marker": {"color": BLUE, "size": 11},
                "hovertemplate": "%{y}: %{x:.2f} times<extra></extra>",
            }
        ],
        {
            "height": 140 + 34 * max(3, len(rows)),
            "xaxis": log_axis("times faster", dtick="D2"),
            "yaxis": {"type": "category", "range": [len(rows) - 0.4, -0.6]},
            "shapes": [
                {
                    "type": "line",
                    "yref": "paper",
                    "x0": 1,
                    "x1": 1,
                    "y0": 0,
                    "y1": 1,
                    "line": {"dash": "dot", "width": 1, "color": GREY},
                }
            ],
        },
    )
