"""Activation checkpointing: what forward computed is forgotten, and computed again for backward.

none        every activation of every layer is kept
selective   kept: results of matrix products and of attention, which cost most to make;
            computed again: norms, activations, residuals, which take most of the memory
full        kept: the input of each block; the whole block runs twice, a third more work
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tutti.parallel.blocks import repeated_blocks
from tutti.parallel.options import Recompute
from tutti.world.errors import UsageError

_aten = torch.ops.aten
_DEAR = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def recompute_activations(model: nn.Module, what: Recompute) -> None:
    """Recompute the activations of each block in the backward pass, in place."""
    if what == "none":
        return
    blocks = repeated_blocks(model)
    if not blocks:
        raise UsageError(
            f"--checkpoint-activations {what}: {type(model).__name__} has no repeated blocks in a "
            "ModuleList, ModuleDict or Sequential: leave the flag out"
        )
    again: partial[Any] = partial(checkpoint, use_reentrant=False)
    if what == "selective":
        choose = partial(create_selective_checkpoint_contexts, _keep_what_is_dear)
        again = partial(checkpoint, use_reentrant=False, context_fn=choose)
    for block in blocks:
        block.forward = partial(again, block.forward)


def _keep_what_is_dear(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in _DEAR:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
