"""Memory and utilisation of ranks, side by side, with the spread."""

from collections.abc import Iterator

from tutti.measure.spread import relative_range
from tutti.report.collect import Run
from tutti.report.figure import Figure, Table, axis, percent
from tutti.report.figures.ranks import height, left_out, names, shown
from tutti.report.palette import BLUE, PURPLE, SKY

_GIB = 1 << 30


def figures(run: Run) -> Iterator[Figure]:
    """Utilisation, then memory where traces tell it."""
    profile = run.profile or {}
    rows, everyone = shown(profile), profile["ranks"]
    busy = [row["busy"] for row in everyone]
    yield Figure(
        "Utilisation by rank",
        f"Share of the step in which the rank computes; {_apart(busy)}.{left_out(profile)}",
        Table(["rank", "computing %"], [(row["rank"], percent(row["busy"])) for row in everyone]),
        [
            {
                "type": "bar",
                "orientation": "h",
                "y": names(rows),
                "x": [percent(row["busy"]) for row in rows],
                "marker": {"color": BLUE},
                "width": 0.6,
                "hovertemplate": "%{y} computes %{x:.1f} % of the step<extra></extra>",
            }
        ],
        {
            "height": height(rows, 34),
            "xaxis": axis("%", range=[0, 100]),
            "yaxis": {"autorange": "reversed", "type": "category"},
        },
        half=True,
    )
    kinds = [
        (name, key, colour)
        for name, key, colour in (
            ("device", "memory_bytes", PURPLE),
            ("process", "host_memory_bytes", SKY),
        )
        if any(row.get(key) for row in everyone)
    ]
    if not kinds:
        return
    said = "; ".join(
        f"{name}: {_apart([row[key] for row in everyone if row.get(key)])}"
        for name, key, _ in kinds
    )
    yield Figure(
        "Memory by rank",
        f"The most that was in use. {said.capitalize()}.{left_out(profile)}",
        Table(
            ["rank", *(f"{name} GiB" for name, _, _ in kinds)],
            [
                (
                    row["rank"],
                    *(row[key] / _GIB if row.get(key) else None for _, key, _ in kinds),
                )
                for row in everyone
            ],
        ),
        [
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": names(rows),
                "x": [row[key] / _GIB if row.get(key) else None for row in rows],
                "marker": {"color": colour},
                "hovertemplate": "%{y}: %{x:.3f} GiB<extra>%{fullData.name}</extra>",
            }
            for name, key, colour in kinds
        ],
        {
            "barmode": "group",
            "height": height(rows, 34),
            "xaxis": axis("GiB", rangemode="tozero"),
            "yaxis": {"autorange": "reversed", "type": "category"},
            "showlegend": True,
        },
        half=True,
    )


def _apart(values: list[float]) -> str:
    apart = relative_range(values)
    if len(values) < 2 or apart is None:
        return "there is one rank only" if len(values) < 2 else "nothing to compare"
    return f"ranks are {100 * apart:.1f} % apart"
