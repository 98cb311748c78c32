"""What an engine is, and the contract that makes all of them agree.

The caller divides the loss of every microbatch by the number of samples (or tokens) of the whole
step: all microbatches of all ranks. A rank's gradient is then its share of the gradient of the
mean, and what is left to do is to add:

    g = Σ_ranks Σ_microbatches ∂/∂θ (loss of the microbatch / samples of the step)

After the last microbatch and `reduce()`, every rank holds this g in `.grad`, whatever the engine
and however unevenly the samples are split. A mean over ranks would be right for equal shares only.

A step is `engine.run(microbatches, objective)` and `optimizer.step()`. Ranks that differ only in
tp or pp work on the same samples: one of them `speaks`, and only its loss and outputs count.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from tutti.parallel.flat import copy_from_first
from tutti.parallel.grid import Grid
from tutti.parallel.layout import Layout
from tutti.parallel.noise import seed_noise
from tutti.parallel.sync_batchnorm import JointBatchNorm
from tutti.world.world import World

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Objective:
    """What a step is to make small: a microbatch's part of it, divided by the step's samples."""

    of_inputs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(inputs, targets) → the part, through the engine's own forward."""
    of_outputs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(the model's outputs, targets) → the part; a pipeline has outputs on one rank only."""
    scale: Callable[[torch.Tensor], torch.Tensor] = lambda part: part
    """What backward starts from: the part, or a multiple of it that float16 can hold."""
    example: torch.Tensor | None = None
    """One real input, for microbatches in which this rank has none; needed for these only."""


class Engine(ABC):
    """Runs a model on this rank's part of the batch, and adds up gradients over all ranks."""

    def __init__(self, model: nn.Module, world: World, grid: Grid | None = None) -> None:
        self.model = model
        """The plain module: its parameters are what the optimizer updates and checkpoints hold."""
        self.world = world
        self.grid = grid if grid is not None else Layout(dp=world.size).grid(world)
        """Where this rank stands in the layout."""
        self.split_stream = False
        """Whether tp ranks hold a part of the sequence each, between the split layers."""

    @property
    def aliases(self) -> dict[str, str]:
        """Parameters of this rank that are copies of others', by the name of the original."""
        return {}

    @property
    @abstractmethod
    def description(self) -> str:
        """One line for the start of a run: what this engine does here."""

    @property
    def replicas(self) -> str:
        """How many there are, in words."""
        return f"{self.world.size} replica{'s' * (self.world.size > 1)}"

    @property
    def speaks(self) -> bool:
        """Whether this rank's losses and outputs count, among those with the same samples."""
        return self.grid.rank("tp") == 0

    def run(self, microbatches: Sequence[Pair], objective: Objective) -> torch.Tensor:
        """Forward and backward of a step's microbatches: every `.grad` is then the contract's g.

        Returns this rank's part of the step's loss, on the device; 0 on a rank that does not
        speak, so that the sum over all ranks is the loss. All ranks give the same number of
        microbatches, and one that is empty only where it is not on another rank.
        """
        loss = self.no_loss()
        for number, (inputs, targets) in enumerate(microbatches, start=1):
            last = number == len(microbatches)
            if len(inputs) == 0:  # others still have samples, and wait for this rank
                assert objective.example is not None
                self.idle_microbatch(objective.example, last=last)
                continue
            with self.microbatch(last):
                part = objective.of_inputs(inputs, targets)
                self.backward(objective.scale(part))
            loss = loss + part.detach()
        self.reduce()
        return loss if self.speaks else torch.zeros_like(loss)

    def no_loss(self) -> torch.Tensor:
        """Zero, in the type that losses have on every rank: float32 or better."""
        wide = next(self.model.parameters()).dtype == torch.float64
        dtype = torch.float64 if wide else torch.float32
        return torch.zeros((), dtype=dtype, device=self.world.device)

    @torch.no_grad()
    def infer(self, inputs: torch.Tensor, example: torch.Tensor | None = None) -> Any:
        """The model's outputs for this rank's inputs; None where it has none of its own.

        That is a rank without inputs, which may have to help others all the same (and then needs
        an `example`), and a rank that does not hold the model's end. Call it equally often on all
        ranks, with the model in evaluation mode.
        """
        return self.model(inputs) if len(inputs) else None

    def __call__(self, *inputs: Any) -> Any:
        """The model's outputs for this rank's inputs."""
        return self.model(*inputs)

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one microbatch; only the last of a step communicates."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Add this microbatch's gradients; the loss is divided by the whole step's samples."""
        loss.backward()  # type: ignore[no-untyped-call]

    def reduce(self) -> None:
        """After the last microbatch: make every `.grad` the sum over ranks, if it is not yet."""
        return

    def idle_microbatch(self, *inputs: Any, last: bool) -> None:
        """In place of a microbatch for which this rank has no samples, while other ranks have some.

        The others wait for this rank, in the gradients' all-reduce and in synchronised batch
        norms. So the model runs on `inputs`, any real ones, as a dummy: every gradient it adds is
        zero, and neither the statistics of batch norms nor the random numbers notice. Leave out
        a microbatch that is empty on every rank.
        """
        with self.microbatch(last), _unnoticed(self.model, self.world):
            self.backward(_zero(self(*inputs)))

    def seed_noise(self, seed: int, step: int = 0) -> None:
        """Seed the random numbers of training: see noise.py. Call it on every rank."""
        seed_noise(seed, self.grid, split_stream=self.split_stream, step=step)

    def share_buffers(self) -> None:
        """Give every rank the buffers of rank 0, before evaluation or a checkpoint.

        Plain batch norms see a different part of the batch on each rank. In training mode they
        never read their running statistics, so that sharing them at each step would be a waste.
        """
        if self.grid.layout.data_ranks > 1:
            copy_from_first(list(self.model.buffers()), self.grid.data_group)


def _zero(outputs: Any) -> torch.Tensor:
    """A loss that depends on all outputs, with a gradient of zero: also where they overflowed."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    parts = [tensor.sum() * 0 for tensor in tensors if tensor.requires_grad]
    return torch.stack([part.float() for part in parts]).sum()


@contextmanager
def _unnoticed(model: nn.Module, world: World) -> Iterator[None]:
    """Let norms and random numbers be afterwards as if the model had not run.

    Only the norms change their mode: a model may use other parameters in evaluation, an auxiliary
    head for one, and all parameters must take part. Joint batch norms stay in training mode, for
    the statistics of the other ranks are theirs too; they contribute no samples.
    """
    norms = [layer for layer in model.modules() if isinstance(layer, _NormBase) and layer.training]
    joint = [layer for layer in norms if isinstance(layer, JointBatchNorm)]
    alone = [layer for layer in norms if not isinstance(layer, JointBatchNorm)]
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        try:
            for norm in joint:
                norm.idle = True
            for layer in alone:
                layer.eval()
            yield
        finally:
            for norm in joint:
                norm.idle = False
            for layer in alone:
                layer.train()
