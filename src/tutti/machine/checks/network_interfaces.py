"""Checks network.*: choice of interface, MTU, packet errors, TCP buffers, host name, open ports."""

from collections import Counter
from collections.abc import Sequence

from tutti.machine.checks.cluster import Cluster, Skip, has_rdma, known
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
from tutti.machine.nics import Nic
from tutti.machine.observation import Machine

# Name prefixes of container and virtual machine interfaces, which do not reach other hosts.
_INTERNAL = ("docker", "virbr", "br-", "veth", "cni", "flannel", "podman", "lxc", "kube")
_IFNAME_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def selected_nics(variable: str, value: str, nics: Sequence[Nic]) -> list[Nic]:
    """The interfaces that the value of a *_SOCKET_IFNAME variable selects.

    gloo accepts exact names. NCCL accepts name prefixes; a leading `=` selects exact names, and a
    leading `^` excludes the names.
    """
    if variable == "GLOO_SOCKET_IFNAME":
        return [nic for nic in nics if nic.name in value.split(",")]
    exclude, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    names = [name for name in value.split(",") if name]

    def matches(nic: Nic) -> bool:
        return any(nic.name == name if exact else nic.name.startswith(name) for name in names)

    found = [nic for nic in nics if matches(nic) is not exclude]
    # If names are excluded, NCCL still avoids loopback and docker interfaces.
    return [nic for nic in found if not _is_internal(nic)] if exclude else found


def _is_internal(nic: Nic) -> bool:
    return nic.kind == "loopback" or nic.name.startswith(_INTERNAL)


def external_nics(machine: Machine) -> list[Nic]:
    """The interfaces that can reach other hosts: they are up, have an address and are not internal.

    An interface with unknown state or unknown addresses is included.
    """
    return [
        nic
        for nic in machine.nics
        if nic.state in ("up", "unknown")
        and not _is_internal(nic)
        and (nic.families is None or nic.families)
    ]


@host_check("network.ifname")
def interface_variables(cluster: Cluster, host: int) -> Findings:
    machine = cluster.machines[host]
    variables = settings(machine)
    for variable in _IFNAME_VARIABLES:
        if variable not in variables or shares_gpus(variables):
            continue
        setting = f"{variable}={variables[variable]}"
        nics = selected_nics(variable, variables[variable], machine.nics)
        expected = "one of " + (", ".join(nic.name for nic in external_nics(machine)) or "none up")
        command = f"unset {variable}"
        if not nics:
            yield fail("machine", f"{setting} matches no interface", expected, command)
        elif not cluster.on_one_host and all(_is_internal(nic) for nic in nics):
            say = fail if len(cluster.machines) > 1 else warn
            observed = f"{setting}: {nics[0].name} does not reach other hosts"
            yield say(f"nic:{nics[0].name}", observed, expected, command)
        elif all(nic.state == "down" for nic in nics):
            yield fail(f"nic:{nics[0].name}", f"{setting}: it is down", expected, command)


@host_check("network.outside")
def external_interface(cluster: Cluster, host: int) -> Findings:
    machine = cluster.machines[host]
    if not machine.nics:
        raise Skip(machine.why("nics") or "no network interface is visible")
    nics = external_nics(machine)
    if nics:
        yield passed("up: " + ", ".join(nic.name for nic in nics))
    elif len(cluster.machines) > 1:
        observed = "only loopback and container interfaces are up"
        yield fail("machine", observed, "an interface that reaches the other hosts", "ip -br link")
    else:
        raise Skip("only loopback is up, and the world has one host")


@host_check("network.choice")
def interface_choice(cluster: Cluster, host: int) -> Findings:
    machine = cluster.machines[host]
    if cluster.on_one_host:
        raise Skip("all ranks are on this host")
    if has_rdma(machine):
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
            f"data over {fastest.name}",
            f"export NCCL_SOCKET_IFNAME={fastest.name} GLOO_SOCKET_IFNAME={fastest.name}",
        )
    elif len(cluster.machines) > 1 and fastest.speed_mbps <= 1000:
        observed = f"the fastest interface, {fastest.name}, has {fastest.speed_mbps} Mbit/s"
        cure = "use hosts with a faster network"
        yield warn(f"nic:{fastest.name}", observed, "10000 Mbit/s or more between hosts", cure=cure)


@cluster_check("network.mtu")
def mtu(cluster: Cluster) -> Findings:
    compared = False
    by_name: dict[str, dict[str, int]] = {}
    for machine in cluster.machines:
        nics = [nic for nic in external_nics(machine) if nic.mtu]
        for nic in nics:
            by_name.setdefault(nic.name, {})[machine.host] = nic.mtu or 0
        roce = {p.netdev for p in machine.rdma if p.link_layer == "Ethernet" and p.netdev}
        on_host = {nic.name: nic.mtu or 0 for nic in nics if nic.name in roce}
        compared |= len(on_host) > 1
        for name, value, usual in _different(on_host):
            expected = f"{usual}, as on other RoCE ports"
            command = f"sudo ip link set {name} mtu {usual}"
            yield warn(f"nic:{name}", f"MTU {value}", expected, command, host=machine.host)
    for name, by_host in by_name.items():
        compared |= len(by_host) > 1
        for host, value, usual in _different(by_host):
            expected = f"{usual}, as on other hosts"
            command = f"sudo ip link set {name} mtu {usual}"
            yield warn(f"nic:{name}", f"MTU {value}", expected, command, host=host)
    if not compared:
        raise Skip("one host: nothing to compare")


def _different(values: dict[str, int]) -> list[tuple[str, int, int]]:
    """(name, value, usual value) of each value that differs from the usual value.

    The usual value is the most common value; if several are equally common, the largest of them.
    """
    counts = Counter(values.values())
    usual = max(counts, key=lambda value: (counts[value], value), default=0)
    return [(name, value, usual) for name, value in values.items() if value != usual]


@machine_check("network.errors")
def packet_errors(machine: Machine) -> Findings:
    nics = [nic for nic in machine.nics if nic.kind in ("physical", "bond")]
    if not nics:
        raise Skip("no physical network interface is visible")
    for nic in nics:
        received, sent = nic.rx_errors or 0, nic.tx_errors or 0
        if nic.state == "up" and received + sent > 100:
            observed = f"{received} receive errors and {sent} send errors since boot"
            command = f"ethtool -S {nic.name} | grep -i err"
            yield warn(f"nic:{nic.name}", observed, "at most 100", command)


@machine_check("network.kernel")
def kernel_settings(machine: Machine) -> Findings:
    if not machine.sysctls:
        raise Skip(machine.why("sysctls") or "the kernel settings are unknown")
    fastest = max((nic.speed_mbps or 0 for nic in external_nics(machine)), default=0)
    if fastest >= 25000 and not has_rdma(machine):
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
    target = known(machine, "name_resolution", machine.name_resolution)
    name = machine.host
    if target == "nothing":
        cure = f"add `ADDRESS {name}` to /etc/hosts, or the name to the name server"
        observed = f"the host's own name {name} cannot be resolved"
        yield warn("machine", observed, "an address", cure=cure)
    elif target == "loopback" and len(cluster.machines) > 1:
        yield warn(
            "machine",
            f"{name} resolves to loopback on this host; gloo announces it to other hosts",
            "an address that other hosts can reach",
            rf"sudo sed -i '/^127\.0\.1\.1/d' /etc/hosts  # on {name}",
            cure=f"remove {name} from the 127.0.1.1 line of /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    else:
        yield passed(f"{name} resolves to {'loopback' if target == 'loopback' else 'an address'}")


@cluster_check("network.calls")
def connections(cluster: Cluster) -> Findings:
    attempts = cluster.probes.connections
    if attempts is None:
        raise Skip(cluster.probes.skipped.get("connections", "needs a world on several hosts"))
    for attempt in attempts:
        if attempt.error is not None:
            src, dst = (cluster.machines[i].host for i in (attempt.src, attempt.dst))
            yield fail(
                f"link:{attempt.src}-{attempt.dst}",
                f"{src} cannot connect to {dst}: {attempt.error}",
                "connections on all ports above 1024 between all hosts",
                f"sudo ufw allow from {src}  # on {dst}, or with the firewall in use there",
            )
    if attempts and not any(attempt.error for attempt in attempts):
        yield passed(f"{len(attempts)} connections of {len(cluster.machines)} hosts", "world")
