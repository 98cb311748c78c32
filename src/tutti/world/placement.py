"""Where every rank belongs: node, local rank, device and CPUs, computed from the roll alone.

A pure function of what all ranks said, so that every rank computes the same table, and two ranks
on one device are seen before either touches it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tutti.machine.cpu_numa import format_cpu_list, parse_cpu_list
from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.world.rendezvous import RankInfo
import ctypes
import math
import os
from typing import Any

from tutti.machine.cpu_numa import (
    allowed_cpus,
    cpu_quota,
    numa_nodes,
)
from tutti.machine.gpus import numa_node_of_gpu
from tutti.world.rendezvous import RankInfo


@dataclass(frozen=True)
class Place:
    """One rank's place in the world."""

    rank: int
    host: str
    machine: str
    node: int
    local_rank: int
    local_size: int
    # Index among the devices this rank sees; None for a rank on CPU.
    gpu: int | None
    # How many ranks compute on the same device.
    ranks_on_gpu: int


def place(
    answers: "Sequence[RankInfo]", device: str = "auto", ranks_per_gpu: int = 1
) -> list[Place]:
    """The place of every rank, in rank order; `device` is auto, cpu or cuda."""
    by_machine: dict[str, list[int]] = defaultdict(list)
    for answer in answers:
        by_machine[answer.machine].append(answer.rank)
    machines = list(by_machine)  # in the order of their lowest rank
    gpus = _gpu_of_each(answers, ranks_per_gpu) if _use_gpus(answers, device) else {}
    users = _users_of_each_gpu(answers, gpus, ranks_per_gpu)

    places = []
    for answer in answers:
        neighbours = by_machine[answer.machine]
        position, count = neighbours.index(answer.rank), len(neighbours)
        gpu = gpus.get(answer.rank)
        places.append(
            Place(
                rank=answer.rank,
                host=answer.host,
                machine=answer.machine,
                node=machines.index(answer.machine) if answer.node is None else answer.node,
                local_rank=position if answer.local_rank is None else answer.local_rank,
                local_size=count if answer.local_size is None else answer.local_size,
                gpu=gpu,
                ranks_on_gpu=0 if gpu is None else len(users[_physical(answer, gpu)]),
            )
        )
    return places


def cpus_for(
    answers: "Sequence[RankInfo]", rank: int, numa: Mapping[int, tuple[int, ...]]
) -> str | None:
    """The CPUs a rank on CPU should keep to; None to stay as it is.

    Ranks that may use all the same CPUs are dealt out to the NUMA nodes in blocks, and inside a
    node each gets CPUs of its own while there are enough: ranks wait for each other by spinning,
    so that two on one CPU cost each other a time slice per message. Ranks whose launcher already
    gave them different CPUs keep those.
    """
    mine = answers[rank]
    peers = [a.rank for a in answers if a.machine == mine.machine and a.cpus == mine.cpus]
    allowed = set(parse_cpu_list(mine.cpus))
    nodes = [cpus for node in sorted(numa) if (cpus := allowed.intersection(numa[node]))]
    if len(peers) < max(2, len(nodes)):
        return None  # fewer ranks than nodes: each may use all
    node_of = [index * len(nodes) // len(peers) for index in range(len(peers))]
    node = node_of[peers.index(rank)]
    here, ranks = sorted(nodes[node]), node_of.count(node)
    if ranks > len(here):
        return format_cpu_list(here) if len(nodes) > 1 else None
    index = peers.index(rank) - node_of.index(node)
    return format_cpu_list(here[index * len(here) // ranks : (index + 1) * len(here) // ranks])


def _use_gpus(answers: "Sequence[RankInfo]", device: str) -> bool:
    without = [answer for answer in answers if not answer.gpus]
    if device == "cpu" or (device == "auto" and len(without) == len(answers)):
        return False
    if without:
        odd = without[0]
        raise UsageError(
            f"rank {odd.rank} on {odd.host} sees no GPU ({len(without)} of {len(answers)} ranks do "
            "not): give every rank one (--gpus-per-node, CUDA_VISIBLE_DEVICES), or use --device cpu"
        )
    return True


def _gpu_of_each(answers: "Sequence[RankInfo]", ranks_per_gpu: int) -> dict[int, int]:
    # Ranks of a machine that see the same GPUs take them in turn. Where the scheduler shows each
    # task one GPU only, every such set is of one rank, which takes its device 0: the same rule.
    alike: dict[tuple[str, tuple[str, ...]], list[RankInfo]] = defaultdict(list)
    for answer in answers:
        alike[answer.machine, answer.gpus].append(answer)
    chosen = {}
    for (_, gpus), group in alike.items():
        refuse_more_ranks_than_gpus(len(group), len(gpus), ranks_per_gpu, group[0].host)
        for position, answer in enumerate(group):
            chosen[answer.rank] = position // ranks_per_gpu
    return chosen


def refuse_more_ranks_than_gpus(ranks: int, gpus: int, ranks_per_gpu: int, host: str) -> None:
    """Raise when `ranks` ranks on a host do not fit its GPUs."""
    places = gpus * ranks_per_gpu
    if ranks > places:
        raise UsageError(
            f"{ranks} ranks on {host}, but {gpus} GPU{'s' * (gpus != 1)} × {ranks_per_gpu} per GPU "
            f"= {places} places: use {places} ranks, --ranks-per-gpu {-(-ranks // gpus)}, or "
            "--device cpu"
        )


def _users_of_each_gpu(
    answers: "Sequence[RankInfo]", gpus: dict[int, int], ranks_per_gpu: int
) -> dict[tuple[str, str], list[int]]:
    users: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, gpu in gpus.items():
        users[_physical(answers[rank], gpu)].append(rank)
    for (_, name), ranks in users.items():
        if len(ranks) > ranks_per_gpu:
            raise UsageError(
                f"ranks {', '.join(map(str, ranks))} would compute on the same GPU {name} of "
                f"{answers[ranks[0]].host}: give each its own (CUDA_VISIBLE_DEVICES, --gpu-bind), "
                f"or ask for it with --ranks-per-gpu {len(ranks)}"
            )
    return users


def _physical(answer: "RankInfo", gpu: int) -> tuple[str, str]:
    # By the kernel's boot id, not the host name: two containers may show the same GPU.
    return answer.machine.split("/")[1], answer.gpus[gpu]


@dataclass(frozen=True)
class Binding:
    """The CPUs and threads of this process, each with its reason."""

    cpus: str
    cpus_reason: str
    threads: int
    threads_reason: str


def visible_gpus() -> list[str]:
    """The UUIDs of the GPUs that CUDA shows this process, in its order."""
    import torch

    if not torch.cuda.is_available():
        return []
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [str(device.uuid) for device in properties]


def bind(
    answers: Sequence[RankInfo], places: Sequence[Place], rank: int, env: Mapping[str, str]
) -> Binding:
    """Pin this rank to its share of the CPUs and set torch's thread count; say what was done."""
    import torch

    numa = numa_nodes()
    chosen, cpus_reason = _choose_cpus(answers, places[rank], numa)
    if chosen is not None:
        os.sched_setaffinity(0, parse_cpu_list(chosen))
    cpus = format_cpu_list(allowed_cpus())
    threads, threads_reason = _choose_threads(answers, places[rank], len(allowed_cpus()), env)
    torch.set_num_threads(threads)
    return Binding(cpus, cpus_reason, threads, threads_reason)


def _choose_cpus(
    answers: Sequence[RankInfo], place: Place, numa: Mapping[int, tuple[int, ...]]
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
    answers: Sequence[RankInfo], place: Place, cores: int, env: Mapping[str, str]
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
    import torch

    device: Any = torch.cuda.get_device_properties(gpu)  # torch's stub lacks the PCI fields
    return f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"


# malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_TRIM_BYTES = (1 << 31) - 1  # free at the end of the heap before any of it goes back: the most
# A block of this size and more is mapped by itself, and goes back when freed. Older versions of
# glibc take no more than the second.
_MMAP_BYTES = (1 << 30, 32 << 20)
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory(env: Mapping[str, str]) -> bool:
    """Tell glibc, unless the environment has told it otherwise; whether it was told."""
    if any(name in env for name in _VARIABLES) or "_threshold" in env.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    # Either call freezes the other limit where it happens to be, and this one may be low: so first.
    taken = any(mallopt(_MMAP_THRESHOLD, size) for size in _MMAP_BYTES)
    return taken and bool(mallopt(_TRIM_THRESHOLD, _TRIM_BYTES))
