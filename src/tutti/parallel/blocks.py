"""The blocks that a model is stacked from: the units that are recomputed, compiled and sharded."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_SIZES_OF_BATCH = 4  # whole, at the end of an epoch, and both in evaluation


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks a model is stacked from: classes of its own in a list, dict or sequence."""
    blocks = []
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            children = list(container.children())
            own = [child for child in children if not type(child).__module__.startswith("torch.")]
            blocks += [child for child in own if next(child.parameters(), None) is not None]
    nested = {part for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if block not in nested]


def compile_blocks(
    model: nn.Module, backend: str = "inductor", *, forward_only: bool = False
) -> None:
    """Compile block by block, in place: all blocks are alike, so one graph serves them all.

    One graph of the whole would also give DDP its gradients all at once, at the end, and nothing
    would be left to overlap. `forward_only`: what comes around a block's forward afterwards runs as
    it is, uncompiled.
    """
    split = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    # One graph for all sizes of batch cannot be had where matrices are split (RecursionError,
    # torch 2.13): then each size, of which there are two or three, has its own.
    dynamic = False if split else None
    blocks = repeated_blocks(model) or [model]
    # Blocks that differ in size have a graph each, and past a limit the compiler would give up.
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _SIZES_OF_BATCH * len(blocks))
    for block in blocks:
        if forward_only:
            block.forward = torch.compile(block.forward, backend=backend, dynamic=dynamic)
        else:
            block.compile(backend=backend, dynamic=dynamic)
