"""tutti scale: run a job with several numbers of ranks, and explain the lost efficiency."""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import strftime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.cli.flags import parse, split_at_dashes
from tutti.cli.results import check_writable, write_json
from tutti.cli.train import Train, read_flags
from tutti.measure.terminal import text_width
from tutti.scale.forecast import Mode
from tutti.scale.scale_runs import RANKS
from tutti.train.batch_schedule import make_schedule
from tutti.world.errors import UsageError
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.scale.scale_runs import Job, PlannedRun, Schedule

    ExtraWords = Callable[[PlannedRun, Path], Sequence[str]]

_INTERRUPTED = 130
_SCHEMA = "tutti.scale/1"


@dataclass(frozen=True)
class Scale:
    """Run a job with several numbers of ranks and explain the loss of efficiency.

    tutti scale --ranks 1,2,4 --recipe gpt --batch 8

    tutti scale --ranks 1,2 -- train.py --lr 0.1

    tutti scale --ranks 1,2 -- torchrun --nproc-per-node {ranks} train.py

    The first trains a recipe and accepts the flags of tutti train. The others run a program
    unchanged: a script is started once per rank, a launcher gets the number of ranks from {ranks}.
    Every repeat runs every number of ranks. A program is ended after its steps are recorded. Ctrl-C
    keeps what was measured.
    """

    ranks: Annotated[str | None, tyro.conf.arg(aliases=["-n"])] = None
    """Numbers of ranks, as 1,2,4; efficiency is relative to the smallest."""
    mode: Literal["strong", "weak"] | None = None
    """strong: all ranks share one batch. weak: each rank keeps its batch. For a recipe this sets
    the batch (default: strong); for a program it states what the program does (default: weak)."""
    repeats: int = 3
    """How often every number of ranks is run."""
    steps: int | None = None
    """Timed steps of a run (default: 20)."""
    settle: int = 5
    """Steps to skip at the start of a run."""
    active: int = 5
    """Recorded steps of a run, after the timed ones."""
    sweep: str | None = None
    """A flag of tutti train and its values, as bucket-mb=1,5,25 or batch=4,8; all are run with
    every number of ranks. lr=… compares losses instead, like tutti train --lr-sweep."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of the ranks; auto: CUDA if a GPU is visible."""
    ranks_per_gpu: int = 1
    """Ranks that may share one GPU."""
    out: Path | None = None
    """The folder for scale.json and all runs (default: runs/scale-DATE-TIME)."""
    json: Path | None = None
    """Also write the results to this file."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    flags, words = split_at_dashes(arguments)
    own_flags, train_flags = _split_flags(flags)
    options = parse(Scale, "tutti scale", own_flags)
    if words[:1] == ["train"] or words[:2] == ["tutti", "train"]:
        train_flags += words[words.index("train") + 1 :]  # treated as flags before the dashes
        words = []
    sizes = _sizes(options)
    if not words and not any(word.partition("=")[0] == "--recipe" for word in train_flags):
        program = next((word for word in train_flags if word.endswith(".py")), None)
        cure = "--recipe NAME (lenet, gpt, …), or -- train.py …"
        if program is not None:
            cure = f"put the program after two dashes: tutti scale --ranks 1,2 -- {program} …"
        raise UsageError(f"no job is given: {cure}")
    if words and train_flags:
        raise UsageError(
            f"no flag {train_flags[0]}: see tutti scale --help; flags of a program come after it"
        )
    _check(options)
    if words:
        return _scale_program(options, sizes, words)
    return _scale_recipe(options, sizes, train_flags)


def _split_flags(flags: list[str]) -> tuple[list[str], list[str]]:
    """Return the flags of this command, and the flags for tutti train."""
    names = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Scale)}
    names |= {"-n", "-h", "--help"}
    own: list[str] = []
    others: list[str] = []
    expects_value = False  # the next word is the value of a flag of this command
    for word in flags:
        name = word.partition("=")[0].replace("_", "-")
        if name in names:
            expects_value = "=" not in word and name not in ("-h", "--help")
            own.append(word)
        else:
            (own if expects_value else others).append(word)
            expects_value = False
    return own, others


def _sizes(options: Scale) -> list[int]:
    if options.ranks is None:
        raise UsageError("--ranks is required: give numbers of ranks, as 1,2,4")
    items = options.ranks.split(",")
    if not all(item.strip().isdecimal() and int(item) > 0 for item in items):
        raise UsageError(f"--ranks {options.ranks}: use whole numbers and commas, as 1,2,4")
    return sorted({int(item) for item in items})


def _check(options: Scale) -> None:
    launcher = identify(os.environ).launcher
    if launcher != "python":
        raise UsageError(
            f"tutti scale starts ranks itself, but {launcher} started this process as a rank: "
            "start it once, without a launcher"
        )
    for flag in ("repeats", "steps", "active", "ranks_per_gpu"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            raise UsageError(f"--{flag.replace('_', '-')} {value}: use 1 or more")
    if options.settle < 0:
        raise UsageError(f"--settle {options.settle}: use 0 or more")
    check_writable("--json", options.json)
    out = options.out
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out} exists and is not empty: choose another")


def _scale_program(options: Scale, sizes: list[int], words: list[str]) -> int:
    """Run any training program, unchanged."""
    from tutti.cli import COMMANDS
    from tutti.profile.captured_command import resolve_command
    from tutti.scale.scale_runs import Job, starts_ranks_itself

    if options.sweep is not None:
        raise UsageError("--sweep sets flags of tutti train: it needs --recipe NAME")
    starts_ranks = starts_ranks_itself(words, sizes)
    words = ["python", *words] if words[0] == "-m" else words
    job = Job(
        tuple(resolve_command(words, list(COMMANDS))),
        starts_ranks=starts_ranks,
        device=options.device,
        ranks_per_gpu=options.ranks_per_gpu,
    )
    return _measure(options, sizes, job, options.mode or "weak", lambda run, folder: ())


def _scale_recipe(options: Scale, sizes: list[int], flags: list[str]) -> int:
    """Run tutti train."""
    from tutti.scale.scale_runs import Job
    from tutti.scale.scale_table import parse_sweep

    read_train_flags(flags, sizes[0])  # report wrong flags before others are added
    mode: Mode = options.mode or "strong"
    sweep = None if options.sweep is None else parse_sweep(options.sweep)
    if sweep is not None and sweep[0] == "lr":
        return _sweep_learning_rates(options, sizes, flags, sweep[1])
    recipe = ScaledRecipe(flags, sizes, mode, _schedule(options).steps)
    values = [{}] if sweep is None else [{sweep[0]: value} for value in sweep[1]]
    recipe.check(values)

    def extra_words(run: "PlannedRun", folder: Path) -> list[str]:
        return [*recipe.extra_flags(run.ranks, run.flags), "--out", str(folder)]

    command = [sys.executable, "-m", "tutti", "train", *flags]
    command += ["--device", options.device, "--ranks-per-gpu", str(options.ranks_per_gpu)]
    job = Job(tuple(command), ends=True, device=options.device, ranks_per_gpu=options.ranks_per_gpu)
    return _measure(options, sizes, job, mode, extra_words, values)


def _sweep_learning_rates(
    options: Scale, sizes: list[int], flags: list[str], values: list[str]
) -> int:
    """Compare the losses (not the speed) of learning rates, like tutti train --lr-sweep."""
    from tutti.cli.lr_sweep import print_table, train_all
    from tutti.cli.train import read_flags
    from tutti.scale.forecast import no_forecast

    words = [*flags, "--ranks", ",".join(map(str, sizes)), "--lr-sweep", ",".join(values)]
    words += ["--device", options.device, "--ranks-per-gpu", str(options.ranks_per_gpu)]
    words += [] if options.steps is None else ["--steps", str(options.steps)]
    trained, code = train_all(read_flags(words, "tutti scale")[0], words)
    print_table(trained)
    kept = ("final_loss", "test_loss", "test_accuracy", "samples_per_s", "steps", "diverged")
    sweep = [
        {"flags": {"lr": rate}, "ranks": ranks, **{key: found.get(key) for key in kept}}
        for (rate, ranks), found in trained.items()
    ]
    results: dict[str, Any] = {"mode": None, "unit": None, "rows": [], "fit": None}
    results["forecast"] = no_forecast("a flag was swept")
    _write(options, _folder(options), results | {"sweep": sweep, "complete": code == 0})
    return code


def _schedule(options: Scale) -> "Schedule":
    from tutti.scale.scale_runs import Schedule

    return Schedule(options.settle, options.steps or Schedule.timed, options.active)


def _folder(options: Scale) -> Path:
    return (options.out or Path("runs") / f"scale-{strftime('%Y%m%d-%H%M%S')}").absolute()


def _measure(
    options: Scale,
    sizes: list[int],
    job: "Job",
    mode: "Mode",
    extra_words: "ExtraWords",
    sweep: Sequence[dict[str, str]] = ({},),
) -> int:
    """Execute all runs, then print and write the results."""
    from tutti.scale.efficiency import Scaling
    from tutti.scale.forecast import no_forecast
    from tutti.scale.scale_runs import RunSeries, plan_runs
    from tutti.scale.scale_table import scale_lines, sweep_lines, sweep_rows

    out = _folder(options)
    job.check(sizes)
    print(job.describe(sizes), file=sys.stderr)
    series = RunSeries(job, _schedule(options), out, extra_words)
    series.execute(plan_runs(sizes, options.repeats, sweep))
    if series.runs:
        width = text_width(sys.stdout)
        scaling = Scaling(series.runs, mode)
        results = scaling.results() | {"notes": [*scaling.notes(), *job.notes(sizes)], "sweep": []}
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
        print("tutti scale: stopped; the runs before are kept", file=sys.stderr)
        return _INTERRUPTED
    if series.failure is not None:
        print(f"tutti scale: {series.failure}", file=sys.stderr)
        return 2
    return 0


def _write(options: Scale, out: Path, results: dict[str, Any]) -> None:
    for path in (out / "scale.json", options.json):
        if path is not None:
            write_json(path, _SCHEMA, results)
    print(f"the results are in {out}; for an HTML page: tutti report {out}", file=sys.stderr)


# Number of samples for a trial schedule, because the real dataset is not loaded here.
_MANY_SAMPLES = 1 << 40


@dataclass(frozen=True)
class ScaledRecipe:
    """A recipe, given by flags of tutti train. `steps` is the number of steps of each run."""

    flags: Sequence[str]
    sizes: Sequence[int]
    mode: Mode
    steps: int

    def extra_flags(self, ranks: int, swept: dict[str, str]) -> list[str]:
        """Return the flags to add for a number of ranks and the values of a sweep."""
        words = [word for flag, value in swept.items() for word in (f"--{flag}", value)]
        words += ["--steps", str(self.steps), "--no-evaluate"]
        words += ["--checkpoint-every", str(self.steps)]  # not within the timed steps
        batch = self._global_batch(read_train_flags([*self.flags, *words], ranks))
        return words if batch is None else [*words, "--global-batch", str(batch)]

    def check(self, sweep: Sequence[dict[str, str]]) -> None:
        """Raise UsageError if tutti train would reject the flags for any number of ranks."""
        for swept in sweep:
            for ranks in self.sizes:
                words = [*self.flags, *self.extra_flags(ranks, swept)]
                _check_schedule(read_train_flags(words, ranks), ranks)

    def _global_batch(self, options: Train) -> int | None:
        """Return the value of --global-batch to add, or None.

        In strong scaling, all runs use the global batch of the smallest number of ranks.
        """
        given = options.settings.batching.global_batch
        if self.mode == "weak":
            if given is not None:
                raise UsageError(
                    f"--global-batch {given} is shared by all ranks, but --mode weak keeps the "
                    "batch of each rank: use --batch, or --mode strong"
                )
            return None
        if given:
            return None
        return make_schedule(options.settings, self.sizes[0], _MANY_SAMPLES).global_batch


def read_train_flags(flags: Sequence[str], ranks: int) -> Train:
    """Parse flags of tutti train, with {ranks} replaced by the number of ranks."""
    options, _ = read_flags([flag.replace(RANKS, str(ranks)) for flag in flags], "tutti scale")
    for name in ("resume", "profile", "lr_sweep"):
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} works with tutti train only: leave it out")
    return options


def _check_schedule(options: Train, ranks: int) -> None:
    try:
        make_schedule(options.settings, ranks, _MANY_SAMPLES)
    except UsageError as error:
        batch = options.settings.batching.global_batch
        shared = f" (strong scaling: all runs share {batch} samples)" if batch else ""
        cure = ", or --mode weak" if batch else ""
        raise UsageError(f"with {ranks} ranks{shared}: {error}{cure}") from None
