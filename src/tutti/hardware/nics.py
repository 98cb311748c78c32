"""Nic and RdmaPort: the interfaces to the network."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Nic:
    """A network interface. Addresses are left out: only which families it has."""

    name: str
    kind: Literal["physical", "bond", "bridge", "vlan", "loopback", "virtual"]
    driver: str | None
    state: str | None
    carrier: bool | None
    speed_mbps: int | None
    mtu: int | None
    pci_address: str | None
    numa_node: int | None
    families: tuple[str, ...]
    """Of ipv4 and ipv6 (link-local not counted)."""
    default_route: bool
    master: str | None
    """The bond or bridge that it is a part of; "" for none."""
    rdma: str | None
    """Its RDMA device, such as mlx5_0; "" for none."""
    rx_errors: int | None
    tx_errors: int | None
    rx_dropped: int | None
    tx_dropped: int | None


@dataclass(frozen=True)
class RdmaPort:
    """A port of an InfiniBand or RoCE device."""

    device: str
    port: int
    netdev: str | None
    """"" for none."""
    pci_address: str | None
    numa_node: int | None
    driver: str | None
    firmware: str | None
    link_layer: str | None
    """InfiniBand or Ethernet (RoCE)."""
    state: str | None
    """ACTIVE, DOWN, INIT, ARMED."""
    physical_state: str | None
    """LinkUp, Disabled, Polling."""
    rate_gbps: float | None
    rate: str | None
    """As the kernel writes it: 400 Gb/sec (4X NDR)."""
    gid_types: tuple[str, ...] | None
    """The distinct types of its GIDs: IB/RoCE v1, RoCE v2."""
    counters: dict[str, int]
    """Error counters by the kernel's names, from counters/ and hw_counters/."""
