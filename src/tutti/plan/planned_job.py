"""Makes a plan from a recipe: chooses example inputs, defines the job to search, computes costs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from tutti.data import DataError
from tutti.data.dataset import Dataset, TensorSamples
from tutti.machine.environment import describe_environment
from tutti.models.config import GPTConfig, ModelError
from tutti.parallel.layout import Layout
from tutti.plan.cluster_spec import Cluster, cluster_of_device, named_cluster
from tutti.plan.job_check import check_size, parse_batch_shape
from tutti.plan.model_trace import ModelTracer, model_without_weights
from tutti.plan.search import Job, Plan, Planned, search
from tutti.plan.step_simulation import Calibration
from tutti.train.init import load_dataset
from tutti.train.recipe import Recipe
from tutti.train.recipe_check import MANY_SAMPLES
from tutti.train.training_schedule import make_schedule
from tutti.world.errors import UsageError

_KNEE = 1.6  # twice the GPUs are worthwhile if they give at least this speed-up


def planning_dataset(recipe: Recipe, batch_shape: str | None = None) -> Dataset:
    """Return a dataset whose inputs have the shape that the plan assumes.

    `batch_shape` is the shape of one input, such as `3x224x224` or `1024:int64` (tokens). If it is
    None, the recipe's dataset is used.
    """
    if batch_shape is None:
        if not recipe.data.dataset:
            raise UsageError(
                f"the input shape of --model {recipe.model} is unknown: add --batch-shape, such as "
                "3x224x224 or 1024:int64, or --dataset"
            )
        try:
            return load_dataset(recipe)
        except (DataError, ModelError) as error:
            raise UsageError(str(error)) from None
    shape, dtype = parse_batch_shape(batch_shape)
    inputs = torch.zeros((1, *shape), dtype=getattr(torch, dtype))
    targets = _targets(recipe, inputs)
    samples = TensorSamples(inputs, targets)
    return Dataset("batch-shape", samples, samples)


def _targets(recipe: Recipe, inputs: torch.Tensor) -> torch.Tensor:
    """Return targets for the loss: class indices, or values with the shape of the outputs."""
    try:
        model = model_without_weights(recipe, None)
        kind = next(model.parameters()).dtype
        example = inputs.to("meta", kind if inputs.is_floating_point() else inputs.dtype)
        with torch.no_grad():
            # The batch has two samples, because batch norms need more than one value per channel.
            outputs = model.train()(torch.cat([example, example]))
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"--model {recipe.model} cannot run on meta tensors of shape {tuple(inputs.shape)} "
            f"({reason[:200]}): check --batch-shape, or use --dataset"
        ) from error
    if not isinstance(outputs, torch.Tensor):
        raise UsageError(
            f"--model {recipe.model} returned {type(outputs).__name__}, not one tensor: use "
            "--dataset instead of --batch-shape"
        )
    if recipe.task.loss == "cross_entropy":
        shape = outputs.shape[:-1] if outputs.dim() <= 3 else (2, *outputs.shape[2:])
        return torch.zeros((1, *shape[1:]), dtype=torch.int64)
    return torch.zeros((1, *outputs.shape[1:]), dtype=torch.float32)


def job_of(recipe: Recipe, dataset: Dataset, gpus: int, given: Sequence[str] = ()) -> Job:
    """Return the job of a recipe. The search does not change the flags in `given`."""
    batching, parallel = recipe.batching, recipe.parallel
    layout = None if parallel.layout in (None, "auto") else Layout.parse(str(parallel.layout))
    if batching.global_batch is not None:
        batch = batching.global_batch
    elif layout is not None:
        batch = make_schedule(recipe, layout.size, MANY_SAMPLES).global_batch
    else:  # the default layout has one replica per GPU
        batch = batching.batch * gpus * (batching.accumulation or 1)
    inputs = dataset.train.batch([0])[0]
    tokens = 0
    if isinstance(inputs, torch.Tensor) and not inputs.is_floating_point() and inputs.dim() == 2:
        tokens = inputs.shape[1]
    fixed = batching.global_batch is None and "--batch" in given
    return Job(
        global_batch=batch,
        optimizer=recipe.optimization.optimizer.lower(),
        clip=recipe.optimization.clip is not None,
        prefetch=parallel.prefetch,
        reshard=parallel.reshard,
        tokens_per_sample=tokens,
        layout=layout,
        microbatch=batching.batch if fixed else None,
        accumulation=batching.accumulation if "--accumulation" in given else None,
        recompute=(
            recipe.compute.checkpoint_activations if "--checkpoint-activations" in given else None
        ),
        schedule=parallel.pipeline_schedule if "--pipeline-schedule" in given else None,
        stages_per_rank=parallel.stages_per_rank,
        bucket_mb=recipe.engine.bucket_mb if "--bucket-mb" in given else None,
        compiled=recipe.compute.compile,
        async_tp=parallel.async_tp,
        ema=recipe.optimization.ema is not None,
    )


@dataclass(frozen=True)
class PlannedJob:
    """A recipe and the tracer of its model, from which plans for clusters of any size are made."""

    recipe: Recipe
    tracer: ModelTracer
    given: tuple[str, ...] = ()
    calibration: Calibration | None = None

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        device: str,
        batch_shape: str | None = None,
        given: Sequence[str] = (),
        calibration: Calibration | None = None,
    ) -> "PlannedJob":
        """Return the job of a recipe on `cuda` or `cpu`. Loads the dataset, if it is needed."""
        dataset = planning_dataset(recipe, batch_shape)
        tracer = ModelTracer(recipe, dataset, "cpu" if device == "cpu" else "cuda")
        return cls(recipe, tracer, tuple(given), calibration)

    def plan(self, cluster: Cluster) -> Plan:
        """Return the plan for a cluster."""
        job = job_of(self.recipe, self.tracer.dataset, cluster.gpus, self.given)
        check_size(job.layout, cluster)
        return search(self.tracer.workload, cluster, job, self.calibration)


def local_cluster(ranks: int, device: str, ranks_per_gpu: int = 1) -> Cluster:
    """Return a cluster of `ranks` ranks on the GPUs or the CPUs of this host."""
    if device == "cpu":
        return named_cluster("cpu", ranks)
    gpus = describe_environment()["gpus"]
    cluster = cluster_of_device(gpus[0]["name"] if gpus else "", ranks)
    return replace(cluster, memory_bytes=cluster.memory_bytes // ranks_per_gpu)


def costs(plan: Plan, planned: Planned) -> dict[str, float | None]:
    """Return GPU hours, price and energy per 10⁹ tokens (or samples), and tokens per joule."""
    assert planned.step is not None
    per_step = plan.job.global_batch * (plan.job.tokens_per_sample or 1)
    cluster, seconds = plan.cluster, planned.step.step_s
    hours = cluster.gpus * seconds / 3600 / per_step * 1e9
    watts, price = cluster.watts, cluster.price_per_gpu_hour
    return {
        "gpu_hours_per_1e9": hours,
        "price_per_1e9": None if price is None else hours * price,
        "kwh_per_1e9": None if watts is None else hours * watts / 1000,
        "per_joule": None if watts is None else per_step / (watts * cluster.gpus * seconds),
    }


def knee(rows: Sequence[tuple[int, float]]) -> int | None:
    """Return the smallest GPU count for which twice the GPUs give less than 1.6 × the speed.

    `rows` has (GPUs, samples per second), with each GPU count twice the previous one. Returns the
    last GPU count if there is no such row, and None if `rows` is empty.
    """
    if not rows:
        return None
    for (gpus, speed), (_, faster) in pairwise(rows):
        if faster < _KNEE * speed:
            return gpus
    return rows[-1][0]


def describe_model(plan: Plan, recipe: Recipe) -> str:
    """Return one line about the model and the batch."""
    count = plan.workload.parameters
    unit, scale = ("B", 1e9) if count >= 1e9 else ("M", 1e6)
    text = f"{recipe.model}: {count / scale:.3g} {unit} parameters, "
    text += f"{plan.workload.model_flops:.3g} FLOPs per sample, precision "
    text += f"{recipe.compute.precision}; global batch {plan.job.global_batch}"
    if plan.job.tokens_per_sample:
        text += f" × {plan.job.tokens_per_sample} tokens"
    if isinstance(recipe.architecture, GPTConfig):
        text += f", vocabulary {recipe.architecture.vocab_size}"
    return text


# The assumptions of step_simulation.py, described with their units.
_ASSUMPTION_TEXTS = {
    "matmul_16bit": "share of the peak in 16-bit matrix products",
    "sustained": "sustained rate / short-term rate of matrix products",
    "matmul_float32": "share of the peak in float32 matrix products",
    "convolution": "rate of convolutions / rate of matrix products",
    "memory": "share of the memory bandwidth",
    "attention": "share of the peak in attention",
    "host": "seconds of the host to issue an operator",
    "collective bandwidth": "bandwidth of collectives / predicted bandwidth",
    "collective latency": "latency of collectives / predicted latency",
    "overlap_slowdown": "slowdown of computation during communication",
}


def assumptions(plan: Plan) -> list[str]:
    """Return the assumptions of the plan, first those about the step time, sorted by effect."""
    found: list[str] = []
    best = plan.best
    for each in best.step.assumptions if best is not None and best.step is not None else ():
        found.append(
            f"{_ASSUMPTION_TEXTS[each.name]} {each.value:.3g} ± {100 * each.uncertainty:.0f} %: "
            f"changes the step time by up to {100 * each.effect:+.1f} %"
        )
    found += plan.cluster.assumptions
    if not plan.cluster.is_cpu:
        found.append("memory: torch reserves 4 % more than tensors use; CUDA context 0.55 GiB")
        if plan.cluster.gpus > 1:
            found.append("memory: NCCL needs 1 GiB on each GPU")
    return found


def row_of(plan: Plan, planned: Planned) -> dict[str, Any]:
    """Return a row of `layouts` in the JSON."""
    step = planned.step
    samples = plan.job.global_batch
    return {
        **planned.candidate.settings(),
        "fits": planned.fits,
        "reason": planned.reason or None,
        "memory_bytes": planned.memory.row(),
        "memory_moment": planned.memory.moment,
        "pipeline_rank": planned.memory.pipeline_rank,
        "step_s": None if step is None else step.step_s,
        "step_s_band": None if step is None or not step.band[1] else list(step.band),
        "mfu": None if step is None else step.mfu,
        "parts": None if step is None else dict(step.parts),
        "samples_per_s": None if step is None else samples / step.step_s,
        "flags": planned.candidate.flags(),
    }
