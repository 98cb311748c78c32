"""tutti bench tune: find the fastest path for each message size, and save a table for tutti.comm.

A path is an implementation of a collective: NCCL, or tutti's one-shot kernels on symmetric memory.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from tutti.cli import bench
from tutti.measure.terminal import print_line, print_note
from tutti.measure.units import format_size
from tutti.world.rank_cases import Cases, start_cases

if TYPE_CHECKING:
    from tutti.world.world import World


@dataclass(frozen=True)
class Tune(bench.RankFlags):
    """Find the fastest all_reduce implementation for each message size: tutti bench tune

    On CUDA, tutti.comm has two implementations of all_reduce: NCCL, and one-shot kernels on
    symmetric memory. This command times both and writes a table with the fastest implementation for
    each message size. tutti.comm reads the table on machines of this kind, in worlds with this
    number of ranks. If Ctrl-C stops the command, no table is written.
    """

    sizes: str = "1K:8M:x2"
    """Message sizes in bytes: a list such as `1K,64K`, or a range such as `1K:8M:x2`, in which each
    size is 2 times the previous one. `1K` is 1024 bytes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the elements."""
    budget: float = 0.5
    """Seconds for each implementation and size."""
    dry_run: bool = False
    """Print the table, but write no file."""
    pin: bool = True
    """Pin every rank to its own CPUs."""


def main(arguments: list[str]) -> int:
    options = bench.parse_flags(Tune, "tune", arguments)
    sizes = bench.sizes_flag(options.sizes)
    if not bench.is_rank():
        start = partial(bench.start_ranks, "tune", arguments, options, largest=max(sizes))
        return start_cases(lambda env: start(env=env))
    return _tune(options, sizes)


def _tune(options: Tune, sizes: list[int]) -> int:
    from tutti.comm.operation import comm_group_of
    from tutti.comm.path_selection import available_paths

    with bench.open_session(options, "tutti.bench.tune/1", options.pin) as session:
        world, device = session.world, session.world.device.type
        paths = available_paths(comm_group_of(None), device)
        about = {"size": world.size, "device": device, "note": world.sharing_note}
        results: dict[str, Any] = {"rows": [], "table": None, "written": None, "world": about}
        if len(paths) > 1:
            return _measure(options, sizes, session, results | {"paths": list(paths)})
        reason = (
            f"on {device} a group of {world.size} ranks has only one all_reduce implementation, "
            f"{paths[0]}"
        )
        if world.is_first:
            print_note(f"no table was written, because {reason}")
            if device == "cpu":
                print_note("to compare backends: tutti bench collectives --backends gloo,shm")
            session.write({**results, "complete": True, "reason": reason})
        return 0


def _measure(
    options: Tune, sizes: list[int], session: bench.Session, results: dict[str, Any]
) -> int:
    from tutti.bench.collectives.backends import open_backends
    from tutti.bench.collectives.cases import DTYPES, case_groups
    from tutti.bench.collectives.interleaved_sweep import PATH_OF, Sweep

    world = session.world
    groups = case_groups("all_reduce", sizes, DTYPES[options.dtype], world)
    names = [name for name, path in PATH_OF.items() if path in results["paths"]]
    largest = max(case.bytes for group in groups for case in group)
    with open_backends(names, world, largest) as (backends, missing):
        sweep = Sweep(backends, session.control, world, options.budget)
        sweep.skipped += missing

        def sweep_results() -> dict[str, Any]:
            rows, skipped, complete = sweep.rows, sweep.skipped, sweep.complete
            measured = {"rows": rows, "skipped": skipped, "complete": complete}
            return results | measured | {"failed": cases.failed}

        def report(rows: list[dict[str, Any]]) -> None:
            if rows:
                cells = [f"{PATH_OF[row['backend']]} {row['time_us']['p50']:.2f}" for row in rows]
                print_line(f"{format_size(rows[0]['bytes']):>8}  {', '.join(cells)}")
            session.save(sweep_results())

        cases = Cases.from_environment()
        if world.is_first and not cases.crashed:
            if world.sharing_note:
                print_note(f"note: {world.sharing_note}")
            print_note(f"all_reduce, {world.size} ranks, {options.dtype}, p50 in us")
        sweep.run(groups, report if world.is_first else lambda rows: None, cases)
    if world.is_first and sweep.stopped:
        print_note("stopped: no table was written")
    elif world.is_first and cases.crashed:
        # The table would have no entry for the size that crashed.
        session.write(sweep_results())
        bench.print_failed(cases)
        print_note("no table was written, because the measurement of a size failed")
    elif world.is_first:
        session.write(sweep_results() | _save_table(options, world, sweep.rows))
    wrong = bool(cases.crashed) or any(row["wrong"] for row in sweep.rows)
    return bench.INTERRUPTED if sweep.stopped else int(wrong)


def _save_table(options: Tune, world: "World", rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Print and save the table. Return the table and its file name, for JSON."""
    from tutti.bench.collectives.interleaved_sweep import path_measurements, smooth_choice
    from tutti.comm.path_selection import fastest, save

    chosen = smooth_choice(path_measurements(rows, world.device.type))
    table = fastest(chosen, world.size, options.dtype)
    for row in table.rows:
        end = "upwards" if row.to_bytes is None else f"to {format_size(row.to_bytes)}"
        print_note(f"{row.op} from {format_size(row.from_bytes)} {end}: {row.path}")
    written = None
    if options.dry_run:
        print_note("--dry-run: no file was written")
    elif table.rows:
        written = str(save(table))
        print_note(f"written to {written}")
        print_note(
            f"new worlds of {world.size} ranks on machines of this kind ({table.machine}) use the "
            "table. To use the defaults again, delete the file."
        )
    content = {"rows": [asdict(row) for row in table.rows], "machine": table.machine}
    return {"table": content, "written": written}
