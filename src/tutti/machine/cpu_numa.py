"""CPUs, NUMA nodes and memory of the host; CPU affinity, ulimits and cgroup of this process."""

import math
import os
import re
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from tutti.machine.sysfs import SysFiles

# None means that the limit is unknown. "unlimited" means that no limit is set.
Limit = int | Literal["unlimited"] | None

_CGROUP = "/sys/fs/cgroup"
_CPUS, _NODES = "/sys/devices/system/cpu", "/sys/devices/system/node"
_CAP_IPC_LOCK = 14


@dataclass(frozen=True)
class Cpus:
    """The CPUs of the machine. Lists of CPUs have the kernel's format "0-3,8"."""

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
    """The NUMA distances to all nodes, in the order of node ids. The distance to the node itself is
    10."""


@dataclass(frozen=True)
class Memory:
    """Sizes of memory, swap and huge pages of the host."""

    total_bytes: int | None
    available_bytes: int | None
    swap_total_bytes: int | None
    swap_free_bytes: int | None
    hugepages_total: int | None
    hugepages_free: int | None
    hugepage_bytes: int | None
    transparent_hugepages: str | None
    """One of "always", "madvise" and "never"."""


@dataclass(frozen=True)
class Limits:
    """Limits of this process: soft ulimits, /dev/shm and cgroup limits.

    A cgroup limit is the lowest limit of the process's cgroup and of all parent cgroups.
    """

    memlock_bytes: Limit
    open_files: Limit
    processes: Limit
    stack_bytes: Limit
    core_bytes: Limit
    shm_bytes: int | None
    shm_free_bytes: int | None
    cgroup_cpus: float | Literal["unlimited"] | None
    cgroup_memory_bytes: Limit
    ipc_lock: bool | None
    """Whether this process has CAP_IPC_LOCK. If so, the memlock limit does not apply."""


# --- limits of this process ----------------------------------------------------------------------


def allowed_cpus() -> tuple[int, ...]:
    """Return the CPUs in the affinity mask of this process."""
    return tuple(sorted(os.sched_getaffinity(0)))


def busy_seconds(cpus: Iterable[int], root: Path = Path("/")) -> float | None:
    """Return the total seconds since boot in which these CPUs were not idle, or None if unknown.

    Time that the hypervisor gave to other virtual machines (steal time) counts as busy.
    """
    try:
        lines = (root / "proc/stat").read_text().splitlines()
    except OSError:
        return None
    wanted, ticks = {f"cpu{number}" for number in cpus}, 0
    for name, *values in (line.split() for line in lines if line.startswith("cpu")):
        if name in wanted:
            # The fields are user, nice, system, idle, iowait, irq, softirq and steal. The fields
            # after `steal` are already contained in `user` and `nice`.
            user, nice, system, _, _, *interrupts = map(int, values[:8])
            ticks += user + nice + system + sum(interrupts)
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_quota(root: Path = Path("/")) -> int | None:
    """Return the cgroup's CPU quota as a number of CPUs, rounded up, or None without a quota."""
    cpus = _cgroup_cpus(SysFiles(root=root))
    return max(1, math.ceil(cpus)) if isinstance(cpus, int | float) else None


def read_limits(files: SysFiles) -> Limits:
    shm, shm_free = None, None
    try:
        stat = os.statvfs(files.root / "dev/shm")
        shm, shm_free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    except OSError as error:
        for field in ("shm_bytes", "shm_free_bytes"):
            files.unknown[f"limits.{field}"] = f"/dev/shm: {error.strerror}"
    has_cgroup = files.exists(_CGROUP)
    if not has_cgroup:
        for field in ("cgroup_cpus", "cgroup_memory_bytes"):
            files.unknown[f"limits.{field}"] = f"{_CGROUP} does not exist"
    capabilities = files.search(r"^CapEff:\s*(\w+)", "/proc/self/status", "limits.ipc_lock")
    return Limits(
        memlock_bytes=_soft_limit(resource.RLIMIT_MEMLOCK),
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
        processes=_soft_limit(resource.RLIMIT_NPROC),
        stack_bytes=_soft_limit(resource.RLIMIT_STACK),
        core_bytes=_soft_limit(resource.RLIMIT_CORE),
        shm_bytes=shm,
        shm_free_bytes=shm_free,
        cgroup_cpus=_cgroup_cpus(files) if has_cgroup else None,
        cgroup_memory_bytes=_cgroup_memory(files) if has_cgroup else None,
        ipc_lock=bool(int(capabilities, 16) >> _CAP_IPC_LOCK & 1) if capabilities else None,
    )


def _soft_limit(kind: int) -> Limit:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else soft


def _cgroup_cpus(files: SysFiles) -> float | Literal["unlimited"]:
    """Return the lowest CPU quota of this process's cgroup and its parents, as a number of CPUs.

    cgroup v2 has one file `cpu.max` that contains `quota period` or `max period`. cgroup v1 has one
    file for the quota and one file for the period. A quota of -1 means unlimited.
    """
    quotas = []
    for directory in _cgroup_directories(files, ""):
        quota, _, period = (files.text(f"{directory}/cpu.max") or "").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    for directory in _cgroup_directories(files, "cpu"):
        quota_us = files.number(f"{directory}/cpu.cfs_quota_us") or -1
        period_us = files.number(f"{directory}/cpu.cfs_period_us") or 0
        if quota_us > 0 and period_us > 0:
            quotas.append(quota_us / period_us)
    return min(quotas, default="unlimited")


def _cgroup_memory(files: SysFiles) -> Limit:
    paths = [f"{directory}/memory.max" for directory in _cgroup_directories(files, "")]
    v1_directories = _cgroup_directories(files, "memory")
    paths += [f"{directory}/memory.limit_in_bytes" for directory in v1_directories]
    limits = [files.number(path) for path in paths]
    # Without a limit, the value in cgroup v1 is the largest multiple of the page size below 2**63.
    return min((n for n in limits if n is not None and n < 1 << 60), default="unlimited")


def _cgroup_directories(files: SysFiles, controller: str) -> list[str]:
    """Return the directories of this process's cgroup and its parents.

    The controller name "" selects the cgroup v2 hierarchy.
    """
    for line in (files.text("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            base = f"{_CGROUP}/{controller}" if controller else _CGROUP
            cgroup = PurePosixPath(path)
            return [f"{base}{directory}".rstrip("/") for directory in (cgroup, *cgroup.parents)]
    return []


# --- CPU lists -----------------------------------------------------------------------------------


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the CPUs in a text in the kernel's format, such as "0-3,8"."""
    cpus: list[int] = []
    for item in text.strip().split(","):
        if item:
            first, _, last = item.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Return CPUs as a text in the kernel's format, such as "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


# --- the machine ---------------------------------------------------------------------------------


def read_cpus(files: SysFiles) -> Cpus:
    """Return the CPUs as described by /proc/cpuinfo and /sys/devices/system/cpu."""
    online = files.text(f"{_CPUS}/online", "cpus.threads")
    numbers = parse_cpu_list(online or "")
    topology = [
        (
            files.number(f"{_CPUS}/cpu{cpu}/topology/physical_package_id"),
            files.number(f"{_CPUS}/cpu{cpu}/topology/core_id"),
        )
        for cpu in numbers
    ]
    has_topology = bool(topology) and all(None not in ids for ids in topology)
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
        governors=tuple(sorted(filter(None, governors))),
    )


def read_cpu_model(files: SysFiles) -> str | None:
    return files.search(r"^(?:model name|Model)[^:\n]*:(.*)$", "/proc/cpuinfo", "cpus.model")


def numa_nodes() -> dict[int, tuple[int, ...]]:
    """Return {NUMA node: CPUs of the node}, or {0: all allowed CPUs} if /sys shows no nodes."""
    nodes = {node.id: parse_cpu_list(node.cpus) for node in read_numa(SysFiles()) if node.cpus}
    return nodes or {0: allowed_cpus()}


def read_numa(files: SysFiles) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes, or () if /sys shows none."""
    ids = sorted(int(name[4:]) for name in files.names(_NODES) if re.fullmatch(r"node\d+", name))
    if not ids:
        files.unknown["numa"] = f"{_NODES} is empty or does not exist"
    nodes = []
    for number, node in enumerate(ids):
        directory, field = f"{_NODES}/node{node}", f"numa[{number}]"
        memory = _parse_meminfo(files.text(f"{directory}/meminfo", field))
        text = files.text(f"{directory}/distance", f"{field}.distances")
        distances = tuple(map(int, (text or "").split()))
        if text is not None and len(distances) != len(ids):
            files.unknown[f"{field}.distances"] = f"{directory}/distance contains {text!r}"
        nodes.append(
            NumaNode(
                id=node,
                cpus=files.text(f"{directory}/cpulist", f"{field}.cpus") or "",
                memory_bytes=memory.get("MemTotal"),
                free_bytes=memory.get("MemFree"),
                distances=distances if len(distances) == len(ids) else None,
            )
        )
    return tuple(nodes)


def read_memory(files: SysFiles) -> Memory:
    """Return the sizes in /proc/meminfo and the setting of transparent huge pages."""
    memory = _parse_meminfo(files.text("/proc/meminfo", "memory"))
    path = "/sys/kernel/mm/transparent_hugepage/enabled"  # always [madvise] never
    transparent_hugepages = files.search(r"\[(\w+)\]", path, "memory.transparent_hugepages")
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
    return Memory(**values, transparent_hugepages=transparent_hugepages)


def _parse_meminfo(text: str | None) -> dict[str, int]:
    """Return the values in a meminfo file. Sizes are converted from kB to bytes.

    A line has the form `MemTotal: 1024 kB`. In the file of NUMA node 0, it has the prefix `Node 0`.
    """
    found = re.findall(r"(?m)^(?:Node \d+ )?(\w+)(?:\(\w+\))?:\s+(\d+)( kB)?", text or "")
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in found}
