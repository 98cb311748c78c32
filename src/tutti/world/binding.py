"""Bind this process to the CPUs near its device, and size its thread pool to the cores it has."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tutti.machine.cpus import (
    allowed_cpus,
    cpu_quota,
    format_cpu_list,
    numa_nodes,
    parse_cpu_list,
)
from tutti.machine.gpus import numa_node_of_gpu
from tutti.world.placement import Place, cpus_for
from tutti.world.rollcall import Answer


@dataclass(frozen=True)
class Binding:
    """The CPUs and threads of this process, each with its reason."""

    cpus: str
    cpus_reason: str
    threads: int
    threads_reason: str


def visible_gpus() -> list[str]:
    """The UUIDs of the GPUs that CUDA shows this process, in its order."""
    if not torch.cuda.is_available():
        return []
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [str(device.uuid) for device in properties]


def bind(
    answers: Sequence[Answer], places: Sequence[Place], rank: int, env: Mapping[str, str]
) -> Binding:
    """Pin this rank to its share of the CPUs and set torch's thread count; say what was done."""
    numa = numa_nodes()
    chosen, cpus_reason = _choose_cpus(answers, places[rank], numa)
    if chosen is not None:
        os.sched_setaffinity(0, parse_cpu_list(chosen))
    cpus = format_cpu_list(allowed_cpus())
    threads, threads_reason = _choose_threads(answers, places[rank], len(allowed_cpus()), env)
    torch.set_num_threads(threads)
    return Binding(cpus, cpus_reason, threads, threads_reason)


def _choose_cpus(
    answers: Sequence[Answer], place: Place, numa: Mapping[int, tuple[int, ...]]
) -> tuple[str | None, str]:
    if place.gpu is None:
        cpus = cpus_for(answers, place.rank, numa)
        return (cpus, "its share of the CPUs") if cpus else (None, "as this process was started")
    node = numa_node_of_gpu(_pci_address(place.gpu))
    near = set(allowed_cpus()).intersection(numa.get(-1 if node is None else node, ()))
    if not near:
        return None, "as this process was started: the GPU's NUMA node is unknown"
    return format_cpu_list(near), f"NUMA node {node} of cuda:{place.gpu}"


def _choose_threads(
    answers: Sequence[Answer], place: Place, cores: int, env: Mapping[str, str]
) -> tuple[int, str]:
    if env.get("OMP_NUM_THREADS", "").isdecimal():
        by_us = "TUTTI_RUN_ID" in env
        reason = "OMP_NUM_THREADS" + (", set by tutti run unless you did" if by_us else "")
        return max(1, int(env["OMP_NUM_THREADS"])), reason
    # Ranks that were given the same CPUs share what this one is bound to, in equal parts of all.
    mine = answers[place.rank]
    together = [a for a in answers if a.machine == mine.machine and a.cpus == mine.cpus]
    share = len(together) * cores / len(parse_cpu_list(mine.cpus))
    quota = cpu_quota()
    if quota is not None and quota < len(parse_cpu_list(mine.cpus)):
        cores, share = quota, len(together)
    sharers = max(1, math.ceil(share))
    return max(1, cores // sharers), f"{cores} cores / {sharers} rank{'s' * (sharers != 1)}"


def _pci_address(gpu: int) -> str:
    device: Any = torch.cuda.get_device_properties(gpu)  # torch's stub lacks the PCI fields
    return f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
