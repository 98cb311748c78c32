"""tutti bench pairs: measure baselines and their optimized forms in turns, and compare results."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tutti.bench.expectations import Expectation
from tutti.bench.pairs import BUILTIN_PAIRS, PairEntry, Setting, select_pairs
from tutti.cli import bench
from tutti.cli.flags import parse
from tutti.cli.results import check_writable, usage_error_on_rank_0
from tutti.machine.gpus import visible_gpu_count
from tutti.measure.terminal import print_line, print_note, terminal_width, text_width, wrap_line
from tutti.world.errors import UsageError, checked_seconds

if TYPE_CHECKING:
    from tutti.bench.pairs.paired_runs import PairedRuns
    from tutti.world.world import World

_SCHEMA = "tutti.bench.pairs/1"
_FULL_WIDTH = 80
_NAME_WIDTH = max(map(len, BUILTIN_PAIRS))


@dataclass(frozen=True)
class Pairs(bench.RankFlags):
    """Measure techniques against their baselines: tutti bench pairs --ranks 2

    Both sides of a pair do the same work in turns in one process group, and their results are
    compared. Speed-up is the median of the ratios of rounds, its spread their quartiles. A pair
    whose requirements are not met is skipped with the reason. Exit code 1: results differ. Ctrl-C
    keeps what was measured.
    """

    list: bool = False
    """List the pairs and exit."""
    only: str | None = None
    """Comma-separated names of pairs (default: all, or all of --file)."""
    file: Path | None = None
    """A Python file with pairs of your own: PAIRS = [function, …]."""
    backend: Literal["auto", "gloo", "shm", "nccl"] = "auto"
    """Backend of pairs that do not compare backends (auto: nccl on CUDA; gloo on the CPU, where its
    messages cost about as much as those of a network)."""
    rounds: int = 20
    """Rounds of both sides; fewer (at least 6) if --budget is short."""
    budget: float = 20.0
    """Seconds for each pair, approximately."""
    quick: bool = False
    """Small workloads and a tenth of the budget: to check that pairs work, not what they gain."""
    pin: bool = True
    """Pin every rank to CPUs of its own."""
    expect: str | None = None
    """Exit with 1 if results miss an expectation: an earlier JSON of this bench, or a TOML file of
    thresholds."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Pairs, "tutti bench pairs", arguments)
    entries = select_pairs([] if options.only is None else options.only.split(","), options.file)
    if options.list:
        for entry in entries:
            line, indent = f"{entry.name:<{_NAME_WIDTH}}  {entry.about}", " " * (_NAME_WIDTH + 2)
            for part in wrap_line(line, terminal_width(sys.stdout), indent):
                print_line(part)
        return 0
    if options.rounds < 1:
        raise UsageError(f"--rounds {options.rounds}: use 1 or more, such as 20")
    checked_seconds("--budget", options.budget, example=4)
    check_writable("--json", options.json)
    names = {"name": [*BUILTIN_PAIRS, *(entry.name for entry in entries)]}
    expectation = bench.expect_flag(options.expect, "pairs", options.device, names)
    if bench.is_rank():
        return _measure(options, entries, expectation)
    return bench.start_ranks("pairs", arguments, options)


def _measure(options: Pairs, entries: list[PairEntry], expectation: Expectation | None) -> int:
    from tutti.bench.pairs.paired_runs import PairedRuns
    from tutti.bench.rank_control import RankControl

    on_cpu = options.device == "cpu" or visible_gpu_count() == 0
    automatic = "gloo" if on_cpu else None
    backend = automatic if options.backend == "auto" else options.backend
    with bench.open_world(options, backend) as world:
        ranks = bench.pin_and_describe_ranks(world, options.pin)
        control = RankControl()
        budget = options.budget / 10 if options.quick else options.budget
        runs = PairedRuns(Setting(world, options.quick), control, budget, options.rounds)

        def results() -> dict[str, Any]:
            return {
                "rows": runs.rows,
                "speedup": "median over rounds of baseline / optimized, spread: their quartiles",
                "quick": options.quick,
                "complete": runs.complete,
                "world": bench.world_json(world, ranks),
            }

        with usage_error_on_rank_0(world):
            ideal = {"speedup": math.inf, "spread": {"p25": 1.0, "p75": 1.0}}
            planned = [{"name": entry.name, **ideal} for entry in entries]
            bench.check_planned_rows(_SCHEMA, {**results(), "rows": planned}, expectation)
        with control.stop_on_signals():
            width = max(_NAME_WIDTH, *(len(entry.name) for entry in entries))
            files = bench.ResultFiles(_SCHEMA, options.json)
            if world.is_first:
                _print_head(world, ranks, options, width)

            def report(row: dict[str, Any]) -> None:
                _print_row(row, width)
                files.save(results())

            runs.run(entries, report if world.is_first else lambda row: None)
            if world.is_first:
                files.write(results())
                _print_end(runs)
    wrong = any(_is_wrong(row) for row in runs.rows)
    return bench.exit_code(world, _SCHEMA, results(), expectation, runs.stopped, wrong)


def _is_wrong(row: dict[str, Any]) -> bool:
    return str(row["check"]).startswith(("different", "failed"))


def _print_head(world: "World", ranks: list[dict[str, Any]], options: Pairs, width: int) -> None:
    bench.print_ranks(world, ranks, with_backend=True)
    if options.quick:
        print_note("note: --quick: the workloads are too small for their figures to be quoted")
    spread = "" if _narrow() else f" {'(spread)':^13}"
    print_line(
        f"# {'pair':<{width - 2}} {'baseline':>9} {'optimized':>9} {'speed-up':>8}{spread}  check"
    )
    print_line(f"# {'':<{width - 2}} {'(ms)':>9} {'(ms)':>9}")


def _print_row(row: dict[str, Any], width: int) -> None:
    name = f"{row['name']:<{width}}"
    if row["speedup"] is None:
        for line in wrap_line(f"{name} {row['check']}", terminal_width(sys.stdout)):
            print_line(line)
        return
    spread = f"({row['spread']['p25']:.2f}–{row['spread']['p75']:.2f})"
    times = f"{_format_ms(row['baseline_ms']):>9} {_format_ms(row['optimized_ms']):>9}"
    figures = f"{name} {times} {row['speedup']:>8.2f}"
    print_line(f"{figures if _narrow() else f'{figures} {spread:^13}'}  {row['check']}")
    about = ". ".join(each for each in (row["about"], row["note"]) if each)
    for line in wrap_line(f"#   {about}", text_width(sys.stdout)):
        print_line(line)


def _narrow() -> bool:
    return terminal_width(sys.stdout) < _FULL_WIDTH


def _format_ms(milliseconds: float) -> str:
    return f"{milliseconds:.4f}" if milliseconds < 1 else f"{milliseconds:.2f}"


def _print_end(runs: "PairedRuns") -> None:
    measured = [row for row in runs.rows if row["speedup"] is not None]
    faster = sum(row["verdict"] == "faster" for row in measured)
    if measured:
        print_note(f"faster beyond the spread: {faster} of {len(measured)}")
    wrong = sum(map(_is_wrong, runs.rows))
    if wrong:
        print_note(f"results of {wrong} pairs differ: FAILED")
    if runs.stopped:
        pairs = "1 pair was" if len(measured) == 1 else f"{len(measured)} pairs were"
        print_note(f"stopped: {pairs} measured")
