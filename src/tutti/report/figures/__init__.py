"""The figures of a page, in order: to add one, write `figures(source)` and name it here."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tutti.report.collect import Material
from tutti.report.figure import Figure
from tutti.report.figures import (
    bandwidth,
    checks,
    collectives,
    comparison,
    environment,
    learning_rates,
    loss,
    memory,
    overlap,
    pairs,
    parity,
    parts,
    recipes,
    scaling,
    symmetric,
    tables,
    throughput,
    timeline,
    topology,
    traffic,
    waits,
)

Maker = Callable[[Any], Iterator[Figure]]


@dataclass(frozen=True)
class Section:
    """Each source is handed to each maker; figures of one source stand together."""

    title: str
    sources: Callable[[Material], Iterable[Any]]
    makers: tuple[Maker, ...]


def _of(*schemas: str) -> Callable[[Material], Iterable[Any]]:
    return lambda material: [each for schema in schemas for each in material.of(schema)]


def _runs(material: Material) -> list[Any]:
    return [material.runs]


def _other(material: Material) -> list[Any]:
    return [each for each in material.results if each.schema not in _SHOWN]


_SHOWN = (
    *("tutti.scale", "tutti.bench.collectives", "tutti.bench.bandwidth", "tutti.bench.pairs"),
    *("tutti.bench.symmetric", "tutti.parity", "tutti.doctor", "tutti.topo", "tutti.machine"),
)

SECTIONS = (
    Section("Runs", _runs, (recipes.figures, comparison.figures)),
    Section("Training", _runs, (loss.figures, throughput.figures)),
    Section("Scaling", _of("tutti.scale"), (scaling.figures, learning_rates.figures)),
    Section(
        "The step",
        lambda material: material.profiled,
        (
            parts.figures,
            timeline.figures,
            waits.figures,
            overlap.figures,
            memory.figures,
            traffic.figures,
        ),
    ),
    Section("Collectives", _of("tutti.bench.collectives"), (collectives.figures,)),
    Section("Bandwidth", _of("tutti.bench.bandwidth"), (bandwidth.figures,)),
    Section("Symmetric memory", _of("tutti.bench.symmetric"), (symmetric.figures,)),
    Section("Pairs", _of("tutti.bench.pairs"), (pairs.figures,)),
    Section("Parity", _of("tutti.parity"), (parity.figures,)),
    Section("Topology", _of("tutti.topo", "tutti.machine"), (topology.figures,)),
    Section("Health", _of("tutti.doctor"), (checks.figures,)),
    Section("Other results", _other, (tables.figures,)),
    Section("Environment", lambda material: [material], (environment.figures,)),
)
