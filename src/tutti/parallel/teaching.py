"""Engines and layers written for teaching: plain collectives, nothing hidden. Not on the path of
`tutti train` unless `--engine scratch` or `--engine dataparallel` asks for them.

Scratch: data parallelism from first principles
-----------------------------------------------
1. Every rank starts from the same parameters: rank 0 broadcasts its own.
2. Every rank runs forward and backward on its own part of the batch.
3. Gradients are summed over the ranks (all-reduce).
4. Every rank makes the same update with the same gradients: the replicas stay equal.

Step 3 comes in two forms: one all-reduce per gradient, or all gradients in one buffer. A network
has many small parameters, and each collective costs its latency:

    each      P × (latency + bytes / (P × bandwidth))  =  P × latency + bytes / bandwidth
    grouped                                                   latency + bytes / bandwidth

Both wait for the end of backward. DDP adds the overlap with backward.

LayersOnRanks: a model split by layers, without microbatches
------------------------------------------------------------
        rank 0   F . . . . . . B          of p ranks, p - 1 are idle at any time: a step takes as
        rank 1   . F . . . . B .          long as on one device. Only memory is gained. A pipeline
        rank 2   . . F . . B . .          cuts the batch, so that rank 0 can start on the next part:
        rank 3   . . . F B . . .          docs/pipeline.md.

ColumnLinear, RowLinear: a linear layer y = x W + b split within the layer
--------------------------------------------------------------------------
        column split   W = [W0 | W1]       each rank computes some columns of y from all of x;
                                           an all-gather concatenates them
        row split      W = [W0 / W1]       each rank takes some columns of x and computes one term
                                           of every y; an all-reduce adds the terms

Backward is the mirror image: a copy to all ranks sums its gradients, a sum passes its gradient to
all ranks, a concatenation takes its own slice. A column split followed by a row split needs no
communication in between: `tutti.parallel.tensor` does that.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tutti.comm.collectives import all_gather, all_reduce, recv, send
from tutti.comm.packing import all_reduce_coalesced, broadcast_coalesced
from tutti.parallel.engine import Engine, gradients_to_sum, trained_parameters
from tutti.parallel.pipeline.stages import cut_evenly, keep_layers, layer_units
from tutti.world.errors import UsageError
from tutti.world.world import World

Group = dist.ProcessGroup | None  # None: all ranks


class Scratch(Engine):
    """Data parallelism with plain collectives after backward: per gradient, or one for all."""

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
    """Sum every tensor over the ranks, in place, with one all-reduce each."""
    for tensor in tensors:
        all_reduce(tensor)


class DataParallel(Engine):
    """torch's DataParallel: one process drives all visible devices.

    Every forward copies the parameters to all devices and splits the inputs; every backward sums
    the gradients on the first device. DDP is faster wherever there is more than one device.
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
    """Consecutive layers of a model on the ranks of a group, a whole batch at a time."""

    _received: torch.Tensor
    _output: torch.Tensor

    def __init__(self, model: nn.Module, group: Group = None) -> None:
        """Every rank gives the same whole model, and keeps its own layers, in place."""
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        units = layer_units(model)
        own = cut_evenly(len(units), self.ranks)[self.rank]
        self.model = keep_layers(model, [name for number in own for name in units[number]])

    @property
    def is_first(self) -> bool:
        """Whether this rank takes the inputs."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the outputs."""
        return self.rank == self.ranks - 1

    def forward(self, inputs: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Receive from the previous rank, compute this rank's layers, send to the next rank.

        Only the first rank reads `inputs`. The others need the `shape` of what they receive.
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
        """From the last rank's loss back to the first rank's layers."""
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
    """A linear layer of which each rank computes some outputs; all ranks get all outputs."""

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__()
        self.group = group
        # nn.Linear stores Wᵀ (outputs × inputs): its rows are the columns of W.
        self.weight = nn.Parameter(own_slice(whole.weight, 0, group))
        self.bias = None if whole.bias is None else nn.Parameter(own_slice(whole.bias, 0, group))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _CopyToRanks.apply(x, self.group)  # type: ignore[no-untyped-call]
        y = x @ self.weight.T
        if self.bias is not None:
            y = y + self.bias
        gathered: torch.Tensor = _Gather.apply(y, self.group)  # type: ignore[no-untyped-call]
        return gathered


class RowLinear(nn.Module):
    """A linear layer of which each rank takes some inputs; outputs are summed over the ranks."""

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(own_slice(whole.weight, 1, group))
        # All ranks have the whole bias: it is added once, after the sum.
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _TakeOwn.apply(x, self.group)  # type: ignore[no-untyped-call]
        y: torch.Tensor = _Sum.apply(x @ self.weight.T, self.group)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias


def own_slice(tensor: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """A copy of this rank's equal part of a tensor."""
    ranks = dist.get_world_size(group)
    if tensor.size(dim) % ranks:
        raise ValueError(
            f"{tensor.size(dim)} channels cannot be split evenly over {ranks} ranks: use a number "
            f"that {ranks} divides, such as {-(-tensor.size(dim) // ranks) * ranks}"
        )
    return tensor.detach().chunk(ranks, dim)[dist.get_rank(group)].clone()


def _concatenated(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The tensors of all ranks side by side along the last dim."""
    parts = all_gather(tensor.detach().contiguous(), group=group)
    return torch.cat(parts.view(-1, *tensor.shape).unbind(), dim=-1)


class _CopyToRanks(Function):
    """All ranks use the same x. Backward: each rank has one term of the gradient; add them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        all_reduce(total, group=ctx.group)
        return total, None


class _Gather(Function):
    """Concatenate the ranks' columns. Backward: each rank takes the gradient of its columns."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _concatenated(y, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Every rank computes the same loss from the same y: each has the whole gradient.
        return own_slice(gradient, -1, ctx.group), None


class _TakeOwn(Function):
    """Take this rank's columns of x. Backward: concatenate the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return own_slice(x, -1, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _concatenated(gradient, ctx.group), None


class _Sum(Function):
    """Add the ranks' terms of y. Backward: the gradient of a sum is that of each term."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: Group) -> torch.Tensor:
        total = y.clone(memory_format=torch.contiguous_format)
        all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
