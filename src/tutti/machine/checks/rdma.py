"""Checks rdma.*: state, rate, errors and GIDs of InfiniBand and RoCE ports, and GPUDirect RDMA."""

from collections import Counter
from statistics import median

from tutti.machine.checks.cluster import (
    KNOWN_ERRORS,
    Cluster,
    Skip,
    gpus_of,
    has_rdma,
    parse_version,
)
from tutti.machine.checks.finding import Findings, cluster_check, fail, machine_check, passed, warn
from tutti.machine.checks.nccl_environment import settings
from tutti.machine.nics import RdmaPort
from tutti.machine.observation import Machine


def _ports(cluster: Cluster) -> list[tuple[Machine, RdmaPort]]:
    found = [(machine, port) for machine in cluster.machines for port in machine.rdma]
    if not found:
        raise Skip("no RDMA device")
    return found


@cluster_check("rdma.state")
def port_state(cluster: Cluster) -> Findings:
    ports = _ports(cluster)
    active = Counter((port.device, port.port) for _, port in ports if port.state == "ACTIVE")
    for machine, port in ports:
        if port.state in (None, "ACTIVE"):
            continue
        others_active = any(
            other.state == "ACTIVE" and other.device != port.device for other in machine.rdma
        )
        scope, command = f"nic:{port.device}", f"ibstat {port.device}; ibdev2netdev"
        observed = f"port {port.port} is {port.state} ({port.physical_state})"
        if active[port.device, port.port]:
            yield fail(scope, observed, "ACTIVE, as on other hosts", command, host=machine.host)
        elif port.physical_state != "Disabled" and others_active:
            expected = "ACTIVE, as other ports of this host"
            yield warn(scope, observed, expected, command, host=machine.host)


@cluster_check("rdma.rate")
def port_rate(cluster: Cluster) -> Findings:
    ports = [(m, p) for m, p in _ports(cluster) if p.state == "ACTIVE" and p.rate_gbps]
    if not ports:
        raise Skip("no active RDMA port")
    for machine, port in ports:
        other_hosts = [p.rate_gbps or 0 for _, p in ports if p.device == port.device]
        same_host = [
            p.rate_gbps or 0
            for m, p in ports
            if m is machine and _slot(m, p) == _slot(machine, port)
        ]
        expected = max(median(same_host), max(other_hosts))
        if (port.rate_gbps or 0) < expected:
            yield fail(
                f"nic:{port.device}",
                f"{port.rate_gbps:g} Gbit/s",
                f"{expected:g} Gbit/s, as other ports",
                f"ibstat {port.device}",
                host=machine.host,
            )


def _slot(machine: Machine, port: RdmaPort) -> tuple[object, ...]:
    """A key that is equal for ports of the same kind of card.

    A management card, for example, has another driver or a PCIe link of another width.
    """
    device = machine.pci_device(port.pci_address)
    if device is None or device.link is None:
        return (port.device,)
    return (port.driver, port.link_layer, device.link.max_generation, device.link.max_width)


@cluster_check("rdma.errors")
def port_errors(cluster: Cluster) -> Findings:
    ports = _ports(cluster)
    normal_counts = KNOWN_ERRORS["rdma_counters"]
    usual = {name: median(p.counters.get(name, 0) for _, p in ports) for name in normal_counts}
    for machine, port in ports:
        high = [
            f"{name} {port.counters[name]}"
            for name, normal in normal_counts.items()
            if port.counters.get(name, 0) > max(normal, 10 * usual[name])
        ]
        if high:
            observed = f"{', '.join(high)} since boot"
            command = f"grep . /sys/class/infiniband/{port.device}/ports/{port.port}/*counters/*"
            expected = "near 0, as other ports"
            yield warn(f"nic:{port.device}", observed, expected, command, host=machine.host)


@machine_check("rdma.gid")
def roce_gid(machine: Machine) -> Findings:
    roce = [p for p in machine.rdma if p.link_layer == "Ethernet" and p.state == "ACTIVE"]
    if not roce:
        raise Skip("no RoCE")
    for port in roce:
        if port.gid_types is not None and "RoCE v2" not in port.gid_types:
            observed = f"its GID types are {', '.join(port.gid_types) or 'none'}"
            yield fail(f"nic:{port.device}", observed, "RoCE v2", "ibv_devinfo -v | grep GID")
    index = settings(machine).get("NCCL_IB_GID_INDEX")
    if index is not None and machine.versions.get("nccl"):
        yield passed(f"NCCL_IB_GID_INDEX={index} (NCCL 2.21 and newer select RoCE v2 themselves)")


@machine_check("rdma.hca")
def hca_variable(machine: Machine) -> Findings:
    value = settings(machine).get("NCCL_IB_HCA")
    if value is None:
        raise Skip("NCCL_IB_HCA is not set")
    names = value.removeprefix("^")
    exact, names = names.startswith("="), names.removeprefix("=")
    devices = sorted({port.device for port in machine.rdma})
    for entry in names.split(","):
        name = entry.partition(":")[0]
        if not any(each == name if exact else each.startswith(name) for each in devices):
            observed = f"NCCL_IB_HCA={value}: there is no device {name}"
            expected = f"one of {', '.join(devices)}" if devices else "not set: no RDMA device"
            yield fail("machine", observed, expected, "unset NCCL_IB_HCA")


@machine_check("rdma.gpu_direct")
def gpu_direct(machine: Machine) -> Findings:
    gpus_of(machine)
    if not has_rdma(machine):
        raise Skip("no active RDMA port")
    if machine.kernel_modules is None:
        raise Skip(machine.why("kernel_modules") or "the loaded kernel modules are unknown")
    loaded = {"nvidia_peermem", "nv_peer_mem"} & set(machine.kernel_modules)
    kernel = parse_version(machine.kernel or "")
    module = machine.versions.get("kernel_module", "unknown")
    if loaded:
        yield passed(f"{loaded.pop()} is loaded")
    elif kernel[:2] >= (5, 12) and module == "open":
        yield passed("DMA-BUF: open kernel modules and a kernel that supports it")
    elif module == "unknown":
        raise Skip("nvidia_peermem is not loaded; whether DMA-BUF works is unknown")
    else:
        observed = f"nvidia_peermem is not loaded, and {module} kernel modules lack DMA-BUF"
        expected = "nvidia_peermem or DMA-BUF"
        yield warn("machine", observed, expected, "sudo modprobe nvidia_peermem")
