"""The sections of a page, in order. To add a figure, write a generator and list it in SECTIONS."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tutti.report.figures import (
    bench_plots,
    machine_health,
    scaling_curves,
    step_communication,
    step_profile,
    step_timeline,
    training_curves,
)
from tutti.report.plot import Figure
from tutti.report.sources import ReportSources


@dataclass(frozen=True)
class Section:
    """Each selected source is passed to each maker; the figures of a source are shown together."""

    title: str
    select: Callable[[ReportSources], Iterable[Any]]
    makers: tuple[Callable[[Any], Iterator[Figure]], ...]


def _results(*schemas: str) -> Callable[[ReportSources], Iterable[Any]]:
    return lambda sources: sources.of_schema(*schemas)


def _runs(sources: ReportSources) -> list[Any]:
    return [sources.runs]


def _profiled(sources: ReportSources) -> list[Any]:
    return list(sources.profiled)


def _other_results(sources: ReportSources) -> list[Any]:
    return [each for each in sources.results if each.schema not in _WITH_FIGURES]


_WITH_FIGURES = (
    *("tutti.scale", "tutti.bench.collectives", "tutti.bench.bandwidth", "tutti.bench.pairs"),
    *("tutti.bench.symmetric", "tutti.parity", "tutti.doctor", "tutti.topo", "tutti.machine"),
)

SECTIONS = (
    Section("Runs", _runs, (training_curves.runs_table, training_curves.step_comparison)),
    Section("Training", _runs, (training_curves.loss, training_curves.throughput)),
    Section(
        "Scaling", _results("tutti.scale"), (scaling_curves.scaling, scaling_curves.learning_rates)
    ),
    Section(
        "The step",
        _profiled,
        (
            *(step_profile.parts, step_timeline.timeline, step_profile.waits),
            *(step_communication.overlap, step_profile.utilization, step_profile.memory),
            step_communication.communication,
        ),
    ),
    Section("Collectives", _results("tutti.bench.collectives"), (bench_plots.collectives,)),
    Section("Bandwidth", _results("tutti.bench.bandwidth"), (bench_plots.bandwidth,)),
    Section("Symmetric memory", _results("tutti.bench.symmetric"), (bench_plots.symmetric,)),
    Section("Pairs", _results("tutti.bench.pairs"), (bench_plots.pairs,)),
    Section("Parity", _results("tutti.parity"), (machine_health.parity,)),
    Section("Topology", _results("tutti.topo", "tutti.machine"), (machine_health.topology,)),
    Section("Health", _results("tutti.doctor"), (machine_health.checks,)),
    Section("Other results", _other_results, (machine_health.result_tables,)),
    Section("Environment", lambda sources: [sources], (machine_health.environments,)),
)
