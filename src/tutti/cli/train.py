"""tutti train: trains a recipe on one rank or many."""

import io
import json
import math
import os
import sys
import tempfile
from contextlib import redirect_stderr
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from time import strftime
from typing import Annotated, Any

import tyro

from tutti.cli.flags import OutputFolder, flag_value, parse, without_flags
from tutti.cli.results import WorldFlags, print_start, usage_error_on_rank_0
from tutti.measure.units import plural
from tutti.models.config import OwnModelConfig
from tutti.parallel.layout import Layout
from tutti.train.recipe import (
    RECIPES,
    Recipe,
    built_in_recipe,
    default_recipe,
    read_recipe_and_ranks,
    without_overridden,
)
from tutti.train.recipe_check import check_flags_have_effect, check_recipe
from tutti.train.run_directory import WANDB_METRICS, RunDirectory, check_wandb
from tutti.train.train_run import (
    GRACE_SECONDS,
    complete_run,
    describe_end,
    describe_start,
    run_name,
    start_run,
)
from tutti.train.training_schedule import check_numbers
from tutti.world.errors import HANG_AFTER, UsageError
from tutti.world.launchers import identify

Summaries = dict[tuple[float, int], dict[str, Any]]  # keys are (learning rate, number of ranks)

# Exit code of a run that was stopped by a signal and that --resume can continue (EX_TEMPFAIL in
# sysexits.h).
STOPPED = 75
# Flags that a plan may set. If such a flag is given, the plan keeps its value.
PLANNED_FLAGS = (
    "--batch",
    "--accumulation",
    "--checkpoint-activations",
    "--pipeline-schedule",
    "--bucket-mb",
)
# Pairs of (flag, flag that overrides it).
_OVERRIDDEN = (
    ("--epochs", "--steps"),
    ("--batch", "--global-batch"),
    ("--lr", "--lr-sweep"),
    ("--out", "--lr-sweep"),
)


@dataclass(frozen=True, kw_only=True)
class Train(WorldFlags):
    """Train a recipe: tutti train --recipe lenet --ranks 2

    A flag overrides the value in a recipe file, and a value in a recipe file overrides the value of
    its base recipe. Ctrl-C saves a checkpoint. To continue a run: tutti train --resume --out DIR.
    To repeat a run with the same ranks and layout: tutti train --recipe DIR/recipe.toml.
    """

    settings: Recipe
    recipe: str = "lenet"
    """Recipe to train: `lenet`, `wideresnet`, `efficientnet`, `gpt`, `own` (for --model
    package.module:function, with AdamW), `hf` (to fine-tune --model hf:FOLDER), or a TOML file that
    begins with `base = "NAME"`. The default is `hf` for --model hf:FOLDER, `own` for --model
    package.module:function, and `lenet` otherwise."""
    ranks: Annotated[str | None, tyro.conf.arg(aliases=["-n"])] = None
    """Number of local ranks to start (default: the number that --layout needs, or the number in the
    recipe file, or 1). Ignored under torchrun, srun or mpirun. With --lr-sweep, a comma-separated
    list such as `1,2`."""
    out: OutputFolder | None = None
    """Run directory (default: runs/NAME-DATE-TIME)."""
    resume: bool = False
    """Continue the run in --out from its last valid checkpoint."""
    evaluate_only: bool = False
    """With --resume, do not train: print the test loss and the metric of the last checkpoint."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run directory, including the traces of --profile."""
    wandb: str | None = None
    """Also log the metrics to this Weights & Biases project. Needs pip install wandb."""
    benchmark: bool = False
    """Measure the throughput: train 50 steps (or --steps) on synthetic data, without evaluation and
    checkpoints."""
    profile: bool = False
    """Record traces of a few steps on every rank. To explain the traces: tutti profile --trace
    DIR."""
    nvtx: bool = False
    """Mark a few steps for Nsight Systems. Run this command with `nsys profile -c
    cudaProfilerApi`. Needs CUDA."""
    observe: bool = True
    """Record the operations and stacks of the ranks in shared memory. `tutti why` and `tutti watch`
    read the records."""
    hang_after: float = HANG_AFTER
    """Seconds without progress after which the ranks hang, and the reason is printed."""
    lr_sweep: str | None = None
    """Comma-separated learning rates to compare, such as `0.05,0.1,0.2`. Trains once for each
    learning rate and each number in --ranks."""
    lr_find: int | None = None
    """Suggest a value for --lr: train this number of steps (for example 100) while the learning
    rate grows from 1e-7 to 10, and print the losses. Writes no run directory."""
    batch_find: bool = False
    """Find the largest --batch that fits into memory with these ranks. Each batch size is tried in
    a short run with new processes. Writes no run directory."""

    def run_directory(self) -> Path:
        name = run_name(self.settings, self.recipe)
        return self.out or Path("runs") / f"{name}-{strftime('%Y%m%d-%H%M%S')}"


def main(arguments: list[str]) -> int:
    options, base = read_flags(arguments)
    starts_ranks = identify(os.environ).launcher == "python"
    if options.settings.parallel.layout == "auto":
        if not starts_ranks:
            raise UsageError(
                "--layout auto works only if tutti train starts the ranks. Run tutti plan first, "
                "and use its layout."
            )
        arguments = _with_best_layout(options, arguments)
        options, base = read_flags(arguments)
    if options.resume and options.out is None:
        raise UsageError("--resume needs the directory of the run. Add --out DIR.")
    if options.evaluate_only and not (options.resume and options.settings.length.evaluate):
        missing = "--evaluate" if options.resume else "--resume --out RUN"
        raise UsageError(f"--evaluate-only needs a checkpoint and test data. Add {missing}.")
    for name in ("tensorboard", "wandb", "profile", "benchmark"):
        if options.evaluate_only and getattr(options, name):
            raise UsageError(f"--{name} has no effect with --evaluate-only. Omit one of them.")
    if starts_ranks:
        _check_modes(options)
        _check_combinations(options, arguments)
    elif options.batch_find and not _is_attempt(options, arguments):
        raise UsageError("--batch-find starts its own ranks: use --ranks N instead of a launcher")
    if options.lr_sweep is not None:
        for ranks in _numbers(options.ranks or "1", "--ranks", int):
            check_before_start(options, base, int(ranks))
        summaries, code = train_learning_rates(options, arguments)
        if code == 0:
            print_learning_rates(summaries)
        return code
    if not starts_ranks:
        return _train(options, base)
    ranks = _local_ranks(options)
    check_before_start(options, base, ranks)
    if options.batch_find:
        return _find_batch(options, base, arguments, ranks)
    if options.ranks is None and ranks == 1:
        return _train(options, base)
    directory = options.run_directory()
    command = ["train", *arguments, "--out", str(directory)]
    from tutti.observe.why import RunObserver

    observer = RunObserver(options.hang_after, directory) if options.observe else None
    return options.start_ranks(command, ranks, grace=GRACE_SECONDS, observer=observer)


def _with_best_layout(options: Train, arguments: list[str]) -> list[str]:
    """Return the arguments with `--layout auto` replaced by the flags of this host's best plan."""
    if options.lr_sweep is not None or options.resume or options.batch_find:
        other = "--batch-find" if options.batch_find else "--lr-sweep"
        other = "--resume" if options.resume else other
        raise UsageError(f"--layout auto cannot be combined with {other}. Use a fixed layout.")
    layout = replace(options.settings.parallel, layout=None)
    settings = replace(options.settings, parallel=layout)
    ranks = _local_ranks(replace(options, settings=settings))
    options.check_ranks(ranks)
    check_recipe(settings, ranks, options.device_type())
    from tutti.plan.planned_job import PlannedJob, local_cluster

    given = [flag for flag in PLANNED_FLAGS if flag_value(flag, arguments) is not None]
    device = options.device_type()
    cluster = local_cluster(ranks, device, options.ranks_per_gpu)
    plan = PlannedJob.of(settings, device, given=given).plan(cluster)
    if plan.best is None or plan.best.step is None:
        raise UsageError(f"--layout auto: no layout of {ranks} ranks fits: {plan.advice}")
    flags = plan.best.candidate.flags()
    print(
        f"--layout auto: {' '.join(flags)} (predicted step {plan.best.step.step_s:.3g} s, "
        f"{plan.searched} combinations)",
        file=sys.stderr,
    )
    replaced = ("--layout", *(flag for flag in flags if flag.startswith("--")))
    if "--global-batch" in flags:
        replaced = (*replaced, "--batch")
    return [*without_flags(arguments, replaced), *flags]


def _local_ranks(options: Train) -> int:
    if options.ranks is not None:
        if not options.ranks.isdecimal():
            raise UsageError(
                f"--ranks must be a whole number (or a list with --lr-sweep), got {options.ranks}"
            )
        return int(options.ranks)
    layout = options.settings.parallel.layout
    return 1 if layout is None else Layout.parse(layout).size


def _check_combinations(options: Train, arguments: list[str]) -> None:
    """Raise UsageError if one flag of the command line overrides another one."""
    for flag, other in _OVERRIDDEN:
        if flag_value(flag, arguments) is not None and flag_value(other, arguments) is not None:
            raise UsageError(f"{flag} has no effect with {other}. Omit one of them.")
    if options.resume and options.lr_sweep is not None:
        raise UsageError("--resume has no effect with --lr-sweep. Omit one of them.")


_MIN_RANGE_STEPS = 20  # the minimum of --lr-find
# Flags and recipe values that have no effect with --lr-find or --batch-find.
_NO_RUN = ("out", "resume", "evaluate_only", "tensorboard", "wandb", "benchmark", "profile", "nvtx")
_NO_LENGTH = (
    *("steps", "epochs", "evaluate_every", "checkpoint_every"),
    *("keep", "keep_best", "patience"),
)
_NO_LR = ("lr", "schedule", "warmup", "final_lr", "metric", "evaluate")


def _check_modes(options: Train) -> None:
    """Raise UsageError for flags that have no effect with --lr-find or --batch-find."""
    for mode in ("lr_find", "batch_find"):
        if getattr(options, mode) in (None, False):
            continue
        others = (*_NO_RUN, "lr_sweep", *({"lr_find", "batch_find"} - {mode}))
        for name in others:
            if getattr(options, name):
                raise UsageError(
                    f"--{name.replace('_', '-')} has no effect with --{mode.replace('_', '-')}. "
                    "Omit one of them."
                )
    if options.lr_find is not None and not _MIN_RANGE_STEPS <= options.lr_find < 1 << 31:
        raise UsageError(
            f"--lr-find must be at least {_MIN_RANGE_STEPS} steps, got {options.lr_find}"
        )


def _unused_in_mode(options: Train) -> dict[str, str]:
    """Return {recipe value: flag} for values that --lr-find or --batch-find does not use."""
    if options.lr_find is not None:
        return dict.fromkeys((*_NO_LENGTH, *_NO_LR), "--lr-find")
    if options.batch_find:
        return dict.fromkeys((*_NO_LENGTH, "batch", "global_batch"), "--batch-find")
    return {}


def check_before_start(options: Train, base: Recipe, ranks: int) -> None:
    """Run the checks that need neither torch nor ranks. Raise UsageError if a check fails."""
    settings, device = options.settings, options.device_type()
    if options.nvtx and device != "cuda":
        raise UsageError(_NVTX_NEEDS_CUDA)
    check_wandb(options.wandb)
    # Check the number of ranks first, because the other checks use it.
    options.check_ranks(ranks)
    check_flags_have_effect(settings, base, options.benchmark, _unused_in_mode(options))
    check_recipe(settings, ranks, device)
    RunDirectory(options.run_directory()).check(options.resume)


def check_timed_run(options: Train) -> None:
    """Raise UsageError for flags of tutti train that do not work in tutti scale and tutti tune."""
    runs = ("resume", "evaluate_only", "profile", "wandb")
    for name in (*runs, "lr_sweep", "lr_find", "batch_find"):
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} only works with tutti train. Omit {flag}.")


_NVTX_NEEDS_CUDA = "--nvtx needs CUDA, but the device is cpu. Omit --nvtx."


def read_flags(arguments: list[str], program: str = "tutti train") -> tuple[Train, Recipe]:
    """Return the options of a command line, and the recipe without the changes by flags.

    The model of the recipe determines which flags exist. A resumed run uses the recipe in its run
    directory, unless --recipe is given.
    """
    name, out = flag_value("--recipe", arguments), flag_value("--out", arguments)
    if name is None and out is not None and "--resume" in arguments:
        saved_recipe = Path(out) / "recipe.toml"
        name = str(saved_recipe) if os.path.isfile(saved_recipe) else None
    if name is None:
        name = default_recipe(flag_value("--model", arguments) or "")
    base, ranks = read_recipe_and_ranks(name)
    if name not in RECIPES:
        try:
            check_numbers(base)
        except UsageError as error:
            raise UsageError(f"--recipe {name}: {error}") from None
    # If --layout is given, its number of ranks replaces the number in the recipe file.
    in_file = ranks is not None and flag_value("--layout", arguments) is None
    default = Train(settings=base, recipe=name, ranks=str(ranks) if in_file else None)
    options = parse(Train, program, arguments, default=default)
    given = {
        name
        for name in ("epochs", "steps", "batch", "global_batch")
        if flag_value(f"--{name.replace('_', '-')}", arguments) is not None
    }
    settings = without_overridden(options.settings, given)
    options = replace(options, settings=settings)
    if options.benchmark:
        if options.resume:
            raise UsageError("--benchmark writes no checkpoints. Omit --resume.")
        steps = settings.length.steps if "steps" in given else 50
        base = _as_benchmark(base, base.length.steps)
        options = replace(options, settings=_as_benchmark(settings, steps))
    return options, base


def _as_benchmark(recipe: Recipe, steps: int | None) -> Recipe:
    """Return the recipe of the same run on synthetic data, without evaluation."""
    # Synthetic images have the same size as the images of the dataset, unless --pixels is given.
    given = recipe.data.pixels != RECIPES[built_in_recipe(recipe)].data.pixels
    pixels = 32 if recipe.data.dataset == "cifar100" and not given else recipe.data.pixels
    # The input shapes of a user's model are known only from its dataset, so keep the dataset.
    dataset = recipe.data.dataset if recipe.architecture == OwnModelConfig() else "synthetic"
    return replace(
        recipe,
        data=replace(recipe.data, dataset=dataset, pixels=pixels),
        length=replace(recipe.length, evaluate=False, steps=steps),
    )


def _train(options: Train, base: Recipe) -> int:
    if identify(os.environ).launcher == "python":
        print_start("train", 1)
    from tutti.train.loop import LossNotFinite

    if options.profile:
        from tutti.profile.captured_command import enlarge_flight_recorder

        enlarge_flight_recorder(os.environ)
    command = ["tutti", *sys.argv[1:]]
    settings, is_attempt = options.settings, options.batch_find
    with options.join_world() as world:
        saves = not (options.benchmark or options.evaluate_only or options.lr_find)
        if is_attempt:
            from tutti.train.batch_find import as_attempt, limit_host_memory, reserve_margin

            settings, saves = as_attempt(settings), world.device.type == "cpu"
            if world.device.type == "cpu":
                limit_host_memory(world)
        elif options.lr_find:
            length = replace(settings.length, steps=options.lr_find, evaluate=False)
            settings = replace(settings, length=length)
        writes = not (options.evaluate_only or options.lr_find)
        with usage_error_on_rank_0(world):
            if options.nvtx and world.device.type != "cuda":
                raise UsageError(_NVTX_NEEDS_CUDA)
            # If this command started the ranks, `main` has already checked the flags.
            if world.launcher not in ("python", "tutti"):
                _check_modes(options)
                unused = _unused_in_mode(options)
                check_flags_have_effect(options.settings, base, options.benchmark, unused)
            trainer = start_run(
                world,
                settings,
                options.run_directory(),
                command,
                resume=options.resume,
                tensorboard=options.tensorboard,
                wandb=options.wandb if writes else None,
                save=saves,
                test_batches=1 if is_attempt else None,
                writes=writes,
            )
        directory = trainer.directory
        if is_attempt:
            _margin = reserve_margin(world.device)  # the reference keeps the memory allocated
        if world.is_first:
            file = directory.path / "recipe.toml" if writes or options.resume else None
            recipe = _describe_recipe(settings, base, options.recipe, file)
            print(recipe, *describe_start(trainer), sep="\n", file=sys.stderr)
        if options.evaluate_only:
            with usage_error_on_rank_0(world):
                score = trainer.evaluate_only()
            if world.is_first:
                metric = f"test {score.describe()}, " if score.name else ""
                loss = f"test loss {score.loss:.4f}, mean over {score.count:,} samples or tokens"
                print(f"step {trainer.step}: {metric}{loss}")
            return 0
        if options.lr_find:
            from tutti.train.lr_find import find_lr

            result = find_lr(trainer, options.lr_find)
            if world.is_first:
                print(*result.describe(), sep="\n")
            return 0 if result.suggestion() is not None else 1
        if (end := describe_end(trainer)) is not None:
            if world.is_first:
                print(*end, sep="\n")
            trainer.close()
            return 0
        if options.profile or options.nvtx:
            from tutti.profile.capture import Capture

            copies = directory.path / "tensorboard" if options.tensorboard else None
            traces = directory.path / "traces"
            Capture(traces, tensorboard=copies, nvtx=options.nvtx).follow_program()
        try:
            outcome = complete_run(trainer, command)
        except LossNotFinite as error:
            if world.is_first:
                print(f"tutti train: {error}", file=sys.stderr)
            return 1
        if world.is_first:
            stopped = outcome.stopped and not outcome.not_written
            _print_summary(directory.path, outcome.summary, stopped)
            if options.profile:
                print(f"To see where the step time went: tutti profile --trace {directory.path}")
        if outcome.not_written:
            on_disk = [text for text in outcome.not_written if not text.startswith(WANDB_METRICS)]
            cure = f" Free space for --out {directory.path}." if on_disk else ""
            with usage_error_on_rank_0(world):
                raise UsageError(f"could not be written: {'; '.join(outcome.not_written)}.{cure}")
        return STOPPED if outcome.stopped else 0


def _print_summary(directory: Path, summary: dict[str, Any], stopped: bool) -> None:
    if stopped:
        print(f"stopped by a signal at step {summary['steps']}, with a checkpoint. To continue:")
        print(f"  tutti train --resume --out {directory} --ranks {summary['world']['size']}")
        return
    if summary["test_loss"] is not None:
        name = summary["metric"]
        value = summary.get(f"test_{name}")
        text = "" if value is None else f"test {name} {value:.4g}, "
        if name == "accuracy" and value is not None:
            text = f"test accuracy {100 * value:.2f} %, "
        print(f"{text}test loss {summary['test_loss']:.4f}")
    if (best := summary["best"]) is not None and best["value"] is not None:
        print(f"best {best['name']} {best['value']:.4g}, checkpoint of step {best['step']}")
    rate = summary["samples_per_s"]
    speed = "" if rate is None else f", {rate:,.0f} samples/s"
    steps = plural(summary["steps"], "step")
    print(f"{steps}, final training loss {summary['final_loss']:.4f}{speed}")
    if summary["sharing_note"]:
        print(f"note: {summary['sharing_note']}")
    print(f"the run is in {directory}")


def _describe_recipe(settings: Recipe, base: Recipe, name: str, file: Path | None) -> str:
    """Return one line: the recipe, and the values that a recipe file or a flag has changed.

    `file` is the file that has all values, or None if no file was written.
    """
    built_in = RECIPES[built_in_recipe(settings)]
    changed = []
    for section in fields(settings):
        if not is_dataclass(getattr(settings, section.name)):
            continue
        for field in fields(getattr(settings, section.name)):
            value, in_file, in_recipe = (
                getattr(getattr(recipe, section.name), field.name)
                for recipe in (settings, base, built_in)
            )
            source = "flag" if value != in_file else "file" if in_file != in_recipe else None
            if source is not None:
                changed.append(f"{field.name}={value} ({source})")
    values = "".join(f", {value}" for value in changed)
    all_values = "" if file is None else f"; all values: {file}"
    return f"recipe {name}, model {settings.model}{values}{all_values}"


# -- --batch-find ----------------------------------------------------------------------------------


def _is_attempt(options: Train, arguments: list[str]) -> bool:
    """Return whether `_find_batch` started this rank.

    `_find_batch` adds --batch and --out. In the user's command, these flags are refused together
    with --batch-find, so they identify a rank that `_find_batch` started.
    """
    launched = identify(os.environ).launcher == "tutti"
    return launched and options.out is not None and flag_value("--batch", arguments) is not None


def _find_batch(options: Train, base: Recipe, arguments: list[str], ranks: int) -> int:
    """Print the largest batch that fits into memory. Return the exit code."""
    from tutti.train.batch_find import Result, judge, largest_batch

    failed, largest = 0, 0

    def attempt(batch: int) -> Result:
        nonlocal failed, largest
        batching = replace(options.settings.batching, batch=batch, global_batch=None)
        changed = replace(options.settings, batching=batching)
        with tempfile.TemporaryDirectory(prefix="tutti-batch-") as folder:
            out = Path(folder, "run")
            try:
                check_recipe(changed, ranks, options.device_type())
            except UsageError as error:
                print(f"batch {batch}: {error}", file=sys.stderr, flush=True)
                return "too large"
            command = ["train", *arguments, "--batch", str(batch), "--out", str(out)]
            errors = io.StringIO()  # messages about ranks that failed, printed only if unexpected
            with redirect_stderr(errors):
                code = options.start_ranks(command, ranks, show="none")
            file = out / "summary.json"
            summary = json.loads(file.read_text()) if file.exists() else {}
        if (result := judge(code, summary)) is None:
            print(errors.getvalue(), end="", file=sys.stderr, flush=True)
            failed = code
            raise _AttemptFailed
        print(f"batch {batch}: {result[1]}", file=sys.stderr, flush=True)
        if result[0] != "too large":
            largest = batch
        return result[0]

    try:
        batch = largest_batch(options.settings.batching.batch, attempt)
    except _AttemptFailed:
        if largest:
            print(f"the search ended early. The largest batch so far that fits: {largest}")
        return failed
    if not batch:
        raise UsageError(
            "--batch-find: a batch of 1 does not fit into memory. Add --checkpoint-activations "
            "full, or use more ranks and a layout with shard, tp or pp."
        )
    print(f"the largest batch that fits: {batch}")
    print(f"To train with it: --batch {batch}")
    return 0


class _AttemptFailed(Exception):
    """An attempt failed for another reason than memory. The reason has been printed."""


# -- --lr-sweep ------------------------------------------------------------------------------------


def train_learning_rates(options: Train, arguments: list[str]) -> tuple[Summaries, int]:
    """Train once for each learning rate and number of ranks.

    Return the summaries, and the exit code of the first run that failed, or 0.
    """
    rates = _numbers(options.lr_sweep or "", "--lr-sweep", float)
    sizes = [int(size) for size in _numbers(options.ranks or "1", "--ranks", int)]
    flags = without_flags(arguments, ("--lr-sweep", "--ranks", "-n", "--lr", "--out"))
    summaries: Summaries = {}
    with tempfile.TemporaryDirectory(prefix="tutti-sweep-") as folder:
        for rate, ranks in [(rate, ranks) for rate in rates for ranks in sizes]:
            out = Path(folder, f"lr{rate:g}-ranks{ranks}")
            print(f"learning rate {rate:g}, ranks {ranks}", file=sys.stderr, flush=True)
            command = ["train", *flags, "--lr", repr(rate), "--out", str(out)]
            per_gpu = min(ranks, options.ranks_per_gpu)
            code = options.start_ranks(command, ranks, ranks_per_gpu=per_gpu, show="none")
            file = out / "summary.json"
            summary = json.loads(file.read_text()) if file.exists() else {}
            if code != 0 and "diverged" not in summary:
                return summaries, code  # stop at a failure; a diverged run is not a failure
            summaries[rate, ranks] = summary
    return summaries, 0


def print_learning_rates(summaries: Summaries) -> None:
    """Print the losses, one line per learning rate."""
    from rich.table import Table

    from tutti.measure.terminal import console

    sizes = list(dict.fromkeys(ranks for _, ranks in summaries))
    table = Table(title="final training loss, test accuracy")
    table.add_column("learning rate")
    for ranks in sizes:
        table.add_column(f"{ranks} rank{'s' * (ranks != 1)}", justify="right")
    for rate in dict.fromkeys(rate for rate, _ in summaries):
        table.add_row(f"{rate:g}", *[_cell(summaries.get((rate, ranks))) for ranks in sizes])
    console().print(table)


def _cell(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return "–"
    if "diverged" in summary:
        return "diverged"
    accuracy = summary["test_accuracy"]
    suffix = "" if accuracy is None else f"  {100 * accuracy:.2f} %"
    return f"{summary['final_loss']:.4f}{suffix}"


def _numbers(text: str, flag: str, kind: type[float] | type[int]) -> list[float]:
    try:
        numbers = [kind(item) for item in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise UsageError(f"{flag} must be a comma-separated list of positive numbers, got {text}")
    return numbers
