"""Figures of runs side by side: key numbers, recipes, steps, loss, throughput, waiting."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from tutti.profile.step_breakdown import PARTS
from tutti.report import plot
from tutti.report.plot import Figure, Table
from tutti.report.sources import Run
from tutti.report.summary import key_numbers, metric

_MAX_CURVES = 16  # maximum number of curves (one per rank) in one plot
_DOTTED = {"width": 1, "dash": "dot"}

_Points = list[tuple[float, float]]


def runs_table(runs: Sequence[Run]) -> Iterator[Figure]:
    """Yield the runs in a table, and the differences of their recipes if there are several."""
    if not runs:
        return
    rows: list[dict[str, Any]] = []
    for run in runs:
        numbers = key_numbers(run)
        world = run.summary.get("world") or run.started.get("world") or {}
        accuracy = run.summary.get("test_accuracy")
        rows.append(
            {
                "run": run.name,
                "ranks": numbers.ranks,
                "layout": run.summary.get("layout"),
                "backend": world.get("backend") or numbers.backend,
                "steps": run.summary.get("steps"),
                "samples/s": run.summary.get("samples_per_s"),
                "step ms": None if numbers.step_s is None else 1e3 * numbers.step_s,
                "computing %": None if numbers.computing is None else 100 * numbers.computing,
                "final loss": run.summary.get("final_loss"),
                "test accuracy %": None if accuracy is None else 100 * accuracy,
                "ended": run.summary.get("reason"),
            }
        )
    head = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    yield Figure(
        "The runs",
        "Computing is the share of the profiled steps in which a rank computes.",
        Table(head, [[row[name] for name in head] for row in rows]),
    )
    with_recipe = [run for run in runs if run.recipe]
    if len(with_recipe) > 1:
        keys = list(dict.fromkeys(key for run in with_recipe for key in run.recipe))
        settings = [[key, *(run.recipe.get(key, "absent") for run in with_recipe)] for key in keys]
        different = [row for row in settings if any(value != row[1] for value in row[1:])]
        yield Figure(
            "Differences between the recipes",
            f"{len(different)} of {len(keys)} settings differ.",
            Table(["setting", *(run.name for run in with_recipe)], different),
        )


def step_comparison(runs: Sequence[Run]) -> Iterator[Figure]:
    """Yield the parts of the steps of several profiled runs, as means over ranks."""
    profiled = {run.name: run.profile["ranks"] for run in runs if run.profile is not None}
    if len(profiled) < 2:
        return
    means = {
        name: {part: 1e3 * fmean(row["parts_s"][part] for row in rows) for part in PARTS}
        for name, rows in profiled.items()
    }
    bars = []
    for part in PARTS:
        values = [run_parts[part] for run_parts in means.values()]
        if any(values):
            colour = plot.PART_COLOURS[part]
            bars.append(plot.bar(plot.NAMES[part], list(means), values, colour, "ms"))
    yield Figure(
        "Steps of the runs",
        "Milliseconds per step, mean over ranks and steps.",
        Table(
            ["run", "step ms", *(f"{plot.NAMES[part]} ms" for part in PARTS)],
            [(name, sum(values.values()), *values.values()) for name, values in means.items()],
        ),
        bars,
        plot.bar_layout("ms", 150 + 34 * len(means), barmode="stack"),
    )


def loss(runs: Sequence[Run]) -> Iterator[Figure]:
    """Yield the loss of all runs in one plot, then the accuracy of evaluated runs."""
    traces: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    has_tests = any(metric(run, "test_loss") for run in runs)
    for number, run in enumerate(runs):
        points = plot.thin(metric(run, "loss"))
        if not points:
            continue
        name = f"{run.name}, training" if has_tests else run.name
        mode = "lines" if len(points) > 1 else "markers"
        dash = plot.DASHES[number % len(plot.DASHES)]  # so that overlapping curves stay visible
        traces.append(plot.curve(name, number, *_xy(points), mode=mode, line={"dash": dash}))
        tests = metric(run, "test_loss")
        if tests:
            traces.append(plot.curve(f"{run.name}, test", number, *_xy(tests), line=_DOTTED))
        for kind, curve in (("training", points), ("test", tests)):
            rows += [{"run": run.name, "loss of": kind, "step": x, "loss": y} for x, y in curve]
    if traces:
        thinned = max(len(metric(run, "loss")) for run in runs) > len(rows)
        about = " Each point is the mean of several steps." * thinned
        axes = {"xaxis": plot.axis("step"), "yaxis": plot.axis("loss")}
        yield plot.figure("loss", rows, traces, axes, thinned=about)
    accuracies = {run.name: _in_percent(metric(run, "test_accuracy")) for run in runs}
    yield from _step_curves("test_accuracy", accuracies, plot.axis("%"), line=_DOTTED)


def throughput(runs: Sequence[Run]) -> Iterator[Figure]:
    """Yield the samples per second of the runs, then the share of time that each rank waits."""
    rates = {run.name: plot.thin(metric(run, "samples_per_s")) for run in runs}
    yield from _step_curves("throughput", rates, plot.axis("samples/s", rangemode="tozero"))
    for run in runs:
        waiting = {
            rank: _in_percent(plot.thin(points))
            for rank in sorted(run.metrics)
            if (points := metric(run, "wait_fraction", rank))
        }
        drawn = list(waiting)
        if len(drawn) > _MAX_CURVES:  # draw the ranks that wait least and most
            drawn.sort(key=lambda rank: fmean(y for _, y in waiting[rank]))
            drawn = sorted(drawn[: _MAX_CURVES // 2] + drawn[-_MAX_CURVES // 2 :])
        left_out = f" {len(drawn)} of {len(waiting)} ranks are drawn." * (len(drawn) < len(waiting))
        yield from _step_curves(
            "waiting",
            waiting,
            plot.axis("%", rangemode="tozero"),
            {rank: f"rank {rank}" for rank in drawn},
            {"run": run.name, "left_out": left_out},
        )


def _step_curves(
    key: str,
    curves: Mapping[Any, _Points],
    y_axis: dict[str, Any],
    labels: Mapping[Any, str] | None = None,
    words: Mapping[str, Any] | None = None,
    **style: Any,
) -> Iterator[Figure]:
    """Yield curves over steps. The table has all curves, and the plot those in `labels`."""
    if not any(curves.values()):
        return
    rows = [{"name": name, "step": x, "value": y} for name in curves for x, y in curves[name]]
    labels = labels or {name: name for name in curves}
    traces = [
        plot.curve(label, number, *_xy(curves[name]), **style)
        for number, (name, label) in enumerate(labels.items())
        if curves[name]
    ]
    axes = {"xaxis": plot.axis("step"), "yaxis": y_axis}
    yield plot.figure(key, rows, traces, axes, **(words or {}))


def _xy(points: _Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _in_percent(points: _Points) -> _Points:
    return [(x, 100 * y) for x, y in points]
