"""Where each rank is, and so what joins two of them: the class that a pair is compared with."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tutti.machine.cpu_numa import numa_nodes, parse_cpu_list
from tutti.machine.gpus import numa_node_of_gpu
from tutti.machine.observation import observe
from tutti.world.world import World

Place = dict[str, Any]
_CPUS = Path("/sys/devices/system/cpu")
_NETWORK = Path("/sys/class/net")


def place_of(world: World, cpus: str) -> Place:
    """What this rank can say of its own place, for JSON. `cpus` are those it is pinned to."""
    mine = parse_cpu_list(cpus)
    nodes = [node for node, members in numa_nodes().items() if set(mine) & set(members)]
    return {
        "rank": world.rank,
        "host": world.host,
        # A network namespace of its own is another host: it has another network.
        "machine": f"{world.host}/{os.readlink('/proc/self/ns/net')}",
        "device": str(world.device),
        "cpus": cpus,
        "cores": sorted({_core(cpu) for cpu in mine}),
        "numa": nodes,
        "gpu": _gpu(world.device) if world.device.type == "cuda" else None,
        "interface": _interface() if world.nodes > 1 else None,
    }


def pair_class(a: Place, b: Place) -> str:
    """What joins two ranks."""
    if a["machine"] != b["machine"]:
        return "other host"
    if a["gpu"] and b["gpu"]:
        return _class_of_gpus(a["gpu"], b["gpu"])
    if set(a["cores"]) & set(b["cores"]):
        return "same core"
    if len(a["numa"]) == 1 and len(b["numa"]) == 1:
        return "same NUMA node" if a["numa"] == b["numa"] else "other NUMA node"
    return "same host"


def _class_of_gpus(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    if a["uuid"] == b["uuid"]:
        return "same GPU"
    if b["pci"] in a["nvlinks_to"] or a["pci"] in b["nvlinks_to"]:
        return "NVLink"
    if a["nvlinks_to_switch"] and b["nvlinks_to_switch"]:
        return "NVSwitch"
    apart = None not in (a["numa"], b["numa"]) and a["numa"] != b["numa"]
    return "NUMA" if apart else "PCIe"


def _core(cpu: int) -> str:
    """The core that a CPU is a thread of, by its threads."""
    with contextlib.suppress(OSError):
        return (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    return str(cpu)


def _gpu(device: torch.device) -> dict[str, Any]:
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the PCI fields
    pci = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
    pci += f"{properties.pci_device_id:02x}.0"
    # What the driver says of it; where it is not asked (no NVML), all of that is unknown.
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


def _interface() -> dict[str, Any] | None:
    """The interface that messages to other hosts leave by, with what may slow it."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not (_NETWORK / name).is_dir() or not name:
        return None
    return {
        "name": name,
        "mbits": _number(_NETWORK / name / "speed"),
        "mtu": _number(_NETWORK / name / "mtu"),
        "shaper": _shaper(name),
    }


def _number(file: Path) -> int | None:
    try:
        value = int(file.read_text())
    except (OSError, ValueError):
        return None
    return value if value > 0 else None


def _shaper(interface: str) -> str | None:
    """What `tc` limits the rate of this interface to; None where it does not, or is not here."""
    tool = shutil.which("tc")
    if tool is None:
        return None
    try:
        done = subprocess.run(
            [tool, "-j", "qdisc", "show", "dev", interface],
            capture_output=True,
            text=True,
            timeout=10,
        )
        rules = json.loads(done.stdout or "[]")
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
        return None
    for rule in rules:
        rate = rule.get("options", {}).get("rate")
        rate = rate.get("rate") if isinstance(rate, dict) else rate  # netem nests it
        if rate:
            return f"{rule['kind']}, {int(rate) * 8 / 1e6:g} Mbit/s"
    return None
