"""NumaNode and Memory: what memory there is, and which CPUs are near it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NumaNode:
    """CPUs and memory that are near each other. CPU lists are in the kernel's form: `0-3,8`."""

    id: int
    cpus: str
    memory_bytes: int | None
    free_bytes: int | None
    distances: tuple[int, ...] | None
    """To every node, in the order of ids; 10 is to itself."""


@dataclass(frozen=True)
class Memory:
    """Memory of the host, and its huge pages."""

    total_bytes: int | None
    available_bytes: int | None
    swap_total_bytes: int | None
    swap_free_bytes: int | None
    hugepages_total: int | None
    hugepages_free: int | None
    hugepage_bytes: int | None
    transparent_hugepages: str | None
    """always, madvise or never."""
