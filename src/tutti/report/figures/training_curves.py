"""Figures that compare runs: main numbers, recipes, steps, memory and training curves.

The reader of the page can choose the x axis of the curves: steps, training time or samples.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from tutti.profile.step_breakdown import PARTS
from tutti.report import plot
from tutti.report.plot import Figure, Table
from tutti.report.sources import Run
from tutti.report.summary import key_numbers, metric

_MAX_CURVES = 16  # maximum number of curves (one per rank) in one plot
_DOTTED = {"width": 1, "dash": "dot"}
_MAX_ROWS = 16 * plot.MAX_POINTS  # maximum number of rows in the table below a plot

_GIB = 2**30
_MEMORY_COLOURS = {
    "parameters": plot.BLUE,
    "gradients": plot.SKY,
    "optimizer": plot.GREEN,
    "activations": plot.ORANGE,
    "buffers": plot.PURPLE,
    "fragmentation": plot.VERMILION,
    "other": plot.GREY,
}

_Line = tuple[Run, str, str, dict[str, Any]]  # run, name of the curve, metric, style


def runs_table(runs: Sequence[Run]) -> Iterator[Figure]:
    """Yield a table of the runs. If there are several recipes, also yield their differences."""
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
                "samples/s": None if run.of_scaling else run.summary.get("samples_per_s"),
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
        "The columns `step ms` and `computing %` are measured only in the profiled steps.",
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
    """Yield the parts of a step in each of several profiled runs, as means over ranks."""
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


def memory_by_cause(runs: Sequence[Run]) -> Iterator[Figure]:
    """Yield the parts of each rank's peak memory, and the modules with the largest activations.

    The parts are from the summary.json of `tutti train`, or from the traces of
    `tutti profile --memory`.
    """
    for run in runs:
        ranks = (run.summary.get("memory") or {}).get("ranks") or [
            {**row["memory"], "rank": row["rank"]}
            for row in (run.profile or {}).get("ranks", [])
            if row.get("memory")
        ]
        if not ranks:
            continue
        rows = [{**row, "rank": f"rank {row['rank']}"} for row in ranks]
        drawn = rows[: plot.MAX_POINTS // 4]
        labels = [row["rank"] for row in drawn]
        bars = [
            plot.bar(part, labels, [(row[part] or 0) / _GIB for row in drawn], colour, "GiB")
            for part, colour in _MEMORY_COLOURS.items()
            if any(row[part] for row in drawn)
        ]
        layout = plot.bar_layout("GiB", 150 + 34 * len(drawn), barmode="stack", showlegend=True)
        modules = [
            f"{item['module']} {item['bytes'] / 2**20:.4g} MiB"
            for item in ranks[0]["activations_by_module"][:3]
        ]
        largest = f" Largest activations of rank 0: {', '.join(modules)}." if modules else ""
        noted = dict.fromkeys(row["note"] for row in ranks if row["note"])
        notes = "".join(f" Note: {note}." for note in noted)
        yield plot.figure(
            "memory_by_cause", rows, bars, layout, run=run.name, notes=largest + notes
        )


def curves(runs: Sequence[Run]) -> Iterator[Figure]:
    """Yield one figure per recorded metric, with one curve per run."""
    has_tests = any(metric(run, "test_loss") for run in runs)
    test: dict[str, Any] = {"points": True, "line": _DOTTED}
    loss: list[_Line] = []
    for number, run in enumerate(runs):
        name = run.name + ", training" * has_tests
        loss.append((run, name, "loss", {"number": number}))
        loss.append((run, f"{run.name}, test", "test_loss", {"number": number} | test))
    yield from _figure("loss", runs, loss, plot.axis("loss"))
    for key, name, y_axis, style in (
        ("test_accuracy", "test_accuracy", plot.axis("%"), test),
        ("throughput", "samples_per_s", plot.axis("samples/s", rangemode="tozero"), {}),
        ("learning_rate", "lr", plot.axis("learning rate", rangemode="tozero"), {}),
        ("gradient_norm", "grad_norm", plot.axis("norm", rangemode="tozero"), {}),
    ):
        lines: list[_Line] = [
            (run, run.name, name, {"number": number} | style) for number, run in enumerate(runs)
        ]
        yield from _figure(key, runs, lines, y_axis)


def waiting(runs: Sequence[Run]) -> Iterator[Figure]:
    """Yield, for each run, the share of the training time in which each rank waits."""
    for run in runs:
        means = {
            rank: fmean(y for _, y in points)
            for rank in sorted(run.metrics)
            if (points := metric(run, "wait_fraction", rank))
        }
        drawn = list(means)
        if len(drawn) > _MAX_CURVES:  # draw the ranks that wait least and the ranks that wait most
            drawn.sort(key=lambda rank: means[rank])
            drawn = sorted(drawn[: _MAX_CURVES // 2] + drawn[-_MAX_CURVES // 2 :])
        count = f"{len(drawn)} of {len(means)} ranks"
        left_out = f" {count} are drawn: the ranks that wait least and the ranks that wait most."
        yield from _figure(
            "waiting",
            runs,
            [(run, f"rank {rank}", "wait_fraction", {"rank": rank}) for rank in drawn],
            plot.axis("%", rangemode="tozero"),
            run=run.name,
            left_out=left_out * (len(drawn) < len(means)),
        )


def _figure(
    key: str,
    runs: Sequence[Run],
    lines: Sequence[_Line],
    y_axis: dict[str, Any],
    **words: Any,
) -> Iterator[Figure]:
    """Yield a figure with one curve per line. Yield nothing if no line has points."""
    factor = 100 if y_axis["title"]["text"] == "%" else 1
    limit = max(20, min(plot.MAX_POINTS, _MAX_ROWS // max(1, len(lines))))
    traces: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    longest = 0
    time_unit, seconds = _time_unit(runs)
    for line, (run, name, source, style) in enumerate(lines):
        points = metric(run, source, style.get("rank"))
        longest = max(longest, len(points))
        points = [(step, factor * value) for step, value in plot.thin(points, limit)]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        number = style.get("number", line)
        as_points = style.get("points") or len(points) == 1
        look = {"mode": "lines+markers" if as_points else "lines", "uid": f"curve{line}"}
        # Dashes distinguish curves of the same colour.
        dash = {"dash": plot.DASHES[number // plot.COLOURS % len(plot.DASHES)]}
        trace = plot.curve(name, number, steps, values, **look, line=style.get("line", dash))
        training_time, samples = training_progress(run, steps)
        xs = {"time": [moment / seconds for moment in training_time], "samples": samples}
        traces.append(trace | {"run": run.name, "xs": xs})
        rows += [
            {"name": name, "step": x, "value": y, "seconds": time, "samples": count}
            for x, y, time, count in zip(steps, values, training_time, samples, strict=True)
        ]
    if traces:
        thinned = " Each point is the mean of several steps." * (longest > limit)
        axes = {"xaxis": plot.axis("step"), "yaxis": y_axis}
        titles = {"step": "step", "time": f"training time, {time_unit}", "samples": "samples"}
        yield plot.figure(key, rows, traces, axes, x_axes=titles, **{"thinned": thinned} | words)


def training_progress(run: Run, steps: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return (training seconds, number of samples) up to the end of each step.

    Both values are recorded at status syncs (train/telemetry.py) and interpolated for the steps in
    between. Training time does not include evaluations, checkpoints, or the time between a stop and
    --resume.
    """
    rows = run.metrics[min(run.metrics)]
    keys = ("seconds_per_step", "samples_per_s")
    syncs = [row for row in rows if all(isinstance(row.get(key), int | float) for key in keys)]
    ends = np.array([0, *(row["step"] + 1 for row in syncs)], dtype=float)
    lengths = np.diff(ends) * [row["seconds_per_step"] for row in syncs]
    samples = lengths * [row["samples_per_s"] for row in syncs]
    at = np.array(steps, dtype=float) + 1
    time, count = (
        np.interp(at, ends, [0, *np.cumsum(each)]).tolist() for each in (lengths, samples)
    )
    return time, count


def _time_unit(runs: Sequence[Run]) -> tuple[str, float]:
    """Return (name, seconds) of the time unit: the largest unit below half of the longest run."""
    longest = 0.0
    for run in runs:
        if run.metrics and (rows := run.metrics[min(run.metrics)]):
            longest = max(longest, training_progress(run, [rows[-1]["step"]])[0][0])
    units = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
    return next((unit for unit in units if longest > 2 * unit[1]), units[-1])
