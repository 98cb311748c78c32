"""tutti topo: the devices of this host or of all hosts, and what connects them."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from tutti.cli.flags import parse
from tutti.cli.results import check_writable, write_json
from tutti.measure.terminal import terminal_width
from tutti.world.errors import START_TIMEOUT, UsageError
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.machine.machine import Machine


@dataclass(frozen=True)
class Topo:
    """Show what connects the devices of a host: a matrix of GPUs and NICs, by the words of
    `nvidia-smi topo -m`, then a line for each device and NUMA node.

    Under torchrun, srun or mpirun every host shows its own.
    """

    json: Path | None = None
    """Write devices, links, NICs and NUMA nodes to this file, too."""
    svg: Path | None = None
    """Draw a picture into this file."""
    record: Path | None = None
    """Record all that is known of the hosts in this file, for --from here and elsewhere."""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Show the hosts of a recorded file, not this one."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Start this many local ranks, unless a launcher already did."""
    start_timeout: float = START_TIMEOUT
    """Seconds for all ranks to arrive."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Topo, "tutti topo", arguments)
    for flag in ("json", "svg", "record"):
        check_writable(f"--{flag}", getattr(options, flag))
    if options.from_ is not None:
        return _show(recorded_machines(options.from_), options)
    alone = identify(os.environ).size == 1
    if options.ranks is not None and alone:
        return LocalWorld(
            command=[sys.executable, "-m", "tutti", "topo", *arguments],
            ranks=options.ranks,
            device="cpu",
            show="first",
            start_timeout=options.start_timeout,
        ).run()
    if not alone:
        return _show_all_hosts(options)

    from tutti.machine.observe import observe

    return _show([observe()], options)


def recorded_machines(path: Path) -> "list[Machine]":
    """The machines of `--from FILE`."""
    from tutti.machine.record import read_machines

    try:
        return read_machines(path)
    except OSError as error:
        said = error.strerror or str(error)
        raise UsageError(f"--from {path}: {said}: name a file that --record wrote") from None
    except ValueError as error:
        raise UsageError(f"--from {path}: {error}") from None


def _show_all_hosts(options: Topo) -> int:
    from tutti.world.exchange import gather_json
    from tutti.world.world import init

    # Nothing is computed on a GPU here: ranks need none of their own.
    with init(device="cpu", start_timeout=options.start_timeout) as world:
        from tutti.machine.machine import Machine
        from tutti.machine.observe import observe

        found = gather_json(observe().to_json() if world.local_rank == 0 else None)
        if world.is_first:
            _show([Machine.from_json(each) for each in found if each is not None], options)
    return 0


def _show(machines: "Sequence[Machine]", options: Topo) -> int:
    from tutti.machine.record import write_machines
    from tutti.machine.topology import Topology
    from tutti.machine.topology_text import topology_lines

    topologies = [Topology(machine) for machine in machines]
    width = terminal_width(sys.stdout)
    for number, topology in enumerate(topologies):
        if number:
            print("\n" + "─" * min(width, 80) + "\n")
        print("\n".join(topology_lines(topology, width)))
    if options.json is not None:
        write_json(options.json, "tutti.topo/1", _rows(topologies))
    if options.svg is not None:
        from tutti.machine.picture import draw

        _write("--svg", options.svg, draw(topologies))
    if options.record is not None:
        note = "observed by tutti" if options.from_ is None else f"copied from {options.from_}"
        try:
            write_machines(options.record, machines, ["tutti", *sys.argv[1:]], note)
        except OSError as error:
            raise UsageError(f"--record {options.record}: {error.strerror}") from None
    return 0


def _rows(topologies: Sequence[Any]) -> dict[str, Any]:
    """All hosts' rows together; each row names its host."""
    rows: dict[str, Any] = {
        "hosts": [
            {
                "host": each.machine.host,
                "product": each.machine.product,
                "cpu": each.machine.cpus.model,
                "virtualisation": each.machine.virtualisation,
                "unknown": each.machine.unknown,
            }
            for each in topologies
        ],
        "machines": [each.machine.to_json() for each in topologies],
    }
    for topology in topologies:
        for name, own in topology.to_json().items():
            rows.setdefault(name, []).extend(own)
    return rows


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}: choose another file") from None
