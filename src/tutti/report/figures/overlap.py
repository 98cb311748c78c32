"""How much of the communication hides behind compute, and how much of a step communicates."""

from collections.abc import Iterator
from typing import Any

from tutti.profile.explain import COMM_RATIO_LIMIT
from tutti.report.collect import Run
from tutti.report.figure import Figure, Table, axis, percent
from tutti.report.figures.ranks import height, left_out, names, shown
from tutti.report.palette import ORANGE, SKY


def figures(run: Run) -> Iterator[Figure]:
    """Two bars for each rank."""
    profile = run.profile or {}
    if profile["world_size"] < 2 or all(row["overlap"] is None for row in profile["ranks"]):
        return  # there is nobody to communicate with, or nothing
    rows = shown(profile)
    limit = 100 * COMM_RATIO_LIMIT
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": names(rows),
            "x": [percent(row[key]) for row in rows],
            "marker": {"color": colour},
            "hovertemplate": "%{y}: %{x:.1f} %<extra>%{fullData.name}</extra>",
        }
        for name, key, colour in (
            ("hidden, of communication and waiting", "overlap", SKY),
            ("moving data, of the step", "comm_ratio", ORANGE),
        )
    ]
    yield Figure(
        "Overlap and communication",
        "Overlap is hidden / (hidden + exposed + wait + bubble). The dotted line is the "
        f"{limit:.0f} % from which moving data deserves attention first.{left_out(profile)}",
        Table(
            ["rank", "overlap %", "communication % of the step", f"within {limit:.0f} %"],
            [
                (
                    row["rank"],
                    percent(row["overlap"]),
                    percent(row["comm_ratio"]),
                    row["comm_ratio_ok"],
                )
                for row in profile["ranks"]
            ],
        ),
        traces,
        {
            "barmode": "group",
            "height": height(rows, 34),
            "xaxis": axis("%", range=[0, 100]),
            "yaxis": {"autorange": "reversed", "type": "category"},
            "shapes": [
                {
                    "type": "line",
                    "yref": "paper",
                    "x0": limit,
                    "x1": limit,
                    "y0": 0,
                    "y1": 1,
                    "line": {"dash": "dot", "width": 1, "color": ORANGE},
                }
            ],
        },
        half=True,
    )
