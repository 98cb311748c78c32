"""A topology as text: the matrix, then a line for each device, and a legend of the words used."""

import textwrap
from collections.abc import Iterator, Sequence

from tutti.machine.accelerator import Accelerator
from tutti.machine.links import MEANINGS
from tutti.machine.topology import Interface, Topology

_GIB = 1 << 30


def topology_lines(topology: Topology, width: int) -> Iterator[str]:
    """What a person reads, in lines of at most `width` where that is possible."""
    for line in _lines(topology, width):
        yield from textwrap.wrap(line, width, subsequent_indent=" " * 6) or [""]


def _lines(topology: Topology, width: int) -> Iterator[str]:
    yield from _head(topology)
    if topology.gpus:
        yield ""
        yield from _matrix(topology, width)
        yield ""
        for number, gpu in enumerate(topology.gpus):
            yield from _gpu_lines(
                topology, gpu, topology.machine.why(f"accelerators[{number}].nvlinks")
            )
    elif reason := topology.machine.why("accelerators"):
        yield f"no GPU: {reason}"
    yield ""
    yield from _numa_lines(topology)
    yield ""
    for nic in topology.interfaces:
        yield from _nic_lines(topology, nic)
    if not topology.interfaces:
        yield f"no NIC: {topology.machine.why('nics') or 'only virtual interfaces'}"
    if topology.gpus:
        yield ""
        yield from _legend(topology)


def _head(topology: Topology) -> Iterator[str]:
    machine = topology.machine
    cpus = machine.cpus
    counts = [
        f"{cpus.packages} × {cpus.model}" if (cpus.packages or 1) > 1 else f"{cpus.model}",
        f"{cpus.cores} cores" if cpus.cores is not None else None,
        f"{cpus.threads} threads" if cpus.threads is not None else None,
        _gib(machine.memory.total_bytes),
    ]
    product = f" ({machine.product})" if machine.product else ""
    yield f"{machine.host}{product}: {machine.system or 'system unknown'}, {machine.kernel}"
    yield f"  {', '.join(each for each in counts if each)}"
    names = list(dict.fromkeys(gpu.name for gpu in topology.gpus))
    for name in names:
        same = [gpu for gpu in topology.gpus if gpu.name == name]
        driver = machine.versions.get("driver", "unknown")
        yield f"  {len(same)} × {name}, {_gib(same[0].memory_bytes)} each, driver {driver}"
    if machine.virtualisation not in ("none", None):
        note = "links may be what the hypervisor shows, not what is there" * bool(topology.gpus)
        yield f"  a virtual machine ({machine.virtualisation}){': ' if note else ''}{note}"


def _matrix(topology: Topology, width: int) -> Iterator[str]:
    """GPUs against GPUs and NICs; as many columns at a time as the width has room for."""
    rows = [f"GPU{gpu.index}" for gpu in topology.gpus]
    columns = [*rows, *(nic.id for nic in topology.interfaces)]
    left = max(map(len, rows)) + 1
    cell = max(
        len(word) for word in [*columns, *(topology.word(a, b) for a in rows for b in columns)]
    )
    room = max(1, (width - left) // (cell + 1))
    # GPUs first: where not all fits, NICs begin a new block rather than end one.
    if len(columns) > room:
        blocks = [*_cut(rows, room), *_cut(columns[len(rows) :], room)]
    else:
        blocks = [columns]
    for number, block in enumerate(blocks):
        if number:
            yield ""
        yield " " * left + " ".join(f"{name:<{cell}}" for name in block).rstrip()
        for row in rows:
            cells = " ".join(f"{topology.word(row, name):<{cell}}" for name in block)
            yield f"{row:<{left}}{cells}".rstrip()


def _cut(names: Sequence[str], room: int) -> list[Sequence[str]]:
    return [names[start : start + room] for start in range(0, len(names), room)]


def _gpu_lines(topology: Topology, gpu: Accelerator, unknown: str | None) -> Iterator[str]:
    parts = [gpu.pci_address or "PCI unknown", _pcie(gpu), _numa(gpu.numa_node)]
    if gpu.cpus:
        parts.append(f"CPUs {gpu.cpus}")
    if near := topology.near_nics(gpu):
        parts.append(f"near {', '.join(nic.id for nic in near)}")
    yield f"GPU{gpu.index}  {', '.join(parts)}"
    if gpu.nvlinks is None:
        yield f"      NVLink unknown: {unknown}"
    elif gpu.nvlinks:
        yield f"      {_nvlinks(gpu)}"
        in_use = any(link.active for link in gpu.nvlinks)
        for link in gpu.nvlinks:
            counts = {
                "replay": link.replay_errors,
                "recovery": link.recovery_errors,
                "CRC": link.crc_errors,
            }
            errors = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
            # Where all are down, none is wanted: a single GPU in a virtual machine, say.
            if (not link.active and in_use) or errors:
                state = "active" if link.active else "INACTIVE"
                yield f"      link {link.index}: {state}{', errors: ' * bool(errors)}{errors}"


def _nvlinks(gpu: Accelerator) -> str:
    links = gpu.nvlinks or ()
    active = [link for link in links if link.active]
    text = f"{len(active)} of {len(links)} NVLinks active"
    speeds = [link.speed_mbs for link in active if link.speed_mbs is not None]
    if speeds and len(speeds) == len(active):
        text += f", {sum(speeds) / 1000:.0f} GB/s one way"
    peers = {"switch": "NVSwitches", "gpu": "GPUs", "cpu": "the CPU"}
    kinds = sorted({peers[link.peer_kind] for link in active if link.peer_kind})
    return f"{text}, to {' and '.join(kinds)}" if kinds else text


def _pcie(gpu: Accelerator) -> str:
    link = gpu.pcie
    if link is None or link.width is None:
        return "PCIe unknown"
    text = f"PCIe {link.generation} x{link.width}"
    if (link.generation, link.width) != (link.max_generation, link.max_width):
        text += f" of {link.max_generation} x{link.max_width}"
    return text


def _numa_lines(topology: Topology) -> Iterator[str]:
    machine = topology.machine
    if not machine.numa:
        yield f"NUMA nodes unknown: {machine.why('numa')}"
        yield f"CPUs {machine.cpus.allowed} may be used"
        return
    for node in machine.numa:
        far = "" if node.distances is None else f", distances {' '.join(map(str, node.distances))}"
        room = f"{_gib(node.memory_bytes)}, {_gib(node.free_bytes)} free"
        yield f"NUMA {node.id}  CPUs {node.cpus or 'none'}, {room}{far}"


def _nic_lines(topology: Topology, nic: Interface) -> Iterator[str]:
    netdev = f" ({nic.netdev.name})" if nic.netdev and nic.ports else ""
    layer = nic.ports[0].link_layer or "RDMA" if nic.ports else None
    kind = {None: nic.netdev.driver if nic.netdev else "", "Ethernet": "RoCE"}.get(layer, layer)
    rate = "rate unknown" if nic.rate_gbps is None else f"{nic.rate_gbps:g} Gb/s"
    parts = [f"{nic.name}{netdev}", kind or "", nic.state, rate, _numa(nic.numa_node)]
    parts.append(nic.pci_address or "PCI unknown")
    if near := topology.near_gpus(nic):
        parts.append(f"near {', '.join(f'GPU{gpu.index}' for gpu in near)}")
    yield f"{nic.id}  {', '.join(part for part in parts if part)}"
    if nic.errors:
        yield f"      errors: {', '.join(f'{name} {count}' for name, count in nic.errors.items())}"


def _legend(topology: Topology) -> Iterator[str]:
    shown = [link for link in topology.links if link.a.startswith("GPU")]
    used = {"NV#" if link.nvlinks else link.word for link in shown} | {"X"}
    for word, meaning in MEANINGS.items():
        if word in used:
            # Why it is unknown is the same for all pairs, or nearly so.
            why = next((f": {link.reason}" for link in shown if link.word == word == "?"), "")
            yield f"{word:<5} {meaning}{why}"


def _numa(node: int | None) -> str:
    return "NUMA unknown" if node is None else f"NUMA {node}"


def _gib(count: int | None) -> str:
    return "memory unknown" if count is None else f"{count / _GIB:.0f} GiB"
