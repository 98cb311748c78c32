"""The runs in a table, and what their recipes differ in."""

from collections.abc import Iterator, Sequence
from typing import Any

from tutti.report.collect import Run
from tutti.report.figure import Figure, Table, milliseconds, percent
from tutti.report.key_numbers import of_run


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Runs side by side; differences where there is more than one recipe."""
    if not runs:
        return
    rows = []
    for run in runs:
        numbers = of_run(run)
        world = run.summary.get("world") or run.started.get("world") or {}
        rows.append(
            (
                run.name,
                numbers.ranks,
                run.summary.get("layout"),
                world.get("backend") or numbers.backend,
                run.summary.get("steps"),
                numbers.samples_per_s,
                milliseconds(numbers.step_s),
                percent(numbers.computing),
                run.summary.get("final_loss"),
                percent(run.summary.get("test_accuracy")),
                run.summary.get("reason"),
            )
        )
    head = ["run", "ranks", "layout", "backend", "steps", "samples/s", "step ms", "computing %"]
    head += ["final loss", "test accuracy %", "ended"]
    used = [n for n in range(len(head)) if any(row[n] is not None for row in rows)]
    yield Figure(
        "The runs",
        "Computing is the share of the profiled steps in which a rank computes.",
        Table([head[n] for n in used], [[row[n] for n in used] for row in rows]),
    )
    yield from _differences(runs)


def _differences(runs: Sequence[Run]) -> Iterator[Figure]:
    having = [run for run in runs if run.recipe]
    if len(having) < 2:
        return
    keys = list(dict.fromkeys(key for run in having for key in run.recipe))
    rows: list[list[Any]] = []
    for key in keys:
        given = [run.recipe.get(key, "not there") for run in having]
        if any(each != given[0] for each in given):
            rows.append([key, *given])
    about = f"Of {len(keys)} settings {len(rows)} differ." if rows else "All settings are equal."
    yield Figure(
        "What the recipes differ in", about, Table(["setting", *(r.name for r in having)], rows)
    )
