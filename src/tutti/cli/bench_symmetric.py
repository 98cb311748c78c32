"""tutti bench symmetric: latency of one-sided operations, and of the structures built on them."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from tutti.cli import bench
from tutti.cli.flags import parse
from tutti.cli.results import check_writable, usage_error_on_rank_0
from tutti.measure.terminal import print_line, print_note, terminal_width
from tutti.measure.units import format_size
from tutti.world.errors import UsageError, checked_seconds

if TYPE_CHECKING:
    from tutti.world.world import World

_FULL_WIDTH = 86


@dataclass(frozen=True)
class Symmetric(bench.RankFlags):
    """Measure symmetric memory: tutti bench symmetric --ranks 2

    Latencies are of calls from Python, p50 and p99 over interleaved rounds. One way is half of a
    round trip. Everything is between ranks 0 and 1, except operations of all ranks; results are
    checked. Ctrl-C keeps what was measured.
    """

    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = 2
    """Local ranks to start, unless a launcher already did."""
    sizes: str = "1K,64K,1M,16M"
    """Bytes of the compared all-reduces: 1K,64K or 1K:64M:x4."""
    budget: float = 0.2
    """Seconds for each row."""
    pin: bool = True
    """Pin every rank to CPUs of its own."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Symmetric, "tutti bench symmetric", arguments)
    sizes = bench.sizes_flag(options.sizes)
    checked_seconds("--budget", options.budget, example=0.2)
    check_writable("--json", options.json)
    if bench.is_rank():
        return _measure(options, sizes)
    if options.ranks is not None and options.ranks < 2:
        raise UsageError(f"--ranks {options.ranks}: one-sided memory needs a peer, use 2")
    return bench.start_ranks("symmetric", arguments, options)


def _measure(options: Symmetric, sizes: list[int]) -> int:
    from tutti.bench.host_setup import check_host_memory
    from tutti.bench.rank_control import RankControl
    from tutti.bench.symmetric.symmetric_bench import SymmetricBench

    with bench.open_world(options) as world:
        ranks = bench.pin_and_describe_ranks(world, options.pin)
        with usage_error_on_rank_0(world):
            check_host_memory(max(sizes), world)
        control = RankControl()
        report = _print_rows if world.is_first else lambda rows: None
        probes = SymmetricBench(world, control, options.budget, report)

        def results() -> dict[str, Any]:
            keys = ("rows", "skipped", "complete")
            world_json = bench.world_json(world, ranks)
            return {**{key: getattr(probes, key) for key in keys}, "world": world_json}

        with control.stop_on_signals():
            files = bench.ResultFiles("tutti.bench.symmetric/1", options.json)
            if world.is_first:
                _print_head(world, ranks)
                probes.save = lambda: files.save(results())
            probes.run(sizes)
            if world.is_first:
                files.write(results())
                for each in probes.skipped:
                    print_note(f"{each['name']} is skipped: {each['reason']}")
                bench.print_wrong(sum(row["wrong"] for row in probes.rows))
                if probes.stopped:
                    print_note(f"stopped: {len(probes.rows)} rows were measured")
    return bench.INTERRUPTED if probes.stopped else int(any(row["wrong"] for row in probes.rows))


def _print_head(world: "World", ranks: list[dict[str, Any]]) -> None:
    bench.print_ranks(world, ranks)
    if (width := _narrow_name_width()) is not None:
        print_line(f"# {'':<{width - 2}} {'size':>5} {'p50 (us)':>9} {'p99':>9}")
        return
    print_line(f"# {'':<40} {'backend':<10} {'size':>6} {'p50':>9} {'p99':>9} #wrong")
    print_line(f"# {'':<40} {'':<10} {'(B)':>6} {'(us)':>9} {'(us)':>9}")


def _print_rows(rows: list[dict[str, Any]]) -> None:
    width = _narrow_name_width()
    for row in rows:
        size = format_size(row["bytes"]) if row["bytes"] else ""
        times = f"{row['p50_us']:>9.2f} {row['p99_us']:>9.2f}"
        name, backend, wrong = row["name"], row["backend"], row["wrong"]
        if width is None:
            print_line(f"{name:<42} {backend:<10} {size:>6} {times} {wrong:>6}")
            continue
        name = f"all_reduce, {backend}" if name == "all_reduce" else name
        suffix = f" {wrong} WRONG" if wrong else ""
        print_line(f"{name:<{width}.{width}} {size:>5} {times}{suffix}")


def _narrow_name_width() -> int | None:
    """Return the width of the name column on a narrow terminal, or None on a wide terminal."""
    width = terminal_width(sys.stdout)
    return max(20, min(42, width - 26)) if width < _FULL_WIDTH else None
