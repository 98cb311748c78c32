"""Checks nccl.*: whether NCCL starts, and whether it uses the links that `tutti topo` shows.

NCCL writes its topology (NCCL_TOPO_DUMP_FILE) and its rings and trees (NCCL_GRAPH_DUMP_FILE) to XML
files, and the transport of each connection to its log. probe_nccl.py starts NCCL and reads these
files.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, TypeVar
from xml.etree import ElementTree

from tutti.machine.checks.cluster import KNOWN_ERRORS, STOPPED, Cluster, NcclRank, Skip
from tutti.machine.checks.finding import (
    Finding,
    Findings,
    cluster_check,
    fail,
    host_check,
    passed,
    warn,
)
from tutti.machine.checks.nccl_environment import settings, shares_gpus
from tutti.machine.device_topology import Link, Topology
from tutti.machine.recording import Machine

Dump = TypeVar("Dump")

# --- NCCL's log ----------------------------------------------------------------------------------

_WARNING = re.compile(r"NCCL WARN (.*)")
# Example: `Channel 02/0 : 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA`. The number in brackets is the
# NVML index of the rank's GPU.
_CONNECTION = re.compile(
    r"Channel \d+(?:/\d+)? : (\d+)\[(\d+)\] -> (\d+)\[(\d+)\] (?:\[(?:send|receive)\] )?via (\S+)"
)


def select_lines(log: str) -> list[str]:
    """Return the warnings and the connections in NCCL's log, in a short format.

    A warning has the format `WARN text`. A connection has the format `0[0] 1[1] P2P/CUMEM`: source
    rank and its GPU, destination rank and its GPU, transport. NCCL logs a connection once per
    channel, but equal lines are returned only once.
    """
    found = dict[str, None]()
    for line in log.splitlines():
        if match := _WARNING.search(line):
            found[f"WARN {match[1].strip()}"] = None
        elif match := _CONNECTION.search(line):
            src, src_gpu, dst, dst_gpu, transport = match.groups()
            found[f"{src}[{src_gpu}] {dst}[{dst_gpu}] {transport}"] = None
    return list(found)


@dataclass(frozen=True)
class NcclConnection:
    """The transports between two ranks, for both directions and all channels."""

    ranks: tuple[int, int]
    gpus: tuple[int, int]
    transports: frozenset[str]
    """Examples: P2P/CUMEM, P2P/CUMEM/read, SHM/direct/direct, NET/Socket/0, NET/IB/3/GDRDMA."""

    @property
    def slowest(self) -> str:
        """The slowest transport. NET is slower than SHM, and SHM is slower than P2P."""
        return max(
            sorted(self.transports),
            key=lambda each: (each.startswith("NET"), each.startswith("SHM"), "GDRDMA" not in each),
        )


def parse_connections(lines: Sequence[str]) -> list[NcclConnection]:
    """Return the connections in lines from select_lines(), ordered by rank."""
    transports: dict[tuple[int, int], set[str]] = {}
    gpu_of: dict[int, int] = {}
    for line in lines:
        if match := re.fullmatch(r"(\d+)\[(\d+)\] (\d+)\[(\d+)\] (\S+)", line):
            src, src_gpu, dst, dst_gpu = map(int, match.groups()[:4])
            gpu_of |= {src: src_gpu, dst: dst_gpu}
            transports.setdefault((min(src, dst), max(src, dst)), set()).add(match[5])
    return [
        NcclConnection((a, b), (gpu_of[a], gpu_of[b]), frozenset(found))
        for (a, b), found in sorted(transports.items())
    ]


# --- NCCL's topology file ------------------------------------------------------------------------


@dataclass(frozen=True)
class NcclGpu:
    """A GPU in NCCL's topology."""

    rank: int | None
    pci_address: str
    path: tuple[str, ...]
    """The PCIe path: the CPU (NUMA node), the upstream port of each PCIe switch, and the GPU."""
    nvlinks: Mapping[str, int]
    """{PCI address of another GPU: number of NVLinks to it}. The key "" is for all NVSwitches."""
    gpu_direct: bool


@dataclass(frozen=True)
class NcclNet:
    """A port of a NIC in NCCL's topology."""

    name: str
    gbps: float
    gpu_direct: bool
    """Whether the NIC can access GPU memory (GPUDirect RDMA)."""


_NVSWITCH_CLASS = "0x068"


def parse_topology(text: str) -> tuple[list[NcclGpu], list[NcclNet]]:
    """Return the GPUs and NICs in a topology file. Raises ValueError if the text is invalid."""
    gpus: list[NcclGpu] = []
    nets: list[NcclNet] = []

    def visit(element: ElementTree.Element, path: tuple[str, ...]) -> None:
        read = element.attrib.get
        if element.tag == "cpu":
            path = (f"CPU {read('host_hash', '')} {read('numaid', '?')}",)
        elif element.tag == "pci":
            path = (*path, read("busid", "").lower())
        elif element.tag == "gpu":
            links = Counter[str]()
            for link in element.iter("nvlink"):
                is_switch = link.get("tclass", "").startswith(_NVSWITCH_CLASS)
                target = "" if is_switch else link.get("target", "").lower()
                links[target] += int(link.get("count", "0"))
            rank = int(read("rank", "-1"))
            direct = read("gdr") == "1"
            gpus.append(NcclGpu(None if rank < 0 else rank, path[-1], path, links, direct))
        elif element.tag == "net":
            speed = float(read("speed", "0")) / 1000
            nets.append(NcclNet(read("name", "?"), speed, read("gdr") == "1"))
        for child in element:
            visit(child, path)

    visit(_parse_xml(text, "system"), ("",))
    return gpus, nets


def _parse_xml(text: str, root: str) -> ElementTree.Element:
    try:
        element = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"not XML: {error}") from None
    if element.tag != root:
        raise ValueError(f"the root element is <{element.tag}>, not <{root}>")
    return element


def nvlinks_between(a: NcclGpu, b: NcclGpu) -> int:
    """Return the number of NVLinks between two GPUs in NCCL's topology."""
    direct = a.nvlinks.get(b.pci_address, 0)
    return direct or min(a.nvlinks.get("", 0), b.nvlinks.get("", 0))


# {class of a PCIe path in nvidia-smi: component in NCCL's topology that the path goes through}. In
# NCCL's topology, PHB and NODE are both paths through one CPU.
_PATH_THROUGH = {
    "PIX": "a PCIe switch",
    "PXB": "a PCIe switch",
    "PHB": "one CPU",
    "NODE": "one CPU",
    "SYS": "two CPUs",
}


def path_through(a: NcclGpu, b: NcclGpu) -> str:
    """Return what the PCIe path between two GPUs goes through, as a value of _PATH_THROUGH."""
    if a.path[0] != b.path[0]:
        return "two CPUs"
    return "a PCIe switch" if a.path[1:2] == b.path[1:2] else "one CPU"


# --- NCCL's graph file ---------------------------------------------------------------------------

_GRAPHS = {0: "ring", 1: "tree", 2: "CollNet chain", 3: "NVLS", 4: "CollNet direct"}
_FAST_LINKS = ("LOC", "NVL", "NVB", "C2C")


@dataclass(frozen=True)
class NcclGraph:
    """The channels of one NCCL algorithm, such as ring or tree."""

    name: str
    channels: int
    intra_gbs: float
    """The bandwidth of one channel inside a host in GB/s."""
    inter_gbs: float
    """The bandwidth of one channel between hosts in GB/s."""
    intra_type: str
    """The slowest link inside the host: "NVL", "PIX", "PXB", "PHB" or "SYS". "LOC" means that there
    is only one GPU."""
    inter_type: str
    gpus: frozenset[int]

    def __str__(self) -> str:
        if self.intra_type == "LOC":
            return f"{self.name} {self.channels} channels"
        total = self.channels * self.intra_gbs
        each = f"{self.channels} channels × {self.intra_gbs:g} GB/s"
        return f"{self.name} {each} = {total:g} GB/s ({self.intra_type})"


def parse_graphs(text: str) -> list[NcclGraph]:
    """Return the graphs in a graph file. Raises ValueError if the text is invalid."""
    return [
        NcclGraph(
            _GRAPHS.get(int(graph.get("id", "-1")), f"graph {graph.get('id')}"),
            int(graph.get("nchannels", "0")),
            float(graph.get("speedintra", "0")),
            float(graph.get("speedinter", "0")),
            graph.get("typeintra", "?"),
            graph.get("typeinter", "?"),
            frozenset(int(gpu.get("dev", "-1")) for gpu in graph.iter("gpu")),
        )
        for graph in _parse_xml(text, "graphs").iter("graph")
    ]


# --- checks --------------------------------------------------------------------------------------

_STAGES = {
    "process": "starting the process",
    "init": "creating the communicator",
    "all_reduce": "the first all_reduce",
    "all_to_all": "the first all_to_all",
    "destroy": "destroying the communicator",
}


def _results(cluster: Cluster) -> tuple[NcclRank, ...]:
    return cluster.probes.require("nccl", cluster.probes.nccl)


def _warnings(result: NcclRank) -> list[str]:
    return [line.removeprefix("WARN ") for line in result.log if line.startswith("WARN ")]


def cure_of(*messages: str) -> str:
    """Return the cure of the first message that matches a pattern in known_errors.toml, or ""."""
    known = KNOWN_ERRORS["nccl_warning"].items()
    cures = (cure for text in messages for pattern, cure in known if re.search(pattern, text))
    return next(cures, "")


@cluster_check("nccl.start")
def nccl_starts(cluster: Cluster) -> Findings:
    results = _results(cluster)
    failed = [result for result in results if result.error]
    # Yield one finding for all ranks that failed for the same reason, and no finding for ranks that
    # were stopped because another rank failed.
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for result in [each for each in failed if each.error != STOPPED] or failed:
        warnings = _warnings(result)
        problem = warnings[0] if warnings else result.error
        observed = f"{_STAGES[result.stage]}: {problem}"
        if warnings and result.error.startswith("no progress"):
            observed += f" ({result.error})"
        key = (observed, cure_of(*warnings, result.error))
        ranks_of.setdefault(key, []).append(result.rank)
    for (observed, cure), ranks in ranks_of.items():
        more = f" (also on {len(ranks) - 1} more ranks)" if len(ranks) > 1 else ""
        host = cluster.machines[results[ranks[0]].host].host
        yield fail(f"rank:{ranks[0]}", observed + more, cure=cure, host=host)
    if not failed:
        for text in dict.fromkeys(text for result in results for text in _warnings(result)):
            expected = "a start without warnings"
            yield warn("world", f"NCCL started, but warned: {text}", expected, cure=cure_of(text))
        slowest = max((result.init_s or 0.0) for result in results)
        ranks_text = f"{len(results)} rank{'s' * (len(results) > 1)}"
        yield passed(f"{ranks_text} started in {slowest:.1f} s; the sum is exact", "world")


def _finished(cluster: Cluster) -> tuple[NcclRank, ...]:
    """Return the results of all ranks. Raises Skip if NCCL did not start."""
    results = _results(cluster)
    if any(result.stage in ("process", "init") for result in results):
        raise Skip("NCCL did not start: see nccl.start")
    return results


@cluster_check("nccl.transport")
def transports(cluster: Cluster) -> Findings:
    results = _finished(cluster)
    if len(results) == 1:
        raise Skip("one rank: no connections")
    found = parse_connections([line for result in results for line in result.log])
    if not found:
        raise Skip("NCCL's log has no lines about connections")
    topologies = [Topology(machine) for machine in cluster.machines]
    problems = []
    for connection in found:
        hosts = [results[rank].host for rank in connection.ranks]
        if hosts[0] == hosts[1]:
            problems.append(_problem_inside_host(connection, topologies[hosts[0]]))
        else:
            machines = [cluster.machines[host] for host in hosts]
            problems.append(_problem_between_hosts(connection, machines))
    yield from _merge(problems)
    # Count NET/IB/0, NET/IB/1, … together, because they are one transport through different NICs.
    names = Counter(
        re.sub(r"/\d+(\(\d+\))?", "", "+".join(sorted(connection.transports)))
        for connection in found
    )
    counts = ", ".join(f"{count} × {name}" for name, count in names.most_common())
    yield passed(f"pairs of ranks: {counts}", "world")


def _merge(problems: Iterable[Finding | None]) -> Findings:
    """Merge findings that differ only in the pair of ranks or GPUs. Entries of None are ignored."""
    pairs_of: dict[Finding, list[str]] = {}
    for problem in problems:
        if problem is not None:
            pairs_of.setdefault(replace(problem, scope=""), []).append(problem.scope)
    for problem, pairs in pairs_of.items():
        observed = problem.observed
        if len(pairs) > 1:
            others = ", ".join(pairs[1:4]) + ", …" * (len(pairs) > 4)
            observed += f" ({len(pairs)} pairs: also {others})"
        yield replace(problem, scope=pairs[0], observed=observed)


def _variables_set(machine: Machine, *names: str) -> str:
    """Return the names of those variables in `names` that are set, joined by "and"."""
    return " and ".join(name for name in names if name in settings(machine))


def _problem_inside_host(connection: NcclConnection, topology: Topology) -> Finding | None:
    machine, transport = topology.machine, connection.slowest
    scope = "pair:{}-{}".format(*connection.gpus)
    devices = {f"GPU{gpu}" for gpu in connection.gpus}
    link = next((link for link in topology.links if {link.a, link.b} == devices), None)
    if link is None or transport.startswith("P2P") or shares_gpus(settings(machine)):
        return None
    if _has_peer_access(link, topology):
        variables = _variables_set(machine, "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
        cure = f"unset {variables}" if variables else ""
        observed = f"NCCL uses {transport}, although the GPUs are connected by {link.link_class}"
        status = fail if link.nvlinks else warn
        return status(scope, observed, "P2P", cure=cure, host=machine.host)
    if transport.startswith("NET"):
        variables = _variables_set(machine, "NCCL_SHM_DISABLE", "NCCL_HOSTID")
        cure = f"unset {variables}" if variables else "give all ranks one /dev/shm (--ipc=host)"
        observed = f"NCCL uses the network ({transport}) between two GPUs of one host"
        return warn(scope, observed, "P2P or SHM", cure=cure, host=machine.host)
    return None


def _has_peer_access(link: Link, topology: Topology) -> bool:
    """Return whether NCCL should use P2P between two GPUs.

    NCCL should use P2P if NVLinks connect the GPUs, or if PCIe switches connect the GPUs and the
    driver allows peer access.
    """
    if link.nvlinks:
        return True
    if link.link_class not in ("PIX", "PXB"):
        return False
    access = [
        p for p in topology.machine.peers if {f"GPU{p.src}", f"GPU{p.dst}"} == {link.a, link.b}
    ]
    return bool(access) and all(p.read == p.write == "OK" for p in access)


def _problem_between_hosts(
    connection: NcclConnection, machines: Sequence[Machine]
) -> Finding | None:
    scope = "link:{}-{}".format(*connection.ranks)
    transport = connection.slowest
    # The transport between hosts is P2P if NVLink connects the hosts (MNNVL).
    if not all(machine.has_rdma for machine in machines) or transport.startswith("P2P"):
        return None
    if "/Socket/" in transport:
        variables = _variables_set(machines[0], "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_HCA")
        cure = f"unset {variables}" if variables else "see rdma.state, rdma.hca and limits.memlock"
        observed = "NCCL uses TCP, although both hosts have active RDMA ports"
        return fail(scope, observed, "NET/IB", cure=cure)
    if "/GDRDMA" not in transport and transport.startswith("NET/IB"):
        observed = "NCCL uses RDMA without GPUDirect: data is copied through host memory"
        return warn(scope, observed, "NET/IB/…/GDRDMA", cure="see rdma.gpu_direct")
    return None


def _read_dump(cluster: Cluster, host: int, name: str, parse: Callable[[str], Dump]) -> Dump:
    """Parse the dump file of the first rank of a host.

    Raises Skip if the file is missing or invalid.
    """
    texts = [getattr(each, name) for each in _finished(cluster) if each.host == host]
    text = next(filter(None, texts), "")
    if not text:
        raise Skip(f"NCCL wrote no {name} file")
    try:
        return parse(text)
    except ValueError as error:
        raise Skip(f"NCCL's {name} file cannot be read: {error}") from None


@host_check("nccl.topology")
def links_agree(cluster: Cluster, host: int) -> Findings:
    gpus, nets = _read_dump(cluster, host, "topology", parse_topology)
    machine = cluster.machines[host]
    topology = Topology(machine)
    own_ranks = {result.rank for result in _results(cluster) if result.host == host}
    index_of = {gpu.pci_address or "": gpu.index for gpu in machine.accelerators}
    used: dict[int, NcclGpu] = {}
    for gpu in gpus:
        if gpu.rank is not None and gpu.rank not in own_ranks:
            continue  # NCCL's topology contains several hosts if NVLink connects the hosts
        if gpu.pci_address in index_of:
            used[index_of[gpu.pci_address]] = gpu
        else:
            observed = f"NCCL uses a GPU at {gpu.pci_address}, which tutti topo does not show"
            yield warn("machine", observed, f"one of {', '.join(sorted(index_of))}")
    problems: list[Finding] = []
    for a, b in combinations(sorted(used), 2):
        link = next(each for each in topology.links if (each.a, each.b) == (f"GPU{a}", f"GPU{b}"))
        problems += _compare_link(machine, link, used[a], used[b])
    yield from _merge(problems)
    if nets:
        yield from _compare_nics(machine, nets)
    direct = sum(net.gpu_direct for net in nets)
    pairs = len(used) * (len(used) - 1) // 2
    names = ", ".join(net.name for net in nets) or "no NIC"
    yield passed(
        f"NVLinks and PCIe paths of {len(used)} GPUs ({pairs} pairs) agree with tutti topo; "
        f"NCCL uses {names}, {direct} with GPUDirect RDMA"
    )


def _compare_link(machine: Machine, link: Link, a: NcclGpu, b: NcclGpu) -> Iterator[Finding]:
    scope = f"pair:{link.a[3:]}-{link.b[3:]}"
    found = nvlinks_between(a, b)
    if found != link.nvlinks:
        observed = f"NCCL's topology has {found} NVLinks"
        expected = f"{link.nvlinks} NVLinks, as tutti topo shows"
        yield (fail if found < link.nvlinks else warn)(scope, observed, expected)
    # The paths cannot be compared if NCCL_TOPO_FILE replaces the PCIe paths in /sys, or if a
    # virtual machine hides them.
    if machine.is_virtual or "NCCL_TOPO_FILE" in settings(machine):
        return
    expected_path = _PATH_THROUGH.get(link.pci_class)
    if expected_path and path_through(a, b) != expected_path:
        observed = f"the PCIe path in NCCL's topology goes through {path_through(a, b)}"
        yield warn(scope, observed, f"through {expected_path} ({link.pci_class} in tutti topo)")


def _compare_nics(machine: Machine, nets: Sequence[NcclNet]) -> Iterator[Finding]:
    """Compare the NICs that NCCL uses with the active RDMA ports."""
    active = {port.device: port for port in machine.rdma if port.state == "ACTIVE"}
    # NCCL combines the ports of one card and joins their names, as in mlx5_0+mlx5_1.
    nets_of = {name: net for net in nets for name in net.name.split("+")}
    missing = sorted(set(active) - set(nets_of))
    selected = _variables_set(
        machine, "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN"
    )
    if missing and not selected:
        observed = f"NCCL uses {', '.join(sorted(nets_of))}, but not {', '.join(missing)}"
        cure = "see rdma.state, rdma.gid and limits.memlock; in a container pass /dev/infiniband"
        yield warn(f"nic:{missing[0]}", observed, "all active RDMA ports", cure=cure)
    for name, net in nets_of.items():
        port = active.get(name)
        if port is None:
            continue
        rate = port.rate_gbps
        if rate and "+" not in net.name and abs(net.gbps - rate) > 0.05 * rate:
            observed = f"NCCL's topology has {net.gbps:g} Gbit/s"
            yield warn(f"nic:{name}", observed, f"{rate:g} Gbit/s, as tutti topo shows")
    without = [name for name, net in nets_of.items() if name in active and not net.gpu_direct]
    if without:
        observed = f"NCCL uses {', '.join(without)} without GPUDirect RDMA"
        cure = "load nvidia_peermem or use the open kernel modules (see rdma.gpu_direct)"
        yield warn(f"nic:{without[0]}", observed, "GPUDirect RDMA", cure=cure)


@host_check("nccl.channels")
def channels(cluster: Cluster, host: int) -> Findings:
    graphs = _read_dump(cluster, host, "graphs", parse_graphs)
    topology = Topology(cluster.machines[host])
    nvlinks = {(link.a, link.b): link.nvlinks for link in topology.links}
    for graph in graphs[:2]:  # the rings and the trees; other graphs may be empty
        pairs = [(f"GPU{a}", f"GPU{b}") for a, b in combinations(sorted(graph.gpus), 2)]
        if not graph.channels:
            yield fail("machine", f"{graph.name}: no channel", "at least one channel")
        elif pairs and all(map(nvlinks.get, pairs)) and graph.intra_type not in _FAST_LINKS:
            yield fail("machine", str(graph), "NVL: tutti topo shows NVLinks between all GPUs")
    yield passed("; ".join(str(graph) for graph in graphs if graph.channels))


def describe(cluster: Cluster) -> dict[str, Any] | None:
    """Return the result of the NCCL probe for --json, or None if NCCL was not started."""
    results = cluster.probes.nccl
    if results is None:
        return None
    graphs = []
    for result in results:
        with suppress(ValueError):
            graphs += [
                {"host": cluster.machines[result.host].host, **asdict(graph), "gpus": [*graph.gpus]}
                for graph in (parse_graphs(result.graphs) if result.graphs else ())
            ]
    return {
        "ranks": [
            {"rank": each.rank, "stage": each.stage, "error": each.error, "init_s": each.init_s}
            for each in results
        ],
        "connections": [
            {**asdict(each), "transports": sorted(each.transports)}
            for each in parse_connections([line for result in results for line in result.log])
        ],
        "graphs": graphs,
    }
