"""tutti train: trains a recipe on one rank or many."""

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from time import strftime
from typing import Annotated, Any

import tyro

from tutti.cli.flags import OutputFolder, flag_value, parse
from tutti.cli.results import WorldFlags, print_start, usage_error_on_rank_0
from tutti.models.config import OwnModelConfig
from tutti.models.pretrained import model_name
from tutti.parallel.layout import Layout
from tutti.train.recipe import RECIPES, Recipe, read_recipe_and_ranks, write_recipe
from tutti.train.recipe_check import check_flags_have_effect, check_recipe
from tutti.train.run_directory import RunDirectory, csv_of
from tutti.train.training_schedule import check_numbers
from tutti.world.errors import OutOfMemory, UsageError
from tutti.world.launchers import identify

Summaries = dict[tuple[float, int], dict[str, Any]]  # keys are (learning rate, number of ranks)

# Exit code (EX_TEMPFAIL of sysexits.h) of a run that a signal stopped and --resume can continue.
STOPPED = 75
# Time between Ctrl-C or SIGTERM and SIGKILL, in which ranks write a checkpoint.
_GRACE_SECONDS = 60.0
# Pairs of a flag and the flag that overrides it.
_OVERRIDDEN = (
    ("--epochs", "--steps"),
    ("--batch", "--global-batch"),
    ("--lr", "--lr-sweep"),
    ("--out", "--lr-sweep"),
)


@dataclass(frozen=True, kw_only=True)
class Train(WorldFlags):
    """Train a recipe: tutti train --recipe lenet --ranks 2

    A flag overrides the value in a recipe file, and a recipe file overrides the value of its base
    recipe. Ctrl-C saves a checkpoint. To continue a run: tutti train --resume --out DIR. To repeat
    a run with the same ranks and layout: tutti train --recipe DIR/recipe.toml.
    """

    settings: Recipe
    recipe: str = "lenet"
    """Recipe to train: lenet, wideresnet, efficientnet, gpt, own (AdamW, for --model
    package.module:function), hf (fine-tuning of --model hf:FOLDER), or a TOML file that begins with
    base = "NAME". The default is hf for --model hf:FOLDER, own for --model package.module:function,
    and otherwise lenet."""
    ranks: Annotated[str | None, tyro.conf.arg(aliases=["-n"])] = None
    """Number of local ranks to start (default: the number that --layout needs, or the number in the
    recipe file, or 1). Ignored under torchrun, srun or mpirun. With --lr-sweep, a comma-separated
    list such as 1,2."""
    out: OutputFolder | None = None
    """Run directory (default: runs/NAME-DATE-TIME)."""
    resume: bool = False
    """Continue the run in --out from its last valid checkpoint."""
    evaluate_only: bool = False
    """With --resume: print test loss and metric of the last checkpoint, without training."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run directory, including the traces of --profile."""
    benchmark: bool = False
    """Measure the throughput: train 50 steps (or --steps) on synthetic data, without evaluation and
    checkpoints."""
    profile: bool = False
    """Record a few steps on every rank. tutti profile --trace DIR explains them."""
    nvtx: bool = False
    """Mark a few steps for Nsight Systems. Run the command under nsys profile -c cudaProfilerApi.
    Needs CUDA."""
    lr_sweep: str | None = None
    """Comma-separated learning rates to compare, such as 0.05,0.1,0.2. Trains once for each
    learning rate and each number in --ranks."""

    def run_directory(self) -> Path:
        name = Path(self.recipe).stem
        if self.recipe in RECIPES and ":" in self.settings.model:
            name = model_name(self.settings.model)
        return self.out or Path("runs") / f"{name}-{strftime('%Y%m%d-%H%M%S')}"


def main(arguments: list[str]) -> int:
    options, base = read_flags(arguments)
    starts_ranks = identify(os.environ).launcher == "python"
    if options.resume and options.out is None:
        raise UsageError("--resume needs the directory of the run. Add --out DIR.")
    if options.evaluate_only and not (options.resume and options.settings.length.evaluate):
        missing = "--evaluate" if options.resume else "--resume --out RUN"
        raise UsageError(f"--evaluate-only needs a checkpoint and test data: add {missing}")
    if starts_ranks:
        _check_combinations(options, arguments)
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
    if options.ranks is None and ranks == 1:
        return _train(options, base)
    command = ["train", *arguments, "--out", str(options.run_directory())]
    return options.start_ranks(command, ranks, grace=_GRACE_SECONDS)


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
    """Refuse a flag that another flag of the same command line overrides."""
    for flag, other in _OVERRIDDEN:
        if flag_value(flag, arguments) is not None and flag_value(other, arguments) is not None:
            raise UsageError(f"{flag} has no effect with {other}. Omit one of them.")
    if options.resume and options.lr_sweep is not None:
        raise UsageError("--resume has no effect with --lr-sweep. Omit one of them.")


def check_before_start(options: Train, base: Recipe, ranks: int) -> None:
    """Make the checks that need neither torch nor ranks. Raise UsageError if one fails."""
    settings, device = options.settings, options.device_type()
    if options.nvtx and device != "cuda":
        raise UsageError(_NVTX_NEEDS_CUDA)
    # Check the number of ranks first, because the other checks compute with it.
    options.check_ranks(ranks)
    check_flags_have_effect(settings, base, options.benchmark)
    check_recipe(settings, ranks, device)
    RunDirectory(options.run_directory()).check(options.resume)


_NVTX_NEEDS_CUDA = "--nvtx needs CUDA, but the device is cpu. Omit --nvtx."


def read_flags(arguments: list[str], program: str = "tutti train") -> tuple[Train, Recipe]:
    """Return the options of a command line, and the recipe before flags changed it.

    The model of the recipe determines which flags exist. A resumed run uses the recipe in its run
    directory, unless --recipe is given.
    """
    name, out = flag_value("--recipe", arguments), flag_value("--out", arguments)
    if name is None and out is not None and "--resume" in arguments:
        saved_recipe = Path(out) / "recipe.toml"
        name = str(saved_recipe) if os.path.isfile(saved_recipe) else None
    if name is None:
        model = flag_value("--model", arguments) or ""
        name = "hf" if model.startswith("hf:") else "own" if ":" in model else "lenet"
    base, ranks = read_recipe_and_ranks(name)
    if name not in RECIPES:
        try:
            check_numbers(base)
        except UsageError as error:
            raise UsageError(f"--recipe {name}: {error}") from None
    # The number of ranks that --layout needs replaces the number in the recipe file.
    in_file = ranks is not None and flag_value("--layout", arguments) is None
    default = Train(settings=base, recipe=name, ranks=str(ranks) if in_file else None)
    options = parse(Train, program, arguments, default=default)
    settings = options.settings
    given = {
        flag for pair in _OVERRIDDEN for flag in pair if flag_value(flag, arguments) is not None
    }
    # --epochs also replaces the number of steps that the recipe sets.
    if "--epochs" in given and "--steps" not in given:
        settings = replace(settings, length=replace(settings.length, steps=None))
    if "--batch" in given and "--global-batch" not in given:
        settings = replace(settings, batching=replace(settings.batching, global_batch=None))
    options = replace(options, settings=settings)
    if options.benchmark:
        if options.resume:
            raise UsageError("--benchmark writes no checkpoints. Omit --resume.")
        steps = settings.length.steps if "--steps" in given else 50
        base = _as_benchmark(base, base.length.steps)
        options = replace(options, settings=_as_benchmark(settings, steps))
    return options, base


def _as_benchmark(recipe: Recipe, steps: int | None) -> Recipe:
    """Return the recipe of the same run on synthetic data, without evaluation."""
    # The synthetic images have the size of the dataset that they replace, unless --pixels is given.
    given = recipe.data.pixels != RECIPES[_built_in_recipe(recipe)].data.pixels
    pixels = 32 if recipe.data.dataset == "cifar100" and not given else recipe.data.pixels
    # The input shapes of a user's model are known only from its dataset, so this dataset is kept.
    dataset = recipe.data.dataset if recipe.architecture == OwnModelConfig() else "synthetic"
    return replace(
        recipe,
        data=replace(recipe.data, dataset=dataset, pixels=pixels),
        length=replace(recipe.length, evaluate=False, steps=steps),
    )


def _train(options: Train, base: Recipe) -> int:
    if identify(os.environ).launcher == "python":
        print_start("train", 1)
    from tutti.train.init import agree
    from tutti.train.loop import LossNotFinite, Trainer
    from tutti.world.exchange import gather_json

    if options.profile:
        from tutti.profile.captured_command import enlarge_flight_recorder

        enlarge_flight_recorder(os.environ)
    command = ["tutti", *sys.argv[1:]]

    def create_directory() -> None:
        if world.is_first:
            directory.create()
            built_in = _built_in_recipe(options.settings)
            directory.write("recipe.toml", write_recipe(options.settings, built_in, world.size))
            directory.write_environment(world, command)
            directory.copy_model_files(options.settings.model)

    with options.join_world() as world:
        # All ranks use the directory of rank 0, since its default name contains the time.
        directory = RunDirectory(Path(gather_json(str(options.run_directory()))[0]))
        with usage_error_on_rank_0(world):
            if options.nvtx and world.device.type != "cuda":
                raise UsageError(_NVTX_NEEDS_CUDA)
            # If this command started the ranks, `main` has already checked the flags.
            if world.launcher not in ("python", "tutti"):
                check_flags_have_effect(options.settings, base, options.benchmark)
            agree(lambda: directory.check(options.resume) if world.is_first else None)
            resume, tensorboard = options.resume, options.tensorboard
            saves = not (options.benchmark or options.evaluate_only)
            switches = {"resume": resume, "tensorboard": tensorboard, "save": saves}
            with _recorded_out_of_memory(directory, command):
                trainer = Trainer(world, options.settings, directory, **switches)
            if not options.evaluate_only:
                agree(create_directory)  # after all checks have passed
        if world.is_first:
            recipe = _describe_recipe(options.settings, base, options.recipe, directory.path)
            lines = [recipe, *trainer.schedule.describe()]
            reasons = world.reasons
            lines += [
                f"{world.size} rank{'s' * (world.size != 1)} on {world.device.type} "
                f"({reasons['device']}), backend {world.backend} ({reasons['backend']}), "
                f"{world.threads} thread{'s' * (world.threads != 1)} each ({reasons['threads']})",
                trainer.engine.description,
                *trainer.notes,
            ]
            print(*lines, sep="\n", file=sys.stderr)
        if options.evaluate_only:
            with usage_error_on_rank_0(world):
                score = trainer.evaluate_only()
            if world.is_first:
                metric = f"test {score.describe()}, " if score.name else ""
                print(f"step {trainer.step}: {metric}test loss {score.loss:.4f} of {score.count:,}")
            return 0
        if trainer.step >= trainer.schedule.steps:
            if world.is_first:
                print(f"the run is complete: {directory.path} is at step {trainer.step}")
            return 0
        if options.profile or options.nvtx:
            from tutti.profile.capture import Capture

            copies = directory.path / "tensorboard" if tensorboard else None
            traces = directory.path / "traces"
            Capture(traces, tensorboard=copies, nvtx=options.nvtx).follow_program()
        try:
            with _recorded_out_of_memory(directory, command):
                outcome = trainer.run()
        except LossNotFinite as error:
            if world.is_first:
                print(f"tutti train: {error}", file=sys.stderr)
                directory.write_json("summary.json", {"diverged": True, "reason": str(error)})
            return 1
        if world.is_first:
            head = {"schema": "tutti.train/1", "command": command}
            directory.write_json("summary.json", {**head, **outcome.summary})
            if not outcome.not_written:  # otherwise rank0.jsonl may be incomplete
                directory.write("metrics.csv", csv_of(directory.metrics / "rank0.jsonl"))
            stopped = outcome.stopped and not outcome.not_written
            _print_summary(directory.path, outcome.summary, stopped)
            if options.profile:
                print(f"To see where the step time went: tutti profile --trace {directory.path}")
        if outcome.not_written:
            with usage_error_on_rank_0(world):
                raise UsageError(
                    f"could not be written: {'; '.join(outcome.not_written)}. Free space for --out "
                    f"{directory.path}."
                )
        return STOPPED if outcome.stopped else 0


@contextmanager
def _recorded_out_of_memory(directory: RunDirectory, command: list[str]) -> Iterator[None]:
    """Write the explanation of OutOfMemory into summary.json, on the rank that raises it."""
    try:
        yield
    except OutOfMemory as error:
        content = {"schema": "tutti.train/1", "command": command}
        report = {"reason": error.report["reason"], "out_of_memory": error.report}
        with suppress(UsageError):  # the error itself must be reported, even if the disk is full
            directory.create()
            directory.write_json("summary.json", {**content, **report})
        raise


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
    rate = summary["samples_per_s"]
    speed = "" if rate is None else f", {rate:,.0f} samples/s"
    print(f"{summary['steps']} steps, final training loss {summary['final_loss']:.4f}{speed}")
    if summary["sharing_note"]:
        print(f"note: {summary['sharing_note']}")
    print(f"the run is in {directory}")


def _describe_recipe(settings: Recipe, base: Recipe, name: str, directory: Path) -> str:
    """Return one line: the recipe, and the values that a recipe file or a flag has changed."""
    built_in = RECIPES[_built_in_recipe(settings)]
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
    return f"recipe {name}, model {settings.model}{values}; all values: {directory / 'recipe.toml'}"


def _built_in_recipe(settings: Recipe) -> str:
    """Return the built-in recipe with the same kind of model, which recipe.toml names as base."""
    kind = type(settings.architecture)
    return next(name for name, recipe in RECIPES.items() if type(recipe.architecture) is kind)


# -- --lr-sweep ------------------------------------------------------------------------------------


def train_learning_rates(options: Train, arguments: list[str]) -> tuple[Summaries, int]:
    """Train once for each learning rate and number of ranks.

    Return the summaries, and the exit code of the first run that failed, or 0.
    """
    rates = _numbers(options.lr_sweep or "", "--lr-sweep", float)
    sizes = [int(size) for size in _numbers(options.ranks or "1", "--ranks", int)]
    flags = _without(arguments, ("--lr-sweep", "--ranks", "-n", "--lr", "--out"))
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
                return summaries, code  # divergence is a result, other failures are not
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


def _without(arguments: list[str], flags: tuple[str, ...]) -> list[str]:
    """Return the arguments without these flags and their values."""
    remaining: list[str] = []
    skip_value = False
    for argument in arguments:
        # `--lr_sweep=1` is the flag `--lr-sweep` with its value.
        flag, equals, _ = argument.partition("=")
        if skip_value:
            skip_value = False
        elif flag.replace("_", "-") in flags:
            skip_value = not equals
        else:
            remaining.append(argument)
    return remaining
