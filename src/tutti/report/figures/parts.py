"""The parts of a step on each rank: in per cent, and in milliseconds. They add up to the step."""

from collections.abc import Iterator
from typing import Any

from tutti.profile.step_breakdown import PARTS
from tutti.report.collect import Run
from tutti.report.figure import Figure, Table, axis, milliseconds, percent
from tutti.report.figures.ranks import height, left_out, names, shown
from tutti.report.palette import PART_NAMES
from tutti.report.palette import PARTS as COLOURS


def figures(run: Run) -> Iterator[Figure]:
    """Two plots of the same bars."""
    profile = run.profile or {}
    rows = shown(profile)
    for title, unit, key, scale in (
        ("The step's parts, in per cent", "%", "parts_share", percent),
        ("The step's parts, in milliseconds", "ms", "parts_s", milliseconds),
    ):
        table = Table(
            ["rank", f"step {unit}", *(f"{PART_NAMES[name]} {unit}" for name in PARTS)],
            [
                (
                    row["rank"],
                    100.0 if unit == "%" else milliseconds(row["step_s"]["mean"]),
                    *(scale(row[key][name]) for name in PARTS),
                )
                for row in profile["ranks"]
            ],
        )
        about = f"Mean of {max(row['steps'] for row in rows)} steps."
        if unit == "%":
            about = "Every moment of a step is in one part." + left_out(profile)
        used = [name for name in PARTS if any(row[key][name] for row in profile["ranks"])]
        traces: list[dict[str, Any]] = [
            {
                "type": "bar",
                "orientation": "h",
                "name": PART_NAMES[name],
                "y": names(rows),
                "x": [scale(row[key][name]) for row in rows],
                "marker": {"color": COLOURS[name]},
                "hovertemplate": f"%{{y}}: %{{x:.2f}} {unit}<extra>%{{fullData.name}}</extra>",
            }
            for name in used
        ]
        layout = {
            "barmode": "stack",
            "height": height(rows),
            "xaxis": axis(unit, **({"range": [0, 100]} if unit == "%" else {})),
            "yaxis": {"autorange": "reversed", "type": "category"},
        }
        yield Figure(title, about, table, traces, layout, half=True)
