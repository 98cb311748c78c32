"""Nic and RdmaPort: the interfaces to the network."""

import contextlib
import fcntl
import re
import socket
import struct
from dataclasses import dataclass
from typing import Literal

from tutti.machine.files import Files
from tutti.machine.pci import read_numa_node

NicKind = Literal["physical", "bond", "bridge", "vlan", "loopback", "virtual"]


@dataclass(frozen=True)
class Nic:
    """A network interface. Addresses are left out: only which families it has."""

    name: str
    kind: NicKind
    driver: str | None
    """"" for none."""
    state: str | None
    carrier: bool | None
    speed_mbps: int | None
    mtu: int | None
    pci_address: str | None
    numa_node: int | None
    families: tuple[str, ...] | None
    """Of ipv4 and ipv6; link-local addresses do not count."""
    default_route: bool | None
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


_SIOCGIFADDR = 0x8915
_NET, _RDMA = "/sys/class/net", "/sys/class/infiniband"
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_COUNTERS = (
    *("symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors"),
    *("port_rcv_remote_physical_errors", "port_xmit_discards", "port_xmit_wait"),
    *("local_link_integrity_errors", "excessive_buffer_overrun_errors"),
    *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err"),
    *("np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets"),
    *("roce_adp_retrans", "roce_slow_restart", "rx_icrc_encapsulated", "out_of_buffer"),
)


def read_nics(files: Files) -> tuple[Nic, ...]:
    """Every network interface of this network namespace."""
    names = [name for name in files.names(_NET) if files.exists(f"{_NET}/{name}/mtu")]
    if not names:
        files.unknown["nics"] = f"{_NET} is empty or hidden"
    families = _families(files)
    default = _default_routes(files)
    return tuple(
        _read_nic(files, name, f"nics[{number}]", families, default)
        for number, name in enumerate(names)
    )


def _read_nic(
    files: Files,
    name: str,
    field: str,
    families: dict[str, set[str]] | None,
    default: set[str] | None,
) -> Nic:
    where = f"{_NET}/{name}"
    kind = _kind(files, name)
    device = files.target(f"{where}/device")
    driver = files.target(f"{where}/device/driver")
    master = files.target(f"{where}/master")
    rdma = files.names(f"{where}/device/infiniband")
    carrier = files.number(f"{where}/carrier", f"{field}.carrier")  # unreadable while it is down
    if families is None:
        files.unknown[f"{field}.families"] = "the addresses could not be listed"
    if default is None:
        files.unknown[f"{field}.default_route"] = "/proc/net/route could not be read"
    if not device:
        files.unknown[f"{field}.pci_address"] = f"{name} is {kind}: no device stands behind it"
        files.unknown[f"{field}.numa_node"] = f"{name} is {kind}: no device stands behind it"
    return Nic(
        name=name,
        kind=kind,
        driver=driver.rpartition("/")[2] if driver else "",
        state=files.text(f"{where}/operstate", f"{field}.state"),
        carrier=None if carrier is None else carrier == 1,
        speed_mbps=_speed(files, f"{where}/speed", f"{field}.speed_mbps"),
        mtu=files.number(f"{where}/mtu", f"{field}.mtu"),
        pci_address=_pci_address(files, device, f"{field}.pci_address"),
        numa_node=_numa_node(files, device, f"{field}.numa_node"),
        families=None if families is None else tuple(sorted(families.get(name, ()))),
        default_route=None if default is None else name in default,
        master=master.rpartition("/")[2] if master else "",
        rdma=rdma[0] if rdma else "",
        rx_errors=files.number(f"{where}/statistics/rx_errors", f"{field}.rx_errors"),
        tx_errors=files.number(f"{where}/statistics/tx_errors", f"{field}.tx_errors"),
        rx_dropped=files.number(f"{where}/statistics/rx_dropped", f"{field}.rx_dropped"),
        tx_dropped=files.number(f"{where}/statistics/tx_dropped", f"{field}.tx_dropped"),
    )


def _kind(files: Files, name: str) -> NicKind:
    where = f"{_NET}/{name}"
    if files.number(f"{where}/type") == 772:  # ARPHRD_LOOPBACK
        return "loopback"
    if files.exists(f"{where}/bonding"):
        return "bond"
    if files.exists(f"{where}/bridge"):
        return "bridge"
    if files.exists(f"/proc/net/vlan/{name}"):
        return "vlan"
    return "physical" if files.exists(f"{where}/device") else "virtual"


def _speed(files: Files, path: str, field: str) -> int | None:
    speed = files.number(path, field)
    if speed is not None and speed <= 0:  # virtual interfaces, and links that are down
        files.unknown[field] = f"{path} says {speed}"
        return None
    return speed


def _pci_address(files: Files, device: str | None, field: str) -> str | None:
    if device is None:
        return None
    # virtio devices are one step below their PCI device: pci0000:00/0000:00:03.0/virtio2
    found = [part for part in device.split("/") if _PCI_ADDRESS.fullmatch(part)]
    if not found:
        files.unknown[field] = f"{device} is not on a PCI bus"
    return found[-1] if found else None


def _numa_node(files: Files, device: str | None, field: str) -> int | None:
    while device and device.count("/") > 2 and not files.exists(f"{device}/numa_node"):
        device = device.rpartition("/")[0]
    return read_numa_node(files, device, field) if device else None


def _families(files: Files) -> dict[str, set[str]] | None:
    """Which interface has addresses of which family; link-local ones connect no hosts."""
    if not files.root.samefile("/"):  # another machine's files: they do not hold IPv4 addresses
        return None
    found: dict[str, set[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                reply = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if not reply[20:24].startswith(b"\xa9\xfe"):  # 169.254.0.0/16
                    found.setdefault(name, set()).add("ipv4")
    for line in (files.text("/proc/net/if_inet6") or "").splitlines():
        _, _, _, scope, _, name = line.split()
        if scope != "20":  # link-local
            found.setdefault(name, set()).add("ipv6")
    return found


def _default_routes(files: Files) -> set[str] | None:
    text = files.text("/proc/net/route")
    if text is None:
        return None
    rows = [line.split() for line in text.splitlines()[1:]]
    names = {row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"}
    for line in (files.text("/proc/net/ipv6_route") or "").splitlines():
        row = line.split()
        # Destination ::/0, but not the kernel's own "unreachable", which stands on lo.
        if len(row) == 10 and row[0] == "0" * 32 and row[1] == "00" and row[9] != "lo":
            names.add(row[9])
    return names


def read_rdma(files: Files) -> tuple[RdmaPort, ...]:
    """Every port of every RDMA device; () where there is none."""
    places = [
        (device, port)
        for device in files.names(_RDMA)
        for port in files.names(f"{_RDMA}/{device}/ports")
    ]
    return tuple(
        _read_port(files, device, int(port), f"rdma[{number}]")
        for number, (device, port) in enumerate(places)
    )


def _read_port(files: Files, device: str, port: int, field: str) -> RdmaPort:
    where = f"{_RDMA}/{device}/ports/{port}"
    behind = files.target(f"{_RDMA}/{device}/device")
    driver = files.target(f"{_RDMA}/{device}/device/driver")
    rate = files.text(f"{where}/rate", f"{field}.rate")
    if rate is None:
        files.unknown[f"{field}.rate_gbps"] = files.unknown[f"{field}.rate"]
    if behind is None:
        files.unknown[f"{field}.pci_address"] = f"{device} names no device behind it"
        files.unknown[f"{field}.numa_node"] = f"{device} names no device behind it"
    found = re.match(r"[\d.]+", rate or "")
    types = {
        files.text(f"{where}/gid_attrs/types/{index}")
        for index in files.names(f"{where}/gid_attrs/types")
    }
    netdevs = files.names(f"{_RDMA}/{device}/device/net")
    counters = {}
    for folder in ("counters", "hw_counters"):
        for name in files.names(f"{where}/{folder}"):
            value = files.number(f"{where}/{folder}/{name}") if name in _COUNTERS else None
            if value is not None:
                counters[name] = value
    return RdmaPort(
        device=device,
        port=port,
        netdev=netdevs[0] if netdevs else "",
        pci_address=_pci_address(files, behind, f"{field}.pci_address"),
        numa_node=_numa_node(files, behind, f"{field}.numa_node"),
        driver=driver.rpartition("/")[2] if driver else "",
        firmware=files.text(f"{_RDMA}/{device}/fw_ver", f"{field}.firmware"),
        link_layer=files.text(f"{where}/link_layer", f"{field}.link_layer"),
        state=_after_colon(files.text(f"{where}/state", f"{field}.state")),
        physical_state=_after_colon(files.text(f"{where}/phys_state", f"{field}.physical_state")),
        rate_gbps=float(found[0]) if found else None,
        rate=rate,
        gid_types=tuple(sorted(each for each in types if each)),
        counters=counters,
    )


def _after_colon(text: str | None) -> str | None:
    """The kernel writes `4: ACTIVE`."""
    return None if text is None else text.rpartition(":")[2].strip()
