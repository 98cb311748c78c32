"""Compares the predicted memory (by cause) and step time of a run with the measured values."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tutti.parallel.layout import Layout
from tutti.plan.cluster_spec import Cluster, cluster_of_device, named_cluster
from tutti.plan.memory_estimate import MemoryModel
from tutti.plan.step_simulation import Calibration, StepOptions, step_model
from tutti.train.recipe import Recipe, read_recipe
from tutti.train.recipe_check import check_model_and_data
from tutti.world.errors import UsageError

_PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class RecordedRun:
    """What a run directory says about a run that has ended."""

    path: Path
    recipe: Recipe
    layout: Layout
    device: str
    """cpu or cuda, and its index."""
    gpu: str
    """The name that the driver reports, or an empty string."""
    ranks_per_gpu: int
    microbatch: int
    accumulation: int
    step_s: float | None
    memory: list[dict[str, Any]]
    """Bytes by cause, one row per rank."""
    peaks: list[int] | None
    """Peak bytes of each rank's GPU."""

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks computed on CPUs."""
        return self.device.startswith("cpu")

    def cluster(self) -> Cluster:
        """Return the cluster of the device that the run recorded."""
        if self.on_cpu:
            return named_cluster("cpu", self.layout.size)
        try:
            return cluster_of_device(self.gpu, self.layout.size)
        except UsageError as error:
            raise UsageError(f"--from {self.path}: {error}") from None


def read_run(path: Path) -> RecordedRun:
    """Return the recorded run of a directory. Raise UsageError if it is not complete."""
    for name in ("recipe.toml", "summary.json"):
        if not (path / name).is_file():
            raise UsageError(f"--from {path} has no {name}: use the directory of a tutti train run")
    recipe = read_recipe(str(path / "recipe.toml"))
    try:
        summary = json.loads((path / "summary.json").read_text())
        schedule, world, layout = summary["plan"], summary["world"], Layout.parse(summary["layout"])
        rate, peaks = summary.get("samples_per_s"), summary["memory"].get("device_peak_bytes")
        gpus = summary.get("environment", {}).get("gpus") or [{"name": ""}]
        if peaks is not None and len(peaks) != layout.size:
            raise ValueError(f"{len(peaks)} of {layout.size} ranks have a peak")
        return RecordedRun(
            path=path,
            recipe=recipe,
            layout=layout,
            device=str(world["device"]),
            gpu=str(gpus[0]["name"]),
            ranks_per_gpu=int(world.get("ranks_on_device") or 1),
            microbatch=int(schedule["rank_batch"]),
            accumulation=int(schedule["accumulation"]),
            step_s=int(schedule["global_batch"]) / float(rate) if rate else None,
            memory=[{**row, "rank": int(row["rank"])} for row in summary["memory"]["ranks"]],
            peaks=peaks,
        )
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, UsageError) as error:
        raise UsageError(
            f"--from {path}: summary.json does not describe a complete training run ({error}): use "
            "the directory of a tutti train run that has ended"
        ) from None


def compare_run(
    run: Path, cluster: Cluster | None = None, calibration: Calibration | None = None
) -> dict[str, Any]:
    """Return predicted and measured values of a run, and sentences that describe the differences.

    `cluster` describes the machine on which the run was measured. If it is None, the device that
    summary.json records is used.
    """
    recorded_run = read_run(run)
    recipe, layout, size = recorded_run.recipe, recorded_run.layout, recorded_run.layout.size
    cluster = cluster or recorded_run.cluster()
    # With the device "cuda", `check_model_and_data` does not compare the sizes with the memory of
    # this machine. The run may have been trained on a machine with more memory.
    check_model_and_data(recipe, layout, recorded_run.microbatch, "cuda", weights=False)
    from tutti.plan.device_operators import DeviceKind
    from tutti.plan.model_trace import ModelTracer  # imports torch
    from tutti.plan.planned_job import planning_dataset

    device: DeviceKind = "cpu" if recorded_run.on_cpu else "cuda"
    tracer = ModelTracer(recipe, planning_dataset(recipe), device)
    microbatch, accumulation = recorded_run.microbatch, recorded_run.accumulation
    options = StepOptions(
        accumulation=accumulation,
        schedule=recipe.parallel.pipeline_schedule,
        stages_per_rank=recipe.parallel.stages_per_rank,
        recompute=recipe.compute.checkpoint_activations,
        bucket_mb=recipe.engine.bucket_mb,
        optimizer=recipe.optimization.optimizer.lower(),
        clip=recipe.optimization.clip is not None,
        prefetch=recipe.parallel.prefetch,
        reshard=recipe.parallel.reshard,
        async_tp=recipe.parallel.async_tp,
        compiled=recipe.compute.compile,
        ema=recipe.optimization.ema is not None,
    )
    sharded = layout.data_ranks > 1 and not layout.only_replicas
    workload = tracer.workload(layout.tp, microbatch, sharded)
    times = step_model(replace(cluster, gpus=size), calibration)
    cuts: tuple[int, ...] = (0,)
    if layout.pp > 1:
        cuts = times.stage_cuts(workload, layout.pp * options.virtual_stages)
    step = times.simulate(workload, layout, options)
    estimates = MemoryModel(times.cluster).estimate(workload, layout, options, cuts)
    rows: list[dict[str, Any]] = []
    rank = max(range(layout.pp), key=lambda each: estimates[each].allocated)
    estimate = estimates[rank]
    # `rank` is a pipeline rank, and `number` is its first global rank. pp is the outermost mesh
    # axis, so each pipeline rank has size / pp consecutive global ranks.
    number = rank * (size // layout.pp)
    recorded: dict[str, Any] = next(
        (row for row in recorded_run.memory if row["rank"] == number), {}
    )
    for part in _PARTS:
        rows.append(_row(part, estimate.row()[part], recorded.get(part), "bytes"))
    if recorded_run.peaks is not None:
        peak = recorded_run.peaks[number]
        rows.append(_row("peak allocated", estimate.allocated, peak, "bytes"))
    seconds = recorded_run.step_s
    rows.append(_row("step", step.step_s, seconds, "s"))
    verdicts = _verdicts(rows, step.band, seconds)
    if recorded_run.ranks_per_gpu > 1:
        verdicts.append(
            f"{recorded_run.ranks_per_gpu} ranks shared one GPU in this run, but the prediction is "
            "for one rank per GPU: only the memory can be compared, not the step time"
        )
    return {
        "title": f"{run}: layout {layout}, rank {number} of {size}",
        "layout": str(layout),
        "rows": rows,
        "step_s_band": list(step.band),
        "parts": dict(step.parts),
        "verdicts": verdicts,
    }


def _row(term: str, predicted: float, measured: float | None, unit: str) -> dict[str, Any]:
    error = None if not measured else predicted / measured - 1
    return {
        "term": term,
        "predicted": predicted,
        "measured": measured,
        "unit": unit,
        "error": error,
    }


def _verdicts(
    rows: list[dict[str, Any]], band: tuple[float, float], seconds: float | None
) -> list[str]:
    found = []
    known = [r for r in rows if r["measured"] is not None and r["term"] in _PARTS]
    if known:
        worst = max(known, key=lambda row: abs(row["predicted"] - row["measured"]))
        difference = worst["predicted"] - worst["measured"]
        total = sum(row["measured"] for row in known) or 1
        found.append(
            f"memory: the prediction of {worst['term']} differs most from the measurement, by "
            f"{difference / 2**20:+.1f} MiB ({100 * difference / total:+.1f} % of the measured "
            "memory)"
        )
    if seconds is not None:
        inside = band[0] <= seconds <= band[1]
        found.append(
            f"time: the measured step is {'inside' if inside else 'outside'} the predicted band "
            f"of {band[0]:.4g} to {band[1]:.4g} s"
        )
    return found
