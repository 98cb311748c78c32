"""Find slow links: location of ranks, class of each pair, verdicts, and likely causes.

Each pair of ranks is compared with the other pairs of its class (same core, NVLink, other host, …)
and with the catalogue. An end is a rank or a host, either as a sender or as a receiver. The
reference speed of a class is a median over ends: the best speed of each end is taken first. The
median over pairs is not used, because one bad end can make half of all pairs slow. The speed of a
pair is that of its best pass, because other load on the machine can slow down the other passes of
a healthy link. If all pairs of one end are slow, the finding names the end, not the pairs.
"""

import json
import math
import os
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_high, median_low
from typing import Any

import torch

from tutti.machine.cpu_numa import numa_nodes, parse_cpu_list
from tutti.machine.gpus import numa_node_of_gpu
from tutti.machine.hardware_catalogue import Figure
from tutti.machine.recording import observe
from tutti.machine.sysfs import SysFiles
from tutti.measure.spread import round_significant
from tutti.world.world import World

Row = dict[str, Any]
Flow = tuple[int, int]
RankLocation = dict[str, Any]

VERDICTS = ("unknown", "good", "degraded", "bad")  # in ascending severity
# A figure below these fractions of its reference is "degraded" or "bad".
DEGRADED, BAD = 0.8, 0.5
_SLOW = ("degraded", "bad")
# Differences of up to this many σ are noise; σ is 1.4826 × MAD over ends and passes.
_SIGMAS = 3


# ---- Location of ranks, and the class of a pair ----


def locate_rank(world: World, cpus: str) -> RankLocation:
    """Return where this rank runs, for JSON. `cpus` is the list of CPUs of this rank."""
    mine = parse_cpu_list(cpus)
    nodes = [node for node, members in numa_nodes().items() if set(mine) & set(members)]
    return {
        "rank": world.rank,
        "host": world.host,
        # A different network namespace counts as a different host, because its network differs.
        "machine": f"{world.host}/{os.readlink('/proc/self/ns/net')}",
        "device": str(world.device),
        "cpus": cpus,
        "cores": sorted({_core(cpu) for cpu in mine}),
        "numa": nodes,
        "gpu": _describe_gpu(world.device) if world.device.type == "cuda" else None,
        "interface": _describe_interface() if world.nodes > 1 else None,
    }


def pair_class(a: RankLocation, b: RankLocation) -> str:
    """Return the class of a pair of ranks, which names the link between them."""
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
    """Return an identifier of the physical core of a CPU: the list of its hardware threads."""
    siblings = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return SysFiles().text(siblings) or str(cpu)


def _describe_gpu(device: torch.device) -> dict[str, Any]:
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the PCI fields
    pci = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
    pci += f"{properties.pci_device_id:02x}.0"
    # Without NVML, the NVLinks and the PCIe width are unknown.
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
    """Return the network interface for messages to other hosts, with the limits of its speed."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    files, folder = SysFiles(), f"/sys/class/net/{name}"
    if not name or not files.exists(folder):
        return None
    mbits, mtu = (files.number(f"{folder}/{file}") or 0 for file in ("speed", "mtu"))
    return {
        "name": name,
        "mbits": mbits if mbits > 0 else None,  # the driver reports -1 if unknown
        "mtu": mtu or None,
        "shaper": _traffic_shaper(name),
    }


def _traffic_shaper(interface: str) -> str | None:
    """Return the rate limit that `tc` reports for this interface, or None."""
    if shutil.which("tc") is None:
        return None
    command = ["tc", "-j", "qdisc", "show", "dev", interface]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        rules = json.loads(done.stdout or "[]")
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
        return None
    for rule in rules:
        rate = rule.get("options", {}).get("rate")
        rate = rate.get("rate") if isinstance(rate, dict) else rate  # netem has a nested table
        if rate:
            return f"{rule['kind']}, {int(rate) * 8 / 1e6:g} Mbit/s"
    return None


# ---- Verdicts ----


@dataclass(frozen=True)
class Finding:
    """A slow link, rank or class of pairs, with likely causes."""

    what: str
    verdict: str
    gbs: float  # median over the slow pairs
    against_gbs: float
    against: str
    pairs: tuple[Flow, ...]
    causes: tuple[str, ...]


def worst(verdicts: Iterable[str]) -> str:
    """The most severe verdict."""
    return max(verdicts, key=VERDICTS.index, default="unknown")


def fraction_verdict(value: float, reference: float) -> str:
    """Return the verdict on a value that should be close to `reference`."""
    if value >= DEGRADED * reference:
        return "good"
    return "degraded" if value >= BAD * reference else "bad"


def judge_pairs(
    rows: Sequence[Row],
    locations: Sequence[RankLocation],
    published: Callable[[Row], Figure | None],
) -> list[Finding]:
    """Set `verdict` and `causes` of each row, and return the findings.

    Rows have src, dst, class, bytes, gbs_uni, gbs_bi, and the speeds of the best passes as
    gbs_uni_best and gbs_bi_best. `published` returns the catalogue's figure for a row.
    """
    findings: list[Finding] = []
    for key in dict.fromkeys((row["class"], row["bytes"]) for row in rows):
        members = [row for row in rows if (row["class"], row["bytes"]) == key]
        findings += _judge_class(members, locations, published)
    return findings


def _judge_class(
    rows: list[Row],
    locations: Sequence[RankLocation],
    published: Callable[[Row], Figure | None],
) -> Iterator[Finding]:
    name, figure = rows[0]["class"], published(rows[0])
    # end_of[rank] is the end of a rank: its machine for pairs between hosts, else the rank itself.
    machines = [each["machine"] for each in locations]
    end_of: Sequence[Any] = machines if name == "other host" else range(len(locations))
    one_way = _class_reference(rows, "gbs_uni_best", end_of)
    both_ways = _class_reference(rows, "gbs_bi_best", end_of)
    below_catalogue = 0
    for row in rows:
        best = row["gbs_uni_best"]
        row["verdict"], row["causes"] = _class_verdict(best, *one_way), []
        if (expected := published(row)) is not None and best is not None:
            row["verdict"] = worst([row["verdict"], fraction_verdict(best, expected.gbs)])
            below_catalogue += best < DEGRADED * expected.gbs
    # Pairs that are good in each single direction may be slow in both directions at the same time.
    good = {(row["src"], row["dst"]) for row in rows if row["verdict"] not in _SLOW}
    for row in rows:
        if {(row["src"], row["dst"]), (row["dst"], row["src"])} <= good:
            row["verdict"] = worst([row["verdict"], _class_verdict(row["gbs_bi_best"], *both_ways)])
    slow = {(row["src"], row["dst"]): row for row in rows if row["verdict"] in _SLOW}
    if not slow and len({frozenset((row["src"], row["dst"])) for row in rows}) < 2:
        for row in rows:  # a class of one pair has no other reference than the catalogue
            row["verdict"] = "unknown" if published(row) is None else row["verdict"]
    reference, against = one_way[0], f"its class, {name}"
    if slow and below_catalogue == len(rows) and figure is not None:
        reference, against = figure.gbs, f"the catalogue: {figure.source}"
        explanations = [(f"all pairs of the class {name}", list[int](), set(slow))]
    else:
        all_flows = {(row["src"], row["dst"]) for row in rows}
        explanations = _explain_slow_flows(all_flows, set(slow), locations, name == "other host")
    for what, ends, flows in explanations:
        causes = _likely_causes(name, ends, locations)
        members = [row for flow, row in slow.items() if flow in flows]
        for row in members:
            row["causes"] = [what, *causes]
        yield Finding(
            what=what,
            verdict=worst(row["verdict"] for row in members),
            gbs=round_significant(median(row["gbs_uni"] for row in members)),
            against_gbs=round_significant(reference),
            against=against,
            pairs=tuple(sorted((row["src"], row["dst"]) for row in members)),
            causes=tuple(causes),
        )


def _class_verdict(best: float | None, reference: float, minimum: float) -> str:
    if best is None:
        return "unknown"
    return "good" if best >= minimum else fraction_verdict(best, reference)


def _class_reference(rows: list[Row], metric: str, end_of: Sequence[Any]) -> tuple[float, float]:
    """Return the reference speed of a class, and the lowest speed that counts as good.

    Spreads are computed from logarithms of speeds, because a disturbance divides a speed by some
    factor, for fast and for slow links.
    """
    best: dict[Any, float] = {}
    for row in rows:
        if row[metric] is not None:
            for end in (("out", end_of[row["src"]]), ("in", end_of[row["dst"]])):
                best[end] = max(best.get(end, 0.0), row[metric])
    if not best:
        return 0.0, 0.0
    reference = median_high(best.values())
    over_ends = 1.4826 * median_low(abs(math.log(each / reference)) for each in best.values())
    healthy = [row["spread"] for row in rows if (row[metric] or 0.0) >= DEGRADED * reference]
    # The best of five passes varies about half as much as a single pass: hence the division by 2.
    sigma = max(over_ends, math.log1p(median(healthy)) / 2)
    return reference, reference * min(DEGRADED, math.exp(-_SIGMAS * sigma))


def _explain_slow_flows(
    all_flows: set[Flow], slow: set[Flow], locations: Sequence[RankLocation], between_hosts: bool
) -> list[tuple[str, list[int], set[Flow]]]:
    """Attribute slow flows to hosts (if the pairs are between hosts), then to ranks and pairs.

    Returns (name, ranks at the slow end, flows) of each host, rank or pair that was found.
    """
    found = []
    unexplained = set(slow)
    if between_hosts:
        machines = [each["machine"] for each in locations]
        hosts = {each["machine"]: each["host"] for each in locations}
        for ends, how, flows in _slow_ends(all_flows, slow, unexplained, machines):
            if len(ends) == 1:
                ranks = [rank for rank, machine in enumerate(machines) if machine == ends[0]]
                found.append((f"the link of host {hosts[ends[0]]}, {how}", ranks, flows))
            else:
                found.append((how.join(hosts[end] for end in ends), [], flows))
    for ends, how, flows in _slow_ends(all_flows, slow, unexplained, range(len(locations))):
        names = [f"rank {e} ({locations[e]['host']}, {locations[e]['device']})" for e in ends]
        what = f"{names[0]}, {how}" if len(ends) == 1 else how.join(names)
        found.append((what, list(ends), flows))
    return found


def _slow_ends(
    all_flows: set[Flow], slow: set[Flow], unexplained: set[Flow], end_of: Sequence[Any]
) -> Iterator[tuple[tuple[Any, ...], str, set[Flow]]]:
    """Yield (ends, description, flows) of slow ends, and then of slow pairs of ends.

    An end is slow if it sends to (or receives from) at least two other ends, and all flows in that
    direction are slow. A pair of ends is slow if all flows between the two ends are slow. The
    yielded flows are removed from `unexplained`.
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
    for end in ends:
        for other in ends:
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
    """Return likely causes: first observed differences of the slow ranks, then common causes."""
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
    mine = location["interface"]
    if mine is None:
        return
    who = f"{mine['name']} of {location['host']}"
    others = [each["interface"] for each in locations if each["machine"] != location["machine"]]
    if mine["shaper"]:
        yield f"seen: {who} is limited by tc: {mine['shaper']}"
    yield from _less_than_others(who, mine, others, {"mbits": " Mbit/s", "mtu": " bytes MTU"})


def _gpu_differences(rank: int, locations: Sequence[RankLocation]) -> Iterator[str]:
    gpus = [
        {**gpu, "links": len(gpu["nvlinks_to"]) + gpu["nvlinks_to_switch"]} if gpu else None
        for gpu in (each["gpu"] for each in locations)
    ]
    mine, who = gpus[rank], f"the GPU of rank {rank}"
    assert mine is not None
    others = [gpu for gpu in gpus if gpu and gpu["uuid"] != mine["uuid"]]
    units = {"links": " active NVLinks", "pcie_width": " PCIe lanes"}
    yield from _less_than_others(who, mine, others, units)
    width, maximum = mine["pcie_width"], mine["pcie_width_most"]
    if width and maximum and width < maximum:
        yield f"seen: {who} uses {width} of its {maximum} PCIe lanes"


def _less_than_others(
    who: str,
    mine: Mapping[str, Any],
    others: Sequence[Mapping[str, Any] | None],
    units: Mapping[str, str],
) -> Iterator[str]:
    for field, unit in units.items():
        values = [each[field] for each in others if each and each[field] is not None]
        if mine[field] is not None and values and mine[field] < min(values):
            yield f"seen: {who} has {mine[field]}{unit}, the others {min(values)} or more"
