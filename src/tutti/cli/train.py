"""tutti train: train a recipe on one rank or many."""

import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tutti.cli.flags import flag_value, parse
from tutti.cli.results import join_world, usage_error_on_rank_0
from tutti.parallel.layout import layout_of
from tutti.train.recipe import RECIPES, Recipe, read_recipe, write_recipe
from tutti.world.errors import UsageError
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.train.run_directory import RunDirectory
    from tutti.world.world import World

# Exit code (EX_TEMPFAIL of sysexits.h) of a run that a signal stopped; --resume continues it.
STOPPED = 75
# Time between SIGTERM and SIGKILL, in which ranks write a checkpoint.
_GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class Train:
    """Train a recipe: tutti train --recipe lenet --ranks 2

    Values come from the recipe, then from its file, then from flags. The run directory holds
    everything that is needed to repeat the run, and to continue it: --resume --out DIR.
    """

    settings: Recipe
    recipe: str = "lenet"
    """lenet, wideresnet, efficientnet, gpt, or a TOML file that begins with base = "NAME"."""
    ranks: Annotated[str | None, tyro.conf.arg(aliases=["-n"])] = None
    """Local ranks to start, unless a launcher already did; a list (1,2) with --lr-sweep."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of the ranks; auto: CUDA if a GPU is visible."""
    ranks_per_gpu: int = 1
    """Ranks that may share one GPU."""
    out: Path | None = None
    """The run directory (default: runs/NAME-DATE-TIME)."""
    resume: bool = False
    """Continue the run in --out from its last valid checkpoint."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run directory; with --profile also the traces."""
    benchmark: bool = False
    """Measure throughput: synthetic data, no evaluation, no checkpoint, 50 steps unless --steps."""
    profile: bool = False
    """Record a few steps on every rank, for `tutti profile --trace DIR`."""
    nvtx: bool = False
    """Mark a few steps for Nsight Systems: nsys profile -c cudaProfilerApi … Needs CUDA."""
    lr_sweep: str | None = None
    """Learning rates to compare, as 0.05,0.1,0.2: one run for each, and for each of --ranks."""
    start_timeout: float | None = None
    """Seconds for all ranks to start (default 300)."""
    timeout: float | None = None
    """Seconds for a collective (default 600)."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options, base = read_flags(arguments)
    if options.lr_sweep is not None:
        from tutti.cli.lr_sweep import sweep

        return sweep(options, arguments)
    if options.out is None and options.resume:
        raise UsageError("--resume needs the directory of the run: add --out DIR")
    ranks = _whole_number(options.ranks)
    if ranks is not None and identify(os.environ).launcher == "python":
        layout_of(options.settings.parallel.layout, ranks)  # raises before ranks start
        out = options.out or _default_out(options.recipe)
        from tutti.world.launch import LocalWorld

        return LocalWorld(
            command=[sys.executable, "-m", "tutti", "train", *arguments, "--out", str(out)],
            ranks=ranks,
            device=options.device,
            ranks_per_gpu=options.ranks_per_gpu,
            show="first",
            grace=_GRACE_SECONDS,
        ).run()
    return _train(options, base)


def read_flags(arguments: list[str], program: str = "tutti train") -> tuple[Train, Recipe]:
    """Return the options of a command line, and the recipe before flags changed it."""
    base, name = _recipe_named_in(arguments)
    options = parse(Train, program, arguments, default=Train(settings=base, recipe=name))
    return (_as_benchmark(options, arguments) if options.benchmark else options), base


def _train(options: Train, base: Recipe) -> int:
    from tutti.train.init import agree
    from tutti.train.loop import LossNotFinite, Trainer
    from tutti.train.run_directory import RunDirectory
    from tutti.world.exchange import gather_json

    if options.profile:
        from tutti.profile.captured_command import enlarge_flight_recorder

        enlarge_flight_recorder(os.environ)
    with join_world(options) as world:
        # All ranks use the directory of rank 0, since its default name contains the time.
        out = Path(gather_json(str(options.out or _default_out(options.recipe)))[0])
        directory = RunDirectory(out)
        with usage_error_on_rank_0(world):
            if options.nvtx and world.device.type != "cuda":
                raise UsageError(
                    "--nvtx marks steps for Nsight Systems, on CUDA only: leave it out"
                )
            agree(lambda: directory.check(options.resume) if world.is_first else None)
            trainer = Trainer(
                world,
                options.settings,
                directory,
                resume=options.resume,
                tensorboard=options.tensorboard,
                save=not options.benchmark,
            )
            agree(lambda: _open(directory, options, world) if world.is_first else None)
        if world.is_first:
            lines = _values(options.settings, base, options.recipe) + trainer.schedule.describe()
            lines += [_describe_world(world), trainer.engine.description, *trainer.notes]
            print(*lines, sep="\n", file=sys.stderr)
        if trainer.step >= trainer.schedule.steps:
            if world.is_first:
                print(f"nothing is left to do: {directory.path} is at step {trainer.step}")
            return 0
        if options.profile or options.nvtx:
            from tutti.profile.capture import Capture

            Capture(
                directory.path / "traces",
                tensorboard=directory.path / "tensorboard" if options.tensorboard else None,
                nvtx=options.nvtx,
            ).follow_optimizers()
        try:
            outcome = trainer.run()
        except LossNotFinite as error:
            if world.is_first:
                print(f"tutti train: {error}", file=sys.stderr)
                directory.write_json("summary.json", {"diverged": True, "reason": str(error)})
            return 1
        if world.is_first:
            _conclude(directory, outcome.summary, outcome.stopped and not outcome.failed_saves)
            if options.profile:
                print(f"to see where the step time went: tutti profile --trace {directory.path}")
        if outcome.failed_saves:
            step, reason = max(outcome.failed_saves.items())
            with usage_error_on_rank_0(world):
                raise UsageError(
                    f"checkpoints not written: {len(outcome.failed_saves)}, the last at step "
                    f"{step}: {reason}: --out {directory.path} needs space, or choose another"
                )
        return STOPPED if outcome.stopped else 0


def _as_benchmark(options: Train, arguments: list[str]) -> Train:
    """Return the options of the same run on synthetic data, without evaluation."""
    if options.resume:
        raise UsageError("--benchmark writes no checkpoints: leave --resume out")
    recipe = options.settings
    data = dataclasses.replace(recipe.data, dataset="synthetic")
    if recipe.data.dataset == "cifar100":
        data = dataclasses.replace(data, pixels=32)
    length = dataclasses.replace(recipe.length, evaluate=False)
    if flag_value("--steps", arguments) is None:
        length = dataclasses.replace(length, steps=50)
    settings = dataclasses.replace(recipe, data=data, length=length)
    return dataclasses.replace(options, settings=settings)


def _open(directory: "RunDirectory", options: Train, world: "World") -> None:
    """Create the run directory, after all checks have passed."""
    directory.create()
    directory.write("recipe.toml", write_recipe(options.settings, _base(options.settings)))
    directory.write_environment(world, ["tutti", *sys.argv[1:]])


def _conclude(directory: "RunDirectory", summary: dict[str, Any], stopped: bool) -> None:
    content = {"schema": "tutti.train/1", "command": ["tutti", *sys.argv[1:]], **summary}
    directory.write_json("summary.json", content)
    if stopped:
        print(f"stopped by a signal at step {summary['steps']}, with a checkpoint; to continue:")
        print(f"  tutti train --resume --out {directory.path} --ranks {summary['world']['size']}")
        return
    if summary["test_accuracy"] is not None:
        print(
            f"test accuracy {100 * summary['test_accuracy']:.2f} %, "
            f"test loss {summary['test_loss']:.4f}"
        )
    speed = (
        "" if summary["samples_per_s"] is None else f", {summary['samples_per_s']:,.0f} samples/s"
    )
    print(f"{summary['steps']} steps, final training loss {summary['final_loss']:.4f}{speed}")
    if summary["sharing_note"]:
        print(f"note: {summary['sharing_note']}")
    print(f"the run is in {directory.path}")


def _describe_world(world: "World") -> str:
    """Describe device, backend and threads, with the reason for each choice."""
    device, backend = world.reasons["device"], world.reasons["backend"]
    return (
        f"{world.size} rank{'s' * (world.size != 1)} on {world.device.type} ({device}), backend "
        f"{world.backend} ({backend}), {world.threads} thread{'s' * (world.threads != 1)} each "
        f"({world.reasons['threads']})"
    )


def _recipe_named_in(arguments: list[str]) -> tuple[Recipe, str]:
    """Return the recipe that the flags start from, and its name.

    The model of the recipe determines which flags exist. A resumed run uses the recipe in its run
    directory, unless --recipe is given.
    """
    name, out = flag_value("--recipe", arguments), flag_value("--out", arguments)
    if name is None and out is not None and "--resume" in arguments:
        kept = Path(out) / "recipe.toml"
        if kept.is_file():
            name = str(kept)
    return read_recipe(name or "lenet"), name or "lenet"


def _values(settings: Recipe, base: Recipe, name: str) -> list[str]:
    """Format all values, one line per section. Values from a file or a flag are marked."""
    named = RECIPES[_base(settings)]
    lines = [f"recipe {name}, model {settings.model}"]
    for field in dataclasses.fields(settings):
        part = getattr(settings, field.name)
        if not dataclasses.is_dataclass(part):
            continue
        values = []
        for each in dataclasses.fields(part):
            value, in_file, in_recipe = (
                getattr(getattr(recipe, field.name), each.name)
                for recipe in (settings, base, named)
            )
            reason = " (flag)" if value != in_file else " (file)" if in_file != in_recipe else ""
            if value is not None or reason:
                values.append(f"{each.name}={value}{reason}")
        lines.append(f"  {field.name}: {', '.join(values)}")
    return lines


def _base(settings: Recipe) -> str:
    """Return the name of the recipe with the same kind of model, the `base` of the written file."""
    kind = type(settings.architecture)
    return next(name for name, each in RECIPES.items() if type(each.architecture) is kind)


def _default_out(recipe: str) -> Path:
    from time import strftime

    return Path("runs") / f"{Path(recipe).stem}-{strftime('%Y%m%d-%H%M%S')}"


def _whole_number(ranks: str | None) -> int | None:
    if ranks is None:
        return None
    if not ranks.isdecimal():
        raise UsageError(f"--ranks {ranks}: a whole number (lists are for --lr-sweep)")
    return int(ranks)
