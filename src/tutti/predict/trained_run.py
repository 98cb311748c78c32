"""A trained run: its recipe, its checkpoint, and its model placed on the ranks for inference."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from tutti.models.config import GPTConfig
from tutti.parallel.apply import build_engine
from tutti.parallel.engine import Engine, count_replicas
from tutti.parallel.layout import Layout, ParallelOptions
from tutti.parallel.materialize import Weights, materialize
from tutti.train.checkpoint import Checkpoints, Loaded
from tutti.train.checkpoint.format import Damaged, read_index, saved_steps, step_name
from tutti.train.recipe import Recipe, read_recipe
from tutti.train.step import AUTOCAST
from tutti.world.errors import UsageError
from tutti.world.world import World

Precision = Literal["float32", "bf16", "fp16", "float64"]


@dataclass(frozen=True)
class TrainedRun:
    """A run directory that `tutti train` has written."""

    path: Path
    recipe: Recipe
    step: int | None
    """The step of the checkpoint; None: the newest complete checkpoint."""

    @classmethod
    def open(cls, path: Path, step: int | None, precision: Precision | None) -> "TrainedRun":
        """Read the recipe, and check that there is a checkpoint."""
        if not path.is_dir():
            raise UsageError(f"--run {path} does not exist: give the --out of a tutti train")
        if not (path / "recipe.toml").is_file():
            raise UsageError(f"--run {path} has no recipe.toml: give the --out of a tutti train")
        steps = saved_steps(path / "checkpoints")
        if not steps:
            raise UsageError(f"--run {path} has no checkpoint yet: wait for its first one")
        if step is not None and step not in steps:
            existing = ", ".join(map(str, steps))
            raise UsageError(f"--step {step}: {path} has no such checkpoint: use {existing}")
        recipe = read_recipe(str(path / "recipe.toml"))
        if precision is not None:
            recipe = replace(recipe, compute=replace(recipe.compute, precision=precision))
        return cls(path, recipe, step)

    @property
    def dtype(self) -> torch.dtype:
        is_double = self.recipe.compute.precision == "float64"
        return torch.float64 if is_double else torch.float32

    @property
    def autocast(self) -> torch.dtype | None:
        """The autocast dtype, as in training; None: no autocast."""
        return AUTOCAST.get(self.recipe.compute.precision)

    def gpt_config(self) -> GPTConfig:
        """Return the configuration of the run's GPT. Its vocabulary size is read from the
        checkpoint, so the dataset need not be available."""
        architecture = self.recipe.architecture
        if self.recipe.model != "gpt" or not isinstance(architecture, GPTConfig):
            raise UsageError(
                f"--prompt needs a gpt, {self.path} is a {self.recipe.model}: leave --prompt out "
                "to predict its data set"
            )
        if self.recipe.data.dataset == "tokens":
            raise UsageError(
                f"--prompt: {self.path} was trained on tokens, and there is no tokenizer here: "
                "prompts are for models of bytes (data sets stdlib and text)"
            )
        return replace(
            architecture,
            vocab_size=self._saved_vocabulary(),
            max_seq_len=max(architecture.max_seq_len, self.recipe.data.seq_len),
        )

    def load(self, engine: Engine) -> Loaded:
        """Load the checkpoint into this rank's part of the model. Collective."""
        checkpoints = Checkpoints(self.path / "checkpoints")
        return checkpoints.load(engine.model, step=self.step, rng=False, aliases=engine.aliases)

    def _saved_vocabulary(self) -> int:
        directory = self.path / "checkpoints"
        steps = saved_steps(directory) if self.step is None else [self.step]
        problem = ""
        for step in reversed(steps):
            try:
                index = read_index(directory / step_name(step))
                return index.tensors["model.embed.weight"].shape[0]
            except KeyError:
                problem = f"{step_name(step)} has no embed.weight, so it is of another model"
            except Damaged as error:
                problem = f"{step_name(step)} is damaged: {error}"
        raise UsageError(f"--run {self.path}: {problem}: use another checkpoint with --step")


def place_model(
    model: nn.Module, weights: Weights, world: World, layout: Layout, example: Tensor, batch: int
) -> Engine:
    """Distribute a model that was built on meta over the ranks of a layout. Collective.

    The checkpoint is loaded afterwards, directly into the shards of each rank.
    """
    if layout.only_replicas:
        materialize(model, world.device)
        weights.fill(model)  # needed for buffers that are not in checkpoints
        weights.release()
        return Engine(model, world, f"{count_replicas(world)}, no communication")
    return build_engine(
        model,
        world,
        # Inputs may be a single token, which sequence parallelism cannot divide, and logits are
        # needed as full tensors.
        parallel=ParallelOptions(layout=str(layout), sequence_parallel=False, loss_parallel=False),
        example=example,
        # A pipeline is full when it has as many microbatches as stages.
        microbatches=layout.pp,
        microbatch_size=-(-batch // layout.pp),
        weights=weights,
    )
