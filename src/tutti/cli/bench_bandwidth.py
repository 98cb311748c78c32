"""tutti bench bandwidth: measure every pair of ranks, collectives and copies; report slow links."""

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from tutti.bench.bandwidth import PARTS
from tutti.bench.expectations import Expectation
from tutti.cli import bench
from tutti.cli.flags import parse
from tutti.cli.results import check_writable, usage_error_on_rank_0
from tutti.machine.cpu_numa import parse_cpu_list
from tutti.machine.gpus import visible_gpu_count
from tutti.measure.terminal import print_line, print_note, terminal_width, wrap_line
from tutti.world.errors import UsageError, checked_seconds, did_you_mean

if TYPE_CHECKING:
    from tutti.bench.bandwidth.bandwidth_bench import BandwidthBench
    from tutti.world.world import World

_SCHEMA = "tutti.bench.bandwidth/1"


@dataclass(frozen=True)
class Bandwidth(bench.RankFlags):
    """Measure the links between ranks and mark slow ones: tutti bench bandwidth --ranks 4

    Measures every pair of ranks one way and both ways, one pair at a time; one rank to all others;
    all to all; all_reduce as a ring and as a tree; on CUDA also copies between host and device.
    Each pair is compared with its class (same core, same or other NUMA node, NVLink, NVSwitch,
    PCIe, other host) and with the catalogue; the common end of slow pairs is named. Data is
    checked. Ctrl-C keeps what was measured.
    """

    sizes: str | None = None
    """Bytes per message: 16M or 64K,16M or 64K:16M:x16 (default 16M, on CUDA 256M)."""
    backend: Literal["shm", "gloo", "nccl"] | None = None
    """Backend of messages (default shm, which is gloo between hosts; on CUDA nccl)."""
    only: str | None = None
    """Comma-separated parts to measure: pairs, one_to_all, all_to_all, ring_vs_tree, copies
    (default: all that apply)."""
    together: bool = False
    """Measure disjoint pairs at the same time: faster, and shows which links are shared. A slow
    link may then be attributed to another pair."""
    pin: str = "own"
    """CPUs of ranks: own (each its share), none, or one CPU list per rank of a host, separated by
    slashes: 0/1/32-35."""
    budget: float = 0.2
    """Seconds for each kind of traffic, operation and size."""
    expect: str | None = None
    """Exit with 1 if results miss an expectation: catalogue, an earlier JSON of this bench, or a
    TOML file of thresholds."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Bandwidth, "tutti bench bandwidth", arguments)
    expectation = _check(options)
    if bench.is_rank():
        return _measure(options, expectation)
    gpus = 0 if options.device == "cpu" else visible_gpu_count()
    if options.ranks == 1 and not gpus:
        raise UsageError("--ranks 1: one rank on a CPU has no link to measure, use 2 or more")
    ranks = gpus * options.ranks_per_gpu if gpus and options.ranks is None else None
    return bench.start_ranks("bandwidth", arguments, options, ranks)


def _check(options: Bandwidth) -> Expectation | None:
    """Check the flags before ranks are started."""
    for part in (options.only or "pairs").split(","):
        if part not in PARTS:
            raise UsageError(f"--only: no part {part!r}: {did_you_mean(part, PARTS)}")
    if options.sizes is not None:
        bench.sizes_flag(options.sizes)
    if options.device != "auto":
        _check_backend(options.backend, options.device)
    if options.pin not in ("own", "none"):
        _parse_cpu_lists(options.pin)
    checked_seconds("--budget", options.budget, example=0.2)
    check_writable("--json", options.json)
    return bench.expect_flag(options.expect, "bandwidth", options.device)


def _check_backend(backend: str | None, device: str) -> None:
    if backend is not None and (backend == "nccl") != (device == "cuda"):
        supported = "CUDA" if backend == "nccl" else "CPU"
        raise UsageError(
            f"--backend {backend} communicates {supported} tensors only, and ranks are on "
            f"{device}: leave the flag out"
        )


def _parse_cpu_lists(text: str) -> list[tuple[int, ...]]:
    try:
        lists = [parse_cpu_list(part) for part in text.split("/")]
    except ValueError:
        lists = [()]
    if not all(lists):
        raise UsageError(
            f"--pin {text}: give own, none, or one CPU list per rank of a host: 0/1/2-3"
        )
    return lists


def _measure(options: Bandwidth, expectation: Expectation | None) -> int:
    from tutti.bench.bandwidth.bandwidth_bench import BandwidthBench, format_bandwidth
    from tutti.bench.bandwidth.link_verdicts import locate_rank
    from tutti.bench.host_setup import check_host_memory
    from tutti.bench.rank_control import RankControl
    from tutti.world.exchange import gather_json

    with bench.open_world(options) as world:
        default = "256M" if world.device.type == "cuda" else "16M"
        sizes = bench.sizes_flag(options.sizes or default)
        backend = options.backend or world.backend
        with usage_error_on_rank_0(world):
            _check_backend(backend, world.device.type)
            parts = _parts(options, world)
            if world.device.type == "cpu":
                check_host_memory(max(sizes), world)
        cpus = _pin(options.pin, world)
        ranks = bench.describe_ranks(world, cpus, options.pin != "none")
        locations = gather_json(locate_rank(world, cpus))
        control = RankControl()

        def progress(line: str) -> None:
            if world.is_first:
                print_line(f"tutti bench bandwidth: {line}", sys.stderr)

        settings = (sizes, options.budget, parts, progress, options.together)
        links = BandwidthBench(world, control, locations, backend, *settings)
        with control.stop_on_signals():
            files = bench.ResultFiles(_SCHEMA, options.json)
            if world.is_first:
                bench.print_ranks(world, ranks)
                if backend == "gloo" == world.backend:  # gloo is not the default
                    print_note(f"note: no shm: {world.reasons['backend']}")
                print_note(f"messages by {backend}; GB/s are 1e9 bytes per second")
                links.save = lambda: files.save(_results(links, ranks))
            links.run()
            results = _results(links, ranks)
            if world.is_first:
                width = terminal_width(sys.stdout)
                for line in format_bandwidth(links, width):
                    for part in wrap_line(line, width):
                        print_line(part)
                files.write(results)
                bench.print_wrong(links.wrong)
                if links.stopped:
                    print_note(f"stopped: {len(links.pairs)} pairs were measured")
    return bench.exit_code(world, _SCHEMA, results, expectation, links.stopped, links.wrong > 0)


def _parts(options: Bandwidth, world: "World") -> list[str]:
    """Return the parts of --only; by default all parts that apply to this world."""
    if options.only is not None:
        return options.only.split(",")
    on_gpu = world.device.type == "cuda"
    parts = [part for part in PARTS if (on_gpu if part == "copies" else world.size > 1)]
    if not parts:
        raise UsageError(
            "one rank on a CPU has no link to measure: start 2 or more, or leave the launcher out"
        )
    return parts


def _pin(how: str, world: "World") -> str:
    from tutti.bench.host_setup import pin, pin_to

    if how == "none":
        return world.cpus
    if how == "own":
        return pin(world)
    lists = _parse_cpu_lists(how)
    return pin_to(lists[world.local_rank % len(lists)])


def _results(links: "BandwidthBench", ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "classes": links.classes,
        "findings": [asdict(each) for each in links.findings],
        **{part: getattr(links, part) for part in PARTS},
        "skipped": links.skipped,
        "complete": links.complete,
        "together": links.concurrent,
        "timing": "p50 over passes; the receiver's clock, after a first window of messages",
        "places": links.locations,
        "world": bench.world_json(links.world, ranks),
    }
