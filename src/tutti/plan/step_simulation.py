"""Simulates one training step of a layout: computation, communication and idle time of each rank.

A unit is a block or another layer of the model (see workload.py). A rank has a host that issues
operators, a device that computes, and a link that communicates. Each of them does one thing at a
time:

    device   starts a unit when the host has issued the unit, the previous unit has ended, and the
             parameters of the unit are gathered
    link     DDP: in the backward of the last microbatch, a bucket is all-reduced as soon as all of
             its gradients are computed. FSDP2: parameters are gathered `prefetch` blocks ahead, and
             the gradients of a unit are reduce-scattered when its backward has ended
    tp       tp collectives are inside units, and the device waits for them
    pp       a stage starts a forward when the previous stage has sent the activations, and a
             backward when the next stage has sent the gradients

While the link is busy, computation takes 1 + overlap_slowdown times as long.

`StepModel.simulate` simulates every action of torch's pipeline schedule, and returns the step time
by cause. `StepModel.estimate` is faster: it computes the time of a pipeline by formulas. Results
that many layouts share (the seconds of a unit, the backward with its buckets) are cached, so
thousands of layouts are predicted within seconds.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

from tutti.measure.collective_bandwidth import OPERATIONS
from tutti.parallel.layout import AXES, Layout, Recompute, ScheduleName
from tutti.plan.cluster_spec import Cluster
from tutti.plan.collective_cost import CollectiveCost, MeasuredCollective
from tutti.plan.operator_cost import OperatorCost, Rates, default_rates
from tutti.plan.schedule_simulation import (
    Clock,
    Pass,
    PipelineStages,
    Span,
    Stage,
    closed_form,
    cut_units,
    run_schedule,
)
from tutti.plan.workload import Operation, Unit, Workload

T = TypeVar("T")

CAUSES = ("compute", "exposed_comm", "bubble", "wait", "input", "other")
_FIRST_BUCKET = 2**20  # bytes: DDP's first bucket is small, so that communication starts early
# Bytes that one fused optimizer step reads and writes per byte of trained parameters. For example,
# adam reads the parameter, the gradient and two moments, and writes all of them except the
# gradient.
_OPTIMIZER_TRAFFIC = {"adamw": 7.0, "adam": 7.0, "sgd": 5.0, "none": 0.0}
_CLIP_TRAFFIC = 3.0  # clipping reads gradients for the norm, then reads and writes them to scale
_OPTIMIZER_KERNELS = 12
# _HOOK_OPERATORS: the host time of FSDP2's hooks around a block, expressed as a number of operators
# in forward and in backward. On a CPU, each of these operators takes twice the time of a small
# operator. _DTENSOR_FACTOR: (host time of an operator on DTensors, which tp uses in eager mode) /
# (host time of the operator on plain tensors).
_HOOK_OPERATORS = (12, 18)
_DTENSOR_FACTOR = 2.5
# (Host time of an operator with selective recomputation) / (host time without recomputation). The
# ratio is large, because selective recomputation calls a TorchDispatchMode for each operator.
# Measured with a GPT on one H200.
_SELECTIVE_FACTOR = 3.5
_SIMULATED_UNITS = 4  # `estimate` simulates at most this many consecutive equal units
# With --async-tp, matrix products are split and overlap with tp collectives. This share of a
# collective's time stays exposed. In torchtitan's benchmarks, async TP saved 8 to 9 % of the step
# time.
_ASYNC_TP_EXPOSED = 0.6
# The relative uncertainty of each assumption: the true value lies within value × (1 ± uncertainty)
# in about 80 % of all cases. The uncertainties are estimated from the spread of published
# measurements (see docs/concepts/planning.md). After a calibration, the uncertainty of a measured
# rate is the residual of its fit, but at least _CALIBRATED_UNCERTAINTY.
_UNCERTAINTY = {
    "matmul_16bit": 0.05,
    "sustained": 0.10,
    "matmul_float32": 0.10,
    "convolution": 0.30,
    "memory": 0.12,
    "attention": 0.20,
    "host": 0.40,
    "collective bandwidth": 0.12,
    "collective latency": 0.40,
    "overlap_slowdown": 0.80,
}
_ASSUMED_RATES = {
    "matmul_16bit": ("matmul_16bit",),
    "sustained": ("sustained",),
    "matmul_float32": ("matmul_float32", "matmul_tf32"),
    "convolution": ("convolution", "convolution_16bit", "convolution_memory"),
    "memory": ("memory",),
    "attention": ("attention_forward", "attention_backward"),
    "host": ("host_forward_s", "host_backward_s", "host_step_s", "kernel_s"),
    "overlap_slowdown": ("overlap_slowdown",),
}
_CALIBRATED_UNCERTAINTY = 0.05
_MODEL_ERROR = 0.04  # relative error from effects that are not simulated: clocks, caches, allocator


@dataclass(frozen=True)
class Calibration:
    """Measured rates of a device and of its collectives, from `tutti plan --calibrate`."""

    device: str
    rates: Rates
    collectives: tuple[MeasuredCollective, ...] = ()
    spread: tuple[tuple[str, float], ...] = ()
    """Pairs (assumption, relative residual of its fit). Residuals widen the uncertainty band."""
    peak_flops: tuple[tuple[str, float], ...] = ()
    """Only for CPUs: the measured FLOP/s of the largest matrix product, by dtype."""
    memory_bandwidth: float | None = None
    """Only for CPUs: the measured bandwidth of one rank, in bytes/s."""

    def apply(self, cluster: Cluster) -> Cluster:
        """Return the cluster with measured instead of assumed peak rates and memory bandwidth."""
        if self.peak_flops:
            peaks = dict(cluster.peak_flops) | dict(self.peak_flops)
            cluster = replace(cluster, peak_flops=peaks)
        if self.memory_bandwidth:
            cluster = replace(cluster, memory_bandwidth=self.memory_bandwidth)
        return cluster


@dataclass(frozen=True)
class Assumption:
    """An assumption with its uncertainty, and its effect on the predicted step time."""

    name: str
    value: float
    uncertainty: float
    effect: float
    """(step time with the value at the slower end of its range) / (step time) − 1."""


@dataclass(frozen=True)
class StepTime:
    """The predicted time of one step."""

    step_s: float
    parts: dict[str, float]
    """Seconds by cause, with the cause names of `tutti scale`. The sum is `step_s`. With a
    pipeline, each value is the mean over the pipeline ranks."""
    mfu: float
    comm_s: float
    """Seconds in which a rank's link is busy. Includes hidden and exposed communication."""
    band: tuple[float, float] = (0.0, 0.0)
    """(low, high): the true step time lies between these values in about 80 % of all cases."""
    assumptions: tuple[Assumption, ...] = ()
    """Sorted by effect, largest first."""
    timeline: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def hidden_s(self) -> float:
        """Seconds of communication that overlaps with computation."""
        return max(0.0, self.comm_s - self.parts["exposed_comm"])


@dataclass(frozen=True)
class StepOptions:
    """The settings of a step besides the layout. The defaults are those of `tutti train`."""

    accumulation: int = 1
    """Microbatches of each replica in a step."""
    schedule: ScheduleName = "1f1b"
    stages_per_rank: int | None = None
    recompute: Recompute = "none"
    bucket_mb: float = 25.0
    overlap: bool = True
    """Whether gradient communication overlaps with backward."""
    optimizer: str = "adamw"
    clip: bool = False
    prefetch: int = 1
    reshard: bool | None = None
    async_tp: bool = False
    compiled: bool = False
    """Whether torch.compile is used (--compile): for each block, or for the whole model on one
    rank."""
    ema: bool = False
    """Whether moving averages of the weights are kept (--ema). Only the memory estimate counts
    them."""
    hooks: bool = True
    """Whether FSDP2, DTensor and selective recomputation add host time, as in tutti. False is for
    benchmarks that were measured with other software."""
    optimizer_traffic: float | None = None
    """Bytes that the optimizer step reads and writes per byte of trained parameters. None: the
    value in _OPTIMIZER_TRAFFIC."""
    cuts: tuple[int, ...] = ()
    """The first unit of every stage. Empty: cut by FLOPs, like `--balance counted`."""

    @property
    def virtual_stages(self) -> int:
        """The number of stages on each pipeline rank."""
        if self.stages_per_rank is not None:
            return self.stages_per_rank
        return 1 if self.schedule in ("gpipe", "1f1b") else 2


@lru_cache(maxsize=16)
def step_model(cluster: Cluster, calibration: Calibration | None = None) -> "StepModel":
    """Return the step model of a cluster. Models are cached by their arguments."""
    return StepModel(cluster, calibration)


class UnitTimes(NamedTuple):
    """Seconds and bytes of one unit for one microbatch. Equal blocks have equal values."""

    forward: float
    """Device seconds in forward, without collectives."""
    forward_host: float
    forward_tp: float
    """Seconds of tp collectives for which the device waits."""
    backward: float
    """Device seconds in backward, including recomputation."""
    backward_host: float
    backward_tp: float
    weight: float
    """The part of `backward` that computes the gradients of weights. Zero-bubble schedules run this
    part separately from the gradients of inputs."""
    trained_bytes: int
    gathered_bytes: int
    is_block: bool


class StepModel:
    """Predicts the step times of layouts on one cluster, and caches results that layouts share."""

    def __init__(
        self,
        cluster: Cluster,
        calibration: Calibration | None = None,
        rates: Rates | None = None,
        latency_factor: float = 1.0,
        bandwidth_factor: float = 1.0,
    ) -> None:
        if calibration is not None:
            cluster = calibration.apply(cluster)
        self.cluster, self.calibration = cluster, calibration
        self.rates = rates or (calibration.rates if calibration else default_rates(cluster))
        measured = calibration.collectives if calibration else ()
        self.operators = OperatorCost(cluster, self.rates)
        self.collectives = CollectiveCost(cluster, measured, latency_factor, bandwidth_factor)
        self._workloads: dict[int, Workload] = {}  # keeps objects alive whose ids are cache keys
        self._kept: dict[tuple[Any, ...], Any] = {}
        self._groups: dict[Layout, _Groups] = {}

    # -- public --------------------------------------------------------------------------------

    def estimate(self, workload: Workload, layout: Layout, options: StepOptions) -> StepTime:
        """Return the step time, without a band. Formulas replace the pipeline simulation."""
        return self._step(workload, layout, options, detailed=False)

    def simulate(self, workload: Workload, layout: Layout, options: StepOptions) -> StepTime:
        """Return the step time with its timeline, band and assumptions."""
        result = self._step(workload, layout, options, detailed=True)
        assumptions = self._sensitivity(workload, layout, options, result.step_s)
        width = math.sqrt(_MODEL_ERROR**2 + sum(each.effect**2 for each in assumptions))
        return replace(
            result,
            band=(result.step_s / (1 + width), result.step_s * (1 + width)),
            assumptions=tuple(assumptions),
        )

    def stage_cuts(self, workload: Workload, stages: int) -> tuple[int, ...]:
        """Return the first unit of every stage, cut by FLOPs like `--balance counted`."""
        self._workloads.setdefault(id(workload), workload)
        shares = self._keep(("shares", id(workload)), lambda: _flop_shares(workload))
        # The FLOP shares do not depend on the microbatch size, so all sizes share the cached cuts.
        return self._keep(("cuts", shares, stages), lambda: cut_units(shares, stages))

    # -- units ---------------------------------------------------------------------------------

    def _groups_of(self, layout: Layout) -> "_Groups":
        found = self._groups.get(layout)
        if found is None:
            tp, shard, dp, pp, data = (
                self.cluster.members_and_nodes(layout, axis)
                for axis in ("tp", "shard", "dp", "pp", "data")
            )
            found = self._groups[layout] = _Groups(
                layout, tp, shard, dp, pp, data, layout.only_replicas, layout.size
            )
        return found

    def _times(
        self, workload: Workload, groups: "_Groups", options: StepOptions
    ) -> tuple[UnitTimes, ...]:
        """Return the seconds of every unit of the workload."""
        self._workloads.setdefault(id(workload), workload)
        tp = groups.tp
        sharded, accumulates = groups.layout.shard > 1, options.accumulation > 1
        key: tuple[Any, ...] = ("units", id(workload), options.recompute, tp, sharded, accumulates)
        alone = groups.size == 1
        wrapped = options.hooks and groups.layout.data_ranks > 1 and not groups.only_replicas
        key += (options.async_tp, options.compiled, alone, options.hooks, wrapped)
        arguments = (workload, options, tp, sharded, alone, wrapped)
        return self._keep(key, lambda: self._unit_times(*arguments))

    def _unit_times(
        self,
        workload: Workload,
        options: StepOptions,
        tp: tuple[int, int],
        sharded: bool,
        alone: bool,
        wrapped: bool,
    ) -> tuple[UnitTimes, ...]:
        rows = []
        exposed = _ASYNC_TP_EXPOSED if options.async_tp else 1.0
        bandwidth = self.cluster.memory_bandwidth * self.rates.memory
        known: dict[tuple[int, ...], UnitTimes] = {}
        for unit in workload.units:
            # Equal blocks of a traced model share the same tuples of operators, so ids are valid
            # keys.
            key = (
                *(id(unit.forward), id(unit.backward), unit.is_block),
                *(unit.trained_bytes, unit.parameter_bytes),
            )
            if key not in known:
                again = unit.recomputed.get(options.recompute, ())
                fused = options.compiled and (unit.is_block or alone)
                forward = self._ops(unit.forward, fused)
                backward = self._ops(unit.backward, fused) + self._ops(again, fused)
                gathered = gathered_bytes(workload, unit)
                # FSDP2 copies parameters out of the all-gather buffer, and gradients into the
                # reduce-scatter buffer. Without sharding, the gradients of a microbatch are added
                # to the gradients of the earlier microbatches.
                if sharded:
                    forward += 2 * gathered / bandwidth
                    backward += 2 * (gathered + unit.trained_bytes) / bandwidth
                elif options.accumulation > 1:
                    backward += 3 * unit.trained_bytes / bandwidth
                products = [op for op in unit.backward if op.kind in ("matmul", "convolution")]
                host = partial(self.operators.host_seconds, fused=fused)
                tp_again = self._tp_seconds(again, tp)
                host_forward = host(unit.forward, backward=False)
                host_backward = host(unit.backward, backward=True) + host(again, backward=False)
                if options.hooks and options.recompute == "selective" and again:
                    more = host(unit.forward, backward=False) * (_SELECTIVE_FACTOR - 1)
                    host_forward += more
                    host_backward += host(again, backward=False) * (_SELECTIVE_FACTOR - 1)
                if options.hooks and workload.tp > 1 and not options.compiled:
                    host_forward *= _DTENSOR_FACTOR
                    host_backward *= _DTENSOR_FACTOR
                if wrapped and unit.is_block:
                    host_forward += _HOOK_OPERATORS[0] * self.rates.host_forward_s
                    host_backward += _HOOK_OPERATORS[1] * self.rates.host_backward_s
                if self.cluster.is_cpu:  # the host itself computes, so this time is not hidden
                    small = 2 * self.rates.kernel_s
                    if wrapped and unit.is_block:
                        forward += _HOOK_OPERATORS[0] * small
                        backward += _HOOK_OPERATORS[1] * small
                    if options.hooks and workload.tp > 1:
                        extra = (_DTENSOR_FACTOR - 1) * small
                        forward += len(unit.forward) * extra
                        backward += (len(unit.backward) + len(again)) * extra
                known[key] = UnitTimes(
                    forward=forward,
                    forward_host=host_forward,
                    forward_tp=self._tp_seconds(unit.forward, tp) * exposed,
                    backward=backward,
                    backward_host=host_backward,
                    backward_tp=(self._tp_seconds(unit.backward, tp) + tp_again) * exposed,
                    weight=self._ops(products) / 2,
                    trained_bytes=unit.trained_bytes,
                    gathered_bytes=gathered,
                    is_block=unit.is_block,
                )
            rows.append(known[key])
        return tuple(rows)

    def _ops(self, operations: Sequence[Operation], fused: bool = False) -> float:
        return sum(self.operators.seconds(each, fused) for each in operations)

    def _tp_seconds(self, operations: Sequence[Operation], tp: tuple[int, int]) -> float:
        return sum(
            self.collectives.seconds(each.name, each.bytes, *tp)
            for each in operations
            if each.kind == "collective"
        )

    # -- a step --------------------------------------------------------------------------------

    def _step(
        self, workload: Workload, layout: Layout, options: StepOptions, detailed: bool
    ) -> StepTime:
        groups = self._groups_of(layout)
        times = self._times(workload, groups, options)
        if layout.pp > 1:
            result = self._pipeline(workload, groups, options, times, detailed)
        else:
            result = self._no_pipeline(workload, groups, options, times, detailed)
        step, parts, comm, spans = result
        flops = workload.model_flops * options.accumulation * layout.data_ranks
        dtype = self._keep(("dtype", id(workload)), lambda: _compute_dtype(workload))
        peak = self.cluster.peak(dtype) * groups.size
        return StepTime(
            step_s=step,
            parts=parts,
            mfu=flops / (peak * step) if step > 0 else 0.0,
            comm_s=comm,
            timeline=tuple(spans),
        )

    def _no_pipeline(
        self,
        workload: Workload,
        groups: "_Groups",
        options: StepOptions,
        times: tuple[UnitTimes, ...],
        detailed: bool,
    ) -> tuple[float, dict[str, float], float, list[Span]]:
        everything = (0, len(workload.units))
        common = (workload, groups, options, times, everything, detailed)
        early = self._microbatch(*common, first=True, last=False)
        last = self._microbatch(*common, first=True, last=True)
        update = self._update(workload, groups, options, everything)
        repeats = options.accumulation - 1
        parts, step, comm = dict.fromkeys(CAUSES, 0.0), 0.0, 0.0
        for count, each in ((repeats, early), (1, last), (1, (update,))):
            for one in each:
                step += count * one.elapsed
                comm += count * one.comm
                parts["compute"] += count * one.compute
                parts["exposed_comm"] += count * one.exposed
                parts["other"] += count * one.host_limited
        # If the host needs more time than the device, the step ends when the host has ended.
        host = options.accumulation * sum(row.forward_host + row.backward_host for row in times)
        waiting = max(0.0, host + self.rates.host_step_s - step)
        step, parts["other"] = step + waiting, parts["other"] + waiting
        spans: list[Span] = []
        if detailed:
            start = 0.0
            for passes in (*[early] * repeats, last, (update,)):
                for one in passes:
                    spans += [
                        Span(0, s.lane, s.name, s.start + start, s.end + start) for s in one.spans
                    ]
                    start += one.elapsed
        return step, parts, comm, spans

    def _microbatch(
        self,
        workload: Workload,
        groups: "_Groups",
        options: StepOptions,
        times: tuple[UnitTimes, ...],
        bounds: tuple[int, int],
        detailed: bool,
        *,
        first: bool,
        last: bool,
    ) -> tuple[Pass, Pass]:
        """Return forward and backward of one microbatch for units bounds[0] to bounds[1] − 1.

        If `first` is true, forward gathers the parameters. A pipeline gathers parameters only in
        the first microbatch. If `last` is true, backward sums the gradients over the replicas.
        """
        layout = groups.layout
        # Values that do not affect a pass are not part of its cache key, so that more layouts share
        # the result.
        first, last = first and layout.shard > 1, last and layout.dp > 1
        if groups.only_replicas and last:
            units = workload.units[bounds[0] : bounds[1]]
            key: tuple[Any, ...] = ("buckets", id(workload), id(times), bounds, groups.data)
            key += (options.bucket_mb, options.overlap)
            return self._keep(key, lambda: self._with_buckets(units, times, options, groups.data))
        setting = _Sharding(
            shard=groups.shard if layout.shard > 1 else (1, 1),
            replicas=groups.dp if last else (1, 1),
            shards=layout.shard,
            first=first,
            last=last,
            reshard=options.reshard if options.reshard is not None else layout.pp == 1,
            prefetch=options.prefetch,
            overlap=options.overlap,
        )
        if detailed:
            names = [unit.name for unit in workload.units[bounds[0] : bounds[1]]]
            part = times[bounds[0] : bounds[1]]
            return self._forward(part, setting, names), self._backward(part, setting, names)
        runs = self._keep(("runs", id(times), bounds), lambda: _runs_of(times, bounds))
        return self._with_runs(times, runs, setting)

    def _with_runs(
        self, times: tuple[UnitTimes, ...], runs: list[tuple[int, int]], setting: "_Sharding"
    ) -> tuple[Pass, Pass]:
        """Return the forward and the backward of several sequences of equal units.

        `runs` has one entry (index, count) for each sequence. Only _SIMULATED_UNITS units of the
        longest sequence are simulated, because after a few equal units each further unit takes the
        same time. The longest sequence is simulated with n and with n − 1 units, and the difference
        is added for each remaining unit.
        """
        # A forward does not depend on `last` or `replicas`. A backward does not depend on `first`.
        forward = setting._replace(last=False, replicas=(1, 1))
        backward = setting._replace(first=False)
        return (
            self._keep(
                ("forward", id(times), tuple(runs), forward),
                lambda: self._repeat(times, runs, forward, self._forward),
            ),
            self._keep(
                ("backward", id(times), tuple(runs), backward),
                lambda: self._repeat(times, runs, backward, self._backward),
            ),
        )

    def _repeat(
        self,
        times: tuple[UnitTimes, ...],
        runs: list[tuple[int, int]],
        setting: "_Sharding",
        simulated: "Callable[[Sequence[UnitTimes], _Sharding, Sequence[str] | None], Pass]",
    ) -> Pass:
        longest = max(range(len(runs)), key=lambda index: runs[index][1])
        count = runs[longest][1]

        def shortened(length: int) -> Pass:
            kept = [
                (start, length if index == longest else n) for index, (start, n) in enumerate(runs)
            ]
            # Stages with different numbers of blocks share the result of the shortened sequence.
            key = (simulated.__name__, id(times), tuple(kept), setting)
            chosen = [times[start] for start, n in kept for _ in range(n)]
            return self._keep(key, lambda: simulated(chosen, setting, None))

        if count <= _SIMULATED_UNITS:
            return shortened(count)
        a, b = shortened(_SIMULATED_UNITS), shortened(_SIMULATED_UNITS - 1)
        more = count - _SIMULATED_UNITS
        return Pass(
            elapsed=a.elapsed + more * (a.elapsed - b.elapsed),
            compute=a.compute + more * (a.compute - b.compute),
            exposed=a.exposed + more * (a.exposed - b.exposed),
            comm=a.comm + more * (a.comm - b.comm),
            host_limited=a.host_limited + more * (a.host_limited - b.host_limited),
        )

    def _with_buckets(
        self,
        units: Sequence[Unit],
        times: Sequence[UnitTimes],
        options: StepOptions,
        group: tuple[int, int],
    ) -> tuple[Pass, Pass]:
        """Return forward and backward with DDP, which all-reduces gradient buckets in backward."""
        forward = Clock(self.rates.overlap_slowdown, record=True)
        for unit, row in zip(units, times, strict=True):
            forward.run(f"{unit.name} forward", row.forward, row.forward_tp, row.forward_host)
        clock = Clock(self.rates.overlap_slowdown, record=True)
        cap = options.bucket_mb * 2**20
        filled, limit, number = 0, min(float(_FIRST_BUCKET), cap), 0

        def send(size: int, moment: float) -> None:
            seconds = self.collectives.seconds("all_reduce", size, *group)
            clock.send(f"all_reduce bucket {number}", seconds, moment)

        for unit, row in zip(reversed(units), reversed(times), strict=True):
            begin = clock.run(
                f"{unit.name} backward", row.backward, row.backward_tp, row.backward_host
            )
            gradients = [p.bytes for p in reversed(unit.parameters) if p.trained and not p.sharing]
            total, ready = sum(gradients), 0
            for size in gradients:
                # Assumption: the gradients of a unit are computed one after the other, and each
                # takes a time that is proportional to its size.
                ready, filled = ready + size, filled + size
                if filled >= limit:
                    moment = begin + (clock.device - begin) * ready / total
                    send(filled, moment if options.overlap else math.inf)
                    filled, limit, number = 0, cap, number + 1
        if filled:
            send(filled, clock.device if options.overlap else math.inf)
        return forward.result(), clock.result()

    def _forward(
        self, times: Sequence[UnitTimes], setting: "_Sharding", names: Sequence[str] | None
    ) -> Pass:
        """Return a forward with FSDP2, or a forward without communication other than tp.

        Parameters outside of blocks form one FSDP2 group. This group is gathered when forward
        starts, and stays gathered until backward has ended. `names` has the names of the units for
        the timeline.
        """
        record = names is not None
        labels = names or [""] * len(times)
        clock = Clock(self.rates.overlap_slowdown, record)
        arrived = [0.0] * len(times)
        blocks = [index for index, row in enumerate(times) if row.is_block]
        issued = 0  # number of blocks whose all-gathers have been issued

        def gather(size: float, label: str) -> float:
            seconds = self.collectives.seconds("all_gather", size, *setting.shard)
            return clock.send(f"all_gather {label}" if record else "", seconds, clock.device)

        if setting.first:
            root = sum(row.gathered_bytes for row in times if not row.is_block)
            end = gather(root, "root") if root else 0.0
            arrived = [0.0 if row.is_block else end for row in times]
        passed = 0  # number of blocks before this unit
        for index, row in enumerate(times):
            if row.is_block:
                # Issue the all-gathers of this block and of the next `prefetch` blocks, if they are
                # not issued yet.
                while setting.first and issued < min(passed + setting.prefetch + 1, len(blocks)):
                    block = blocks[issued]
                    arrived[block] = gather(times[block].gathered_bytes, labels[block])
                    issued += 1
                passed += 1
            name = f"{labels[index]} forward" if record else ""
            clock.run(name, row.forward, row.forward_tp, row.forward_host, arrived[index])
        return clock.result()

    def _backward(
        self, times: Sequence[UnitTimes], setting: "_Sharding", names: Sequence[str] | None
    ) -> Pass:
        """Return a backward with FSDP2, or a backward without communication other than tp."""
        record = names is not None
        labels = names or [""] * len(times)
        clock = Clock(self.rates.overlap_slowdown, record)
        arrived = [0.0] * len(times)
        sharded = setting.shards > 1
        blocks = [index for index, row in enumerate(times) if row.is_block]
        issued = len(blocks)  # blocks with this number or higher have been gathered
        passed = len(blocks)
        for index in range(len(times) - 1, -1, -1):
            row, label = times[index], labels[index]
            if row.is_block:
                passed -= 1
                while sharded and setting.reshard and issued > max(passed - setting.prefetch, 0):
                    issued -= 1
                    size = times[blocks[issued]].gathered_bytes
                    seconds = self.collectives.seconds("all_gather", size, *setting.shard)
                    name = f"all_gather {labels[blocks[issued]]}" if record else ""
                    arrived[blocks[issued]] = clock.send(name, seconds, clock.device)
            name = f"{label} backward" if record else ""
            clock.run(name, row.backward, row.backward_tp, row.backward_host, arrived[index])
            ready, size = clock.device if setting.overlap else math.inf, row.trained_bytes
            if size and sharded:
                seconds = self.collectives.seconds("reduce_scatter", size, *setting.shard)
                clock.send(f"reduce_scatter {label}" if record else "", seconds, ready)
            if size and setting.last:
                held = size / setting.shards
                seconds = self.collectives.seconds("all_reduce", held, *setting.replicas)
                clock.send(f"all_reduce {label}" if record else "", seconds, ready)
        return clock.result()

    def _update(
        self, workload: Workload, groups: "_Groups", options: StepOptions, bounds: tuple[int, int]
    ) -> Pass:
        """Return the optimizer step, including gradient clipping."""
        sums = self._keep(("trained", id(workload)), lambda: _trained_sums(workload))
        held = (sums[bounds[1]] - sums[bounds[0]]) / groups.layout.shard
        traffic = _OPTIMIZER_TRAFFIC.get(options.optimizer.lower(), _OPTIMIZER_TRAFFIC["adamw"])
        if options.optimizer_traffic is not None:
            traffic = options.optimizer_traffic
        kernels = _OPTIMIZER_KERNELS
        comm = 0.0
        if options.clip:
            traffic += _CLIP_TRAFFIC
            kernels *= 2
            if not groups.only_replicas:
                for group in (groups.tp, groups.data, groups.pp):
                    comm += self.collectives.seconds("all_reduce", 8, *group)
        bandwidth = self.cluster.memory_bandwidth * self.rates.memory
        compute = held * traffic / bandwidth + kernels * self.rates.kernel_s
        spans = [Span(0, "compute", "optimizer", comm, comm + compute)]
        if comm:
            spans.insert(0, Span(0, "comm", "gradient norm", 0.0, comm))
        return Pass(compute + comm, compute, comm, comm, 0.0, spans)

    # -- pipelines -----------------------------------------------------------------------------

    def _pipeline(
        self,
        workload: Workload,
        groups: "_Groups",
        options: StepOptions,
        times: tuple[UnitTimes, ...],
        detailed: bool,
    ) -> tuple[float, dict[str, float], float, list[Span]]:
        pp, microbatches, schedule = groups.layout.pp, options.accumulation, options.schedule
        cuts = options.cuts or self.stage_cuts(workload, pp * options.virtual_stages)
        key: tuple[Any, ...] = ("pipeline", id(times), groups, cuts, schedule == "zbv")
        key += (options.reshard, options.prefetch, options.overlap, options.clip)
        key += (options.optimizer, options.optimizer_traffic)
        pipeline: PipelineStages = self._keep(
            key,
            lambda: PipelineStages(
                schedule, pp, self._stages(workload, groups, options, times, cuts)
            ),
        )
        spans: list[Span] = []
        if detailed:
            finished, spans = run_schedule(schedule, microbatches, pipeline, with_sends=True)
            without_sends, _ = run_schedule(schedule, microbatches, pipeline, with_sends=False)
        else:
            finished = closed_form(schedule, microbatches, pipeline, with_sends=True)
            without_sends = closed_form(schedule, microbatches, pipeline, with_sends=False)
        head, tails, updates = pipeline.head, pipeline.tails, pipeline.updates
        step = head + max(map(sum, zip(finished, tails, updates, strict=True)))
        # The number of seconds by which sending activations and gradients delays the end of the
        # pipeline.
        delay = max(0.0, max(finished) - max(without_sends))
        waiting = bubble = 0.0
        for rank in range(pp):
            busy = microbatches * pipeline.loads[rank] + updates[rank]
            idle = step - busy - head - tails[rank]
            # The idle time of a rank has two parts: waiting for the transfer of its messages
            # (exposed communication) and waiting for other ranks (bubble).
            by_sends = min(delay, max(0.0, idle), microbatches * pipeline.sends[rank])
            waiting += by_sends
            bubble += idle - by_sends
        compute = microbatches * sum(pipeline.compute) + pipeline.update_compute
        exposed = microbatches * sum(pipeline.exposed) + pipeline.update_exposed
        parts = dict.fromkeys(CAUSES, 0.0)
        parts["compute"] = compute / pp
        parts["exposed_comm"] = (exposed + sum(tails) + waiting) / pp + head
        parts["bubble"] = bubble / pp
        parts["other"] = microbatches * sum(pipeline.host) / pp
        if detailed:
            spans = [replace(s, start=s.start + head, end=s.end + head) for s in spans]
            for rank in range(pp):
                begin = head + finished[rank]
                end = begin + tails[rank]
                if tails[rank]:
                    spans.append(Span(rank, "comm", "gradients", begin, end))
                spans.append(Span(rank, "compute", "optimizer", end, end + updates[rank]))
        return step, parts, pipeline.comm(microbatches), spans

    def _stages(
        self,
        workload: Workload,
        groups: "_Groups",
        options: StepOptions,
        times: tuple[UnitTimes, ...],
        cuts: tuple[int, ...],
    ) -> list[Stage]:
        pair = (2, 1) if groups.pp[1] == 1 else (1, 2)
        all_bounds = tuple(pairwise((*cuts, len(workload.units))))
        key = ("bounds", id(times), cuts)
        runs = self._keep(key, lambda: [tuple(_runs_of(times, each)) for each in all_bounds])
        known: dict[tuple[Any, ...], Stage] = {}  # stages with equal units have equal times
        stages = []
        for bounds, content in zip(all_bounds, runs, strict=True):
            if content not in known:
                common = (workload, groups, options, times, bounds, False)
                size = workload.units[bounds[1] - 1].output_bytes
                first = last = middle = self._microbatch(*common, first=False, last=False)
                if groups.layout.shard > 1:
                    first = self._microbatch(*common, first=True, last=False)
                if groups.layout.dp > 1:
                    last = self._microbatch(*common, first=False, last=True)
                known[content] = Stage(
                    first=first,
                    middle=middle,
                    last=last,
                    update=self._update(workload, groups, options, bounds),
                    weight=sum(times[start].weight * count for start, count in content),
                    send=self.collectives.seconds("send_recv", size, *pair),
                )
            stages.append(known[content])
        return stages

    # -- sensitivity and bytes -----------------------------------------------------------------

    def _sensitivity(
        self, workload: Workload, layout: Layout, options: StepOptions, step: float
    ) -> list[Assumption]:
        """Return the assumptions that change the step time.

        The effect of an assumption is the change of the step time at the slower end of its range.
        """
        base = self.estimate(workload, layout, options).step_s
        spread = dict(self.calibration.spread) if self.calibration else {}
        found = []

        def vary(name: str, value: float, uncertainty: float, model: StepModel) -> None:
            effect = model.estimate(workload, layout, options).step_s / base - 1
            if effect > 1e-4:
                found.append(Assumption(name, value, uncertainty, effect))

        def uncertainty_of(name: str) -> float:
            if self.calibration is None:
                return _UNCERTAINTY[name]
            # A calibration is too short to reach the power limit, so it does not measure the
            # sustained rate. It does not measure overlap either, and it measures collectives only
            # with several ranks.
            measured = not name.startswith("collective") or bool(self.calibration.collectives)
            measured = measured and name not in ("sustained", "overlap_slowdown")
            lowest = _CALIBRATED_UNCERTAINTY if measured else _UNCERTAINTY[name]
            return max(lowest, spread.get(name, 0.0))

        for name, members in _ASSUMED_RATES.items():
            uncertainty = uncertainty_of(name)
            rates = self.rates
            for member in members:
                slower = name in ("host", "overlap_slowdown")
                factor = 1 + uncertainty if slower else 1 / (1 + uncertainty)
                rates = rates.scaled(member, factor)
            if rates != self.rates:
                value = getattr(self.rates, members[0])
                changed = StepModel(self.cluster, self.calibration, rates)
                vary(name, value, uncertainty, changed)
        if layout.size > 1:
            wide = uncertainty_of("collective bandwidth")
            slow = StepModel(self.cluster, self.calibration, self.rates, 1.0, 1 / (1 + wide))
            vary("collective bandwidth", 1.0, wide, slow)
            wide = uncertainty_of("collective latency")
            late = StepModel(self.cluster, self.calibration, self.rates, 1 + wide, 1.0)
            vary("collective latency", 1.0, wide, late)
        return sorted(found, key=lambda each: -each.effect)

    def bytes_by_link(
        self,
        workload: Workload,
        layout: Layout,
        options: StepOptions,
        order: Sequence[str] = AXES,
    ) -> dict[str, dict[str, float]]:
        """Return the bytes that a rank sends in a step: {axis: {"intra": bytes, "inter": bytes}}.

        `intra` is inside a node and `inter` is between nodes. `order` lists the mesh axes,
        outermost first. Collectives are counted as rings: each rank sends (bus factor × message
        size) bytes to the next rank. On each node, one rank of the group sends to another node, so
        on average a rank sends 1 / (ranks of the group on a node) of its bytes between nodes.
        """
        moved = dict.fromkeys(AXES, 0.0)
        steps, units = options.accumulation, workload.units
        share = 1 / layout.pp  # a pipeline rank holds this share of the units
        for unit in units:
            again = unit.recomputed.get(options.recompute, ())
            for each in (*unit.forward, *unit.backward, *again):
                if each.kind == "collective" and layout.tp > 1:
                    factor = OPERATIONS[each.name].bus_factor(layout.tp)
                    moved["tp"] += factor * each.bytes * steps * share
            trained = unit.trained_bytes * share
            if layout.shard > 1:
                factor = (layout.shard - 1) / layout.shard
                gathered = gathered_bytes(workload, unit) * share
                reshard = options.reshard if options.reshard is not None else layout.pp == 1
                gathers = steps * (1 + (reshard and unit.is_block)) if layout.pp == 1 else 1
                moved["shard"] += factor * (gathers * gathered + steps * trained)
            if layout.dp > 1:
                moved["dp"] += 2 * (layout.dp - 1) / layout.dp * trained / layout.shard
        if layout.pp > 1:
            size = max(unit.output_bytes for unit in units[:-1])
            moved["pp"] += 2 * steps * size * options.virtual_stages * (layout.pp - 1) / layout.pp
        result = {}
        for axis, total in moved.items():
            members, nodes = self.cluster.members_and_nodes(layout, axis, order)
            inter = total / members if nodes > 1 else 0.0
            result[axis] = {"intra": total - inter, "inter": inter}
        return result

    def _keep(self, key: tuple[Any, ...], compute: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = compute()
        found: T = self._kept[key]
        return found


class _Groups(NamedTuple):
    """The placement of a layout's process groups, as (ranks per node, nodes) for each axis."""

    layout: Layout
    tp: tuple[int, int]
    shard: tuple[int, int]
    dp: tuple[int, int]
    pp: tuple[int, int]
    data: tuple[int, int]
    only_replicas: bool
    size: int


class _Sharding(NamedTuple):
    """The communication settings of one microbatch, except DDP's buckets."""

    shard: tuple[int, int]
    """(ranks per node, nodes) of a shard group."""
    replicas: tuple[int, int]
    shards: int
    first: bool
    last: bool
    reshard: bool
    prefetch: int
    overlap: bool


def _runs_of(times: Sequence[UnitTimes], bounds: tuple[int, int]) -> list[tuple[int, int]]:
    """Return (index, count) for each sequence of equal units within `bounds`.

    `index` is the first equal unit of the whole model, so equal stages have equal lists.
    """
    runs: list[tuple[int, int]] = []
    for index in range(*bounds):
        if runs and times[runs[-1][0]] == times[index]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((times.index(times[index]), 1))
    return runs


def _trained_sums(workload: Workload) -> list[int]:
    return list(accumulate((unit.trained_bytes for unit in workload.units), initial=0))


def gathered_bytes(workload: Workload, unit: Unit) -> int:
    """Return the bytes of a unit's parameters after FSDP2's all-gather."""
    # Blocks are gathered in the 16-bit dtype of autocast.
    narrow = workload.sharded and unit.is_block
    return sum(
        p.elements * (min(2, p.element_bytes) if narrow else p.element_bytes)
        for p in unit.parameters
        if not p.sharing
    )


def _flop_shares(workload: Workload) -> tuple[float, ...]:
    costs = [sum(each.flops for each in unit.forward) for unit in workload.units]
    total = sum(costs) or 1.0
    return tuple(round(cost / total, 6) for cost in costs)


def _compute_dtype(workload: Workload) -> str:
    """Return the dtype of most FLOPs. The MFU is relative to the peak of this dtype."""
    flops: dict[str, float] = {}
    for unit in workload.units[: len(workload.units) // 2 + 1]:
        for each in unit.forward:
            flops[each.dtype] = flops.get(each.dtype, 0.0) + each.flops
    return max(flops, key=lambda name: flops[name], default="float32")


def trace_events(step: StepTime) -> str:
    """Return the timeline as a Chrome trace (JSON). Perfetto can open the trace."""
    ranks = sorted({span.rank for span in step.timeline})
    lanes = {"compute": 0, "comm": 1}
    events: list[dict[str, Any]] = []
    for rank in ranks:
        name = {"name": f"rank {rank} (predicted)"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": name})
        for lane, number in lanes.items():
            events.append(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": rank,
                    "tid": number,
                    "args": {"name": lane},
                }
            )
    for span in step.timeline:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.lane,
                "pid": span.rank,
                "tid": lanes[span.lane],
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
