"""What a model is trained for: the loss as a sum, and how many things that sum is over.

Losses are sums, never means: a mean over a rank's own samples would weigh ranks, not samples, as
soon as one has fewer. What the sum is divided by is the count of the whole step, over all ranks.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

IGNORED = -100  # the target of a token that no loss is due for; cross_entropy's own default


@dataclass(frozen=True)
class Task:
    """Classification of samples, or of every token of a sample."""

    padded: bool = False

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy in nats, summed; in float32 or better whatever the model computed in."""
        logits = outputs.flatten(0, -2)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        # Of logits that are split by words, every tp rank gets the same sum.
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """How many predictions are right, as a tensor on the device."""
        return (outputs.argmax(-1) == targets).sum()

    def count(self, targets: Tensor) -> Tensor:
        """How many targets count, as a tensor on the device."""
        return (targets != IGNORED).sum()

    def step_count(
        self, targets: Tensor, global_samples: int, group: dist.ProcessGroup | None = None
    ) -> Tensor | int:
        """How many targets count in a whole step, over all ranks of the group, which share it.

        Without padding this follows from the number of samples; with it, ranks must ask each other.
        """
        if not self.padded:
            return global_samples * targets[0].numel() if len(targets) else global_samples
        count = self.count(targets)
        dist.all_reduce(count, group=group)
        return count
