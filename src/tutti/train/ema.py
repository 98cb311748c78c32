"""EMA: an exponential moving average of the weights, sharded as the weights are.

After every optimizer step, with the decay d of --ema:

    average ← d · average + (1 − d) · weight

The average begins with the initial weights. Every rank averages its own shards, so no rank
communicates. Averages of float16 and bfloat16 weights are float32, because the change in a step is
smaller than the rounding error of these dtypes. Frozen weights and buffers (the statistics of batch
norms) are not averaged.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tutti.parallel.mesh import local_shard


class MovingAverage:
    """The moving averages of the trained parameters of this rank's part of a model."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors: dict[nn.Parameter, Tensor] = {
            parameter: _average_of(parameter)
            for parameter in model.parameters()
            if parameter.requires_grad
        }
        """Maps each parameter to its average, which is a DTensor if the parameter is a DTensor."""

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the averages, without waiting for the device."""
        averages = [local_shard(average) for average in self.tensors.values()]
        weights = [
            local_shard(parameter).to(average.dtype)
            for parameter, average in zip(self.tensors, averages, strict=True)
        ]
        if averages:  # a pipeline stage may have no trained parameters
            torch._foreach_lerp_(averages, weights, 1.0 - self.decay)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Context in which the model's parameters have the values of the averages.

        The weights are copied, which takes as much memory as gradients take in a step.
        """
        weights = [local_shard(parameter).clone() for parameter in self.tensors]
        try:
            for parameter, average in self.tensors.items():
                local_shard(parameter).copy_(local_shard(average))
            yield
        finally:
            for parameter, weight in zip(self.tensors, weights, strict=True):
                local_shard(parameter).copy_(weight)


@torch.no_grad()
def _average_of(parameter: nn.Parameter) -> Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    average = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    local_shard(average).copy_(local_shard(parameter))
    return average
