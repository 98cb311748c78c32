"""Limits: what this process may have."""

from dataclasses import dataclass
from typing import Literal


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
