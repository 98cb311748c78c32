"""RDMA: InfiniBand and RoCE ports, their rates, errors and addresses, and the way to GPU memory."""

from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from tutti.machine.checks.check import Check, on_machine, on_world
from tutti.machine.checks.environment import settings
from tutti.machine.checks.finding import Skip, Verdict, fail, fine, warn
from tutti.machine.checks.known import gpus, parse_version
from tutti.machine.checks.limits import has_rdma
from tutti.machine.checks.patient import Patient
from tutti.machine.observation import Machine

if TYPE_CHECKING:
    from tutti.machine.nics import RdmaPort


def _all_ports(patient: Patient) -> "list[tuple[Machine, RdmaPort]]":
    found = [(machine, port) for machine in patient.machines for port in machine.rdma]
    if not found:
        raise Skip("no RDMA device")
    return found


def _scope(port: "RdmaPort") -> str:
    return f"nic:{port.device}"


def _state(patient: Patient) -> Iterator[Verdict]:
    """Down on one host and up on the others, or down among neighbours that are up."""
    ports = _all_ports(patient)
    active = Counter((port.device, port.port) for _, port in ports if port.state == "ACTIVE")
    for machine, port in ports:
        if port.state in (None, "ACTIVE"):
            continue
        observed = f"port {port.port} is {port.state} ({port.physical_state})"
        command = f"ibstat {port.device}; ibdev2netdev"
        cure = "look at cable, transceiver and switch port; ip link set … up; a subnet manager"
        if active[port.device, port.port]:
            expected = "ACTIVE, as on the other hosts"
            yield fail(_scope(port), observed, expected, cure, command, host=machine.host)
        elif port.physical_state != "Disabled" and any(
            near.state == "ACTIVE" and near.device != port.device for near in machine.rdma
        ):
            expected = "ACTIVE, as its neighbours"
            yield warn(_scope(port), observed, expected, cure, command, host=machine.host)


def _rate(patient: Patient) -> Iterator[Verdict]:
    """Against the same port on other hosts, and against neighbours on the same kind of slot."""
    ports = [(m, p) for m, p in _all_ports(patient) if p.state == "ACTIVE" and p.rate_gbps]
    if not ports:
        raise Skip("no active RDMA port")
    for machine, port in ports:
        elsewhere = [p.rate_gbps or 0 for _, p in ports if p.device == port.device]
        neighbours = [
            p.rate_gbps or 0
            for m, p in ports
            if m is machine and _slot(m, p) == _slot(machine, port)
        ]
        expected = max(median(neighbours), max(elsewhere))
        if (port.rate_gbps or 0) < expected:
            observed = f"{port.rate_gbps:g} Gbit/s"
            yield fail(
                _scope(port),
                observed,
                f"{expected:g} Gbit/s as its peers",
                "",
                f"ibstat {port.device}",
                host=machine.host,
            )


def _slot(machine: Machine, port: "RdmaPort") -> tuple[object, ...]:
    """What tells a card for data from one for management beside it."""
    device = machine.pci_device(port.pci_address)
    link = device.link if device is not None else None
    if link is None:
        return (port.device,)
    return (port.driver, port.link_layer, link.max_generation, link.max_width)


# Counts since boot that are still normal: links are plugged, switches restarted.
_TOLERATED = {
    "symbol_error": 100,
    "link_downed": 5,
    "link_error_recovery": 5,
    "port_rcv_errors": 100,
    "local_link_integrity_errors": 10,
    "excessive_buffer_overrun_errors": 10,
    "port_xmit_discards": 1000,
    "out_of_sequence": 1000,
    "packet_seq_err": 1000,
    "local_ack_timeout_err": 100,
    "rnr_nak_retry_err": 1000,
    "roce_adp_retrans": 1000,
    "rx_icrc_encapsulated": 10,
}


def _errors(patient: Patient) -> Iterator[Verdict]:
    ports = _all_ports(patient)
    for machine, port in ports:
        high = []
        for name, tolerated in _TOLERATED.items():
            count = port.counters.get(name, 0)
            usual = median(p.counters.get(name, 0) for _, p in ports)
            if count > max(tolerated, 10 * usual):
                high.append(f"{name} {count}")
        if high:
            observed = f"{', '.join(high)} since boot"
            command = f"grep . /sys/class/infiniband/{port.device}/ports/{port.port}/*counters/*"
            expected = "near 0, as its peers"
            yield warn(_scope(port), observed, expected, "", command, host=machine.host)


def _gid(machine: Machine) -> Iterator[Verdict]:
    roce = [p for p in machine.rdma if p.link_layer == "Ethernet" and p.state == "ACTIVE"]
    if not roce:
        raise Skip("no RoCE")
    for port in roce:
        if port.gid_types is not None and "RoCE v2" not in port.gid_types:
            observed = f"its addresses are {', '.join(port.gid_types) or 'none'}"
            yield fail(_scope(port), observed, "one of type RoCE v2", "")
    index = settings(machine).get("NCCL_IB_GID_INDEX")
    if index is not None and machine.versions.get("nccl"):
        yield fine(f"NCCL_IB_GID_INDEX={index} (since 2.21 NCCL finds RoCE v2 by itself)")


def _hca(machine: Machine) -> Iterator[Verdict]:
    value = settings(machine).get("NCCL_IB_HCA")
    if value is None:
        raise Skip("NCCL_IB_HCA is not set")
    bare = value.removeprefix("^")
    exact, bare = bare.startswith("="), bare.removeprefix("=")
    names = {port.device for port in machine.rdma}
    for word in bare.split(","):
        device = word.partition(":")[0]
        if not any(name == device if exact else name.startswith(device) for name in names):
            expected = f"of {', '.join(sorted(names)) or 'no RDMA device at all'}"
            yield fail(
                "machine",
                f"NCCL_IB_HCA={value}: there is no {device}",
                expected,
                "",
                "unset NCCL_IB_HCA",
            )


def _gpu_direct(machine: Machine) -> Iterator[Verdict]:
    gpus(machine)
    if not has_rdma(machine):
        raise Skip("no active RDMA port")
    if machine.kernel_modules is None:
        raise Skip(machine.why("kernel_modules") or "kernel modules are not told")
    loaded = {"nvidia_peermem", "nv_peer_mem"} & set(machine.kernel_modules)
    kernel = parse_version(machine.kernel or "")
    module = machine.versions.get("kernel_module", "unknown")
    if loaded:
        yield fine(f"{loaded.pop()} is loaded")
    elif kernel[:2] >= (5, 12) and module == "open":
        yield fine("by DMA-BUF: open kernel modules, and a kernel that has it")
    elif module == "unknown":
        raise Skip("nvidia_peermem is not loaded; whether DMA-BUF serves is not told")
    else:
        command = "sudo modprobe nvidia_peermem"
        observed = f"nvidia_peermem is not loaded, and {module} modules do without DMA-BUF"
        yield warn("machine", observed, "NICs reach GPU memory directly", "", command)


CHECKS = (
    Check(
        "rdma.state",
        "whether every RDMA port is up, against its neighbours and the other hosts",
        "NCCL leaves a port that is down out, and a whole rail with it",
        "look at cable, transceiver, switch port and subnet manager",
        on_world(_state),
        "world",
    ),
    Check(
        "rdma.rate",
        "the rate of every RDMA port, against its neighbours and the other hosts",
        "one port at half rate slows every ring through it",
        "replace the cable or transceiver; check the switch port's setting",
        on_world(_rate),
        "world",
    ),
    Check(
        "rdma.errors",
        "error counters of RDMA ports, against the other ports",
        "a port that repeats packets stalls the whole job",
        "clean or replace the cable; on RoCE check flow control (PFC, ECN) on the way",
        on_world(_errors),
        "world",
    ),
    Check(
        "rdma.gid",
        "whether RoCE ports have a RoCE v2 address",
        "RoCE v1 does not pass routers, and NCCL prefers v2",
        "give the interface an IP address; set NCCL_IB_ROCE_VERSION_NUM=2",
        on_machine(_gid),
    ),
    Check(
        "rdma.hca",
        "NCCL_IB_HCA against the devices there are",
        "NCCL falls back to TCP without a word at the usual log level",
        "unset it, or name devices that exist",
        on_machine(_hca),
    ),
    Check(
        "rdma.gpu_direct",
        "whether NICs can reach GPU memory directly",
        "otherwise each message is copied through host memory, at half the rate or less",
        "load nvidia_peermem, or use the open kernel modules (DMA-BUF)",
        on_machine(_gpu_direct),
    ),
)
