"""tutti bench symmetric: one-sided latency, and the structures built on it."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.cli.bench_results import ResultFiles, sizes_flag
from tutti.cli.flags import parse
from tutti.cli.results import check_writable, usage_error_on_rank_0
from tutti.measure.terminal import print_line, print_note, terminal_width
from tutti.measure.units import format_size
from tutti.world.errors import UsageError, checked_seconds
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.bench.symmetric_rows import Symmetric as Measured
    from tutti.world.world import World

# Between Ctrl-C and SIGKILL a round is finished and the file is written.
_GRACE_SECONDS = 30.0
_INTERRUPTED = 130
_FULL_WIDTH = 86


@dataclass(frozen=True)
class Symmetric:
    """Measure symmetric memory: tutti bench symmetric --ranks 2

    Latencies are of calls from Python, p50 and p99 over rounds in which all take turns. One way is
    half of a message there and back. Everything is between ranks 0 and 1, except what all ranks do
    together; results are checked. Ctrl-C leaves what was measured.
    """

    sizes: str = "1K,64K,1M,16M"
    """Bytes of the all-reduces that are compared: 1K,64K or 1K:64M:x4."""
    ranks: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 2
    """How many local ranks to start, unless a launcher already did."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the memory is."""
    ranks_per_gpu: int = 1
    """How many ranks may share one GPU."""
    budget: float = 0.2
    """Seconds for each row."""
    pin: bool = True
    """Pin every rank to CPUs of its own."""
    json: Path | None = None
    """Write rows, environment and command to this file, too."""
    start_timeout: float | None = None
    """Seconds for all ranks to arrive (default 300)."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Symmetric, "tutti bench symmetric", arguments)
    sizes = sizes_flag(options.sizes)
    checked_seconds("--budget", options.budget, example=0.2)
    check_writable("--json", options.json)
    if identify(os.environ).launcher == "python":
        if options.ranks < 2:
            raise UsageError(f"--ranks {options.ranks}: one-sided memory needs a peer, use 2")
        return LocalWorld(
            command=[sys.executable, "-m", "tutti", "bench", "symmetric", *arguments],
            ranks=options.ranks,
            device=options.device,
            ranks_per_gpu=options.ranks_per_gpu,
            show="first",
            grace=_GRACE_SECONDS,
        ).run()
    return _measure(options, sizes)


def _measure(options: Symmetric, sizes: list[int]) -> int:
    from tutti.bench.control import Control
    from tutti.bench.pinning import pin
    from tutti.bench.room import check_room
    from tutti.bench.symmetric_rows import Symmetric as Measured
    from tutti.world.exchange import gather_json
    from tutti.world.world import init

    with init(
        device=options.device,
        ranks_per_gpu=options.ranks_per_gpu if options.ranks_per_gpu > 1 else None,
        start_timeout=options.start_timeout,
    ) as world:
        cpus = pin(world) if options.pin else world.cpus
        ranks = gather_json({**world.row(), "cpus": cpus, "pinned": options.pin})
        with usage_error_on_rank_0(world):
            check_room(max(sizes), world)
        control = Control()
        measured = Measured(world, control, options.budget)
        with control.stop_on_signals():
            files = ResultFiles("tutti.bench.symmetric/1", options.json)
            if world.is_first:
                _print_head(world, ranks)
                measured.keep = lambda: files.update(_results(measured, ranks))
            measured.run(sizes, _print_rows if world.is_first else lambda rows: None)
            if world.is_first:
                files.write(_results(measured, ranks))
                _conclude(measured)
    return _INTERRUPTED if measured.stopped else int(any(row["wrong"] for row in measured.rows))


def _print_head(world: "World", ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        pinned = "pinned to CPU" if each["pinned"] else "on CPU"
        print_note(
            f"rank {each['rank']}: {each['host']}, {each['device']}, {pinned} {each['cpus']}"
        )
    if world.sharing_note:
        print_note(f"note: {world.sharing_note}")
    if _narrow():
        print_line(f"# {'':<{_name_width() - 2}} {'size':>5} {'p50 (us)':>9} {'p99':>9}")
        return
    print_line(f"# {'':<40} {'backend':<10} {'size':>6} {'p50':>9} {'p99':>9} #wrong")
    print_line(f"# {'':<40} {'':<10} {'(B)':>6} {'(us)':>9} {'(us)':>9}")


def _print_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        size = format_size(row["bytes"]) if row["bytes"] else ""
        times = f"{row['p50_us']:>9.2f} {row['p99_us']:>9.2f}"
        if _narrow():
            name = row["name"] if row["name"] != "all_reduce" else f"all_reduce, {row['backend']}"
            wrong = f" {row['wrong']} WRONG" if row["wrong"] else ""
            room = _name_width()
            print_line(f"{name:<{room}.{room}} {size:>5} {times}{wrong}")
            continue
        print_line(f"{row['name']:<42} {row['backend']:<10} {size:>6} {times} {row['wrong']:>6}")


def _narrow() -> bool:
    return terminal_width(sys.stdout) < _FULL_WIDTH


def _name_width() -> int:
    """What size and times leave of a narrow terminal, up to the longest name."""
    return max(20, min(42, terminal_width(sys.stdout) - 26))


def _results(measured: "Measured", ranks: list[dict[str, Any]]) -> dict[str, Any]:
    world = measured.world
    return {
        "rows": measured.rows,
        "skipped": measured.skipped,
        "complete": measured.complete,
        "world": {"size": world.size, "ranks": ranks, "sharing_note": world.sharing_note},
    }


def _conclude(measured: "Measured") -> None:
    for each in measured.skipped:
        print_note(f"{each['name']} is left out: {each['reason']}")
    wrong = sum(row["wrong"] for row in measured.rows)
    print_note(f"Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    if measured.stopped:
        print_note(f"stopped: {len(measured.rows)} rows were measured")
