"""Techniques that apply to each block of a model: activation checkpointing and compilation.

Activation checkpointing frees activations after forward and recomputes them for backward:

none        every activation of every layer is kept
selective   outputs of matrix products and attention, which are the most expensive to compute, are
            kept; norms, activation functions and residuals, which need most memory, are recomputed
full        only the input of each block is kept; forward runs twice, which costs a third more FLOPs
"""

from collections.abc import Callable
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
from tutti.world.errors import UsageError

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

# Each batch size may need its own graph: full batches and the last batch, in training and in
# evaluation.
_BATCH_SIZES = 4


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model, which are the units of recomputation, compilation and sharding.

    A block is a child of a ModuleList, ModuleDict or Sequential that has parameters and whose class
    is not defined by torch. Blocks inside other blocks are left out.
    """
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
    """Compile each block separately, in place. Equal blocks share one graph.

    With one graph of the whole model, DDP would get all gradients at the end of backward, and could
    not overlap communication with backward. With `forward_only`, only the present forward of a
    block is compiled, and not the code that wraps it later.
    """
    split = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    # A graph with a dynamic batch size fails for DTensors (RecursionError, torch 2.13). Therefore
    # each batch size has its own graph if tp is used.
    dynamic = False if split else None
    blocks = repeated_blocks(model) or [model]
    # Blocks of different sizes have their own graphs, and the compiler stops compiling if there are
    # more graphs than its limit.
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _BATCH_SIZES * len(blocks))
    for block in blocks:
        if forward_only:
            block.forward = torch.compile(block.forward, backend=backend, dynamic=dynamic)
        else:
            block.compile(backend=backend, dynamic=dynamic)


def check_blocks(model: nn.Module, what: Recompute) -> None:
    """Raise UsageError if the whole model has no block to recompute.

    A single pipeline stage is allowed to have no block.
    """
    if what != "none" and not repeated_blocks(model):
        raise UsageError(
            f"--checkpoint-activations {what}: {type(model).__name__} has no repeated blocks in a "
            "ModuleList, ModuleDict or Sequential: leave the flag out"
        )


def recompute_activations(model: nn.Module, what: Recompute) -> None:
    """Recompute the activations of each block in the backward pass, in place."""
    if what == "none":
        return
    without_norms = _WITHOUT_NORMS[what]  # one object, so that equal blocks share a graph
    for block in repeated_blocks(model):
        contexts = partial(_contexts, what, block) if _norms(block) else without_norms
        block.forward = _recomputed(block.forward, contexts)


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Any]) -> Callable[..., Any]:
    # The compiler traces into this function. It would break the graph at a direct call of torch's
    # checkpoint.
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return recomputed


def _norms(block: nn.Module) -> list[_NormBase]:
    return [m for m in block.modules() if isinstance(m, _NormBase) and m.track_running_stats]


def _contexts(
    what: Recompute, block: nn.Module | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a block's forward and of its recomputation.

    The compiler needs only the policy, because a compiled graph updates each buffer only once, even
    if it recomputes activations.
    """
    policy = _keep_expensive if what == "selective" else _keep_nothing
    if torch.compiler.is_compiling():
        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return,no-untyped-call]
    norms = [] if block is None else _norms(block)
    if what == "full":
        return nullcontext(), _Recomputation(norms)
    first, second = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return first, _Recomputation(norms, second)


_WITHOUT_NORMS = {what: partial(_contexts, what, None) for what in get_args(Recompute)}


class _Recomputation(AbstractContextManager[None]):
    """Context of a recomputation, in which norms do not count the batch a second time.

    The recomputation updates copies of the running statistics, and the copies are then discarded.
    If backward is split into two halves (zero-bubble), each half enters this context once.
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
        self._inner.__enter__()  # entered last, because it must not record the copies

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            for norm, buffers in zip(self._norms, self._kept, strict=True):
                norm._buffers.update(buffers)


def _keep_expensive(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in _EXPENSIVE:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _keep_nothing(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE
