"""Limits of this process: ulimits, /dev/shm, cgroup CPU and memory limits, CAP_IPC_LOCK."""

import os
import resource
from dataclasses import dataclass
from typing import Literal

from tutti.machine.cpu_numa import CGROUP, cgroup_cpus, cgroup_directories
from tutti.machine.sysfs import SysFiles

# None means unknown; a limit that is not set is "unlimited".
Limit = int | Literal["unlimited"] | None

_CAP_IPC_LOCK = 14


@dataclass(frozen=True)
class Limits:
    """Limits of this process: soft ulimits, /dev/shm and cgroup limits.

    A cgroup limit is the lowest limit of the process's cgroup and the parents of that cgroup.
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


def read_limits(files: SysFiles) -> Limits:
    """The limits of this process."""
    shm, shm_free = _shared_memory(files)
    return Limits(
        memlock_bytes=_soft(resource.RLIMIT_MEMLOCK),
        open_files=_soft(resource.RLIMIT_NOFILE),
        processes=_soft(resource.RLIMIT_NPROC),
        stack_bytes=_soft(resource.RLIMIT_STACK),
        core_bytes=_soft(resource.RLIMIT_CORE),
        shm_bytes=shm,
        shm_free_bytes=shm_free,
        cgroup_cpus=cgroup_cpus(files),
        cgroup_memory_bytes=_cgroup_memory(files),
        ipc_lock=_has_ipc_lock(files),
    )


def _soft(kind: int) -> Limit:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else soft


def _shared_memory(files: SysFiles) -> tuple[int | None, int | None]:
    """Size and free bytes of /dev/shm."""
    try:
        stat = os.statvfs(files.root / "dev/shm")
    except OSError as error:
        for field in ("shm_bytes", "shm_free_bytes"):
            files.unknown[f"limits.{field}"] = f"/dev/shm: {error.strerror}"
        return None, None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _cgroup_memory(files: SysFiles) -> Limit:
    if not files.exists(CGROUP):
        files.unknown["limits.cgroup_memory_bytes"] = f"{CGROUP} does not exist"
        return None
    limits = [files.number(f"{each}/memory.max") for each in cgroup_directories(files, "")]
    limits += [
        files.number(f"{each}/memory.limit_in_bytes")
        for each in cgroup_directories(files, "memory")
    ]
    # If there is no limit, cgroup v1 writes the largest multiple of the page size below 2**63.
    found = [limit for limit in limits if limit is not None and limit < 1 << 60]
    return min(found) if found else "unlimited"


def _has_ipc_lock(files: SysFiles) -> bool | None:
    status = files.text("/proc/self/status", "limits.ipc_lock")
    for line in (status or "").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    files.unknown.setdefault("limits.ipc_lock", "/proc/self/status has no line CapEff")
    return None
