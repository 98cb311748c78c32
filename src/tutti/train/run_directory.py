"""The run directory: everything needed to repeat a run, its results and its metrics."""

import contextlib
import csv
import importlib.util
import io
import json
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tutti.machine.environment import describe_environment
from tutti.measure.files import check_output_folder, write_atomically
from tutti.models.config import GPTConfig, ModelError, split_source
from tutti.models.lora_layers import check_peft
from tutti.train.recipe import Recipe, read_recipe
from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.world.world import World


class RunDirectory:
    """The files of one run. Rank 0 writes the common files; each rank writes its metrics."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics"
        self.model = path / "model"  # files of --model hf:FOLDER, without weights

    def check(self, resume: bool) -> None:
        """Raise UsageError if the run cannot use this directory. Nothing is changed on the disk.

        A new run needs a new or empty directory. With `resume`, the directory must contain a run.
        """
        try:
            self._check(resume)
        except OSError as error:  # a name that is too long, a directory that cannot be read
            reason = f"{error.strerror}: choose another directory"
            raise UsageError(f"--out {self.path}: {reason}") from None

    def _check(self, resume: bool) -> None:
        if resume and not (self.path / "recipe.toml").is_file():
            problem = " (it has no recipe.toml)" if self.path.is_dir() else ""
            raise UsageError(
                f"--resume: there is no run in {self.path}{problem}. Check --out, or leave out "
                "--resume to begin a run."
            )
        check_output_folder(self.path)
        if not resume and self.path.exists() and any(self.path.iterdir()):
            raise UsageError(
                f"--out {self.path} exists and is not empty: add --resume to continue that run, or "
                "choose another directory"
            )

    def create(self) -> None:
        try:
            self.metrics.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"cannot be created ({error.strerror})"
            raise UsageError(f"--out {self.path} {reason}: choose another directory") from None

    def copy_model_files(self, model: str) -> None:
        """Copy the configuration and tokenizer of --model hf:FOLDER, for export and prediction."""
        source = split_source(model)
        if source and source[0] == "hf" and Path(source[1]).resolve() != self.model.resolve():
            from tutti.models.pretrained import copy_side_files

            try:
                copy_side_files(Path(source[1]), self.model)
            except OSError as error:
                raise UsageError(
                    f"{self.model} was not written: {error.strerror}: free space for --out, or "
                    "choose another directory"
                ) from None

    def write(self, name: str, content: str) -> None:
        try:
            write_atomically(self.path / name, content)
        except OSError as error:
            raise UsageError(
                f"{self.path / name} was not written: {error.strerror}. Free space for --out, or "
                "choose another directory."
            ) from None

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        self.write(name, json.dumps(content, indent=2) + "\n")

    def write_environment(self, world: "World", command: list[str]) -> None:
        """Write environment.json: command, machine, versions, world, and commit of the code."""
        self.write_json(
            "environment.json",
            {
                "schema": "tutti.environment/1",
                "command": command,
                "environment": describe_environment(),
                "world": {"size": world.size, "nodes": world.nodes, **world.row()},
                "git": _git_state(),
            },
        )


_STEP = re.compile(r"step-([0-9]{8,})", re.ASCII)


def step_name(step: int) -> str:
    """Return the name of the directory of a step's checkpoint."""
    return f"step-{step:08d}"


def saved_steps(directory: str | Path) -> list[int]:
    """Return the steps with a complete checkpoint, oldest first. Files are not verified."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)


def best_step(directory: str | Path) -> int | None:
    """Return the step of the checkpoint with the best score, or None if no checkpoint has a score.

    Only scores with the name of the newest score are compared. If scores are equal, the earliest
    step is the best. Files are not verified.
    """
    scores: dict[int, tuple[str, float]] = {}  # step → name and value; smaller values are better
    for step in saved_steps(directory):
        # A checkpoint that is damaged, or that was saved without a score, is left out.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            index = json.loads(Path(directory, step_name(step), "index.json").read_bytes())
            score = index["score"]
            value = float(score["value"])
            scores[step] = score["name"], -value if score["larger_is_better"] else value
    if not scores:
        return None
    newest, _ = scores[max(scores)]
    return min((value, step) for step, (name, value) in scores.items() if name == newest)[1]


def checkpoint_step(run: Path, checkpoint: str) -> int | None:
    """Return the step of --checkpoint best or --checkpoint STEP; None for --checkpoint last.

    Raise UsageError if the run has no such checkpoint.
    """
    steps = saved_steps(run / "checkpoints")
    if not steps:
        raise UsageError(f"--run {run} has no checkpoint yet: wait for the first checkpoint")
    if checkpoint == "last":
        return None
    existing = ", ".join(map(str, steps))
    if checkpoint == "best":
        if (step := best_step(run / "checkpoints")) is None:
            raise UsageError(
                f"--checkpoint best: no checkpoint of {run} has a score, which --keep-best saves: "
                f"use last, or one of the steps {existing}"
            )
        return step
    if not checkpoint.isdecimal():
        raise UsageError(f"--checkpoint must be best, last or a step, got {checkpoint!r}")
    if int(checkpoint) not in steps:
        raise UsageError(f"{run} has no --checkpoint {checkpoint}: use {existing}, best or last")
    return int(checkpoint)


def read_trained_run(path: Path, checkpoint: str) -> Recipe:
    """Return the recipe of a run. Raise UsageError if the run has no such --checkpoint."""
    if not (path / "recipe.toml").is_file():
        problem = "has no recipe.toml" if path.is_dir() else "does not exist"
        raise UsageError(f"--run {path} {problem}: give the --out directory of tutti train")
    checkpoint_step(path, checkpoint)
    recipe = read_recipe(str(path / "recipe.toml"))
    if recipe.model.startswith("hf:") and (path / "model").is_dir():
        recipe = replace(recipe, model=f"hf:{path / 'model'}")  # the original folder may have moved
    return recipe


Format = Literal["safetensors", "hf", "state_dict", "adapter"]


def check_export(
    run: Path, checkpoint: str, to: Path, kind: Format | None, ema: bool | None
) -> tuple[Recipe, Format]:
    """Check the flags of tutti export. Return the recipe of the run, and the format to write."""
    if not (run / "recipe.toml").is_file():
        problem = "has no recipe.toml" if run.is_dir() else "is not a directory"
        raise UsageError(f"--run {run} {problem}. Use the --out directory of tutti train.")
    recipe = read_recipe(str(run / "recipe.toml"))
    checkpoint_step(run, checkpoint)
    if ema and recipe.optimization.ema is None:
        raise UsageError(f"--ema: {run} was trained without --ema. Omit --ema.")
    is_hf = recipe.model.startswith("hf:")
    default: Format = "hf" if is_hf else "safetensors"
    if kind == "hf" and not is_hf:
        raise UsageError(
            f"--format hf needs a run of --model hf:FOLDER, but {run} has the model "
            f"{recipe.model}. Use --format safetensors."
        )
    if kind == "adapter":
        if recipe.lora is None:
            raise UsageError(
                f"--format adapter needs a run with --lora, but {run} trained the whole model. Use "
                f"--format {default}."
            )
        try:
            check_peft("--format adapter")
        except ModelError as error:
            raise UsageError(str(error)) from None
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        problem = "is not empty" if to.is_dir() else "is a file"
        raise UsageError(f"--to {to} {problem}. Choose a new directory.")
    return recipe, kind or default


def check_generates_text(recipe: Recipe, path: Path) -> None:
    """Raise UsageError unless the model of a run continues text."""
    if recipe.model != "gpt" or not isinstance(recipe.architecture, GPTConfig):
        raise UsageError(
            f"--prompt needs a gpt, but {path} is a {recipe.model}: leave out --prompt to predict "
            "the dataset"
        )
    if recipe.data.dataset == "tokens":
        raise UsageError(
            f"--prompt needs bytes, but {path} was trained on tokens: use a model that was "
            "trained on bytes (--dataset stdlib or text)"
        )


def _git_state() -> dict[str, Any] | None:
    """Return the git commit of the current directory, and whether files differ from it."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", *arguments], capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changes)}


def csv_of(metrics: Path) -> str:
    """Return the metrics of a rank as CSV text: one row per step, one column per key."""
    rows: dict[int, dict[str, Any]] = {}
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    for line in lines:
        values = json.loads(line)
        rows.setdefault(values["step"], {}).update(values)
    columns = list(dict.fromkeys(["step", *(key for row in rows.values() for key in row)]))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows.values())
    return text.getvalue()


def finite(value: float | None) -> float | None:
    """Return the value, or None if it is NaN or infinite, for which JSON has no number."""
    return value if value is not None and math.isfinite(value) else None


def check_wandb(project: str | None) -> None:
    """Raise UsageError if --wandb is given, but the package is not installed."""
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise UsageError(f"--wandb {project} needs a package: pip install wandb")


def _start_wandb(arguments: dict[str, Any]) -> Any:
    """Return the W&B run of a run directory. A resumed run continues its W&B run."""
    wandb: Any = importlib.import_module("wandb")
    folder = Path(arguments["dir"])
    file = folder / "wandb" / "run-id"
    resumed = file.is_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        name = file.read_text() if resumed else os.urandom(4).hex()
        run = wandb.init(**arguments, id=name, resume="allow" if resumed else None)
        write_atomically(file, name)
        return run
    except Exception as error:  # the package has many kinds of errors, which depend on its version
        if not resumed:  # a new attempt with the same --out needs an empty run directory
            shutil.rmtree(file.parent, ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        cure = "Run wandb login, or set WANDB_MODE=offline."
        raise UsageError(f"--wandb {arguments['project']}: {reason}. {cure}") from None


WANDB_METRICS = "metrics in W&B"  # the name in `Metrics.failed`


class Metrics:
    """Writes JSON lines to one file per rank and, on request, to TensorBoard and W&B.

    A full disk does not end the training: lines that could not be written are written later.
    `failed` maps each incomplete file to the reason why lines are missing.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        tensorboard: Path | None = None,
        wandb: dict[str, Any] | None = None,
    ) -> None:
        """`tensorboard`: the directory of its files. `wandb`: the arguments of wandb.init."""
        self.path = directory / f"rank{rank}.jsonl"
        self.failed: dict[str, str] = {}
        self._lines: list[str] = []
        self._board: Any = None
        if tensorboard is not None:
            try:  # every rank imports TensorBoard, so that all ranks raise the same error
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UsageError(
                    "--tensorboard needs a package: pip install 'tutti-torch[tensorboard]'"
                ) from None
            if rank == 0:
                with self._tensorboard_errors():
                    self._board = SummaryWriter(str(tensorboard))
        self._wandb = _start_wandb(wandb) if wandb is not None and rank == 0 else None

    def rewind(self, step: int) -> None:
        """Drop the lines of `step` and of later steps, which a resumed run writes again."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text().splitlines(keepends=True):
            # The last line may be cut off, because the process was killed.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if int(json.loads(line)["step"]) < step:
                    kept.append(line)
        try:
            write_atomically(self.path, "".join(kept))
        except OSError as error:
            reason = f"{error.strerror}. Free space for --out."
            raise UsageError(f"{self.path} was not written: {reason}") from None

    def add(self, step: int, **values: float | int | str | None) -> None:
        """Add a line. None means that a value is unknown."""
        line = {"step": step, "time": round(time.time(), 3), **values}
        self._lines.append(json.dumps(line) + "\n")
        if self._board is not None:
            with self._tensorboard_errors():
                for name, value in values.items():
                    if isinstance(value, (int, float)):
                        self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            with self._wandb_errors():
                self._wandb.log({k: v for k, v in values.items() if v is not None}, step=step)

    def flush(self) -> None:
        """Write the added lines to the file; if that fails, keep them for the next call."""
        if not self._lines:
            return
        rest = "".join(self._lines).encode()
        try:
            with self.path.open("ab", buffering=0) as file:
                end = file.tell()
                try:
                    while rest:
                        rest = rest[file.write(rest) :]
                except OSError:
                    file.truncate(end)  # do not leave a part of a line in the file
                    raise
        except OSError as error:
            self.failed[str(self.path)] = error.strerror or str(error)
            return
        self._lines.clear()
        self.failed.pop(str(self.path), None)

    def close(self, failed: bool = False) -> None:
        """Write the remaining lines. `failed` marks the run as failed in W&B."""
        self.flush()
        if self._board is not None:
            with self._tensorboard_errors():
                self._board.close()
        if self._wandb is not None:
            with self._wandb_errors():
                self._wandb.finish(exit_code=int(failed))
            self._wandb = None

    @contextlib.contextmanager
    def _tensorboard_errors(self) -> Iterator[None]:
        """If TensorBoard files cannot be written, record the reason and stop writing them."""
        try:
            yield
        except OSError as error:
            self.failed["TensorBoard files"] = error.strerror or str(error)
            self._board = None

    @contextlib.contextmanager
    def _wandb_errors(self) -> Iterator[None]:
        """If W&B fails, record the reason and stop logging to it."""
        try:
            yield
        except Exception as error:  # the package has many kinds of errors
            reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
            self.failed[WANDB_METRICS] = reason
            self._wandb = None
