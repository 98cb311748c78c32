"""Find slow links: rank locations, the class of each pair of ranks, verdicts, and likely causes.

Each pair of ranks is compared with the other pairs of its class (same core, NVLink, other host, …)
and with the hardware catalogue. The speed of a pair is the speed of its best pass, because other
load on the machine can slow down single passes of a healthy link.

An end is a rank or a host, either as a sender or as a receiver. The best speed of an end is the
speed of its fastest pair. The reference speed of a class is the median of the best speeds of its
ends. The median over pairs is not used, because one slow end can make half of all pairs slow. If
all pairs of an end are slow, the finding names the end instead of the pairs.
"""

import json
import math
import os
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median, median_high, median_low
from typing import Any, NamedTuple

import torch

from tutti.machine.cpu_numa import numa_nodes, parse_cpu_list
from tutti.machine.gpus import numa_node_of_gpu
from tutti.machine.hardware_catalogue import Figure
from tutti.machine.nics import read_nics
from tutti.machine.recording import observe
from tutti.machine.sysfs import SysFiles
from tutti.measure.spread import round_significant
from tutti.world.world import World

Row = dict[str, Any]
Flow = tuple[int, int]
RankLocation = dict[str, Any]
Published = Callable[[Row], Figure | None]  # returns the catalogue figure for a row

VERDICTS = ("unknown", "good", "degraded", "bad")  # in order of severity, lowest first
# A speed below DEGRADED × reference speed is "degraded". A speed below BAD × reference is "bad".
DEGRADED, BAD = 0.8, 0.5
_SLOW = ("degraded", "bad")
# A speed less than this many σ below the reference speed counts as good. _class_reference takes σ
# as the larger of two estimates: from the spread between ends (1.4826 × MAD), and from the spread
# between the passes of a pair.
_SIGMAS = 3


# ---- Location of ranks, and the class of a pair ----


def locate_rank(world: World, cpus: str) -> RankLocation:
    """Return the host, device, CPUs and network interface of this rank, for JSON.

    `cpus` is the list of CPUs to which this rank is pinned.
    """
    own_cpus, files = parse_cpu_list(cpus), SysFiles()
    # The list of its hardware threads identifies a core.
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = {files.text(topology.format(cpu)) or str(cpu) for cpu in own_cpus}
    return {
        "rank": world.rank,
        "host": world.host,
        # Containers with different network namespaces count as different hosts.
        "machine": f"{world.host}/{os.readlink('/proc/self/ns/net')}",
        "device": str(world.device),
        "cpus": cpus,
        "cores": sorted(cores),
        "numa": [node for node, members in numa_nodes().items() if {*own_cpus} & {*members}],
        "gpu": _describe_gpu(world.device) if world.device.type == "cuda" else None,
        "interface": _describe_interface(files) if world.nodes > 1 else None,
    }


def pair_class(a: RankLocation, b: RankLocation) -> str:
    """Return the class of a pair of ranks. The class names the link between the two ranks."""
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
    numa_known = None not in (a["numa"], b["numa"])
    return "NUMA" if numa_known and a["numa"] != b["numa"] else "PCIe"


def _describe_gpu(device: torch.device) -> dict[str, Any]:
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the PCI fields
    pci = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
    pci += f"{properties.pci_device_id:02x}.0"
    # Without NVML, the NVLinks and the PCIe width are unknown.
    known = next((gpu for gpu in observe().accelerators if gpu.pci_address == pci), None)
    links = [link for link in (known and known.nvlinks) or () if link.active]
    pcie = known and known.pcie
    return {
        "name": torch.cuda.get_device_name(device),
        "uuid": str(properties.uuid),
        "pci": pci,
        "numa": known.numa_node if known else numa_node_of_gpu(pci),
        "pcie_width": pcie and pcie.width,
        "pcie_width_max": pcie and pcie.max_width,
        "nvlinks_to": [link.peer_pci for link in links if link.peer_kind == "gpu"],
        "nvlinks_to_switch": sum(link.peer_kind == "switch" for link in links),
    }


def _describe_interface(files: SysFiles) -> dict[str, Any] | None:
    """Return the network interface for messages to other hosts, with its speed and rate limit."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    nic = next((nic for nic in read_nics(files) if nic.name == name), None)
    if nic is None:
        return None
    speed = {"mbits": nic.speed_mbps, "mtu": nic.mtu}
    return {"name": name, **speed, "shaper": _traffic_shaper(name)}


def _traffic_shaper(interface: str) -> str | None:
    """Return the rate limit that `tc` reports for this interface, or None."""
    command = ["tc", "-j", "qdisc", "show", "dev", interface]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        rules = json.loads(done.stdout or "[]")
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
        return None
    for rule in rules:
        rate = rule.get("options", {}).get("rate")
        rate = rate.get("rate") if isinstance(rate, dict) else rate  # netem nests the rate
        if rate:
            return f"{rule['kind']}, {int(rate) * 8 / 1e6:g} Mbit/s"
    return None


# ---- Verdicts ----


class Finding(NamedTuple):
    """A slow link, rank or class of pairs, with likely causes."""

    what: str
    verdict: str
    gbs: float  # the median speed of the slow pairs
    against_gbs: float  # the reference speed
    against: str  # the source of the reference speed: the class or the catalogue
    pairs: tuple[Flow, ...]
    causes: tuple[str, ...]


def _worst(verdicts: Iterable[str]) -> str:
    return max(verdicts, key=VERDICTS.index)


def fraction_verdict(value: float, reference: float) -> str:
    """Return the verdict on a speed whose expected value is `reference`."""
    if value >= DEGRADED * reference:
        return "good"
    return "degraded" if value >= BAD * reference else "bad"


def judge_pairs(
    rows: Sequence[Row], locations: Sequence[RankLocation], published: Published
) -> list[Finding]:
    """Set `verdict` and `causes` of each row, and return the findings.

    Each row is one pair of ranks at one message size. The fields `gbs_uni_best` and `gbs_bi_best`
    are the speeds of the best pass.
    """
    findings: list[Finding] = []
    for members in rows_by_class(rows).values():
        findings += _judge_class(members, locations, published)
    return findings


def rows_by_class(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """Return {(class, message size): rows of pairs}."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["class"], row["bytes"]), []).append(row)
    return groups


def _judge_class(
    rows: list[Row], locations: Sequence[RankLocation], published: Published
) -> Iterator[Finding]:
    name, figure = rows[0]["class"], published(rows[0])
    by_flow = {(row["src"], row["dst"]): row for row in rows}
    # end_of[rank] is the end that a rank belongs to: the rank's machine for pairs between hosts,
    # and the rank itself for all other pairs.
    machines = [location["machine"] for location in locations]
    end_of: Sequence[Any] = machines if name == "other host" else range(len(locations))
    one_way = _class_reference(rows, "gbs_uni_best", end_of)
    both_ways = _class_reference(rows, "gbs_bi_best", end_of)
    below_catalogue = 0

    def class_verdict(best: float | None, reference: float, minimum: float) -> str:
        if best is None:
            return "unknown"
        return "good" if best >= minimum else fraction_verdict(best, reference)

    for row in rows:
        best = row["gbs_uni_best"]
        row["verdict"], row["causes"] = class_verdict(best, *one_way), []
        if (expected := published(row)) is not None and best is not None:
            row["verdict"] = _worst([row["verdict"], fraction_verdict(best, expected.gbs)])
            below_catalogue += best < DEGRADED * expected.gbs
    # A pair that is good in each single direction may be slow if both directions are active.
    good = {flow for flow, row in by_flow.items() if row["verdict"] not in _SLOW}
    for flow, row in by_flow.items():
        if {flow, flow[::-1]} <= good:
            both = class_verdict(row["gbs_bi_best"], *both_ways)
            row["verdict"] = _worst([row["verdict"], both])
    slow = {flow: row for flow, row in by_flow.items() if row["verdict"] in _SLOW}
    if not slow and len(set(map(frozenset, by_flow))) < 2:
        for row in rows:  # a class with only one pair has no reference except the catalogue
            row["verdict"] = "unknown" if published(row) is None else row["verdict"]
    reference, against = one_way[0], f"its class, {name}"
    if slow and below_catalogue == len(rows) and figure is not None:
        reference, against = figure.gbs, f"the catalogue: {figure.source}"
        explanations = [(f"all pairs of the class {name}", list[int](), set(slow))]
    else:
        between_hosts = name == "other host"
        explanations = _explain_slow_flows(set(by_flow), set(slow), locations, between_hosts)
    for what, ends, flows in explanations:
        causes = _likely_causes(name, ends, locations)
        members = [slow[flow] for flow in sorted(flows & slow.keys())]
        for row in members:
            row["causes"] = [what, *causes]
        yield Finding(
            what=what,
            verdict=_worst(row["verdict"] for row in members),
            gbs=round_significant(median(row["gbs_uni"] for row in members)),
            against_gbs=round_significant(reference),
            against=against,
            pairs=tuple((row["src"], row["dst"]) for row in members),
            causes=tuple(causes),
        )


def _class_reference(rows: list[Row], metric: str, end_of: Sequence[Any]) -> tuple[float, float]:
    """Return (reference speed of a class, lowest speed that counts as good).

    Spreads are computed from logarithms of speeds, because a disturbance reduces the speeds of fast
    links and of slow links by about the same factor.
    """
    best: dict[Any, float] = {}
    for row in rows:
        if row[metric] is not None:
            for end in (("out", end_of[row["src"]]), ("in", end_of[row["dst"]])):
                best[end] = max(best.get(end, 0.0), row[metric])
    if not best:
        return 0.0, 0.0
    reference = median_high(best.values())
    over_ends = 1.4826 * median_low(abs(math.log(speed / reference)) for speed in best.values())
    healthy = [row["spread"] for row in rows if (row[metric] or 0.0) >= DEGRADED * reference]
    # Divide by 2, because the best of five passes varies about half as much as one pass.
    sigma = max(over_ends, math.log1p(median(healthy)) / 2)
    return reference, reference * min(DEGRADED, math.exp(-_SIGMAS * sigma))


def _explain_slow_flows(
    all_flows: set[Flow], slow: set[Flow], locations: Sequence[RankLocation], between_hosts: bool
) -> list[tuple[str, list[int], set[Flow]]]:
    """Return (description, ranks at the slow end, slow flows) of each slow host, rank or pair.

    If a host is slow, the slow flows between this host and other hosts are attributed to the host.
    Of the remaining slow flows, those of a slow rank are attributed to the rank. Every other slow
    flow is attributed to its pair of ranks.
    """
    found = []
    unexplained = set(slow)
    if between_hosts:
        machines = [location["machine"] for location in locations]
        hosts = {location["machine"]: location["host"] for location in locations}
        for ends, description, flows in _slow_ends(all_flows, slow, unexplained, machines):
            if len(ends) == 1:
                ranks = [rank for rank, machine in enumerate(machines) if machine == ends[0]]
                found.append((f"the link of host {hosts[ends[0]]}, {description}", ranks, flows))
            else:
                found.append((description.join(hosts[end] for end in ends), [], flows))
    for ends, description, flows in _slow_ends(all_flows, slow, unexplained, range(len(locations))):
        names = [f"rank {e} ({locations[e]['host']}, {locations[e]['device']})" for e in ends]
        what = f"{names[0]}, {description}" if len(ends) == 1 else description.join(names)
        found.append((what, list(ends), flows))
    return found


def _slow_ends(
    all_flows: set[Flow], slow: set[Flow], unexplained: set[Flow], end_of: Sequence[Any]
) -> Iterator[tuple[tuple[Any, ...], str, set[Flow]]]:
    """Yield (ends, description, flows) of each slow end, and then of each slow pair of ends.

    An end is slow at sending if it sends to at least two other ends and all these flows are slow.
    An end is slow at receiving if it receives from at least two other ends and all these flows are
    slow. A pair of ends is slow if all flows from one end to the other are slow. The yielded flows
    are removed from `unexplained`.
    """
    between: dict[tuple[Any, Any], set[Flow]] = {}
    for a, b in sorted(all_flows):
        between.setdefault((end_of[a], end_of[b]), set()).add((a, b))
    ends = sorted({end for pair in between for end in pair})
    for end in ends:
        slow_directions: dict[str, set[Flow]] = {}
        for position, direction in enumerate(("sending", "receiving")):
            pairs = [pair for pair in between if pair[position] == end != pair[1 - position]]
            flows = set().union(*(between[pair] for pair in pairs))
            if flows <= slow and len(pairs) > 1:
                slow_directions[direction] = flows
        flows = set().union(*slow_directions.values())
        if flows & unexplained:
            unexplained -= flows
            yield (end,), " and ".join(slow_directions), flows
    for end, other in product(ends, ends):
        there, back = between.get((end, other), set()), between.get((other, end), set())
        if there <= slow and there & unexplained:
            both = back <= slow and bool(back & unexplained)
            flows = there | back if both else there
            unexplained -= flows
            yield (end, other), " ↔ " if both else " → ", flows


# ---- Likely causes ----


def _likely_causes(
    pair_class: str, ranks: Sequence[int], locations: Sequence[RankLocation]
) -> list[str]:
    """Return likely causes of slow links of these ranks.

    Differences between these ranks and the other ranks come first, then the common causes of the
    class.
    """
    common = tomllib.loads(Path(__file__).with_name("likely_causes.toml").read_text())
    causes: list[str] = []
    if ranks and pair_class == "other host":
        causes += _interface_differences(locations[ranks[0]], locations)
    elif ranks and locations[ranks[0]]["gpu"]:
        for rank in ranks:
            causes += _gpu_differences(rank, locations)
    return [*causes, *common.get(pair_class, common["CPU"])]


def _interface_differences(
    location: RankLocation, locations: Sequence[RankLocation]
) -> Iterator[str]:
    interface = location["interface"]
    if interface is None:
        return
    name = f"{interface['name']} of {location['host']}"
    others = [each["interface"] for each in locations if each["machine"] != location["machine"]]
    if interface["shaper"]:
        yield f"observed: tc limits {name} ({interface['shaper']})"
    units = {"mbits": " Mbit/s", "mtu": " bytes MTU"}
    yield from _less_than_others(name, interface, others, units)


def _gpu_differences(rank: int, locations: Sequence[RankLocation]) -> Iterator[str]:
    gpus = {
        location["rank"]: {**gpu, "links": len(gpu["nvlinks_to"]) + gpu["nvlinks_to_switch"]}
        for location in locations
        if (gpu := location["gpu"])
    }
    gpu, name = gpus[rank], f"the GPU of rank {rank}"
    others = [other for other in gpus.values() if other["uuid"] != gpu["uuid"]]
    units = {"links": " active NVLinks", "pcie_width": " PCIe lanes"}
    yield from _less_than_others(name, gpu, others, units)
    width, maximum = gpu["pcie_width"], gpu["pcie_width_max"]
    if width and maximum and width < maximum:
        yield f"observed: {name} uses {width} of its {maximum} PCIe lanes"


def _less_than_others(
    name: str, device: Row, others: Sequence[Row | None], units: Mapping[str, str]
) -> Iterator[str]:
    for field, unit in units.items():
        values = [other[field] for other in others if other and other[field] is not None]
        if device[field] is not None and values and device[field] < min(values):
            least = f"the others have {min(values)} or more"
            yield f"observed: {name} has {device[field]}{unit}, but {least}"
