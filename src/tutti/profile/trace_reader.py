"""Reads the trace of one rank in one pass, and converts events to intervals, steps and collectives.

If the trace has GPU kernels, the kernels determine the parts of a step: NCCL kernels and
symmetric-memory kernels count as communication, and all other kernels count as compute. gloo
operations on the host also count as communication. If the trace has no GPU kernels, host events
determine the parts: operators count as compute, and the code that calls operators (autograd's
engine, DDP's reducer) counts as `other`.
"""

import math
import re
from array import array
from collections import defaultdict
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.profile.host_collectives import (
    HostEvent,
    assemble_collectives,
    calls_without_kernels,
    fill_from_tag,
)
from tutti.profile.rank_trace import (
    EMPTY,
    Collective,
    Floats,
    IntervalCollector,
    Intervals,
    RankTrace,
    SpanCollector,
    Step,
    merge,
    operation_named,
)
from tutti.profile.trace_file import Event, TraceFile

# Events with these names call operators and may wait for communication, so their own time does not
# count as compute.
_WRAPPERS = ("autograd::engine::", "torch::autograd::", "torch::distributed::", "torch.distributed")
_REDUCER = ("torch.distributed.ddp.reducer::", "torch::distributed::reducer::")
# The event arguments that are kept. The other arguments are dropped to save memory.
_KEPT_ARGUMENTS = {
    "Input Dims",
    "Input type",
    "Concrete Inputs",
    "Collective name",
    "Process Group Name",
    "Process Group Ranks",
    "dtype",
    "In msg nelems",
    "Out msg nelems",
    "Seq",
    "Group size",
    "Dst Rank",
    "Src Rank",
    "External id",
}
_NCCL_KERNEL = re.compile(r"(?i:^[nrh]ccl)|nccl(Dev)?Kernel")
# torch's symmetric-memory kernels. They wait for the other ranks inside the kernel.
_SYMMETRIC_KERNEL = re.compile(
    r"(one_shot|two_shot|multimem)_(\w+_)?(all_reduce|all_gather|reduce)"
)
# Operators whose shapes determine the amount of computation.
_MATRIX_OPERATORS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::convolution",
    "aten::convolution_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}


def read_rank(path: Path) -> RankTrace:
    """Return the content of one trace file."""
    file = TraceFile(path)
    reader = _TraceReader()
    for event in file.events():
        reader.add(event)
    return reader.finish(file)


class _TraceReader:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        # The program's record_function ranges by (thread, name without digits). They define the
        # steps if the trace has no ProfilerStep ranges.
        self.ranges: dict[tuple[Any, str], list[tuple[float, float]]] = defaultdict(list)
        self.first, self.last = float("inf"), float("-inf")
        self.copies, self.input = IntervalCollector(), IntervalCollector()
        # The operators that compute and the calls that communicate, for each thread.
        self.operators: dict[Any, IntervalCollector] = defaultdict(IntervalCollector)
        self.comm_calls: dict[Any, IntervalCollector] = defaultdict(IntervalCollector)
        # The named spans of the operators, and of the kernels that compute.
        self.operator_spans, self.kernel_spans = SpanCollector(), SpanCollector()
        self.operator_starts = array("d")  # the start of each recorded operator
        self.wrappers, self.host_transfers = IntervalCollector(), IntervalCollector()
        self.collectives: list[Collective] = []
        self.collective_of_kernel: dict[int, Collective] = {}  # keys are kernel indices
        self.collective_of_operator: dict[Any, Collective] = {}  # keys are External ids (NCCL)
        self.calls: list[HostEvent] = []  # c10d:: operators
        self.backend_spans: list[HostEvent] = []  # gloo:* and shm:* events
        self.param_comms_events: list[HostEvent] = []  # record_param_comms events
        self.comm_ranges: list[HostEvent] = []  # tutti::* events
        self.engine = IntervalCollector()  # time in autograd's evaluate_function
        # The time in AccumulateGrad, for each thread.
        self.accumulating: dict[Any, IntervalCollector] = defaultdict(IntervalCollector)
        self.accumulated = array("d")  # the end of each AccumulateGrad
        self.reducer: dict[str, IntervalCollector] = defaultdict(IntervalCollector)
        self.kernels = _Kernels()
        self.memory = 0
        self.has_loader_workers = False
        self.of_tutti_train = False
        self.compute_estimate = 0.0

    def add(self, event: Event) -> None:
        phase = event.get("ph")
        if phase == "i" and event.get("name") == "[memory]":
            arguments = event.get("args", {})
            if arguments.get("Device Type", 0) != 0:  # 0 is the CPU allocator
                self.memory = max(self.memory, int(arguments.get("Total Allocated", 0)))
            return
        category = event.get("cat")
        if phase != "X" or category is None or "dur" not in event:
            return
        start = float(event["ts"]) / 1e6
        end = start + float(event["dur"]) / 1e6
        if category in ("cuda_runtime", "cuda_driver"):
            if "Launch" in event["name"]:
                correlation = int(event.get("args", {}).get("correlation", 0))
                self.kernels.add_launch(correlation, start, event.get("tid"))
            return
        if category == "cpu_op":
            self._add_operator(event, start, end)
        elif category == "user_annotation":
            self._add_annotation(event, start, end)
        elif category == "kernel":
            self._add_kernel(event, start, end)
        elif category in ("gpu_memcpy", "gpu_memset"):
            self.copies.add(start, end)
        else:
            return
        self.first, self.last = min(self.first, start), max(self.last, end)

    def _add_kernel(self, event: Event, start: float, end: float) -> None:
        name, arguments = str(event["name"]), event.get("args", {})
        is_nccl = _NCCL_KERNEL.search(name) is not None
        communicates = is_nccl or _SYMMETRIC_KERNEL.search(name) is not None
        process, thread = event.get("pid"), event.get("tid")
        index = self.kernels.add_kernel(
            int(arguments.get("correlation", -1)), start, end, not communicates, (process, thread)
        )
        if not communicates:
            self.kernel_spans.add(name, start, end, (process, thread))
            grid, block = arguments.get("grid") or [0], arguments.get("block") or [0]
            self.compute_estimate += math.prod(grid) * math.prod(block)
            return
        operation = operation_named(name) or "other"
        collective = Collective(operation, start, start, end, thread, process)
        collective.fill_from_arguments(arguments)
        self.collectives.append(collective)
        self.collective_of_kernel[index] = collective
        if is_nccl and (external_id := arguments.get("External id")) is not None:
            self.collective_of_operator[external_id] = collective

    def _add_operator(self, event: Event, start: float, end: float) -> None:
        name, thread = str(event["name"]), event.get("tid")
        self.operator_starts.append(start)
        if name == "record_param_comms":
            self.param_comms_events.append(_host_event("", event, start, end))
        elif name.startswith("c10d::"):
            if (operation := operation_named(name[6:])) is not None:
                self.calls.append(_host_event(operation, event, start, end))
            self._add_comm_call(thread, start, end)
        elif name.startswith("_c10d_functional::"):
            self._add_comm_call(thread, start, end)
        elif name.startswith(_WRAPPERS) or re.fullmatch(r"\w+Backward\d*", name):
            self.wrappers.add(start, end)
            if name.startswith("autograd::engine::evaluate_function"):
                self.engine.add(start, end)
                if name.endswith("AccumulateGrad"):
                    self.accumulating[thread].add(start, end)
                    self.accumulated.append(end)
            elif name.startswith(_REDUCER):
                self.reducer[name.rpartition("::")[2]].add(start, end)
        else:
            self.operators[thread].add(start, end)
            self.operator_spans.add(name, start, end, thread)
            self.compute_estimate += _multiplications(name, event.get("args", {}))

    def _add_comm_call(self, thread: Any, start: float, end: float) -> None:
        self.comm_calls[thread].add(start, end)
        self.operator_spans.add("", start, end, thread)

    def _add_annotation(self, event: Event, start: float, end: float) -> None:
        name = str(event["name"])
        if name.startswith("ProfilerStep#"):
            self.steps.append(Step(int(name[13:]), start, end))
        elif name.startswith(("gloo:", "shm:")):
            if (operation := operation_named(name.partition(":")[2])) is not None:
                self.backend_spans.append(_host_event(operation, event, start, end))
                self.host_transfers.add(start, end)
        elif name.startswith(("enumerate(DataLoader)", "tutti.input")):
            self.input.add(start, end)
            self.has_loader_workers |= "_MultiProcessing" in name
            self.of_tutti_train |= name.startswith("tutti.input")
        elif name.startswith("tutti::"):
            # tutti.comm.operation imports torch, so it is imported only for traces with such
            # ranges.
            from tutti.comm.operation import parse_tag

            if (tag := parse_tag(name)) is not None:
                self._add_comm_call(event.get("tid"), start, end)
                operation = operation_named(tag.operation) or tag.operation
                self.comm_ranges.append(_host_event(operation, event, start, end, tag))
        else:
            self.ranges[event.get("tid"), re.sub(r"\d+", "", name)].append((start, end))

    def finish(self, file: TraceFile) -> RankTrace:
        metadata = file.metadata
        captured, world = metadata.get("tutti") or {}, metadata.get("distributedInfo") or {}
        base_ns = int(metadata.get("baseTimeNanoseconds") or 0)
        notes: list[str] = []
        if file.truncated:
            notes.append(f"{file.path.name} is truncated. The events before its end were used.")
        groups = {str(group["pg_name"]): group for group in world.get("pg_config") or []}
        world_size = int(captured.get("world_size", world.get("world_size", 1)))
        loading = self.input.intervals()
        recorder = [
            ((int(entry["created_ns"]) - base_ns) / 1e9, str(entry["group"]), int(entry["seq"]))
            for entry in captured.get("recorder") or []
        ]
        calls, comm_ranges = self.calls, self.comm_ranges
        if self.kernels:
            self._combine_tagged_kernels()
            nccl = [
                event
                for event in self.param_comms_events
                if event.arguments.get("External id") in self.collective_of_operator
            ]
            calls, comm_ranges = calls_without_kernels(calls, nccl, self.backend_spans, comm_ranges)
            spans = self.kernel_spans
            compute = self.kernels.intervals(computing=True)
            communication = self.kernels.intervals(computing=False)
            communication |= self.host_transfers.intervals()
            other = self.copies.intervals()
        else:
            spans = self.operator_spans
            compute, communication = EMPTY, self.host_transfers.intervals()
            for thread, operators in self.operators.items():
                compute |= operators.intervals() - self.comm_calls[thread].intervals()
            compute -= loading  # operators inside a data loader count as input
            for comm_calls in self.comm_calls.values():
                communication |= comm_calls.intervals()
            other = self.wrappers.intervals()

        def group_size(group: str) -> int:
            return int(groups.get(group, {}).get("pg_size", world_size))

        events = (calls, self.backend_spans, self.param_comms_events, comm_ranges)
        self.collectives += assemble_collectives(
            *events, recorder, group_size, self._accumulates_gradient
        )
        self.collectives.sort(key=lambda collective: collective.start)
        if not self.steps and (range_name := self._steps_from_ranges()):
            notes.append(f"{file.path.name} has no profiler steps, so {range_name} marks the steps")
        # At the end of the recording, the profiler also writes a range for the unfinished step.
        # Drop it.
        if (finished := captured.get("steps")) is not None:
            self.steps = [step for step in self.steps if step.number < finished]
        # Operators are not recorded in timed steps, so a timed step between recorded steps has no
        # events except its step range. Drop these steps.
        if timed := set(captured.get("timed_steps") or ()):
            self.steps = [step for step in self.steps if step.number not in timed]
        self.steps.sort(key=lambda step: step.start)
        for step in self.steps:
            step.gradients = self._gradients(step.start, step.end)
            engine = self.engine.intervals().between(step.start, step.end)
            step.backward_start = float(engine.starts[0]) if len(engine.starts) else None
            step.accumulated = sorted(t for t in self.accumulated if step.start < t <= step.end)
        if self.kernels:
            self._move_to_device_time()
        if not self.steps and self.last > self.first:
            self.steps = [Step(0, self.first, self.last)]
            notes.append(f"{file.path.name} has no steps. The whole trace counts as one step.")
        rank = captured.get("rank", world.get("rank"))
        if rank is None:
            number = re.search(r"rank[-_]?(\d+)", file.path.name)
            rank = int(number[1]) if number else -1
        devices = metadata.get("deviceProperties") or []
        memories = [int(d["totalGlobalMem"]) for d in devices if d.get("totalGlobalMem")]
        return RankTrace(
            path=file.path,
            rank=int(rank),
            world_size=world_size,
            backend=str(world.get("backend", captured.get("backend", "unknown"))),
            host=str(metadata.get("host_name") or captured.get("host", "")),
            base_ns=base_ns,
            on_device=bool(self.kernels),
            steps=self.steps,
            compute=compute,
            communication=communication,
            input=loading,
            other=other,
            operators=spans.spans(without=loading),
            collectives=self.collectives,
            groups=groups,
            memory_bytes=max(self.memory, captured.get("device_memory_bytes") or 0) or None,
            host_memory_bytes=captured.get("host_memory_bytes"),
            memory=captured.get("memory"),
            device_bytes=min(memories, default=None),
            has_loader_workers=self.has_loader_workers,
            of_tutti_train=self.of_tutti_train,
            compute_estimate=self.compute_estimate,
            operators_in_input=self._share_inside(loading),
            capture_info={key: value for key, value in captured.items() if key != "recorder"},
            notes=notes,
            reducer={name: found.intervals() for name, found in self.reducer.items()},
        )

    def _share_inside(self, intervals: Intervals) -> float:
        """Return the share of operators that start inside these intervals."""
        if not self.operator_starts:
            return 0.0
        return float(np.mean(intervals.contains(np.array(self.operator_starts))))

    def _steps_from_ranges(self) -> str | None:
        """Make steps from a range name that occurs at least three times. Return the name, or None.

        A step ends with each `Optimizer.step`. If the trace has no optimizer, the range name with
        the longest total time is chosen, for example `DistributedDataParallel.forward`, and each
        range of this name begins a step.
        """
        repeated = {name: times for (_, name), times in self.ranges.items() if len(times) > 2}
        optimizers = {n: t for n, t in repeated.items() if n.startswith("Optimizer.step#")}
        found = optimizers or repeated
        if not found:
            return None
        name = max(found, key=lambda name: sum(end - start for start, end in found[name]))
        moments = sorted(end if optimizers else start for start, end in found[name])
        self.steps = [Step(n, *times) for n, times in enumerate(pairwise(moments))]
        return name

    def _combine_tagged_kernels(self) -> None:
        """Combine the kernels of each tutti.comm call into one collective, except NCCL kernels.

        With symmetric memory, one call launches several kernels: a reduction, copies and barriers.
        """
        replaced: set[int] = set()
        kernels = self.kernels
        for event in self.comm_ranges:
            launched = kernels.launched_by(event.thread, event.start, event.end)
            collectives = list(filter(None, map(self.collective_of_kernel.get, launched)))
            if not launched or any(collective.group for collective in collectives):
                continue  # an NCCL kernel event has more information than the tutti.comm range
            for index in launched:
                kernels.computes[index] = False
            if event.tag.phase == "wait":
                continue
            replaced.update(map(id, collectives))
            start = min(kernels.start[index] for index in launched)
            last = max(launched, key=lambda index: kernels.end[index])
            process, thread = kernels.stream(last)
            end = kernels.end[last]
            combined = Collective(event.operation, start, start, end, thread, process)
            fill_from_tag(combined, event.tag)
            self.collectives.append(combined)
        self.collectives = [call for call in self.collectives if id(call) not in replaced]

    def _move_to_device_time(self) -> None:
        """Convert the times of steps, gradients and buckets from host time to device time."""
        computing_launches, _, computing_ends = self.kernels.by_launch(computing_only=True)

        def device_done(moment: float) -> float | None:
            """Return the end of all compute kernels that were launched before `moment`, or None."""
            index = int(np.searchsorted(computing_launches, moment, side="right")) - 1
            return float(computing_ends[index]) if index >= 0 else None

        for event in self.param_comms_events:
            collective = self.collective_of_operator.get(event.arguments.get("External id"))
            if collective is None or collective.operation != "all_reduce":
                continue
            if self._accumulates_gradient(event.thread, event.start):
                ready = device_done(event.start) or collective.arrival
                collective.bucket_ready = min(ready, collective.arrival)
        launches, starts, ends = self.kernels.by_launch(computing_only=False)
        for step in self.steps:
            if step.gradients is not None:
                begin, end = map(device_done, step.gradients)
                step.gradients = None if begin is None or end is None else (begin, end)
            moved = map(device_done, step.accumulated)
            step.accumulated = [moment for moment in moved if moment is not None]
            if step.backward_start is not None:
                step.backward_start = device_done(step.backward_start)
            # A step lasts from the start of its first kernel to the start of the next step.
            first = int(np.searchsorted(launches, step.start, side="left"))
            last = int(np.searchsorted(launches, step.end, side="right")) - 1
            if first <= last:
                step.start, step.end = float(starts[first]), float(ends[last])
        for step, following in pairwise(self.steps):
            step.end = following.start
        # Drop collectives that ended before the first step, because they were launched before the
        # recording began.
        if self.steps:
            first_start = self.steps[0].start
            self.collectives = [call for call in self.collectives if call.end > first_start]

    @cached_property
    def _accumulations(self) -> dict[Any, Intervals]:
        return {thread: found.intervals() for thread, found in self.accumulating.items()}

    def _accumulates_gradient(self, thread: Any, moment: float) -> bool:
        """Return whether `thread` was accumulating a gradient at `moment`.

        DDP's gradient hooks run during the accumulation, so an all-reduce at this time reduces a
        bucket.
        """
        intervals = self._accumulations.get(thread, EMPTY)
        index = int(np.searchsorted(intervals.starts, moment, side="right")) - 1
        return index >= 0 and moment <= float(intervals.ends[index])

    def _gradients(self, start: float, end: float) -> tuple[float, float] | None:
        """Return (time of the first gradient, end of backward) in [start, end), or None."""
        engine = self.engine.intervals().between(start, end)
        found = [intervals.between(start, end) for intervals in self._accumulations.values()]
        firsts = [float(intervals.starts[0]) for intervals in found if len(intervals.starts)]
        return (min(firsts), float(engine.ends[-1])) if firsts and len(engine.ends) else None


class _Kernels:
    """The kernels of a trace, and the host events that launched them.

    A kernel and its launch have the same correlation number. The host launches kernels before the
    device runs them. So work that the host launched before time t is done only when all kernels
    that were launched before t have ended. A trace may have millions of kernels, so they are stored
    in arrays.
    """

    def __init__(self) -> None:
        self._launch_number, self._launch_time = array("q"), array("d")
        self._launch_thread = array("q")
        self._number, self._stream = array("q"), array("q")
        self.start, self.end, self.computes = array("d"), array("d"), array("b")
        # The index of each host thread and of each device stream, in order of appearance.
        self._threads: dict[Any, int] = {}
        self._streams: dict[tuple[Any, Any], int] = {}

    def __len__(self) -> int:
        return len(self._number)

    def add_launch(self, number: int, moment: float, thread: Any) -> None:
        self._launch_number.append(number)
        self._launch_time.append(moment)
        self._launch_thread.append(self._threads.setdefault(thread, len(self._threads)))

    def add_kernel(
        self, number: int, start: float, end: float, computes: bool, stream: tuple[Any, Any]
    ) -> int:
        """Add a kernel and return its index. `computes` is False for communication kernels."""
        self._number.append(number)
        self.computes.append(computes)
        self.start.append(start)
        self.end.append(end)
        self._stream.append(self._streams.setdefault(stream, len(self._streams)))
        return len(self._number) - 1

    def stream(self, index: int) -> tuple[Any, Any]:
        """Return the trace's (pid, tid) of the stream on which a kernel ran."""
        return list(self._streams)[self._stream[index]]

    def launched_by(self, thread: Any, start: float, end: float) -> list[int]:
        """Return the indices of the kernels that a host thread launched in [start, end)."""
        if thread not in self._by_thread:
            return []
        moments, indices = self._by_thread[thread]
        first, last = np.searchsorted(moments, [start, end])
        return list(map(int, indices[first:last]))

    def intervals(self, computing: bool) -> Intervals:
        """Return the intervals in which compute kernels (or communication kernels) ran."""
        chosen = np.array(self.computes, dtype=bool) == computing
        return merge(np.array(self.start)[chosen], np.array(self.end)[chosen])

    def by_launch(self, computing_only: bool) -> tuple[Floats, Floats, Floats]:
        """Return (launch times, earliest starts, latest ends), ordered by launch time.

        With several streams, kernels do not start and end in the order of their launches. So for
        each kernel, the second array has the earliest start among this kernel and all kernels
        launched later. The third array has the latest end among this kernel and all kernels
        launched earlier.
        """
        kernels, launches = self._joined
        if computing_only:
            computes = np.array(self.computes, dtype=bool)[kernels]
            kernels, launches = kernels[computes], launches[computes]
        moments = np.array(self._launch_time)[launches]
        order = np.argsort(moments, kind="stable")
        starts, ends = (np.array(times)[kernels][order] for times in (self.start, self.end))
        first = np.minimum.accumulate(starts[::-1])[::-1]
        return moments[order], first, np.maximum.accumulate(ends)

    @cached_property
    def _by_thread(self) -> dict[Any, tuple[Floats, NDArray[np.int64]]]:
        """{host thread: (sorted launch times, indices of the launched kernels)}."""
        kernels, launches = self._joined
        moments, threads = np.array(self._launch_time)[launches], np.array(self._launch_thread)
        result = {}
        for thread, number in self._threads.items():
            selected = np.flatnonzero(threads[launches] == number)
            selected = selected[np.argsort(moments[selected], kind="stable")]
            result[thread] = moments[selected], kernels[selected]
        return result

    @cached_property
    def _joined(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The indices of the kernels whose launch was recorded, and the indices of their launches.

        A CUDA graph launches many kernels at once, so several kernels may share one launch. Kernels
        that were launched before the recording began have no launch event and are omitted.
        """
        by_number = np.argsort(np.array(self._launch_number))
        launch_numbers = np.array(self._launch_number, dtype=np.int64)[by_number]
        numbers = np.array(self._number, dtype=np.int64)
        index = np.searchsorted(launch_numbers, numbers)
        has_launch = index < len(launch_numbers)
        has_launch[has_launch] = launch_numbers[index[has_launch]] == numbers[has_launch]
        return np.flatnonzero(has_launch), by_number[index[has_launch]]


def _multiplications(name: str, arguments: dict[str, Any]) -> int:
    """Return the number of multiplications of a matrix operator, estimated for convolutions."""
    if name not in _MATRIX_OPERATORS:
        return 0
    dims = arguments.get("Input Dims") or []
    shapes = [d for d in dims[:3] if len(d) > 1 and all(isinstance(size, int) for size in d)]
    if len(shapes) < 2:
        return 0
    if "convolution" in name:  # elements of the first argument × weights per output channel
        return int(math.prod(shapes[0]) * math.prod(shapes[-1][1:]))
    return int(math.prod(shapes[-2]) * shapes[-1][-1])


def _host_event(
    operation: str, event: Event, start: float, end: float, tag: Any = None
) -> HostEvent:
    used = {key: value for key, value in event.get("args", {}).items() if key in _KEPT_ARGUMENTS}
    return HostEvent(operation, start, end, event.get("pid"), event.get("tid"), used, tag)
