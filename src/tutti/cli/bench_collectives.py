"""tutti bench collectives: compare backends, with the columns and formulas of nccl-tests."""

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from tutti.bench.collectives import BACKENDS
from tutti.bench.collectives.nccl_tests_table import CollectivesTable
from tutti.bench.expectations import Expectation
from tutti.cli import bench
from tutti.cli.flags import OutputFile
from tutti.cli.results import usage_error_on_rank_0
from tutti.measure.collective_bandwidth import OPERATIONS
from tutti.measure.terminal import print_note, terminal_width
from tutti.world.errors import UsageError, did_you_mean
from tutti.world.launch import LocalWorld
from tutti.world.rank_cases import Cases, start_cases

if TYPE_CHECKING:
    from tutti.bench.collectives.interleaved_sweep import Sweep


@dataclass(frozen=True)
class Collectives(bench.ExpectFlags):
    """Measure the collectives of several backends in one run: tutti bench collectives --ranks 2

    The backends are timed alternately. Columns and formulas are the same as in nccl-tests. The time
    of a call is its time on the slowest rank, and the table shows the median (p50) over calls. The
    ratio is the time of the first backend divided by the time of the row's backend. Ranks are
    pinned to CPUs, and results are checked bit by bit. Ctrl-C keeps the results so far.
    """

    ops: str = "all_reduce"
    """Comma-separated operations, or `all`."""
    sizes: str = "1K:64M:x4"
    """Message sizes in bytes: a list such as `4,1K,64K`, or a range such as `1K:64M:x4` (each size
    is 4 times the previous one) or `1K:16K:+1K` (each size is 1K more than the previous one). `1K`
    is 1024 bytes."""
    backends: str | None = None
    """Comma-separated backends (default: `gloo,shm` on the CPU, and `nccl,symmetric` on CUDA).
    `gloo`, `shm`, `nccl` and `mpi` use ordinary tensors. `symmetric` uses tensors in symmetric
    memory. `one-shot`, `two-shot` and `ring` are `symmetric` with a fixed algorithm. `staged`
    copies ordinary tensors through a buffer in symmetric memory. Ratios are relative to the first
    backend."""
    dtype: Literal[
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8"
    ] = "float32"
    """Type of the elements."""
    placement: Literal["native", "in", "out", "both"] = "native"
    """`in`: the result overwrites the input. `out`: the result is in another tensor. `native`: as
    in torch.distributed, where all_reduce, reduce and broadcast are in place and the other
    operations are out of place."""
    timing: Literal["back-to-back", "isolated", "both"] = "back-to-back"
    """`back-to-back`: consecutive calls without a pause, as in nccl-tests. `isolated`: a barrier
    before each call."""
    group: int = 1
    """Number of calls in one tutti.comm.group(). If the number is above 1, single calls and groups
    of calls are both measured, for each torch.distributed backend. The rows of groups have the time
    per call, and their ratio is relative to single calls of the same backend."""
    spread: bool = False
    """Also print min, p99 and cv (standard deviation / mean), as nccl-tests -I does. The files of
    --json and --csv always contain these values."""
    iterations: str = "auto"
    """Number of timed calls for each backend and size. `auto`: as many calls as --budget allows."""
    warmup: int = 20
    """Maximum number of untimed calls before the timed calls."""
    budget: float = 0.5
    """Seconds for each backend and size."""
    pin: bool = True
    """Pin every rank to its own CPUs."""
    csv: OutputFile | None = None
    """Also write the rows to this CSV file."""


def main(arguments: list[str]) -> int:
    options = bench.parse_flags(Collectives, "collectives", arguments)
    ops, sizes, backends = _check(options)
    expectation = bench.expect_flag(options, "collectives")
    if bench.is_rank():
        return _measure(options, ops, sizes, backends, expectation)
    if "mpi" in backends:
        from tutti.bench.collectives.backends import mpirun_command, run_mpirun

        command = [sys.executable, "-m", "tutti", "bench", "collectives", *arguments]
        ranks = bench.default_ranks(options)
        LocalWorld(command, ranks, options.device).check()
        return run_mpirun(mpirun_command(ranks, command), terminal_width())
    start = partial(bench.start_ranks, "collectives", arguments, options, largest=max(sizes))
    return start_cases(lambda env: start(env=env))


def _check(options: Collectives) -> tuple[list[str], list[int], list[str]]:
    """Check the flags before ranks are started. Return operations, sizes and backends."""
    ops = list(OPERATIONS) if options.ops == "all" else options.ops.split(",")
    for name in ops:
        if name not in OPERATIONS:
            raise UsageError(f"--ops has no operation {name!r}: {did_you_mean(name, OPERATIONS)}")
    backends = [] if options.backends is None else options.backends.split(",")
    for name in backends:
        if name not in BACKENDS:
            raise UsageError(f"--backends has no {name!r}: choose from {', '.join(BACKENDS)}")
        if backends.count(name) > 1:
            raise UsageError(f"--backends {options.backends} has {name} twice. Name it once.")
    iterations = options.iterations
    if iterations != "auto" and not (iterations.isdecimal() and int(iterations) > 0):
        raise UsageError(f"--iterations must be auto or a positive number, got {iterations}")
    if options.warmup < 0:
        raise UsageError(f"--warmup must be 0 or more, got {options.warmup}")
    if options.group < 1:
        raise UsageError(f"--group must be 1 (no groups) or more calls, got {options.group}")
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
    from tutti.bench.collectives.interleaved_sweep import Sweep
    from tutti.bench.rank_control import CoreLatency, check_host_memory

    timings = ("back-to-back", "isolated") if options.timing == "both" else (options.timing,)
    iterations = None if options.iterations == "auto" else int(options.iterations)
    settings = (options.budget, timings, iterations, options.warmup)
    with bench.open_session(options, "tutti.bench.collectives/1", options.pin) as session:
        world, session.csv = session.world, options.csv
        latency = CoreLatency(world, [row["cpus"] for row in session.ranks])
        groups = [
            group
            for op in ops
            for group in case_groups(op, sizes, DTYPES[options.dtype], world, options.placement)
        ]
        largest = max((case.bytes for group in groups for case in group), default=0)
        with usage_error_on_rank_0(world):
            check_host_memory(largest, world)
        default = ["nccl", "symmetric"] if world.device.type == "cuda" else ["gloo", "shm"]
        with open_backends(backend_names or default, world, largest) as (backends, missing):
            if not backends:
                reasons = "; ".join(f"{skip['backend']}: {skip['reason']}" for skip in missing)
                with usage_error_on_rank_0(world):
                    raise UsageError(f"--backends: {reasons}")
            if options.group > 1:
                backends = list(with_grouped(backends, options.group, world.device))
            sweep = Sweep(backends, session.control, world, *settings)
            sweep.skipped += missing
            cases = Cases.from_environment()

            def results() -> dict[str, Any]:
                return {
                    "rows": sweep.rows,
                    "backends": {backend.name: backend.about for backend in backends},
                    "skipped": sweep.skipped,
                    "failed": cases.failed,
                    "complete": sweep.complete,
                    "timing": "p50 over calls; the time of a call is its time on the slowest rank",
                    "world": session.world_json,
                    "round_trips": latency.rows,
                }

            planned = {**results(), "rows": sweep.planned_rows(groups)}
            session.check_planned_rows(planned, expectation)
            if world.is_first and not cases.crashed:
                session.print_ranks()
                for backend in backends:
                    if backend.about:
                        print_note(f"{backend.name}: {backend.about}")
                for skip in missing:
                    print_note(f"{skip['backend']} is skipped: {skip['reason']}")
                if str(latency):
                    print_note(f"cores: {latency}")
            table = CollectivesTable(options.spread)

            def report(measured: list[dict[str, Any]]) -> None:
                table.add(measured)
                session.save(results())

            sweep.run(groups, report if world.is_first else lambda measured: None, cases)
        latency.measure("after_ns")
        if world.is_first:
            if change := latency.change():
                print_note(f"note: {change}")
            session.write(results())
            bench.print_failed(cases)
            _print_end(sweep)
    wrong = bool(cases.crashed) or any(row["wrong"] for row in sweep.rows)
    return session.exit_code(results(), expectation, sweep.stopped, wrong)


def _print_end(sweep: "Sweep") -> None:
    for skipped in sweep.skipped:
        if "op" in skipped:
            placement = "in place" if skipped["placement"] == "in" else "out of place"
            name = f"{skipped['backend']} {skipped['op']} ({placement})"
            print_note(f"{name} is skipped: {skipped['reason']}")
    bench.print_wrong(sum(row["wrong"] for row in sweep.rows))
    if sweep.stopped:
        print_note(f"stopped: {len(sweep.rows)} rows were measured")
