"""Helpers for tests of checks: recorded machines, and healthy machines with a single change."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tutti.machine.checks.checklist import run_checks
from tutti.machine.checks.cluster import Cluster, NcclRank, ProbeResults, RankObservation
from tutti.machine.checks.finding import Finding
from tutti.machine.recording import Machine, read_machines

RECORDED = Path(__file__).parent.parent / "machines"


@functools.cache
def recorded(name: str) -> tuple[Machine, ...]:
    return tuple(read_machines(RECORDED / f"{name}.json"))


HEALTHY = recorded("h100-nvswitch")[0]
"""Eight H100 with NVSwitches and InfiniBand."""
PLAIN = recorded("cpu-only")[0]
"""A small machine without GPU and RDMA."""


def cluster(*machines: Machine, ranks: tuple[RankObservation, ...] = (), **probes: Any) -> Cluster:
    return Cluster(machines, ranks, ProbeResults(**probes))


NCCL_FILES = Path(__file__).parent.parent / "nccl"
"""Topology and graph files in the format of NCCL_TOPO_DUMP_FILE and NCCL_GRAPH_DUMP_FILE."""


def nccl_ranks(
    name: str = "h100-nvswitch", count: int = 8, transport: str = "P2P/CUMEM", **first: Any
) -> tuple[NcclRank, ...]:
    """One rank per GPU of one host, all pairs with one transport; `first` changes rank 0."""
    texts = {
        kind: file.read_text()
        for kind in ("topology", "graphs")
        if (file := NCCL_FILES / f"{name}.{kind}.xml").exists()
    }
    log = [f"{a}[{a}] {b}[{b}] {transport}" for a, b in itertools.permutations(range(count), 2)]
    done = [NcclRank(rank, 0, "done", init_s=0.5 + rank / 10) for rank in range(count)]
    return (replace(done[0], **{"log": log, **texts, **first}), *done[1:])


def problems(checked: Cluster) -> list[Finding]:
    """Return the warnings and failures."""
    return [each for each in run_checks(checked) if each.status in ("warn", "fail")]


def problems_of(*machines: Machine, **options: Any) -> list[Finding]:
    return problems(cluster(*machines, **options))


def summaries(findings: list[Finding]) -> set[tuple[str, str, str]]:
    return {(each.status, each.id, each.scope) for each in findings}


def change(value: Any, **changes: Any) -> Any:
    """Return a copy with changed fields; `a__b` changes field b of field a."""
    for path, new in changes.items():
        name, _, rest = path.partition("__")
        value = replace(
            value, **{name: change(getattr(value, name), **{rest: new}) if rest else new}
        )
    return value


def change_first(
    items: tuple[Any, ...], matches: Callable[[Any], bool], **changes: Any
) -> tuple[Any, ...]:
    """Return the items with the first match changed."""
    index = next(index for index, each in enumerate(items) if matches(each))
    return (*items[:index], change(items[index], **changes), *items[index + 1 :])


def change_gpu(machine: Machine, index: int, **changes: Any) -> Machine:
    gpus = change_first(machine.accelerators, lambda gpu: gpu.index == index, **changes)
    return replace(machine, accelerators=gpus)


def with_variables(machine: Machine, **variables: str) -> Machine:
    return replace(machine, variables={**machine.variables, **variables})
