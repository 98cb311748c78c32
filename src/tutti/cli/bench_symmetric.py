"""tutti bench symmetric: latency of one-sided operations and of data structures built on them."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import tyro

from tutti.cli import bench
from tutti.cli.results import usage_error_on_rank_0
from tutti.measure.terminal import print_line, print_note, terminal_width
from tutti.measure.units import format_size
from tutti.world.errors import UsageError
from tutti.world.rank_cases import Cases, start_cases


@dataclass(frozen=True)
class Symmetric(bench.RankFlags):
    """Measure symmetric memory: tutti bench symmetric --ranks 2

    A latency is the time of a call from Python. The operations are timed alternately, and the table
    shows p50 and p99 over all calls. A one-way latency is half of a round trip. Rank 0 accesses the
    memory of rank 1. Only in the rows barrier, fetch_add on one counter, and all_reduce, all ranks
    take part. Results are checked. Ctrl-C keeps the results so far.
    """

    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = 2
    """Number of local ranks to start. Ignored under torchrun, srun or mpirun."""
    sizes: str = "1K,64K,1M,16M"
    """Message sizes in bytes of the all_reduce rows: a list such as `1K,64K`, or a range such as
    `1K:64M:x4`, in which each size is 4 times the previous one."""
    budget: float = 0.2
    """Seconds for each row."""
    pin: bool = True
    """Pin every rank to its own CPUs."""


def main(arguments: list[str]) -> int:
    options = bench.parse_flags(Symmetric, "symmetric", arguments)
    sizes = bench.sizes_flag(options.sizes)
    if bench.is_rank():
        return _measure(options, sizes)
    if options.ranks is not None and options.ranks < 2:
        raise UsageError(f"--ranks must be at least 2 for symmetric memory, got {options.ranks}")
    start = partial(bench.start_ranks, "symmetric", arguments, options, largest=max(sizes))
    return start_cases(lambda env: start(env=env))


def _measure(options: Symmetric, sizes: list[int]) -> int:
    from tutti.bench.rank_control import check_host_memory
    from tutti.bench.symmetric_bench import SymmetricBench

    with bench.open_session(options, "tutti.bench.symmetric/1", options.pin) as session:
        world = session.world
        with usage_error_on_rank_0(world):
            check_host_memory(max(sizes), world)
        report = _print_rows if world.is_first else lambda rows: None
        cases = Cases.from_environment()
        probes = SymmetricBench(world, session.control, options.budget, report, cases=cases)

        def results() -> dict[str, Any]:
            keys = ("rows", "skipped", "complete")
            measured = {key: getattr(probes, key) for key in keys}
            return {**measured, "failed": cases.failed, "world": session.world_json}

        probes.save = lambda: session.save(results())
        if world.is_first and not cases.crashed:
            session.print_ranks()
            print_line(f"# {'':<{_name_width() - 2}} {'size':>6} {'p50 (us)':>9} {'p99':>9}")
        probes.run(sizes)
        wrong = sum(row["wrong"] for row in probes.rows)
        if world.is_first:
            session.write(results())
            for skipped in probes.skipped:
                print_note(f"{skipped['name']} is skipped: {skipped['reason']}")
            bench.print_failed(cases)
            bench.print_wrong(wrong)
            if probes.stopped:
                print_note(f"stopped: {len(probes.rows)} rows were measured")
    return bench.INTERRUPTED if probes.stopped else int(wrong > 0 or bool(cases.crashed))


def _print_rows(rows: list[dict[str, Any]]) -> None:
    width = _name_width()
    for row in rows:
        name = f"{row['name']}, {row['backend']}" if row["name"] == "all_reduce" else row["name"]
        size = format_size(row["bytes"]) if row["bytes"] else ""
        wrong = f" {row['wrong']} WRONG" if row["wrong"] else ""
        times = f"{row['p50_us']:>9.2f} {row['p99_us']:>9.2f}"
        print_line(f"{name:<{width}.{width}} {size:>6} {times}{wrong}")


def _name_width() -> int:
    return max(20, min(42, terminal_width() - 27))
