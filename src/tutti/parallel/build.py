"""From a plain model to an engine: which one, and what is done to the model on the way."""

from dataclasses import fields

import torch
from torch import nn

from tutti.parallel.dataparallel import DataParallel
from tutti.parallel.ddp import Ddp
from tutti.parallel.engine import Engine
from tutti.parallel.grid import Grid
from tutti.parallel.hybrid import Hybrid
from tutti.parallel.layout import layout_of
from tutti.parallel.options import (
    EngineOptions,
    ParallelOptions,
    Recompute,
    flag_of,
    leave_out,
)
from tutti.parallel.pipeline.build import build_pipeline
from tutti.parallel.pipeline.schedule import SPLIT_BACKWARD, refuse_compiled
from tutti.parallel.plans import (
    Plan,
    Role,
    check_between,
    check_divides,
    default_plan,
    resolve,
    splits_sequence,
)
from tutti.parallel.recompute import check_blocks
from tutti.parallel.scratch import Scratch
from tutti.parallel.single import Single
from tutti.parallel.sync_batchnorm import JointBatchNorm, convert
from tutti.parallel.techniques import Techniques
from tutti.parallel.tensor import check_sequence
from tutti.world.errors import UsageError
from tutti.world.world import World


def build_engine(
    model: nn.Module,
    world: World,
    options: EngineOptions | None = None,
    parallel: ParallelOptions | None = None,
    *,
    plan: Plan | None = None,
    example: torch.Tensor | None = None,
    microbatches: int = 1,
    microbatch_size: int = 1,
    recompute: Recompute = "none",
    compile: bool = False,
) -> Engine:
    """Place the model on this rank's device, spread it as the layout says, and run it.

    Call it on every rank, with the same whole model and weights. Make the optimizer afterwards,
    from `engine.model.parameters()`. `plan` says how tp splits layers; unset, the model's attribute
    `parallel_plan`, or else the usual names of layers. A pipeline needs an `example`, one real
    input with its batch dim, and how many microbatches of which size a step has.
    """
    options = options or EngineOptions()
    parallel = parallel or ParallelOptions()
    grid = layout_of(parallel.layout, world.size).grid(world)
    model = place(model, grid, sync_batchnorm=options.sync_batchnorm)
    techniques = prepare(model, grid, parallel, plan, example, recompute, compile)
    if grid.layout.only_replicas:
        techniques.apply(model)
        return _replicas(model, world, options)
    _check_only_for_replicas(options, grid)
    if grid.layout.pp == 1:
        techniques.apply(model)
        engine: Engine = Hybrid(model, grid)
    elif example is None:
        raise UsageError(f"layout {grid.layout}: a pipeline needs an example, one real input")
    else:
        engine = build_pipeline(
            model, grid, parallel, example, microbatches, microbatch_size, techniques.apply
        )
    engine.split_stream = techniques.split_sequence
    return engine


def _check_only_for_replicas(options: EngineOptions, grid: Grid) -> None:
    for option in fields(options):
        value = getattr(options, option.name)
        if option.name != "sync_batchnorm" and value != option.default:
            raise UsageError(
                f"{flag_of(option.name, value)} is for replicas, layout {grid.layout} runs on "
                f"FSDP2 and DTensor: {leave_out(option.name, option.default)}, or use --layout "
                f"dp{grid.layout.size}"
            )


def prepare(
    model: nn.Module,
    grid: Grid,
    parallel: ParallelOptions,
    plan: Plan | None,
    example: torch.Tensor | None,
    recompute: Recompute = "none",
    compile: bool = False,
) -> Techniques:
    """What will be done to the model: everything that can be refused is refused here."""
    resolved: dict[str, Role] = {}
    split_sequence = False
    if plan is None:
        plan = getattr(model, "parallel_plan", None)
    if grid.layout.tp > 1:
        resolved = resolve(default_plan(model) if plan is None else plan, model)
        check_between(resolved, model)
        check_divides(resolved, model, grid.layout.tp)
        for name in resolved:
            if isinstance(model.get_submodule(name), JointBatchNorm):
                raise UsageError(
                    f"plan: {name} is a synchronised batch norm, which tp cannot split: leave it "
                    "out of the plan and outside of split modules, or use shard instead of tp"
                )
        split_sequence = parallel.sequence_parallel and splits_sequence(resolved, model)
        if split_sequence and example is not None:
            check_sequence(example, grid.layout.tp)
    elif plan is not None:
        resolve(plan, model)  # a name that does not exist is a mistake in any layout
    check_blocks(model, recompute)
    schedule = parallel.pipeline_schedule
    if grid.layout.pp > 1 and compile:
        refuse_compiled(schedule)
    if grid.layout.pp > 1 and recompute == "selective" and schedule in SPLIT_BACKWARD:
        raise UsageError(
            f"--checkpoint-activations selective contradicts --pipeline-schedule {schedule}: what "
            "it keeps is for one backward, and this schedule has two halves of it: use "
            "--checkpoint-activations full, or --pipeline-schedule 1f1b or interleaved"
        )
    return Techniques(grid, parallel, resolved, recompute, compile, split_sequence)


def place(model: nn.Module, grid: Grid, *, sync_batchnorm: bool) -> nn.Module:
    """The model on this rank's device, with its batch norms synchronised if asked for."""
    world = grid.world
    model = model.to(world.device)
    if grid.layout.data_ranks == 1:
        return model  # a plain batch norm sees the whole batch
    if sync_batchnorm:
        return convert(model, grid)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise UsageError(
                f"layer {name} is torch's SyncBatchNorm, which a rank without samples cannot "
                "join: use --sync-batchnorm, which replaces it"
            )
    return model


def _replicas(model: nn.Module, world: World, options: EngineOptions) -> Engine:
    if options.engine == "single":
        return Single(model, world)
    if options.engine == "dataparallel":
        return DataParallel(model, world)
    if options.engine == "scratch":
        return Scratch(model, world, options.scratch_reduce, options.find_unused)
    return Ddp(model, world, options)
