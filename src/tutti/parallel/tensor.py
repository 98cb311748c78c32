"""Tensor parallelism: a layer's matrices are split over ranks that work on the same samples.

With `sequence_parallel`, the activations between the split layers are split along the sequence:

    embed ─ ▌norm▐ ─ gather ─ wq wk wv │ attention │ wo ─ scatter ─ ▌norm▐ ─ gather ─ …  ─ head
            part of the                 some of the              part of the
             sequence                      heads                  sequence

With `sequence_parallel`, a reduce-scatter and an all-gather replace each all-reduce. They transfer
the same number of bytes as the all-reduce, but norms and residuals need only 1/tp of the memory and
time. Without `sequence_parallel`, every rank holds whole activations and computes all norms.

Inside the layers that the sharding rules name, weights and activations are DTensors. Between these
layers, activations are plain tensors that contain this rank's part.
"""

import inspect
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tutti.models.lora_layers import (
    adapter_layer,
    base_layer_of,
    is_adapted,
    is_transposed_linear,
)
from tutti.parallel.layout import ParallelOptions
from tutti.parallel.mesh import Mesh
from tutti.parallel.rng import set_up_dropout
from tutti.parallel.sharding_rules import Role, head_size
from tutti.world.errors import UsageError

SEQUENCE = 1  # the dim of activations (batch, sequence, width) that is split


def tensor_parallel(
    model: nn.Module,
    mesh: Mesh,
    rules: Mapping[str, Role],
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
) -> None:
    """Split the layers in `rules` over the tp ranks, in place. Layers of other stages are skipped.

    If `loss_parallel` is true, the outputs of the head stay split along the vocabulary, and the
    loss must be computed inside `loss_context`. If the model is on the meta device, ranks do not
    communicate.
    """
    # The placement of activations between the split layers.
    stream = Shard(SEQUENCE) if sequence_parallel else Replicate()
    inside_inputs = tuple(f"{name}." for name, role in rules.items() if role == "input")
    tp_mesh = mesh.device_mesh["tp"]
    ties = shared_parameters(model)
    named = model.named_parameters(remove_duplicate=False)
    frozen = [name for name, parameter in named if not parameter.requires_grad]
    # `layers` leaves out the modules of other pipeline stages, which have no parameters.
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if next(layer.parameters(), None) is not None
    }
    attentions: set[nn.Module] = set()
    for name, role in rules.items():
        if name not in layers:
            continue
        layer = layers[name]
        # This hook is registered first, because torch's own hooks read the input at position 0.
        first = next(iter(inspect.signature(layer.forward).parameters), "")
        layer.register_forward_pre_hook(partial(_input_first, first), with_kwargs=True)
        if role == "input":
            layer.register_forward_pre_hook(partial(_gather_input, stream, tp_mesh))
        elif role in ("whole", "per_head") or (role == "norm" and not sequence_parallel):
            # A per_head layer gets this rank's heads. Its input is declared as split along the
            # sequence, so that DTensor sums the gradient of the weights over ranks.
            as_dtensor = partial(_as_dtensor, Shard(SEQUENCE) if role == "per_head" else stream)
            distribute_module(layer, tp_mesh, _replicate, as_dtensor, _output_to_local)
        else:
            gathered = name.startswith(inside_inputs)
            style = _style(role, stream, gathered, loss_parallel)
            base = base_layer_of(layer)
            if is_transposed_linear(base):
                _split_transposed(base, tp_mesh, style)
            else:
                parallelize_module(base, tp_mesh, style)
            if is_adapted(layer):
                _split_adapter(layer, tp_mesh, style, stream, gathered)
        if role == "vocabulary":
            layer.register_forward_hook(_wait_for_output)
        if role == "column":
            attention = layers[name.rpartition(".")[0]]
            if head_size(attention):
                attentions.add(attention)
    if any(isinstance(layer, nn.TransformerEncoderLayer) for layer in layers.values()):
        # In evaluation, the fused kernel of TransformerEncoderLayer would read the weights
        # directly, without calling the split layers.
        torch.backends.mha.set_fastpath_enabled(False)
    for attention in attentions:
        _set_local_sizes(attention, mesh.layout.tp)
    for name in frozen:  # torch's ParallelStyles create parameters that require gradients
        model.get_parameter(name).requires_grad_(False)
    _restore_ties(model, ties)
    set_up_dropout(model, mesh, rules, splits_sequence=sequence_parallel)


def loss_context(split_logits: bool) -> AbstractContextManager[None]:
    """Return the context in which a loss is computed.

    `split_logits` is whether the logits are split along the vocabulary.
    """
    return loss_parallel() if split_logits else nullcontext()


def overlap_matrix_products(mesh: Mesh, options: ParallelOptions, compiled: bool) -> None:
    """Let the compiler split matrix products, so that one part is sent while another is computed.

    Raises UsageError if CUDA, compilation or sequence parallelism is missing.
    """
    if mesh.world.device.type != "cuda" or not compiled or not options.sequence_parallel:
        raise UsageError(
            "--async-tp needs CUDA, --compile and --sequence-parallel: add what is missing, or "
            "remove --async-tp"
        )
    from torch._inductor import config  # torch 2.11 to 2.15 have no public name for the option
    from torch.distributed import _symmetric_memory as symmetric

    config._micro_pipeline_tp = True
    # torch 2.11 deprecates this function, but its compiler still requires the call.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        symmetric.enable_symm_mem_for_group(mesh.group("tp").group_name)


def _style(role: Role, stream: Any, gathered: bool, split_logits: bool) -> ParallelStyle:
    if role == "vocabulary":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    if role == "norm":
        return SequenceParallel(sequence_dim=SEQUENCE, use_local_output=True)
    if role == "column":
        return ColwiseParallel(input_layouts=Replicate() if gathered else stream)
    if role == "head_bias":  # the inputs are positions, equal on all ranks
        return ColwiseParallel(input_layouts=Replicate())
    if role == "row":
        return RowwiseParallel(output_layouts=stream)
    if role == "column_gather":
        return ColwiseParallel(input_layouts=stream, output_layouts=Replicate())
    if role == "row_split":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    return ColwiseParallel(
        input_layouts=stream,
        output_layouts=Shard(-1) if split_logits else Replicate(),
        use_local_output=not split_logits,
    )


def _split_transposed(layer: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    """Split a linear layer with a weight of shape (inputs, outputs), like an nn.Linear."""
    assert isinstance(style, ColwiseParallel | RowwiseParallel)
    by_outputs = isinstance(style, ColwiseParallel)

    def split(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            placement: Placement = Replicate()
            if by_outputs or key == "weight":
                placement = Shard(parameter.dim() - 1 if by_outputs else 0)
            _distribute(module, key, mesh, placement)

    prepare, finish = style._prepare_input_fn, style._prepare_output_fn
    inputs = (Replicate() if by_outputs else Shard(-1),)
    distribute_module(
        layer,
        mesh,
        split,
        partial(prepare, style.input_layouts, inputs),
        partial(finish, style.output_layouts, style.use_local_output),
    )


def _split_adapter(
    layer: nn.Module, mesh: DeviceMesh, style: ParallelStyle, stream: Any, gathered: bool
) -> None:
    """Split the LoRA matrices A and B of a linear layer that is split with `style`.

    In a column layer, B is split by outputs like the layer, and every rank holds the whole A. In a
    row layer, A is split by inputs like the layer, and every rank holds the whole B. In both cases,
    the number of values per token that ranks exchange is only the LoRA rank. If the input is a
    DTensor (`gathered`), the output of A stays a DTensor, so that the gradient of the input is
    summed only once for all column layers.
    """
    a, b = adapter_layer(layer, "lora_A"), adapter_layer(layer, "lora_B")
    by_outputs = isinstance(style, ColwiseParallel)
    split, whole = (b, a) if by_outputs else (a, b)
    finish = None if by_outputs and gathered else _output_to_local
    distribute_module(whole, mesh, _replicate, partial(_as_dtensor, stream), finish)
    parallelize_module(split, mesh, style)
    # A recomputation ends as soon as it has all activations that backward needs. Backward needs the
    # activations of the adapter, but not the output of the frozen layer. So without this hook, no
    # code would wait for the collective of the frozen layer's output.
    base_layer_of(layer).register_forward_hook(_wait_for_output)


def _set_local_sizes(attention: nn.Module, tp: int) -> None:
    """Divide the head counts and sizes by tp, because some modules use them to reshape tensors."""
    for name in (
        *("num_heads", "n_heads", "num_attention_heads", "num_key_value_heads"),
        *("hidden_size", "inner_dim", "all_head_size"),
    ):
        size = vars(attention).get(name)
        if isinstance(size, int) and size % tp == 0:
            vars(attention)[name] = size // tp


def _wait_for_output(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Wait for the collective of a layer's output, and return a plain tensor.

    If the input of a compiled block is an AsyncCollectiveTensor, the block returns a gradient that
    DTensor cannot read (torch 2.13). Waiting here costs no time, because the next layer would have
    to wait for the collective anyway.
    """
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output


def _input_first(
    first: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Pass the first argument of forward by position, even if the caller passed it by keyword.

    The hook must not contain the layer's name, because blocks with different hooks are compiled
    separately.
    """
    if args:
        return args, kwargs
    if first not in kwargs:
        raise UsageError(
            f"sharding rules: a {type(module).__name__} is called without its first argument "
            f"({first or 'none'}). tp splits this argument, so forward must have a first "
            "parameter, and the caller must pass a value for it"
        )
    return (kwargs[first],), {key: value for key, value in kwargs.items() if key != first}


def _gather_input(stream: Any, mesh: DeviceMesh, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Gather the first input of a module once for all column layers inside the module.

    In backward, autograd adds the gradients of the column layers, and one collective sums the
    result over ranks.
    """
    part, *others = _as_dtensor(stream, module, inputs, mesh)
    return (part.redistribute(placements=[Replicate()]), *others)


def _as_dtensor(stream: Any, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
    first, *others = inputs
    if isinstance(first, DTensor):
        return inputs
    return (DTensor.from_local(first, mesh, [stream], run_check=False), *others)


def _output_to_local(module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
    return outputs.to_local()


def _replicate(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, _ in module.named_parameters(recurse=False):
        _distribute(module, key, mesh, Replicate())


def _distribute(module: nn.Module, key: str, mesh: DeviceMesh, placement: Placement) -> None:
    parameter = module.get_parameter(key)
    distributed = distribute_tensor(parameter, mesh, [placement])
    module.register_parameter(key, nn.Parameter(distributed, parameter.requires_grad))


def place_gradients(model: nn.Module) -> None:
    """Redistribute every gradient to the placements of its parameter.

    After backward, a gradient has the placements of the last operation. For example, the gradient
    of a norm that was applied to a part of the sequence must still be summed over the tp ranks. For
    the parameters that FSDP shards, FSDP computes this sum.
    """
    for parameter in model.parameters():
        gradient, value = parameter.grad, parameter.data
        if not (isinstance(gradient, DTensor) and isinstance(value, DTensor)):
            continue
        if gradient.placements != value.placements:
            parameter.grad = gradient.redistribute(placements=value.placements)


def shared_parameters(model: nn.Module) -> list[list[str]]:
    """Return all names of each parameter that has several, such as a tied embedding and head."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _restore_ties(model: nn.Module, ties: list[list[str]]) -> None:
    """Tie parameters again, because splitting has created one parameter for each name."""
    for first, *others in ties:
        kept = model.get_parameter(first)
        for name in others:
            split = model.get_parameter(name)
            if getattr(split, "placements", ()) != getattr(kept, "placements", ()):
                raise UsageError(
                    f"sharding rules: {first} and {name} are tied (one parameter), but their "
                    'roles split it differently. Use roles that agree, such as "vocabulary" and '
                    '"head"'
                )
            path, _, key = name.rpartition(".")
            setattr(model.get_submodule(path), key, kept)
