"""Estimates the peak memory of each rank of a layout, by cause.

The estimate goes through the step unit by unit (a unit is a block or another layer). At every
moment, a rank holds

    parameters, optimizer state, buffers     all the time
    activations                              of the units whose forward has run, for every
                                             microbatch in flight, and temporary results
    gradients                                of the units whose backward has run
    communication buffers                    FSDP2's gathered parameters, DDP's buckets, and the
                                             receive buffers of the pipeline

The peak is the largest sum of these parts at one moment, not the sum of the largest parts. The
rules for FSDP2 follow torch's implementation. A unit computes with its gathered parameters. In
forward, the flat buffers of this unit's all-gather and of the next all-gather also exist. In
backward, the flat buffer of the next all-gather and the input of the previous reduce-scatter also
exist.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tutti.parallel.layout import Layout, Recompute, ScheduleName
from tutti.plan.cluster_spec import Cluster
from tutti.plan.step_simulation import StepOptions
from tutti.plan.workload import Parameter, Unit, Workload, block_bytes

_MIB = 2**20
_STEP_BYTES = 512  # an optimizer's step counter uses the smallest allocation on the device
# Bytes of optimizer state per byte of trained parameters.
OPTIMIZER_STATE = {
    "sgd": 1.0,
    "adamw": 2.0,
    "adam": 2.0,
    "adamax": 2.0,
    "nadam": 2.0,
    "radam": 2.0,
    "adadelta": 2.0,
    "rprop": 2.0,
    "adagrad": 1.0,
    "rmsprop": 1.0,
    "asgd": 1.0,
    "adafactor": 0.01,
}
# Optimizers that keep a step counter for each parameter.
_HAS_STEP = ("adamw", "adam", "adamax", "nadam", "radam")
# Bytes of a cuBLAS workspace by GPU architecture. torch allocates one for forward and one for
# backward.
_WORKSPACE = {"Hopper": 32 * _MIB, "Blackwell": 32 * _MIB}
_OLD_WORKSPACE = 8 * _MIB + 128 * 1024
CONTEXT_BYTES = int(0.55 * 2**30)
"""Bytes of the CUDA context and the kernels of one process."""
NCCL_BYTES = 2**30
"""Bytes of the NCCL communicators of one process. A job with one rank has no communicators."""
RESERVED = 1.04
"""(Memory that torch's allocator reserves) / (memory that tensors use). Published measurements are
1.03 to 1.09."""
_EXACT_RANKS = 4  # `MemoryModel.peak` computes at most this many pipeline ranks exactly
# Batches of this rank on the device: the batch of the current step, and two batches that the loader
# has prepared.
_BATCHES = 3
_PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class MemoryEstimate:
    """The peak memory of a rank, in bytes, by cause.

    The estimate is valid for every rank with this pipeline rank.
    """

    pipeline_rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    """Gathered parameters, DDP's buckets, receive buffers, workspaces and inputs."""
    overhead: int
    """Memory that torch's allocator reserves but does not use, the CUDA context, and NCCL."""
    moment: str
    """The point of the step at which the peak is reached, such as `backward of blocks.3`."""
    details: tuple[tuple[str, int], ...] = ()
    """The parts of `buffers`, largest first."""

    @property
    def allocated(self) -> int:
        """The peak of torch.cuda.memory_allocated()."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def total(self) -> int:
        """The device memory that a rank needs."""
        return self.allocated + self.overhead

    def row(self) -> dict[str, int]:
        """Return the value of `memory_bytes` in the JSON."""
        row = {name: getattr(self, name) for name in _PARTS}
        return row | {
            "overhead": self.overhead,
            "allocated": self.allocated,
            "total": self.total,
        }


@dataclass(frozen=True)
class _Moment:
    """A point of the step at which memory may be largest.

    The values are bytes in addition to the static memory (parameters, optimizer state, buffers).
    """

    activations: float = 0.0
    gradients: float = 0.0
    buffers: float = 0.0
    name: str = ""

    @property
    def total(self) -> float:
        return self.activations + self.gradients + self.buffers


def _state_bytes(workload: Workload, options: StepOptions) -> float:
    """Return the bytes of optimizer state and `--ema` averages per byte of trained parameters."""
    state = OPTIMIZER_STATE.get(options.optimizer, 2.0)
    if not options.ema:
        return state
    trained = [each for unit in workload.units for each in unit.parameters if each.trained]
    averages = sum(each.elements * max(4, each.element_bytes) for each in trained)  # ≥ float32
    return state + averages / max(1, sum(each.bytes for each in trained))


class MemoryModel:
    """Estimates the memory of layouts on one cluster, and caches results that layouts share."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._tables: dict[tuple[int, Recompute], _Table] = {}
        self._size_tables: dict[tuple[int, int, bool, int], _Sizes] = {}
        self._workloads: dict[int, Workload] = {}

    def estimate(
        self, workload: Workload, layout: Layout, options: StepOptions, cuts: Sequence[int] = (0,)
    ) -> list[MemoryEstimate]:
        """Return the estimates of all pipeline ranks. `cuts` has the first unit of every stage."""
        return self._estimate(workload, layout, options, tuple(cuts), range(layout.pp))

    def peak(
        self, workload: Workload, layout: Layout, options: StepOptions, cuts: Sequence[int] = (0,)
    ) -> MemoryEstimate:
        """Return the estimate of the pipeline rank that needs the most memory."""
        ranks: Sequence[int] = range(layout.pp)
        if layout.pp > _EXACT_RANKS:
            ranks = self._likely_ranks(workload, layout, options, tuple(cuts))
        estimates = self._estimate(workload, layout, options, tuple(cuts), ranks)
        return max(estimates, key=lambda each: each.total)

    def _likely_ranks(
        self, workload: Workload, layout: Layout, options: StepOptions, cuts: tuple[int, ...]
    ) -> Sequence[int]:
        """Return the pipeline ranks that may need the most memory.

        The returned ranks are the first rank, the last rank, and the ranks with the largest rough
        estimates.
        """
        shards = layout.data_ranks > 1 and not layout.only_replicas
        sizes = self._sizes(workload, layout.shard if shards else 1)
        table = self._table(workload, options.recompute)
        factor = 2 + _state_bytes(workload, options)
        state = np.add.reduceat(sizes.stored, cuts) * factor
        kept = np.add.reduceat(table.kept, cuts)
        rough = np.zeros(layout.pp)
        for rank in range(layout.pp):
            held = held_stages(options.schedule, rank, layout.pp, options.virtual_stages)
            in_flight = max(1, min(options.accumulation, layout.pp - rank))
            rough[rank] = sum(state[stage] + in_flight * kept[stage] for stage in held)
        largest = np.argsort(-rough)[: _EXACT_RANKS - 2]
        return sorted({0, layout.pp - 1, *(int(rank) for rank in largest)})

    def _estimate(
        self,
        workload: Workload,
        layout: Layout,
        options: StepOptions,
        cuts: tuple[int, ...],
        ranks: Sequence[int],
    ) -> list[MemoryEstimate]:
        ends = (*cuts[1:], len(workload.units))
        stages = list(zip(cuts, ends, strict=True))
        found = []
        for rank in ranks:
            held = held_stages(options.schedule, rank, layout.pp, options.virtual_stages)
            chosen = [stages[stage] for stage in held] if layout.pp > 1 else stages
            found.append(self._rank(workload, layout, options, rank, held, chosen))
        return found

    def _rank(
        self,
        workload: Workload,
        layout: Layout,
        options: StepOptions,
        rank: int,
        held: Sequence[int],
        stages: Sequence[tuple[int, int]],
    ) -> MemoryEstimate:
        table = self._table(workload, options.recompute)
        replicas = layout.only_replicas
        in_buckets = replicas and layout.dp > 1
        shards = layout.data_ranks > 1 and not replicas
        sizes = self._sizes(workload, layout.shard if shards else 1)
        parameters, trained_bytes, trained, buffers_of_model = sizes.held(workload, stages)
        optimizer = int(_state_bytes(workload, options) * trained_bytes)
        if options.optimizer in _HAS_STEP and not self.cluster.is_cpu:
            optimizer += _STEP_BYTES * trained
        static: dict[str, int] = {}
        if not self.cluster.is_cpu:
            workspace = _WORKSPACE.get(self.cluster.architecture, _OLD_WORKSPACE)
            static["matmul workspaces"] = 2 * workspace
        static["inputs"] = _BATCHES * workload.input_bytes * options.accumulation
        if in_buckets:
            static["gradient buckets"] = trained_bytes
        if layout.pp > 1:
            received = 0
            for stage, (start, end) in zip(held, stages, strict=True):
                if stage > 0:
                    received += workload.units[start - 1].output_bytes
                if end < len(workload.units):
                    received += workload.units[end - 1].output_bytes
            static["receive buffers"] = received * options.accumulation
        if layout.pp > 1:
            moment = self._pipeline(layout, options, table, sizes, rank, held, stages, shards)
        elif shards:
            moment = self._sharded(workload, layout, options, table, sizes)
        else:
            moment = self._replica(workload, layout, options, table)
        gradients = int(moment.gradients)
        if in_buckets and options.accumulation == 1:
            gradients += static.pop("gradient buckets")  # gradients are views of the buckets
        buffers = sum(static.values()) + int(moment.buffers)
        details = {**static, "gathered units": int(moment.buffers)}
        allocated = parameters + buffers_of_model + optimizer + gradients
        allocated += int(moment.activations) + buffers
        overhead = 0
        if not self.cluster.is_cpu:
            overhead = int((RESERVED - 1) * allocated) + CONTEXT_BYTES
            overhead += NCCL_BYTES if layout != Layout() else 0
            # DDP rebuilds its buckets in the first steps. Measured jobs held two sets of buckets
            # during these steps.
            overhead += trained_bytes if in_buckets else 0
        return MemoryEstimate(
            rank,
            parameters + buffers_of_model,
            gradients,
            optimizer,
            int(moment.activations),
            buffers,
            overhead,
            moment.name,
            tuple(sorted(((k, v) for k, v in details.items() if v), key=lambda row: -row[1])),
        )

    def _table(self, workload: Workload, mode: Recompute) -> "_Table":
        key = (id(workload), mode)
        if key not in self._tables:
            self._workloads[id(workload)] = workload
            self._tables[key] = _Table(workload, mode, self._sizes(workload, 1))
        return self._tables[key]

    def _sizes(self, workload: Workload, shard: int) -> "_Sizes":
        # The key has no microbatch size, because it does not change the parameters.
        key = (id(workload.units[0].parameters), len(workload.units), workload.sharded, shard)
        if key not in self._size_tables:
            self._workloads[id(workload)] = workload
            self._size_tables[key] = _Sizes(workload, shard)
        return self._size_tables[key]

    # -- one stage ---------------------------------------------------------------------------------

    def _replica(
        self, workload: Workload, layout: Layout, options: StepOptions, table: "_Table"
    ) -> _Moment:
        """Return the peak of a rank with one device, DDP or tp, without FSDP2's sharding."""
        units = (0, len(workload.units))
        in_buckets = layout.dp > 1 and layout.only_replicas
        whole = float(table.gradients.sum())
        accumulates = options.accumulation > 1
        moments = [table.forward_peak(units)]
        if in_buckets and not accumulates:
            # Gradients are views of the buckets, and the buckets are counted as static buffers.
            moments.append(table.backward_peak(units, fresh=False))
        else:
            moments.append(table.backward_peak(units, fresh=True))
        if accumulates:
            for later in (table.forward_peak(units), table.backward_peak(units, fresh=False)):
                moments.append(_add(later, gradients=whole))
        at_update = 0.0 if in_buckets and not accumulates else whole
        moments.append(_Moment(0.0, at_update, 0.0, "update"))
        return max(moments, key=lambda moment: moment.total)

    def _sharded(
        self,
        workload: Workload,
        layout: Layout,
        options: StepOptions,
        table: "_Table",
        sizes: "_Sizes",
    ) -> _Moment:
        """Return the peak of a rank with FSDP2, without a pipeline."""
        shard = layout.shard
        count = len(workload.units)
        blocks, others = table.blocks, table.others
        gathered, reduced = sizes.gathered, sizes.reduced
        flat = gathered if shard > 1 else np.zeros(count)
        shares = reduced / shard  # the sharded gradients
        root = float(gathered[others].sum())
        root_gradients = float(table.gradients[others].sum())
        prefetch = options.prefetch
        reshard = options.reshard is not False
        whole = float(shares.sum())
        accumulated = whole if options.accumulation > 1 else 0.0
        root_reduced = float(reduced[others].sum())
        # The last reduce-scatter of a microbatch reduces the parameters outside of blocks. Its
        # input exists until the first reduce-scatter of the next microbatch.
        previous = root_reduced if options.accumulation > 1 and shard > 1 else 0.0
        moments: list[_Moment] = []
        kept = table.kept_before((0, count))
        position = table.position
        held = 0.0  # gathered blocks that are not freed after forward
        for i in range(count):
            if i not in table.corners:
                held += 0.0 if reshard else gathered[i]
                continue
            buffers = root + held + previous
            if i in position:
                number = position[i]
                ahead = blocks[number + 1 : number + 1 + prefetch]
                buffers += gathered[i] + flat[i] + float(flat[ahead].sum())
                held += 0.0 if reshard else gathered[i]
            elif blocks and i < blocks[0]:
                buffers += float(flat[others].sum())
            elif blocks:
                buffers += flat[blocks[-1]]
            activations = kept[i] + table.forward[i]
            name = f"forward of {workload.units[i].name}"
            moments.append(_Moment(activations, accumulated, buffers, name))
        done = 0.0  # sharded gradients of this microbatch
        root_done = 0.0
        for i in reversed(range(count)):
            unit = workload.units[i]
            existing = max(accumulated, done)
            if i not in table.corners:
                done += shares[i]
                held -= 0.0 if reshard else gathered[i]
            elif i in position:
                number = position[i]
                ahead = blocks[max(0, number - prefetch) : number]
                next_flat = float(flat[ahead].sum()) if reshard else 0.0
                others_held = held - gathered[i] if not reshard else 0.0
                buffers = root + gathered[i] + next_flat + others_held + previous
                for temporary, gradients in table.points[i]:
                    moments.append(
                        _Moment(
                            kept[i] + temporary,
                            existing + root_done + gradients,
                            buffers,
                            f"backward of {unit.name}",
                        )
                    )
                temporary = table.end[i]
                moments.append(
                    _Moment(
                        kept[i] + temporary,
                        existing + root_done + table.gradients[i] + shares[i],
                        root + next_flat + others_held + reduced[i],
                        f"reduce-scatter of {unit.name}",
                    )
                )
                done += shares[i]
                previous = reduced[i] if shard > 1 else 0.0
                held -= 0.0 if reshard else gathered[i]
            else:
                for temporary, gradients in table.points[i]:
                    moments.append(
                        _Moment(
                            kept[i] + temporary,
                            existing + root_done + gradients,
                            root + held + previous,
                            f"backward of {unit.name}",
                        )
                    )
                root_done += table.gradients[i]
        moments.append(
            _Moment(
                table.end[0],
                max(accumulated, done) + root_gradients + root_reduced / shard,
                root_reduced,
                "reduce-scatter of the remaining parameters",
            )
        )
        moments.append(_Moment(0.0, whole, 0.0, "update"))
        return max(moments, key=lambda moment: moment.total)

    # -- pipelines ---------------------------------------------------------------------------------

    def _pipeline(
        self,
        layout: Layout,
        options: StepOptions,
        table: "_Table",
        sizes: "_Sizes",
        rank: int,
        held: Sequence[int],
        stages: Sequence[tuple[int, int]],
        shards: bool,
    ) -> _Moment:
        """Return the peak of a pipeline rank, over all actions of its schedule."""
        numbers = [table.stage(units) for units in stages]
        gradients = [each.gradients for each in numbers]
        buffers, reduced = 0.0, 0.0
        if shards:
            # Parameters stay gathered for all microbatches, and gradients are reduced only after
            # the last microbatch.
            for place, (start, end) in enumerate(stages):
                buffers += float(sizes.gathered[start:end].sum())
                widths = sizes.reduced[start:end]
                gradients[place] = max(gradients[place], float(widths.sum()))
                reduced = max(reduced, float(widths.max()))
        best = _Moment()
        patterns = _patterns(options.schedule, layout.pp, options.accumulation, len(held))[rank]
        for kind, place, first, in_flight, begun, waiting in patterns:
            stage = numbers[place]
            kept = existing = 0.0
            for number, each in enumerate(numbers):
                # A split backward computes the gradients of inputs first, and the gradients of
                # weights later. In between, the gradients of matrix-product outputs are kept. Their
                # size is estimated as half of the kept activations.
                kept += (in_flight[number] + 0.5 * waiting[number]) * each.kept
                existing += gradients[number] if begun[number] else 0.0
            peak = stage.forward if kind == "F" else stage.fresh if first else stage.later
            activations, complete = kept + peak.activations, existing + peak.gradients
            if activations + complete + buffers > best.total:
                best = _Moment(activations, complete, buffers, peak.name)
        if shards:
            name = "reduce-scatter after the last microbatch"
            at_end = _Moment(0.0, sum(gradients), buffers + 2 * reduced, name)
            best = max(best, at_end, key=lambda each: each.total)
        return best


@dataclass(frozen=True)
class _Stage:
    """The memory of one pipeline stage, in bytes for one microbatch.

    `fresh` is the peak of the stage's first backward, which allocates gradients. `later` is the
    peak of every later backward.
    """

    kept: float
    forward: _Moment
    fresh: _Moment
    later: _Moment
    gradients: float


class _Sizes:
    """The parameter bytes of a workload for one shard size, as arrays with one value per unit."""

    def __init__(self, workload: Workload, shard: int) -> None:
        units = workload.units
        own = [[p for p in unit.parameters if not p.sharing] for unit in units]

        def total(parameters: Sequence[Parameter]) -> int:
            return sum(stored_bytes(p, shard) for p in parameters)

        self.stored = np.array([total(each) for each in own], dtype=float)
        of_trained = [[p for p in each if p.trained] for each in own]
        self.trained = np.array([total(each) for each in of_trained], dtype=float)
        self.count = np.array([len(each) for each in of_trained])
        self.buffers = np.array([unit.buffer_bytes for unit in units], dtype=float)
        self.gathered = np.array(
            [gathered_bytes(workload, unit, shard) for unit in units], dtype=float
        )
        self.reduced = np.array([_reduce_bytes(unit, shard) for unit in units], dtype=float)
        self.tied = [
            (index, p) for index, unit in enumerate(units) for p in unit.parameters if p.sharing
        ]
        self._shard = shard
        columns = (self.stored, self.trained, self.count, self.buffers)
        totals = np.concatenate((np.zeros((1, 4)), np.cumsum(np.stack(columns, axis=1), axis=0)))
        self._sums: list[list[float]] = totals.tolist()  # entry i: sums of the units before i

    def held(
        self, workload: Workload, stages: Sequence[tuple[int, int]]
    ) -> tuple[int, int, int, int]:
        """Return the sizes of the parameters and buffers of the given stages, as four numbers.

        The numbers are the bytes of all parameters, the bytes and the number of trained parameters,
        and the bytes of buffers.
        """
        parameters = trained = buffers = 0.0
        count = 0
        for start, end in stages:
            first, last = self._sums[start], self._sums[end]
            parameters += last[0] - first[0]
            trained += last[1] - first[1]
            count += int(last[2] - first[2])
            buffers += last[3] - first[3]
        for index, parameter in self.tied:
            inside = any(start <= index < end for start, end in stages)
            names = {
                p.name
                for start, end in stages
                for u in workload.units[start:end]
                for p in u.parameters
            }
            # A tied parameter needs its own memory if the first copy is on another pipeline rank.
            if inside and parameter.sharing not in names:
                parameters += stored_bytes(parameter, self._shard)
                trained += stored_bytes(parameter, self._shard)
                count += 1
        return int(parameters), int(trained), count, int(buffers) + workload.shared_buffer_bytes


class _Table:
    """The memory of a workload's units for one recomputation mode, as arrays."""

    def __init__(self, workload: Workload, mode: Recompute, sizes: "_Sizes") -> None:
        memory = [unit.memory[mode] for unit in workload.units]
        self.names = [unit.name for unit in workload.units]
        self.kept = np.array([each.kept for each in memory], dtype=float)
        self.forward = np.array([each.forward_peak for each in memory], dtype=float)
        self.points = [each.backward_peaks for each in memory]
        self.end = np.array([each.backward_peaks[-1][0] for each in memory], dtype=float)
        width = max(len(points) for points in self.points)
        self._temporary = np.full((len(memory), width), -np.inf)
        self._complete = np.zeros((len(memory), width))
        for index, points in enumerate(self.points):
            for place, (temporary, complete) in enumerate(points):
                self._temporary[index, place] = temporary
                self._complete[index, place] = complete
        self.gradients = np.array(sizes.trained)
        if workload.sharded:
            for index, unit in enumerate(workload.units):
                if unit.is_block:
                    self.gradients[index] = sum(
                        block_bytes(p.elements * width_of(unit, p, workload))
                        for p in unit.parameters
                        if p.trained and not p.sharing
                    )
        self.blocks = [i for i, unit in enumerate(workload.units) if unit.is_block]
        self.position = {unit: number for number, unit in enumerate(self.blocks)}
        self.others = [i for i in range(len(memory)) if i not in self.position]
        # In a sequence of equal blocks, memory is a linear function of the block index, so the peak
        # is at one end of the sequence. `corners` has the units at these ends and all other units.
        last = len(memory) - 1
        self.corners = {
            i
            for i in range(len(memory))
            if i not in self.position
            or not 2 <= i <= last - 2
            or any(memory[i + step] is not memory[i] for step in (-2, -1, 1, 2))
        }
        self._outputs = float(workload.units[-1].output_bytes)
        self._stages: dict[tuple[int, int], _Stage] = {}

    def stage(self, units: tuple[int, int]) -> _Stage:
        """Return the memory of a pipeline stage."""
        if units not in self._stages:
            # The schedule keeps the outputs of the last stage until their backward has ended.
            outputs = self._outputs if units[1] == len(self.names) else 0.0
            self._stages[units] = _Stage(
                float(self.kept[units[0] : units[1]].sum()) + outputs,
                self.forward_peak(units),
                _add(self.backward_peak(units, fresh=True), activations=outputs),
                _add(self.backward_peak(units, fresh=False), activations=outputs),
                float(self.gradients[units[0] : units[1]].sum()),
            )
        return self._stages[units]

    def kept_before(self, units: tuple[int, int]) -> np.ndarray:
        """Return, for every unit of a stage, the bytes that the earlier units of the stage keep."""
        part = self.kept[units[0] : units[1]]
        return np.concatenate(([0.0], np.cumsum(part)))[: len(part)]

    def forward_peak(self, units: tuple[int, int]) -> _Moment:
        """Return the peak of the forward of one microbatch."""
        totals = self.kept_before(units) + self.forward[units[0] : units[1]]
        best = int(totals.argmax())
        name = f"forward of {self.names[units[0] + best]}"
        return _Moment(float(totals[best]), 0.0, 0.0, name)

    def backward_peak(self, units: tuple[int, int], *, fresh: bool) -> _Moment:
        """Return the peak of the backward of one microbatch.

        If `fresh` is true, this backward allocates the gradients. Otherwise the gradients already
        exist, and the gradients of this microbatch are temporary until they are added.
        """
        start, end = units
        temporary = self.kept_before(units)[:, None] + self._temporary[start:end]
        complete = np.zeros_like(temporary)
        if fresh:
            later = np.concatenate((np.cumsum(self.gradients[start:end][::-1])[::-1], [0.0]))[1:]
            complete = self._complete[start:end] + later[:, None]
        best = int((temporary + complete).argmax())
        row, column = divmod(best, temporary.shape[1])
        name = f"backward of {self.names[start + row]}"
        return _Moment(float(temporary[row, column]), float(complete[row, column]), 0.0, name)


def _add(moment: _Moment, activations: float = 0.0, gradients: float = 0.0) -> _Moment:
    return _Moment(
        moment.activations + activations,
        moment.gradients + gradients,
        moment.buffers,
        moment.name,
    )


def stored_bytes(parameter: Parameter, shard: int) -> int:
    """Return the bytes of one rank's shard of a parameter. FSDP2 pads the first dim."""
    rows = -(-parameter.first_dim // shard)
    size = rows * (parameter.elements // max(1, parameter.first_dim)) * parameter.element_bytes
    return block_bytes(size)


def width_of(unit: Unit, parameter: Parameter, workload: Workload) -> int:
    """Return the bytes per element of the parameter while the unit computes."""
    narrow = workload.sharded and unit.is_block
    return min(2, parameter.element_bytes) if narrow else parameter.element_bytes


def gathered_bytes(workload: Workload, unit: Unit, shard: int) -> int:
    """Return the bytes of a unit's parameters after FSDP2's all-gather, with padding."""
    return sum(
        block_bytes(_padded(p, shard) * width_of(unit, p, workload))
        for p in unit.parameters
        if not p.sharing
    )


def _reduce_bytes(unit: Unit, shard: int) -> int:
    """Return the bytes of the input of a unit's reduce-scatter, in the dtype of the parameters."""
    return block_bytes(
        sum(
            _padded(p, shard) * p.element_bytes
            for p in unit.parameters
            if p.trained and not p.sharing
        )
    )


def _padded(parameter: Parameter, shard: int) -> int:
    """Return the number of elements of all shards together, with the padding of the first dim."""
    rows = -(-parameter.first_dim // shard) * shard
    return rows * (parameter.elements // max(1, parameter.first_dim))


def held_stages(schedule: ScheduleName, rank: int, ranks: int, per_rank: int) -> list[int]:
    """Return the stages of a pipeline rank, like `stages_of` in parallel/pipeline."""
    if schedule == "zbv":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + loop * ranks for loop in range(per_rank)]


def largest_in_flight(
    schedule: ScheduleName, ranks: int, microbatches: int, per_rank: int
) -> tuple[int, ...]:
    """Return the microbatches in flight per stage of pipeline rank 0 when their sum is largest."""
    states = _patterns(schedule, ranks, microbatches, per_rank)[0]
    counts = [
        tuple(n + (place == number) for number, n in enumerate(in_flight))
        for kind, place, _, in_flight, _, _ in states
        if kind == "F"
    ]
    return max(counts, key=sum)


_Pattern = tuple[str, int, bool, tuple[int, ...], tuple[bool, ...], tuple[int, ...]]


@lru_cache(maxsize=1024)
def _patterns(
    schedule: ScheduleName, ranks: int, microbatches: int, per_rank: int
) -> list[list[_Pattern]]:
    """Return, for every pipeline rank, the states in which its memory can be largest.

    A state describes one action of the schedule with six values. The first three are the kind of
    the action (F or B), the position of its stage among the rank's stages, and whether the action
    is the first backward of this stage. The last three have one entry for each stage of the rank:
    the number of microbatches in flight (without the microbatch of the action), whether gradients
    exist, and the number of microbatches that wait for the second half of their backward.
    """
    if schedule == "gpipe":
        full, rest = (microbatches,), (microbatches - 1,)
        states: list[_Pattern] = [
            ("F", 0, False, rest, (False,), (0,)),
            ("B", 0, True, rest, (False,), (0,)),
            ("B", 0, False, tuple(max(0, n - 2) for n in full), (True,), (0,)),
        ]
        return [states] * ranks
    found: list[list[_Pattern]] = []
    if schedule == "1f1b":
        for rank in range(ranks):
            others = (min(microbatches, ranks - rank) - 1,)
            found.append(
                [
                    ("F", 0, False, others, (microbatches > others[0] + 1,), (0,)),
                    ("B", 0, True, others, (False,), (0,)),
                    ("B", 0, False, others, (microbatches > others[0] + 1,), (0,)),
                ]
            )
        return found
    from tutti.parallel.pipeline.schedule_timeline import action_orders  # imports torch

    # After 4 × ranks microbatches, the numbers of microbatches in flight only repeat.
    count = min(microbatches, 4 * ranks)
    for rank, actions in enumerate(action_orders(schedule, ranks, count, per_rank)):
        place_of = {s: i for i, s in enumerate(held_stages(schedule, rank, ranks, per_rank))}
        in_flight, waiting = [0] * per_rank, [0] * per_rank
        begun = [False] * per_rank
        unique: set[_Pattern] = set()
        for action in actions:
            place = place_of[action.stage]
            if action.kind == "F":
                unique.add(("F", place, False, tuple(in_flight), tuple(begun), tuple(waiting)))
                in_flight[place] += 1
                continue
            in_flight[place] -= 1
            first = action.kind != "I" and not begun[place]
            unique.add(("B", place, first, tuple(in_flight), tuple(begun), tuple(waiting)))
            if action.kind == "I":
                in_flight[place] += 1
                waiting[place] += 1
            else:
                begun[place] = True
                waiting[place] -= action.kind == "W"
        found.append(_largest(unique))
    return found


def _largest(states: set[_Pattern]) -> list[_Pattern]:
    """Return the states that can need the most memory.

    A state is left out if another state has the same first three values, and at least as many
    microbatches and gradients on every stage.
    """

    kept: dict[tuple[str, int, bool], list[tuple[int, ...]]] = {}
    largest: list[_Pattern] = []
    rows = sorted(((*each[3], *each[4], *each[5]), each) for each in states)
    for counts, state in sorted(rows, key=lambda row: -sum(row[0])):
        front = kept.setdefault(state[:3], [])
        if not any(all(x >= y for x, y in zip(a, counts, strict=True)) for a in front):
            front.append(counts)
            largest.append(state)
    return largest
