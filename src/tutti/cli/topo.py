"""tutti topo: shows the devices of one host, or of all hosts of a world, and their links."""

import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from tutti.cli.flags import InputFile, OutputFile, parse
from tutti.cli.results import write_json, write_result
from tutti.machine.device_topology import LINK_CLASSES, Interface, Topology
from tutti.machine.recording import Machine, format_machines, observe, read_machines
from tutti.measure.terminal import terminal_width
from tutti.world.errors import START_TIMEOUT, UsageError
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.machine.gpus import Accelerator


@dataclass(frozen=True)
class Topo:
    """Show how the devices of a host are connected: a matrix of GPUs and NICs with the link
    classes of `nvidia-smi topo -m`, then one line for each device and NUMA node.

    Under torchrun, srun or mpirun, rank 0 shows all hosts.
    """

    json: OutputFile | None = None
    """Also write devices, links, NICs and NUMA nodes to this JSON file."""
    svg: OutputFile | None = None
    """Draw the topology into this SVG file."""
    record: OutputFile | None = None
    """Write the complete description of all hosts to this file. --from reads such a file."""
    from_: Annotated[InputFile | None, tyro.conf.arg(name="from")] = None
    """Show the hosts in this file, which --record wrote, instead of this host."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Number of local ranks to start. Ignored under torchrun, srun or mpirun."""
    start_timeout: float = START_TIMEOUT
    """Seconds to wait for all ranks to start."""


def main(arguments: list[str]) -> int:
    options = parse(Topo, "tutti topo", arguments)
    if options.from_ is not None:
        if options.ranks is not None:
            raise UsageError("--ranks has no effect with --from. Omit one of the flags.")
        return _show(recorded_machines(options.from_), options)
    single_process = identify(os.environ).size == 1
    if options.ranks is not None and single_process:
        return LocalWorld(
            command=[sys.executable, "-m", "tutti", "topo", *arguments],
            ranks=options.ranks,
            device="cpu",
            show="first",
            start_timeout=options.start_timeout,
        ).run()
    if single_process:
        return _show([observe()], options)
    from tutti.world.exchange import gather_json
    from tutti.world.world import init

    # This command does not compute on GPUs. With device="cpu", ranks also start without a GPU.
    with init(device="cpu", start_timeout=options.start_timeout) as world:
        found = gather_json(asdict(observe()) if world.local_rank == 0 else None)
        if world.is_first:
            _show([Machine.from_json(values) for values in found if values is not None], options)
    return 0


def recorded_machines(path: Path) -> list[Machine]:
    """Return the machines in the file of --from."""
    try:
        return read_machines(path)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise UsageError(f"--from {path}: {reason}. Use a file that --record wrote.") from None


def record_machines(path: Path, machines: Sequence[Machine], note: str) -> None:
    """Write the machines to the file of --record."""
    write_result("--record", path, format_machines(machines, ["tutti", *sys.argv[1:]], note))


def _show(machines: Sequence[Machine], options: Topo) -> int:
    topologies = [Topology(machine) for machine in machines]
    width = terminal_width(sys.stdout)
    for number, topology in enumerate(topologies):
        if number:
            print("\n" + "─" * min(width, 80) + "\n")
        print("\n".join(topology_lines(topology, width)))
    if options.json is not None:
        write_json(options.json, "tutti.topo/1", _json_rows(topologies))
    if options.svg is not None:
        from tutti.machine.topology_svg import draw

        write_result("--svg", options.svg, draw(topologies))
    if options.record is not None:
        note = "observed by tutti" if options.from_ is None else f"copied from {options.from_}"
        record_machines(options.record, machines, note)
    return 0


def _json_rows(topologies: Sequence[Topology]) -> dict[str, Any]:
    """Return the rows of all hosts. Each row has the key `host`."""
    machines = [topology.machine for topology in topologies]
    rows: dict[str, Any] = {
        "hosts": [
            {
                "host": machine.host,
                "product": machine.product,
                "cpu": machine.cpus.model,
                "virtualisation": machine.virtualisation,
                "unknown": machine.unknown,
            }
            for machine in machines
        ],
        "machines": [asdict(machine) for machine in machines],
    }
    for topology in topologies:
        for name, own in topology.to_json().items():
            rows.setdefault(name, []).extend(own)
    return rows


# --- text ----------------------------------------------------------------------------------------


def topology_lines(topology: Topology, width: int) -> Iterator[str]:
    """Yield the lines of the matrix, devices, NUMA nodes and legend, wrapped at `width`."""
    for line in _unwrapped_lines(topology, width):
        yield from textwrap.wrap(line, width, subsequent_indent=" " * 6) or [""]


def _unwrapped_lines(topology: Topology, width: int) -> Iterator[str]:
    machine = topology.machine
    yield from _host_lines(topology)
    if topology.gpus:
        yield ""
        yield from _matrix_lines(topology, width)
        yield ""
        for number, gpu in enumerate(topology.gpus):
            yield from _gpu_lines(
                topology, gpu, machine.reason_unknown(f"accelerators[{number}].nvlinks")
            )
    elif reason := machine.reason_unknown("accelerators"):
        yield f"no GPU: {reason}"
    yield ""
    if not machine.numa:
        yield f"NUMA nodes unknown: {machine.reason_unknown('numa')}"
        yield f"CPUs {machine.cpus.allowed} may be used"
    for node in machine.numa:
        cpus, distances = node.cpus or "none", node.distances
        text = f"CPUs {cpus}, {_gib(node.memory_bytes)}, {_gib(node.free_bytes)} free"
        text += "" if distances is None else f", distances {' '.join(map(str, distances))}"
        yield f"NUMA {node.id}  {text}"
    yield ""
    for nic in topology.interfaces:
        yield from _nic_lines(topology, nic)
    if not topology.interfaces:
        yield f"no NIC: {machine.reason_unknown('nics') or 'only virtual interfaces'}"
    if topology.gpus:
        yield ""
        yield from _legend_lines(topology)


def _host_lines(topology: Topology) -> Iterator[str]:
    machine = topology.machine
    cpus = machine.cpus
    packages = f"{cpus.packages} × " if (cpus.packages or 1) > 1 else ""
    counts = {"cores": cpus.cores, "threads": cpus.threads}
    parts = [f"{count} {name}" for name, count in counts.items() if count is not None]
    product = f" ({machine.product})" if machine.product else ""
    yield f"{machine.host}{product}: {machine.system or 'system unknown'}, {machine.kernel}"
    yield f"  {', '.join([packages + str(cpus.model), *parts, _gib(machine.memory.total_bytes)])}"
    for name, count in Counter(gpu.name for gpu in topology.gpus).items():
        memory = next(gpu.memory_bytes for gpu in topology.gpus if gpu.name == name)
        driver = machine.versions.get("driver", "unknown")
        yield f"  {count} × {name}, {_gib(memory)} each, driver {driver}"
    if machine.is_virtual:
        note = "; the hypervisor's view of the links may differ from the hardware"
        yield f"  a virtual machine ({machine.virtualisation}){note if topology.gpus else ''}"


def _matrix_lines(topology: Topology, width: int) -> Iterator[str]:
    """Yield the matrix: a row per GPU, a column per GPU and NIC, in blocks that fit `width`."""
    rows = [f"GPU{gpu.index}" for gpu in topology.gpus]
    columns = [*rows, *(nic.id for nic in topology.interfaces)]
    left = max(map(len, rows)) + 1
    classes = [topology.link_class(a, b) for a in rows for b in columns]
    cell = max(map(len, [*columns, *classes]))
    fitting = max(1, (width - left) // (cell + 1))
    # If not all columns fit into `width`, the NIC columns start a new block.
    groups = [columns] if len(columns) <= fitting else [rows, columns[len(rows) :]]
    blocks = [
        group[start : start + fitting]
        for group in groups
        for start in range(0, len(group), fitting)
    ]
    for number, block in enumerate(blocks):
        if number:
            yield ""
        yield " " * left + " ".join(f"{name:<{cell}}" for name in block).rstrip()
        for row in rows:
            cells = " ".join(f"{topology.link_class(row, name):<{cell}}" for name in block)
            yield f"{row:<{left}}{cells}".rstrip()


def _gpu_lines(
    topology: Topology, gpu: "Accelerator", unknown_nvlinks: str | None
) -> Iterator[str]:
    pcie, text = gpu.pcie, "PCIe unknown"
    if pcie is not None and pcie.width is not None:
        text = f"PCIe {pcie.generation} x{pcie.width}"
        if (pcie.generation, pcie.width) != (pcie.max_generation, pcie.max_width):
            text += f" of {pcie.max_generation} x{pcie.max_width}"
    parts = [gpu.pci_address or "PCI unknown", text, _numa(gpu.numa_node)]
    if gpu.cpus:
        parts.append(f"CPUs {gpu.cpus}")
    if near := topology.near_nics(gpu):
        parts.append(f"near {', '.join(nic.id for nic in near)}")
    yield f"GPU{gpu.index}  {', '.join(parts)}"
    if gpu.nvlinks is None:
        yield f"      NVLink unknown: {unknown_nvlinks}"
    elif gpu.nvlinks:
        active = gpu.active_nvlinks
        text = f"{len(active)} of {len(gpu.nvlinks)} NVLinks active"
        speeds = [link.speed_mbs for link in active if link.speed_mbs is not None]
        if speeds and len(speeds) == len(active):
            text += f", {sum(speeds) / 1000:.0f} GB/s one way"
        names = {"switch": "NVSwitches", "gpu": "GPUs", "cpu": "the CPU"}
        kinds = sorted({names[link.peer_kind] for link in active if link.peer_kind})
        yield f"      {text}, to {' and '.join(kinds)}" if kinds else f"      {text}"
        for link in gpu.nvlinks:
            errors = ", ".join(f"{count} {kind}" for kind, count in link.errors.items())
            # If all links are inactive, NVLink is not in use, for example because a virtual machine
            # has only one GPU. Do not warn in this case.
            if (not link.active and active) or errors:
                state = "active" if link.active else "INACTIVE"
                yield f"      link {link.index}: {state}{', errors: ' * bool(errors)}{errors}"


def _nic_lines(topology: Topology, nic: Interface) -> Iterator[str]:
    netdev = f" ({nic.netdev.name})" if nic.netdev and nic.ports else ""
    kind = nic.netdev.driver if nic.netdev else ""
    if nic.ports:
        layer = nic.ports[0].link_layer or "RDMA"
        kind = "RoCE" if layer == "Ethernet" else layer
    rate = "rate unknown" if nic.rate_gbps is None else f"{nic.rate_gbps:g} Gb/s"
    parts = [f"{nic.name}{netdev}", kind or "", nic.state, rate, _numa(nic.numa_node)]
    parts.append(nic.pci_address or "PCI unknown")
    if near := topology.near_gpus(nic):
        parts.append(f"near {', '.join(f'GPU{gpu.index}' for gpu in near)}")
    yield f"{nic.id}  {', '.join(part for part in parts if part)}"
    if nic.errors:
        yield f"      errors: {', '.join(f'{name} {count}' for name, count in nic.errors.items())}"


def _legend_lines(topology: Topology) -> Iterator[str]:
    shown = [link for link in topology.links if link.a.startswith("GPU")]
    used = {"NV#" if link.nvlinks else link.link_class for link in shown} | {"X"}
    # The reason for an unknown link class is usually the same for all pairs, so show only one.
    unknown = next((f": {link.reason}" for link in shown if link.link_class == "?"), "")
    for link_class, meaning in LINK_CLASSES.items():
        if link_class in used:
            yield f"{link_class:<5} {meaning}{unknown if link_class == '?' else ''}"


def _numa(node: int | None) -> str:
    return "NUMA unknown" if node is None else f"NUMA {node}"


def _gib(count: int | None) -> str:
    return "memory unknown" if count is None else f"{count / (1 << 30):.0f} GiB"
