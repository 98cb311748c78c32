"""Filling: which samples of a pipeline's microbatches are real, for the layers that look at others.

A schedule needs microbatches of one size, so the last ones of an epoch are filled up with copies.
Every layer computes them, to no effect; but a norm that computes statistics over the samples must
not see them. It gets the real ones alone, and the copies go past it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tutti.parallel.sync_batchnorm import JointBatchNorm
from tutti.world.errors import UsageError


class Filling:
    """How many samples of each microbatch are real, known to all norms of a rank."""

    def __init__(self, model: nn.Module, size: int) -> None:
        """`size`: samples in every microbatch, filled up."""
        self.size = size
        self._real: list[int | None] = []
        self._now: int | None = size
        for name, norm in model.named_modules():
            if isinstance(norm, _NormBase):
                norm.forward = partial(self._forward, norm, name, norm.forward)

    def step(self, real: Sequence[int], microbatches: int) -> None:
        """A step begins: how many samples of each microbatch are this rank's.

        Microbatches that are not in `real` have none, on this rank or any other.
        """
        self._real = [*real, *[None] * (microbatches - len(real))]

    @contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """Around all that is done for a microbatch: forward, backward, which may run it again."""
        before, self._now = self._now, self._real[number]
        try:
            yield
        finally:
            self._now = before

    def _forward(
        self, norm: _NormBase, name: str, forward: Any, input: torch.Tensor
    ) -> torch.Tensor:
        if self._now == self.size or not norm.training:
            return forward(input)  # type: ignore[no-any-return]
        if not self._now:
            return self._without_samples(norm, forward, input)
        each, rest = divmod(len(input), self.size)
        if rest:
            raise UsageError(
                f"layer {name} is given {len(input)} rows for {self.size} samples, of which "
                f"{self._now} are real: it must be a multiple, or --drop-last leaves such ends out"
            )
        y: torch.Tensor = forward(input[: self._now * each])
        return torch.cat([y, y.new_zeros(len(input) - len(y), *y.shape[1:])])

    def _without_samples(self, norm: _NormBase, forward: Any, input: torch.Tensor) -> torch.Tensor:
        """Nothing is counted. Where other ranks have samples, a joint norm still meets them."""
        if self._now == 0 and isinstance(norm, JointBatchNorm):
            norm.idle = True
        else:
            norm.training = False
        try:
            return forward(input)  # type: ignore[no-any-return]
        finally:
            norm.training = True
            if isinstance(norm, JointBatchNorm):
                norm.idle = False
