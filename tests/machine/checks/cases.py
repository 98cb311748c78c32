"""Machines to judge: recorded ones, and one that is healthy but for a single change."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tutti.machine.checks.checklist import run_checks
from tutti.machine.checks.cluster import Cluster, ProbeResults, RankObservation
from tutti.machine.checks.finding import Finding
from tutti.machine.observation import Machine
from tutti.machine.recording import read_machines

RECORDED = Path(__file__).parent.parent / "machines"


@functools.cache
def recorded(name: str) -> tuple[Machine, ...]:
    return tuple(read_machines(RECORDED / f"{name}.json"))


def healthy() -> Machine:
    """Eight H100 on NVSwitch, with InfiniBand."""
    return recorded("h100-nvswitch")[0]


def plain() -> Machine:
    """A small machine without GPU or RDMA."""
    return recorded("cpu-only")[0]


def found(
    *machines: Machine, probes: ProbeResults | None = None, ranks: tuple[RankObservation, ...] = ()
) -> list[Finding]:
    """What is wrong: warnings and failures."""
    findings = run_checks(Cluster(machines, ranks, probes or ProbeResults()))
    return [each for each in findings if each.status in ("warn", "fail")]


def names(findings: list[Finding]) -> set[tuple[str, str, str]]:
    return {(each.status, each.id, each.scope) for each in findings}


def of_gpu(machine: Machine, index: int, **changes: Any) -> Machine:
    """One GPU changed; `a__b` reaches into a part of it."""
    gpus = list(machine.accelerators)
    gpus[index] = change(gpus[index], **changes)
    return replace(machine, accelerators=tuple(gpus))


def change(value: Any, **changes: Any) -> Any:
    for path, new in changes.items():
        name, _, rest = path.partition("__")
        value = replace(
            value, **{name: change(getattr(value, name), **{rest: new}) if rest else new}
        )
    return value


def first(items: tuple[Any, ...], fits: Callable[[Any], bool], **changes: Any) -> tuple[Any, ...]:
    """The items, the first that fits changed."""
    place = next(place for place, each in enumerate(items) if fits(each))
    return (*items[:place], change(items[place], **changes), *items[place + 1 :])


def with_variables(machine: Machine, **variables: str) -> Machine:
    return replace(machine, variables={**machine.variables, **variables})
