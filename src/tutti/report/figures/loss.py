"""The loss over steps, of all runs in one plot; then accuracy, where runs were evaluated."""

from collections.abc import Iterator, Sequence
from typing import Any

from tutti.report.collect import Run
from tutti.report.figure import Figure, Table, axis, thin
from tutti.report.palette import dash, series, sign


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Loss, and test accuracy."""
    traces: list[dict[str, Any]] = []
    rows: list[tuple[Any, ...]] = []
    for number, run in enumerate(runs):
        points = values(run, "loss")
        if not points:
            continue
        thinned = thin(points)
        name = f"{run.name}, training" if any(values(each, "test_loss") for each in runs) else None
        traces.append(
            {
                "type": "scatter",
                "mode": "lines" if len(thinned) > 1 else "markers",
                "name": name or run.name,
                "x": [x for x, _ in thinned],
                "y": [y for _, y in thinned],
                "line": {"color": series(number), "width": 2, "dash": dash(number)},
                "marker": {"color": series(number)},
            }
        )
        rows += [(run.name, "training", x, y) for x, y in thinned]
        tests = values(run, "test_loss")
        if tests:
            traces.append(_marks(f"{run.name}, test", number, tests))
            rows += [(run.name, "test", x, y) for x, y in tests]
    if traces:
        longest = max(len(values(run, "loss")) for run in runs)
        about = "Training loss, the mean over all ranks."
        if longest > len(rows):
            about += " Each point is the mean of several steps."
        yield Figure(
            "Loss",
            about,
            Table(["run", "loss of", "step", "loss"], rows),
            traces,
            {"xaxis": axis("step"), "yaxis": axis("loss"), "showlegend": len(traces) > 1},
            half=True,
        )
    yield from _accuracy(runs)


def _accuracy(runs: Sequence[Run]) -> Iterator[Figure]:
    found = {run.name: values(run, "test_accuracy") for run in runs}
    if any(found.values()):
        yield Figure(
            "Test accuracy",
            "In per cent, after the step.",
            Table(
                ["run", "step", "accuracy %"],
                [(name, x, 100 * y) for name, points in found.items() for x, y in points],
            ),
            [
                _marks(name, number, [(x, 100 * y) for x, y in points])
                for number, (name, points) in enumerate(found.items())
                if points
            ],
            {
                "xaxis": axis("step"),
                "yaxis": axis("%"),
                "showlegend": len(found) > 1,
            },
            half=True,
        )


def values(run: Run, name: str, rank: int | None = None) -> list[tuple[float, float]]:
    """(step, value) of a metric, of one rank; what all ranks know is taken from the first."""
    if not run.metrics:
        return []
    rows = run.metrics.get(min(run.metrics) if rank is None else rank, [])
    return [
        (row["step"], float(row[name])) for row in rows if isinstance(row.get(name), int | float)
    ]


def _marks(name: str, number: int, points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": {"color": series(number), "width": 1, "dash": "dot"},
        "marker": {"color": series(number), "symbol": sign(number + 1), "size": 8},
    }
