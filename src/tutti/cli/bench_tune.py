"""tutti bench tune: find the fastest path for each message size; save the table for tutti.comm."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from tutti.cli import bench
from tutti.cli.flags import parse
from tutti.cli.results import check_writable
from tutti.measure.terminal import print_line, print_note
from tutti.measure.units import format_size
from tutti.world.errors import checked_seconds

if TYPE_CHECKING:
    from tutti.bench.collectives.interleaved_sweep import Sweep
    from tutti.world.world import World


@dataclass(frozen=True)
class Tune(bench.RankFlags):
    """Measure which path is fastest at which size, and save the table: tutti bench tune

    tutti.comm reads the table: if a group has several paths (today all_reduce on CUDA, by NCCL or
    by one-shot kernels on symmetric memory), the table decides by size. It applies to machines of
    this kind and this number of ranks. Ctrl-C writes no table.
    """

    sizes: str = "1K:8M:x2"
    """Bytes: 1K,64K or a range 1K:8M:x2. K, M, G are binary."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the elements."""
    budget: float = 0.5
    """Seconds for each path and size."""
    dry_run: bool = False
    """Print the table, and write nothing."""
    pin: bool = True
    """Pin every rank to CPUs of its own."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Tune, "tutti bench tune", arguments)
    sizes = bench.sizes_flag(options.sizes)
    checked_seconds("--budget", options.budget, example=0.5)
    check_writable("--json", options.json)
    if not bench.is_rank():
        return bench.start_ranks("tune", arguments, options)
    return _tune(options, sizes)


def _tune(options: Tune, sizes: list[int]) -> int:
    from tutti.comm.operation import comm_group_of
    from tutti.comm.path_selection import available_paths

    with bench.open_world(options) as world:
        bench.pin_and_describe_ranks(world, options.pin)
        paths = available_paths(comm_group_of(None), world.device.type)
        about = {"size": world.size, "device": world.device.type, "note": world.sharing_note}
        results: dict[str, Any] = {"rows": [], "table": None, "written": None, "world": about}
        files = bench.ResultFiles("tutti.bench.tune/1", options.json)
        if len(paths) == 1:
            reason = f"on {world.device.type} a group of {world.size} has one path, "
            reason += f"that of its backend: {paths[0]}"
            if world.is_first:
                print_note(f"there is nothing to choose: {reason}. No table is needed or written.")
                if world.device.type == "cpu":
                    print_note("To compare backends: tutti bench collectives --backends gloo,shm")
                files.write({**results, "complete": True, "reason": reason})
            return 0
        results["paths"] = list(paths)
        sweep = _measure(options, sizes, world, results, files)
        if world.is_first and sweep.stopped:
            print_note("stopped: no table was written")
        elif world.is_first:
            files.write(results | _sweep_json(sweep) | _save_table(options, world, sweep))
        wrong = any(row["wrong"] for row in sweep.rows)
        return bench.INTERRUPTED if sweep.stopped else int(wrong)


def _measure(
    options: Tune,
    sizes: list[int],
    world: "World",
    results: dict[str, Any],
    files: bench.ResultFiles,
) -> "Sweep":
    from tutti.bench.collectives.backends import open_backends
    from tutti.bench.collectives.cases import DTYPES, case_groups
    from tutti.bench.collectives.interleaved_sweep import Sweep, SweepSettings
    from tutti.bench.collectives.path_tuning import PATH_OF
    from tutti.bench.rank_control import RankControl

    groups = case_groups("all_reduce", sizes, DTYPES[options.dtype], world)
    names = [name for name, path in PATH_OF.items() if path in results["paths"]]
    largest = max(case.bytes for group in groups for case in group)
    control, settings = RankControl(), SweepSettings(budget=options.budget)
    with control.stop_on_signals(), open_backends(names, world, largest) as (backends, missing):
        sweep = Sweep(backends, settings, control, world)
        sweep.skipped += missing

        def report(rows: list[dict[str, Any]]) -> None:
            if rows:
                cells = [f"{PATH_OF[row['backend']]} {row['time_us']['p50']:.2f}" for row in rows]
                print_line(f"{format_size(rows[0]['bytes']):>8}  {', '.join(cells)}")
            files.save(results | _sweep_json(sweep))

        if world.is_first:
            if world.sharing_note:
                print_note(f"note: {world.sharing_note}")
            print_note(f"all_reduce, {world.size} ranks, {options.dtype}, p50 in us")
        sweep.run(groups, report if world.is_first else lambda rows: None)
    return sweep


def _sweep_json(sweep: "Sweep") -> dict[str, Any]:
    return {"rows": sweep.rows, "skipped": sweep.skipped, "complete": sweep.complete}


def _save_table(options: Tune, world: "World", sweep: "Sweep") -> dict[str, Any]:
    """Print and save the table. Returns the table and the path of its file, for JSON."""
    from tutti.bench.collectives.path_tuning import path_measurements, smooth_choice
    from tutti.comm.path_selection import fastest, save

    chosen = smooth_choice(path_measurements(sweep.rows, world.device.type))
    table = fastest(chosen, world.size, options.dtype)
    for row in table.rows:
        end = "on" if row.to_bytes is None else f"to {format_size(row.to_bytes)}"
        print_note(f"{row.op} from {format_size(row.from_bytes)} {end}: {row.path}")
    written = None
    if options.dry_run:
        print_note("--dry-run: nothing was written")
    elif table.rows:
        written = str(save(table))
        print_note(f"written to {written}")
        print_note(
            f"worlds of {world.size} ranks on machines of this kind ({table.machine}) use the "
            "table from their next start; delete the file to return to the defaults"
        )
    content = {"rows": [asdict(row) for row in table.rows], "machine": table.machine}
    return {"table": content, "written": written}
