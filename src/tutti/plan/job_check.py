"""Checks the job of a plan by its flags and files. The checks need no torch and take milliseconds.

`tutti plan` chooses the layout, the microbatch and the pipeline schedule, so these checks refuse
only jobs that cannot run with any choice that the flags leave open. Sizes that only the model knows
are checked later, for each layout.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from tutti.models.config import OwnModelConfig
from tutti.parallel.layout import Layout, ParallelOptions
from tutti.plan.cluster_spec import Cluster
from tutti.train.recipe import Recipe
from tutti.train.recipe_check import (
    MANY_SAMPLES,
    check_cuda_graph,
    check_dataset_sizes,
    check_model,
    check_model_and_data,
    check_techniques_of,
)
from tutti.train.training_schedule import check_numbers, make_schedule
from tutti.world.errors import UsageError

_DTYPES = {"float32": "float32", "bf16": "bfloat16", "int64": "int64", "uint8": "uint8"}
_MAX_ELEMENTS = 1 << 31  # of one input


def as_planned(recipe: Recipe, dataset_given: bool) -> Recipe:
    """Return the recipe with synthetic inputs, unless the user gave --dataset or an own model."""
    own = type(recipe.architecture) is OwnModelConfig
    if dataset_given or own:
        return recipe
    cifar = recipe.data.dataset == "cifar100"
    pixels = 32 if cifar and recipe.data.pixels == 28 else recipe.data.pixels
    return replace(recipe, data=replace(recipe.data, dataset="synthetic", pixels=pixels))


def parse_batch_shape(text: str) -> tuple[tuple[int, ...], str]:
    """Return the sizes of one input, and the name of its dtype in torch."""
    sizes, _, dtype = text.partition(":")
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", sizes) or (dtype or "float32") not in _DTYPES:
        raise UsageError(
            f"--batch-shape {text!r} must be the sizes of one input and its dtype "
            f"({', '.join(_DTYPES)}), as in 3x224x224 or 1024:int64"
        )
    shape = tuple(int(size) for size in sizes.split("x"))
    if not 0 < math.prod(shape) < _MAX_ELEMENTS:
        raise UsageError(
            f"--batch-shape {text} has {math.prod(shape):.3g} elements: use 1 to {_MAX_ELEMENTS}"
        )
    return shape, _DTYPES[dtype or "float32"]


def check_planned(
    recipe: Recipe, clusters: Sequence[Cluster], batch_shape: str | None, given: Collection[str]
) -> None:
    """Raise UsageError if no plan of these clusters can run the recipe.

    recipe: the result of `as_planned`. given: the flags whose values the search does not change.
    """
    check_numbers(recipe)
    text = recipe.parallel.layout
    layout = None if text in (None, "auto") else Layout.parse(str(text))
    for cluster in clusters:
        check_size(layout, cluster)
    if batch_shape is None and not recipe.data.dataset:
        raise UsageError(
            f"the input shape of --model {recipe.model} is unknown: add --batch-shape, such as "
            "3x224x224 or 1024:int64, or --dataset"
        )
    batching, parallel = recipe.batching, recipe.parallel
    if layout is None:  # only the checks that every layout must pass
        layout, parallel = Layout(), ParallelOptions()
    if "--pipeline-schedule" not in given and parallel.stages_per_rank is None:
        parallel = replace(parallel, pipeline_schedule="1f1b")  # needs the fewest stages
    per_rank, rest = divmod(batching.global_batch or 0, layout.data_ranks)
    if batching.global_batch and not rest and "--accumulation" not in given:
        if per_rank < layout.pp:
            raise UsageError(
                f"--global-batch {batching.global_batch} gives each data rank {per_rank} samples, "
                f"but layout {layout} needs at least {layout.pp} microbatches: use --global-batch "
                f"{layout.pp * layout.data_ranks}"
            )
        # The search may choose any accumulation that divides the batch. Check the largest one,
        # with one sample per microbatch: if it has too few microbatches for a pipeline schedule,
        # all others have too few as well.
        batching = replace(batching, accumulation=per_rank)
    tried = replace(recipe, batching=batching, parallel=parallel)
    schedule = make_schedule(tried, layout.size, MANY_SAMPLES)
    device = "cpu" if clusters[0].is_cpu else "cuda"
    check_cuda_graph(recipe, clusters[0].gpus, device)
    if batch_shape is None:
        check_model_and_data(recipe, layout, schedule.rank_batch, device)
        check_dataset_sizes(recipe)
    else:
        parse_batch_shape(batch_shape)
        check_model(recipe)
    check_techniques_of(tried, schedule)


def check_size(layout: Layout | None, cluster: Cluster) -> None:
    """Raise UsageError if a layout does not have one rank for each GPU of the cluster."""
    if layout is not None and layout.size != cluster.gpus:
        nearest = " or ".join(str(each) for each in layout.nearest(cluster.gpus))
        raise UsageError(
            f"--layout {layout} needs {layout.size} ranks, but --gpus has {cluster.gpus}: use "
            f"--gpus {layout.size}x{cluster.accelerator} or --layout {nearest}"
        )
