"""Two ways to split a model from first principles, for contrast: plain collectives, nothing hidden.

1. By layers, without microbatches. Each rank holds a part of the layers, in order; one computes
   while the others wait:

        rank 0   F . . . . . . B          of p ranks, p - 1 are idle at any time: the whole step
        rank 1   . F . . . . B .          takes as long as on one device. What is gained is memory.
        rank 2   . . F . . B . .          A pipeline cuts the batch, so that rank 0 can start on the
        rank 3   . . . F B . . .          next part: docs/pipeline.md.

2. By channels, within a layer. A linear layer y = x W + b, its weights split over ranks:

        column split   W = [W0 | W1]       each rank computes some columns of y from all of x;
                                           an all-gather puts them side by side
        row split      W = [W0 / W1]       each rank takes some columns of x and computes a part of
                                           every y; an all-reduce adds the parts up

   Backward is the mirror image: what was copied to all ranks gets its gradients added up, what was
   summed hands its gradient to all as it is, what was gathered takes its own slice. A column split
   followed by a row split needs no exchange in between: `tutti.parallel.tensor` does that.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tutti.parallel.pipeline.balance import cut_evenly
from tutti.parallel.pipeline.layers import keep, units

Group = dist.ProcessGroup | None  # None: all ranks


class LayersOnRanks:
    """A model's layers on the ranks of a group, one part on each, a whole batch at a time."""

    _received: torch.Tensor
    _output: torch.Tensor

    def __init__(self, model: nn.Module, group: Group = None) -> None:
        """Every rank gives the same whole model, and keeps its part of the layers in place."""
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        parts = units(model)
        mine = cut_evenly(len(parts), self.ranks)[self.rank]
        self.model = keep(model, [name for number in mine for name in parts[number]])

    @property
    def is_first(self) -> bool:
        """Whether this rank takes the inputs."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank gives the outputs."""
        return self.rank == self.ranks - 1

    def forward(self, inputs: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Compute this rank's layers on what the rank before it sends; send on what they give.

        Only the first rank reads `inputs`. The others must know the `shape` of what they receive.
        """
        if self.is_first:
            self._received = inputs
        else:
            self._received = inputs.new_empty(shape, requires_grad=True)
            dist.recv(self._received.detach(), group=self.group, group_src=self.rank - 1)
        self._output = self.model(self._received)
        if not self.is_last:
            dist.send(self._output.detach(), group=self.group, group_dst=self.rank + 1)
        return self._output

    def backward(self, loss: torch.Tensor | None) -> None:
        """From the last rank's loss to the first rank's layers, the way that forward came."""
        if self.is_last:
            assert loss is not None
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            gradient = torch.empty_like(self._output)
            dist.recv(gradient, group=self.group, group_src=self.rank + 1)
            self._output.backward(gradient)  # type: ignore[no-untyped-call]
        if not self.is_first:
            assert self._received.grad is not None
            dist.send(self._received.grad, group=self.group, group_dst=self.rank - 1)


class ColumnLinear(nn.Module):
    """A linear layer of which each rank has some outputs; all ranks get all of them."""

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__()
        self.group = group
        # nn.Linear keeps Wᵀ (outputs × inputs): its rows are the columns of W.
        self.weight = nn.Parameter(own_part(whole.weight, 0, group))
        self.bias = None if whole.bias is None else nn.Parameter(own_part(whole.bias, 0, group))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _CopyToRanks.apply(x, self.group)  # type: ignore[no-untyped-call]
        y = x @ self.weight.T
        if self.bias is not None:
            y = y + self.bias
        gathered: torch.Tensor = _Gather.apply(y, self.group)  # type: ignore[no-untyped-call]
        return gathered


class RowLinear(nn.Module):
    """A linear layer of which each rank has some inputs; the outputs are summed over the ranks."""

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(own_part(whole.weight, 1, group))
        # All ranks have the whole bias: it is added once, after the sum.
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _TakeOwn.apply(x, self.group)  # type: ignore[no-untyped-call]
        y: torch.Tensor = _Sum.apply(x @ self.weight.T, self.group)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias


def own_part(tensor: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """This rank's equal part of a tensor, a copy."""
    ranks = dist.get_world_size(group)
    if tensor.size(dim) % ranks:
        raise ValueError(
            f"{tensor.size(dim)} channels cannot be split evenly over {ranks} ranks: use a number "
            f"that {ranks} divides, such as {-(-tensor.size(dim) // ranks) * ranks}"
        )
    return tensor.detach().chunk(ranks, dim)[dist.get_rank(group)].clone()


class _CopyToRanks(Function):
    """All ranks use the same x. Backward: each has a part of its gradient, add them up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Gather(Function):
    """Put the ranks' columns side by side. Backward: each takes its own columns' gradient."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(y) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, y.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Every rank computes the same loss from the same y: what each has is the whole gradient.
        return own_part(gradient, -1, ctx.group), None


class _TakeOwn(Function):
    """Take this rank's columns of x. Backward: put the ranks' gradients side by side."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return own_part(x, -1, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts, dim=-1), None


class _Sum(Function):
    """Add up the ranks' parts of y. Backward: the gradient of a sum is that of each part."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: Group) -> torch.Tensor:
        total = y.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
