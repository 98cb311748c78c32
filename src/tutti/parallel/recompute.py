"""Techniques that apply to each block of a model: activation checkpointing and compilation.

Activation checkpointing frees activations after forward and recomputes them for backward:

none        every activation of every layer is kept
selective   outputs of matrix products and attention are kept, because they are the most expensive
            to compute. Norms, activation functions and residuals are recomputed, because they need
            the most memory
full        only the input of each block is kept. Forward runs twice, so a step has a third more
            FLOPs
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tutti.parallel.layout import Recompute

_aten = torch.ops.aten
_EXPENSIVE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}

# The number of batch sizes that may need their own graphs: full batches and last batches, in
# training and in evaluation.
_BATCH_SIZES = 4


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model. Each is recomputed, compiled and sharded as one unit.

    A block is a child of a ModuleList, ModuleDict or Sequential, and has parameters. torch's own
    layers are not blocks, except its transformer layers. Blocks inside other blocks are left out.
    """
    transformer_layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    blocks = [
        child
        for container in model.modules()
        if isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        for child in container.children()
        if (
            not type(child).__module__.startswith("torch.") or isinstance(child, transformer_layers)
        )
        and next(child.parameters(), None) is not None
    ]
    nested = {part for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if block not in nested]


def compile_blocks(
    model: nn.Module, backend: str = "inductor", *, forward_only: bool = False
) -> None:
    """Compile each block separately, in place. Equal blocks share one graph.

    If the whole model were one graph, DDP would get all gradients at the end of backward, and could
    not overlap communication with backward. If `forward_only` is true, only the current forward of
    a block is compiled, without code that wraps this forward later.
    """
    # A graph with a dynamic batch size fails for DTensors (RecursionError in torch 2.13). Therefore
    # each batch size has its own graph if tp is used.
    dynamic = False if any(isinstance(p, DTensor) for p in model.parameters()) else None
    blocks = repeated_blocks(model) or [model]
    # Blocks of different sizes have different graphs, and the compiler creates at most
    # `recompile_limit` graphs.
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _BATCH_SIZES * len(blocks))
    for block in blocks:
        if forward_only:
            block.forward = torch.compile(block.forward, backend=backend, dynamic=dynamic)
        else:
            block.compile(backend=backend, dynamic=dynamic)


def recompute_activations(model: nn.Module, mode: Recompute) -> None:
    """Recompute the activations of each block in the backward pass, in place."""
    if mode == "none":
        return
    for block in repeated_blocks(model):
        norms = [m for m in block.modules() if isinstance(m, _NormBase) and m.track_running_stats]
        # All blocks without norms get the same `contexts` object, so that equal blocks share a
        # graph.
        contexts = partial(_contexts, mode, norms) if norms else _WITHOUT_NORMS[mode]
        block.forward = _recomputed(block.forward, contexts)


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Any]) -> Callable[..., Any]:
    # The compiler can trace through this function. If the block's forward were torch's `checkpoint`
    # itself, it would cause a graph break.
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return recomputed


def _contexts(
    mode: Recompute, norms: Sequence[_NormBase]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a block's forward and of its recomputation."""
    # A compiled graph updates each buffer only once, even if it recomputes activations.
    compiling = torch.compiler.is_compiling()
    if mode == "full" and not compiling:
        return nullcontext(), _Recomputation(norms)
    policy = _keep_expensive if mode == "selective" else _keep_nothing
    first, second = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return first, second if compiling else _Recomputation(norms, second)


_WITHOUT_NORMS = {mode: partial(_contexts, mode, ()) for mode in get_args(Recompute)}


class _Recomputation(AbstractContextManager[None]):
    """Context of a recomputation: norms do not update their running statistics a second time.

    The recomputation updates copies of the running statistics, and the copies are then discarded.
    Each half of a split backward (zero-bubble) enters this context once.
    """

    def __init__(
        self, norms: Sequence[_NormBase], inner: AbstractContextManager[Any] | None = None
    ) -> None:
        self._norms = norms
        self._saved_buffers: list[dict[str, torch.Tensor | None]] = []
        self._inner = nullcontext() if inner is None else inner

    def __enter__(self) -> None:
        self._saved_buffers = [dict(norm._buffers) for norm in self._norms]
        for norm in self._norms:
            for name, buffer in norm._buffers.items():
                norm._buffers[name] = None if buffer is None else buffer.clone()
        self._inner.__enter__()  # the inner context must not record the copies above

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            for norm, buffers in zip(self._norms, self._saved_buffers, strict=True):
                norm._buffers.update(buffers)


def _keep_expensive(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in _EXPENSIVE:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _keep_nothing(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE
