"""One batch through all stages, forward only: for inference, and to learn the shapes between them.

    stage 0 → send → stage 1 → send → … → stage S-1

Each message goes in two parts: what is coming (type and shape), then the tensor. So batches of any
size pass, one after the other. A rank takes its stages in their order: no two ranks ever wait for
each other.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
_MOST_DIMS = 8

See = Callable[[int, torch.Tensor, torch.Tensor], None]


class Chain:
    """The stages of this rank, linked to those before and after them."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        holders: list[int],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.stages = stages
        self.holders = holders
        """The rank, in the group, of every stage of the pipeline."""
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)

    @torch.no_grad()
    def __call__(self, inputs: torch.Tensor, see: See | None = None) -> torch.Tensor | None:
        """The last stage's outputs where it is, None elsewhere; `see(stage, input, output)`."""
        x: torch.Tensor | None = None
        for stage, module in self.stages.items():
            given = inputs if stage == 0 else self._from(stage - 1, x)
            x = module(given)
            assert isinstance(x, torch.Tensor), "a stage gives one tensor"
            if see is not None:
                see(stage, given, x)
            if stage + 1 == len(self.holders):
                return x
            if self.holders[stage + 1] != self.rank:
                self._send(x.contiguous(), self.holders[stage + 1])
        return None

    def _from(self, stage: int, local: torch.Tensor | None) -> torch.Tensor:
        if self.holders[stage] == self.rank:  # the tip of a V
            assert local is not None
            return local
        source = self.holders[stage]
        header = torch.empty(2 + _MOST_DIMS, dtype=torch.int64, device=self.device)
        dist.recv(header, group=self.group, group_src=source)
        dtype, dims, *shape = header.tolist()
        x = torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=self.device)
        dist.recv(x, group=self.group, group_src=source)
        return x

    def _send(self, x: torch.Tensor, target: int) -> None:
        about = [_DTYPES.index(x.dtype), x.dim(), *x.shape]
        about += [0] * (2 + _MOST_DIMS - len(about))
        header = torch.tensor(about, dtype=torch.int64, device=self.device)
        dist.send(header, group=self.group, group_dst=target)
        dist.send(x, group=self.group, group_dst=target)
