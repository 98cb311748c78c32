"""tutti bench tune: measure where one path overtakes another, and keep it for tutti.comm."""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.cli.bench_results import ResultFiles, sizes_flag
from tutti.cli.flags import parse
from tutti.cli.results import check_writable
from tutti.machine.gpus import visible_gpu_count
from tutti.measure.terminal import print_line, print_note
from tutti.measure.units import format_size
from tutti.world.errors import checked_seconds
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.bench.sweep import Sweep
    from tutti.comm.path_selection import Table
    from tutti.world.world import World

_GRACE_SECONDS = 30.0
_INTERRUPTED = 130


@dataclass(frozen=True)
class Tune:
    """Measure which path is fastest at which size, and write the table: tutti bench tune

    tutti.comm reads it: where a group has several paths (today all_reduce on CUDA, by NCCL or by
    one-shot kernels on symmetric memory), the table decides by size. It is kept for machines like
    this one and this number of ranks. Ctrl-C writes no table.
    """

    sizes: str = "1K:8M:x2"
    """Bytes: 1K,64K or a range 1K:8M:x2. K, M, G are binary."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """How many local ranks to start, unless a launcher already did (default: one per GPU, or 2)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors are."""
    ranks_per_gpu: int = 1
    """How many ranks may share one GPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the elements."""
    budget: float = 0.5
    """Seconds for each path and size."""
    dry_run: bool = False
    """Show the table, and write nothing."""
    pin: bool = True
    """Pin every rank to CPUs of its own."""
    json: Path | None = None
    """Write rows, table, environment and command to this file, too."""
    start_timeout: float | None = None
    """Seconds for all ranks to arrive (default 300)."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Tune, "tutti bench tune", arguments)
    sizes = sizes_flag(options.sizes)
    checked_seconds("--budget", options.budget, example=0.5)
    check_writable("--json", options.json)
    if identify(os.environ).launcher != "python":
        return _tune(options, sizes)
    gpus = 0 if options.device == "cpu" else visible_gpu_count()
    return LocalWorld(
        command=[sys.executable, "-m", "tutti", "bench", "tune", *arguments],
        ranks=max(2, gpus * options.ranks_per_gpu) if options.ranks is None else options.ranks,
        device=options.device,
        ranks_per_gpu=options.ranks_per_gpu,
        show="first",
        grace=_GRACE_SECONDS,
    ).run()


def _tune(options: Tune, sizes: list[int]) -> int:
    from tutti.bench.pinning import pin
    from tutti.comm.operation import comm_group_of
    from tutti.comm.path_selection import available_paths
    from tutti.world.world import init

    with init(
        device=options.device,
        ranks_per_gpu=options.ranks_per_gpu if options.ranks_per_gpu > 1 else None,
        start_timeout=options.start_timeout,
    ) as world:
        if options.pin:
            pin(world)
        paths = available_paths(comm_group_of(None), world.device.type)
        if len(paths) == 1:
            return _nothing_to_choose(options, world, paths[0])
        sweep = _measured(options, sizes, world, paths)
        if sweep.stopped:
            if world.is_first:
                print_note("stopped: no table was written")
            return _INTERRUPTED
        if world.is_first:
            _conclude(options, world, paths, sweep)
        return int(any(row["wrong"] for row in sweep.rows))


def _nothing_to_choose(options: Tune, world: "World", path: str) -> int:
    device = world.device.type
    why = f"on {device} a group of {world.size} has one path, that of its backend: {path}"
    if world.is_first:
        print_note(f"there is nothing to choose: {why}. No table was written, none is needed.")
        if device == "cpu":
            print_note("Which backend is fastest: tutti bench collectives --backends gloo,shm")
        nothing: dict[str, Any] = {"rows": [], "table": None, "written": None, "complete": True}
        _files(options).write({**nothing, "reason": why, **_about(world)})
    return 0


def _measured(options: Tune, sizes: list[int], world: "World", paths: tuple[str, ...]) -> "Sweep":
    from tutti.bench.case import Case
    from tutti.bench.contenders import contenders
    from tutti.bench.control import Control
    from tutti.bench.path_table import PATH_OF
    from tutti.bench.payload import DTYPES
    from tutti.bench.sweep import Plan, Sweep
    from tutti.measure.bus_bandwidth import OPERATIONS

    operation, dtype = OPERATIONS["all_reduce"], DTYPES[options.dtype]
    counts = dict.fromkeys(operation.count(size, dtype.itemsize, world.size) for size in sizes)
    lines = [
        [Case(operation, count, dtype, operation.native, world.rank, world.size)]
        for count in counts
    ]
    names = [name for name, path in PATH_OF.items() if path in paths]
    largest = max(case.bytes for line in lines for case in line)
    control = Control()
    with control.stop_on_signals(), contenders(names, world, largest) as (found, missing):
        sweep = Sweep(found, Plan(budget=options.budget), control, world.device, world.nodes == 1)
        sweep.skipped += missing
        files = _files(options)

        def report(rows: list[dict[str, Any]]) -> None:
            _print_line_of(rows)
            files.update({**_results(sweep, paths), **_about(world)})

        if world.is_first:
            if world.sharing_note:
                print_note(f"note: {world.sharing_note}")
            print_note(f"all_reduce, {world.size} ranks, {options.dtype}, p50 in us")
        sweep.run(lines, report if world.is_first else lambda rows: None)
    return sweep


def _print_line_of(rows: list[dict[str, Any]]) -> None:
    from tutti.bench.path_table import PATH_OF

    if rows:
        cells = [f"{PATH_OF[row['backend']]} {row['time_us']['p50']:.2f}" for row in rows]
        print_line(f"{format_size(rows[0]['bytes']):>8}  {', '.join(cells)}")


def _conclude(options: Tune, world: "World", paths: tuple[str, ...], sweep: "Sweep") -> None:
    from tutti.bench.path_table import measurements, settled
    from tutti.comm.path_selection import fastest, save

    device = world.device.type
    chosen = settled(measurements(sweep.rows, device))
    table = fastest(chosen, world.size, options.dtype)
    for line in describe(table):
        print_note(line)
    written = None
    if options.dry_run:
        print_note("--dry-run: nothing was written")
    elif table.rows:
        written = save(table)
        print_note(f"written to {written}")
        print_note(
            f"worlds of {world.size} ranks on machines like this one ({table.machine}) go by it "
            "from their next start; delete the file, and the defaults hold again"
        )
    content = {"rows": [asdict(row) for row in table.rows], "machine": table.machine}
    made = {"table": content, "written": None if written is None else str(written)}
    _files(options).write({**_results(sweep, paths), **made, **_about(world)})


def describe(table: "Table") -> list[str]:
    """A table in words, a line for each range."""
    lines = []
    for row in table.rows:
        end = "on" if row.to_bytes is None else f"to {format_size(row.to_bytes)}"
        lines.append(f"{row.op} from {format_size(row.from_bytes)} {end}: {row.path}")
    return lines


def _files(options: Tune) -> ResultFiles:
    return ResultFiles("tutti.bench.tune/1", options.json)


def _results(sweep: "Sweep", paths: tuple[str, ...]) -> dict[str, Any]:
    """What is known before there is a table."""
    return {
        "rows": sweep.rows,
        "paths": list(paths),
        "table": None,
        "written": None,
        "skipped": sweep.skipped,
        "complete": sweep.complete,
    }


def _about(world: "World") -> dict[str, Any]:
    about = {"size": world.size, "device": world.device.type, "note": world.sharing_note}
    return {"world": about}
