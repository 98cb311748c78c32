"""Link: how two devices of a host are connected, by the words that `nvidia-smi topo -m` uses."""

from collections.abc import Sequence
from dataclasses import dataclass

from tutti.machine.accelerator import Accelerator, NvLink
from tutti.machine.machine import Machine

# From near to far. `?` is unknown; NV# stands for that many NVLinks, and is nearer than PCIe.
MEANINGS = {
    "X": "itself",
    "NV#": "# NVLinks, added up",
    "PIX": "at most one PCIe switch",
    "PXB": "several PCIe switches, but no host bridge",
    "PHB": "a PCIe host bridge, as a rule the CPU",
    "NODE": "several host bridges of one NUMA node",
    "SYS": "the connection between NUMA nodes",
    "?": "unknown",
}


@dataclass(frozen=True)
class Link:
    """The connection of two devices, and the reason for its class."""

    a: str
    b: str
    word: str
    """Its class: NV18, PIX, PXB, PHB, NODE, SYS or ?."""
    pci_class: str
    """The class of the way over PCIe, which NVLink may spare."""
    nvlinks: int
    """How many active NVLinks there are between the two, or through NVSwitches."""
    nvlink_gbs: float | None
    """Their speed one way in 1e9 bytes per second, as the driver states it; about 94 % is data."""
    reason: str


@dataclass(frozen=True)
class Place:
    """Where a device is: its path of PCI bridges (() if hidden), and its NUMA node."""

    path: tuple[str, ...]
    numa_node: int | None


def distance_rank(word: str) -> int:
    """Small is near."""
    order = list(MEANINGS)
    return order.index("NV#" if word.startswith("NV") else word)


def place_of(machine: Machine, pci_address: str | None, numa_node: int | None) -> Place:
    """The place of the device at a PCI address."""
    device = machine.pci_device(pci_address)
    if device is None:
        return Place((), numa_node)
    return Place(device.path, device.numa_node if numa_node is None else numa_node)


def pci_class(a: Place, b: Place, numa_nodes: int) -> tuple[str, str]:
    """The class of the way between two places, and why it is that one.

    A device's path reads root complex, root port, then for each switch its port upward and its
    port downward, and the device. Of two devices below one switch the paths part after the
    switch's port upward: one port downward and the device itself are left on either side.
    """
    if not a.path or not b.path:
        return "?", "their PCI paths are hidden"
    if a.path[0] == b.path[0]:
        shared = 0
        while shared < min(len(a.path), len(b.path)) and a.path[shared] == b.path[shared]:
            shared += 1
        if shared == 1:
            return "PHB", f"they share the root complex {a.path[0]} and no bridge"
        apart = max(len(a.path), len(b.path)) - shared
        bridge = a.path[shared - 1]
        if apart <= 2:
            return "PIX", f"they hang on one switch, below {bridge}"
        return "PXB", f"they meet at {bridge}, with further switches between"
    roots = f"root complexes {a.path[0]} and {b.path[0]}"
    if numa_nodes == 1:
        return "NODE", f"{roots}; the machine has one NUMA node"
    if a.numa_node is None or b.numa_node is None:
        return "?", f"{roots}; their NUMA nodes are unknown"
    if a.numa_node == b.numa_node:
        return "NODE", f"{roots} of NUMA node {a.numa_node}"
    return "SYS", f"{roots} of NUMA nodes {a.numa_node} and {b.numa_node}"


def nvlinks_between(a: Accelerator, b: Accelerator) -> tuple[int, float | None, str]:
    """How many active NVLinks connect two GPUs, their speed one way in GB/s, and by what way."""
    direct = [
        link
        for link in _active(a)
        if link.peer_kind == "gpu" and link.peer_pci and link.peer_pci == b.pci_address
    ]
    if direct:
        return len(direct), _speed(direct), f"{len(direct)} NVLinks"
    # A switch reaches every GPU on it; what the two can exchange is what the lesser has.
    both = [[link for link in _active(each) if link.peer_kind == "switch"] for each in (a, b)]
    fewer = min(both, key=len)
    if not fewer:
        return 0, None, ""
    speeds = [_speed(links) for links in both]
    known = [speed for speed in speeds if speed is not None]
    speed = min(known) if len(known) == 2 else None
    return len(fewer), speed, f"{len(fewer)} NVLinks through NVSwitches"


def _active(gpu: Accelerator) -> list[NvLink]:
    return [link for link in gpu.nvlinks or () if link.active]


def _speed(links: Sequence[NvLink]) -> float | None:
    speeds = [link.speed_mbs for link in links if link.speed_mbs is not None]
    return sum(speeds) / 1000 if len(speeds) == len(links) else None


def link_of_gpus(machine: Machine, a: Accelerator, b: Accelerator) -> Link:
    """The connection of two GPUs."""
    here = place_of(machine, a.pci_address, a.numa_node)
    there = place_of(machine, b.pci_address, b.numa_node)
    over_pci, reason = pci_class(here, there, len(machine.numa))
    if over_pci == "?":
        told = next((p for p in machine.peers if (p.src, p.dst) == (a.index, b.index)), None)
        if told is not None and told.driver_class is not None:
            over_pci, reason = told.driver_class, f"{reason}; the driver says {told.driver_class}"
    count, speed, way = nvlinks_between(a, b)
    if count:
        reason = f"{way}; over PCIe {over_pci}: {reason}"
    word = f"NV{count}" if count else over_pci
    return Link(f"GPU{a.index}", f"GPU{b.index}", word, over_pci, count, speed, reason)
