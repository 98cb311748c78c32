"""tutti scale: run a job with several numbers of ranks, and explain the lost efficiency."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import strftime
from typing import Annotated, Any, Literal

import tyro

from tutti.cli.flags import (
    OutputFile,
    OutputFolder,
    check_at_least,
    parse,
    split_at_dashes,
    split_own_flags,
)
from tutti.cli.results import write_json
from tutti.cli.train import (
    Train,
    check_before_start,
    check_timed_run,
    print_learning_rates,
    read_flags,
    train_learning_rates,
)
from tutti.measure.terminal import text_width
from tutti.scale import scale_runs
from tutti.scale.efficiency import Scaling
from tutti.scale.forecast import Mode, no_forecast
from tutti.scale.scale_runs import RANKS, Job, PlannedRun, Schedule
from tutti.scale.scale_table import (
    add_verdicts,
    parse_sweep,
    scale_lines,
    sweep_lines,
    sweep_rows,
)
from tutti.train.recipe import Recipe
from tutti.train.recipe_check import MANY_SAMPLES
from tutti.train.training_schedule import check_numbers, make_schedule
from tutti.world.errors import UsageError
from tutti.world.launchers import identify


@dataclass(frozen=True)
class Scale:
    """Run a job with several numbers of ranks, and explain the lost efficiency.

        tutti scale --ranks 1,2,4 --recipe gpt --batch 8
        tutti scale --ranks 1,2 -- train.py --lr 0.1
        tutti scale --ranks 1,2 -- torchrun --nproc-per-node {ranks} train.py

    The first command trains a recipe and accepts the flags of tutti train. The other commands run
    an unchanged program. A script is started once per rank. If COMMAND is a launcher, {ranks} in it
    is replaced by the number of ranks. A program is stopped when enough steps have been recorded.
    Ctrl-C keeps the results so far.
    """

    USAGE_END = "[-- COMMAND]"
    ranks: Annotated[str | None, tyro.conf.arg(aliases=["-n"])] = None
    """Comma-separated numbers of ranks, such as `1,2,4`. Efficiency is relative to the run with
    the fewest ranks."""
    mode: Literal["strong", "weak"] | None = None
    """`strong`: the global batch is the same for every number of ranks. `weak`: the batch per rank
    is the same for every number of ranks. For a recipe, this flag sets the batch (default:
    `strong`). For a program, this flag tells tutti how the program sets its batch (default:
    `weak`)."""
    repeats: int = 3
    """Number of runs with each number of ranks."""
    until_clear: bool = False
    """Add repeats until the largest cause of lost efficiency exceeds the variation between repeats,
    or all causes are small. The maximum is 4 times --repeats."""
    steps: int | None = None
    """Number of timed steps per run (default: 20)."""
    settle: int = 5
    """Number of steps to skip at the start of a run."""
    active: int = Schedule.recorded
    """Number of steps to record with the profiler. On CPUs, recorded and timed steps alternate."""
    sweep: str | None = None
    """A flag of tutti train and its values, such as `bucket-mb=1,5,25` or `batch=4,8`. Every value
    is run with every number of ranks. `lr=0.1,0.2` compares losses instead of speeds, like tutti
    train --lr-sweep."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. `auto` selects CUDA if a GPU is visible."""
    ranks_per_gpu: int = 1
    """Maximum number of ranks that share one GPU."""
    out: OutputFolder | None = None
    """Directory for scale.json and all runs (default: runs/scale-DATE-TIME)."""
    json: OutputFile | None = None
    """Also write the results to this JSON file."""

    def schedule(self) -> Schedule:
        return Schedule(self.settle, self.steps or Schedule.timed, self.active)

    def new_directory(self) -> Path:
        return (self.out or Path("runs") / f"scale-{strftime('%Y%m%d-%H%M%S')}").absolute()

    def device_flags(self) -> list[str]:
        return ["--device", self.device, "--ranks-per-gpu", str(self.ranks_per_gpu)]


def main(arguments: list[str]) -> int:
    flags, command = split_at_dashes(arguments)
    own_flags, train_flags = split_own_flags(Scale, flags)
    options = parse(Scale, "tutti scale", own_flags)
    if command[:1] == ["train"] or command[:2] == ["tutti", "train"]:
        # Flags after `-- train` have the same meaning as flags before the dashes.
        train_flags += command[command.index("train") + 1 :]
        command = []
    if options.ranks is None:
        raise UsageError("--ranks is required. Use numbers of ranks such as --ranks 1,2,4.")
    items = options.ranks.split(",")
    if not all(item.strip().isdecimal() and int(item) > 0 for item in items):
        raise UsageError(
            f"--ranks must be whole numbers separated by commas, such as 1,2,4, got {options.ranks}"
        )
    sizes = sorted({int(item) for item in items})
    if not command and not any(flag.partition("=")[0] == "--recipe" for flag in train_flags):
        program = next((flag for flag in train_flags if flag.endswith(".py")), None)
        cure = "Add --recipe NAME (such as gpt) or -- COMMAND."
        if program is not None:
            cure = f"Write two dashes before the program: tutti scale --ranks 1,2 -- {program} …"
        raise UsageError(f"there is no job to run. {cure}")
    if command and train_flags:
        raise UsageError(
            f"there is no flag {train_flags[0]}. See tutti scale --help. Write the flags of the "
            "program after the name of the program."
        )
    _check(options)
    if command:
        return _scale_program(options, sizes, command)
    return _scale_recipe(options, sizes, train_flags)


def _check(options: Scale) -> None:
    launcher = identify(os.environ).launcher
    if launcher != "python":
        raise UsageError(
            f"tutti scale starts the ranks, but {launcher} has started this process as a rank. Run "
            "tutti scale without a launcher."
        )
    check_at_least(1, options, "repeats", "steps", "active", "ranks_per_gpu")
    check_at_least(0, options, "settle")
    out = options.out
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out} exists and is not empty. Choose another directory.")


def _scale_program(options: Scale, sizes: list[int], command: list[str]) -> int:
    """Measure an unchanged training program, and return the exit code."""
    from tutti.cli import COMMANDS
    from tutti.profile.captured_command import resolve_command

    if options.sweep is not None:
        raise UsageError("--sweep sets flags of tutti train, so it needs --recipe NAME")
    starts_ranks = scale_runs.starts_ranks_itself(command, sizes)
    command = ["python", *command] if command[0] == "-m" else command
    resolved = tuple(resolve_command(command, list(COMMANDS)))
    device, per_gpu = options.device, options.ranks_per_gpu
    job = Job(resolved, starts_ranks=starts_ranks, device=device, ranks_per_gpu=per_gpu)
    return _measure(options, sizes, job, options.mode or "weak", lambda run, folder: ())


def _scale_recipe(options: Scale, sizes: list[int], flags: list[str]) -> int:
    """Measure tutti train with these flags, and return the exit code."""
    # Check the user's flags first, before `extra_flags` adds flags to them.
    check_numbers(_read_train_flags(flags, sizes[0])[0].settings)
    mode: Mode = options.mode or "strong"
    swept_flag, values = ("", []) if options.sweep is None else parse_sweep(options.sweep)
    if swept_flag == "lr":
        return _sweep_learning_rates(options, sizes, flags, values)
    if swept_flag and options.until_clear:
        raise UsageError("--until-clear does not work with --sweep. Use --repeats.")
    sweep = [{swept_flag: value} for value in values] or [{}]
    steps = str(options.schedule().steps)

    def extra_flags(ranks: int, swept_values: dict[str, str]) -> list[str]:
        added = [text for flag, value in swept_values.items() for text in (f"--{flag}", value)]
        # A checkpoint would delay the timed steps, so save one only after the last step.
        added += ["--steps", steps, "--no-evaluate", "--checkpoint-every", steps]
        settings = _read_train_flags([*flags, *added], ranks)[0].settings
        batch = settings.batching.global_batch
        if mode == "weak" and batch is not None:
            raise UsageError(
                f"--global-batch {batch} is the batch of all ranks together, but --mode weak needs "
                "the batch per rank. Use --batch, or --mode strong."
            )
        if mode == "strong" and not batch:
            # All runs use the global batch of the run with the fewest ranks.
            batch = make_schedule(settings, sizes[0], MANY_SAMPLES).global_batch
            added += ["--global-batch", str(batch)]
        return added

    for ranks in sizes:
        for swept in sweep:
            train_flags = [*flags, *extra_flags(ranks, swept), *options.device_flags()]
            train, base = _read_train_flags(train_flags, ranks)
            train.check_ranks(ranks)
            try:
                make_schedule(train.settings, ranks, MANY_SAMPLES)
            except UsageError as error:
                batch = train.settings.batching.global_batch
                shared = f" (strong scaling: global batch {batch} in all runs)" if batch else ""
                cure = ", or --mode weak" if batch else ""
                raise UsageError(f"with {ranks} ranks{shared}: {error}{cure}") from None
            check_before_start(train, base, ranks)

    def extra_arguments(run: PlannedRun, folder: Path) -> list[str]:
        return [*extra_flags(run.ranks, run.flags), "--out", str(folder)]

    command = [sys.executable, "-m", "tutti", "train", *flags, *options.device_flags()]
    job = Job(tuple(command), ends=True, device=options.device, ranks_per_gpu=options.ranks_per_gpu)
    return _measure(options, sizes, job, mode, extra_arguments, sweep)


def _sweep_learning_rates(
    options: Scale, sizes: list[int], flags: list[str], values: list[str]
) -> int:
    """Compare the losses of learning rates instead of speeds, like tutti train --lr-sweep."""
    train_flags = [*flags, "--ranks", ",".join(map(str, sizes)), "--lr-sweep", ",".join(values)]
    train_flags += options.device_flags()
    train_flags += [] if options.steps is None else ["--steps", str(options.steps)]
    summaries, code = train_learning_rates(read_flags(train_flags, "tutti scale")[0], train_flags)
    print_learning_rates(summaries)
    keys = ("final_loss", "test_loss", "test_accuracy", "samples_per_s", "steps", "diverged")
    sweep = [
        {"flags": {"lr": rate}, "ranks": ranks, **{key: summary.get(key) for key in keys}}
        for (rate, ranks), summary in summaries.items()
    ]
    results: dict[str, Any] = {"mode": None, "unit": None, "rows": [], "fit": None}
    results |= {"forecast": no_forecast("a flag was swept"), "sweep": sweep, "complete": code == 0}
    _write(options, options.new_directory(), results)
    return code


def _measure(
    options: Scale,
    sizes: list[int],
    job: Job,
    mode: Mode,
    extra_arguments: Callable[[PlannedRun, Path], Sequence[str]],
    sweep: Sequence[dict[str, str]] = ({},),
) -> int:
    """Execute all runs, then print and write the results."""
    out = options.new_directory()
    job.check(sizes)
    print(job.describe(sizes), file=sys.stderr)
    series = scale_runs.RunSeries(job, options.schedule(), out, extra_arguments)
    series.execute(scale_runs.plan_runs(sizes, range(options.repeats), sweep))
    if options.until_clear:
        _add_repeats(series, sizes, options.repeats, mode)
    if series.runs:
        width = text_width(sys.stdout)
        scaling = Scaling(series.runs, mode)
        results = scaling.results()
        results |= {"rows": add_verdicts(results["rows"])}
        results |= {"notes": [*scaling.notes(), *job.notes(sizes), *series.notes()], "sweep": []}
        if any(sweep):
            results |= {"rows": [], "forecast": no_forecast("a flag was swept")}
            results["sweep"] = sweep_rows(series.runs, mode)
            print("\n".join(sweep_lines(results["sweep"], results["notes"], width)))
        else:
            print("\n".join(scale_lines(results, width)))
        results["complete"] = not series.stopped and series.failure is None
        results["runs"] = [run.row() for run in series.runs]
        _write(options, out, results)
    if series.stopped:
        print("tutti scale: stopped. The results of completed runs are kept.", file=sys.stderr)
        return 130
    if series.failure is not None:
        print(f"tutti scale: {series.failure}", file=sys.stderr)
        return 1 if series.crashed else 2
    return 0


def _add_repeats(
    series: scale_runs.RunSeries, sizes: Sequence[int], repeats: int, mode: Mode
) -> None:
    """Add repeats until every row is clear (as efficiency.py defines it), up to 4 × --repeats."""
    for repeat in range(repeats, 4 * repeats):
        ended = series.stopped or series.failure is not None
        if ended or all(row["clear"] for row in Scaling(series.runs, mode).rows()[1:]):
            return
        series.execute(scale_runs.plan_runs(sizes, [repeat]))


def _write(options: Scale, out: Path, results: dict[str, Any]) -> None:
    for path in (out / "scale.json", options.json):
        if path is not None:
            write_json(path, "tutti.scale/1", results)
    print(f"The results are in {out}. For an HTML page: tutti report {out}", file=sys.stderr)


def _read_train_flags(flags: Sequence[str], ranks: int) -> tuple[Train, Recipe]:
    """Call `read_flags` with {ranks} in the flags replaced by the number of ranks."""
    options, base = read_flags([flag.replace(RANKS, str(ranks)) for flag in flags], "tutti scale")
    check_timed_run(options)
    return options, base
