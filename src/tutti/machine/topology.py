"""Topology: the devices of a host, what connects them, and which NIC is near which GPU."""

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from tutti.machine.accelerator import Accelerator
from tutti.machine.links import Link, distance_rank, link_of_gpus, pci_class, place_of
from tutti.machine.machine import Machine
from tutti.machine.nics import Nic, RdmaPort
from tutti.machine.record import encode


@dataclass(frozen=True)
class Interface:
    """A way out of the host: an RDMA device with its ports, a network interface, or both in one."""

    id: str
    """NIC0, NIC1, …, as nvidia-smi counts them."""
    name: str
    netdev: Nic | None
    ports: tuple[RdmaPort, ...]

    @property
    def pci_address(self) -> str | None:
        """Where it hangs on the PCI bus."""
        behind = self.ports[0] if self.ports else self.netdev
        return None if behind is None else behind.pci_address

    @property
    def numa_node(self) -> int | None:
        """The NUMA node that it is near."""
        behind = self.ports[0] if self.ports else self.netdev
        return None if behind is None else behind.numa_node

    @property
    def rate_gbps(self) -> float | None:
        """Of its fastest port."""
        rates = [port.rate_gbps for port in self.ports if port.rate_gbps is not None]
        if rates:
            return max(rates)
        speed = self.netdev.speed_mbps if self.netdev else None
        return None if speed is None else speed / 1000

    @property
    def state(self) -> str:
        """ACTIVE, DOWN, … of an RDMA device; up or down of a network interface."""
        if self.ports:
            return "/".join(port.state or "unknown" for port in self.ports)
        return (self.netdev.state if self.netdev else None) or "unknown"

    @property
    def errors(self) -> dict[str, int]:
        """The error counters that are not zero; waiting and congestion are no errors."""
        found: dict[str, int] = {}
        for port in self.ports:
            for name, count in port.counters.items():
                if count and name not in _NO_ERRORS:
                    found[name] = found.get(name, 0) + count
        for name in ("rx_errors", "tx_errors"):
            if self.netdev and (count := getattr(self.netdev, name)):
                found[name] = count
        return found


_NO_ERRORS = (
    *("port_xmit_wait", "np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets"),
    *("roce_slow_restart",),
)


@dataclass(frozen=True)
class Topology:
    """What a Machine says about its connections."""

    machine: Machine

    @property
    def gpus(self) -> tuple[Accelerator, ...]:
        """All GPUs, in the driver's order."""
        return self.machine.accelerators

    @cached_property
    def interfaces(self) -> tuple[Interface, ...]:
        """RDMA devices first, then other physical interfaces; bridges and loopback are none."""
        nics = {nic.name: nic for nic in self.machine.nics}
        by_device: dict[str, list[RdmaPort]] = {}
        for port in self.machine.rdma:
            by_device.setdefault(port.device, []).append(port)
        found: list[tuple[str, Nic | None, tuple[RdmaPort, ...]]] = []
        for device in sorted(by_device, key=_natural):
            ports = by_device[device]
            found.append((device, nics.get(ports[0].netdev or ""), tuple(ports)))
        for name in sorted(nics, key=_natural):
            if nics[name].kind == "physical" and not nics[name].rdma:
                found.append((name, nics[name], ()))
        return tuple(Interface(f"NIC{number}", *each) for number, each in enumerate(found))

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Between any two of GPUs and interfaces, each pair once."""
        links = [link_of_gpus(self.machine, a, b) for a, b in combinations(self.gpus, 2)]
        for gpu in self.gpus:
            place = place_of(self.machine, gpu.pci_address, gpu.numa_node)
            for nic in self.interfaces:
                there = place_of(self.machine, nic.pci_address, nic.numa_node)
                word, reason = pci_class(place, there, len(self.machine.numa))
                links.append(Link(f"GPU{gpu.index}", nic.id, word, word, 0, None, reason))
        for one, other in combinations(self.interfaces, 2):
            here = place_of(self.machine, one.pci_address, one.numa_node)
            there = place_of(self.machine, other.pci_address, other.numa_node)
            word, reason = pci_class(here, there, len(self.machine.numa))
            links.append(Link(one.id, other.id, word, word, 0, None, reason))
        return tuple(links)

    @cached_property
    def _words(self) -> dict[tuple[str, str], str]:
        words = {(link.a, link.b): link.word for link in self.links}
        return words | {(b, a): word for (a, b), word in words.items()}

    def word(self, a: str, b: str) -> str:
        """The class of the link between two devices by their ids; X for one with itself."""
        return "X" if a == b else self._words[a, b]

    def near_nics(self, gpu: Accelerator) -> tuple[Interface, ...]:
        """The interfaces with the shortest way to a GPU: RDMA devices where there are any."""
        choice = [nic for nic in self.interfaces if nic.ports] or list(self.interfaces)
        words = {nic.id: self.word(f"GPU{gpu.index}", nic.id) for nic in choice}
        known = [word for word in words.values() if word not in ("?", "SYS")]
        if not known:
            return ()  # none is near, or nobody knows
        nearest = min(known, key=distance_rank)
        return tuple(nic for nic in choice if words[nic.id] == nearest)

    def near_gpus(self, nic: Interface) -> tuple[Accelerator, ...]:
        """The GPUs that have this interface among their nearest."""
        return tuple(gpu for gpu in self.gpus if nic in self.near_nics(gpu))

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of `tutti topo --json`."""
        host = {"host": self.machine.host}
        return {
            "devices": [host | each for each in (*self._cpu_rows(), *self._gpu_rows())],
            "links": [host | each for each in self._link_rows()],
            "nics": [host | each for each in self._nic_rows()],
            "numa": [host | each for each in self._numa_rows()],
        }

    def _cpu_rows(self) -> list[dict[str, Any]]:
        """A CPU device is the CPUs of a NUMA node; all of them where the nodes are hidden."""
        machine = self.machine
        if not machine.numa:
            cpus, memory = machine.cpus.allowed, machine.memory.total_bytes
            whole = {"id": "CPU0", "numa_node": None, "cpus": cpus, "memory_bytes": memory}
            return [{"kind": "cpu", "name": machine.cpus.model} | whole]
        return [
            {
                "kind": "cpu",
                "name": machine.cpus.model,
                "id": f"CPU{node.id}",
                "numa_node": node.id,
                "cpus": node.cpus,
                "memory_bytes": node.memory_bytes,
            }
            for node in machine.numa
            if node.cpus
        ]

    def _gpu_rows(self) -> list[dict[str, Any]]:
        return [
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
                "pcie": encode(gpu.pcie),
                "nvlinks": None if gpu.nvlinks is None else len(gpu.nvlinks),
                "nvlinks_active": (
                    None if gpu.nvlinks is None else sum(bool(n.active) for n in gpu.nvlinks)
                ),
                "nvlinks_detail": encode(gpu.nvlinks),
                "near_nics": [nic.id for nic in self.near_nics(gpu)],
            }
            for gpu in self.gpus
        ]

    def _link_rows(self) -> list[dict[str, Any]]:
        access = {(p.src, p.dst): p for p in self.machine.peers}
        by_id = {f"GPU{gpu.index}": gpu.index for gpu in self.gpus}
        rows = []
        for link in self.links:
            pair = (by_id.get(link.a, -1), by_id.get(link.b, -1))
            ways = [access[each] for each in (pair, pair[::-1]) if each in access]
            rows.append(
                {
                    "a": link.a,
                    "b": link.b,
                    "class": link.word,
                    "pci_class": link.pci_class,
                    "nvlinks": link.nvlinks,
                    "nvlink_gbs": link.nvlink_gbs,
                    "p2p_read": [each.read for each in ways] or None,
                    "p2p_write": [each.write for each in ways] or None,
                    "reason": link.reason,
                }
            )
        for a, b in combinations(self.machine.numa, 2):
            if a.cpus and b.cpus:
                there = self.machine.numa.index(b)
                far = None if a.distances is None else a.distances[there]
                rows.append({"a": f"CPU{a.id}", "b": f"CPU{b.id}", "class": "SYS", "distance": far})
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
            encode(node)
            | {
                "gpus": [f"GPU{gpu.index}" for gpu in self.gpus if gpu.numa_node == node.id],
                "nics": [nic.id for nic in self.interfaces if nic.numa_node == node.id],
            }
            for node in self.machine.numa
        ]


def _natural(name: str) -> list[tuple[int, str]]:
    """mlx5_2 before mlx5_10."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", name)]
