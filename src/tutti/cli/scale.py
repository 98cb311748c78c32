"""tutti scale: a job at several sizes, and what the missing efficiency is due to."""

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
from tutti.measure.terminal import text_width
from tutti.world.errors import UsageError
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.scale.campaign import Campaign, Turn
    from tutti.scale.job import Job, Mode, Schedule

    Further = Callable[[Turn, Path], Sequence[str]]

_INTERRUPTED = 130
_SCHEMA = "tutti.scale/1"
_NO_FORECAST: dict[str, Any] = {
    **{"rows": [], "below": {}, "best_case": False},
    "reason": "no forecast: a flag was swept",
}


@dataclass(frozen=True)
class Scale:
    """Run a job at several sizes and explain the loss of efficiency.

    tutti scale --ranks 1,2,4 --recipe gpt --batch 8

    tutti scale --ranks 1,2 -- train.py --lr 0.1

    tutti scale --ranks 1,2 -- torchrun --nproc-per-node {ranks} train.py

    The first trains a recipe; flags that are not here are those of tutti train. The others run a
    program unchanged: a script is started as ranks, a launcher is told how many by {ranks}. In each
    repeat every size has its turn. A program is ended when its steps have been seen. Ctrl-C leaves
    what was measured.
    """

    ranks: Annotated[str | None, tyro.conf.arg(aliases=["-n"])] = None
    """Sizes to run, as 1,2,4; efficiency is relative to the smallest."""
    mode: Literal["strong", "weak"] | None = None
    """strong: ranks share one batch. weak: each keeps its own. Of a recipe it decides the batch
    (default: strong); of a program it says what that does (default: weak)."""
    repeats: int = 3
    """How often every size has its turn."""
    steps: int | None = None
    """Steps of a run that are timed (default: 20)."""
    settle: int = 5
    """Steps of a run that are left out first."""
    active: int = 5
    """Steps of a run that are recorded, after those that are timed."""
    sweep: str | None = None
    """A flag of tutti train and its values, as bucket-mb=1,5,25 or batch=4,8: each at every size.
    lr=… compares losses instead, as tutti train --lr-sweep does."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute."""
    ranks_per_gpu: int = 1
    """How many ranks may share one GPU."""
    out: Path | None = None
    """The folder for scale.json and all runs (default: runs/scale-DATE-TIME)."""
    json: Path | None = None
    """Write the results to this file, too."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    flags, words = split_at_dashes(arguments)
    ours, others = _sort(flags)
    options = parse(Scale, "tutti scale", ours)
    if words[:1] == ["train"] or words[:2] == ["tutti", "train"]:
        others += words[words.index("train") + 1 :]  # the same as its flags before the dashes
        words = []
    sizes = _sizes(options)
    if not words and not any(word.partition("=")[0] == "--recipe" for word in others):
        program = next((word for word in others if word.endswith(".py")), None)
        cure = "--recipe NAME (lenet, gpt, …), or -- train.py …"
        if program is not None:
            cure = f"a program comes after two dashes: tutti scale --ranks 1,2 -- {program} …"
        raise UsageError(f"what should run? {cure}")
    if words and others:
        raise UsageError(f"no flag {others[0]}: see tutti scale --help; a program's come after it")
    _check(options)
    if words:
        return _program(options, sizes, words)
    return _recipe(options, sizes, others)


def _sort(flags: list[str]) -> tuple[list[str], list[str]]:
    """Flags of this command, and those that it passes on to tutti train."""
    names = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Scale)}
    names |= {"-n", "-h", "--help"}
    ours: list[str] = []
    others: list[str] = []
    value = False  # whether the next word is the value of a flag of ours; each takes one
    for word in flags:
        name = word.partition("=")[0].replace("_", "-")
        if name in names:
            value = "=" not in word and name not in ("-h", "--help")
            ours.append(word)
        else:
            (ours if value else others).append(word)
            value = False
    return ours, others


def _sizes(options: Scale) -> list[int]:
    if options.ranks is None:
        raise UsageError("--ranks: which sizes? As 1,2,4")
    items = options.ranks.split(",")
    if not all(item.strip().isdecimal() and int(item) > 0 for item in items):
        raise UsageError(f"--ranks {options.ranks}: whole numbers with commas between, as 1,2,4")
    return sorted({int(item) for item in items})


def _check(options: Scale) -> None:
    launcher = identify(os.environ).launcher
    if launcher != "python":
        raise UsageError(
            f"it starts ranks itself, and this process is one already, of {launcher}: start "
            "it once, without a launcher"
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


def _program(options: Scale, sizes: list[int], words: list[str]) -> int:
    """A program that knows nothing of tutti, at every size."""
    from tutti.cli import COMMANDS
    from tutti.profile.launch import program
    from tutti.scale.job import Job, check_placeholder

    if options.sweep is not None:
        raise UsageError("--sweep sets flags of tutti train: it needs --recipe NAME")
    starts_ranks = check_placeholder(words, sizes)
    words = ["python", *words] if words[0] == "-m" else words
    command = program(words, list(COMMANDS))
    job = Job(
        tuple(command),
        starts_ranks=starts_ranks,
        device=options.device,
        ranks_per_gpu=options.ranks_per_gpu,
    )
    return _measure(options, sizes, job, options.mode or "weak", lambda turn, folder: ())


def _recipe(options: Scale, sizes: list[int], flags: list[str]) -> int:
    """tutti's own training, at every size."""
    from tutti.cli.scale_recipe import SizedRecipe, read
    from tutti.scale.job import Job
    from tutti.scale.sweep import parse_sweep

    read(flags, sizes[0])  # wrong flags are told before anything is added to them
    mode: Mode = options.mode or "strong"
    sweep = None if options.sweep is None else parse_sweep(options.sweep)
    if sweep is not None and sweep[0] == "lr":
        return _learning_rates(options, sizes, flags, sweep[1])
    recipe = SizedRecipe(flags, sizes, mode, _schedule(options).steps)
    values = [{}] if sweep is None else [{sweep[0]: value} for value in sweep[1]]
    recipe.check(values)

    def with_folder(turn: "Turn", folder: Path) -> list[str]:
        return [*recipe.further(turn.ranks, turn.flags), "--out", str(folder)]

    command = [sys.executable, "-m", "tutti", "train", *flags]
    command += ["--device", options.device, "--ranks-per-gpu", str(options.ranks_per_gpu)]
    job = Job(tuple(command), ends=True, device=options.device, ranks_per_gpu=options.ranks_per_gpu)
    return _measure(options, sizes, job, mode, with_folder, values)


def _learning_rates(options: Scale, sizes: list[int], flags: list[str], values: list[str]) -> int:
    """Of a learning rate the loss is of interest, not the speed: as tutti train --lr-sweep."""
    from tutti.cli.lr_sweep import print_table, train_all
    from tutti.cli.train import read_flags

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
    results["forecast"] = _NO_FORECAST
    _write(options, _folder(options), results | {"sweep": sweep, "complete": code == 0})
    return code


def _schedule(options: Scale) -> "Schedule":
    from tutti.scale.job import Schedule

    return Schedule(options.settle, options.steps or Schedule.timed, options.active)


def _folder(options: Scale) -> Path:
    return (options.out or Path("runs") / f"scale-{strftime('%Y%m%d-%H%M%S')}").absolute()


def _measure(
    options: Scale,
    sizes: list[int],
    job: "Job",
    mode: "Mode",
    further: "Further",
    sweep: Sequence[dict[str, str]] = ({},),
) -> int:
    """Make all runs in turns; say and write what they gave."""
    from tutti.scale.campaign import Campaign, turns
    from tutti.scale.scaling import Scaling
    from tutti.scale.sweep import sweep_lines, sweep_rows
    from tutti.scale.table import lines

    out = _folder(options)
    job.check(sizes)
    print(job.describe(sizes), file=sys.stderr)
    campaign = Campaign(job, _schedule(options), out, further)
    campaign.make(turns(sizes, options.repeats, sweep))
    if campaign.runs:
        swept, width = any(turn for turn in sweep), text_width(sys.stdout)
        scaling = Scaling(campaign.runs, mode)
        results = scaling.results() | {"notes": [*scaling.notes(), *job.notes(sizes)]}
        if swept:
            results |= {"rows": [], "forecast": _NO_FORECAST}
            results["sweep"] = sweep_rows(campaign.runs, mode)
            print("\n".join(sweep_lines(results["sweep"], results["notes"], width)))
        else:
            results["sweep"] = []
            print("\n".join(lines(results, width)))
        results["complete"] = not campaign.stopped and campaign.failure is None
        results["runs"] = [run.row() for run in campaign.runs]
        _write(options, out, results)
    return _ended(campaign)


def _write(options: Scale, out: Path, results: dict[str, Any]) -> None:
    for path in (out / "scale.json", options.json):
        if path is not None:
            write_json(path, _SCHEMA, results)
    print(f"results are in {out}; a page of them: tutti report {out}", file=sys.stderr)


def _ended(campaign: "Campaign") -> int:
    if campaign.stopped:
        print("tutti scale: stopped; this is what was measured", file=sys.stderr)
        return _INTERRUPTED
    if campaign.failure is not None:
        print(f"tutti scale: {campaign.failure}", file=sys.stderr)
        return 2
    return 0
