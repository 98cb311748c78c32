"""The processors this process may use, and the NUMA nodes they belong to."""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tutti.machine.files import Files

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


def read_cpus(files: Files) -> Cpus:
    """The processors as /proc and /sys count them."""
    where = "/sys/devices/system/cpu"
    online = files.text(f"{where}/online", "cpus.threads")
    numbers = parse_cpu_list(online or "")
    topology = [
        (
            files.number(f"{where}/cpu{cpu}/topology/physical_package_id"),
            files.number(f"{where}/cpu{cpu}/topology/core_id"),
        )
        for cpu in numbers
    ]
    told = bool(topology) and all(None not in each for each in topology)
    if not told:
        for field in ("packages", "cores"):
            files.unknown[f"cpus.{field}"] = f"{where}/cpu*/topology is hidden"
    governors = {files.text(f"{where}/cpu{cpu}/cpufreq/scaling_governor") for cpu in numbers}
    return Cpus(
        model=_model(files),
        packages=len({package for package, _ in topology}) if told else None,
        cores=len(set(topology)) if told else None,
        threads=len(numbers) if online is not None else None,
        allowed=format_cpu_list(allowed_cpus()),
        isolated=files.text(f"{where}/isolated", "cpus.isolated"),
        governors=tuple(sorted(each for each in governors if each)),
    )


def _model(files: Files) -> str | None:
    for line in (files.text("/proc/cpuinfo", "cpus.model") or "").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    files.unknown.setdefault("cpus.model", "/proc/cpuinfo names no model")
    return None
