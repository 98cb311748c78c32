"""From a whole model, the same on every rank, to the stages of this rank and their engine."""

from collections.abc import Callable

import torch
from torch import nn

from tutti.parallel.grid import Grid
from tutti.parallel.options import ParallelOptions
from tutti.parallel.pipeline.balance import check_stages, cut, cut_evenly
from tutti.parallel.pipeline.cost import counted, measured
from tutti.parallel.pipeline.engine import Pipeline
from tutti.parallel.pipeline.filling import Filling
from tutti.parallel.pipeline.layers import keep, units, view
from tutti.parallel.pipeline.schedule import check_microbatches, stages_of
from tutti.parallel.pipeline.tied import find_ties, untie

Apply = Callable[[nn.Module, dict[int, nn.Module]], None]


def build_pipeline(
    model: nn.Module,
    grid: Grid,
    options: ParallelOptions,
    example: torch.Tensor,
    microbatches: int,
    microbatch_size: int,
    apply: Apply = lambda model, stages: None,
) -> Pipeline:
    """Cut the model, keep this rank's layers in it (in place), and build the engine around them.

    `apply(model, stages)` does to the layers what else the layout asks for: it is given the model
    with this rank's layers, and each stage by its index: the model itself where there is one stage,
    else views that share the layers. Call this on every rank, with the same weights.
    """
    check_microbatches(options.pipeline_schedule, grid.layout.pp, microbatches)
    plan = plan_stages(model, grid.layout.pp, options, example)
    held = stages_of(
        options.pipeline_schedule, grid.rank("pp"), grid.layout.pp, options.virtual_stages
    )
    ties = find_ties(model, plan)
    untie(model, ties, held)
    keep(model, [name for stage in held for name in plan[stage]])
    if len(held) == 1:
        stages = {held[0]: model}
    else:
        stages = {stage: view(model, plan[stage]) for stage in held}
    filling = Filling(model, microbatch_size)  # inside of what is run again for backward
    apply(model, stages)
    return Pipeline(model, stages, plan, grid, options, microbatches, filling, ties)


def plan_stages(
    model: nn.Module, pp: int, options: ParallelOptions, example: torch.Tensor
) -> list[list[str]]:
    """The layers of every stage, balanced as asked for."""
    parts = units(model)
    check_stages(len(parts), pp, options.virtual_stages)
    stages = pp * options.virtual_stages
    if options.balance == "even":
        cuts = cut_evenly(len(parts), stages)
    else:
        cost = counted if options.balance == "counted" else measured
        cuts = cut(cost(model, parts, example), stages)
    return [[name for unit in parts[part.start : part.stop] for name in unit] for part in cuts]
