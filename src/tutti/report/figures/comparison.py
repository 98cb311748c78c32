"""The steps of several runs side by side: the mean over ranks of each part."""

from collections.abc import Iterator, Sequence
from statistics import mean

from tutti.profile.step_breakdown import PARTS
from tutti.report.collect import Run
from tutti.report.figure import Figure, Table, axis
from tutti.report.palette import PART_NAMES
from tutti.report.palette import PARTS as COLOURS


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """A bar for each run that was profiled, where there are several."""
    having = {run.name: run.profile["ranks"] for run in runs if run.profile is not None}
    if len(having) < 2:
        return
    parts = {
        name: {part: 1e3 * mean(row["parts_s"][part] for row in rows) for part in PARTS}
        for name, rows in having.items()
    }
    yield Figure(
        "Steps of the runs",
        "Milliseconds of a step, the mean over ranks and steps.",
        Table(
            ["run", "step ms", *(f"{PART_NAMES[part]} ms" for part in PARTS)],
            [(name, sum(each.values()), *each.values()) for name, each in parts.items()],
        ),
        [
            {
                "type": "bar",
                "orientation": "h",
                "name": PART_NAMES[part],
                "y": list(parts),
                "x": [each[part] for each in parts.values()],
                "marker": {"color": COLOURS[part]},
                "hovertemplate": "%{y}: %{x:.2f} ms<extra>%{fullData.name}</extra>",
            }
            for part in PARTS
            if any(each[part] for each in parts.values())
        ],
        {
            "barmode": "stack",
            "height": 150 + 34 * len(parts),
            "xaxis": axis("ms"),
            "yaxis": {"autorange": "reversed", "type": "category"},
        },
    )
