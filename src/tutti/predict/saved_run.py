"""A run directory, read again: its recipe, and the checkpoint that is to speak."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from tutti.models.config import GPTConfig
from tutti.parallel.engine import Engine
from tutti.train.checkpoint import Checkpoints, Loaded
from tutti.train.checkpoint.format import Damaged, read_index, saved_steps, step_name
from tutti.train.recipe import Recipe, read_recipe
from tutti.world.errors import UsageError

Precision = Literal["float32", "bf16", "fp16", "float64"]


@dataclass(frozen=True)
class SavedRun:
    """What `tutti train` left in a directory."""

    path: Path
    recipe: Recipe
    step: int | None
    """The checkpoint asked for; None: the last one that is whole."""

    @classmethod
    def open(cls, path: Path, step: int | None, precision: Precision | None) -> "SavedRun":
        """Read the recipe, and make sure that there is a checkpoint."""
        if not path.is_dir():
            raise UsageError(f"--run {path} does not exist: give the --out of a tutti train")
        if not (path / "recipe.toml").is_file():
            raise UsageError(f"--run {path} has no recipe.toml: give the --out of a tutti train")
        steps = saved_steps(path / "checkpoints")
        if not steps:
            raise UsageError(f"--run {path} has no checkpoint yet: let it train up to its first")
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps))
            raise UsageError(f"--step {step}: {path} has no such checkpoint: use {there}")
        recipe = read_recipe(str(path / "recipe.toml"))
        if precision is not None:
            recipe = replace(recipe, compute=replace(recipe.compute, precision=precision))
        return cls(path, recipe, step)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters."""
        double = self.recipe.compute.precision == "float64"
        return torch.float64 if double else torch.float32

    @property
    def autocast(self) -> torch.dtype | None:
        """The narrow type of the matrix products, as in training; None: that of the parameters."""
        narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return narrow.get(self.recipe.compute.precision)

    def gpt_config(self) -> GPTConfig:
        """The GPT of this run. Its vocabulary is the checkpoint's own: no data need be there."""
        architecture = self.recipe.architecture
        if self.recipe.model != "gpt" or not isinstance(architecture, GPTConfig):
            raise UsageError(
                f"--prompt needs a gpt, {self.path} is a {self.recipe.model}: leave --prompt out "
                "to predict its data set"
            )
        if self.recipe.data.dataset == "tokens":
            raise UsageError(
                f"--prompt: {self.path} was trained on tokens, and nothing here turns text into "
                "them: prompts are for models of bytes (data sets stdlib and text)"
            )
        return replace(
            architecture,
            vocab_size=self._saved_vocabulary(),
            max_seq_len=max(architecture.max_seq_len, self.recipe.data.seq_len),
        )

    def load(self, engine: Engine) -> Loaded:
        """Fill the model, or this rank's part of it, from the checkpoint. All ranks call it."""
        checkpoints = Checkpoints(self.path / "checkpoints")
        return checkpoints.load(engine.model, step=self.step, rng=False, aliases=engine.aliases)

    def _saved_vocabulary(self) -> int:
        directory = self.path / "checkpoints"
        steps = saved_steps(directory) if self.step is None else [self.step]
        problem = ""
        for step in reversed(steps):
            try:
                return (
                    read_index(directory / step_name(step)).tensors["model.embed.weight"].shape[0]
                )
            except KeyError:
                problem = f"{step_name(step)} has no embed.weight, so it is of another model"
            except Damaged as error:
                problem = f"{step_name(step)} is damaged: {error}"
        raise UsageError(f"--run {self.path}: {problem}: use another checkpoint with --step")
