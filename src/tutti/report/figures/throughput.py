"""Samples per second over steps; and for each rank what it waited, where that was measured."""

from collections.abc import Iterator, Sequence

from tutti.report.collect import Run
from tutti.report.figure import Figure, Table, axis, thin
from tutti.report.figures.loss import values
from tutti.report.palette import series, sign

# A rank's own curve is drawn where there are at most so many.
_MOST_RANKS = 16


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Throughput of the runs, then shares of waiting and of input by rank."""
    found = {run.name: thin(values(run, "samples_per_s")) for run in runs}
    if any(found.values()):
        yield Figure(
            "Throughput",
            "Samples per second of all ranks together, measured about once a second; the first "
            "point holds start-up.",
            Table(
                ["run", "step", "samples/s"],
                [(name, x, y) for name, points in found.items() for x, y in points],
            ),
            [
                _curve(name, number, points)
                for number, (name, points) in enumerate(found.items())
                if points
            ],
            {
                "xaxis": axis("step"),
                "yaxis": axis("samples/s", rangemode="tozero"),
                "showlegend": len(found) > 1,
            },
            half=True,
        )
    for run in runs:
        yield from _by_rank(run, "wait_fraction", "Waiting for other ranks")


def _by_rank(run: Run, metric: str, title: str) -> Iterator[Figure]:
    found = {rank: thin(values(run, metric, rank)) for rank in sorted(run.metrics)}
    found = {rank: points for rank, points in found.items() if points}
    if not found:
        return
    shown = list(found)
    if len(shown) > _MOST_RANKS:  # the rank that waits least is the one that is late
        mean = {rank: sum(y for _, y in found[rank]) / len(found[rank]) for rank in found}
        by_wait = sorted(mean, key=lambda rank: mean[rank])
        shown = sorted(by_wait[: _MOST_RANKS // 2] + by_wait[-_MOST_RANKS // 2 :])
    left = f" {len(shown)} of {len(found)} ranks are drawn." if len(shown) < len(found) else ""
    yield Figure(
        f"{title}: {run.name}",
        f"Share of the time, live, by rank. Whom all others wait for waits least.{left}",
        Table(
            ["rank", "step", "waiting %"],
            [(rank, x, 100 * y) for rank, points in found.items() for x, y in points],
        ),
        [
            _curve(f"rank {rank}", number, [(x, 100 * y) for x, y in found[rank]])
            for number, rank in enumerate(shown)
        ],
        {"xaxis": axis("step"), "yaxis": axis("%", rangemode="tozero")},
        half=True,
    )


def _curve(name: str, number: int, points: Sequence[tuple[float, float]]) -> dict[str, object]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": {"color": series(number), "width": 2},
        "marker": {"color": series(number), "symbol": sign(number), "size": 6},
    }
