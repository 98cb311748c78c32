"""Network interfaces (Nic) and ports of InfiniBand and RoCE devices (RdmaPort)."""

import fcntl
import re
import socket
import struct
from dataclasses import dataclass
from typing import Literal

from tutti.machine.environment import RECORDED_NAMES
from tutti.machine.sysfs import SysFiles

NicKind = Literal["physical", "bond", "bridge", "vlan", "loopback", "virtual"]


@dataclass(frozen=True)
class Nic:
    """A network interface. Its IP addresses are not recorded, but their address families are."""

    name: str
    kind: NicKind
    driver: str | None
    """The name of the driver; "" if no driver is bound."""
    state: str | None
    carrier: bool | None
    speed_mbps: int | None
    mtu: int | None
    pci_address: str | None
    numa_node: int | None
    families: tuple[str, ...] | None
    """Families of the IP addresses: "ipv4", "ipv6" or both. Link-local addresses are ignored."""
    default_route: bool | None
    master: str | None
    """The bond or bridge to which the interface belongs; "" if it belongs to none."""
    rdma: str | None
    """The RDMA device of the interface, such as mlx5_0; "" if the interface has none."""
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
    """The network interface of the device; "" if the device has none."""
    pci_address: str | None
    numa_node: int | None
    driver: str | None
    firmware: str | None
    link_layer: str | None
    """Either "InfiniBand", or "Ethernet" for RoCE."""
    state: str | None
    """One of "ACTIVE", "DOWN", "INIT" and "ARMED"."""
    physical_state: str | None
    """A state such as "LinkUp", "Disabled" or "Polling"."""
    rate_gbps: float | None
    rate: str | None
    """The rate in the kernel's format, such as "400 Gb/sec (4X NDR)"."""
    gid_types: tuple[str, ...] | None
    """The distinct types of the port's GIDs, such as "IB/RoCE v1" and "RoCE v2"."""
    counters: dict[str, int]
    """Error and congestion counters from counters/ and hw_counters/, keyed by kernel name."""


_SIOCGIFADDR = 0x8915
_ARPHRD_LOOPBACK = 772
_NET, _RDMA = "/sys/class/net", "/sys/class/infiniband"
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
CONGESTION_COUNTERS = tuple(RECORDED_NAMES["rdma"]["congestion_counters"].split())
_COUNTERS = (*RECORDED_NAMES["rdma"]["error_counters"].split(), *CONGESTION_COUNTERS)


def interface_address(name: str) -> str | None:
    """Return the IPv4 address of an interface, or None if there is no address or no interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        try:
            reply = fcntl.ioctl(query, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])


def read_nics(files: SysFiles) -> tuple[Nic, ...]:
    """Return all interfaces of this network namespace."""
    names = [name for name in files.names(_NET) if files.exists(f"{_NET}/{name}/mtu")]
    if not names:
        files.unknown["nics"] = f"{_NET} is empty or does not exist"
    families = _address_families(files)
    default_routes = _default_routes(files)
    nics = []
    for number, name in enumerate(names):
        directory, field = f"{_NET}/{name}", f"nics[{number}]"
        pci_address, numa_node = _read_pci_location(files, f"{directory}/device", name, field)
        rdma = files.names(f"{directory}/device/infiniband")
        # If the interface is down, reading `carrier` fails and the field is None.
        carrier = files.number(f"{directory}/carrier", f"{field}.carrier")
        if families is None:
            files.unknown[f"{field}.families"] = "IP addresses cannot be read from a copy of /sys"
        if default_routes is None:
            files.unknown[f"{field}.default_route"] = "/proc/net/route cannot be read"
        counts = {
            counter: files.number(f"{directory}/statistics/{counter}", f"{field}.{counter}")
            for counter in ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped")
        }
        nic = Nic(
            name=name,
            kind=_kind(files, name),
            driver=files.target_name(f"{directory}/device/driver"),
            state=files.text(f"{directory}/operstate", f"{field}.state"),
            carrier=None if carrier is None else carrier == 1,
            # The kernel reports 0 or -1 for virtual interfaces and for links that are down.
            speed_mbps=files.number(f"{directory}/speed", f"{field}.speed_mbps", range(1, 10**9)),
            mtu=files.number(f"{directory}/mtu", f"{field}.mtu"),
            pci_address=pci_address,
            numa_node=numa_node,
            families=None if families is None else tuple(sorted(families.get(name, ()))),
            default_route=None if default_routes is None else name in default_routes,
            master=files.target_name(f"{directory}/master"),
            rdma=rdma[0] if rdma else "",
            **counts,
        )
        nics.append(nic)
    return tuple(nics)


def _kind(files: SysFiles, name: str) -> NicKind:
    directory = f"{_NET}/{name}"
    if files.number(f"{directory}/type") == _ARPHRD_LOOPBACK:
        return "loopback"
    if files.exists(f"{directory}/bonding"):
        return "bond"
    if files.exists(f"{directory}/bridge"):
        return "bridge"
    if files.exists(f"/proc/net/vlan/{name}"):
        return "vlan"
    return "physical" if files.exists(f"{directory}/device") else "virtual"


def _read_pci_location(
    files: SysFiles, link: str, name: str, field: str
) -> tuple[str | None, int | None]:
    """Return (PCI address, NUMA node) of the hardware device that a symbolic link points to."""
    device = files.target(link)
    if device is None:
        for unknown in ("pci_address", "numa_node"):
            files.unknown[f"{field}.{unknown}"] = f"{name} has no hardware device"
        return None, None
    # A virtio device is one level below its PCI device: pci0000:00/0000:00:03.0/virtio2
    addresses = [part for part in device.split("/") if _PCI_ADDRESS.fullmatch(part)]
    if not addresses:
        files.unknown[f"{field}.pci_address"] = f"{device} is not on a PCI bus"
    while device.count("/") > 2 and not files.exists(f"{device}/numa_node"):
        device = device.rpartition("/")[0]
    return addresses[-1] if addresses else None, files.numa_node(device, f"{field}.numa_node")


def _address_families(files: SysFiles) -> dict[str, set[str]] | None:
    """Return the address families of each interface. Link-local addresses are ignored."""
    # System calls return the IPv4 addresses of this machine and ignore `files.root`.
    if not files.root.samefile("/"):
        return None
    found: dict[str, set[str]] = {}
    for _, name in socket.if_nameindex():
        address = interface_address(name)
        if address is not None and not address.startswith("169.254."):
            found.setdefault(name, set()).add("ipv4")
    for line in (files.text("/proc/net/if_inet6") or "").splitlines():
        _, _, _, scope, _, name = line.split()
        if scope != "20":  # 20 means link-local
            found.setdefault(name, set()).add("ipv6")
    return found


def _default_routes(files: SysFiles) -> set[str] | None:
    """Return the interfaces that have a default route."""
    text = files.text("/proc/net/route")
    if text is None:
        return None
    rows = [line.split() for line in text.splitlines()[1:]]
    names = {row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"}
    for line in (files.text("/proc/net/ipv6_route") or "").splitlines():
        row = line.split()
        # A default route has the destination ::/0. The kernel also adds an "unreachable" route with
        # this destination and the interface lo, which is ignored here.
        if len(row) == 10 and row[0] == "0" * 32 and row[1] == "00" and row[9] != "lo":
            names.add(row[9])
    return names


def read_rdma(files: SysFiles) -> tuple[RdmaPort, ...]:
    """Return all ports of all RDMA devices, or () if there are no RDMA devices."""
    names = files.names(_RDMA)
    ports = [(name, port) for name in names for port in files.names(f"{_RDMA}/{name}/ports")]
    return tuple(
        _read_port(files, name, port, f"rdma[{number}]")
        for number, (name, port) in enumerate(ports)
    )


def _read_port(files: SysFiles, name: str, port: str, field: str) -> RdmaPort:
    directory = f"{_RDMA}/{name}/ports/{port}"
    pci_address, numa_node = _read_pci_location(files, f"{_RDMA}/{name}/device", name, field)
    rate = files.text(f"{directory}/rate", f"{field}.rate")
    if rate is None:
        files.unknown[f"{field}.rate_gbps"] = files.unknown[f"{field}.rate"]
    rate_gbps = re.match(r"[\d.]+", rate or "")
    gid_types = {
        files.text(f"{directory}/gid_attrs/types/{index}")
        for index in files.names(f"{directory}/gid_attrs/types")
    }
    netdevs = files.names(f"{_RDMA}/{name}/device/net")
    counters = {}
    for folder in ("counters", "hw_counters"):
        for counter in files.names(f"{directory}/{folder}"):
            path = f"{directory}/{folder}/{counter}"
            if counter in _COUNTERS and (value := files.number(path)) is not None:
                counters[counter] = value
    states = {}
    for state, file in (("state", "state"), ("physical_state", "phys_state")):
        text = files.text(f"{directory}/{file}", f"{field}.{state}")
        # The kernel writes the state ACTIVE as `4: ACTIVE`.
        states[state] = None if text is None else text.rpartition(":")[2].strip()
    return RdmaPort(
        device=name,
        port=int(port),
        netdev=netdevs[0] if netdevs else "",
        pci_address=pci_address,
        numa_node=numa_node,
        driver=files.target_name(f"{_RDMA}/{name}/device/driver"),
        firmware=files.text(f"{_RDMA}/{name}/fw_ver", f"{field}.firmware"),
        link_layer=files.text(f"{directory}/link_layer", f"{field}.link_layer"),
        **states,
        rate_gbps=float(rate_gbps[0]) if rate_gbps else None,
        rate=rate,
        gid_types=tuple(sorted(filter(None, gid_types))),
        counters=counters,
    )
