"""Searches all layouts of a cluster for the fastest ones that fit into memory.

A candidate is a layout with a microbatch size, a number of microbatches, a recomputation mode, a
pipeline schedule and a bucket size. The memory of a candidate is estimated first, because this is
faster than predicting its step time. If the candidate fits, formulas estimate its step time. The
fastest candidates are then simulated in detail.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

from tutti.measure.units import format_bytes
from tutti.parallel.layout import (
    AXES,
    SPLIT_BACKWARD,
    Layout,
    Recompute,
    ScheduleName,
    check_microbatches,
)
from tutti.plan.cluster_spec import Cluster
from tutti.plan.memory_estimate import MemoryEstimate, MemoryModel
from tutti.plan.step_simulation import Calibration, StepModel, StepOptions, StepTime, step_model
from tutti.plan.workload import Workload
from tutti.world.errors import UsageError

NULL_UTILISATION = 0.4
"""The share of its peak that every GPU reaches in the null model, independent of the layout. The
null model is the baseline with which predictions are compared."""
_DETAILED = 8  # number of candidates that are simulated in detail
_MICROBATCHES = 8  # maximum number of microbatch sizes to try for one layout
_BUCKETS = (25.0, 100.0)  # bucket sizes to try, in MiB
_INDIVISIBLE = "is not divisible by the number of data ranks"
_MARGIN = 0.97  # usable share of device memory: a prediction may be 3 % too low
_CAUSES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "buffers": "communication buffers and gathered parameters",
    "overhead": "CUDA context, NCCL and allocator",
}

Workloads = Callable[[int, int, bool], Workload]
"""A function (tp, microbatch, sharded) → workload. UsageError: tp cannot split the model."""


@dataclass(frozen=True)
class Job:
    """The settings of a training job. The search chooses the values of settings that are None."""

    global_batch: int
    optimizer: str = "adamw"
    clip: bool = False
    prefetch: int = 1
    reshard: bool | None = None
    tokens_per_sample: int = 0
    """Tokens in each sample, or 0 if samples are not token sequences."""
    layout: Layout | None = None
    """The only layout to search. None: search all layouts."""
    microbatch: int | None = None
    accumulation: int | None = None
    recompute: Recompute | None = None
    schedule: ScheduleName | None = None
    stages_per_rank: int | None = None
    bucket_mb: float | None = None
    compiled: bool = False
    async_tp: bool = False
    ema: bool = False


@dataclass(frozen=True)
class Candidate:
    """A layout with all settings of a step."""

    layout: Layout
    microbatch: int
    options: StepOptions

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 is used, to shard parameters or to sum gradients over replicas."""
        return self.layout.data_ranks > 1 and not self.layout.only_replicas

    def flags(self) -> list[str]:
        """Return the flags of `tutti train` for this candidate."""
        options, layout = self.options, self.layout
        batch = self.microbatch * options.accumulation * layout.data_ranks
        flags = ["--layout", str(layout), "--global-batch", str(batch)]
        flags += ["--accumulation", str(options.accumulation)]
        # Flags with default values are also listed, because a recipe file may set different values.
        flags += ["--checkpoint-activations", options.recompute]
        if layout.pp > 1:
            flags += ["--pipeline-schedule", options.schedule]
            if options.stages_per_rank is not None:
                flags += ["--stages-per-rank", str(options.stages_per_rank)]
        if layout.only_replicas and layout.dp > 1:
            flags += ["--bucket-mb", f"{options.bucket_mb:g}"]
        return flags

    def settings(self) -> dict[str, Any]:
        """Return the settings as a dict for the JSON."""
        pipeline = self.layout.pp > 1
        return {
            "layout": str(self.layout),
            "microbatch": self.microbatch,
            "accumulation": self.options.accumulation,
            "recompute": self.options.recompute,
            "pipeline_schedule": self.options.schedule if pipeline else None,
            "stages_per_rank": self.options.virtual_stages if pipeline else None,
            "bucket_mb": self.options.bucket_mb if self.layout.only_replicas else None,
        }

    def changed_from(self, other: "Candidate") -> list[str]:
        """Return the settings that differ from another candidate, as text."""
        mine, others = self.settings(), other.settings()
        names = [name for name in mine if mine[name] != others[name]]
        if "layout" in names:  # the layout determines the other settings
            names = [n for n in names if n in ("layout", "recompute", "microbatch")]
        return [f"{name.replace('_', ' ')} {mine[name]}" for name in names]

    def distance(self, other: "Candidate") -> float:
        """Return how different two candidates are, to suggest the nearest candidate that fits."""
        axes = zip(self.layout.axes.values(), other.layout.axes.values(), strict=True)
        moved = sum(abs(math.log2(a / b)) for a, b in axes)
        modes = ("none", "selective", "full")
        steps = abs(modes.index(self.options.recompute) - modes.index(other.options.recompute))
        batch = abs(math.log2(self.microbatch / other.microbatch))
        return moved + steps + 0.5 * batch + (self.options.schedule != other.options.schedule)


@dataclass(frozen=True)
class Planned:
    """A candidate with its predicted memory and step time."""

    candidate: Candidate
    memory: MemoryEstimate
    fits: bool
    step: StepTime | None = None
    reason: str = ""
    """Why the candidate does not fit."""

    @property
    def seconds(self) -> float:
        """The predicted step time, or infinity if the candidate does not fit."""
        return self.step.step_s if self.step is not None else math.inf


@dataclass(frozen=True)
class Plan:
    """The result of a search."""

    cluster: Cluster
    job: Job
    layouts: tuple[Planned, ...]
    """The best candidate of each layout: first those that fit, fastest first, then the others."""
    searched: int
    refused: tuple[tuple[str, str], ...]
    """Pairs (layout, reason why the layout cannot run this model or batch)."""
    null_step_s: float
    workload: Workload = field(repr=False)
    """The workload of one sample on one device."""
    advice: str = ""
    """A message if nothing fits: the cause, the missing memory and the nearest change that fits."""

    @property
    def best(self) -> Planned | None:
        """The fastest candidate that fits."""
        first = self.layouts[0] if self.layouts else None
        return first if first is not None and first.fits else None


def search(
    workloads: Workloads,
    cluster: Cluster,
    job: Job,
    calibration: Calibration | None = None,
    detailed: int = _DETAILED,
) -> Plan:
    """Return the plan for a job on a cluster.

    Raises UsageError if no layout can run the model, or if the global batch is not divisible by the
    data ranks of any layout.
    """
    times = step_model(cluster, calibration)
    memories = MemoryModel(times.cluster)
    planned: list[Planned] = []
    refused: dict[str, str] = {}
    searched = 0
    fits_already: set[tuple[Layout, int, StepOptions]] = set()
    for candidate in candidates(workloads, cluster, job, refused):
        searched += 1
        # More recomputation only adds operators. So if a candidate fits, the same candidate with
        # more recomputation is slower and is skipped.
        without = replace(candidate.options, recompute="none")
        key = (candidate.layout, candidate.microbatch, without)
        if key in fits_already:
            continue
        planned.append(_plan_one(workloads, times, memories, candidate))
        if planned[-1].fits:
            fits_already.add(key)
    if not planned:
        raise UsageError(_nothing_runs(cluster, job, refused))
    fitting = sorted((each for each in planned if each.fits), key=_order)
    possible = {each.candidate.layout for each in fitting}
    others = sorted(
        (each for each in planned if each.candidate.layout not in possible),
        key=lambda each: each.memory.total,
    )
    chosen = best_of_each_layout(fitting)
    exact = [_simulate(workloads, times, each) for each in chosen[:detailed]]
    exact.sort(key=_order)
    whole = workloads(1, 1, False)
    samples = job.global_batch / cluster.gpus
    peak = times.cluster.peak(_peak_dtype(whole))
    null = whole.model_flops * samples / (peak * NULL_UTILISATION)
    plan = Plan(
        times.cluster,
        job,
        (*exact, *chosen[detailed:], *best_of_each_layout(others)),
        searched,
        tuple(refused.items()),
        null,
        whole,
    )
    if plan.best is None:
        plan = replace(plan, advice=_advice(workloads, cluster, job, others[0]))
    return plan


def best_of_each_layout(planned: Sequence[Planned]) -> list[Planned]:
    """Return the first candidate of every layout, in the given order."""
    found: dict[str, Planned] = {}
    for each in planned:
        found.setdefault(str(each.candidate.layout), each)
    return list(found.values())


def _order(planned: Planned) -> tuple[float, int]:
    # Predictions that differ by less than 0.5 % count as equal. Among equal predictions, the layout
    # with fewer axes comes first.
    axes = sum(size > 1 for size in planned.candidate.layout.axes.values())
    return round(math.log(max(planned.seconds, 1e-12)) / 0.005), axes


def _plan_one(
    workloads: Workloads, times: StepModel, memories: MemoryModel, candidate: Candidate
) -> Planned:
    layout, options = candidate.layout, candidate.options
    workload = workloads(layout.tp, candidate.microbatch, candidate.sharded)
    cuts: tuple[int, ...] = (0,)
    if layout.pp > 1:
        cuts = times.stage_cuts(workload, layout.pp * options.virtual_stages)
    memory = memories.peak(workload, layout, options, cuts)
    limit = _MARGIN * times.cluster.memory_bytes
    if memory.total > limit:
        return Planned(candidate, memory, False, None, shortage(memory, times.cluster))
    return Planned(candidate, memory, True, times.estimate(workload, layout, options))


def _simulate(workloads: Workloads, times: StepModel, planned: Planned) -> Planned:
    candidate = planned.candidate
    workload = workloads(candidate.layout.tp, candidate.microbatch, candidate.sharded)
    step = times.simulate(workload, candidate.layout, candidate.options)
    return replace(planned, step=step)


def shortage(memory: MemoryEstimate, cluster: Cluster) -> str:
    """Return why a layout does not fit: the missing memory and the largest cause."""
    row = memory.row()
    cause = max(_CAUSES, key=lambda name: row[name])
    missing = memory.total - _MARGIN * cluster.memory_bytes
    text = (
        f"needs {format_bytes(memory.total)}, but a device has only "
        f"{format_bytes(_MARGIN * cluster.memory_bytes)} of usable memory: {format_bytes(missing)} "
        f"too much, mostly {_CAUSES[cause]} ({format_bytes(row[cause])}). The peak is in the "
        f"{memory.moment}"
    )
    return text


def candidates(
    workloads: Workloads, cluster: Cluster, job: Job, refused: dict[str, str]
) -> Iterator[Candidate]:
    """Yield all candidates. Adds the layouts that cannot run to `refused`, with the reasons."""
    layouts = [job.layout] if job.layout is not None else Layout.every(cluster.gpus)
    known: dict[int, str] = {}  # tp size → reason why it cannot split the model, or ""
    for layout in layouts:
        reason = _refusal(workloads, cluster, job, layout, known)
        if reason:
            refused[str(layout)] = reason
            continue
        modes = workloads(layout.tp, 1, False).modes
        if job.recompute is not None:
            modes = tuple(mode for mode in modes if mode == job.recompute)
        for microbatch, accumulation in _batches(job, layout):
            for schedule, stages in _schedules(job, layout, accumulation):
                stage_count = layout.pp * (stages or _stages(schedule))
                if layout.pp > 1 and stage_count > len(workloads(1, 1, False).units):
                    continue
                for mode in modes:
                    if layout.pp > 1 and schedule in SPLIT_BACKWARD and mode == "selective":
                        continue
                    for bucket in _buckets(job, layout):
                        yield Candidate(
                            layout,
                            microbatch,
                            StepOptions(
                                accumulation=accumulation,
                                schedule=schedule,
                                stages_per_rank=stages,
                                recompute=mode,
                                bucket_mb=bucket,
                                optimizer=job.optimizer,
                                clip=job.clip,
                                prefetch=job.prefetch,
                                reshard=job.reshard,
                                async_tp=job.async_tp and layout.tp > 1,
                                compiled=job.compiled,
                                ema=job.ema,
                            ),
                        )


def _stages(schedule: ScheduleName) -> int:
    return 1 if schedule in ("gpipe", "1f1b") else 2


def _refusal(
    workloads: Workloads, cluster: Cluster, job: Job, layout: Layout, known: dict[int, str]
) -> str:
    """Return the reason why the layout cannot run, or an empty string."""
    if job.global_batch % layout.data_ranks:
        return f"global batch {job.global_batch} {_INDIVISIBLE} ({layout.data_ranks})"
    if layout.tp > cluster.per_node and job.layout is None:
        return f"tp{layout.tp} does not fit into a node of {cluster.per_node} GPUs"
    if layout.pp > 1:
        whole = workloads(1, 1, False)
        if whole.uncuttable:
            return whole.uncuttable
        if layout.pp > len(whole.units):
            return f"pp{layout.pp} needs {layout.pp} layers, but the model has {len(whole.units)}"
        if job.global_batch // layout.data_ranks < layout.pp:
            return f"pp{layout.pp} needs at least {layout.pp} microbatches on each data rank"
    if layout.tp not in known:
        try:
            workloads(layout.tp, 1, False)
            known[layout.tp] = ""
        except UsageError as error:
            if job.layout is not None or layout.tp == 1:
                raise
            known[layout.tp] = str(error)
    return known[layout.tp]


def _batches(job: Job, layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield (microbatch size, number of microbatches) pairs that give the job's global batch."""
    samples = job.global_batch // layout.data_ranks
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    if job.microbatch is not None:
        sizes = [size for size in sizes if size == job.microbatch]
    elif job.accumulation is not None:
        sizes = [size for size in sizes if size * job.accumulation == samples]
    elif len(sizes) > _MICROBATCHES:
        # Keep the largest powers of two and the largest size.
        powers = [size for size in sizes if size & (size - 1) == 0]
        sizes = sorted({*powers[-_MICROBATCHES + 1 :], sizes[-1]})
    for size in sizes:
        if samples // size >= layout.pp and job.accumulation in (None, samples // size):
            yield size, samples // size


def _schedules(
    job: Job, layout: Layout, accumulation: int
) -> Iterator[tuple[ScheduleName, int | None]]:
    if layout.pp == 1:
        yield "1f1b", None
        return
    names: tuple[ScheduleName, ...] = ("1f1b", "interleaved")
    for name in (job.schedule,) if job.schedule is not None else names:
        try:
            check_microbatches(name, layout.pp, accumulation)
        except UsageError:
            continue
        yield name, job.stages_per_rank


def _buckets(job: Job, layout: Layout) -> tuple[float, ...]:
    if not layout.only_replicas or layout.dp == 1:
        return (25.0,)
    return _BUCKETS if job.bucket_mb is None else (job.bucket_mb,)


def _nothing_runs(cluster: Cluster, job: Job, refused: dict[str, str]) -> str:
    batch = job.global_batch
    if all(_INDIVISIBLE in reason for reason in refused.values()) and refused:
        wanted = cluster.gpus * max(1, round(batch / cluster.gpus))
        return (
            f"--global-batch {batch} is not divisible by the data ranks of any layout of "
            f"{cluster.gpus} GPUs: use --global-batch {wanted}"
        )
    if job.layout is not None:
        reason = refused.get(str(job.layout), "no microbatch size gives the requested batch")
        return f"--layout {job.layout} cannot run this job: {reason}"
    layout, reason = next(iter(refused.items()), ("", "no layout divides the global batch"))
    return f"no layout of {cluster.gpus} GPUs can run this job, for example {layout}: {reason}"


# -- advice ----------------------------------------------------------------------------------------


def _advice(workloads: Workloads, cluster: Cluster, job: Job, closest: Planned) -> str:
    """Return a message with the nearest change that fits. Called if no candidate fits."""
    times = step_model(cluster)
    text = f"{closest.candidate.layout} does not fit: {closest.reason}"
    free = replace(
        job, layout=None, microbatch=None, accumulation=None, recompute=None, schedule=None
    )
    if free != job:
        memories = MemoryModel(times.cluster)
        found = [
            each
            for candidate in candidates(workloads, cluster, free, {})
            if (each := _plan_one(workloads, times, memories, candidate)).fits
        ]
        if found:
            nearest = min(found, key=lambda each: each.candidate.distance(closest.candidate))
            changed = ", ".join(nearest.candidate.changed_from(closest.candidate))
            return f"{text}. The nearest change that fits: {changed}"
    gpus = cluster.gpus
    while gpus < 4096:
        gpus *= 2
        larger = cluster.with_gpus(gpus)
        batch = -(-job.global_batch // gpus) * gpus  # divisible by the data ranks of any layout
        enough = replace(free, global_batch=batch)
        models = step_model(larger), MemoryModel(larger)
        for candidate in candidates(workloads, larger, replace(enough, schedule="1f1b"), {}):
            if _plan_one(workloads, *models, candidate).fits:
                name = f"{candidate.layout}, microbatch {candidate.microbatch}"
                return (
                    f"{text}. No layout of {cluster.gpus} GPUs fits. The nearest change that fits: "
                    f"{gpus} GPUs with {name}, recompute {candidate.options.recompute}"
                )
    return f"{text}. No layout of up to {gpus} GPUs fits: use GPUs with more memory"


def _peak_dtype(workload: Workload) -> str:
    flops: dict[str, float] = {}
    for unit in workload.units:
        for each in unit.forward:
            flops[each.dtype] = flops.get(each.dtype, 0.0) + each.flops
    return max(flops, key=lambda name: flops[name], default="float32")


# -- placement -------------------------------------------------------------------------------------


def placements(
    workloads: Workloads, cluster: Cluster, planned: Planned, calibration: Calibration | None = None
) -> list[dict[str, Any]]:
    """Return the bytes that a rank sends inside and between nodes, for every mesh axis order.

    The first row has the axis order that tutti uses. The other rows are sorted by the bytes between
    nodes.
    """
    candidate = planned.candidate
    layout = candidate.layout
    workload = workloads(layout.tp, candidate.microbatch, candidate.sharded)
    times = step_model(cluster, calibration)
    used = [axis for axis in AXES if layout.axes[axis] > 1]
    rest = [axis for axis in AXES if axis not in used]
    rows = []
    for order in permutations(used):
        sent = times.bytes_by_link(workload, layout, candidate.options, (*rest, *order))
        rows.append(
            {
                "order": list(order),
                "intra_bytes": sum(each["intra"] for each in sent.values()),
                "inter_bytes": sum(each["inter"] for each in sent.values()),
                "axes": {axis: sent[axis] for axis in used},
            }
        )
    return [rows[0], *sorted(rows[1:], key=lambda row: float(str(row["inter_bytes"])))]
