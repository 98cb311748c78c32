"""Parallelizes a plain model: applies the techniques of a layout in a fixed order.

`apply` defines the order. It changes a model on the meta device, so that a rank allocates memory
only for its own shards. `build_engine` (for whole training steps) and `parallelize` (for your own
training loop) call `apply`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from tutti.data.nested import Nested, describe, tensors_of
from tutti.parallel.ddp import Ddp, wrap_in_ddp
from tutti.parallel.engine import Engine, ShardedEngine
from tutti.parallel.fsdp import shard
from tutti.parallel.layout import (
    EngineOptions,
    Layout,
    ParallelOptions,
    Recompute,
    check_engine,
    check_microbatches,
    check_sequence,
    check_techniques,
    layout_of,
)
from tutti.parallel.materialize import ModuleInit, Weights, is_on_meta, materialize, take_weights
from tutti.parallel.mesh import Mesh
from tutti.parallel.pipeline.executor import Pipeline
from tutti.parallel.pipeline.stages import Stages, cut_model
from tutti.parallel.recompute import compile_blocks, recompute_activations, repeated_blocks
from tutti.parallel.sharding_rules import (
    ShardingRules,
    check_between,
    check_rules_divide,
    default_rules,
    resolve_rules,
    splits_sequence,
)
from tutti.parallel.sync_batchnorm import convert_batchnorms
from tutti.parallel.tensor import SEQUENCE, overlap_matrix_products, tensor_parallel
from tutti.world.errors import UsageError
from tutti.world.placement import return_freed_memory
from tutti.world.world import World


@dataclass(frozen=True)
class Techniques:
    """The techniques to apply to a model."""

    options: ParallelOptions
    rules: ShardingRules | None = None
    """tp: the role of each split layer. `check` replaces patterns with module names."""
    splits_sequence: bool = False
    """tp: whether activations between split layers are split along the sequence. Set by `check`."""
    recompute: Recompute = "none"
    compile: bool = False
    sync_batchnorm: bool = False
    mean: bool = False
    """Average gradients over the data ranks, as DDP and FSDP do, instead of summing them."""
    autocast: torch.dtype | None = None
    """The dtype of the autocast context in which steps will run."""
    example: Nested = None
    """One real input with its batch dim. A pipeline needs it to compute the cost of each layer."""
    microbatch_size: int = 1
    """pp: the number of samples in every microbatch."""


def apply(
    model: nn.Module, mesh: Mesh, techniques: Techniques, weights: Weights | None = None
) -> tuple[nn.Module, Stages | None]:
    """Parallelize the model on the meta device, then allocate and fill this rank's parameters.

    First the model is cut into stages and its matrices are split, so that all later techniques
    apply only to this rank's layers. Recomputation wraps the forward of a block before the block is
    compiled, so that the compiler knows which activations to keep. Sharding comes last, because its
    hooks must gather the parameters of a block before the block runs and before the block is
    recomputed.
    """
    layout, options = mesh.layout, techniques.options
    if weights is None and is_on_meta(model):
        weights = ModuleInit(model, torch.initial_seed())
    elif weights is None and not layout.only_replicas:
        weights = take_weights(model)
    if techniques.sync_batchnorm and layout.data_ranks > 1:
        model = convert_batchnorms(model, mesh)
    stages = None
    if layout.pp > 1:
        assert techniques.example is not None
        stages = cut_model(
            model, mesh, options, techniques.example, techniques.microbatch_size, weights
        )
    if layout.tp > 1:
        tensor_parallel(
            model,
            mesh,
            techniques.rules or {},
            sequence_parallel=techniques.splits_sequence,
            loss_parallel=options.loss_parallel,
        )
        if options.async_tp:
            overlap_matrix_products(mesh, options, techniques.compile)
    if techniques.compile and techniques.recompute == "full":
        # The forward alone is compiled, and runs twice: in forward and in the recomputation. One
        # graph that contains both runs fails if tp splits matrices, because torch 2.13 cannot save
        # the inputs of this graph.
        compile_blocks(model, forward_only=True)
        recompute_activations(model, techniques.recompute)
    else:
        recompute_activations(model, techniques.recompute)
        if techniques.compile:
            compile_blocks(model)
    shards = layout.data_ranks > 1 and not layout.only_replicas  # plain replicas use DDP
    if mesh.world.device.type == "cpu" and (shards or techniques.recompute != "none"):
        return_freed_memory()
    if shards:
        for part in stages.modules.values() if stages else [model]:
            shard(part, mesh, options, mean=techniques.mean, autocast=techniques.autocast)
    materialize(model, mesh.world.device)
    if weights is not None:
        weights.fill(model)
        weights.release()
    return model, stages


def check(model: nn.Module, mesh: Mesh, techniques: Techniques) -> Techniques:
    """Raise UsageError if the model does not support one of the techniques.

    `model` is the whole model. Returns the techniques with module names instead of patterns in the
    sharding rules, and with `splits_sequence` and `autocast` set for this model.
    """
    layout, options, recompute = mesh.layout, techniques.options, techniques.recompute
    if layout.data_ranks > 1 and not techniques.sync_batchnorm:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.SyncBatchNorm):
                raise UsageError(
                    f"layer {name} is torch's SyncBatchNorm, which fails on a rank without "
                    "samples: use --sync-batchnorm, which replaces the layer"
                )
    if layout.data_ranks > 1 and not layout.only_replicas:
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                raise UsageError(
                    f"layout {layout}: parameter {name} is a scalar, which FSDP2 cannot shard: "
                    f"give it the shape (1,), or use --layout dp{layout.size}"
                )
    rules = techniques.rules
    if rules is None:
        rules = getattr(model, "sharding_rules", None)
    if rules is None and layout.tp > 1:
        rules = default_rules(model, layout.tp)
    # Rules are resolved in every layout, so that unknown module names are refused even without tp.
    rules = resolve_rules(rules or {}, model)
    splits = False
    if layout.tp > 1:
        check_between(rules, model)
        check_rules_divide(rules, model, layout.tp)
        for name in rules:
            norm = isinstance(model.get_submodule(name), _NormBase)
            if norm and techniques.sync_batchnorm and layout.data_ranks > 1:
                raise UsageError(
                    f"sharding rules: {name} is a synchronised batch norm, which tp cannot split. "
                    "Remove it from the rules and keep it outside of split modules, or use shard "
                    "instead of tp"
                )
        splits = options.sequence_parallel and splits_sequence(rules, model)
        if splits and techniques.example is not None:
            shape = tensors_of(techniques.example)[0].shape
            check_sequence(layout.tp, shape[SEQUENCE] if len(shape) > SEQUENCE else 0)
    blocks = repeated_blocks(model)
    if recompute != "none" and not blocks:
        raise UsageError(
            f"--checkpoint-activations {recompute} needs repeated blocks in a ModuleList, "
            f"ModuleDict or Sequential, but {type(model).__name__} has none: remove the flag"
        )
    if layout.pp > 1:
        check_techniques(options.pipeline_schedule, techniques.compile, recompute)
        if not isinstance(techniques.example, Tensor | None):
            raise UsageError(
                f"layout {layout}: a pipeline passes one tensor from stage to stage, but the "
                f"inputs of a batch are {describe(techniques.example)}: use dp, shard or tp "
                "instead of pp"
            )
    autocast = techniques.autocast
    if any(isinstance(m, _NormBase) for b in blocks for m in b.modules()):
        autocast = None  # batch norms with 16-bit inputs need float32 weights
    return replace(techniques, rules=rules, splits_sequence=splits, autocast=autocast)


def build_engine(
    model: nn.Module,
    world: World,
    options: EngineOptions | None = None,
    parallel: ParallelOptions | None = None,
    *,
    rules: ShardingRules | None = None,
    example: Nested = None,
    microbatches: int = 1,
    microbatch_size: int = 1,
    recompute: Recompute = "none",
    compile: bool = False,
    autocast: torch.dtype | None = None,
    weights: Weights | None = None,
) -> Engine:
    """Return an engine that runs the model in `parallel.layout`, on this rank's device.

    Call this function on every rank with the same whole model. The model either has real weights,
    which must be equal on all ranks, or is on the meta device. A model on the meta device is
    initialised by `weights`. If `weights` is None, `reset_parameters` of each module initialises
    it. Create the optimizer afterwards, from `engine.model.parameters()`.

    `rules` defines how tp splits layers. If `rules` is None, the model's attribute `sharding_rules`
    is used, or `default_rules` if the model does not have this attribute. A pipeline needs an
    `example` (one real input with its batch dim), and the number and size of the microbatches of a
    step.
    """
    options = options or EngineOptions()
    parallel = parallel or ParallelOptions()
    mesh = layout_of(parallel.layout, world.size).mesh(world)
    layout = mesh.layout
    requested = Techniques(
        parallel,
        rules,
        recompute=recompute,
        compile=compile,
        sync_batchnorm=options.sync_batchnorm,
        autocast=autocast,
        example=example,
        microbatch_size=microbatch_size,
    )
    check_engine(options, layout)
    techniques = check(model, mesh, requested)
    if layout.only_replicas:
        model, _ = apply(model, mesh, techniques, weights)
        if options.engine == "single":
            return Engine(model, world, f"single: one rank on {world.device}, no communication")
        if options.engine == "ddp":
            return Ddp(model, world, options)
        from tutti.parallel.teaching import DataParallel, Scratch  # only for these engines

        if options.engine == "dataparallel":
            return DataParallel(model, world)
        return Scratch(model, world, options.scratch_reduce, options.find_unused)
    if layout.pp > 1:
        if example is None:
            raise UsageError(
                f"layout {layout}: a pipeline needs an example: pass one real input as example=…"
            )
        check_microbatches(parallel.pipeline_schedule, layout.pp, microbatches)
    model, stages = apply(model, mesh, techniques, weights)
    engine: Engine
    if stages is None:
        engine = ShardedEngine(model, mesh)
    else:
        engine = Pipeline(model, stages, mesh, parallel, microbatches)
    engine.splits_sequence = techniques.splits_sequence
    return engine


def parallelize(
    model: nn.Module,
    layout: Layout | str | None = None,
    *,
    world: World,
    rules: ShardingRules | None = None,
    options: ParallelOptions | None = None,
    checkpoint_activations: Recompute = "none",
    compile: bool = False,
    sync_batchnorm: bool = False,
    bucket_mb: float = 25.0,
    gradient_as_bucket_view: bool = True,
    static_graph: bool = False,
    find_unused: bool = False,
) -> nn.Module:
    """Return the model on this rank's device, distributed over all ranks by the layout.

    `layout` is a layout such as `"dp2.tp2"`. If it is None, every rank has one replica. `rules`
    defines how tp splits layers. It is a dict from module names to roles, in which `*` matches one
    part of a name: {"layers.*.up": "column", "layers.*.down": "row"}. If `rules` is None, the rules
    are chosen by common names of transformer layers. `options` contains further options of shard
    and tp.

    Call the returned module like the model. Like DDP and FSDP, backward averages gradients over the
    ranks that have different samples. So give each rank the same number of samples, and use the
    mean loss of the rank's samples. The batch has `layout.data_ranks` parts, and this rank's part
    has the index `layout.mesh(world).data_rank`. Ranks that differ only in tp must get the same
    samples. In a world of one rank, the model itself is returned.

    Call this function on every rank, either with the same weights, or with a model on the meta
    device and the same torch seed. If the model is on the meta device, every rank allocates memory
    only for its own shards. Outputs that tp splits along the vocabulary are gathered, unless
    `options.loss_parallel` is set. If a model with dropout is split by tp, seed the generators with
    `tutti.parallel.rng.seed_training_rng`. A pipeline cannot be called like a model: use
    build_engine.
    """
    if isinstance(layout, str):
        layout = Layout.parse(layout)
    layout = layout or Layout(dp=world.size)
    if layout.pp > 1:
        raise UsageError(
            f"layout {layout} has a pipeline, which runs whole steps and has no separate forward: "
            "use tutti.parallel.build_engine and engine.run, or a layout without pp"
        )
    mesh = layout.mesh(world)
    techniques = Techniques(
        options or ParallelOptions(loss_parallel=False),
        rules,
        recompute=checkpoint_activations,
        compile=compile,
        sync_batchnorm=sync_batchnorm,
        mean=True,
    )
    model, _ = apply(model, mesh, check(model, mesh, techniques))
    if world.size == 1 or not layout.only_replicas:
        return model
    return wrap_in_ddp(model, bucket_mb, gradient_as_bucket_view, static_graph, find_unused)
