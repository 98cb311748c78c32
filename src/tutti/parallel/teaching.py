"""Engines and layers for teaching, written with plain collectives.

`tutti train` uses them only with `--engine scratch` or `--engine dataparallel`.

Scratch: data parallelism from first principles
-----------------------------------------------
1. Every rank starts from the same parameters: rank 0 broadcasts its parameters.
2. Every rank runs forward and backward on its own part of the batch.
3. Gradients are summed over the ranks (all-reduce).
4. Every rank makes the same update with the same gradients, so the replicas stay equal.

Step 3 is either one all-reduce per gradient (each), or one all-reduce of a buffer that contains all
gradients (grouped). A network has many small parameters, and every collective has a latency. For P
parameters, the times are:

    each      P × (latency + bytes / (P × bandwidth))  =  P × latency + bytes / bandwidth
    grouped                                                   latency + bytes / bandwidth

Both variants start after the end of backward. DDP overlaps the all-reduce with backward.

LayersOnRanks: a model split by layers, without microbatches
------------------------------------------------------------
        rank 0   F . . . . . . B          of p ranks, p - 1 are idle at any time: a step takes as
        rank 1   . F . . . . B .          long as on one device. Only memory is gained. A pipeline
        rank 2   . . F . . B . .          cuts the batch into microbatches, so that rank 0 can start
        rank 3   . . . F B . . .          the next microbatch while rank 1 computes.

ColumnLinear, RowLinear: a linear layer y = x W + b split within the layer
--------------------------------------------------------------------------
        column split   W = [W0 | W1]       each rank computes some columns of y from all of x;
                                           an all-gather concatenates them
        row split      W = [W0 / W1]       each rank takes some columns of x and computes one term
                                           of every y; an all-reduce adds the terms

Each of these operations on activations has a counterpart in backward (`_Operation`). If a column
split is followed by a row split, no communication is needed in between: see
`tutti.parallel.tensor`.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tutti.comm.collectives import (
    all_gather,
    all_reduce,
    all_reduce_coalesced,
    broadcast_coalesced,
    recv,
    send,
)
from tutti.parallel.engine import Engine, gradients_to_sum, trained_parameters
from tutti.parallel.pipeline.stages import cut_evenly, keep_layers, layer_units
from tutti.world.errors import UsageError
from tutti.world.world import World

Group = dist.ProcessGroup | None  # None: all ranks


class Scratch(Engine):
    """Data parallelism with plain collectives after backward."""

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
        broadcast_coalesced([*model.parameters(), *model.buffers()])

    @property
    def description(self) -> str:
        calls = {"each": "one all-reduce per gradient", "grouped": "one all-reduce for all"}
        return f"scratch: {self.replicas}, {calls[self.how]}, after backward"

    def reduce(self) -> None:
        tensors = gradients_to_sum(self.trained, self.find_unused)
        if self.how == "each":
            all_reduce_each(tensors)
        else:
            all_reduce_coalesced(tensors)


@torch.no_grad()
def all_reduce_each(tensors: list[torch.Tensor]) -> None:
    """Sum every tensor over the ranks, in place, with one all-reduce per tensor."""
    for tensor in tensors:
        all_reduce(tensor)


class DataParallel(Engine):
    """torch's DataParallel: one process drives all visible devices.

    Every forward copies the parameters to all devices and splits the inputs; every backward sums
    the gradients on the first device. With more than one device, DDP is faster.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        if world.size > 1:
            raise UsageError(
                f"--engine dataparallel is one process with many devices, this world has "
                f"{world.size} ranks: use --engine ddp or --ranks 1"
            )
        super().__init__(model, world)
        self.devices = [world.device]
        if world.device.type == "cuda":
            others = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
            self.devices += [device for device in others if device != world.device]
        # On the CPU there is one device, and torch's DataParallel calls the module directly.
        gpus = self.devices if world.device.type == "cuda" else None
        self.scattered = nn.DataParallel(model, device_ids=gpus)

    @property
    def description(self) -> str:
        if len(self.devices) == 1:
            return f"dataparallel: there is only one device, {self.devices[0]}: nothing is split"
        return f"dataparallel: one process on {', '.join(map(str, self.devices))}"

    def __call__(self, *inputs: Any) -> Any:
        return self.scattered(*inputs)


class LayersOnRanks:
    """Consecutive layers of a model on the ranks of a group, without microbatches."""

    _received: torch.Tensor
    _output: torch.Tensor

    def __init__(self, model: nn.Module, group: Group = None) -> None:
        """Every rank passes the same whole model. The layers of other ranks are removed from it."""
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.is_first, self.is_last = self.rank == 0, self.rank == self.ranks - 1
        units = layer_units(model)
        own = cut_evenly(len(units), self.ranks)[self.rank]
        self.model = keep_layers(model, [name for number in own for name in units[number]])

    def forward(self, inputs: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Receive from the previous rank, compute this rank's layers, send to the next rank.

        Only the first rank reads the values of `inputs`. The other ranks need the `shape` of the
        tensor that they receive.
        """
        if self.is_first:
            self._received = inputs
        else:
            self._received = inputs.new_empty(shape, requires_grad=True)
            recv(self._received.detach(), self.rank - 1, group=self.group)
        self._output = self.model(self._received)
        if not self.is_last:
            send(self._output.detach(), self.rank + 1, group=self.group)
        return self._output

    def backward(self, loss: torch.Tensor | None) -> None:
        """Receive the gradient from the next rank, run backward, send to the previous rank."""
        if self.is_last:
            assert loss is not None
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            gradient = torch.empty_like(self._output)
            recv(gradient, self.rank + 1, group=self.group)
            self._output.backward(gradient)  # type: ignore[no-untyped-call]
        if not self.is_first:
            assert self._received.grad is not None
            send(self._received.grad, self.rank - 1, group=self.group)


class ColumnLinear(nn.Module):
    """A linear layer in which each rank computes some outputs and then gets all outputs."""

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__()
        self.group = group
        # nn.Linear stores Wᵀ (outputs × inputs): its rows are the columns of W.
        self.weight = nn.Parameter(own_slice(whole.weight, 0, group))
        self.bias = None if whole.bias is None else nn.Parameter(own_slice(whole.bias, 0, group))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _operation(x, _identity, _sum, self.group) @ self.weight.T
        if self.bias is not None:
            y = y + self.bias
        return _operation(y, _concatenate, _take_own, self.group)


class RowLinear(nn.Module):
    """A linear layer in which each rank uses some inputs; outputs are summed over the ranks."""

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(own_slice(whole.weight, 1, group))
        # Every rank has the whole bias and adds it once, after the sum over ranks.
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = _operation(x, _take_own, _concatenate, self.group)
        y = _operation(own @ self.weight.T, _sum, _identity, self.group)
        return y if self.bias is None else y + self.bias


def own_slice(tensor: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """A copy of this rank's part of a tensor, which is split evenly along `dim`."""
    ranks = dist.get_world_size(group)
    if tensor.size(dim) % ranks:
        raise ValueError(
            f"{tensor.size(dim)} channels cannot be split evenly over {ranks} ranks: use a number "
            f"that {ranks} divides, such as {-(-tensor.size(dim) // ranks) * ranks}"
        )
    return tensor.detach().chunk(ranks, dim)[dist.get_rank(group)].clone()


class _Operation(Function):
    """An operation on activations; backward applies another operation to the gradient.

    forward             backward
    identity            sum           each rank has one term of the gradient of x
    sum                 identity      the gradient of a sum is the gradient of each term
    concatenate         take own      every rank computes the same loss, so each rank has the
                                      whole gradient, and takes the part of its own columns
    take own            concatenate
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, forward: "_OnRanks", backward: "_OnRanks", group: Group
    ) -> torch.Tensor:
        ctx.operation, ctx.group = backward, group
        return forward(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.operation(gradient, ctx.group), None, None, None


_OnRanks = Callable[[torch.Tensor, Group], torch.Tensor]


def _operation(
    x: torch.Tensor, forward: _OnRanks, backward: _OnRanks, group: Group
) -> torch.Tensor:
    y: torch.Tensor = _Operation.apply(x, forward, backward, group)  # type: ignore[no-untyped-call]
    return y


def _identity(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return tensor.view_as(tensor)


def _sum(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    all_reduce(total, group=group)
    return total


def _take_own(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return own_slice(tensor, -1, group)


def _concatenate(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The tensors of all ranks, concatenated along the last dim."""
    parts = all_gather(tensor.detach().contiguous(), group=group)
    return torch.cat(parts.view(-1, *tensor.shape).unbind(), dim=-1)
