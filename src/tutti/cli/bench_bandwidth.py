"""tutti bench bandwidth: every pair one way and both ways, what all ranks do, slow links named."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.bench.bandwidth_parts import PARTS
from tutti.bench.expect import Source
from tutti.cli.bench_results import ResultFiles, read_expectation, report_misses, sizes_flag
from tutti.cli.flags import parse
from tutti.cli.results import check_writable, usage_error_on_rank_0
from tutti.machine.cpu_numa import parse_cpu_list
from tutti.machine.environment import describe_environment
from tutti.machine.gpus import visible_gpu_count
from tutti.measure.terminal import print_line, print_note, terminal_width, wrap_line
from tutti.world.errors import UsageError, checked_seconds, did_you_mean
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.bench.bandwidth import Bandwidth as Measured
    from tutti.world.world import World

# Between Ctrl-C and SIGKILL a pass is finished and the file is written.
_GRACE_SECONDS = 30.0
_INTERRUPTED = 130
_SCHEMA = "tutti.bench.bandwidth/1"


@dataclass(frozen=True)
class Bandwidth:
    """Measure the links between ranks and mark slow ones: tutti bench bandwidth --ranks 4

    Every pair of ranks one way and both ways, one pair at a time, from one to all, all to all,
    all_reduce as a ring and as a tree, and on CUDA copies between host and device. Each pair is
    held against the others of its class (same core, same or other NUMA node, NVLink, NVSwitch,
    PCIe, other host) and against the catalogue; what slow pairs have in common is named. Data is
    checked. Ctrl-C leaves what was measured.
    """

    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """How many local ranks to start, unless a launcher already did (default: one per GPU, or 2)."""
    sizes: str | None = None
    """Bytes of a message: 16M or 64K,16M or 64K:16M:x16 (default 16M, and on CUDA 256M)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors are."""
    backend: Literal["shm", "gloo", "nccl"] | None = None
    """What carries messages (default shm, which between hosts is gloo; on CUDA nccl)."""
    ranks_per_gpu: int = 1
    """How many ranks may share one GPU."""
    only: str | None = None
    """Parts to measure, with commas between them: pairs, one_to_all, all_to_all, ring_vs_tree,
    copies (default: all that there can be)."""
    together: bool = False
    """Measure pairs of disjoint ranks at the same time: shorter, and shows what links share. A slow
    link may then be blamed for another."""
    pin: str = "own"
    """CPUs of ranks: own (each its share), none, or CPU lists of the ranks of a host with slashes
    between them: 0/1/32-35."""
    budget: float = 0.2
    """Seconds for each kind of traffic, operation and size."""
    expect: str | None = None
    """Check, and exit with 1 where something is missed: catalogue, an earlier JSON of this bench,
    or a TOML file of thresholds."""
    json: Path | None = None
    """Write pairs, verdicts, environment and command to this file, too."""
    start_timeout: float | None = None
    """Seconds for all ranks to arrive (default 300)."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Bandwidth, "tutti bench bandwidth", arguments)
    source = _check(options)
    if identify(os.environ).launcher != "python":
        return _measure(options, source)
    gpus = 0 if options.device == "cpu" else visible_gpu_count()
    usual = gpus * options.ranks_per_gpu if gpus else 2
    if options.ranks == 1 and not gpus:
        raise UsageError("--ranks 1: one rank on a CPU has no link to measure, use 2 or more")
    return LocalWorld(
        command=[sys.executable, "-m", "tutti", "bench", "bandwidth", *arguments],
        ranks=usual if options.ranks is None else options.ranks,
        device=options.device,
        ranks_per_gpu=options.ranks_per_gpu,
        show="first",
        grace=_GRACE_SECONDS,
        reported_codes=(1, 2),
    ).run()


def _measure(options: Bandwidth, source: Source | None) -> int:
    from tutti.bench.bandwidth import Bandwidth as Measured
    from tutti.bench.bandwidth_places import place_of
    from tutti.bench.control import Control
    from tutti.bench.room import check_room
    from tutti.world.exchange import gather_json
    from tutti.world.world import init

    with init(
        device=options.device,
        ranks_per_gpu=options.ranks_per_gpu if options.ranks_per_gpu > 1 else None,
        start_timeout=options.start_timeout,
    ) as world:
        sizes = sizes_flag(options.sizes or ("256M" if world.device.type == "cuda" else "16M"))
        with usage_error_on_rank_0(world):
            backend, parts = _backend(options, world), _parts(options, world)
            if world.device.type == "cpu":
                check_room(max(sizes), world)
        cpus = _pin(options.pin, world)
        ranks = gather_json({**world.row(), "cpus": cpus, "pinned": options.pin != "none"})
        places = gather_json(place_of(world, cpus))
        control = Control()
        measured = Measured(
            world, control, places, backend, sizes, options.budget, options.together
        )
        with control.stop_on_signals():
            files = ResultFiles(_SCHEMA, options.json)
            if world.is_first:
                _print_head(world, ranks, backend)
            if world.is_first and options.json is not None:
                measured.keep = lambda: files.update(_results(measured, ranks))
            measured.run(parts, _tell if world.is_first else lambda line: None)
            results = _results(measured, ranks)
            if world.is_first:
                _conclude(measured, files, results)
    if measured.stopped:
        return _INTERRUPTED
    return int((world.is_first and report_misses(_SCHEMA, results, source)) or measured.wrong > 0)


def _check(options: Bandwidth) -> Source | None:
    """Refuse what cannot be measured, before anything is started."""
    for part in (options.only or "pairs").split(","):
        if part not in PARTS:
            raise UsageError(f"--only: no part {part!r}: {did_you_mean(part, PARTS)}")
    if options.sizes is not None:
        sizes_flag(options.sizes)
    if options.backend == "nccl" and options.device == "cpu":
        raise UsageError(
            "--backend nccl moves CUDA tensors only: use --device cuda, or shm or gloo"
        )
    if options.backend in ("shm", "gloo") and options.device == "cuda":
        raise UsageError(
            f"--backend {options.backend} moves CPU tensors only: use --device cpu, or nccl"
        )
    if options.pin not in ("own", "none"):
        _cpu_lists(options.pin)
    checked_seconds("--budget", options.budget, example=0.2)
    check_writable("--json", options.json)
    return read_expectation(options.expect, "bandwidth", options.device)


def _parts(options: Bandwidth, world: "World") -> list[str]:
    """What was asked for; else all that a world of this kind can measure."""
    if options.only is not None:
        return options.only.split(",")
    having = {"copies": world.device.type == "cuda"}
    parts = [part for part in PARTS if having.get(part, world.size > 1)]
    if not parts:
        raise UsageError(
            "one rank on a CPU has no link to measure: start 2 or more, or leave the launcher out"
        )
    return parts


def _cpu_lists(text: str) -> list[tuple[int, ...]]:
    try:
        lists = [parse_cpu_list(part) for part in text.split("/")]
    except ValueError:
        lists = [()]
    if not all(lists):
        raise UsageError(f"--pin {text}: own, none, or a CPU list for each rank of a host: 0/1/2-3")
    return lists


def _backend(options: Bandwidth, world: "World") -> str:
    """What carries messages."""
    backend = options.backend or world.backend
    if (backend == "nccl") == (world.device.type == "cuda"):
        return backend
    moves = "CUDA" if backend == "nccl" else "CPU"
    raise UsageError(
        f"--backend {backend} moves {moves} tensors only, and ranks are on {world.device.type}: "
        "leave it out"
    )


def _pin(how: str, world: "World") -> str:
    from tutti.bench.pinning import pin, pin_to

    if how == "none":
        return world.cpus
    if how == "own":
        return pin(world)
    lists = _cpu_lists(how)
    return pin_to(lists[world.local_rank % len(lists)])


def _tell(line: str) -> None:
    print_line(f"tutti bench bandwidth: {line}", sys.stderr)


def _print_head(world: "World", ranks: list[dict[str, Any]], backend: str) -> None:
    for each in ranks:
        bound = "pinned to CPU" if each["pinned"] else "on CPU"
        where = f"{each['host']}, {each['device']}, {bound} {each['cpus']}"
        print_note(f"rank {each['rank']}: {where}")
    if world.sharing_note:
        print_note(f"note: {world.sharing_note}")
    if backend == "gloo" == world.backend:  # shm is the default: say why it is not
        print_note(f"note: no shm: {world.reasons['backend']}")
    print_note(f"messages by {backend}; GB/s are 1e9 bytes per second")


def _results(measured: "Measured", ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What goes into the JSON; the environment as it is while the world is open."""
    world = measured.world
    return {
        "environment": describe_environment(),
        "pairs": measured.pairs,
        "classes": measured.classes,
        "findings": [each.row() for each in measured.findings],
        "one_to_all": measured.one_to_all,
        "all_to_all": measured.all_to_all,
        "ring_vs_tree": measured.ring_vs_tree,
        "copies": measured.copies,
        "skipped": measured.skipped,
        "complete": measured.complete,
        "together": measured.together,
        "timing": "p50 over passes; the receiver's clock, after a first window of messages",
        "places": measured.places,
        "world": {"size": world.size, "ranks": ranks, "sharing_note": world.sharing_note},
    }


def _conclude(measured: "Measured", files: ResultFiles, results: dict[str, Any]) -> None:
    from tutti.bench.bandwidth_table import lines

    width = terminal_width(sys.stdout)
    for line in lines(measured, width):
        for part in wrap_line(line, width):
            print_line(part)
    files.write(results)
    print_note(f"Out of bounds values : {measured.wrong} {'FAILED' if measured.wrong else 'OK'}")
    if measured.stopped:
        print_note(f"stopped: {len(measured.pairs)} pairs were measured")
