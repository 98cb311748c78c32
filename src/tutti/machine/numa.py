"""NumaNode and Memory: what memory there is, and which CPUs are near it."""

import re
from dataclasses import dataclass

from tutti.machine.files import Files


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


_NODES = "/sys/devices/system/node"


def read_numa(files: Files) -> tuple[NumaNode, ...]:
    """The NUMA nodes; () where /sys hides them. A node may have CPUs, memory, or both."""
    ids = sorted(
        int(name.removeprefix("node"))
        for name in files.names(_NODES)
        if re.fullmatch(r"node\d+", name)
    )
    if not ids:
        files.unknown["numa"] = f"{_NODES} is empty or hidden"
    return tuple(
        _read_node(files, node, f"numa[{number}]", len(ids)) for number, node in enumerate(ids)
    )


def _read_node(files: Files, node: int, field: str, nodes: int) -> NumaNode:
    where = f"{_NODES}/node{node}"
    memory = _fields(files.text(f"{where}/meminfo", field))
    distances = files.text(f"{where}/distance", f"{field}.distances")
    numbers = tuple(int(each) for each in (distances or "").split())
    if distances is not None and len(numbers) != nodes:
        files.unknown[f"{field}.distances"] = f"{where}/distance says {distances!r}"
    return NumaNode(
        id=node,
        cpus=files.text(f"{where}/cpulist", f"{field}.cpus") or "",
        memory_bytes=memory.get("MemTotal"),
        free_bytes=memory.get("MemFree"),
        distances=numbers if len(numbers) == nodes else None,
    )


def read_memory(files: Files) -> Memory:
    """From /proc/meminfo."""
    memory = _fields(files.text("/proc/meminfo", "memory"))
    transparent = files.text(
        "/sys/kernel/mm/transparent_hugepage/enabled", "memory.transparent_hugepages"
    )
    chosen = re.search(r"\[(\w+)\]", transparent or "")  # always [madvise] never
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
    return Memory(**values, transparent_hugepages=chosen[1] if chosen else None)


def _fields(text: str | None) -> dict[str, int]:
    """`MemTotal: 1024 kB`, with `Node 0` before it for a node, in bytes; counts as they are."""
    found = re.findall(r"(?m)^(?:Node \d+ )?(\w+)(?:\(\w+\))?:\s+(\d+)( kB)?", text or "")
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in found}
