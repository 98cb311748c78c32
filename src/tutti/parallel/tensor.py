"""Tensor parallelism: the matrices of a layer lie on several ranks, which work on the same samples.

With `sequence_parallel` the stream between the split layers is itself split, along the sequence:

    embed ─ ▌norm▐ ─ gather ─ wq wk wv │ attention │ wo ─ scatter ─ ▌norm▐ ─ gather ─ …  ─ head
            part of the                 some of the              part of the
             sequence                      heads                  sequence

An all-reduce (every rank gets the whole sum) becomes a reduce-scatter and an all-gather, which
move the same bytes, and norms and residuals take a tp-th of the memory and time. Without it, every
rank holds the whole stream, and computes the norms twice over.

All of it is DTensor's doing: a layer's weight knows how it is split, and the matrix product of
split tensors gives one that is split or waits to be summed. Between the layers named in the plan,
tensors are plain ones, this rank's part.
"""

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tutti.parallel.grid import Grid
from tutti.parallel.noise import place_noise
from tutti.parallel.options import ParallelOptions
from tutti.parallel.plans import Role
from tutti.world.errors import UsageError

SEQUENCE = 1  # the dim of activations (batch, sequence, width) that is split


def tensor_parallel(
    model: nn.Module,
    grid: Grid,
    plan: Mapping[str, Role],
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
) -> None:
    """Split the layers that the plan names over tp, in place; layers of other stages are skipped.

    With `loss_parallel` the head's outputs stay split by words, and the loss must be computed
    inside `loss_context`.
    """
    stream = Shard(SEQUENCE) if sequence_parallel else Replicate()
    styles = {
        name: _style(role, stream, _has_input_above(name, plan), loss_parallel)
        for name, role in plan.items()
    }
    mesh = grid.mesh["tp"]
    ties = shared_parameters(model)
    for name in _present(model, plan):
        layer = parallelize_module(model.get_submodule(name), mesh, styles[name])
        if plan[name] == "vocabulary":
            layer.register_forward_hook(_arrived)
    _tie_again(model, ties)
    place_noise(model, grid, plan, split_stream=sequence_parallel)


def check_sequence(example: torch.Tensor, tp: int) -> None:
    """Raise UsageError unless the sequence of an input (batch, sequence) divides by tp."""
    length = example.shape[SEQUENCE] if example.dim() > SEQUENCE else 0
    if length % tp:
        raise UsageError(
            f"layout tp{tp} does not divide sequences of {length} tokens: {length} / {tp} = "
            f"{length / tp:.4g}: use --seq-len {-(-length // tp) * tp} or --no-sequence-parallel"
        )


def loss_context(split_logits: bool) -> AbstractContextManager[None]:
    """Around a step whose logits may be split by words: forward and backward of the loss."""
    return loss_parallel() if split_logits else nullcontext()


def overlap_matrix_products(grid: Grid, options: ParallelOptions, compiled: bool) -> None:
    """Let the compiler split matrix products so that their parts travel while others are made."""
    if grid.world.device.type != "cuda" or not compiled or not options.sequence_parallel:
        raise UsageError(
            "--async-tp needs CUDA, --compile and --sequence-parallel: add them or leave it out"
        )
    from torch._inductor import config  # no public name for it in torch 2.11 to 2.15
    from torch.distributed import _symmetric_memory as symmetric

    config._micro_pipeline_tp = True
    # torch calls this needless already in 2.11, where the compiler still asks whether it was made.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        symmetric.enable_symm_mem_for_group(grid.group("tp").group_name)


def _style(role: Role, stream: Any, gathered: bool, split_logits: bool) -> ParallelStyle:
    if role == "vocabulary":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    if role == "norm":
        if stream == Replicate():
            return Whole(stream)
        return SequenceParallel(sequence_dim=SEQUENCE, use_local_output=True)
    if role == "whole":
        return Whole(stream)
    if role == "input":
        return Gather(stream)
    if role == "column":
        return ColwiseParallel(input_layouts=Replicate() if gathered else stream)
    if role == "row":
        return RowwiseParallel(output_layouts=stream)
    return ColwiseParallel(
        input_layouts=stream,
        output_layouts=Shard(-1) if split_logits else Replicate(),
        use_local_output=not split_logits,
    )


def _arrived(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """The stream as a plain tensor, not as one whose parts are still on their way.

    A compiled block that is given such a one sends it a gradient that DTensor cannot read (torch
    2.13). The copy is small beside all that follows, which would wait for the parts anyway.
    """
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output


class Whole(ParallelStyle):
    """A layer that is not split, with a weight that is a DTensor like all others: it works on the
    stream as it is, and gives back what is split as its input is."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            _replicate,
            partial(_as_dtensor, self.stream),
            lambda module, outputs, mesh: outputs.to_local(),
        )


class Gather(ParallelStyle):
    """The first argument of a module becomes whole, once for all columns inside of it.

    In backward each column has a part of its gradient; they are added up over the columns here,
    over the ranks once.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self._gather, device_mesh))
        return module

    def _gather(
        self, mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        first, *others = args
        part = DTensor.from_local(first, mesh, [self.stream], run_check=False)
        return (part.redistribute(placements=[Replicate()]), *others)


def _replicate(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in module.named_parameters(recurse=False):
        whole = distribute_tensor(parameter, mesh, [Replicate()])
        module.register_parameter(key, nn.Parameter(whole, parameter.requires_grad))


def _as_dtensor(
    placement: Any, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh
) -> Any:
    first, *others = inputs
    return (DTensor.from_local(first, mesh, [placement], run_check=False), *others)


def place_gradients(model: nn.Module) -> None:
    """Let every gradient lie as its parameter does.

    Backward leaves it as the last operation made it: a norm's, from a part of the sequence, is
    still to be summed over tp. FSDP does this itself for the parameters it holds.
    """
    for parameter in model.parameters():
        gradient, value = parameter.grad, parameter.data
        if not (isinstance(gradient, DTensor) and isinstance(value, DTensor)):
            continue
        if gradient.placements != value.placements:
            parameter.grad = gradient.redistribute(placements=value.placements)


def shared_parameters(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same, such as a tied embedding and head."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def _tie_again(model: nn.Module, ties: list[list[str]]) -> None:
    """Splitting made a new parameter for each name; a shared one must stay one."""
    for first, *others in ties:
        kept = model.get_parameter(first)
        for name in others:
            split = model.get_parameter(name)
            if _placements(split) != _placements(kept):
                raise UsageError(
                    f"plan: {first} and {name} are one parameter, but are split differently: give "
                    'them roles that agree, as "vocabulary" and "head" do'
                )
            path, _, key = name.rpartition(".")
            setattr(model.get_submodule(path), key, kept)


def _placements(parameter: nn.Parameter) -> tuple[Any, ...]:
    return parameter.placements if isinstance(parameter, DTensor) else ()


def _present(model: nn.Module, plan: Mapping[str, Role]) -> list[str]:
    there = dict(model.named_modules())
    return [name for name in plan if name in there]


def _has_input_above(name: str, plan: Mapping[str, Role]) -> bool:
    parts = name.split(".")
    above = (".".join(parts[:length]) for length in range(1, len(parts)))
    return any(plan.get(parent) == "input" for parent in above)
