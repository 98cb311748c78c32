"""Network: which interface would be used, its speed, size of packets, names and ports."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tutti.machine.checks.check import Check, on_machine, on_world
from tutti.machine.checks.environment import settings, shares_gpus
from tutti.machine.checks.finding import Skip, Verdict, fail, fine, warn
from tutti.machine.checks.known import known
from tutti.machine.checks.limits import has_rdma
from tutti.machine.checks.patient import Patient
from tutti.machine.observation import Machine

if TYPE_CHECKING:
    from tutti.machine.nics import Nic

# Bridges of containers and virtual machines: other hosts cannot be reached through them.
_INNER = ("docker", "virbr", "br-", "veth", "cni", "flannel", "podman", "lxc", "kube")


def chosen(variable: str, value: str, nics: "Sequence[Nic]") -> "list[Nic]":
    """The interfaces that a *_SOCKET_IFNAME means: gloo takes names, NCCL prefixes, ^ and =."""
    if variable == "GLOO_SOCKET_IFNAME":
        return [nic for nic in nics if nic.name in value.split(",")]
    without, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    words = [word for word in value.split(",") if word]
    fits = {
        nic.name: any(nic.name == w if exact else nic.name.startswith(w) for w in words)
        for nic in nics
    }
    found = [nic for nic in nics if fits[nic.name] is not without]
    if without:  # an exclusion leaves NCCL's own avoidance of lo and docker in force
        found = [nic for nic in found if not _is_inner(nic)]
    return found


def _is_inner(nic: "Nic") -> bool:
    return nic.kind == "loopback" or nic.name.startswith(_INNER)


def outer(machine: Machine) -> "list[Nic]":
    """Interfaces by which other hosts could be reached: up, with an address, none of the inner."""
    return [
        nic
        for nic in machine.nics
        if nic.state in ("up", "unknown")
        and not _is_inner(nic)
        and (nic.families is None or nic.families)
    ]


def _interface(patient: Patient, host: int) -> Iterator[Verdict]:
    machine = patient.machines[host]
    variables = settings(machine)
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if variable not in variables or shares_gpus(variables):
            continue
        value = variables[variable]
        found = chosen(variable, value, machine.nics)
        names = ", ".join(nic.name for nic in outer(machine)) or "none is up"
        command = f"unset {variable}"
        if not found:
            observed = f"{variable}={value} fits no interface"
            yield fail("machine", observed, f"one of {names}", "", command)
        elif not patient.alone and all(_is_inner(nic) for nic in found):
            say = fail if len(patient.machines) > 1 else warn
            observed = f"{variable}={value}: no other host is reached through {found[0].name}"
            yield say(f"nic:{found[0].name}", observed, f"one of {names}", "", command)
        elif all(nic.state == "down" for nic in found):
            observed = f"{variable}={value}, which is down"
            yield fail(f"nic:{found[0].name}", observed, f"one of {names}", "", command)


def _outside(patient: Patient, host: int) -> Iterator[Verdict]:
    machine = patient.machines[host]
    if not machine.nics:
        raise Skip(machine.why("nics") or "no interface is shown")
    found = outer(machine)
    if not found and len(patient.machines) > 1:
        yield fail("machine", "only loopback or inner interfaces are up", "one that is not", "")
    elif not found:
        raise Skip("no interface but loopback is up, and no other host takes part")
    else:
        yield fine("up: " + ", ".join(nic.name for nic in found))


def _choice(patient: Patient, host: int) -> Iterator[Verdict]:
    """Where TCP carries the data and nobody said over which interface."""
    machine = patient.machines[host]
    if patient.alone:
        raise Skip("all ranks are on this host")
    if has_rdma(machine):
        raise Skip("RDMA carries the data")
    variables = settings(machine)
    candidates = [nic for nic in outer(machine) if nic.kind != "virtual" and not nic.master]
    fast = max(candidates, key=lambda nic: nic.speed_mbps or 0, default=None)
    usual = [nic for nic in candidates if nic.default_route]
    if not fast or not fast.speed_mbps or not usual or not usual[0].speed_mbps:
        raise Skip("no interface tells its speed")
    set_already = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= set(variables)
    if fast.speed_mbps >= 4 * usual[0].speed_mbps and not set_already:
        observed = (
            f"{usual[0].name} ({usual[0].speed_mbps} Mbit/s) has the default route, "
            f"{fast.name} does {fast.speed_mbps}"
        )
        yield warn(
            f"nic:{usual[0].name}",
            observed,
            f"data over {fast.name}",
            "",
            f"export NCCL_SOCKET_IFNAME={fast.name} GLOO_SOCKET_IFNAME={fast.name}",
        )
    elif len(patient.machines) > 1 and fast.speed_mbps <= 1000:
        observed = f"{fast.name} does {fast.speed_mbps} Mbit/s, and there is no faster one"
        yield warn(f"nic:{fast.name}", observed, "10 Gbit/s or more between hosts", "")


def _mtu(patient: Patient) -> Iterator[Verdict]:
    """The same interface on all hosts, and all RoCE ports of a host: their packets must match."""
    compared = False
    by_name: dict[str, dict[str, int]] = {}
    for machine in patient.machines:
        for nic in outer(machine):
            if nic.mtu:
                by_name.setdefault(nic.name, {})[machine.host] = nic.mtu
        roce = {p.netdev for p in machine.rdma if p.link_layer == "Ethernet" and p.netdev}
        inside = {nic.name: nic.mtu for nic in outer(machine) if nic.name in roce and nic.mtu}
        compared |= len(inside) > 1
        for name, mtu, usual in _odd(inside):
            command = f"sudo ip link set {name} mtu {usual}"
            expected = f"{usual} as its RoCE neighbours"
            yield warn(f"nic:{name}", f"MTU {mtu}", expected, "", command, host=machine.host)
    for name, by_host in by_name.items():
        compared |= len(by_host) > 1
        for host, mtu, usual in _odd(by_host):
            command = f"sudo ip link set {name} mtu {usual}"
            expected = f"{usual} as on the other hosts"
            yield warn(f"nic:{name}", f"MTU {mtu}", expected, "", command, host=host)
    if not compared:
        raise Skip("one host: nothing to compare")


def _odd(values: dict[str, int]) -> list[tuple[str, int, int]]:
    """Names whose value is not the usual one; of two that differ, the lower is the odd one."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return []
    usual = max(counts, key=lambda value: (counts[value], value))
    return [(name, value, usual) for name, value in values.items() if value != usual]


def _errors(machine: Machine) -> Iterator[Verdict]:
    nics = [nic for nic in machine.nics if nic.kind in ("physical", "bond")]
    if not nics:
        raise Skip("no physical interface is shown")
    for nic in nics:
        errors = (nic.rx_errors or 0) + (nic.tx_errors or 0)
        if nic.state == "up" and errors > 100:
            observed = f"{nic.rx_errors} bad packets received, {nic.tx_errors} sent, since boot"
            yield warn(f"nic:{nic.name}", observed, "0", "", f"ethtool -S {nic.name} | grep -i err")


_TCP_BYTES = 4 << 20


def _kernel(patient: Patient, host: int) -> Iterator[Verdict]:
    machine = patient.machines[host]
    if not machine.sysctls:
        raise Skip(machine.why("sysctls") or "the kernel's settings are not told")
    fast = max((nic.speed_mbps or 0 for nic in outer(machine)), default=0)
    if fast >= 25000 and not has_rdma(machine):
        for name in ("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"):
            sizes = machine.sysctls.get(name, "").split()
            if len(sizes) == 3 and int(sizes[2]) < _TCP_BYTES:
                observed = f"{name} ends at {sizes[2]} bytes on a {fast // 1000} Gbit/s link"
                command = f"sudo sysctl -w {name}='{sizes[0]} {sizes[1]} 16777216'"
                yield warn("machine", observed, "at least 4 MiB", "", command)
    ports = machine.sysctls.get("net.ipv4.ip_local_port_range", "").split()
    if len(ports) == 2 and int(ports[1]) - int(ports[0]) < 10000:
        observed = f"{int(ports[1]) - int(ports[0])} ports for outgoing connections"
        command = "sudo sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
        yield warn("machine", observed, "10000 or more", "", command)


def _name(patient: Patient, host: int) -> Iterator[Verdict]:
    machine = patient.machines[host]
    where = known(machine, "name_resolution", machine.name_resolution)
    name = machine.host
    if where == "nothing":
        cure = f"add it to /etc/hosts or to the name server: ADDRESS {name}"
        yield warn("machine", f"the host's own name {name} resolves to nothing", "an address", cure)
    elif where == "loopback" and len(patient.machines) > 1:
        cure = f"take {name} out of the 127.0.1.1 line of /etc/hosts, or set GLOO_SOCKET_IFNAME"
        command = rf"sudo sed -i '/^127\.0\.1\.1/d' /etc/hosts  # on {name}"
        observed = f"{name} resolves to loopback here; gloo would tell that address to other hosts"
        yield warn("machine", observed, "an address that other hosts reach", cure, command)
    else:
        yield fine(f"{name} resolves to {'loopback' if where == 'loopback' else 'an address'}")


def _calls(patient: Patient) -> Iterator[Verdict]:
    calls = patient.probes.calls
    if calls is None:
        raise Skip(patient.probes.reasons.get("calls", "needs a world on several hosts"))
    for call in calls:
        if call.error is not None:
            src, dst = (patient.machines[i].host for i in (call.src, call.dst))
            yield fail(
                f"link:{call.src}-{call.dst}",
                f"{src} cannot call {dst}: {call.error}",
                "connections on any port above 1024 between all hosts",
                "",
                f"sudo ufw allow from {src}  # on {dst}, or the firewall in use there",
            )
    if calls and not any(call.error for call in calls):
        yield fine(f"{len(calls)} calls between {len(patient.machines)} hosts", "world")


CHECKS = (
    Check(
        "network.ifname",
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME against the interfaces there are",
        "a name that fits none, or loopback, ends in a time-out on other hosts",
        "unset it, or name an interface that reaches the other hosts",
        _interface,
    ),
    Check(
        "network.outside",
        "whether any interface reaches beyond this host",
        "loopback and container bridges reach nobody else",
        "bring an interface up; run containers with --network=host",
        _outside,
    ),
    Check(
        "network.choice",
        "whether the fastest interface would carry the data",
        "left alone, gloo and NCCL take the one with the default route or the host's name",
        "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
        _choice,
    ),
    Check(
        "network.mtu",
        "whether packet sizes (MTU) agree between hosts and RoCE ports",
        "the larger packets vanish on the way: small messages pass, large ones hang",
        "set the same MTU everywhere, switches included",
        on_world(_mtu),
        "world",
    ),
    Check(
        "network.errors",
        "bad packets on physical interfaces",
        "each is sent again after a pause",
        "replace cable or transceiver if they grow",
        on_machine(_errors),
    ),
    Check(
        "network.kernel",
        "the kernel's buffers on fast links without RDMA, and its range of ports",
        "a small buffer caps one connection far below the link",
        "raise them with sysctl",
        _kernel,
    ),
    Check(
        "network.name",
        "what the host's own name resolves to",
        "Debian maps it to 127.0.1.1, and gloo tells that to the other hosts",
        "map it to the address that others reach",
        _name,
    ),
    Check(
        "network.calls",
        "a connection from every host to every other, on a high port",
        "gloo and NCCL choose such ports at random; a firewall lets them wait until the time-out",
        "open all ports between the hosts of a job",
        on_world(_calls),
        "world",
    ),
)
