"""Topology: how GPUs and NICs of a host are connected, and which NIC is nearest to which GPU.

Link classes have the names of `nvidia-smi topo -m` (NV18, PIX, PXB, PHB, NODE, SYS). They are
computed from the PCI paths in /sys, so they need no driver and cover NICs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from tutti.machine.gpus import Accelerator, NvLink
from tutti.machine.nics import Nic, RdmaPort
from tutti.machine.observation import Machine
from tutti.machine.recording import to_json

# From near to far. NV# stands for # NVLinks.
LINK_CLASSES = {
    "X": "the device itself",
    "NV#": "# NVLinks in total",
    "PIX": "at most one PCIe switch",
    "PXB": "several PCIe switches, but no host bridge",
    "PHB": "a PCIe host bridge, usually the CPU",
    "NODE": "several host bridges of one NUMA node",
    "SYS": "the interconnect between NUMA nodes",
    "?": "unknown",
}

# --- link classes --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """The connection between two devices."""

    a: str
    b: str
    link_class: str
    """NV18, PIX, PXB, PHB, NODE, SYS or ?."""
    pci_class: str
    """The class of the PCIe path, whether or not NVLink replaces it."""
    nvlinks: int
    """The number of active NVLinks between the two, direct or through NVSwitches."""
    nvlink_gbs: float | None
    """Their total speed in one direction in 1e9 bytes/s, as the driver reports it; about 94 % of
    it is payload."""
    reason: str


@dataclass(frozen=True)
class PciPlace:
    """A device's path of PCI bridges (() if unknown) and its NUMA node."""

    path: tuple[str, ...]
    numa_node: int | None


def distance_rank(link_class: str) -> int:
    """The position of a class from near (0) to far."""
    return list(LINK_CLASSES).index("NV#" if link_class.startswith("NV") else link_class)


def pci_place(machine: Machine, pci_address: str | None, numa_node: int | None) -> PciPlace:
    """The place of the device at a PCI address."""
    device = machine.pci_device(pci_address)
    if device is None:
        return PciPlace((), numa_node)
    return PciPlace(device.path, device.numa_node if numa_node is None else numa_node)


def pci_class(a: PciPlace, b: PciPlace, numa_nodes: int) -> tuple[str, str]:
    """The class of the PCIe path between two devices, and the reason.

    A path lists the root complex, a root port, for each switch its upstream port and a downstream
    port, and the device. Two devices below one switch share the path up to the upstream port;
    then each has a downstream port and itself, so at most two entries differ.
    """
    if not a.path or not b.path:
        return "?", "/sys does not show their PCI paths"
    if a.path[0] == b.path[0]:
        shared = 0
        while shared < min(len(a.path), len(b.path)) and a.path[shared] == b.path[shared]:
            shared += 1
        if shared == 1:
            return "PHB", f"both are on root complex {a.path[0]}, without a common bridge"
        bridge = a.path[shared - 1]
        if max(len(a.path), len(b.path)) - shared <= 2:
            return "PIX", f"both are below one switch at {bridge}"
        return "PXB", f"the common bridge is {bridge}, with further switches below it"
    roots = f"root complexes {a.path[0]} and {b.path[0]}"
    if numa_nodes == 1:
        return "NODE", f"{roots}; the machine has one NUMA node"
    if a.numa_node is None or b.numa_node is None:
        return "?", f"{roots}; their NUMA nodes are unknown"
    if a.numa_node == b.numa_node:
        return "NODE", f"{roots} of NUMA node {a.numa_node}"
    return "SYS", f"{roots} of NUMA nodes {a.numa_node} and {b.numa_node}"


def _gpu_link(machine: Machine, a: Accelerator, b: Accelerator) -> Link:
    place_a = pci_place(machine, a.pci_address, a.numa_node)
    place_b = pci_place(machine, b.pci_address, b.numa_node)
    over_pci, reason = pci_class(place_a, place_b, len(machine.numa))
    if over_pci == "?":
        access = next((p for p in machine.peers if (p.src, p.dst) == (a.index, b.index)), None)
        if access is not None and access.driver_class is not None:
            over_pci = access.driver_class
            reason = f"{reason}; the driver reports {over_pci}"
    count, speed, path = _nvlinks_between(a, b)
    if count:
        reason = f"{path}; PCIe path {over_pci}: {reason}"
    link_class = f"NV{count}" if count else over_pci
    return Link(f"GPU{a.index}", f"GPU{b.index}", link_class, over_pci, count, speed, reason)


def _nvlinks_between(a: Accelerator, b: Accelerator) -> tuple[int, float | None, str]:
    """The number of active NVLinks, their speed in one direction in GB/s, and the path."""
    direct = [
        link
        for link in _active_links(a)
        if link.peer_kind == "gpu" and link.peer_pci and link.peer_pci == b.pci_address
    ]
    if direct:
        return len(direct), _total_speed(direct), f"{len(direct)} NVLinks"
    # A switch connects all GPUs; the GPU with fewer links limits the pair.
    links = [
        [link for link in _active_links(each) if link.peer_kind == "switch"] for each in (a, b)
    ]
    count = min(map(len, links))
    if not count:
        return 0, None, ""
    speeds = [speed for each in links if (speed := _total_speed(each)) is not None]
    speed = min(speeds) if len(speeds) == 2 else None
    return count, speed, f"{count} NVLinks through NVSwitches"


def _active_links(gpu: Accelerator) -> list[NvLink]:
    return [link for link in gpu.nvlinks or () if link.active]


def _total_speed(links: Sequence[NvLink]) -> float | None:
    speeds = [link.speed_mbs for link in links if link.speed_mbs is not None]
    return sum(speeds) / 1000 if len(speeds) == len(links) else None


# --- network interfaces --------------------------------------------------------------------------

# Counters of congestion control; they do not count errors.
_CONGESTION = (
    *("port_xmit_wait", "np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets"),
    *("roce_slow_restart",),
)


@dataclass(frozen=True)
class Interface:
    """An RDMA device with its ports, a network interface, or both in one."""

    id: str
    """NIC0, NIC1, …, in the order of nvidia-smi."""
    name: str
    netdev: Nic | None
    ports: tuple[RdmaPort, ...]

    @property
    def _hardware(self) -> RdmaPort | Nic | None:
        return self.ports[0] if self.ports else self.netdev

    @property
    def pci_address(self) -> str | None:
        """The PCI address of the device."""
        return None if self._hardware is None else self._hardware.pci_address

    @property
    def numa_node(self) -> int | None:
        """The NUMA node of the device."""
        return None if self._hardware is None else self._hardware.numa_node

    @property
    def rate_gbps(self) -> float | None:
        """The rate of the fastest port."""
        rates = [port.rate_gbps for port in self.ports if port.rate_gbps is not None]
        if rates:
            return max(rates)
        speed = self.netdev.speed_mbps if self.netdev else None
        return None if speed is None else speed / 1000

    @property
    def state(self) -> str:
        """ACTIVE, DOWN, … for an RDMA device; up or down for a network interface."""
        if self.ports:
            return "/".join(port.state or "unknown" for port in self.ports)
        return (self.netdev.state if self.netdev else None) or "unknown"

    @property
    def errors(self) -> dict[str, int]:
        """The error counters that are not zero."""
        found: dict[str, int] = {}
        for port in self.ports:
            for name, count in port.counters.items():
                if count and name not in _CONGESTION:
                    found[name] = found.get(name, 0) + count
        for name in ("rx_errors", "tx_errors"):
            if self.netdev and (count := getattr(self.netdev, name)):
                found[name] = count
        return found


# --- the host ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Topology:
    """The devices of a machine and the links between them."""

    machine: Machine

    @property
    def gpus(self) -> tuple[Accelerator, ...]:
        """All GPUs, in the driver's order."""
        return self.machine.accelerators

    @cached_property
    def interfaces(self) -> tuple[Interface, ...]:
        """RDMA devices first, then other physical interfaces; no bonds, bridges or loopback."""
        nics = {nic.name: nic for nic in self.machine.nics}
        by_device: dict[str, list[RdmaPort]] = {}
        for port in self.machine.rdma:
            by_device.setdefault(port.device, []).append(port)
        found: list[tuple[str, Nic | None, tuple[RdmaPort, ...]]] = []
        for device in sorted(by_device, key=_natural_order):
            ports = by_device[device]
            found.append((device, nics.get(ports[0].netdev or ""), tuple(ports)))
        for name in sorted(nics, key=_natural_order):
            if nics[name].kind == "physical" and not nics[name].rdma:
                found.append((name, nics[name], ()))
        return tuple(Interface(f"NIC{number}", *each) for number, each in enumerate(found))

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The link between every two GPUs and interfaces, each pair once."""
        links = [_gpu_link(self.machine, a, b) for a, b in combinations(self.gpus, 2)]
        gpus = [
            (f"GPU{gpu.index}", pci_place(self.machine, gpu.pci_address, gpu.numa_node))
            for gpu in self.gpus
        ]
        nics = [
            (nic.id, pci_place(self.machine, nic.pci_address, nic.numa_node))
            for nic in self.interfaces
        ]
        pairs = [(gpu, nic) for gpu in gpus for nic in nics] + list(combinations(nics, 2))
        for (a, place_a), (b, place_b) in pairs:
            link_class, reason = pci_class(place_a, place_b, len(self.machine.numa))
            links.append(Link(a, b, link_class, link_class, 0, None, reason))
        return tuple(links)

    @cached_property
    def _classes(self) -> dict[frozenset[str], str]:
        return {frozenset((link.a, link.b)): link.link_class for link in self.links}

    def link_class(self, a: str, b: str) -> str:
        """The class of the link between two devices by id; X for a device and itself."""
        return "X" if a == b else self._classes[frozenset((a, b))]

    def near_nics(self, gpu: Accelerator) -> tuple[Interface, ...]:
        """The interfaces nearest to a GPU, among RDMA devices if there are any."""
        candidates = [nic for nic in self.interfaces if nic.ports] or list(self.interfaces)
        classes = {nic.id: self.link_class(f"GPU{gpu.index}", nic.id) for nic in candidates}
        near = [each for each in classes.values() if each not in ("?", "SYS")]
        if not near:
            return ()
        nearest = min(near, key=distance_rank)
        return tuple(nic for nic in candidates if classes[nic.id] == nearest)

    def near_gpus(self, nic: Interface) -> tuple[Accelerator, ...]:
        """The GPUs for which this interface is one of the nearest."""
        return tuple(gpu for gpu in self.gpus if nic in self.near_nics(gpu))

    # --- the rows of `tutti topo --json` ---------------------------------------------------------

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """devices[], links[], nics[] and numa[]; every row has the key `host`."""
        host = {"host": self.machine.host}
        return {
            "devices": [host | each for each in (*self._cpu_rows(), *self._gpu_rows())],
            "links": [host | each for each in self._link_rows()],
            "nics": [host | each for each in self._nic_rows()],
            "numa": [host | each for each in self._numa_rows()],
        }

    def _cpu_rows(self) -> list[dict[str, Any]]:
        """One row for the CPUs of each NUMA node; one row for all CPUs if no nodes are known."""
        machine = self.machine
        nodes = [
            (node.id, node.id, node.cpus, node.memory_bytes) for node in machine.numa if node.cpus
        ]
        if not machine.numa:
            nodes = [(0, None, machine.cpus.allowed, machine.memory.total_bytes)]  # type: ignore[list-item]
        return [
            {
                "kind": "cpu",
                "name": machine.cpus.model,
                "id": f"CPU{number}",
                "numa_node": node,
                "cpus": cpus,
                "memory_bytes": memory,
            }
            for number, node, cpus, memory in nodes
        ]

    def _gpu_rows(self) -> list[dict[str, Any]]:
        rows = []
        for gpu in self.gpus:
            links = gpu.nvlinks
            rows.append(
                {
                    "kind": "gpu",
                    "name": gpu.name,
                    "id": f"GPU{gpu.index}",
                    "numa_node": gpu.numa_node,
                    "cpus": gpu.cpus,
                    "memory_bytes": gpu.memory_bytes,
                    "index": gpu.index,
                    "uuid": gpu.uuid,
                    "pci_address": gpu.pci_address,
                    "pcie": to_json(gpu.pcie),
                    "nvlinks": None if links is None else len(links),
                    "nvlinks_active": None if links is None else len(_active_links(gpu)),
                    "nvlinks_detail": to_json(links),
                    "near_nics": [nic.id for nic in self.near_nics(gpu)],
                }
            )
        return rows

    def _link_rows(self) -> list[dict[str, Any]]:
        access = {(f"GPU{p.src}", f"GPU{p.dst}"): p for p in self.machine.peers}
        rows: list[dict[str, Any]] = []
        for link in self.links:
            pairs = ((link.a, link.b), (link.b, link.a))
            directions = [access[pair] for pair in pairs if pair in access]
            rows.append(
                {
                    "a": link.a,
                    "b": link.b,
                    "class": link.link_class,
                    "pci_class": link.pci_class,
                    "nvlinks": link.nvlinks,
                    "nvlink_gbs": link.nvlink_gbs,
                    "p2p_read": [each.read for each in directions] or None,
                    "p2p_write": [each.write for each in directions] or None,
                    "reason": link.reason,
                }
            )
        for a, b in combinations(self.machine.numa, 2):
            if a.cpus and b.cpus:
                position = self.machine.numa.index(b)
                distance = None if a.distances is None else a.distances[position]
                row = {"a": f"CPU{a.id}", "b": f"CPU{b.id}", "class": "SYS", "distance": distance}
                rows.append(row)
        return rows

    def _nic_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "id": nic.id,
                "name": nic.name,
                "netdev": nic.netdev.name if nic.netdev else None,
                "driver": nic.ports[0].driver if nic.ports else nic.netdev and nic.netdev.driver,
                "rdma": bool(nic.ports),
                "link_layer": nic.ports[0].link_layer if nic.ports else "Ethernet",
                "state": nic.state,
                "rate_gbps": nic.rate_gbps,
                "mtu": nic.netdev.mtu if nic.netdev else None,
                "pci_address": nic.pci_address,
                "numa_node": nic.numa_node,
                "errors": nic.errors,
                "near_gpus": [f"GPU{gpu.index}" for gpu in self.near_gpus(nic)],
            }
            for nic in self.interfaces
        ]

    def _numa_rows(self) -> list[dict[str, Any]]:
        return [
            to_json(node)
            | {
                "gpus": [f"GPU{gpu.index}" for gpu in self.gpus if gpu.numa_node == node.id],
                "nics": [nic.id for nic in self.interfaces if nic.numa_node == node.id],
            }
            for node in self.machine.numa
        ]


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Sorts mlx5_2 before mlx5_10."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", name)]
