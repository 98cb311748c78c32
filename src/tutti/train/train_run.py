"""A training run from its first check to summary.json, and `tutti.train`, the run in Python."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from time import strftime
from typing import TYPE_CHECKING, Any, Literal

from tutti.machine.gpus import visible_gpu_count
from tutti.models.config import model_name
from tutti.parallel.layout import Layout
from tutti.train.recipe import (
    RECIPES,
    Recipe,
    built_in_recipe,
    default_recipe,
    read_recipe_and_ranks,
    with_flags,
    write_recipe,
)
from tutti.train.recipe_check import check_flags_have_effect, check_recipe
from tutti.train.run_directory import RunDirectory, check_wandb, csv_of
from tutti.world.errors import TIMEOUT, OutOfMemory, UsageError
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.train.loop import Outcome, Trainer
    from tutti.world.world import World

# Seconds between Ctrl-C or SIGTERM and SIGKILL, in which ranks write a checkpoint.
GRACE_SECONDS = 60.0


def train(
    recipe: Recipe | str | Path | None = None,
    *,
    ranks: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    world: "World | None" = None,
    tensorboard: bool = False,
    wandb: str | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    ranks_per_gpu: int = 1,
    show: Literal["all", "first", "none"] = "first",
    timeout: float = TIMEOUT,
    **values: object,
) -> dict[str, Any]:
    """Train a recipe as `tutti train` does. Return the content of summary.json.

        summary = tutti.train("lenet", ranks=2, epochs=2, lr=0.05, out="runs/a")
        summary["test_accuracy"], summary["out"]

    recipe: the name of a built-in recipe, a TOML file, or a `tutti.Recipe`. The default is the
    recipe in `out` if `resume` is true, and otherwise the default recipe of `tutti train` for
    `model`. `values` are values of the recipe, named as the flags of `tutti train`:
    `layout="shard2"`, `batch=64`, `model="package.module:function"`. ranks: by default the number
    that the layout needs.

    The function starts the ranks as new processes, and works from a script, a REPL and a notebook.
    If a launcher (torchrun, srun, mpirun, `tutti run`) started this process, or if `world` is
    given, no processes are started: this process trains as one of the ranks, and every rank returns
    the summary. `world` is the result of `tutti.init()`. `device`, `ranks_per_gpu`, `show` and
    `timeout` have the same meaning as in `tutti.spawn`.

    Wrong values raise UsageError before a rank is started. If a rank fails, RankFailed is raised.
    Ctrl-C saves a checkpoint and raises KeyboardInterrupt; `tutti.train(resume=True, out=…)`
    continues the run.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("tutti.train handles signals: call it from the main thread.")
    if resume and out is None:
        raise UsageError("resume=True needs the directory of the run: add out=DIR")
    base, in_file, name = _base_recipe(recipe, out if resume else None, values.get("model"))
    settings = with_flags(base, values)
    if out is None:
        out = Path("runs") / f"{run_name(settings, name)}-{strftime('%Y%m%d-%H%M%S')}"
    switches: dict[str, Any] = {"resume": resume, "tensorboard": tensorboard, "wandb": wandb}
    command = [sys.executable, *sys.argv]
    launched = world is not None or identify(os.environ).launcher != "python"
    if launched and ranks is not None:
        raise UsageError(f"ranks={ranks} has no effect in a rank of a world: leave it out")
    check_wandb(wandb)
    check_flags_have_effect(settings, base, benchmark=False)
    if world is not None:
        return _train_as_rank(settings, Path(out), switches, command, world)
    if launched:
        return _join_and_train(settings, Path(out), switches, command, device, timeout)
    layout = settings.parallel.layout
    if layout == "auto":
        raise UsageError('layout="auto" works only in the command tutti train: give a layout')
    if ranks is None and layout is not None and ("layout" in values or in_file is None):
        ranks = Layout.parse(layout).size
    ranks = (in_file or 1) if ranks is None else ranks
    from tutti.world.launch import LocalWorld
    from tutti.world.spawn import spawn

    LocalWorld([], ranks, device, ranks_per_gpu).check()
    on_gpu = device == "cuda" or (device == "auto" and visible_gpu_count() > 0)
    check_recipe(settings, ranks, "cuda" if on_gpu else "cpu")
    RunDirectory(Path(out)).check(resume)
    results = spawn(
        _join_and_train,
        (settings, Path(out), switches, command, device, timeout),
        ranks=ranks,
        device=device,
        ranks_per_gpu=ranks_per_gpu,
        show=show,
        timeout=timeout,
        grace=GRACE_SECONDS,
    )
    return results[0]


def _base_recipe(
    recipe: Recipe | str | Path | None, resumed: str | Path | None, model: object
) -> tuple[Recipe, int | None, str]:
    """Return the recipe before changes, the number of ranks in its file, and its name."""
    if isinstance(recipe, Recipe):
        return recipe, None, built_in_recipe(recipe)
    name = None if recipe is None else str(recipe)
    if name is None and resumed is not None and os.path.isfile(Path(resumed) / "recipe.toml"):
        name = str(Path(resumed) / "recipe.toml")
    name = name or default_recipe(model if isinstance(model, str) else "")
    return *read_recipe_and_ranks(name), name


def run_name(recipe: Recipe, name: str) -> str:
    """Return the name of a run: the name of the user's own model, or else of the recipe."""
    return model_name(recipe.model) if name in RECIPES and ":" in recipe.model else Path(name).stem


def _join_and_train(
    recipe: Recipe,
    out: Path,
    switches: dict[str, Any],
    command: list[str],
    device: str,
    timeout: float,
) -> dict[str, Any]:
    from tutti.world.world import init

    with init(device=device, timeout=timeout) as world:
        return _train_as_rank(recipe, out, switches, command, world)


def _train_as_rank(
    recipe: Recipe, out: Path, switches: dict[str, Any], command: list[str], world: "World"
) -> dict[str, Any]:
    trainer = start_run(world, recipe, out, command, **switches)
    directory = trainer.directory
    if world.is_first:
        print(*describe_start(trainer), sep="\n", file=sys.stderr)
    if (end := describe_end(trainer)) is not None:
        if world.is_first:
            print(*end, sep="\n", file=sys.stderr)
        trainer.close()
        file = directory.path / "summary.json"
        content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return content
    outcome = complete_run(trainer, command)
    if outcome.not_written:
        raise UsageError(f"could not be written: {'; '.join(outcome.not_written)}")
    if outcome.stopped:
        raise KeyboardInterrupt
    return outcome.summary


# -- the parts of a run, which the command line uses, too ------------------------------------------


def start_run(
    world: "World",
    recipe: Recipe,
    out: Path,
    command: list[str],
    *,
    resume: bool = False,
    tensorboard: bool = False,
    wandb: str | None = None,
    save: bool = True,
    test_batches: int | None = None,
    writes: bool = True,
) -> "Trainer":
    """Return the trainer of a new or resumed run. Call it on every rank.

    The run directory is created after all checks have passed, unless `writes` is False. The other
    arguments are those of Trainer.
    """
    from tutti.train.init import agree
    from tutti.train.loop import Trainer
    from tutti.world.exchange import gather_json

    # All ranks use the directory of rank 0, since its default name contains the time.
    directory = RunDirectory(Path(gather_json(str(out))[0]))
    agree(lambda: directory.check(resume) if world.is_first else None)
    with recorded_out_of_memory(directory, command) if writes else nullcontext():
        trainer = Trainer(
            world,
            recipe,
            directory,
            resume=resume,
            tensorboard=tensorboard,
            wandb=wandb,
            save=save,
            test_batches=test_batches,
        )

    def create_directory() -> None:
        if world.is_first:
            directory.create()
            text = write_recipe(recipe, built_in_recipe(recipe), world.size)
            directory.write("recipe.toml", text)
            directory.write_environment(world, command)
            directory.copy_model_files(recipe.model)

    if writes:
        agree(create_directory)
    return trainer


def describe_start(trainer: "Trainer") -> list[str]:
    """Return lines that describe the schedule, the world and the engine of a run."""
    world, reasons = trainer.world, trainer.world.reasons
    return [
        *trainer.schedule.describe(),
        f"{world.size} rank{'s' * (world.size != 1)} on {world.device.type} "
        f"({reasons['device']}), backend {world.backend} ({reasons['backend']}), "
        f"{world.threads} thread{'s' * (world.threads != 1)} each ({reasons['threads']})",
        trainer.engine.description,
        *trainer.notes,
    ]


def describe_end(trainer: "Trainer") -> list[str] | None:
    """Return why a resumed run has no steps left, or None if it has steps left."""
    path = trainer.directory.path
    if trainer.step >= trainer.schedule.steps:
        return [f"the run is complete: {path} is at step {trainer.step}"]
    if not trainer.ended_early:
        return None
    more = 2 * (trainer.recipe.length.patience or 1)
    return [
        f"{path} is at step {trainer.step}: {trainer.describe_early_end()}",
        f"To continue: tutti train --resume --out {path} --patience {more}",
    ]


def complete_run(trainer: "Trainer", command: list[str]) -> "Outcome":
    """Train to the end, and write summary.json and metrics.csv. Call it on every rank."""
    from tutti.train.loop import LossNotFinite

    directory, first = trainer.directory, trainer.world.is_first
    try:
        with recorded_out_of_memory(directory, command):
            outcome = trainer.run()
    except LossNotFinite as error:
        if first:
            directory.write_json("summary.json", {"diverged": True, "reason": str(error)})
        raise
    head = {"schema": "tutti.train/1", "command": command, "out": str(directory.path)}
    outcome.summary = {**head, "stopped": outcome.stopped, **outcome.summary}
    if first:
        directory.write_json("summary.json", outcome.summary)
        if not outcome.not_written:  # otherwise rank0.jsonl may be incomplete
            directory.write("metrics.csv", csv_of(directory.metrics / "rank0.jsonl"))
    return outcome


@contextmanager
def recorded_out_of_memory(directory: RunDirectory, command: list[str]) -> Iterator[None]:
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
