"""Runs steps: takes batches from the loader, sets the learning rate, keeps the losses."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.profiler import record_function

from tutti.comm.operation import profiling
from tutti.data.loader import Batch, Loader
from tutti.train.batch_schedule import BatchSchedule
from tutti.train.optimizer import set_lr
from tutti.train.recipe import Recipe
from tutti.train.step import Step

_NOTHING = nullcontext()


class Runner(ABC):
    """Runs steps and counts what went through them."""

    def __init__(self, step: Step, loader: Loader, plan: BatchSchedule, recipe: Recipe) -> None:
        self.step = step
        self.loader = loader
        self.plan = plan
        self.recipe = recipe
        self.samples = 0  # seen in the whole run, over all ranks: what the schedule counts
        self._rank_samples = 0
        self._input_seconds = 0.0

    @abstractmethod
    def run(self, steps: int) -> Tensor:
        """Run this many steps; returns their losses, this rank's part, still on the device."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the data and of what was prepared."""

    def take_rank_samples(self) -> int:
        """How many samples this rank has trained on since the last call."""
        taken, self._rank_samples = self._rank_samples, 0
        return taken

    def take_input_seconds(self) -> float:
        """How long the loop has waited for batches since the last call."""
        taken, self._input_seconds = self._input_seconds, 0.0
        return taken


class EagerRunner(Runner):
    """Runs steps one by one, each launched from Python."""

    _batches: Iterator[Batch] | None = None

    def run(self, steps: int) -> Tensor:
        if self._batches is None:
            self._batches = self.loader.stream()
        losses = []
        for _ in range(steps):
            began = time.perf_counter()
            # A name of its own in a trace: the time for which the step has no input.
            with record_function("tutti.input") if profiling() else _NOTHING:
                batch = next(self._batches)
            self._input_seconds += time.perf_counter() - began
            self.samples += batch.global_count
            self._rank_samples += batch.count
            set_lr(self.step.optimizer, self.plan.lr_at(self.samples, self.recipe))
            losses.append(self.step(batch))
        return torch.stack(losses)

    def close(self) -> None:
        self._batches = None
        self.loader.close()
