"""tutti bench bandwidth: measure links between ranks and host-device copies; find slow links."""

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from tutti.bench.bandwidth import PARTS
from tutti.bench.expectations import Expectation
from tutti.cli import bench
from tutti.cli.results import usage_error_on_rank_0
from tutti.machine.cpu_numa import allowed_cpus, format_cpu_list, parse_cpu_list
from tutti.machine.gpus import visible_gpu_count
from tutti.measure.terminal import print_line, print_note, terminal_width, wrap_line
from tutti.world.errors import UsageError, did_you_mean
from tutti.world.rank_cases import Cases, start_cases

if TYPE_CHECKING:
    from tutti.world.world import World


@dataclass(frozen=True)
class Bandwidth(bench.ExpectFlags):
    """Measure the links between ranks and mark slow links: tutti bench bandwidth --ranks 4

    Measures messages between every pair of ranks, in one direction and in both directions, one pair
    at a time. Then measures messages from one rank to all others, all_to_all, all_reduce as a ring
    and as a tree, and on CUDA, copies between host and device. Each pair is compared with the other
    pairs of the same link class (same core, same NUMA node, other NUMA node, NVLink, NVSwitch,
    PCIe, other host) and with published bandwidths. If all slow pairs have a device in common, the
    output names the device. Received data is checked. Ctrl-C keeps the results so far.
    """

    sizes: str | None = None
    """Message sizes in bytes: one size such as `16M`, a list such as `64K,16M`, or a range such as
    `64K:16M:x16`, in which each size is 16 times the previous one (default: 16M, on CUDA 256M)."""
    backend: Literal["shm", "gloo", "nccl"] | None = None
    """Backend that sends the messages (default: `nccl` on CUDA; on the CPU `shm`, or `gloo` between
    hosts)."""
    only: str | None = None
    """Comma-separated parts to measure: `pairs`, `one_to_all`, `all_to_all`, `ring_vs_tree`,
    `copies` (default: all parts that this world can measure)."""
    together: bool = False
    """Measure pairs without a common rank at the same time. This is faster and shows which pairs
    share a link, but a slow link may also slow down other pairs."""
    pin: str = "own"
    """CPUs to which ranks are pinned: `own` (the CPUs of a host are divided among its ranks),
    `none` (no pinning), or one CPU list per rank of a host, separated by slashes, such as
    `0/1/32-35`."""
    budget: float = 0.2
    """Seconds for each measurement. A measurement is one pair in one or both directions, or one
    collective, with one message size."""


def main(arguments: list[str]) -> int:
    options = bench.parse_flags(Bandwidth, "bandwidth", arguments)
    _check(options)
    expectation = bench.expect_flag(options, "bandwidth")
    if bench.is_rank():
        return _measure(options, expectation)
    gpus = 0 if options.device == "cpu" else visible_gpu_count()
    if options.ranks == 1 and not gpus:
        raise UsageError(
            "--ranks 1: one rank on a CPU has no link to measure. Use 2 or more ranks."
        )
    ranks = gpus * options.ranks_per_gpu if gpus and options.ranks is None else None
    largest = max(bench.sizes_flag(options.sizes or "16M"))
    start = partial(bench.start_ranks, "bandwidth", arguments, options, ranks, largest=largest)
    return start_cases(lambda env: start(env=env))


def _check(options: Bandwidth) -> None:
    """Check the flags before ranks are started."""
    for part in (options.only or "pairs").split(","):
        if part not in PARTS:
            raise UsageError(f"--only has no part {part!r}: {did_you_mean(part, PARTS)}")
    if options.sizes is not None:
        bench.sizes_flag(options.sizes)
    if options.device != "auto":
        _check_backend(options.backend, options.device)
    if options.pin not in ("own", "none"):
        try:
            valid = all(parse_cpu_list(text) for text in options.pin.split("/"))
        except ValueError:
            valid = False
        if not valid:
            raise UsageError(
                "--pin must be own, none, or one CPU list per rank such as 0/1/2-3, got "
                f"{options.pin}"
            )
        numbers = {cpu for text in options.pin.split("/") for cpu in parse_cpu_list(text)}
        if not bench.is_rank() and (missing := sorted(numbers - {*allowed_cpus()})):
            allowed = format_cpu_list(allowed_cpus())
            raise UsageError(
                f"--pin {options.pin}: this process may not use CPU {missing[0]}. The allowed CPUs "
                f"are {allowed}."
            )


def _check_backend(backend: str | None, device: str) -> None:
    if backend is not None and (backend == "nccl") != (device == "cuda"):
        supported = "CUDA" if backend == "nccl" else "CPU"
        limit = f"--backend {backend} communicates {supported} tensors only"
        raise UsageError(f"{limit}, but the device is {device}. Omit --backend.")


def _measure(options: Bandwidth, expectation: Expectation | None) -> int:
    from tutti.bench.bandwidth.bandwidth_bench import BandwidthBench, format_bandwidth
    from tutti.bench.bandwidth.link_verdicts import locate_rank
    from tutti.bench.rank_control import check_host_memory
    from tutti.world.exchange import gather_json

    with bench.open_session(options, "tutti.bench.bandwidth/1", options.pin) as session:
        world = session.world
        default = "256M" if world.device.type == "cuda" else "16M"
        sizes = bench.sizes_flag(options.sizes or default)
        backend = options.backend or world.backend
        with usage_error_on_rank_0(world):
            _check_backend(backend, world.device.type)
            parts = _parts(options, world)
            if world.device.type == "cpu":
                check_host_memory(max(sizes), world)
        locations = gather_json(locate_rank(world, session.ranks[world.rank]["cpus"]))

        def progress(line: str) -> None:
            if world.is_first:
                print_line(f"tutti bench bandwidth: {line}", sys.stderr)

        def results() -> dict[str, Any]:
            return {
                "classes": links.classes,
                "findings": [finding._asdict() for finding in links.findings],
                **{part: getattr(links, part) for part in PARTS},
                "skipped": links.skipped,
                "complete": links.complete,
                "failed": cases.failed,
                "together": links.concurrent,
                "timing": "p50 over passes, measured by the receiver after a first untimed window",
                "places": links.locations,
                "world": session.world_json,
            }

        settings = (sizes, options.budget, parts, progress, options.together)
        cases = Cases.from_environment()
        links = BandwidthBench(world, session.control, locations, backend, *settings, cases=cases)
        links.save = lambda: session.save(results())
        if world.is_first and not cases.crashed:
            session.print_ranks()
            if backend == "gloo" == world.backend:  # the default is shm, but it is not available
                print_note(f"note: gloo is used instead of shm: {world.reasons['backend']}")
            print_note(f"messages are sent with {backend}; 1 GB/s is 1e9 bytes per second")

        def print_results() -> None:
            width = terminal_width()
            for line in format_bandwidth(links, width):
                for part in wrap_line(line, width):
                    print_line(part)

        try:
            links.run()
        except Exception:
            # After a crash, torchrun, srun and mpirun do not start new ranks for the remaining
            # cases. Therefore print the results so far.
            if world.is_first and not cases.restarts:
                print_results()
                session.save(results())
            raise
        if world.is_first:
            print_results()
            session.write(results())
            bench.print_failed(cases)
            bench.print_wrong(links.wrong)
            if links.stopped:
                print_note(f"stopped: {len(links.pairs)} pairs were measured")
    wrong = links.wrong > 0 or bool(cases.crashed)
    return session.exit_code(results(), expectation, links.stopped, wrong)


def _parts(options: Bandwidth, world: "World") -> list[str]:
    """Return the parts of --only, or by default all parts that this world can measure."""
    if options.only is not None:
        return options.only.split(",")
    on_gpu = world.device.type == "cuda"
    parts = [part for part in PARTS if (on_gpu if part == "copies" else world.size > 1)]
    if not parts:
        raise UsageError("one rank on a CPU has no link to measure. Start 2 or more ranks.")
    return parts
