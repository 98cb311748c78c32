"""Topology: how the GPUs and NICs of a host are connected, and which NICs are nearest to a GPU.

Link classes have the names of `nvidia-smi topo -m`: NV18, PIX, PXB, PHB, NODE and SYS. The PCIe
classes are computed from the PCI paths in /sys, so they need no GPU driver and are available for
NICs, too.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

from tutti.machine.cpu_numa import NumaNode
from tutti.machine.gpus import Accelerator, NvLink
from tutti.machine.nics import CONGESTION_COUNTERS, Nic, RdmaPort
from tutti.machine.recording import Machine

Rows = Iterator[dict[str, Any]]

# The order is from near to far. In NV#, # is the number of NVLinks.
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
    """One of the keys of LINK_CLASSES, with the number of NVLinks, such as "NV18"."""
    pci_class: str
    """The class of the PCIe path between the two devices, even if they are connected by NVLink."""
    nvlinks: int
    """The number of active NVLinks between the two devices, direct or through NVSwitches."""
    nvlink_gbs: float | None
    """The total speed of these NVLinks in one direction in 1e9 bytes/s, as reported by the driver.
    The payload can use about 94 % of this speed."""
    reason: str


class PciLocation(NamedTuple):
    """The NUMA node of a device, and its path from the PCI root complex (() if unknown)."""

    path: tuple[str, ...]
    numa_node: int | None


def pci_location(machine: Machine, device: "Accelerator | Interface") -> PciLocation:
    """Return the PCI path and NUMA node of a device."""
    pci_device = machine.pci_device(device.pci_address)
    if pci_device is None:
        return PciLocation((), device.numa_node)
    return PciLocation(
        pci_device.path, pci_device.numa_node if device.numa_node is None else device.numa_node
    )


def pci_class(a: PciLocation, b: PciLocation, numa_nodes: int) -> tuple[str, str]:
    """Return (class of the PCIe path between two devices, reason for the class).

    A path contains the root complex, a root port, the upstream port and one downstream port of each
    switch, and the device. Two devices below one switch share the path up to the upstream port of
    the switch. After this port, each path has two more entries: a downstream port and the device.
    Therefore the class is PIX if the paths differ in at most two entries.
    """
    if not a.path or not b.path:
        return "?", "/sys does not show the PCI path of a device"
    if a.path[0] == b.path[0]:
        # PCI devices form a tree, so two paths that share an entry share all entries before it.
        shared = sum(x == y for x, y in zip(a.path, b.path, strict=False))
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
        return "?", f"{roots}; the NUMA node of a device is unknown"
    if a.numa_node == b.numa_node:
        return "NODE", f"{roots} of NUMA node {a.numa_node}"
    return "SYS", f"{roots} of NUMA nodes {a.numa_node} and {b.numa_node}"


def _nvlinks_between(a: Accelerator, b: Accelerator) -> tuple[int, float | None, str]:
    """Return (number of active NVLinks between two GPUs, total speed, description of the path).

    The speed is that of one direction in GB/s, or None if the speed of a link is unknown.
    """
    direct = [link for link in a.active_nvlinks if link.peer_kind == "gpu"]
    direct = [link for link in direct if link.peer_pci and link.peer_pci == b.pci_address]
    if direct:
        return len(direct), _total_speed(direct), f"{len(direct)} NVLinks"
    # NVSwitches connect all GPUs. The GPU with fewer links to the switches limits the speed.
    links = [[x for x in gpu.active_nvlinks if x.peer_kind == "switch"] for gpu in (a, b)]
    count = min(map(len, links))
    if not count:
        return 0, None, ""
    speeds = [speed for group in links if (speed := _total_speed(group)) is not None]
    speed = min(speeds) if len(speeds) == 2 else None
    return count, speed, f"{count} NVLinks through NVSwitches"


def _total_speed(links: Sequence[NvLink]) -> float | None:
    speeds = [link.speed_mbs for link in links if link.speed_mbs is not None]
    return sum(speeds) / 1000 if len(speeds) == len(links) else None


# --- network interfaces --------------------------------------------------------------------------


@dataclass(frozen=True)
class Interface:
    """A NIC: an RDMA device with its ports, a network interface, or both."""

    id: str
    """NIC0, NIC1, …, in the same order as in nvidia-smi."""
    name: str
    netdev: Nic | None
    ports: tuple[RdmaPort, ...]
    pci_address: str | None
    numa_node: int | None

    @property
    def rate_gbps(self) -> float | None:
        """The rate of the fastest port in Gbit/s."""
        rates = [port.rate_gbps for port in self.ports if port.rate_gbps is not None]
        if rates:
            return max(rates)
        speed = self.netdev.speed_mbps if self.netdev else None
        return None if speed is None else speed / 1000

    @property
    def state(self) -> str:
        """The port states ("ACTIVE", "DOWN", …) of an RDMA device, else the interface state ("up",
        "down", …)."""
        if self.ports:
            return "/".join(port.state or "unknown" for port in self.ports)
        return (self.netdev.state if self.netdev else None) or "unknown"

    @property
    def errors(self) -> dict[str, int]:
        """The error counters that are not zero."""
        counts: Counter[str] = Counter()
        for port in self.ports:
            counts.update(port.counters)
        if self.netdev:
            counts.update(
                rx_errors=self.netdev.rx_errors or 0, tx_errors=self.netdev.tx_errors or 0
            )
        return {name: n for name, n in counts.items() if n and name not in CONGESTION_COUNTERS}


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
        """RDMA devices, then other physical interfaces. Bonds, bridges and loopback are omitted."""
        nics = {nic.name: nic for nic in self.machine.nics}
        by_device: dict[str, list[RdmaPort]] = {}
        for port in self.machine.rdma:
            by_device.setdefault(port.device, []).append(port)
        physical = [nic.name for nic in nics.values() if nic.kind == "physical" and not nic.rdma]
        names = [*sorted(by_device, key=_natural_order), *sorted(physical, key=_natural_order)]
        found = []
        for number, name in enumerate(names):
            ports = tuple(by_device.get(name, ()))
            device = ports[0] if ports else nics[name]
            netdev = nics.get(ports[0].netdev or "") if ports else nics[name]
            location = (device.pci_address, device.numa_node)
            found.append(Interface(f"NIC{number}", name, netdev, ports, *location))
        return tuple(found)

    @cached_property
    def devices(self) -> dict[str, Accelerator | Interface]:
        """GPUs and interfaces, keyed by id such as GPU0 or NIC0."""
        return {f"GPU{gpu.index}": gpu for gpu in self.gpus} | {n.id: n for n in self.interfaces}

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The links of all pairs of devices. Each pair is listed once. Pairs of GPUs come first."""
        links = [self._link(a, b) for a, b in combinations(self.devices, 2)]
        return tuple(sorted(links, key=lambda link: (link.a[:3], link.b[:3])))

    def _link(self, a: str, b: str) -> Link:
        one, other = self.devices[a], self.devices[b]
        locations = (pci_location(self.machine, one), pci_location(self.machine, other))
        pcie_class, reason = pci_class(*locations, len(self.machine.numa))
        count, speed = 0, None
        if isinstance(one, Accelerator) and isinstance(other, Accelerator):
            indices = (one.index, other.index)
            access = next((p for p in self.machine.peers if (p.src, p.dst) == indices), None)
            if pcie_class == "?" and access is not None and access.driver_class is not None:
                pcie_class = access.driver_class
                reason = f"{reason}; the driver reports {pcie_class}"
            count, speed, path = _nvlinks_between(one, other)
            if count:
                reason = f"{path}; PCIe path {pcie_class}: {reason}"
        link_class = f"NV{count}" if count else pcie_class
        return Link(a, b, link_class, pcie_class, count, speed, reason)

    @cached_property
    def _classes(self) -> dict[frozenset[str], str]:
        return {frozenset((link.a, link.b)): link.link_class for link in self.links}

    def link_class(self, a: str, b: str) -> str:
        """Return the class of the link between two device ids, or "X" if the ids are equal."""
        return "X" if a == b else self._classes[frozenset((a, b))]

    def near_nics(self, gpu: Accelerator) -> tuple[Interface, ...]:
        """Return the interfaces with the nearest link class to a GPU.

        If the host has RDMA devices, only RDMA devices are considered. Interfaces at other NUMA
        nodes are not near.
        """
        candidates = [nic for nic in self.interfaces if nic.ports] or list(self.interfaces)
        classes = {nic.id: self.link_class(f"GPU{gpu.index}", nic.id) for nic in candidates}
        near = [name for name in classes.values() if name not in ("?", "SYS")]
        nearest = min(near, key=list(LINK_CLASSES).index, default=None)
        return tuple(nic for nic in candidates if classes[nic.id] == nearest)

    def near_gpus(self, nic: Interface) -> tuple[Accelerator, ...]:
        """Return the GPUs for which this interface is one of the nearest interfaces."""
        return tuple(gpu for gpu in self.gpus if nic in self.near_nics(gpu))

    # --- the rows of `tutti topo --json` ---------------------------------------------------------

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """Return the lists devices, links, nics and numa. Every row has the key `host`."""
        rows = {
            "devices": [*self._cpu_rows(), *self._gpu_rows()],
            "links": [*self._link_rows()],
            "nics": [*self._nic_rows()],
            "numa": [*self._numa_rows()],
        }
        host = {"host": self.machine.host}
        return {name: [host | row for row in rows_of_host] for name, rows_of_host in rows.items()}

    def _cpu_rows(self) -> Rows:
        """Yield one row per NUMA node with CPUs, or a single row if the NUMA nodes are unknown."""
        machine = self.machine
        memory = machine.memory.total_bytes
        whole_machine = NumaNode(0, machine.cpus.allowed, memory, None, distances=None)
        for node in machine.numa or (whole_machine,):
            if node.cpus:
                number = node.id if machine.numa else None
                row = {"id": f"CPU{node.id}", "kind": "cpu", "name": machine.cpus.model}
                place = {"numa_node": number, "memory_bytes": node.memory_bytes}
                yield {**row, "cpus": node.cpus, **place}

    def _gpu_rows(self) -> Rows:
        same = ("name", "numa_node", "cpus", "memory_bytes", "index", "uuid", "pci_address", "pcie")
        for gpu in self.gpus:
            values, links = asdict(gpu), gpu.nvlinks
            yield {
                "kind": "gpu",
                "id": f"GPU{gpu.index}",
                **{name: values[name] for name in same},
                "nvlinks": None if links is None else len(links),
                "nvlinks_active": None if links is None else len(gpu.active_nvlinks),
                "nvlinks_detail": values["nvlinks"],
                "near_nics": [nic.id for nic in self.near_nics(gpu)],
            }

    def _link_rows(self) -> Rows:
        access = {(f"GPU{p.src}", f"GPU{p.dst}"): p for p in self.machine.peers}
        for link in self.links:
            pairs = ((link.a, link.b), (link.b, link.a))
            directions = [access[pair] for pair in pairs if pair in access]
            row = asdict(link)
            yield {
                "class": row.pop("link_class"),
                **row,
                "p2p_read": [direction.read for direction in directions] or None,
                "p2p_write": [direction.write for direction in directions] or None,
            }
        for a, b in combinations(self.machine.numa, 2):
            if a.cpus and b.cpus:
                distance = a.distances and a.distances[self.machine.numa.index(b)]
                yield {"a": f"CPU{a.id}", "b": f"CPU{b.id}", "class": "SYS", "distance": distance}

    def _nic_rows(self) -> Rows:
        same = ("id", "name", "state", "rate_gbps", "pci_address", "numa_node", "errors")
        for nic in self.interfaces:
            yield {
                "netdev": nic.netdev.name if nic.netdev else None,
                "driver": nic.ports[0].driver if nic.ports else nic.netdev and nic.netdev.driver,
                "rdma": bool(nic.ports),
                "link_layer": nic.ports[0].link_layer if nic.ports else "Ethernet",
                "mtu": nic.netdev.mtu if nic.netdev else None,
                **{name: getattr(nic, name) for name in same},
                "near_gpus": [f"GPU{gpu.index}" for gpu in self.near_gpus(nic)],
            }

    def _numa_rows(self) -> Rows:
        for node in self.machine.numa:
            yield asdict(node) | {
                "gpus": [f"GPU{gpu.index}" for gpu in self.gpus if gpu.numa_node == node.id],
                "nics": [nic.id for nic in self.interfaces if nic.numa_node == node.id],
            }


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that places mlx5_2 before mlx5_10."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", name)]
