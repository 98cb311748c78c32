"""The doctor's checks: what is wrong first, with the cure."""

from collections import Counter
from collections.abc import Iterator

from tutti.report.collect import Result
from tutti.report.figure import Figure, Table
from tutti.report.palette import GREEN, GREY, ORANGE, VERMILION

_COLOURS = {"fail": VERMILION, "warn": ORANGE, "pass": GREEN, "skip": GREY}


def figures(result: Result) -> Iterator[Figure]:
    """One bar of all checks, and the table."""
    checks = result.content["checks"]
    count = Counter(each["status"] for each in checks)
    order = [*(name for name in _COLOURS if name in count), *(set(count) - set(_COLOURS))]
    ordered = sorted(checks, key=lambda each: order.index(each["status"]))
    yield Figure(
        "Checks",
        ", ".join(f"{count[name]} {name}" for name in order) + ".",
        Table(
            ["status", "check", "host", "where", "observed", "expected", "cure"],
            [
                (
                    *(each["status"], each["id"], each.get("host"), each["scope"]),
                    *(each["observed"], each["expected"], each["cure"]),
                )
                for each in ordered
            ],
        ),
        [
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": ["checks"],
                "x": [count[name]],
                "marker": {"color": _COLOURS.get(name, GREY)},
                "hovertemplate": "%{x}<extra>%{fullData.name}</extra>",
            }
            for name in order
        ],
        {
            "barmode": "stack",
            "height": 150,
            "xaxis": {"showgrid": False},
            "yaxis": {"visible": False},
            "showlegend": True,
        },
    )
