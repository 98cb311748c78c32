"""Runs side by side: key numbers, recipes, steps, loss, accuracy, throughput, waiting."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from tutti.profile.step_breakdown import PARTS
from tutti.report import plot
from tutti.report.plot import Figure, HalfFigure, Table
from tutti.report.sources import Run
from tutti.report.summary import key_numbers, metric

_MOST_CURVES = 16  # one curve per rank, in one plot


def runs_table(runs: Sequence[Run]) -> Iterator[Figure]:
    """The runs in a table, and the differences of their recipes if there are several."""
    if not runs:
        return
    rows = []
    for run in runs:
        numbers = key_numbers(run)
        world = run.summary.get("world") or run.started.get("world") or {}
        rows.append(
            {
                "run": run.name,
                "ranks": numbers.ranks,
                "layout": run.summary.get("layout"),
                "backend": world.get("backend") or numbers.backend,
                "steps": run.summary.get("steps"),
                "samples/s": numbers.samples_per_s,
                "step ms": _scaled(1e3, numbers.step_s),
                "computing %": _scaled(100, numbers.computing),
                "final loss": run.summary.get("final_loss"),
                "test accuracy %": _scaled(100, run.summary.get("test_accuracy")),
                "ended": run.summary.get("reason"),
            }
        )
    head = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    yield Figure(
        "The runs",
        "Computing is the share of the profiled steps in which a rank computes.",
        Table(head, [[row[name] for name in head] for row in rows]),
    )
    yield from _recipe_differences([run for run in runs if run.recipe])


def _scaled(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _recipe_differences(runs: Sequence[Run]) -> Iterator[Figure]:
    if len(runs) < 2:
        return
    keys = list(dict.fromkeys(key for run in runs for key in run.recipe))
    rows: list[list[Any]] = []
    for key in keys:
        values = [run.recipe.get(key, "absent") for run in runs]
        if any(value != values[0] for value in values):
            rows.append([key, *values])
    about = f"{len(rows)} of {len(keys)} settings differ." if rows else "All settings are equal."
    table = Table(["setting", *(run.name for run in runs)], rows)
    yield Figure("Differences between the recipes", about, table)


def step_comparison(runs: Sequence[Run]) -> Iterator[Figure]:
    """The steps of several profiled runs: the mean over ranks of each part."""
    profiled = {run.name: run.profile["ranks"] for run in runs if run.profile is not None}
    if len(profiled) < 2:
        return
    parts = {
        name: {part: 1e3 * fmean(row["parts_s"][part] for row in rows) for part in PARTS}
        for name, rows in profiled.items()
    }
    yield Figure(
        "Steps of the runs",
        "Milliseconds per step, mean over ranks and steps.",
        Table(
            ["run", "step ms", *(f"{plot.PART_NAMES[part]} ms" for part in PARTS)],
            [(name, sum(each.values()), *each.values()) for name, each in parts.items()],
        ),
        [
            plot.bar(
                plot.PART_NAMES[part],
                list(parts),
                [each[part] for each in parts.values()],
                plot.PART_COLOURS[part],
                "ms",
            )
            for part in PARTS
            if any(each[part] for each in parts.values())
        ],
        plot.bar_layout("ms", 150 + 34 * len(parts), barmode="stack"),
    )


def loss(runs: Sequence[Run]) -> Iterator[Figure]:
    """The loss of all runs in one plot; then the accuracy of evaluated runs."""
    traces: list[dict[str, Any]] = []
    rows: list[tuple[Any, ...]] = []
    has_tests = any(metric(run, "test_loss") for run in runs)
    for number, run in enumerate(runs):
        points = plot.thin(metric(run, "loss"))
        if not points:
            continue
        name = f"{run.name}, training" if has_tests else run.name
        mode = "lines" if len(points) > 1 else "markers"
        dash = plot.DASHES[number % len(plot.DASHES)]  # so that overlapping curves stay visible
        traces.append(plot.curve(name, number, *_xy(points), mode=mode, line={"dash": dash}))
        rows += [(run.name, "training", x, y) for x, y in points]
        if tests := metric(run, "test_loss"):
            traces.append(plot.curve(f"{run.name}, test", number, *_xy(tests), line=_DOTTED))
            rows += [(run.name, "test", x, y) for x, y in tests]
    if traces:
        about = "Training loss, mean over all ranks."
        if max(len(metric(run, "loss")) for run in runs) > len(rows):
            about += " Each point is the mean of several steps."
        yield HalfFigure(
            "Loss",
            about,
            Table(["run", "loss of", "step", "loss"], rows),
            traces,
            {"xaxis": plot.axis("step"), "yaxis": plot.axis("loss")},
        )
    yield from _step_curves(
        "Test accuracy",
        "In per cent, after the step.",
        ("run", "accuracy %"),
        {run.name: _in_percent(metric(run, "test_accuracy")) for run in runs},
        plot.axis("%"),
        line=_DOTTED,
    )


def throughput(runs: Sequence[Run]) -> Iterator[Figure]:
    """Samples per second of the runs, then the share of time that each rank waits."""
    yield from _step_curves(
        "Throughput",
        "Samples per second over all ranks, measured about once a second; the first point "
        "includes start-up.",
        ("run", "samples/s"),
        {run.name: plot.thin(metric(run, "samples_per_s")) for run in runs},
        plot.axis("samples/s", rangemode="tozero"),
    )
    for run in runs:
        waiting = {
            rank: _in_percent(plot.thin(points))
            for rank in sorted(run.metrics)
            if (points := metric(run, "wait_fraction", rank))
        }
        shown = list(waiting)
        if len(shown) > _MOST_CURVES:  # draw the ranks that wait least and most
            shown.sort(key=lambda rank: fmean(y for _, y in waiting[rank]))
            shown = sorted(shown[: _MOST_CURVES // 2] + shown[-_MOST_CURVES // 2 :])
        drawn = f" {len(shown)} of {len(waiting)} ranks are drawn." * (len(shown) < len(waiting))
        yield from _step_curves(
            f"Waiting for other ranks: {run.name}",
            "Share of the time, measured during training. The rank that waits least delays the "
            f"others.{drawn}",
            ("rank", "waiting %"),
            waiting,
            plot.axis("%", rangemode="tozero"),
            {rank: f"rank {rank}" for rank in shown},
        )


_Points = list[tuple[float, float]]
_DOTTED = {"width": 1, "dash": "dot"}


def _step_curves(
    title: str,
    about: str,
    columns: tuple[str, str],
    curves: Mapping[Any, _Points],
    y_axis: dict[str, Any],
    labels: Mapping[Any, str] | None = None,
    **style: Any,
) -> Iterator[Figure]:
    """Curves over steps. The table has all curves; the plot has those with a name in `labels`."""
    if not any(curves.values()):
        return
    labels = labels or {name: name for name in curves}
    rows = [(name, x, y) for name, points in curves.items() for x, y in points]
    yield HalfFigure(
        title,
        about,
        Table([columns[0], "step", columns[1]], rows),
        [
            plot.curve(label, number, *_xy(curves[name]), **style)
            for number, (name, label) in enumerate(labels.items())
            if curves[name]
        ],
        {"xaxis": plot.axis("step"), "yaxis": y_axis},
    )


def _xy(points: _Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _in_percent(points: _Points) -> _Points:
    return [(x, 100 * y) for x, y in points]
