"""Which links are slow: location of ranks, class of each pair, verdicts, and likely causes.

Pairs are compared within a class (same core, NVLink, other host, …) and with the catalogue. The
reference of a class is the median over ends of the best speed of each end, where an end is a rank
or a host, sending or receiving. One bad end can make half of all pairs slow, so the median over
pairs would not do. The best pass of a pair counts: a link that was fast once is not broken, and
other load on the machine is not its fault. If all pairs of one end are slow, the finding names the
end, not the pairs.
"""

import contextlib
import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, median_high, median_low
from typing import Any

import torch

from tutti.machine.cpu_numa import numa_nodes, parse_cpu_list
from tutti.machine.gpus import numa_node_of_gpu
from tutti.machine.hardware_catalogue import Figure
from tutti.machine.observation import observe
from tutti.measure.spread import round_significant
from tutti.world.world import World

Row = dict[str, Any]
Flow = tuple[int, int]
RankLocation = dict[str, Any]

VERDICTS = ("unknown", "good", "degraded", "bad")  # in ascending severity
# Below these fractions of its reference, a figure is degraded or bad.
DEGRADED, BAD = 0.8, 0.5
_SLOW = ("degraded", "bad")
# Differences within this many σ (1.4826 × MAD) over ends and passes are noise.
_SIGMAS = 3

_CPUS = Path("/sys/devices/system/cpu")
_NETWORK = Path("/sys/class/net")


# ---- Location of ranks, and the class of a pair ----


def locate_rank(world: World, cpus: str) -> RankLocation:
    """Where this rank runs, for JSON; `cpus` are those that it is pinned to."""
    mine = parse_cpu_list(cpus)
    nodes = [node for node, members in numa_nodes().items() if set(mine) & set(members)]
    return {
        "rank": world.rank,
        "host": world.host,
        # Another network namespace counts as another host: it has its own network.
        "machine": f"{world.host}/{os.readlink('/proc/self/ns/net')}",
        "device": str(world.device),
        "cpus": cpus,
        "cores": sorted({_core(cpu) for cpu in mine}),
        "numa": nodes,
        "gpu": _describe_gpu(world.device) if world.device.type == "cuda" else None,
        "interface": _describe_interface() if world.nodes > 1 else None,
    }


def pair_class(a: RankLocation, b: RankLocation) -> str:
    """What connects two ranks."""
    if a["machine"] != b["machine"]:
        return "other host"
    if a["gpu"] and b["gpu"]:
        return _gpu_pair_class(a["gpu"], b["gpu"])
    if set(a["cores"]) & set(b["cores"]):
        return "same core"
    if len(a["numa"]) == 1 and len(b["numa"]) == 1:
        return "same NUMA node" if a["numa"] == b["numa"] else "other NUMA node"
    return "same host"


def _gpu_pair_class(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    if a["uuid"] == b["uuid"]:
        return "same GPU"
    if b["pci"] in a["nvlinks_to"] or a["pci"] in b["nvlinks_to"]:
        return "NVLink"
    if a["nvlinks_to_switch"] and b["nvlinks_to_switch"]:
        return "NVSwitch"
    crosses_numa = None not in (a["numa"], b["numa"]) and a["numa"] != b["numa"]
    return "NUMA" if crosses_numa else "PCIe"


def _core(cpu: int) -> str:
    """An identifier of the physical core: the list of its hardware threads."""
    with contextlib.suppress(OSError):
        return (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    return str(cpu)


def _describe_gpu(device: torch.device) -> dict[str, Any]:
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the PCI fields
    pci = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
    pci += f"{properties.pci_device_id:02x}.0"
    # Without NVML, links and PCIe width are unknown.
    known = next((each for each in observe().accelerators if each.pci_address == pci), None)
    links = [link for link in (known and known.nvlinks) or () if link.active]
    pcie = known.pcie if known is not None else None
    return {
        "name": torch.cuda.get_device_name(device),
        "uuid": str(properties.uuid),
        "pci": pci,
        "numa": known.numa_node if known is not None else numa_node_of_gpu(pci),
        "pcie_width": pcie.width if pcie is not None else None,
        "pcie_width_most": pcie.max_width if pcie is not None else None,
        "nvlinks_to": [link.peer_pci for link in links if link.peer_kind == "gpu"],
        "nvlinks_to_switch": sum(link.peer_kind == "switch" for link in links),
    }


def _describe_interface() -> dict[str, Any] | None:
    """The network interface of messages to other hosts, with what limits its speed."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not name or not (_NETWORK / name).is_dir():
        return None
    return {
        "name": name,
        "mbits": _read_number(_NETWORK / name / "speed"),
        "mtu": _read_number(_NETWORK / name / "mtu"),
        "shaper": _traffic_shaper(name),
    }


def _read_number(file: Path) -> int | None:
    try:
        value = int(file.read_text())
    except (OSError, ValueError):
        return None
    return value if value > 0 else None


def _traffic_shaper(interface: str) -> str | None:
    """The rate limit that `tc` sets on this interface, or None."""
    tool = shutil.which("tc")
    if tool is None:
        return None
    command = [tool, "-j", "qdisc", "show", "dev", interface]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        rules = json.loads(done.stdout or "[]")
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
        return None
    for rule in rules:
        rate = rule.get("options", {}).get("rate")
        rate = rate.get("rate") if isinstance(rate, dict) else rate  # netem nests it
        if rate:
            return f"{rule['kind']}, {int(rate) * 8 / 1e6:g} Mbit/s"
    return None


# ---- Verdicts ----


@dataclass(frozen=True)
class Finding:
    """A slow link, rank or class of pairs, with likely causes."""

    what: str
    verdict: str
    gbs: float  # median of its pairs
    against_gbs: float
    against: str
    pairs: tuple[Flow, ...]
    causes: tuple[str, ...]

    def row(self) -> Row:
        """For JSON."""
        return asdict(self)


def worst(verdicts: Iterable[str]) -> str:
    """The most severe verdict."""
    return max(verdicts, key=VERDICTS.index, default="unknown")


def fraction_verdict(value: float, reference: float) -> str:
    """The verdict on a figure with this reference."""
    if value >= DEGRADED * reference:
        return "good"
    return "degraded" if value >= BAD * reference else "bad"


def judge_pairs(
    rows: Sequence[Row],
    locations: Sequence[RankLocation],
    published: Callable[[Row], Figure | None],
) -> list[Finding]:
    """Set `verdict` and `causes` of each row; returns the findings.

    Rows have src, dst, class, bytes, gbs_uni and gbs_bi with their best passes. `published` returns
    the catalogue's figure for a row.
    """
    findings = []
    for key in dict.fromkeys((row["class"], row["bytes"]) for row in rows):
        members = [row for row in rows if (row["class"], row["bytes"]) == key]
        findings += _judge_class(members, locations, published)
    return findings


def _judge_class(
    rows: list[Row],
    locations: Sequence[RankLocation],
    published: Callable[[Row], Figure | None],
) -> list[Finding]:
    name = rows[0]["class"]
    between_hosts = name == "other host"
    end_of = (lambda rank: locations[rank]["machine"]) if between_hosts else _same_rank
    reference, minimum = _class_reference(rows, "gbs_uni_best", end_of)
    below_catalogue = 0
    for row in rows:
        best = row["gbs_uni_best"]
        row["verdict"], row["causes"] = _class_verdict(best, reference, minimum), []
        if (figure := published(row)) is not None and best is not None:
            row["verdict"] = worst([row["verdict"], fraction_verdict(best, figure.gbs)])
            below_catalogue += best < DEGRADED * figure.gbs
    _judge_both_ways(rows, *_class_reference(rows, "gbs_bi_best", end_of))
    slow = [row for row in rows if row["verdict"] in _SLOW]
    if not slow and len({frozenset((row["src"], row["dst"])) for row in rows}) < 2:
        for row in rows:  # a class of one pair has no reference but the catalogue
            row["verdict"] = "unknown" if published(row) is None else row["verdict"]
    if slow and below_catalogue == len(rows) and (figure := published(rows[0])) is not None:
        what = f"all pairs of the class {name}"
        against = f"the catalogue: {figure.source}"
        causes = likely_causes(name, [], locations)
        return [_finding(what, slow, causes, figure.gbs, against)]
    findings = []
    for what, ends, flows in _explain_slow_flows(rows, slow, locations, between_hosts):
        members = [row for row in slow if (row["src"], row["dst"]) in flows]
        causes = likely_causes(name, ends, locations)
        findings.append(_finding(what, members, causes, reference, f"its class, {name}"))
    return findings


def _class_verdict(best: float | None, reference: float, minimum: float) -> str:
    if best is None:
        return "unknown"
    return "good" if best >= minimum else fraction_verdict(best, reference)


def _judge_both_ways(rows: list[Row], reference: float, minimum: float) -> None:
    """Pairs that are good in each direction may still be slow in both directions at once."""
    good = {(row["src"], row["dst"]) for row in rows if row["verdict"] not in _SLOW}
    for row in rows:
        if {(row["src"], row["dst"]), (row["dst"], row["src"])} <= good:
            both = _class_verdict(row["gbs_bi_best"], reference, minimum)
            row["verdict"] = worst([row["verdict"], both])


def _class_reference(
    rows: list[Row], metric: str, end_of: Callable[[int], Hashable]
) -> tuple[float, float]:
    """(reference, minimum that still counts as good) of a class.

    Spreads are those of logarithms: a disturbance halves a speed, whatever its unit.
    """
    best: dict[Hashable, float] = {}
    for row in rows:
        if row[metric] is not None:
            for end in (("out", end_of(row["src"])), ("in", end_of(row["dst"]))):
                best[end] = max(best.get(end, 0.0), row[metric])
    if not best:
        return 0.0, 0.0
    reference = median_high(best.values())
    over_ends = 1.4826 * median_low(abs(math.log(each / reference)) for each in best.values())
    healthy = [row["spread"] for row in rows if (row[metric] or 0.0) >= DEGRADED * reference]
    # The best of five passes varies about half as much as a single pass.
    sigma = max(over_ends, math.log1p(median(healthy)) / 2)
    return reference, reference * min(DEGRADED, math.exp(-_SIGMAS * sigma))


def _explain_slow_flows(
    rows: list[Row], slow: list[Row], locations: Sequence[RankLocation], between_hosts: bool
) -> list[tuple[str, list[int], set[Flow]]]:
    """(name, ranks at the slow end, flows) of the largest ends that explain the slow pairs."""
    all_flows = {(row["src"], row["dst"]) for row in rows}
    slow_flows = {(row["src"], row["dst"]) for row in slow}
    found: list[tuple[str, list[int], set[Flow]]] = []
    unexplained = set(slow_flows)
    if between_hosts:
        machines = {each["rank"]: each["machine"] for each in locations}
        hosts = {each["machine"]: each["host"] for each in locations}
        for ends, how, flows in _slow_ends(
            all_flows, slow_flows, unexplained, machines.__getitem__
        ):
            names = [hosts[end] for end in ends]
            what = f"the link of host {names[0]}, {how}" if len(ends) == 1 else how.join(names)
            ranks = [each["rank"] for each in locations if each["machine"] == ends[0]]
            found.append((what, ranks if len(ends) == 1 else [], flows))
    for ends, how, flows in _slow_ends(all_flows, slow_flows, unexplained, _same_rank):
        names = [f"rank {e} ({locations[e]['host']}, {locations[e]['device']})" for e in ends]
        what = f"{names[0]}, {how}" if len(ends) == 1 else how.join(names)
        found.append((what, list(ends), flows))
    return found


def _slow_ends(
    all_flows: set[Flow], slow: set[Flow], unexplained: set[Flow], end_of: Callable[[int], Any]
) -> list[tuple[tuple[Any, ...], str, set[Flow]]]:
    """Ends with all flows to two or more others slow, then pairs of ends with all flows slow.

    Removes the flows that they explain from `unexplained`.
    """
    found: list[tuple[tuple[Any, ...], str, set[Flow]]] = []
    ends = sorted({end_of(rank) for flow in all_flows for rank in flow})
    for end in ends:
        directions = {
            "sending": {f for f in all_flows if end_of(f[0]) == end != end_of(f[1])},
            "receiving": {f for f in all_flows if end_of(f[1]) == end != end_of(f[0])},
        }
        slow_directions = {
            direction: flows
            for direction, flows in directions.items()
            if flows <= slow and len({end_of(r) for f in flows for r in f} - {end}) > 1
        }
        flows = set().union(*slow_directions.values())
        if flows & unexplained:
            found.append(((end,), " and ".join(slow_directions), flows))
            unexplained -= flows
    for end in ends:
        for other in ends:
            there = {f for f in all_flows if (end_of(f[0]), end_of(f[1])) == (end, other)}
            back = {f for f in all_flows if (end_of(f[0]), end_of(f[1])) == (other, end)}
            if there <= slow and there & unexplained:
                both = back <= slow and bool(back & unexplained)
                flows = there | back if both else there
                found.append(((end, other), " ↔ " if both else " → ", flows))
                unexplained -= flows
    return found


def _finding(
    what: str, rows: list[Row], causes: list[str], reference: float, against: str
) -> Finding:
    for row in rows:
        row["causes"] = [what, *causes]
    return Finding(
        what=what,
        verdict=worst(row["verdict"] for row in rows),
        gbs=round_significant(median(row["gbs_uni"] for row in rows)),
        against_gbs=round_significant(reference),
        against=against,
        pairs=tuple(sorted((row["src"], row["dst"]) for row in rows)),
        causes=tuple(causes),
    )


def _same_rank(rank: int) -> int:
    return rank


# ---- Likely causes ----

_COMMON_CAUSES: dict[str, tuple[str, ...]] = {
    "other host": (
        "a cable, port or NIC that runs at a lower speed or loses packets: ethtool, ip -s link",
        "a rate limit on the path: tc qdisc show, a switch policer, an oversubscribed uplink",
        "another interface than on other hosts: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
    ),
    "NVLink": (
        "NVLinks that are down or retraining: nvidia-smi nvlink -s, nvidia-smi nvlink -e",
        "a throttled GPU: nvidia-smi -q -d PERFORMANCE",
    ),
    "NVSwitch": (
        "NVLinks that are down or retraining: nvidia-smi nvlink -s, nvidia-smi nvlink -e",
        "a fabric manager that is not running, or a degraded fabric: nvidia-smi -q",
        "NVLink disabled for NCCL: NCCL_P2P_DISABLE, NCCL_P2P_LEVEL",
    ),
    "PCIe": (
        "fewer lanes or an older generation than the slot supports: nvidia-smi -q -d PCIE",
        "peer traffic routed through the root complex: ACS, an IOMMU that translates",
        "no peer access, copies go through host memory: nvidia-smi topo -p2p r",
    ),
    "NUMA": (
        "the link between sockets is shared with other traffic",
        "fewer lanes or an older generation than the slot supports: nvidia-smi -q -d PCIE",
    ),
    "same GPU": ("another program on this GPU: nvidia-smi",),
}
_COMMON_CPU_CAUSES = (
    "another program on the CPUs of this rank: top",
    "memory on another NUMA node than the CPUs: numactl --hardware, numastat -p",
    "a throttled CPU, or a virtual machine with shared cores: steal time in top",
)


def likely_causes(
    pair_class: str, ranks: Sequence[int], locations: Sequence[RankLocation]
) -> list[str]:
    """Observed differences of the ranks at the slow end, if known, then common causes."""
    causes = []
    if ranks and pair_class == "other host":
        causes += _interface_differences(ranks[0], locations)
    elif ranks and locations[ranks[0]]["gpu"]:
        for rank in ranks:
            causes += _gpu_differences(rank, locations)
    return [*causes, *_COMMON_CAUSES.get(pair_class, _COMMON_CPU_CAUSES)]


def _interface_differences(rank: int, locations: Sequence[RankLocation]) -> list[str]:
    mine, host = locations[rank]["interface"], locations[rank]["host"]
    if mine is None:
        return []
    others = [
        each["interface"]
        for each in locations
        if each["interface"] and each["machine"] != locations[rank]["machine"]
    ]
    causes = []
    if mine["shaper"]:
        causes.append(f"seen: {mine['name']} of {host} is limited by tc: {mine['shaper']}")
    for field, unit in (("mbits", " Mbit/s"), ("mtu", " bytes MTU")):
        causes += _less_than_others(f"{mine['name']} of {host}", mine, others, field, unit)
    return causes


def _gpu_differences(rank: int, locations: Sequence[RankLocation]) -> list[str]:
    def with_links(gpu: dict[str, Any]) -> dict[str, Any]:
        return {**gpu, "links": len(gpu["nvlinks_to"]) + gpu["nvlinks_to_switch"]}

    mine = with_links(locations[rank]["gpu"])
    gpus = [with_links(each["gpu"]) for each in locations if each["gpu"]]
    others = [gpu for gpu in gpus if gpu["uuid"] != mine["uuid"]]
    who = f"the GPU of rank {rank}"
    causes = _less_than_others(who, mine, others, "links", " active NVLinks")
    causes += _less_than_others(who, mine, others, "pcie_width", " PCIe lanes")
    width, maximum = mine["pcie_width"], mine["pcie_width_most"]
    if width and maximum and width < maximum:
        causes.append(f"seen: {who} uses {width} of its {maximum} PCIe lanes")
    return causes


def _less_than_others(
    who: str, mine: dict[str, Any], others: Sequence[dict[str, Any]], field: str, unit: str
) -> list[str]:
    values = [each[field] for each in others if each[field] is not None]
    if mine[field] is None or not values or mine[field] >= min(values):
        return []
    return [f"seen: {who} has {mine[field]}{unit}, the others {min(values)} or more"]
