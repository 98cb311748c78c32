"""Data parallelism from first principles: plain collectives, nothing hidden.

1. Every rank starts from the same parameters: rank 0's are copied to all.
2. Every rank runs forward and backward on its own part of the batch.
3. Gradients are added up over the ranks (all-reduce).
4. Every rank makes the same update with the same gradients: the replicas never drift apart.

Step 3 comes in two forms. One all-reduce for each gradient is what one would write first; a
network has many small parameters, and each message costs its latency. So the gradients are laid
end to end in one buffer, which goes in one message:

    each      P × (latency + bytes / (P × bandwidth))  =  P × latency + bytes / bandwidth
    grouped                                                   latency + bytes / bandwidth

Both wait for backward to end. What `ddp` adds is to send while backward still computes.
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from tutti.parallel.engine import Engine
from tutti.parallel.flat import copy_from_first, sum_over_ranks
from tutti.parallel.gradients import gradients, trained_parameters
from tutti.world.world import World


class Scratch(Engine):
    """The lesson; reduces after backward, gradient by gradient or all in one message."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        how: Literal["each", "grouped"] = "grouped",
        find_unused: bool = False,
    ) -> None:
        super().__init__(model, world)
        self.trained = trained_parameters(model)
        self.how = how
        self.find_unused = find_unused
        copy_from_first([*model.parameters(), *model.buffers()])

    @property
    def description(self) -> str:
        messages = {"each": "one all-reduce per gradient", "grouped": "one all-reduce for all"}
        return f"scratch: {self.replicas}, {messages[self.how]}, after backward"

    def reduce(self) -> None:
        tensors = gradients(self.trained, self.find_unused)
        if self.how == "each":
            sum_one_by_one(tensors)
        else:
            sum_over_ranks(tensors)


@torch.no_grad()
def sum_one_by_one(tensors: list[torch.Tensor]) -> None:
    """Replace every tensor by its sum over the ranks, one message each."""
    for tensor in tensors:
        message = tensor.contiguous()  # itself, unless its memory format is another
        dist.all_reduce(message)
        if message is not tensor:
            tensor.copy_(message)
