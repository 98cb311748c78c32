"""Shards parameters with FSDP2.

Every rank stores one shard of each parameter, of its gradient and of its optimizer state. The
parameters of a block are gathered before the block computes.

    shard 0   [p0   ]  gather →  [p0 p1] forward, backward → [g0 g1] ┐ reduce-scatter → [g0   ]
    shard 1   [   p1]  gather →  [p0 p1] forward, backward → [g0 g1] ┘                  [   g1]

If the layout also has dp (HSDP), the gradient shards are then summed over the replicas. If a layout
combines dp with tp or pp but has no shard axis, each rank's shard is the whole parameter.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tutti.parallel.layout import ParallelOptions
from tutti.parallel.mesh import Mesh
from tutti.parallel.recompute import repeated_blocks

_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, None: None}


def shard(
    model: nn.Module,
    mesh: Mesh,
    options: ParallelOptions,
    *,
    mean: bool = False,
    autocast: torch.dtype | None = None,
) -> None:
    """Shard each block of the model, then the remaining parameters, in place.

    The model may be on the meta device. Gradients are summed over the data ranks. If `mean` is
    true, they are averaged, which is FSDP2's default.

    `autocast` is the autocast dtype of the step, or None. If float32 weights were gathered,
    autocast would convert them and keep the converted weights of all blocks until backward.
    Therefore blocks gather their weights in the autocast dtype. Gradients are still summed in
    float32.
    """
    layout = mesh.layout
    device_mesh = mesh.device_mesh["dp", "shard"] if layout.dp > 1 else mesh.device_mesh["shard"]
    precision = MixedPrecisionPolicy(
        param_dtype=_DTYPES[options.gather_dtype],
        reduce_dtype=_DTYPES[options.reduce_dtype],
        # Activations between blocks keep the dtype in which a block produced them.
        cast_forward_inputs=options.gather_dtype is not None,
    )
    block_precision = precision
    if autocast is not None and options.gather_dtype is None:
        reduce_dtype = _DTYPES[options.reduce_dtype] or torch.float32
        block_precision = MixedPrecisionPolicy(autocast, reduce_dtype, cast_forward_inputs=False)
    # In a pipeline, resharding after forward would mean to gather a block again for every
    # microbatch, so it is off by default.
    reshard = options.reshard if options.reshard is not None else layout.pp == 1
    for block in repeated_blocks(model):
        if block is not model:
            fully_shard(
                block, mesh=device_mesh, mp_policy=block_precision, reshard_after_forward=reshard
            )
    fully_shard(model, mesh=device_mesh, mp_policy=precision, reshard_after_forward=False)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        # Gradients are summed and divided separately, because only NCCL has an averaging reduction.
        module.set_force_sum_reduction_for_comms(True)
        if not mean:
            module.set_gradient_divide_factor(1.0)
    # While a block computes, forward gathers the next `prefetch` blocks, and backward gathers the
    # previous `prefetch` blocks. If the backward list is empty, torch chooses blocks itself. So if
    # nothing is to be prefetched, the list contains only the block itself, which is already
    # gathered.
    units: list[FSDPModule] = [module for module in sharded if module is not model]
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + options.prefetch])
        earlier = units[max(0, index - options.prefetch) : index]
        unit.set_modules_to_backward_prefetch(earlier[::-1] or [unit])
