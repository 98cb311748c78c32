"""Who waited for whom: a heat map, and what is known of those who are late."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tutti.report.collect import Run
from tutti.report.figure import Figure, Table, axis, milliseconds, percent
from tutti.report.palette import PART_NAMES

# Beyond so many, the cells are too small for their numbers.
_NUMBERS_FIT = 10
# Of more ranks than these, only the costliest have a column.
_MOST_COLUMNS = 48


def figures(run: Run) -> Iterator[Figure]:
    """The matrix, and the stragglers."""
    profile = run.profile or {}
    ranks = [row["rank"] for row in profile["ranks"]]
    if len(ranks) < 2:
        return
    total: dict[tuple[int, int], float] = defaultdict(float)
    steps: dict[int, int] = defaultdict(int)
    for step in profile["steps"]:
        steps[step["rank"]] += 1
        for late, seconds in step["waited_for_s"].items():
            total[step["rank"], int(late)] += seconds
    cost = {late: sum(total[rank, late] for rank in ranks) for late in ranks}
    late_ranks = sorted(sorted(ranks, key=lambda rank: -cost[rank])[:_MOST_COLUMNS])
    left = "" if late_ranks == ranks else f" The {len(late_ranks)} costliest have a column."
    cells = [
        [None if a == b else 1e3 * total[a, b] / max(1, steps[a]) for b in late_ranks]
        for a in ranks
    ]
    yield Figure(
        "Who waited for whom",
        "Milliseconds of a step that the rank of the row waited for the rank of the column: it "
        f"neither computed nor moved data, because the other had not arrived.{left}",
        Table(
            ["rank", *(f"for rank {rank} ms" for rank in late_ranks)],
            [(rank, *row) for rank, row in zip(ranks, cells, strict=True)],
        ),
        [
            {
                "type": "heatmap",
                "x": [f"for {rank}" for rank in late_ranks],
                "y": [f"rank {rank}" for rank in ranks],
                "z": cells,
                "zmin": 0,
                "zmax": max(filter(None, (each for row in cells for each in row)), default=1),
                "hoverongaps": False,
                "hovertemplate": "%{y} waited %{z:.2f} ms of a step %{x}<extra></extra>",
                "texttemplate": "%{z:.1f}" if len(ranks) <= _NUMBERS_FIT else "",
                "xgap": 2,
                "ygap": 2,
                "colorbar": {"title": {"text": "ms"}, "thickness": 10},
            }
        ],
        {
            "height": min(620, 190 + 34 * len(ranks)),
            "xaxis": {"type": "category", "side": "top", "showgrid": False},
            "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
        },
        half=True,
    )
    yield from _stragglers(profile)


def _stragglers(profile: dict[str, Any]) -> Iterator[Figure]:
    rows = profile.get("stragglers") or []
    if not rows:
        return
    yield Figure(
        "Late ranks",
        "What a step of the others lost to each: bars are the mean, whiskers the least and the "
        "most of the steps. The last column of the table is where to look for the cause.",
        Table(
            [
                *("rank", "others wait ms", "least ms", "most ms", "of the step %"),
                *("in steps", "of steps", "last at", "of collectives", "it has more of", "ms more"),
            ],
            [
                (
                    row["rank"],
                    *(milliseconds(row["cost_s"][key]) for key in ("mean", "min", "max")),
                    percent(row["cost_share"]),
                    *(row[key] for key in ("steps", "of_steps", "last", "of_collectives")),
                    PART_NAMES.get(row["instead"]["part"], row["instead"]["part"]),
                    milliseconds(row["instead"]["seconds"]),
                )
                for row in rows
            ],
        ),
        [
            {
                "type": "bar",
                "x": [f"rank {row['rank']}" for row in rows[:24]],
                "y": [1e3 * row["cost_s"]["mean"] for row in rows[:24]],
                "error_y": {
                    "type": "data",
                    "array": [1e3 * (r["cost_s"]["max"] - r["cost_s"]["mean"]) for r in rows[:24]],
                    "arrayminus": [
                        1e3 * (r["cost_s"]["mean"] - r["cost_s"]["min"]) for r in rows[:24]
                    ],
                    "thickness": 1.2,
                },
                "marker": {"color": "#d55e00"},
                "width": 0.5,
                "hovertemplate": "others wait %{y:.2f} ms of a step for %{x}<extra></extra>",
            }
        ],
        {
            "height": min(620, 190 + 34 * len(profile["ranks"])),
            "xaxis": {"type": "category"},
            "yaxis": axis("ms of a step", rangemode="tozero"),
        },
        half=True,
    )
