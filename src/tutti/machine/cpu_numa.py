"""CPUs, NUMA nodes and memory of the host, and the CPUs that this process may use."""

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from tutti.machine.sysfs import SysFiles

CGROUP = "/sys/fs/cgroup"
_CPUS, _NODES = "/sys/devices/system/cpu", "/sys/devices/system/node"


@dataclass(frozen=True)
class Cpus:
    """The CPUs of the machine. Lists of CPUs are in the kernel's format `0-3,8`."""

    model: str | None
    packages: int | None
    cores: int | None
    threads: int | None
    allowed: str
    """The CPUs in the affinity mask of this process."""
    isolated: str | None
    governors: tuple[str, ...] | None
    """The distinct frequency governors; () if the machine has no frequency control."""


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node. It may have CPUs, memory, or both."""

    id: int
    cpus: str
    memory_bytes: int | None
    free_bytes: int | None
    distances: tuple[int, ...] | None
    """The distance to every node, in the order of node ids. The distance to the node itself is
    10."""


@dataclass(frozen=True)
class Memory:
    """Memory of the host, swap and huge pages."""

    total_bytes: int | None
    available_bytes: int | None
    swap_total_bytes: int | None
    swap_free_bytes: int | None
    hugepages_total: int | None
    hugepages_free: int | None
    hugepage_bytes: int | None
    transparent_hugepages: str | None
    """always, madvise or never."""


# --- this process --------------------------------------------------------------------------------


def allowed_cpus() -> tuple[int, ...]:
    """The CPUs in the affinity mask of this process."""
    return tuple(sorted(os.sched_getaffinity(0)))


def cpu_quota(root: Path = Path("/")) -> int | None:
    """The CPU quota of the cgroup as a number of CPUs, rounded up; None if there is no quota."""
    cpus = cgroup_cpus(SysFiles(root=root))
    return max(1, math.ceil(cpus)) if isinstance(cpus, int | float) else None


def cgroup_cpus(files: SysFiles) -> float | Literal["unlimited"] | None:
    """The lowest CPU quota of this process's cgroup and its parents, as a number of CPUs.

    cgroup v2 has one file `cpu.max` that contains `quota period` or `max period`. cgroup v1 has one
    file for the quota and one for the period; a quota of -1 means unlimited.
    """
    if not files.exists(CGROUP):
        files.unknown["limits.cgroup_cpus"] = f"{CGROUP} does not exist"
        return None
    quotas = []
    for directory in cgroup_directories(files, ""):
        quota, _, period = (files.text(f"{directory}/cpu.max") or "").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    for directory in cgroup_directories(files, "cpu"):
        quota_us = files.number(f"{directory}/cpu.cfs_quota_us") or -1
        period_us = files.number(f"{directory}/cpu.cfs_period_us") or 0
        if quota_us > 0 and period_us > 0:
            quotas.append(quota_us / period_us)
    return min(quotas) if quotas else "unlimited"


def cgroup_directories(files: SysFiles, controller: str) -> list[str]:
    """The directories of this process's cgroup and its parents.

    The empty controller name "" stands for the cgroup v2 hierarchy.
    """
    for line in (files.text("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            base = f"{CGROUP}/{controller}" if controller else CGROUP
            own = PurePosixPath(path)
            return [f"{base}{each}".rstrip("/") for each in (own, *own.parents)]
    return []


# --- CPU lists -----------------------------------------------------------------------------------


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's `0-3,8` format."""
    cpus: list[int] = []
    for item in text.strip().split(","):
        if item:
            first, _, last = item.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Write CPUs in the kernel's `0-3,8` format."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(str(end) for end in run) for run in runs)


# --- the machine ---------------------------------------------------------------------------------


def read_cpus(files: SysFiles) -> Cpus:
    """The CPUs, from /proc/cpuinfo and /sys/devices/system/cpu."""
    online = files.text(f"{_CPUS}/online", "cpus.threads")
    numbers = parse_cpu_list(online or "")
    topology = [
        (
            files.number(f"{_CPUS}/cpu{cpu}/topology/physical_package_id"),
            files.number(f"{_CPUS}/cpu{cpu}/topology/core_id"),
        )
        for cpu in numbers
    ]
    has_topology = bool(topology) and all(None not in each for each in topology)
    if not has_topology:
        for field in ("packages", "cores"):
            files.unknown[f"cpus.{field}"] = f"{_CPUS}/cpu*/topology cannot be read"
    governors = {files.text(f"{_CPUS}/cpu{cpu}/cpufreq/scaling_governor") for cpu in numbers}
    return Cpus(
        model=read_cpu_model(files),
        packages=len({package for package, _ in topology}) if has_topology else None,
        cores=len(set(topology)) if has_topology else None,
        threads=len(numbers) if online is not None else None,
        allowed=format_cpu_list(allowed_cpus()),
        isolated=files.text(f"{_CPUS}/isolated", "cpus.isolated"),
        governors=tuple(sorted(each for each in governors if each)),
    )


def read_cpu_model(files: SysFiles) -> str | None:
    """The model name in /proc/cpuinfo."""
    for line in (files.text("/proc/cpuinfo", "cpus.model") or "").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    files.unknown.setdefault("cpus.model", "/proc/cpuinfo has no model name")
    return None


def numa_nodes() -> dict[int, tuple[int, ...]]:
    """The CPUs of each NUMA node that has CPUs; {0: all allowed CPUs} if /sys shows no nodes."""
    nodes = {node.id: parse_cpu_list(node.cpus) for node in read_numa(SysFiles()) if node.cpus}
    return nodes or {0: allowed_cpus()}


def read_numa(files: SysFiles) -> tuple[NumaNode, ...]:
    """The NUMA nodes; () if /sys shows none."""
    ids = sorted(
        int(name.removeprefix("node"))
        for name in files.names(_NODES)
        if re.fullmatch(r"node\d+", name)
    )
    if not ids:
        files.unknown["numa"] = f"{_NODES} is empty or does not exist"
    return tuple(
        _read_node(files, node, f"numa[{number}]", len(ids)) for number, node in enumerate(ids)
    )


def _read_node(files: SysFiles, node: int, field: str, nodes: int) -> NumaNode:
    directory = f"{_NODES}/node{node}"
    memory = _parse_meminfo(files.text(f"{directory}/meminfo", field))
    text = files.text(f"{directory}/distance", f"{field}.distances")
    distances = tuple(int(each) for each in (text or "").split())
    if text is not None and len(distances) != nodes:
        files.unknown[f"{field}.distances"] = f"{directory}/distance contains {text!r}"
    return NumaNode(
        id=node,
        cpus=files.text(f"{directory}/cpulist", f"{field}.cpus") or "",
        memory_bytes=memory.get("MemTotal"),
        free_bytes=memory.get("MemFree"),
        distances=distances if len(distances) == nodes else None,
    )


def read_memory(files: SysFiles) -> Memory:
    """Host memory, from /proc/meminfo."""
    memory = _parse_meminfo(files.text("/proc/meminfo", "memory"))
    transparent = files.text(
        "/sys/kernel/mm/transparent_hugepage/enabled", "memory.transparent_hugepages"
    )
    selected = re.search(r"\[(\w+)\]", transparent or "")  # always [madvise] never
    names = {
        "total_bytes": "MemTotal",
        "available_bytes": "MemAvailable",
        "swap_total_bytes": "SwapTotal",
        "swap_free_bytes": "SwapFree",
        "hugepages_total": "HugePages_Total",
        "hugepages_free": "HugePages_Free",
        "hugepage_bytes": "Hugepagesize",
    }
    for field, name in names.items():
        if memory and name not in memory:
            files.unknown[f"memory.{field}"] = f"/proc/meminfo has no {name}"
    values = {field: memory.get(name) for field, name in names.items()}
    return Memory(**values, transparent_hugepages=selected[1] if selected else None)


def _parse_meminfo(text: str | None) -> dict[str, int]:
    """The values in a meminfo file; sizes are converted from kB to bytes, counts are unchanged.

    A line is `MemTotal: 1024 kB`, with the prefix `Node 0` in the file of a NUMA node.
    """
    found = re.findall(r"(?m)^(?:Node \d+ )?(\w+)(?:\(\w+\))?:\s+(\d+)( kB)?", text or "")
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in found}
