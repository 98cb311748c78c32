"""tutti bench pairs: time baselines and optimized versions alternately, and compare results."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tutti.bench.expectations import Expectation
from tutti.bench.pairs import BUILTIN_PAIRS, PairEntry, Setting, select_pairs
from tutti.cli import bench
from tutti.cli.flags import InputFile
from tutti.machine.gpus import visible_gpu_count
from tutti.measure.terminal import print_line, print_note, terminal_width, text_width, wrap_line
from tutti.measure.units import three_digits
from tutti.world.errors import UsageError
from tutti.world.rank_cases import Cases, start_cases

if TYPE_CHECKING:
    from tutti.bench.pairs.paired_runs import PairedRuns

_FULL_WIDTH = 80
_NAME_WIDTH = max(map(len, BUILTIN_PAIRS))


@dataclass(frozen=True)
class Pairs(bench.ExpectFlags):
    """Compare techniques with their baselines: tutti bench pairs --ranks 2

    A pair is a baseline and an optimized version of the same work. Both run alternately in one
    process group, and their results are compared. The speed-up of a round is baseline time /
    optimized time. The table shows the median over all rounds, and in the column `spread` the first
    and the third quartile. If a pair cannot run on this machine, the output gives the reason. The
    exit code is 1 if results differ. Ctrl-C keeps the results so far.
    """

    list: bool = False
    """List the pairs and exit."""
    only: str | None = None
    """Comma-separated names of pairs (default: all pairs, or all pairs of --file)."""
    file: InputFile | None = None
    """A Python file that defines your own pairs in a list: `PAIRS = [function, …]`."""
    backend: Literal["auto", "gloo", "shm", "nccl"] = "auto"
    """Backend of pairs that do not compare backends. `auto`: `nccl` on CUDA, and `gloo` on the CPU,
    because a gloo message takes about as long as a message over a network."""
    rounds: int = 20
    """Number of rounds. A short --budget reduces this number. At least 6 rounds are run."""
    budget: float = 20.0
    """Approximate number of seconds for each pair."""
    quick: bool = False
    """Use small workloads and a tenth of --budget, to check that the pairs work. The measured times
    are not meaningful."""
    pin: bool = True
    """Pin every rank to its own CPUs."""


def main(arguments: list[str]) -> int:
    options = bench.parse_flags(Pairs, "pairs", arguments)
    entries = select_pairs([] if options.only is None else options.only.split(","), options.file)
    if options.list:
        for entry in entries:
            line, indent = f"{entry.name:<{_NAME_WIDTH}}  {entry.about}", " " * (_NAME_WIDTH + 2)
            for part in wrap_line(line, terminal_width(), indent):
                print_line(part)
        return 0
    if options.rounds < 1:
        raise UsageError(f"--rounds must be 1 or more, such as 20, got {options.rounds}")
    names = {"name": [*BUILTIN_PAIRS, *(entry.name for entry in entries)]}
    expectation = bench.expect_flag(options, "pairs", names)
    if bench.is_rank():
        return _measure(options, entries, expectation)
    return start_cases(lambda env: bench.start_ranks("pairs", arguments, options, env=env))


def _measure(options: Pairs, entries: list[PairEntry], expectation: Expectation | None) -> int:
    from tutti.bench.pairs.paired_runs import PairedRuns

    on_cpu = options.device == "cpu" or visible_gpu_count() == 0
    automatic = "gloo" if on_cpu else None
    backend = automatic if options.backend == "auto" else options.backend
    with bench.open_session(options, "tutti.bench.pairs/1", options.pin, backend) as session:
        world = session.world
        budget = options.budget / 10 if options.quick else options.budget
        runs = PairedRuns(Setting(world, options.quick), session.control, budget, options.rounds)
        cases = Cases.from_environment()

        def results() -> dict[str, Any]:
            return {
                "rows": runs.rows,
                "speedup": "median over rounds of baseline time / optimized time, with quartiles",
                "quick": options.quick,
                "complete": len(runs.rows) == len(entries),
                "world": session.world_json,
            }

        ideal = {"speedup": math.inf, "spread": {"p25": 1.0, "p75": 1.0}}
        planned = [{"name": entry.name, **ideal} for entry in entries]
        session.check_planned_rows({**results(), "rows": planned}, expectation)
        width = max(_NAME_WIDTH, *(len(entry.name) for entry in entries))
        if world.is_first and not cases.crashed:
            session.print_ranks(with_backend=True)
            if options.quick:
                print_note("note: with --quick, the workloads are too small for meaningful times")
            _print_head(width)

        for entry in entries:
            if entry.name in cases.rows:
                # This row was printed before another pair crashed and new ranks were started.
                runs.rows.append(cases.rows[entry.name])
                continue
            if entry.name in cases.crashed:
                runs.add_failed(entry, cases.crashed[entry.name])
            else:
                with cases.running(entry.name, world.rank):
                    runs.run(entry)
            if runs.stopped:
                break
            if world.is_first:
                _print_row(runs.rows[-1], width)
                session.save(results())
                cases.add_row(entry.name, runs.rows[-1])
        wrong = sum(row["check"].startswith(("different", "failed")) for row in runs.rows)
        if world.is_first:
            session.write(results())
            _print_end(runs, wrong)
    return session.exit_code(results(), expectation, runs.stopped, wrong > 0)


def _print_head(width: int) -> None:
    spread = "" if terminal_width() < _FULL_WIDTH else f" {'(spread)':^13}"
    print_line(
        f"# {'pair':<{width - 2}} {'baseline':>9} {'optimized':>9} {'speed-up':>8}{spread}  check"
    )
    print_line(f"# {'':<{width - 2}} {'(ms)':>9} {'(ms)':>9}")


def _print_row(row: dict[str, Any], width: int) -> None:
    name = f"{row['name']:<{width}}"
    if row["speedup"] is None:
        for line in wrap_line(f"{name} {row['check']}", terminal_width()):
            print_line(line)
        return
    quartiles = f"({row['spread']['p25']:.2f}–{row['spread']['p75']:.2f})"
    spread = "" if terminal_width() < _FULL_WIDTH else f" {quartiles:^13}"
    times = f"{three_digits(row['baseline_ms']):>9} {three_digits(row['optimized_ms']):>9}"
    print_line(f"{name} {times} {row['speedup']:>8.2f}{spread}  {row['check']}")
    description = ". ".join(text for text in (row["about"], row["note"]) if text)
    for line in wrap_line(f"#   {description}", text_width()):
        print_line(line)


def _print_end(runs: "PairedRuns", wrong: int) -> None:
    measured = [row for row in runs.rows if row["speedup"] is not None]
    faster = sum(row["verdict"] == "faster" for row in measured)
    if measured:
        print_note(f"faster than the baseline by more than the spread: {faster} of {len(measured)}")
    if wrong:
        print_note(f"results of {wrong} pairs differ: FAILED")
    if runs.stopped:
        pairs = "1 pair was" if len(measured) == 1 else f"{len(measured)} pairs were"
        print_note(f"stopped: {pairs} measured")
