"""Placement of ranks: node, local rank, device, CPUs, threads, network interface, malloc settings.

`place` is a pure function of the RankInfo of all ranks, so every rank computes the same placements.
Two ranks with the same GPU are detected before either rank uses the GPU. Functions import torch
when they need it, because `tutti run` imports this module without torch.
"""

import ctypes
import math
import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tutti.machine import cpu_numa
from tutti.machine.cpu_numa import allowed_cpus, format_cpu_list, parse_cpu_list
from tutti.machine.gpus import numa_node_of_gpu
from tutti.machine.nics import interface_address
from tutti.world.errors import UsageError
from tutti.world.liveness import local_address_towards

if TYPE_CHECKING:
    from tutti.world.rendezvous import RankInfo


@dataclass(frozen=True)
class Place:
    """The placement of one rank."""

    rank: int
    host: str
    machine: str
    node: int
    local_rank: int
    local_size: int
    gpu: int | None  # index among the GPUs that are visible to this rank, or None on CPU
    ranks_on_gpu: int  # number of ranks that use the same GPU, or 0 on CPU


def place(ranks: "Sequence[RankInfo]", device: str = "auto", ranks_per_gpu: int = 1) -> list[Place]:
    """Return the placement of every rank, in rank order. `device` is auto, cpu or cuda."""
    by_machine: dict[str, list[int]] = defaultdict(list)  # in order of each machine's lowest rank
    for info in ranks:
        by_machine[info.machine].append(info.rank)
    gpus = _choose_gpus(ranks, device, ranks_per_gpu)
    users: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, gpu in gpus.items():
        users[_gpu_key(ranks[rank], gpu)].append(rank)
    for (_, uuid), sharing in users.items():
        if len(sharing) > ranks_per_gpu:
            raise UsageError(
                f"ranks {', '.join(map(str, sharing))} would use the same GPU {uuid} of "
                f"{ranks[sharing[0]].host}. Give each rank its own GPU (CUDA_VISIBLE_DEVICES, "
                f"--gpu-bind), or share the GPU with --ranks-per-gpu {len(sharing)}."
            )
    places = []
    for info in ranks:
        local, rank_gpu = by_machine[info.machine], gpus.get(info.rank)
        node = list(by_machine).index(info.machine) if info.node is None else info.node
        local_rank = local.index(info.rank) if info.local_rank is None else info.local_rank
        local_size = len(local) if info.local_size is None else info.local_size
        on_gpu = 0 if rank_gpu is None else len(users[_gpu_key(info, rank_gpu)])
        places.append(
            Place(
                info.rank, info.host, info.machine, node, local_rank, local_size, rank_gpu, on_gpu
            )
        )
    return places


def visible_gpus() -> list[str]:
    """Return the UUIDs of the GPUs visible to this process, in CUDA's order."""
    import torch

    if not torch.cuda.is_available():
        return []
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [str(device.uuid) for device in properties]


def refuse_more_ranks_than_gpus(ranks: int, gpus: int, ranks_per_gpu: int, host: str) -> None:
    """Raise UsageError if a host has more ranks than its GPUs may have."""
    capacity = gpus * ranks_per_gpu
    if ranks > capacity:
        raise UsageError(
            f"{host} has {ranks} ranks, but {gpus} GPU{'s' * (gpus != 1)} × {ranks_per_gpu} per "
            f"GPU = {capacity}. Use --ranks {capacity}, --ranks-per-gpu {-(-ranks // gpus)} or "
            "--device cpu."
        )


def _choose_gpus(ranks: "Sequence[RankInfo]", device: str, ranks_per_gpu: int) -> dict[int, int]:
    """Return the GPU index of each rank, or {} if the ranks compute on CPU."""
    without = [info for info in ranks if not info.gpus]
    if device == "cpu" or (device == "auto" and len(without) == len(ranks)):
        return {}
    if without:
        raise UsageError(
            f"rank {without[0].rank} on {without[0].host} has no visible GPU ({len(without)} of "
            f"{len(ranks)} ranks have none). Give every rank a GPU (--gpus-per-node, "
            "CUDA_VISIBLE_DEVICES), or use --device cpu."
        )
    # The ranks of a machine that see the same GPUs are assigned to these GPUs in rank order. If the
    # scheduler makes a different GPU visible to each rank, each group in `by_gpus` has one rank,
    # which uses device 0.
    by_gpus: dict[tuple[str, tuple[str, ...]], list[RankInfo]] = defaultdict(list)
    for info in ranks:
        by_gpus[info.machine, info.gpus].append(info)
    for (_, gpus), infos in by_gpus.items():
        refuse_more_ranks_than_gpus(len(infos), len(gpus), ranks_per_gpu, infos[0].host)
    return {
        info.rank: position // ranks_per_gpu
        for infos in by_gpus.values()
        for position, info in enumerate(infos)
    }


def _gpu_key(info: "RankInfo", gpu: int) -> tuple[str, str]:
    # Compare the kernel's boot id instead of the host name, because two containers with different
    # host names may use the same GPU.
    return info.machine.split("/")[1], info.gpus[gpu]


def bind(
    ranks: "Sequence[RankInfo]", place: Place, env: Mapping[str, str]
) -> tuple[str, int, dict[str, str]]:
    """Set this process's CPU affinity and torch's thread count.

    Return the CPUs, the number of threads, and the reasons for both values.
    """
    import torch

    numa = cpu_numa.numa_nodes()
    reason = "inherited from the launcher"
    if place.gpu is None:
        chosen = cpus_for(ranks, place.rank, numa)
        if chosen:
            reason = "its share of the CPUs"
    else:
        gpu: Any = torch.cuda.get_device_properties(place.gpu)  # torch's stub lacks the PCI fields
        bus_id = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        node = numa_node_of_gpu(bus_id)
        near = set(allowed_cpus()).intersection(numa.get(-1 if node is None else node, ()))
        chosen = format_cpu_list(near) if near else None
        reason += ", because the GPU's NUMA node is unknown"
        if near:
            reason = f"NUMA node {node} of cuda:{place.gpu}"
    if chosen is not None:
        os.sched_setaffinity(0, parse_cpu_list(chosen))
    cpus = allowed_cpus()
    threads, threads_reason = _choose_threads(ranks, place, len(cpus), env)
    torch.set_num_threads(threads)
    return format_cpu_list(cpus), threads, {"cpus": reason, "threads": threads_reason}


def cpus_for(
    ranks: "Sequence[RankInfo]", rank: int, numa: Mapping[int, tuple[int, ...]]
) -> str | None:
    """Return the CPU affinity of a rank that computes on CPU, or None to leave it unchanged.

    Ranks with the same allowed CPUs are distributed over the NUMA nodes in blocks of consecutive
    ranks. Inside a NUMA node, each rank has its own CPUs if there is at least one CPU per rank.
    Ranks spin while they wait. Two ranks on one CPU would delay each message by a time slice of the
    kernel's scheduler. If the launcher gave each rank different CPUs, each rank keeps its CPUs.
    """
    peers = _with_same_cpus(ranks, rank)
    allowed = set(parse_cpu_list(ranks[rank].cpus))
    nodes = [cpus for node in sorted(numa) if (cpus := allowed.intersection(numa[node]))]
    if len(peers) < max(2, len(nodes)):
        return None  # with one rank, or fewer ranks than NUMA nodes, each rank may use all CPUs
    node_of = [index * len(nodes) // len(peers) for index in range(len(peers))]
    node = node_of[peers.index(rank)]
    own_node, ranks_on_node = sorted(nodes[node]), node_of.count(node)
    if ranks_on_node > len(own_node):
        return format_cpu_list(own_node) if len(nodes) > 1 else None
    index = peers.index(rank) - node_of.index(node)
    first, stop = (n * len(own_node) // ranks_on_node for n in (index, index + 1))
    return format_cpu_list(own_node[first:stop])


def _with_same_cpus(ranks: "Sequence[RankInfo]", rank: int) -> list[int]:
    own_info = ranks[rank]
    return [i.rank for i in ranks if i.machine == own_info.machine and i.cpus == own_info.cpus]


def _choose_threads(
    ranks: "Sequence[RankInfo]", place: Place, cores: int, env: Mapping[str, str]
) -> tuple[int, str]:
    if env.get("OMP_NUM_THREADS", "").isdecimal():
        default = ", which tutti run sets if it is unset" if "TUTTI_RUN_ID" in env else ""
        return max(1, int(env["OMP_NUM_THREADS"])), f"OMP_NUM_THREADS{default}"
    # `cores` is the number of CPUs in this rank's affinity. `divisor` is the number of ranks that
    # share these CPUs.
    sharing = len(_with_same_cpus(ranks, place.rank))
    allowed = len(parse_cpu_list(ranks[place.rank].cpus))
    divisor = max(1, math.ceil(sharing * cores / allowed))
    quota = cpu_numa.cpu_quota()
    if quota is not None and quota < allowed:
        cores, divisor = quota, sharing
    return max(1, cores // divisor), f"{cores} cores / {divisor} rank{'s' * (divisor != 1)}"


def gloo_interface(
    ranks: "Sequence[RankInfo]", rank: int, env: Mapping[str, str]
) -> tuple[str | None, str]:
    """Return the network interface for gloo (None for gloo's default), and the reason.

    If all ranks are on one machine, return the loopback interface. Otherwise return an interface
    that reaches the other machines. gloo's default is the interface of the host name's address.
    This address is often 127.0.1.1, which other machines cannot reach.
    """
    if "GLOO_SOCKET_IFNAME" in env:
        return None, "GLOO_SOCKET_IFNAME"
    own_info = ranks[rank]
    remote = [info for info in ranks if info.machine != own_info.machine]
    if not remote:
        return "lo", "all ranks are on this machine"
    # A rank on the store's host may have only a loopback address in its RankInfo. In this case, use
    # the source address of the route to a remote rank.
    address = own_info.address
    if not address or address.startswith("127."):
        external = [i.address for i in remote if i.address and not i.address.startswith("127.")]
        address = (local_address_towards(external[0]) if external else None) or ""
    for _, name in socket.if_nameindex():
        if address and interface_address(name) == address:
            return name, f"this interface reaches {remote[0].host}"
    return None, "gloo's default, because no route to the other machines was found"


def disable_malloc_trim(env: Mapping[str, str]) -> bool:
    """Make glibc keep freed memory for the next step. Return whether glibc accepted the settings.

    By default, glibc returns large freed blocks to the kernel. When the memory is allocated again,
    the kernel handles a page fault and zeroes the page, for every page. A step that frees 40 MB of
    gradients causes 10,000 page faults. On two cores of a virtual machine, these page faults took
    15 ms of a 70 ms step. GPU memory does not need this setting, because torch's caching allocator
    keeps freed memory.
    """
    # Old versions of glibc accept an mmap threshold of at most 32 MiB. 2^31 - 1 is the largest trim
    # threshold that mallopt accepts.
    return _set_malloc(env, mmap_bytes=(1 << 30, 32 << 20), trim_bytes=(1 << 31) - 1)


def return_freed_memory() -> None:
    """Undo `disable_malloc_trim`: make glibc return large freed blocks to the kernel at once.

    This is used on a CPU with sharded parameters and with activation recomputation, where the
    gathered parameters or the activations of each model block are freed after use. The tensors of
    the next block have other sizes and alignments. If glibc kept the freed memory, it could not
    reuse the memory for these tensors, and the heap would grow to the size of the whole model.
    """
    if _set_malloc(os.environ, mmap_bytes=(2 << 20,), trim_bytes=32 << 20):
        ctypes.CDLL(None).malloc_trim(0)


def _set_malloc(env: Mapping[str, str], mmap_bytes: Sequence[int], trim_bytes: int) -> bool:
    """Set glibc's mmap and trim thresholds, unless environment variables set them.

    malloc allocates a block of at least `mmap_bytes` in a separate mapping, which free() returns to
    the kernel. The first value in `mmap_bytes` that glibc accepts is used. If more than
    `trim_bytes` are free at the end of the heap, glibc returns this memory to the kernel. Return
    whether glibc accepted both thresholds.
    """
    variables = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only in glibc
    if mallopt is None or variables & env.keys() or "_threshold" in env.get("GLIBC_TUNABLES", ""):
        return False
    m_trim_threshold, m_mmap_threshold = -1, -3  # <malloc.h>
    # Setting either threshold stops glibc from adjusting the other one. So if glibc accepts no mmap
    # threshold, the trim threshold is not set either.
    accepted = any(mallopt(m_mmap_threshold, size) for size in mmap_bytes)
    return accepted and bool(mallopt(m_trim_threshold, trim_bytes))
