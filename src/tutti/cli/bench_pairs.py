"""tutti bench pairs: a baseline and its optimized form, in turns in one run, results compared."""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.bench.expect import Source
from tutti.bench.pairs.catalogue import SHIPPED, Listed, choose
from tutti.cli.bench_results import ResultFiles, check_expectation, read_expectation, report_misses
from tutti.cli.flags import parse
from tutti.cli.results import check_writable, usage_error_on_rank_0
from tutti.machine.gpus import visible_gpu_count
from tutti.measure.terminal import print_line, print_note, terminal_width, text_width, wrap_line
from tutti.world.errors import UsageError, checked_seconds
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.bench.pairs.duel import Duels
    from tutti.world.world import World

# Between Ctrl-C and SIGKILL a round is finished and the file is written.
_GRACE_SECONDS = 30.0
_INTERRUPTED = 130
_SCHEMA = "tutti.bench.pairs/1"
_FULL_WIDTH = 80
_NAME_WIDTH = max(map(len, SHIPPED))


@dataclass(frozen=True)
class Pairs:
    """Measure techniques against their baselines: tutti bench pairs --ranks 2

    Both sides of a pair do the same work in turns in one process group, and their results are
    compared. Speed-up is the median of the rounds' ratios, its spread their quartiles. A pair that
    needs what is not here is skipped and says why. Exit code 1: results differ. Ctrl-C leaves what
    was measured.
    """

    list: bool = False
    """Show the pairs that there are, and end."""
    only: str | None = None
    """Names of pairs with commas between them (default: all, or all of --file)."""
    file: Path | None = None
    """A Python file with pairs of your own: PAIRS = [function, …], see docs/pairs.md."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """How many local ranks to start, unless a launcher already did (default: one per GPU, or 2)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors are."""
    backend: Literal["auto", "gloo", "shm", "nccl"] = "auto"
    """What pairs communicate by, unless that is what they compare (auto: nccl on CUDA, and gloo on
    the CPU: its messages cost what those of a network do)."""
    ranks_per_gpu: int = 1
    """How many ranks may share one GPU."""
    rounds: int = 20
    """How often both sides have their turn; fewer (at least 6) where --budget is short."""
    budget: float = 20.0
    """Seconds for each pair, about."""
    quick: bool = False
    """Small workloads and a tenth of the budget: to see that pairs work, not what they gain."""
    pin: bool = True
    """Pin every rank to CPUs of its own."""
    expect: str | None = None
    """Check, and exit with 1 where something is missed: an earlier JSON of this bench, or a TOML
    file of thresholds."""
    json: Path | None = None
    """Write rows, environment and command to this file, too."""
    start_timeout: float | None = None
    """Seconds for all ranks to arrive (default 300)."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Pairs, "tutti bench pairs", arguments)
    chosen = choose([] if options.only is None else options.only.split(","), options.file)
    if options.list:
        for listed in chosen:
            line, indent = f"{listed.name:<{_NAME_WIDTH}}  {listed.about}", " " * (_NAME_WIDTH + 2)
            for part in wrap_line(line, terminal_width(sys.stdout), indent):
                print_line(part)
        return 0
    if options.rounds < 1:
        raise UsageError(f"--rounds {options.rounds}: use 1 or more, such as 20")
    checked_seconds("--budget", options.budget, example=4)
    check_writable("--json", options.json)
    names = {"name": [*SHIPPED, *(listed.name for listed in chosen)]}
    source = read_expectation(options.expect, "pairs", options.device, names)
    if identify(os.environ).launcher != "python":
        return _measure(options, chosen, source)
    gpus = 0 if options.device == "cpu" else visible_gpu_count()
    return LocalWorld(
        command=[sys.executable, "-m", "tutti", "bench", "pairs", *arguments],
        ranks=max(2, gpus * options.ranks_per_gpu) if options.ranks is None else options.ranks,
        device=options.device,
        ranks_per_gpu=options.ranks_per_gpu,
        show="first",
        grace=_GRACE_SECONDS,
        reported_codes=(1, 2),
    ).run()


def _measure(options: Pairs, chosen: "list[Listed]", source: Source | None) -> int:
    from tutti.bench.control import Control
    from tutti.bench.pairs.duel import Duels
    from tutti.bench.pairs.pair import Setting
    from tutti.bench.pinning import pin
    from tutti.world.exchange import gather_json
    from tutti.world.world import init

    on_cpu = options.device == "cpu" or visible_gpu_count() == 0
    chosen_backend = "gloo" if on_cpu else None
    with init(
        device=options.device,
        backend=chosen_backend if options.backend == "auto" else options.backend,
        ranks_per_gpu=options.ranks_per_gpu if options.ranks_per_gpu > 1 else None,
        start_timeout=options.start_timeout,
    ) as world:
        cpus = pin(world) if options.pin else world.cpus
        ranks = gather_json({**world.row(), "cpus": cpus, "pinned": options.pin})
        control = Control()
        budget = options.budget / 10 if options.quick else options.budget
        duels = Duels(Setting(world, options.quick), control, budget, options.rounds)
        with usage_error_on_rank_0(world):
            # Nothing could find these too slow.
            fastest = {"speedup": math.inf, "spread": {"p25": 1.0, "p75": 1.0}}
            planned = [{"name": listed.name, **fastest} for listed in chosen]
            to_come = _results(duels, options, world, ranks) | {"rows": planned}
            check_expectation(_SCHEMA, to_come, source)
        with control.stop_on_signals():
            width = max(_NAME_WIDTH, *(len(listed.name) for listed in chosen))
            files = ResultFiles(_SCHEMA, options.json)
            if world.is_first:
                _print_head(world, ranks, options, width)

            def report(row: dict[str, Any]) -> None:
                _print_row(row, width)
                files.update(_results(duels, options, world, ranks))

            duels.run(chosen, report if world.is_first else lambda row: None)
            results = _results(duels, options, world, ranks)
            if world.is_first:
                files.write(results)
                _conclude(duels)
    if duels.stopped:
        return _INTERRUPTED
    wrong = any(_is_wrong(row) for row in duels.rows)
    return int((world.is_first and report_misses(_SCHEMA, results, source)) or wrong)


def _results(
    duels: "Duels", options: Pairs, world: "World", ranks: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "rows": duels.rows,
        "speedup": "median over rounds of baseline / optimized, spread: their quartiles",
        "quick": options.quick,
        "complete": duels.complete,
        "world": {"size": world.size, "ranks": ranks, "sharing_note": world.sharing_note},
    }


def _is_wrong(row: dict[str, Any]) -> bool:
    return str(row["check"]).startswith(("different", "failed"))


def _print_head(world: "World", ranks: list[dict[str, Any]], options: Pairs, width: int) -> None:
    for each in ranks:
        pinned = "pinned to CPU" if each["pinned"] else "on CPU"
        where = f"{each['host']}, {each['device']}, {each['backend']}, {pinned} {each['cpus']}"
        print_note(f"rank {each['rank']}: {where}")
    if world.sharing_note:
        print_note(f"note: {world.sharing_note}")
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
    times = f"{_ms(row['baseline_ms']):>9} {_ms(row['optimized_ms']):>9}"
    figures = f"{name} {times} {row['speedup']:>8.2f}"
    print_line(f"{figures if _narrow() else f'{figures} {spread:^13}'}  {row['check']}")
    said = ". ".join(each for each in (row["about"], row["note"]) if each)
    for line in wrap_line(f"#   {said}", text_width(sys.stdout)):
        print_line(line)


def _narrow() -> bool:
    return terminal_width(sys.stdout) < _FULL_WIDTH


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.4f}" if milliseconds < 1 else f"{milliseconds:.2f}"


def _conclude(duels: "Duels") -> None:
    measured = [row for row in duels.rows if row["speedup"] is not None]
    faster = sum(row["verdict"] == "faster" for row in measured)
    if measured:
        print_note(f"faster beyond their spread: {faster} of {len(measured)}")
    wrong = sum(map(_is_wrong, duels.rows))
    if wrong:
        print_note(f"{wrong} did not give the same results: FAILED")
    if duels.stopped:
        pairs = "1 pair was" if len(measured) == 1 else f"{len(measured)} pairs were"
        print_note(f"stopped: {pairs} measured")
