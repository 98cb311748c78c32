"""Checks agreement.* and active.*: ranks, hosts, GPUs and links that differ from the majority.

A fact, such as a version, is compared with the most common value. Slow devices and links are found
with the median and the median absolute deviation (MAD), because a single slow value hardly changes
them.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from tutti.machine.checks.cluster import KNOWN_ERRORS, Cluster, MeasuredRate, Skip
from tutti.machine.checks.finding import Finding, Findings, cluster_check, fail, passed, warn
from tutti.machine.checks.nccl_environment import LISTS, settings, shares_gpus
from tutti.machine.checks.network_rdma import external_nics, selected_nics
from tutti.machine.recording import Machine
from tutti.measure.units import format_bytes, format_rate

Facts = dict[str, str]

# --- agreement of ranks and hosts ----------------------------------------------------------------


def _differences(
    cluster: Cluster, read_facts: Callable[[Machine], Facts], must_agree: Sequence[str] = ()
) -> Findings:
    """Yield one finding per fact and uncommon value. The finding names the ranks or hosts.

    A difference in a fact of `must_agree` is a failure. Other differences are warnings.
    """
    if len(cluster.ranks) < 2 and len(cluster.machines) < 2:
        raise Skip("one rank on one host: nothing to compare")
    # The processes of one host may differ, so ranks are compared. Hosts are compared only if no
    # world was started.
    processes = [(str(rank.rank), rank.machine) for rank in cluster.ranks]
    processes = processes or [("", machine) for machine in cluster.machines]
    facts = [read_facts(machine) for _, machine in processes]
    for key in dict.fromkeys(key for values in facts for key in values):
        values = [facts_of_process.get(key, "not set") for facts_of_process in facts]
        counts = Counter(values)
        # If several values are equally common, the value of the first rank is expected.
        usual, number = max(counts.items(), key=lambda item: (item[1], item[0] == values[0]))
        for value in sorted(set(counts) - {usual}, key=lambda value: counts[value]):
            pairs = zip(processes, values, strict=True)
            different = [process for process, own_value in pairs if own_value == value]
            ranks = [rank for rank, _ in different if rank]
            hosts = list(dict.fromkeys(machine.host for _, machine in different))
            names = _shorten(hosts, 3) + (f" (rank {_shorten(ranks, 6)})" if ranks else "")
            scope = "machine" if len(hosts) == 1 else "world"
            yield (fail if key in must_agree else warn)(
                f"rank:{ranks[0]}" if len(ranks) == 1 else scope,
                f"{names}: {key} {value}",
                f"{usual}, as on {number} other{'s' * (number > 1)}",
                host=hosts[0] if len(hosts) == 1 else "",
            )


def _shorten(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:count]) + (" …" if len(names) > count else "")


@cluster_check("agreement.versions")
def same_versions(cluster: Cluster) -> Findings:
    def facts(machine: Machine) -> Facts:
        system = {"kernel": machine.kernel, "architecture": machine.architecture}
        return machine.versions | {k: v for k, v in system.items() if v}

    yield from _differences(cluster, facts, ("torch", "nccl", "cuda", "tutti"))


@cluster_check("agreement.variables")
def same_variables(cluster: Cluster) -> Findings:
    prefixes = LISTS["per_process_prefixes"]

    def facts(machine: Machine) -> Facts:
        variables = settings(machine)
        shared = variables.keys() - set(LISTS["per_process"])
        return {name: variables[name] for name in sorted(shared) if not name.startswith(prefixes)}

    yield from _differences(cluster, facts)


@cluster_check("agreement.limits")
def same_limits(cluster: Cluster) -> Findings:
    def facts(machine: Machine) -> Facts:
        limits = {
            "memlock": machine.limits.memlock_bytes,
            "open files": machine.limits.open_files,
            "processes": machine.limits.processes,
            "stack": machine.limits.stack_bytes,
        }
        return {name: str(value) for name, value in limits.items() if value is not None}

    yield from _differences(cluster, facts)


@cluster_check("agreement.hardware")
def same_hardware(cluster: Cluster) -> Findings:
    if len(cluster.machines) < 2:
        raise Skip("one host: nothing to compare")

    def facts(machine: Machine) -> Facts:
        memory = machine.memory.total_bytes
        return {
            "GPUs": str(len(machine.accelerators)),
            "RDMA ports": str(len(machine.rdma)),
            "NUMA nodes": str(len(machine.numa)),
            # Round to 16 GiB, because firmware reserves different amounts of memory on the hosts.
            **({"memory": format_bytes(round(memory / 2**34) * 2**34)} if memory else {}),
            **({"CPU": machine.cpus.model} if machine.cpus.model else {}),
        }

    yield from _differences(Cluster(cluster.machines), facts, ("GPUs", "RDMA ports"))


@cluster_check("agreement.gpus")
def one_gpu_per_rank(cluster: Cluster) -> Findings:
    on_gpus = [rank for rank in cluster.ranks if rank.gpu is not None]
    if not on_gpus:
        raise Skip("no rank uses a GPU")
    users = Counter((rank.host, rank.gpu) for rank in on_gpus)
    for (host, gpu), number in users.items():
        if number > 1 and not shares_gpus(on_gpus[0].machine.variables):
            ranks = [str(r.rank) for r in on_gpus if (r.host, r.gpu) == (host, gpu)]
            yield fail(f"rank:{ranks[1]}", f"ranks {', '.join(ranks)} use the same GPU ({gpu})")
    if len(users) == len(on_gpus):
        yield passed(f"{len(on_gpus)} ranks, one GPU each", "world")


# --- slow outliers -------------------------------------------------------------------------------

# A value is an outlier if its modified z-score (Iglewicz and Hoaglin) is above 3.5. The MAD of a
# normal distribution is 0.6745 times the standard deviation.
_Z_SCORE, _MAD_OF_NORMAL = 3.5, 0.6745
# A value less than 10 % below the median is never reported, even if the other values are nearly
# equal.
MIN_DIFFERENCE = 0.10
# With only three or four values, one disturbed value can increase the MAD so much that no value is
# an outlier. Therefore a value below a quarter of the median is always an outlier.
_ALWAYS_SLOW = 0.25
# Two values have no majority, so a value is reported only if it is below half of the other value.
_SLOW_OF_TWO = 0.5
# An outlier below half of the median speed is a failure. Any other outlier is a warning, because
# other load on the machine may have caused it.
_BROKEN = 0.5
# The speed of one TCP stream also depends on the CPUs of both hosts, so a difference of up to 20 %
# is not attributed to the link.
_MIN_LINK_DIFFERENCE = 0.2


def slow_outliers(values: Mapping[str, float], min_difference: float = MIN_DIFFERENCE) -> list[str]:
    """Return the names of values that are too low compared with the others, lowest value first.

    Deviations are computed from logarithms, because speeds differ by factors. Therefore a link with
    1 % of the usual speed is found even if the speeds of healthy links differ by 50 %.
    """
    if len(values) <= 2:
        best = max(values.values(), default=0)
        return [name for name, value in values.items() if value < _SLOW_OF_TWO * best]
    logs = {name: math.log(max(value, 1e-9)) for name, value in values.items()}
    middle = median(logs.values())
    mad = median(abs(log - middle) for log in logs.values())
    threshold = max(
        -math.log(1 - min_difference),
        min(_Z_SCORE * mad / _MAD_OF_NORMAL, -math.log(_ALWAYS_SLOW)),
    )
    slow = [name for name, log in logs.items() if middle - log > threshold]
    return sorted(slow, key=lambda name: values[name])


def slow_links(
    rates: Sequence[MeasuredRate], host_of_rank: Mapping[str, int]
) -> tuple[list[int], list[str]]:
    """Return (hosts whose links are all slow, slow links between the other hosts).

    Hosts are compared before links, because the links of one slow host may be the majority of all
    links. The comparison uses the best outgoing link and the best incoming link of each host. If
    only one link of a host is slow, the best links of the host are fast, so the link is reported
    instead of the host.
    """
    hosts_of = {
        rate.name: [host_of_rank[rank] for rank in rate.name.split("-")]
        for rate in rates
        if rate.kind == "network"
    }
    slow_hosts: set[int] = set()
    if len({host for pair in hosts_of.values() for host in pair}) >= 3:
        for end in (0, 1):
            best: dict[str, float] = {}
            for rate in rates:
                if rate.kind == "network":
                    host = str(hosts_of[rate.name][end])
                    best[host] = max(best.get(host, 0.0), rate.value)
            slow_hosts |= {int(host) for host in slow_outliers(best, _MIN_LINK_DIFFERENCE)}
    rest = [rate for rate in rates if not slow_hosts & set(hosts_of.get(rate.name, ()))]
    slow = [
        name
        for same in _by_kind(rest).values()
        for name in slow_outliers({rate.name: rate.value for rate in same}, _MIN_LINK_DIFFERENCE)
    ]
    return sorted(slow_hosts), slow


def _by_kind(rates: Sequence[MeasuredRate]) -> dict[str, list[MeasuredRate]]:
    kinds: dict[str, list[MeasuredRate]] = {}
    for rate in rates:
        kinds.setdefault(rate.kind, []).append(rate)
    return kinds


def _slow_finding(
    scope: str, value: float, usual: float, observed: str, expected: str, host: str = ""
) -> Finding:
    """Return a finding about a slow device or link.

    The finding is a failure if `value` is below half of `usual`. Otherwise, it is a warning.
    """
    return (fail if value < _BROKEN * usual else warn)(scope, observed, expected, host=host)


def _compare_rates(
    cluster: Cluster, rates: Sequence[MeasuredRate], unit: str, scale: float
) -> Findings:
    hosts = [machine.host for machine in cluster.machines]
    for rate in rates:
        if rate.error:
            observed = f"not measured: {rate.error}"
            yield fail(rate.name, observed, "a measured rate", host=hosts[rate.host])
    for kind, same in _by_kind([rate for rate in rates if not rate.error]).items():
        values = {rate.name: rate.value for rate in same}
        usual = median(values.values())
        slow = slow_outliers(values)
        for rate in same:
            host = hosts[rate.host]
            if not rate.reproducible:
                observed = f"repeating the same computation gave different results ({kind})"
                cure = "replace the device"
                yield fail(rate.name, observed, "the same bits every time", cure=cure, host=host)
            elif rate.name in slow:
                observed = f"{rate.value / scale:.3g} {unit} ({kind})"
                expected = f"about {usual / scale:.3g} {unit}, the median of {len(same)}"
                yield _slow_finding(rate.name, rate.value, usual, observed, expected, host)
        low, high = min(values.values()) / scale, max(values.values()) / scale
        span = f"{low:.3g}" if len(same) == 1 else f"{low:.3g} to {high:.3g}"
        yield passed(f"{span} {unit} ({kind}, {len(same)} measured)", "world")


@cluster_check("active.compute")
def compute_rate(cluster: Cluster) -> Findings:
    rates = cluster.probes.require("compute", cluster.probes.compute)
    yield from _compare_rates(cluster, rates, "TFLOP/s", 1e12)


@cluster_check("active.memory")
def memory_rate(cluster: Cluster) -> Findings:
    rates = cluster.probes.require("bandwidth", cluster.probes.bandwidth)
    yield from _compare_rates(cluster, rates, "GB/s", 1e9)


@cluster_check("active.links")
def link_rates(cluster: Cluster) -> Findings:
    rates = cluster.probes.require("links", cluster.probes.links)
    if not rates:
        raise Skip("one rank: no links")
    host_of = {str(rank.rank): rank.host for rank in cluster.ranks}
    slow_hosts, slow = slow_links(rates, host_of)
    reported = set()
    for host in slow_hosts:
        network = [rate for rate in rates if rate.kind == "network"]
        host_rates = [rate for rate in network if host in map(host_of.get, rate.name.split("-"))]
        others = [rate.value for rate in network if rate not in host_rates]
        low = min(rate.value for rate in host_rates)
        usual = median(others or [rate.value for rate in host_rates])
        reported |= {frozenset(rate.name.split("-")) for rate in host_rates}
        observed = f"every link of this host is slow, down to {format_rate(low)}"
        expected = f"about {format_rate(usual)}, as between other hosts"
        yield _slow_finding("machine", low, usual, observed, expected, cluster.machines[host].host)
    # Report outliers first, then links that are slow relative to the speed of their interfaces.
    for rate in sorted(rates, key=lambda rate: (rate.name not in slow, rate.value)):
        src, dst = rate.name.split("-")
        pair = frozenset((src, dst))
        min_rate = (
            _min_acceptable_rate(cluster, host_of[src], host_of[dst])
            if rate.kind == "network"
            else 0.0
        )
        is_outlier = rate.name in slow
        if pair in reported or not (is_outlier or rate.value < min_rate):
            continue
        reported.add(pair)  # report a slow link only once, not for each direction
        scope = f"link:{'-'.join(sorted(pair, key=int))}"
        one, other = (cluster.machines[host_of[rank]].host for rank in (src, dst))
        hosts = f"{one} to {other}" if one != other else f"inside {one}"
        observed = f"rank {src} to rank {dst} ({hosts}): {format_rate(rate.value)}"
        if is_outlier:
            usual = median(same.value for same in rates if same.kind == rate.kind)
            yield _slow_finding(scope, rate.value, usual, observed, f"about {format_rate(usual)}")
        else:
            expected = f"at least {format_rate(min_rate)}, a tenth of the interface's speed"
            yield fail(scope, observed, expected)
    for kind, same in _by_kind(rates).items():
        values = [rate.value for rate in same]
        span = f"{format_rate(min(values))} to {format_rate(max(values))}"
        yield passed(f"{span} over {kind}, {len(same)} measured", "world")


def _min_acceptable_rate(cluster: Cluster, src: int, dst: int) -> float:
    """Return the lowest acceptable rate between two hosts in bytes per second.

    The rate is a tenth of the speed of the slower interface, because no protocol has an overhead of
    90 %. It is at most 100 MB/s, because even a slow CPU can send 100 MB/s over one TCP stream. It
    is 0 if the speed of an interface is unknown.
    """
    speeds = []
    for machine in (cluster.machines[src], cluster.machines[dst]):
        name = settings(machine).get("GLOO_SOCKET_IFNAME")
        selected = selected_nics("GLOO_SOCKET_IFNAME", name or "", machine.nics)
        nics = selected if name else external_nics(machine)
        speeds.append(min((nic.speed_mbps for nic in nics if nic.speed_mbps), default=0) * 1e6 / 8)
    return min(*speeds, 1e9) / 10


@cluster_check("active.p2p")
def gpu_copies(cluster: Cluster) -> Findings:
    copies_of_hosts = cluster.probes.require("copies", cluster.probes.copies)
    if not any(copies_of_hosts):
        raise Skip("no host with two GPUs")
    for machine, copies in zip(cluster.machines, copies_of_hosts, strict=True):
        speeds = {}
        for copy in copies or ():
            scope = f"pair:{copy.src}-{copy.dst}"
            if copy.status != "ok":
                default = (copy.message, "see nvidia-smi topo -p2p r and the kernel log (dmesg)")
                observed, cure = KNOWN_ERRORS["gpu_copy"].get(copy.status, default)
                yield fail(scope, observed, cure=cure, host=machine.host)
            elif copy.gbs is not None:
                speeds[scope] = copy.gbs
        for scope in slow_outliers(speeds):
            usual, speed = median(speeds.values()), speeds[scope]
            observed, expected = f"{speed:.3g} GB/s", f"about {usual:.3g} GB/s"
            yield _slow_finding(scope, speed, usual, observed, expected, machine.host)


@cluster_check("active.collective")
def all_reduce_result(cluster: Cluster) -> Findings:
    results = cluster.probes.require("all_reduce", cluster.probes.all_reduce)
    for rank, error in enumerate(results):
        if error:
            yield fail(f"rank:{rank}", error)
    yield passed(f"all_reduce over {len(results)} ranks is exact", "world")
