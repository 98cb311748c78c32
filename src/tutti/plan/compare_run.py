"""Compares the predicted memory (by cause) and step time of a run with the measured values."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tutti.parallel.layout import Layout
from tutti.plan.cluster_spec import Cluster, cluster_of_device, named_cluster
from tutti.plan.memory_estimate import MemoryModel
from tutti.plan.model_trace import ModelTracer
from tutti.plan.planned_job import planning_dataset
from tutti.plan.step_simulation import Calibration, StepOptions, step_model
from tutti.train.recipe import read_recipe
from tutti.world.errors import UsageError

_PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")


def compare_run(
    run: Path, cluster: Cluster | None = None, calibration: Calibration | None = None
) -> dict[str, Any]:
    """Return predicted and measured values of a run, and sentences that describe the differences.

    `cluster` describes the machine on which the run was measured. If it is None, the device that
    summary.json records is used.
    """
    recipe = read_recipe(str(_file(run, "recipe.toml")))
    try:
        summary = json.loads(_file(run, "summary.json").read_text())
        schedule, measured = summary["plan"], summary["memory"]
        layout = Layout.parse(summary["layout"])
        device = str(summary["world"]["device"])
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"--from {run}: summary.json does not describe a complete training run ({error}): use "
            "the directory of a tutti train run that has ended"
        ) from None
    size = layout.size
    on_cpu = device.startswith("cpu")
    sharing = int(summary["world"].get("ranks_on_device") or 1)
    if cluster is None:
        cluster = _recorded_cluster(run, summary, size, on_cpu)
    tracer = ModelTracer(recipe, planning_dataset(recipe), "cpu" if on_cpu else "cuda")
    microbatch, accumulation = int(schedule["rank_batch"]), int(schedule["accumulation"])
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
    recorded: dict[str, Any] = next((row for row in measured["ranks"] if row["rank"] == number), {})
    for part in _PARTS:
        rows.append(_row(part, estimate.row()[part], recorded.get(part), "bytes"))
    peaks = measured.get("device_peak_bytes")
    if peaks is not None:
        rows.append(_row("peak allocated", estimate.allocated, peaks[number], "bytes"))
    rate = summary.get("samples_per_s")
    seconds = None if not rate else schedule["global_batch"] / rate
    rows.append(_row("step", step.step_s, seconds, "s"))
    verdicts = _verdicts(rows, step.band, seconds)
    if sharing > 1:
        verdicts.append(
            f"{sharing} ranks shared one GPU in this run, but the prediction is for one rank per "
            "GPU: only the memory can be compared, not the step time"
        )
    return {
        "title": f"{run}: layout {layout}, rank {number} of {size}",
        "layout": str(layout),
        "rows": rows,
        "step_s_band": list(step.band),
        "parts": dict(step.parts),
        "verdicts": verdicts,
    }


def _file(run: Path, name: str) -> Path:
    if not (run / name).is_file():
        raise UsageError(f"--from {run} has no {name}: use the directory of a tutti train run")
    return run / name


def _recorded_cluster(run: Path, summary: dict[str, Any], size: int, on_cpu: bool) -> Cluster:
    if on_cpu:
        return named_cluster("cpu", size)
    gpus = summary.get("environment", {}).get("gpus") or []
    name = gpus[0]["name"] if gpus else ""
    try:
        return cluster_of_device(name, size)
    except UsageError as error:
        raise UsageError(f"--from {run}: {error}") from None


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
