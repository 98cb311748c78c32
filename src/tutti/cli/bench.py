"""tutti bench KIND, and functions of all kinds: starting ranks, result files, --sizes, --expect."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.bench.expectations import (
    AllowedValues,
    Expectation,
    baseline_differences,
    read_expectation,
    unmet_expectations,
)
from tutti.cli.results import write_json, write_result
from tutti.machine.gpus import visible_gpu_count
from tutti.measure.terminal import print_line, print_note
from tutti.measure.units import parse_sizes
from tutti.world.errors import UsageError, did_you_mean
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.world.world import World

Row = dict[str, Any]
INTERRUPTED = 130
# Time between Ctrl-C and SIGKILL, in which ranks finish their round and write their files.
_GRACE_SECONDS = 30.0

_KINDS = {
    "collectives": ("tutti.cli.bench_collectives", "all backends side by side, as nccl-tests"),
    "bandwidth": ("tutti.cli.bench_bandwidth", "every pair of ranks; names slow links"),
    "pairs": ("tutti.cli.bench_pairs", "techniques against their baselines, results compared"),
    "tune": ("tutti.cli.bench_tune", "the fastest path by message size, for tutti.comm"),
    "symmetric": ("tutti.cli.bench_symmetric", "one-sided memory and the structures built on it"),
    "compare": ("tutti.cli.bench_compare", "what changed between two results beyond the spread"),
}

_USAGE = """usage: tutti bench KIND [flags]

Measures alternatives in turns in one run, and checks the results of the timed calls.

kinds:
{kinds}

`tutti bench KIND --help` lists the flags."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    if arguments[:1] in (["-h"], ["--help"]):
        rows = "\n".join(f"  {name:<12} {about}" for name, (_, about) in _KINDS.items())
        print(_USAGE.format(kinds=rows))
        return 0
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(f"which kind? tutti bench {' or '.join(_KINDS)}, see --help")
    if arguments[0] not in _KINDS:
        raise UsageError(f"no kind {arguments[0]!r}: {did_you_mean(arguments[0], _KINDS)}")
    if is_rank() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Until RankControl.stop_on_signals installs its handlers, Ctrl-C ends a rank at once. A
        # KeyboardInterrupt could be lost inside the import of torch or in a destructor, and the
        # rank would then wait for peers that have ended. If SIGINT is ignored (nohup, `&`), it
        # remains ignored.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    code: int = import_module(_KINDS[arguments[0]][0]).main(arguments[1:])
    return code


# ---- Ranks ----


@dataclass(frozen=True)
class RankFlags:
    """The flags that every measuring kind has."""

    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Local ranks to start, unless a launcher already did (default: one per GPU, or 2)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of tensors."""
    ranks_per_gpu: int = 1
    """Ranks that may share one GPU."""
    start_timeout: float | None = None
    """Seconds for all ranks to start (default 300)."""
    json: Path | None = None
    """Also write the results, with environment and command, to this file."""


def is_rank() -> bool:
    """Whether a launcher started this process as a rank."""
    return identify(os.environ).launcher != "python"


def default_ranks(options: RankFlags) -> int:
    """Return --ranks; by default one rank per GPU, times --ranks-per-gpu, but at least 2."""
    if options.ranks is not None:
        return options.ranks
    gpus = 0 if options.device == "cpu" else visible_gpu_count()
    return max(2, gpus * options.ranks_per_gpu)


def start_ranks(
    kind: str, arguments: Sequence[str], options: RankFlags, ranks: int | None = None
) -> int:
    """Run `tutti bench KIND` again in local ranks; returns the exit code."""
    return LocalWorld(
        command=[sys.executable, "-m", "tutti", "bench", kind, *arguments],
        ranks=default_ranks(options) if ranks is None else ranks,
        device=options.device,
        ranks_per_gpu=options.ranks_per_gpu,
        show="first",
        grace=_GRACE_SECONDS,
        reported_codes=(1, 2),
    ).run()


@contextmanager
def open_world(options: RankFlags, backend: str | None = None) -> "Iterator[World]":
    """Join the world with the given flags, and leave it at the end of the `with` block."""
    from tutti.world.world import init

    with init(
        device=options.device,
        backend=backend,
        ranks_per_gpu=options.ranks_per_gpu if options.ranks_per_gpu > 1 else None,
        start_timeout=options.start_timeout,
    ) as world:
        yield world


def pin_and_describe_ranks(world: "World", pin: bool) -> list[Row]:
    """Pin this rank to its CPUs if `pin`, and return the rows of all ranks for JSON. Collective."""
    from tutti.bench import host_setup

    return describe_ranks(world, host_setup.pin(world) if pin else world.cpus, pin)


def describe_ranks(world: "World", cpus: str, pinned: bool) -> list[Row]:
    """Return the rows of all ranks for JSON. Collective."""
    from tutti.world.exchange import gather_json

    return gather_json({**world.row(), "cpus": cpus, "pinned": pinned})


def print_ranks(world: "World", ranks: list[Row], with_backend: bool = False) -> None:
    """Print the head of the output: where each rank runs, and whether GPUs are shared."""
    for row in ranks:
        backend = f"{row['backend']}, " if with_backend else ""
        pinned = "pinned to CPU" if row["pinned"] else "on CPU"
        threads = f"{row['threads']} thread{'s' * (row['threads'] != 1)}"
        where = f"{row['host']}, {row['device']}, {backend}{pinned} {row['cpus']}, {threads}"
        print_note(f"rank {row['rank']}: {where}")
    if world.sharing_note:
        print_note(f"note: {world.sharing_note}")


def world_json(world: "World", ranks: list[Row]) -> Row:
    """Return the value of the key `world` in the JSON of every bench."""
    return {"size": world.size, "ranks": ranks, "sharing_note": world.sharing_note}


def print_wrong(wrong: int) -> None:
    """Print the number of wrong elements, as in the last line of nccl-tests."""
    print_note(f"Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")


# ---- Flags and files ----


def sizes_flag(text: str) -> list[int]:
    """Parse --sizes; raises UsageError."""
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise UsageError(f"--sizes {text}: {error}") from None


@dataclass
class ResultFiles:
    """The files of --json and --csv, which are written again after every row.

    So the results so far are kept after Ctrl-C, SIGKILL or the death of a rank. `complete` in the
    JSON is false until everything was measured.
    """

    schema: str
    json: Path | None
    csv: Path | None = None
    warned: bool = False

    def save(self, results: Row) -> None:
        """Write intermediate results. If writing fails, warn once; the measurement continues."""
        try:
            self.write(results)
        except UsageError as error:
            if not self.warned:
                print(f"note: {error}", file=sys.stderr, flush=True)
            self.warned = True

    def write(self, results: Row) -> None:
        """Write the results; raises UsageError if the file cannot be written."""
        if self.csv is not None:
            from tutti.bench.collectives.nccl_tests_table import csv_text

            write_result("--csv", self.csv, csv_text(results["rows"]))
        if self.json is not None:
            write_json(self.json, self.schema, results)


# ---- --expect ----


def expect_flag(
    text: str | None, bench: str, device: str, allowed: AllowedValues | None = None
) -> Expectation | None:
    """Read --expect. Raises UsageError if --expect cannot be checked in this run.

    `allowed` has more values that text fields can have in this run, such as the names of pairs.
    """
    if text is None:
        return None
    expectation = read_expectation(text, bench, allowed)
    # bench bandwidth compares CPU links with other links of their class, without the catalogue.
    needs_gpu = text == "catalogue" and bench != "bandwidth"
    if needs_gpu and (device == "cpu" or not visible_gpu_count()):
        raise UsageError(
            "--expect catalogue: it has figures for GPUs only, and ranks are on the CPU: give an "
            "earlier result or a file of thresholds"
        )
    return expectation


def check_planned_rows(schema: str, planned: Row, expectation: Expectation | None) -> None:
    """Raise UsageError if the baseline or the catalogue has no figure for any planned row.

    Rules are not checked here, because the same file of rules may be used for different runs.
    """
    if expectation is not None and expectation.rules is None:
        unmet_expectations({"schema": schema, **planned}, expectation)


def exit_code(
    world: "World",
    schema: str,
    results: Row,
    expectation: Expectation | None,
    stopped: bool,
    wrong: bool,
) -> int:
    """Return 130 if stopped, 1 if results are wrong or an expectation is missed, else 0.

    Rank 0 prints the missed expectations. Call this function after the world is closed, because it
    raises UsageError on rank 0 if nothing could be checked.
    """
    if stopped:
        return INTERRUPTED
    if expectation is None or not world.is_first:
        return int(wrong)
    content = {"schema": schema, **results}
    for difference in baseline_differences(content, expectation):
        print_line(f"--expect {expectation.name}: other environment: {difference}", sys.stderr)
    unmet = unmet_expectations(content, expectation)
    for each in unmet:
        print_note(f"missed: {each}")
    if not unmet:
        print_note(f"--expect {expectation.name}: all expectations are met")
    return int(wrong or bool(unmet))
