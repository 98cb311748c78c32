"""Checks network.* and rdma.*: interfaces, MTU, errors, open ports; InfiniBand and RoCE ports."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

from tutti.machine.checks.cluster import (
    KNOWN_ERRORS,
    Cluster,
    Skip,
    parse_version,
    require_gpus,
    require_known,
)
from tutti.machine.checks.finding import (
    Findings,
    cluster_check,
    fail,
    host_check,
    machine_check,
    passed,
    warn,
)
from tutti.machine.checks.nccl_environment import settings, shares_gpus
from tutti.machine.nics import Nic, RdmaPort
from tutti.machine.recording import Machine

# Name prefixes of interfaces of containers and virtual machines. They do not reach other hosts.
_INTERNAL = ("docker", "virbr", "br-", "veth", "cni", "flannel", "podman", "lxc", "kube")
_IFNAME_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def selected_nics(variable: str, value: str, nics: Sequence[Nic]) -> list[Nic]:
    """Return the interfaces that a *_SOCKET_IFNAME variable selects.

    For gloo, the value lists exact names. For NCCL, the value lists name prefixes. In NCCL's value,
    a leading `=` selects exact names, and a leading `^` excludes the listed interfaces.
    """
    if variable == "GLOO_SOCKET_IFNAME":
        return [nic for nic in nics if nic.name in value.split(",")]
    exclude, value = value.startswith("^"), value.removeprefix("^")
    found = [nic for nic in nics if _matches(nic.name, value) is not exclude]
    # With `^`, NCCL also excludes loopback and docker interfaces.
    return [nic for nic in found if not _is_internal(nic)] if exclude else found


def _matches(device: str, value: str) -> bool:
    """Return whether `value` selects a device: `=a,b` lists names, and `a,b` lists prefixes."""
    names = [name for name in value.removeprefix("=").split(",") if name]
    return device in names if value.startswith("=") else device.startswith(tuple(names))


def _is_internal(nic: Nic) -> bool:
    return nic.kind == "loopback" or nic.name.startswith(_INTERNAL)


def external_nics(machine: Machine) -> list[Nic]:
    """Return the interfaces that are up, have an address and can reach other hosts.

    Interfaces with an unknown state or unknown addresses are included.
    """
    return [
        nic
        for nic in machine.nics
        if nic.state in ("up", "unknown")
        and not _is_internal(nic)
        and (nic.families is None or nic.families)
    ]


# --- network interfaces --------------------------------------------------------------------------


@host_check("network.ifname")
def interface_variables(cluster: Cluster, host: int) -> Findings:
    machine = cluster.machines[host]
    variables = settings(machine)
    for variable in _IFNAME_VARIABLES:
        if variable not in variables or shares_gpus(variables):
            continue
        setting = f"{variable}={variables[variable]}"
        nics = selected_nics(variable, variables[variable], machine.nics)
        names = ", ".join(nic.name for nic in external_nics(machine))
        expected = f"one of {names}" if names else "an interface that is up"
        command = f"unset {variable}"
        if not nics:
            yield fail("machine", f"{setting} matches no interface", expected, command)
        elif not cluster.on_one_host and all(_is_internal(nic) for nic in nics):
            problem = fail if len(cluster.machines) > 1 else warn
            observed = f"{setting}: {nics[0].name} does not reach other hosts"
            yield problem(f"nic:{nics[0].name}", observed, expected, command)
        elif all(nic.state == "down" for nic in nics):
            observed = f"{setting}: {nics[0].name} is down"
            yield fail(f"nic:{nics[0].name}", observed, expected, command)


@host_check("network.outside")
def external_interface(cluster: Cluster, host: int) -> Findings:
    machine = cluster.machines[host]
    if not machine.nics:
        raise Skip(machine.reason_unknown("nics") or "no network interface is visible")
    if nics := external_nics(machine):
        yield passed("up: " + ", ".join(nic.name for nic in nics))
    elif len(cluster.machines) > 1:
        yield fail("machine", "only loopback and container interfaces are up")
    else:
        raise Skip("only loopback is up, and the world has one host")


@host_check("network.choice")
def interface_choice(cluster: Cluster, host: int) -> Findings:
    machine = cluster.machines[host]
    if cluster.on_one_host:
        raise Skip("all ranks are on this host")
    if machine.has_rdma:
        raise Skip("RDMA carries the data")
    nics = [nic for nic in external_nics(machine) if nic.kind != "virtual" and not nic.master]
    fastest = max(nics, key=lambda nic: nic.speed_mbps or 0, default=None)
    default = next((nic for nic in nics if nic.default_route), None)
    if not fastest or not fastest.speed_mbps or not default or not default.speed_mbps:
        raise Skip("the speed of the interfaces is unknown")
    is_set = set(_IFNAME_VARIABLES) <= set(settings(machine))
    if fastest.speed_mbps >= 4 * default.speed_mbps and not is_set:
        yield warn(
            f"nic:{default.name}",
            f"the default route is on {default.name} ({default.speed_mbps} Mbit/s); "
            f"{fastest.name} has {fastest.speed_mbps} Mbit/s",
            f"traffic over {fastest.name}",
            f"export NCCL_SOCKET_IFNAME={fastest.name} GLOO_SOCKET_IFNAME={fastest.name}",
        )
    elif len(cluster.machines) > 1 and fastest.speed_mbps <= 1000:
        observed = f"the fastest interface, {fastest.name}, has {fastest.speed_mbps} Mbit/s"
        yield warn(f"nic:{fastest.name}", observed, cure="use hosts with a faster network")


@cluster_check("network.mtu")
def mtu(cluster: Cluster) -> Findings:
    # The MTUs in a group must be equal. Each interface name has a group with the MTUs of all hosts,
    # and the RoCE ports of each host have a group. The keys in a group are (host, interface).
    groups: dict[str, dict[tuple[str, str], int]] = {}
    for machine in cluster.machines:
        roce = {p.netdev for p in machine.rdma if p.link_layer == "Ethernet" and p.netdev}
        for nic in external_nics(machine):
            if nic.mtu:
                key = (machine.host, nic.name)
                groups.setdefault(f"{nic.name} of other hosts", {})[key] = nic.mtu
                if nic.name in roce:
                    groups.setdefault(f"other RoCE ports of {machine.host}", {})[key] = nic.mtu
    if all(len(group) < 2 for group in groups.values()):
        raise Skip("one host: nothing to compare")
    for others, group in groups.items():
        # The most common MTU is expected. If several MTUs are equally common, the largest is.
        counts = Counter(group.values())
        usual = max(counts, key=lambda value: (counts[value], value))
        for (host, name), value in group.items():
            if value != usual:
                command = f"sudo ip link set {name} mtu {usual}"
                expected = f"{usual}, as on {others}"
                yield warn(f"nic:{name}", f"MTU {value}", expected, command, host=host)


@machine_check("network.errors")
def packet_errors(machine: Machine) -> Findings:
    nics = [nic for nic in machine.nics if nic.kind in ("physical", "bond")]
    if not nics:
        raise Skip("no physical network interface is visible")
    for nic in nics:
        received, sent = nic.rx_errors or 0, nic.tx_errors or 0
        if nic.state == "up" and received + sent > 100:
            observed = f"{received} receive errors and {sent} send errors since boot"
            yield warn(f"nic:{nic.name}", observed)


@machine_check("network.kernel")
def kernel_settings(machine: Machine) -> Findings:
    if not machine.sysctls:
        raise Skip(machine.reason_unknown("sysctls") or "the kernel settings are unknown")
    fastest = max((nic.speed_mbps or 0 for nic in external_nics(machine)), default=0)
    if fastest >= 25000 and not machine.has_rdma:
        for name in ("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"):
            sizes = machine.sysctls.get(name, "").split()
            if len(sizes) == 3 and int(sizes[2]) < 4 << 20:
                observed = f"{name} allows {sizes[2]} bytes on a {fastest // 1000} Gbit/s link"
                command = f"sudo sysctl -w {name}='{sizes[0]} {sizes[1]} 16777216'"
                yield warn("machine", observed, "at least 4 MiB", command)
    ports = machine.sysctls.get("net.ipv4.ip_local_port_range", "").split()
    if len(ports) == 2 and int(ports[1]) - int(ports[0]) < 10000:
        observed = f"{int(ports[1]) - int(ports[0])} ports for outgoing connections"
        command = "sudo sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
        yield warn("machine", observed, "10000 or more", command)


@host_check("network.name")
def host_name(cluster: Cluster, host: int) -> Findings:
    machine = cluster.machines[host]
    target = require_known(machine, "name_resolution", machine.name_resolution)
    name = machine.host
    if target == "nothing":
        cure = f"add `ADDRESS {name}` to /etc/hosts, or the name to the name server"
        yield warn("machine", f"the host's own name {name} cannot be resolved", cure=cure)
    elif target == "loopback" and len(cluster.machines) > 1:
        yield warn(
            "machine",
            f"{name} resolves to a loopback address, and gloo announces it to other hosts",
            "an address that other hosts can reach",
            rf"sudo sed -i '/^127\.0\.1\.1/d' /etc/hosts  # on {name}",
            cure=f"remove {name} from the 127.0.1.1 line of /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    yield passed(f"{name} resolves to {'loopback' if target == 'loopback' else 'an address'}")


@cluster_check("network.calls")
def connections(cluster: Cluster) -> Findings:
    attempts = cluster.probes.require("connections", cluster.probes.connections)
    for attempt in attempts:
        if attempt.error is not None:
            src, dst = (cluster.machines[i].host for i in (attempt.src, attempt.dst))
            yield fail(
                f"link:{attempt.src}-{attempt.dst}",
                f"{src} cannot connect to {dst}: {attempt.error}",
                "connections on all ports above 1024 between all hosts",
                f"sudo ufw allow from {src}  # on {dst}, or with the firewall in use there",
            )
    yield passed(f"{len(attempts)} connections between {len(cluster.machines)} hosts", "world")


# --- RDMA ----------------------------------------------------------------------------------------


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
        scope = f"nic:{port.device}"
        observed = f"port {port.port} is {port.state} ({port.physical_state})"
        if active[port.device, port.port]:
            yield fail(scope, observed, "ACTIVE, as on other hosts", host=machine.host)
        elif port.physical_state != "Disabled" and others_active:
            yield warn(scope, observed, "ACTIVE, as on other ports of this host", host=machine.host)


@cluster_check("rdma.rate")
def port_rate(cluster: Cluster) -> Findings:
    rates = [
        (machine, port, port.rate_gbps)
        for machine, port in _ports(cluster)
        if port.state == "ACTIVE" and port.rate_gbps
    ]
    if not rates:
        raise Skip("no active RDMA port")
    for machine, port, rate in rates:
        kind = _card_kind(machine, port)
        other_hosts = [other for _, p, other in rates if p.device == port.device]
        same_host = [other for m, p, other in rates if m is machine and _card_kind(m, p) == kind]
        expected = max(median(same_host), *other_hosts)
        if rate < expected:
            text = f"{expected:g} Gbit/s, as on other ports"
            yield fail(f"nic:{port.device}", f"{rate:g} Gbit/s", text, host=machine.host)


def _card_kind(machine: Machine, port: RdmaPort) -> tuple[object, ...]:
    """Return a key that is equal for ports of cards of the same kind.

    The rates of cards of different kinds are not compared. For example, a management card has a
    different driver or a different PCIe width.
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
            yield warn(f"nic:{port.device}", observed, host=machine.host)


@machine_check("rdma.gid")
def roce_gid(machine: Machine) -> Findings:
    roce = [p for p in machine.rdma if p.link_layer == "Ethernet" and p.state == "ACTIVE"]
    if not roce:
        raise Skip("no RoCE")
    for port in roce:
        if port.gid_types is not None and "RoCE v2" not in port.gid_types:
            yield fail(f"nic:{port.device}", f"GID types: {', '.join(port.gid_types) or 'none'}")
    index = settings(machine).get("NCCL_IB_GID_INDEX")
    if index is not None and machine.versions.get("nccl"):
        yield passed(f"NCCL_IB_GID_INDEX={index} (not needed: NCCL 2.21 and newer select RoCE v2)")


@machine_check("rdma.hca")
def hca_variable(machine: Machine) -> Findings:
    value = settings(machine).get("NCCL_IB_HCA")
    if value is None:
        raise Skip("NCCL_IB_HCA is not set")
    names = value.removeprefix("^")
    devices = sorted({port.device for port in machine.rdma})
    expected = f"one of {', '.join(devices)}" if devices else "not set: no RDMA device"
    for entry in names.removeprefix("=").split(","):
        name = entry.partition(":")[0]
        pattern = f"={name}" if names.startswith("=") else name
        if name and not any(_matches(device, pattern) for device in devices):
            yield fail("machine", f"NCCL_IB_HCA={value}, but there is no device {name}", expected)


@machine_check("rdma.gpu_direct")
def gpu_direct(machine: Machine) -> Findings:
    require_gpus(machine)
    if not machine.has_rdma:
        raise Skip("no active RDMA port")
    modules = require_known(machine, "kernel_modules", machine.kernel_modules)
    loaded = {"nvidia_peermem", "nv_peer_mem"} & set(modules)
    module = machine.versions.get("kernel_module", "unknown")
    if loaded:
        yield passed(f"{loaded.pop()} is loaded")
    elif parse_version(machine.kernel or "")[:2] >= (5, 12) and module == "open":
        yield passed("DMA-BUF is available: open kernel modules and Linux 5.12 or newer")
    elif module == "unknown":
        raise Skip("nvidia_peermem is not loaded, and it is unknown whether DMA-BUF works")
    else:
        observed = f"nvidia_peermem is not loaded, and {module} kernel modules lack DMA-BUF"
        yield warn("machine", observed)
