"""tutti bench collectives: nccl-tests' columns and formulas, every backend side by side."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.bench.backend_names import BACKENDS
from tutti.bench.expect import Source
from tutti.bench.table import Table
from tutti.cli.bench_results import (
    ResultFiles,
    check_expectation,
    read_expectation,
    report_misses,
    sizes_flag,
)
from tutti.cli.flags import parse
from tutti.cli.results import check_writable, usage_error_on_rank_0
from tutti.machine.gpus import visible_gpu_count
from tutti.measure.bus_bandwidth import OPERATIONS, Operation
from tutti.measure.terminal import print_note, terminal_width
from tutti.world.errors import UsageError, checked_seconds, did_you_mean
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.bench.case import Case, Contender
    from tutti.bench.round_trips import RoundTrips
    from tutti.bench.sweep import Plan, Sweep
    from tutti.world.world import World

# Between Ctrl-C and SIGKILL a round is finished and the files are written.
_GRACE_SECONDS = 30.0
_INTERRUPTED = 130
_SCHEMA = "tutti.bench.collectives/1"


@dataclass(frozen=True)
class Collectives:
    """Measure collectives, all backends in turns in one run: tutti bench collectives --ranks 2

    Columns and formulas are those of nccl-tests; time is the p50 over calls, each as slow as its
    slowest rank. Ranks are pinned, results are checked to the bit, and ratio is the first
    backend's time divided by this one's. Ctrl-C leaves what was measured.
    """

    ops: str = "all_reduce"
    """Operations with commas between them, or all."""
    sizes: str = "1K:64M:x4"
    """Bytes: 4,1K,64K or a range 1K:64M:x4 (times 4) or 1K:16K:+1K. K, M, G are binary."""
    backends: str | None = None
    """gloo, shm, symmetric (the same on symmetric
    tensors), one-shot, two-shot, ring (by name, on symmetric tensors), staged (through a
    symmetric buffer), mpi, nccl. Ratios are against the first. Default: gloo,shm, and on CUDA
    nccl,symmetric."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """How many local ranks to start, unless a launcher already did (default: one per GPU, or 2)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors are."""
    ranks_per_gpu: int = 1
    """How many ranks may share one GPU."""
    dtype: Literal[
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8"
    ] = "float32"
    """Type of the elements."""
    placement: Literal["native", "in", "out", "both"] = "native"
    """In place or from one tensor into another; native is what torch.distributed has."""
    timing: Literal["back-to-back", "isolated", "both"] = "back-to-back"
    """Calls one after the other as nccl-tests does, or ranks meet before each."""
    group: int = 1
    """Beside each backend of torch's, this many calls in one comm.group(): what grouping saves.
    The time is that of one call, and ratio is against the same backend's single calls."""
    spread: bool = False
    """Show min, p99 and cv in the table, too, as nccl-tests -I does; files always have them."""
    iterations: str = "auto"
    """Timed calls of each backend and size; auto is what --budget allows."""
    warmup: int = 20
    """Untimed calls first, at most."""
    budget: float = 0.5
    """Seconds for each backend and size."""
    pin: bool = True
    """Pin every rank to CPUs of its own."""
    expect: str | None = None
    """Check, and exit with 1 where something is missed: catalogue, an earlier JSON of this bench,
    or a TOML file of thresholds."""
    json: Path | None = None
    """Write rows, environment and command to this file, too."""
    csv: Path | None = None
    """Write the rows to this file as CSV, too."""
    save_paths: bool = False
    """Keep what was fastest at which size on this machine: tutti.comm chooses by it where a group
    has several paths (all_reduce on CUDA), and comm.explain tells it everywhere."""
    start_timeout: float | None = None
    """Seconds for all ranks to arrive (default 300)."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Collectives, "tutti bench collectives", arguments)
    operations, sizes, backends = _check(options)
    source = read_expectation(options.expect, "collectives", options.device)
    if identify(os.environ).launcher != "python":
        return _measure(options, operations, sizes, backends, source)
    command = [sys.executable, "-m", "tutti", "bench", "collectives", *arguments]
    ranks = _ranks(options)
    if "mpi" in backends:
        from tutti.bench.mpi import mpirun_command, run_job

        LocalWorld(command, ranks, options.device).check()
        return run_job(mpirun_command(ranks, command), terminal_width(sys.stdout))
    return LocalWorld(
        command=command,
        ranks=ranks,
        device=options.device,
        ranks_per_gpu=options.ranks_per_gpu,
        show="first",
        grace=_GRACE_SECONDS,
        reported_codes=(1, 2),
    ).run()


def _measure(
    options: Collectives,
    operations: list[Operation],
    sizes: list[int],
    backends: list[str],
    source: Source | None,
) -> int:
    from tutti.bench.contenders import contenders
    from tutti.bench.control import Control
    from tutti.bench.grouped_calls import with_groups
    from tutti.bench.pinning import pin
    from tutti.bench.room import check_room
    from tutti.bench.round_trips import RoundTrips
    from tutti.bench.sweep import Sweep
    from tutti.world.exchange import gather_json
    from tutti.world.world import init

    with init(
        device=options.device,
        ranks_per_gpu=options.ranks_per_gpu if options.ranks_per_gpu > 1 else None,
        start_timeout=options.start_timeout,
    ) as world:
        cpus = pin(world) if options.pin else world.cpus
        rows = gather_json({**world.row(), "cpus": cpus, "pinned": options.pin})
        trips = RoundTrips(world, [row["cpus"] for row in rows])
        lines = _lines(operations, sizes, options, world)
        largest = max((case.bytes for line in lines for case in line), default=0)
        with usage_error_on_rank_0(world):
            check_room(largest, world)
        names, control = backends or _default_backends(world), Control()
        files = ResultFiles(_SCHEMA, options.json, options.csv)
        with control.stop_on_signals():
            with contenders(names, world, largest) as (found, missing):
                if not found:
                    reasons = "; ".join(f"{each['backend']}: {each['reason']}" for each in missing)
                    with usage_error_on_rank_0(world):
                        raise UsageError(f"--backends: {reasons}")
                if options.group > 1:
                    found = with_groups(found, options.group, world.device)
                sweep = Sweep(found, _plan(options), control, world.device, world.nodes == 1)
                sweep.skipped += missing
                with usage_error_on_rank_0(world):
                    planned = _results(sweep, world, rows, trips) | {"rows": sweep.planned(lines)}
                    check_expectation(_SCHEMA, planned, source)
                if world.is_first:
                    _print_head(world, rows, options, found, missing)
                    if str(trips):
                        print_note(f"cores: {trips}")
                placements = {each[0].operation.name: [c.placement for c in each] for each in lines}
                table = Table(placements, len(_timings(options)), spread=options.spread)

                def report(measured: list[dict[str, Any]]) -> None:
                    table.add(measured)
                    files.update(_results(sweep, world, rows, trips))

                sweep.run(lines, report if world.is_first else lambda measured: None)
            trips.again()
            results = _results(sweep, world, rows, trips)
            if world.is_first:
                if moved := trips.moved():
                    print_note(f"note: {moved}")
                files.write(results)
                _conclude(sweep, options, world)
    if sweep.stopped:
        return _INTERRUPTED
    wrong = any(row["wrong"] for row in sweep.rows)
    return int((world.is_first and report_misses(_SCHEMA, results, source)) or wrong)


def _plan(options: Collectives) -> "Plan":
    from tutti.bench.sweep import Plan

    iterations = None if options.iterations == "auto" else int(options.iterations)
    return Plan(_timings(options), iterations, options.warmup, options.budget)


def _timings(options: Collectives) -> tuple[str, ...]:
    return ("back-to-back", "isolated") if options.timing == "both" else (options.timing,)


def _lines(
    operations: Sequence[Operation], sizes: Sequence[int], options: Collectives, world: "World"
) -> "list[list[Case]]":
    """For each operation and size, the cases that differ in placement only: a line of the table."""
    from tutti.bench.case import Case
    from tutti.bench.payload import DTYPES

    dtype = DTYPES[options.dtype]
    lines = []
    for operation in operations:
        counts = [operation.count(size, dtype.itemsize, world.size) for size in sizes]
        wanted = {"native": (operation.native,), "both": ("out", "in")}.get(
            options.placement, (options.placement,)
        )
        having = [placement for placement in wanted if placement in operation.placements]
        for count in dict.fromkeys(counts if having else ()):  # small sizes may be one count
            lines.append(
                [
                    Case(operation, count, dtype, placement, world.rank, world.size)
                    for placement in having
                ]
            )
    return lines


def _check(options: Collectives) -> tuple[list[Operation], list[int], list[str]]:
    """Refuse what cannot be measured, before anything is started."""
    names = list(OPERATIONS) if options.ops == "all" else options.ops.split(",")
    for name in names:
        if name not in OPERATIONS:
            raise UsageError(f"--ops: no operation {name!r}: {did_you_mean(name, OPERATIONS)}")
    backends = [] if options.backends is None else options.backends.split(",")
    for name in backends:
        if name not in BACKENDS:
            raise UsageError(f"--backends: no backend {name!r}: there are {', '.join(BACKENDS)}")
        if backends.count(name) > 1:
            raise UsageError(f"--backends {options.backends}: name {name} once")
    if options.iterations != "auto" and not (
        options.iterations.isdecimal() and int(options.iterations) > 0
    ):
        raise UsageError(f"--iterations {options.iterations}: auto, or a number of calls above 0")
    if options.warmup < 0:
        raise UsageError(f"--warmup {options.warmup}: use 0 or more")
    if options.group < 1:
        raise UsageError(f"--group {options.group}: use 1 (no groups) or more calls, such as 16")
    checked_seconds("--budget", options.budget, example=0.5)
    check_writable("--json", options.json)
    check_writable("--csv", options.csv)
    return [OPERATIONS[name] for name in names], sizes_flag(options.sizes), backends


def _ranks(options: Collectives) -> int:
    if options.ranks is not None:
        return options.ranks
    gpus = 0 if options.device == "cpu" else visible_gpu_count()
    return max(2, gpus * options.ranks_per_gpu)


def _default_backends(world: "World") -> list[str]:
    return ["nccl", "symmetric"] if world.device.type == "cuda" else ["gloo", "shm"]


def _print_head(
    world: "World",
    rows: list[dict[str, Any]],
    options: Collectives,
    found: "list[Contender]",
    missing: list[dict[str, str]],
) -> None:
    for row in rows:
        bound = "pinned to CPU" if options.pin else "on CPU"
        threads = f"{row['threads']} thread{'s' * (row['threads'] != 1)}"
        where = f"{row['host']}, {row['device']}, {bound} {row['cpus']}, {threads}"
        print_note(f"rank {row['rank']}: {where}")
    if world.sharing_note:
        print_note(f"note: {world.sharing_note}")
    for contender in found:
        if contender.about:
            print_note(f"{contender.name}: {contender.about}")
    for each in missing:
        print_note(f"{each['backend']} is left out: {each['reason']}")


def _results(
    sweep: "Sweep", world: "World", rows: list[dict[str, Any]], trips: "RoundTrips"
) -> dict[str, Any]:
    return {
        "rows": sweep.rows,
        "backends": sweep.about,
        "skipped": sweep.skipped,
        "complete": sweep.complete,
        "timing": "p50 over calls, each as slow as its slowest rank",
        "world": {"size": world.size, "ranks": rows, "sharing_note": world.sharing_note},
        "round_trips": trips.rows(),
    }


def _conclude(sweep: "Sweep", options: Collectives, world: "World") -> None:
    for each in sweep.skipped:
        if "op" in each:
            what = f"{each['backend']} {each['op']} ({each['placement']} of place)"
            print_note(f"{what.replace('in of', 'in')} is left out: {each['reason']}")
    if options.save_paths:
        from tutti.bench.path_table import path_table
        from tutti.comm import path_selection

        table = path_table(sweep.rows, world.device.type, world.size, options.dtype)
        print_note(f"paths are kept in {path_selection.save(table)}")
    wrong = sum(row["wrong"] for row in sweep.rows)
    print_note(f"Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    if sweep.stopped:
        print_note(f"stopped: {len(sweep.rows)} rows were measured")
