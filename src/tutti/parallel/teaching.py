"""Engines and layers for teaching, implemented with plain collectives.

Scratch: data parallelism with an all-reduce after backward (`--engine scratch`)
---------------------------------------------------------------------------------
Rank 0 broadcasts its parameters. Then, in every step, each rank runs forward and backward on its
part of the batch, gradients are summed over the ranks, and every rank makes the same update.
Gradients are summed with one all-reduce per gradient (`each`), or with one all-reduce of a buffer
that contains all gradients (`grouped`). Every collective has a latency, so with P parameters the
times are:

    each      P × (latency + bytes / (P × bandwidth))  =  P × latency + bytes / bandwidth
    grouped                                                   latency + bytes / bandwidth

LayersOnRanks: a model split by layers, without microbatches
------------------------------------------------------------
        rank 0   F . . . . . . B          At any time, only one rank computes. So a step takes as
        rank 1   . F . . . . B .          long as on one device, but a rank needs less memory. A
        rank 2   . . F . . B . .          pipeline cuts the batch into microbatches, so that rank 0
        rank 3   . . . F B . . .          starts the next microbatch while rank 1 computes.

ColumnLinear, RowLinear: a linear layer y = x W + b split within the layer
--------------------------------------------------------------------------
        column split   W = [W0 | W1]       each rank computes some columns of y from all of x.
                                           An all-gather concatenates the columns
        row split      W = [W0 / W1]       each rank takes some columns of x and computes one term
                                           of each element of y. An all-reduce adds the terms

A column split followed by a row split needs no communication between the two layers (see
tensor.py).
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
from tutti.parallel.engine import Engine, count_replicas
from tutti.parallel.pipeline.stages import cut_evenly, keep_layers, layer_units
from tutti.world.world import World

Group = dist.ProcessGroup | None  # None: all ranks
_Collective = Callable[[Tensor, Group], Tensor]


class Scratch(Engine):
    """Data parallelism with plain collectives after backward."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        reduction_mode: Literal["each", "grouped"] = "grouped",
        find_unused: bool = False,
    ) -> None:
        gradients = {"each": "per gradient", "grouped": "for all gradients"}[reduction_mode]
        text = f"scratch: {count_replicas(world)}, one all-reduce {gradients}, after backward"
        super().__init__(model, world, text)
        self.reduction_mode, self.find_unused = reduction_mode, find_unused
        broadcast_coalesced([*model.parameters(), *model.buffers()])

    def reduce(self) -> None:
        tensors = self.gradients_to_sum(self.find_unused)
        if self.reduction_mode == "each":
            all_reduce_each(tensors)
        else:
            all_reduce_coalesced(tensors)


@torch.no_grad()
def all_reduce_each(tensors: list[Tensor]) -> None:
    """Sum every tensor over the ranks, in place, with one all-reduce per tensor."""
    for tensor in tensors:
        all_reduce(tensor)


class DataParallel(Engine):
    """torch's DataParallel: one process uses all visible devices.

    Every forward copies the parameters to all devices. Every backward sums the gradients on the
    first device.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        devices, gpus = [world.device], None
        if world.device.type == "cuda":
            visible = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
            gpus = devices = [world.device, *(gpu for gpu in visible if gpu != world.device)]
        text = f"dataparallel: one process on {', '.join(map(str, devices))}"
        if len(devices) == 1:
            text = f"dataparallel: one device ({devices[0]}), so nothing is split"
        super().__init__(model, world, text)
        # On the CPU, torch's DataParallel calls the module directly.
        self.scattered = nn.DataParallel(model, device_ids=gpus)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.scattered(*inputs, **named)


class LayersOnRanks:
    """Consecutive layers of a model on the ranks of a group, without microbatches."""

    _received: Tensor
    _output: Tensor

    def __init__(self, model: nn.Module, group: Group = None) -> None:
        """`model` is the whole model, equal on every rank. Layers of other ranks are removed."""
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.is_first, self.is_last = self.rank == 0, self.rank == self.ranks - 1
        units = layer_units(model)
        own_units = cut_evenly(len(units), self.ranks)[self.rank]
        self.model = keep_layers(model, [name for index in own_units for name in units[index]])

    def forward(self, inputs: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Receive from the previous rank, compute this rank's layers, send to the next rank.

        Only the first rank uses `inputs`. The other ranks receive a tensor of shape `shape`.
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

    def backward(self, loss: Tensor | None) -> None:
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
    """A linear layer in which each rank computes some of the outputs, and an all-gather follows."""

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__()
        self.group = group
        # nn.Linear stores Wᵀ (outputs × inputs), so the columns of W are the rows of Wᵀ.
        self.weight = nn.Parameter(own_slice(whole.weight, 0, group))
        self.bias = None if whole.bias is None else nn.Parameter(own_slice(whole.bias, 0, group))

    def forward(self, x: Tensor) -> Tensor:
        y = _operation(x, _identity, _sum, self.group) @ self.weight.T
        if self.bias is not None:
            y = y + self.bias
        return _operation(y, _concatenate, _own_columns, self.group)


class RowLinear(nn.Module):
    """A linear layer in which each rank uses some of the inputs, and an all-reduce follows."""

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(own_slice(whole.weight, 1, group))
        # Every rank has the whole bias and adds it once, after the sum over ranks.
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        own_part = _operation(x, _own_columns, _concatenate, self.group)
        y = _operation(own_part @ self.weight.T, _sum, _identity, self.group)
        return y if self.bias is None else y + self.bias


def own_slice(tensor: Tensor, dim: int, group: Group = None) -> Tensor:
    """Return a copy of this rank's part of a tensor. The tensor is split evenly along `dim`."""
    ranks = dist.get_world_size(group)
    if tensor.size(dim) % ranks:
        raise ValueError(
            f"{tensor.size(dim)} channels cannot be split evenly over {ranks} ranks: use a "
            f"multiple of {ranks}, such as {-(-tensor.size(dim) // ranks) * ranks}"
        )
    return tensor.detach().chunk(ranks, dim)[dist.get_rank(group)].clone()


class _Operation(Function):
    """An operation on activations. Backward applies a different operation to the gradient.

    forward             backward
    identity            sum           each rank has one term of the gradient of x
    sum                 identity      the gradient of a sum is the gradient of each term
    concatenate         slice         every rank has the whole gradient and keeps its own columns
    slice               concatenate
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: _Collective, backward: _Collective, group: Group
    ) -> Tensor:
        ctx.operation, ctx.group = backward, group
        return forward(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.operation(gradient, ctx.group), None, None, None


def _operation(x: Tensor, forward: _Collective, backward: _Collective, group: Group) -> Tensor:
    y: Tensor = _Operation.apply(x, forward, backward, group)  # type: ignore[no-untyped-call]
    return y


def _identity(tensor: Tensor, group: Group) -> Tensor:
    return tensor.view_as(tensor)


def _sum(tensor: Tensor, group: Group) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    all_reduce(total, group=group)
    return total


def _own_columns(tensor: Tensor, group: Group) -> Tensor:
    return own_slice(tensor, -1, group)


def _concatenate(tensor: Tensor, group: Group) -> Tensor:
    """Return the tensors of all ranks, concatenated along the last dim."""
    parts = all_gather(tensor.detach().contiguous(), group=group)
    return torch.cat(parts.view(-1, *tensor.shape).unbind(), dim=-1)
