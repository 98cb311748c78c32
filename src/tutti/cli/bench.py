"""tutti bench KIND, and the code that all kinds share: flags, ranks, result files and --expect."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

from tutti.bench import check_free_memory, expectations
from tutti.bench.expectations import AllowedValues, Expectation
from tutti.cli.flags import OutputFile, parse
from tutti.cli.results import print_start, usage_error_on_rank_0, write_json, write_result
from tutti.machine.cpu_numa import read_memory
from tutti.machine.gpus import visible_gpu_count
from tutti.machine.sysfs import SysFiles
from tutti.measure.terminal import print_line, print_note
from tutti.measure.units import parse_sizes
from tutti.world.errors import UsageError, checked_seconds, did_you_mean
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.bench.rank_control import RankControl
    from tutti.world.rank_cases import Cases
    from tutti.world.world import World

Row = dict[str, Any]
INTERRUPTED = 130
_GRACE_SECONDS = 30.0  # time after Ctrl-C for ranks to finish the current round and write files

_KINDS = {
    "collectives": "measure collectives of several backends, as nccl-tests does",
    "bandwidth": "measure the link of every pair of ranks, and find slow links",
    "pairs": "measure the speed-up of techniques over their baselines",
    "tune": "find the fastest all_reduce implementation per message size",
    "symmetric": "measure symmetric memory and the data structures built on it",
    "compare": "compare two result files, row by row",
}

_USAGE = """usage: tutti bench KIND [flags]

Backends or implementations to compare are timed alternately in the same run.
The results of the timed calls are checked.

kinds:
{kinds}

`tutti bench KIND --help` lists the flags."""


def main(arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        rows = "\n".join(f"  {name:<12} {description}" for name, description in _KINDS.items())
        print(_USAGE.format(kinds=rows))
        return 0
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(f"there is no kind of bench. Add one of {', '.join(_KINDS)}.")
    if arguments[0] not in _KINDS:
        raise UsageError(f"there is no kind {arguments[0]!r}: {did_you_mean(arguments[0], _KINDS)}")
    if is_rank() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Until RankControl.stop_on_signals installs its handlers, Ctrl-C ends this rank at once.
        # Python's default handler raises KeyboardInterrupt, which the import of torch or a
        # destructor could suppress. The rank would then wait for peers that have ended. If SIGINT
        # is ignored (nohup, `&`), it remains ignored.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    code: int = import_module(f"tutti.cli.bench_{arguments[0]}").main(arguments[1:])
    return code


# ---- Flags ----


@dataclass(frozen=True)
class RankFlags:
    """The flags of all kinds except compare."""

    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Number of local ranks to start (default: one per GPU, but at least 2). Ignored under
    torchrun, srun or mpirun."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the tensors."""
    ranks_per_gpu: int = 1
    """Maximum number of ranks that share one GPU."""
    start_timeout: float | None = None
    """Seconds to wait for all ranks to start (default: 300)."""
    json: OutputFile | None = None
    """Also write the results, the environment and the command to this JSON file."""
    budget: float = 0.5
    """Seconds for each measurement."""


@dataclass(frozen=True)
class ExpectFlags(RankFlags):
    """The flags of kinds that can compare their results with expected values."""

    expect: str | None = None
    """Exit with code 1 if a result is worse than expected. The value is a JSON file of an earlier
    run, a TOML file with thresholds, or the word `catalogue`, which means the published bandwidths
    of the hardware (not with `pairs`)."""


Flags = TypeVar("Flags", bound=RankFlags)


def parse_flags(kind: type[Flags], name: str, arguments: list[str]) -> Flags:
    """Parse the flags of `tutti bench NAME`, and check --budget."""
    options = parse(kind, f"tutti bench {name}", arguments)
    checked_seconds("--budget", options.budget, example=kind.budget)
    return options


def sizes_flag(text: str) -> list[int]:
    """Return the sizes in --sizes. Raises UsageError."""
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise UsageError(f"--sizes {text}: {error}") from None


def expect_flag(
    options: ExpectFlags, bench: str, allowed: AllowedValues | None = None
) -> Expectation | None:
    """Return the parsed value of --expect, or None if the flag is not given.

    Raises UsageError if the results of `bench` cannot be compared with this value.
    """
    if options.expect is None:
        return None
    return expectations.read_expectation(options.expect, bench, options.device, allowed)


# ---- Ranks ----


def is_rank() -> bool:
    """Return whether a launcher started this process as a rank."""
    return identify(os.environ).launcher != "python"


def default_ranks(options: RankFlags) -> int:
    """Return --ranks. The default is number of GPUs × --ranks-per-gpu, but at least 2."""
    if options.ranks is not None:
        return options.ranks
    gpus = 0 if options.device == "cpu" else visible_gpu_count()
    return max(2, gpus * options.ranks_per_gpu)


def start_ranks(
    kind: str,
    arguments: Sequence[str],
    options: RankFlags,
    ranks: int | None = None,
    env: Mapping[str, str] | None = None,
    largest: int = 0,
) -> int:
    """Run this command again as local ranks, and return the exit code.

    `largest` is the largest message size in bytes. It must fit into the free memory.
    """
    ranks = default_ranks(options) if ranks is None else ranks
    world = LocalWorld(
        command=[sys.executable, "-m", "tutti", "bench", kind, *arguments],
        ranks=ranks,
        device=options.device,
        ranks_per_gpu=options.ranks_per_gpu,
        show="first",
        grace=_GRACE_SECONDS,
        reported_codes=(1, 2),
    )
    world.check()
    if options.device == "cpu" or not visible_gpu_count():
        check_free_memory(largest, ranks, read_memory(SysFiles()).available_bytes)
    print_start("bench", ranks)
    return world.run(env)


@dataclass
class Session:
    """One bench on this rank: the world, a description of every rank, and the result files.

    The files of --json and --csv are rewritten after every row, so that measured rows are kept
    after Ctrl-C, SIGKILL or the death of a rank. The key `complete` in the JSON file is false until
    all rows have been measured.
    """

    world: "World"
    control: "RankControl"
    ranks: list[Row]
    schema: str
    json: Path | None
    csv: Path | None = None
    write_failed: bool = False

    @property
    def world_json(self) -> Row:
        """The value of the key `world` in the JSON file."""
        sharing_note = self.world.sharing_note
        return {"size": self.world.size, "ranks": self.ranks, "sharing_note": sharing_note}

    def print_ranks(self, with_backend: bool = False) -> None:
        """Print the host, device and CPUs of each rank, and a note if ranks share a GPU."""
        for row in self.ranks:
            backend = f"{row['backend']}, " if with_backend else ""
            pinned = "pinned to CPU" if row["pinned"] else "on CPU"
            threads = f"{row['threads']} thread{'s' * (row['threads'] != 1)}"
            place = f"{row['host']}, {row['device']}, {backend}{pinned} {row['cpus']}, {threads}"
            print_note(f"rank {row['rank']}: {place}")
        if self.world.sharing_note:
            print_note(f"note: {self.world.sharing_note}")

    def save(self, results: Row) -> None:
        """Write intermediate results. If writing fails, print a note (only once) and continue."""
        try:
            self.write(results)
        except UsageError as error:
            if not self.write_failed:
                print(f"note: {error}", file=sys.stderr, flush=True)
            self.write_failed = True

    def write(self, results: Row) -> None:
        """Write the results on rank 0. Raises UsageError if a file cannot be written."""
        if self.csv is not None and self.world.is_first:
            from tutti.bench.collectives.nccl_tests_table import csv_text

            write_result("--csv", self.csv, csv_text(results["rows"]))
        if self.json is not None and self.world.is_first:
            write_json(self.json, self.schema, results)

    def check_planned_rows(self, planned: Row, expectation: Expectation | None) -> None:
        """Before the measurement, raise UsageError if --expect has no value for any planned row."""
        # The rules of a TOML file can be checked only after the measurement.
        if expectation is not None and expectation.rules is None:
            with usage_error_on_rank_0(self.world):
                expectations.unmet_expectations({"schema": self.schema, **planned}, expectation)

    def exit_code(
        self, results: Row, expectation: Expectation | None, stopped: bool, wrong: bool
    ) -> int:
        """Return 130 if stopped, 1 if results are wrong or worse than --expect, else 0.

        Rank 0 prints the results that are worse than expected. Close the world before this call: if
        no row could be checked, only rank 0 raises UsageError, and the other ranks must not wait
        for it.
        """
        if stopped:
            return INTERRUPTED
        if expectation is None or not self.world.is_first:
            return int(wrong)
        content = {"schema": self.schema, **results}
        for difference in expectations.baseline_differences(content, expectation):
            text = f"--expect {expectation.name}: the environment differs ({difference})"
            print_line(text, sys.stderr)
        unmet = expectations.unmet_expectations(content, expectation)
        for miss in unmet:
            print_note(f"missed: {miss}")
        if not unmet:
            print_note(f"--expect {expectation.name}: all expectations are met")
        return int(wrong or bool(unmet))


@contextmanager
def open_session(
    options: RankFlags, schema: str, pin: bool | str, backend: str | None = None
) -> Iterator[Session]:
    """Join the world, pin this rank to CPUs, and yield a Session.

    All ranks must enter the `with` block. Inside the block, Ctrl-C or SIGTERM stops the bench after
    the current round.
    """
    from tutti.bench.rank_control import RankControl, pin_rank
    from tutti.world.exchange import gather_json
    from tutti.world.world import init

    with init(
        device=options.device,
        backend=backend,
        ranks_per_gpu=options.ranks_per_gpu if options.ranks_per_gpu > 1 else None,
        start_timeout=options.start_timeout,
    ) as world:
        cpus = pin_rank(world, pin)
        ranks = gather_json({**world.row(), "cpus": cpus, "pinned": pin not in (False, "none")})
        control = RankControl()
        with control.stop_on_signals():
            yield Session(world, control, ranks, schema, options.json)


def print_failed(cases: "Cases") -> None:
    """Print each case that crashed, with its error."""
    for failure in cases.failed:
        print_note(f"{failure['case']} failed: {failure['error']}")


def print_wrong(wrong: int) -> None:
    """Print the number of wrong elements, as in the last line of nccl-tests."""
    print_note(f"Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
