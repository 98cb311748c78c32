"""Activation checkpointing: what forward computed is forgotten, and computed again for backward.

none        every activation of every layer is kept
selective   kept: results of matrix products and of attention, which cost most to make;
            computed again: norms, activations, residuals, which take most of the memory
full        kept: the input of each block; the whole block runs twice, a third more work
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
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


def check_blocks(model: nn.Module, what: Recompute) -> None:
    """Raise UsageError if the whole model has no block to recompute; a stage may have none."""
    if what != "none" and not repeated_blocks(model):
        raise UsageError(
            f"--checkpoint-activations {what}: {type(model).__name__} has no repeated blocks in a "
            "ModuleList, ModuleDict or Sequential: leave the flag out"
        )


def recompute_activations(model: nn.Module, what: Recompute) -> None:
    """Recompute the activations of each block in the backward pass, in place."""
    if what == "none":
        return
    for block in repeated_blocks(model):
        block.forward = _recomputed(block.forward, _contexts_of(block, what))


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Any]) -> Callable[..., Any]:
    # A function of our own: the compiler looks into it. Torch's it would pass by, with the block.
    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return again


def _contexts_of(block: nn.Module, what: Recompute) -> Callable[[], Any]:
    """What makes the contexts of a block: one for all that are alike, as is a compiled graph."""
    return partial(_contexts, what, block) if _norms(block) else _WITHOUT_NORMS[what]


def _norms(block: nn.Module) -> list[_NormBase]:
    return [m for m in block.modules() if isinstance(m, _NormBase) and m.track_running_stats]


def _contexts(
    what: Recompute, block: nn.Module | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What is around a block's forward, and around it when it runs again.

    The compiler only asks what to keep: it changes a buffer once, however often it computes.
    """
    policy = _keep_what_is_dear if what == "selective" else _keep_nothing
    if torch.compiler.is_compiling():
        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return,no-untyped-call]
    norms = [] if block is None else _norms(block)
    if what == "full":
        return nullcontext(), _SecondRun(norms)
    first, second = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return first, _SecondRun(norms, second)


_WITHOUT_NORMS = {what: partial(_contexts, what, None) for what in get_args(Recompute)}


class _SecondRun(AbstractContextManager[None]):
    """Norms have counted this batch already: it must not go into their statistics twice.

    So they count it in copies, which are thrown away: what backward is given stays the same.
    Backward in two halves, as of zero-bubble, enters it twice: for each half the block runs again.
    """

    def __init__(
        self, norms: list[_NormBase], inner: AbstractContextManager[Any] | None = None
    ) -> None:
        self._norms = norms
        self._kept: list[dict[str, torch.Tensor | None]] = []
        self._inner = nullcontext() if inner is None else inner

    def __enter__(self) -> None:
        self._kept = [dict(norm._buffers) for norm in self._norms]
        for norm in self._norms:
            for name, buffer in norm._buffers.items():
                norm._buffers[name] = None if buffer is None else buffer.clone()
        self._inner.__enter__()  # copies are made before it watches

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            for norm, buffers in zip(self._norms, self._kept, strict=True):
                norm._buffers.update(buffers)


def _keep_what_is_dear(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in _DEAR:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _keep_nothing(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE
