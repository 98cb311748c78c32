"""Limits: what this process may have."""

import os
import resource
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from tutti.machine.files import Files

# What the kernel does not limit has this word for its limit: None would mean "unknown".
Limit = int | Literal["unlimited"] | None


@dataclass(frozen=True)
class Limits:
    """What this process may have. cgroup limits are the tightest above this process."""

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
    """Whether this process has CAP_IPC_LOCK, which lifts memlock."""


_CAP_IPC_LOCK = 14
_CGROUP = "/sys/fs/cgroup"


def read_limits(files: Files) -> Limits:
    """Soft limits of this process, its shared memory and its control groups."""
    shm, shm_free = _shared_memory(files)
    return Limits(
        memlock_bytes=_soft(resource.RLIMIT_MEMLOCK),
        open_files=_soft(resource.RLIMIT_NOFILE),
        processes=_soft(resource.RLIMIT_NPROC),
        stack_bytes=_soft(resource.RLIMIT_STACK),
        core_bytes=_soft(resource.RLIMIT_CORE),
        shm_bytes=shm,
        shm_free_bytes=shm_free,
        cgroup_cpus=_cgroup_cpus(files),
        cgroup_memory_bytes=_cgroup_memory(files),
        ipc_lock=_has_ipc_lock(files),
    )


def _soft(kind: int) -> Limit:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else soft


def _shared_memory(files: Files) -> tuple[int | None, int | None]:
    try:
        room = os.statvfs(files.root / "dev/shm")
    except OSError as error:
        files.unknown["limits.shm_bytes"] = f"/dev/shm: {error.strerror}"
        files.unknown["limits.shm_free_bytes"] = f"/dev/shm: {error.strerror}"
        return None, None
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize


def _cgroup_cpus(files: Files) -> float | Literal["unlimited"] | None:
    """Version 2 writes `quota period`, or `max`; version 1 has a file for each, -1 for none."""
    if not files.exists(_CGROUP):
        files.unknown["limits.cgroup_cpus"] = f"{_CGROUP} is hidden"
        return None
    found = []
    for directory in _own_and_above(files, ""):
        quota, _, period = (files.text(f"{directory}/cpu.max") or "").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            found.append(int(quota) / int(period))
    for directory in _own_and_above(files, "cpu"):
        quota_us = files.number(f"{directory}/cpu.cfs_quota_us") or -1
        period_us = files.number(f"{directory}/cpu.cfs_period_us") or 0
        if quota_us > 0 and period_us > 0:
            found.append(quota_us / period_us)
    return min(found) if found else "unlimited"


def _cgroup_memory(files: Files) -> Limit:
    if not files.exists(_CGROUP):
        files.unknown["limits.cgroup_memory_bytes"] = f"{_CGROUP} is hidden"
        return None
    limits = [files.number(f"{each}/memory.max") for each in _own_and_above(files, "")]
    limits += [
        files.number(f"{each}/memory.limit_in_bytes") for each in _own_and_above(files, "memory")
    ]
    # Version 1 writes the largest multiple of a page for "no limit".
    found = [limit for limit in limits if limit is not None and limit < 1 << 60]
    return min(found) if found else "unlimited"


def _own_and_above(files: Files, controller: str) -> list[str]:
    """The directories of this process' group and its parents; "" means version 2."""
    for line in (files.text("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            base = f"{_CGROUP}/{controller}" if controller else _CGROUP
            own = PurePosixPath(path)
            return [f"{base}{each}".rstrip("/") for each in (own, *own.parents)]
    return []


def _has_ipc_lock(files: Files) -> bool | None:
    status = files.text("/proc/self/status", "limits.ipc_lock")
    for line in (status or "").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    files.unknown.setdefault("limits.ipc_lock", "/proc/self/status names no capabilities")
    return None
