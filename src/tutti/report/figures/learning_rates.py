"""The loss over learning rates, of `tutti scale --sweep lr=…`: a curve for each number of ranks."""

from collections.abc import Iterator

from tutti.report.collect import Result
from tutti.report.figure import Figure, Table, axis, log_axis, percent
from tutti.report.key_numbers import Rows, learning_rate, of_learning_rates
from tutti.report.palette import series, sign


def figures(result: Result) -> Iterator[Figure]:
    """One, where learning rates were swept."""
    rows = of_learning_rates(result)
    if not rows:
        return
    curves: dict[int, Rows] = {}
    for row in rows:
        curves.setdefault(row["ranks"], []).append(row)
    diverged = any(row.get("diverged") for row in rows)
    yield Figure(
        "Loss over learning rates",
        "Of training, after its last step."
        + " What diverged has no point, and stands in the table." * diverged,
        Table(
            [
                *("learning rate", "ranks", "loss", "test loss", "test accuracy %"),
                *("samples/s", "steps", "diverged"),
            ],
            [
                (
                    *(
                        learning_rate(row),
                        row["ranks"],
                        row.get("final_loss"),
                        row.get("test_loss"),
                    ),
                    *(percent(row.get("test_accuracy")), row.get("samples_per_s")),
                    *(row.get("steps"), bool(row.get("diverged"))),
                )
                for row in rows
            ],
        ),
        [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"{ranks} rank{'s' * (ranks != 1)}",
                "x": [learning_rate(row) for row in own],
                "y": [row.get("final_loss") for row in own],
                "line": {"color": series(number), "width": 2.5},
                "marker": {"color": series(number), "symbol": sign(number), "size": 8},
                "hovertemplate": "%{x}: %{y:.4g}<extra>%{fullData.name}</extra>",
            }
            for number, (ranks, own) in enumerate(sorted(curves.items()))
        ],
        {"xaxis": log_axis("learning rate"), "yaxis": axis("loss"), "showlegend": True},
        half=True,
    )
