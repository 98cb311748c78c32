"""Why a link may be slow: first what was seen on its machine, then what is usual for its class."""

from collections.abc import Sequence
from typing import Any

from tutti.bench.bandwidth_places import Place

_USUAL: dict[str, tuple[str, ...]] = {
    "other host": (
        "a cable, port or NIC that came up at a lower speed, or loses packets: ethtool, ip -s link",
        "a limit on the way: tc qdisc show, a switch's policer, a shared or oversubscribed uplink",
        "another interface than on other hosts: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
    ),
    "NVLink": (
        "NVLinks that are down or retrain: nvidia-smi nvlink -s, nvidia-smi nvlink -e",
        "a GPU that is throttled: nvidia-smi -q -d PERFORMANCE",
    ),
    "NVSwitch": (
        "NVLinks that are down or retrain: nvidia-smi nvlink -s, nvidia-smi nvlink -e",
        "a fabric manager that is not running, or a fabric in a degraded state: nvidia-smi -q",
        "NVLink switched off for NCCL: NCCL_P2P_DISABLE, NCCL_P2P_LEVEL",
    ),
    "PCIe": (
        "fewer lanes or an older generation than the slot allows: nvidia-smi -q -d PCIE",
        "peer traffic sent by way of the root complex: ACS, a translating IOMMU",
        "no peer access at all, copies go through host memory: nvidia-smi topo -p2p r",
    ),
    "NUMA": (
        "the link between sockets is shared with other traffic",
        "fewer lanes or an older generation than the slot allows: nvidia-smi -q -d PCIE",
    ),
    "same GPU": ("another program on this GPU: nvidia-smi",),
}
_USUAL_OF_CPUS = (
    "another program on the CPUs of this rank: top",
    "memory on another NUMA node than the CPUs: numactl --hardware, numastat -p",
    "a CPU that is throttled or in a virtual machine whose cores are shared: steal time in top",
)


def likely_causes(name: str, ranks: Sequence[int], places: Sequence[Place]) -> list[str]:
    """For a class of pairs, and the ranks at the slow end where that is known."""
    causes = []
    if ranks:
        if name == "other host":
            causes += _odd_interface(ranks[0], places)
        elif places[ranks[0]]["gpu"]:
            for rank in ranks:
                causes += _odd_gpu(rank, places)
    return [*causes, *_USUAL.get(name, _USUAL_OF_CPUS)]


def _odd_interface(rank: int, places: Sequence[Place]) -> list[str]:
    mine, host = places[rank]["interface"], places[rank]["host"]
    if mine is None:
        return []
    others = [
        place["interface"]
        for place in places
        if place["interface"] and place["machine"] != places[rank]["machine"]
    ]
    causes = []
    if mine["shaper"]:
        causes.append(f"seen: {mine['name']} of {host} is limited by tc: {mine['shaper']}")
    for what, unit in (("mbits", " Mbit/s"), ("mtu", " bytes MTU")):
        causes += _unlike(f"{mine['name']} of {host}", mine, others, what, unit)
    return causes


def _odd_gpu(rank: int, places: Sequence[Place]) -> list[str]:
    mine = places[rank]["gpu"]
    others = [
        place["gpu"] for place in places if place["gpu"] and place["gpu"]["uuid"] != mine["uuid"]
    ]
    who = f"the GPU of rank {rank}"
    causes = _unlike(
        who, _links(mine), [_links(each) for each in others], "links", " active NVLinks"
    )
    causes += _unlike(who, mine, others, "pcie_width", " PCIe lanes")
    width, most = mine["pcie_width"], mine["pcie_width_most"]
    if width and most and width < most:
        causes.append(f"seen: {who} uses {width} of its {most} PCIe lanes")
    return causes


def _links(gpu: dict[str, Any]) -> dict[str, int]:
    return {"links": len(gpu["nvlinks_to"]) + gpu["nvlinks_to_switch"]}


def _unlike(
    who: str, mine: dict[str, Any], others: Sequence[dict[str, Any]], what: str, unit: str
) -> list[str]:
    """Where all others have more of something than this one: that."""
    most = [each[what] for each in others if each[what] is not None]
    if mine[what] is None or not most or mine[what] >= min(most):
        return []
    return [f"seen: {who} has {mine[what]}{unit}, the others {min(most)} or more"]
