"""Sharded parameters: FSDP2. Every rank stores a part of each parameter, its gradient and its
optimizer state, and gathers a block's parameters just before it computes with them.

    shard 0   [p0   ]  gather →  [p0 p1] forward, backward → [g0 g1] ┐ reduce-scatter → [g0   ]
    shard 1   [   p1]  gather →  [p0 p1] forward, backward → [g0 g1] ┘                  [   g1]

With dp as well (HSDP), the parts of the gradients are then summed over the replicas; with dp
alone beside tp or pp, each rank's part is the whole.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tutti.parallel.blocks import repeated_blocks
from tutti.parallel.grid import Grid
from tutti.parallel.options import ParallelOptions

_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, None: None}


def shard(model: nn.Module, grid: Grid, options: ParallelOptions, *, mean: bool = False) -> None:
    """Shard each block of the model, then what is left of it, in place.

    Gradients are summed over the data ranks; with `mean` they are averaged, as torch does.
    """
    layout = grid.layout
    mesh = grid.mesh["dp", "shard"] if layout.dp > 1 else grid.mesh["shard"]
    precision = MixedPrecisionPolicy(
        param_dtype=_DTYPES[options.gather_dtype],
        reduce_dtype=_DTYPES[options.reduce_dtype],
        # What travels between blocks stays as the block made it.
        cast_forward_inputs=options.gather_dtype is not None,
    )
    # A pipeline comes back to a block for every microbatch: it would gather each time.
    reshard = options.reshard if options.reshard is not None else layout.pp == 1
    blocks = [block for block in repeated_blocks(model) if block is not model]
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        # Other ways to divide are known to NCCL only.
        module.set_force_sum_reduction_for_comms(True)
        if not mean:
            module.set_gradient_divide_factor(1.0)
    _prefetch([block for block in sharded if block is not model], options.prefetch)


def _prefetch(blocks: Sequence[FSDPModule], ahead: int) -> None:
    """Say which blocks to gather while one computes: the next in forward, the last in backward.

    A block that prefetches itself prefetches nothing; an empty list would mean torch's own choice.
    """
    for here, block in enumerate(blocks):
        later, earlier = blocks[here + 1 : here + 1 + ahead], blocks[max(0, here - ahead) : here]
        block.set_modules_to_forward_prefetch(list(later))
        block.set_modules_to_backward_prefetch(list(reversed(earlier)) or [block])
