"""tutti bench collectives: the columns and formulas of nccl-tests, all backends side by side."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tutti.bench.collectives import BACKENDS
from tutti.bench.collectives.nccl_tests_table import CollectivesTable
from tutti.bench.expectations import Expectation
from tutti.cli import bench
from tutti.cli.flags import parse
from tutti.cli.results import check_writable, usage_error_on_rank_0
from tutti.measure.message_cost import OPERATIONS
from tutti.measure.terminal import print_note, terminal_width
from tutti.world.errors import UsageError, checked_seconds, did_you_mean
from tutti.world.launch import LocalWorld

if TYPE_CHECKING:
    from tutti.bench.collectives.interleaved_sweep import Sweep
    from tutti.bench.host_setup import CoreLatency
    from tutti.world.world import World

_SCHEMA = "tutti.bench.collectives/1"


@dataclass(frozen=True)
class Collectives(bench.RankFlags):
    """Measure collectives, all backends in turns in one run: tutti bench collectives --ranks 2

    Columns and formulas are those of nccl-tests; time is the p50 over calls, each on its slowest
    rank. Ranks are pinned, results are checked bit by bit, and ratio is the first backend's time
    divided by this backend's time. Ctrl-C keeps what was measured.
    """

    ops: str = "all_reduce"
    """Comma-separated operations, or all."""
    sizes: str = "1K:64M:x4"
    """Bytes: 4,1K,64K or a range 1K:64M:x4 (times 4) or 1K:16K:+1K. K, M, G are binary."""
    backends: str | None = None
    """gloo, shm, symmetric (shm on symmetric tensors; on CUDA tutti's own kernels), one-shot,
    two-shot, ring (algorithms on symmetric tensors), staged (through a symmetric buffer), mpi,
    nccl. Ratios are against the first. Default: gloo,shm, on CUDA nccl,symmetric."""
    dtype: Literal[
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8"
    ] = "float32"
    """Type of the elements."""
    placement: Literal["native", "in", "out", "both"] = "native"
    """In place or out of place; native is the form that torch.distributed offers."""
    timing: Literal["back-to-back", "isolated", "both"] = "back-to-back"
    """Consecutive calls as in nccl-tests, or with a barrier before each call."""
    group: int = 1
    """For each torch.distributed backend, also measure this many calls in one comm.group(). The
    time is per call, and ratio is against single calls of the same backend."""
    spread: bool = False
    """Also show min, p99 and cv, as nccl-tests -I does; files always have them."""
    iterations: str = "auto"
    """Timed calls of each backend and size; auto: as many as --budget allows."""
    warmup: int = 20
    """Maximum number of untimed calls first."""
    budget: float = 0.5
    """Seconds for each backend and size."""
    pin: bool = True
    """Pin every rank to CPUs of its own."""
    expect: str | None = None
    """Exit with 1 if results miss an expectation: catalogue, an earlier JSON of this bench, or a
    TOML file of thresholds."""
    csv: Path | None = None
    """Also write the rows to this file as CSV."""
    save_paths: bool = False
    """Save the fastest backend per size for this machine: tutti.comm chooses by it if a group has
    several paths (all_reduce on CUDA), and comm.explain shows it."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Collectives, "tutti bench collectives", arguments)
    ops, sizes, backends = _check(options)
    expectation = bench.expect_flag(options.expect, "collectives", options.device)
    if bench.is_rank():
        return _measure(options, ops, sizes, backends, expectation)
    if "mpi" in backends:
        from tutti.bench.collectives.mpi_backend import mpirun_command, run_mpirun

        command = [sys.executable, "-m", "tutti", "bench", "collectives", *arguments]
        ranks = bench.default_ranks(options)
        LocalWorld(command, ranks, options.device).check()
        return run_mpirun(mpirun_command(ranks, command), terminal_width(sys.stdout))
    return bench.start_ranks("collectives", arguments, options)


def _check(options: Collectives) -> tuple[list[str], list[int], list[str]]:
    """Check the flags before ranks are started."""
    ops = list(OPERATIONS) if options.ops == "all" else options.ops.split(",")
    for name in ops:
        if name not in OPERATIONS:
            raise UsageError(f"--ops: no operation {name!r}: {did_you_mean(name, OPERATIONS)}")
    backends = [] if options.backends is None else options.backends.split(",")
    for name in backends:
        if name not in BACKENDS:
            raise UsageError(f"--backends: no backend {name!r}: there are {', '.join(BACKENDS)}")
        if backends.count(name) > 1:
            raise UsageError(f"--backends {options.backends}: {name} is named twice")
    if options.iterations != "auto" and not (
        options.iterations.isdecimal() and int(options.iterations) > 0
    ):
        raise UsageError(f"--iterations {options.iterations}: use auto, or a number above 0")
    if options.warmup < 0:
        raise UsageError(f"--warmup {options.warmup}: use 0 or more")
    if options.group < 1:
        raise UsageError(f"--group {options.group}: use 1 (no groups) or more calls, such as 16")
    checked_seconds("--budget", options.budget, example=0.5)
    check_writable("--json", options.json)
    check_writable("--csv", options.csv)
    return ops, bench.sizes_flag(options.sizes), backends


def _measure(
    options: Collectives,
    ops: list[str],
    sizes: list[int],
    backend_names: list[str],
    expectation: Expectation | None,
) -> int:
    from tutti.bench.collectives.backends import open_backends, with_grouped
    from tutti.bench.collectives.cases import DTYPES, case_groups
    from tutti.bench.collectives.interleaved_sweep import Sweep, SweepSettings
    from tutti.bench.host_setup import CoreLatency, check_host_memory
    from tutti.bench.rank_control import RankControl

    timings = ("back-to-back", "isolated") if options.timing == "both" else (options.timing,)
    iterations = None if options.iterations == "auto" else int(options.iterations)
    settings = SweepSettings(timings, iterations, options.warmup, options.budget)
    with bench.open_world(options) as world:
        ranks = bench.pin_and_describe_ranks(world, options.pin)
        latency = CoreLatency(world, [row["cpus"] for row in ranks])
        groups = [
            group
            for op in ops
            for group in case_groups(op, sizes, DTYPES[options.dtype], world, options.placement)
        ]
        largest = max((case.bytes for group in groups for case in group), default=0)
        with usage_error_on_rank_0(world):
            check_host_memory(largest, world)
        default = ["nccl", "symmetric"] if world.device.type == "cuda" else ["gloo", "shm"]
        control = RankControl()
        files = bench.ResultFiles(_SCHEMA, options.json, options.csv)
        with control.stop_on_signals():
            with open_backends(backend_names or default, world, largest) as (backends, missing):
                if not backends:
                    reasons = "; ".join(f"{each['backend']}: {each['reason']}" for each in missing)
                    with usage_error_on_rank_0(world):
                        raise UsageError(f"--backends: {reasons}")
                if options.group > 1:
                    backends = list(with_grouped(backends, options.group, world.device))
                sweep = Sweep(backends, settings, control, world)
                sweep.skipped += missing

                def results() -> dict[str, Any]:
                    return {
                        "rows": sweep.rows,
                        "backends": {each.name: each.about for each in backends},
                        "skipped": sweep.skipped,
                        "complete": sweep.complete,
                        "timing": "p50 over calls, each as slow as its slowest rank",
                        "world": bench.world_json(world, ranks),
                        "round_trips": latency.rows,
                    }

                with usage_error_on_rank_0(world):
                    planned = {**results(), "rows": sweep.planned_rows(groups)}
                    bench.check_planned_rows(_SCHEMA, planned, expectation)
                if world.is_first:
                    _print_head(world, ranks, sweep, latency)
                placements = {
                    group[0].operation.name: [case.placement for case in group] for group in groups
                }
                table = CollectivesTable(placements, len(timings), spread=options.spread)

                def report(measured: list[dict[str, Any]]) -> None:
                    table.add(measured)
                    files.save(results())

                sweep.run(groups, report if world.is_first else lambda measured: None)
            latency.measure_again()
            if world.is_first:
                if change := latency.change():
                    print_note(f"note: {change}")
                files.write(results())
                _print_end(sweep, options, world)
    wrong = any(row["wrong"] for row in sweep.rows)
    return bench.exit_code(world, _SCHEMA, results(), expectation, sweep.stopped, wrong)


def _print_head(
    world: "World", ranks: list[dict[str, Any]], sweep: "Sweep", latency: "CoreLatency"
) -> None:
    bench.print_ranks(world, ranks)
    for backend in sweep.backends:
        if backend.about:
            print_note(f"{backend.name}: {backend.about}")
    for each in sweep.skipped:
        print_note(f"{each['backend']} is skipped: {each['reason']}")
    if str(latency):
        print_note(f"cores: {latency}")


def _print_end(sweep: "Sweep", options: Collectives, world: "World") -> None:
    for each in sweep.skipped:
        if "op" in each:
            placement = "in place" if each["placement"] == "in" else "out of place"
            what = f"{each['backend']} {each['op']} ({placement})"
            print_note(f"{what} is skipped: {each['reason']}")
    if options.save_paths:
        from tutti.bench.collectives.path_tuning import path_measurements
        from tutti.comm.path_selection import fastest, save

        measured = path_measurements(sweep.rows, world.device.type)
        table = fastest(measured, world.size, options.dtype)
        print_note(f"paths are saved in {save(table)}")
    bench.print_wrong(sum(row["wrong"] for row in sweep.rows))
    if sweep.stopped:
        print_note(f"stopped: {len(sweep.rows)} rows were measured")
