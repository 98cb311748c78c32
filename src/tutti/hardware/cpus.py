"""The processors this process may use, and the NUMA nodes they belong to."""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Cpus:
    """The processors of the machine, and which of them this process may use."""

    model: str | None
    packages: int | None
    cores: int | None
    threads: int | None
    allowed: str
    isolated: str | None
    governors: tuple[str, ...] | None
    """The distinct frequency governors; () where the machine has none to choose."""


def allowed_cpus() -> tuple[int, ...]:
    """The CPUs the kernel lets this process run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def cpu_quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """How many CPUs' worth of time the container grants, rounded up; None for no limit."""
    try:
        quota, period = file.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))


def numa_nodes() -> dict[int, tuple[int, ...]]:
    """The CPUs of each NUMA node; one node 0 with every allowed CPU where /sys tells nothing."""
    nodes = {}
    for directory in sorted(_NODES.glob("node[0-9]*")):
        cpus = parse_cpu_list((directory / "cpulist").read_text())
        if cpus:  # a node may have memory only
            nodes[int(directory.name.removeprefix("node"))] = cpus
    return nodes or {0: allowed_cpus()}


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Read the kernel's `0-3,8` form."""
    cpus: list[int] = []
    for item in text.strip().split(","):
        if item:
            first, _, last = item.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Write `0-3,8`, as the kernel does."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(str(end) for end in run) for run in runs)
