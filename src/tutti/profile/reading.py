"""Reads the trace of one rank, once from end to end.

With kernels in it, the device's time is explained: kernels compute, those of NCCL and of symmetric
memory communicate, and so does gloo on the host meanwhile. Without, the host's: operators compute,
whatever calls them (autograd's engine, DDP's reducer) is the rest. A gigabyte of events becomes
intervals, steps and communications.
"""

import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from tutti.profile.backward import Backward
from tutti.profile.collective import Collective, from_parameters, operation_named
from tutti.profile.intervals import NEVER, Gathering
from tutti.profile.kernels import Kernels
from tutti.profile.pairing import Span, Tagged, carried_out, fill_from_tag, pair
from tutti.profile.rank_trace import RankTrace, Step
from tutti.profile.trace_file import Event, TraceFile
from tutti.profile.work import products, threads

# These call operators, and wait for communication while doing so: their time is not compute.
_WRAPPERS = ("autograd::engine::", "torch::autograd::", "torch::distributed::", "torch.distributed")
# Of an event's arguments, what communication is recognised by: a trace has many events.
_KEPT = {
    *("Input Dims", "Input type", "Concrete Inputs", "Collective name", "Process Group Name"),
    *("dtype", "In msg nelems", "Out msg nelems", "Seq", "Group size", "Process Group Ranks"),
    *("Dst Rank", "Src Rank", "External id"),
}
_NCCL = ("nccl", "rccl", "hccl")
# torch's kernels on symmetric memory, which wait for the other ranks by themselves.
_SYMMETRIC = re.compile(r"(one_shot|two_shot|multimem)_(\w+_)?(all_reduce|all_gather|reduce)")


def read_rank(path: Path) -> RankTrace:
    """Read one file."""
    file = TraceFile(path)
    reading = _Reading()
    for event in file.events():
        reading.take(event)
    return reading.finish(file)


class _Reading:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.first, self.last = float("inf"), float("-inf")
        self.copies, self.input = Gathering(), Gathering()
        # By thread: what computes, what communicates, what calls either.
        self.operators: dict[Any, Gathering] = defaultdict(Gathering)
        self.talking: dict[Any, Gathering] = defaultdict(Gathering)
        self.wrappers = Gathering()
        self.runs = Gathering()
        self.collectives: list[Collective] = []
        self.by_kernel: dict[int, Collective] = {}
        self.calls: list[Span] = []
        self.ran: list[Span] = []
        self.parameters: list[Span] = []
        self.tags: list[Tagged] = []
        self.kernel_of: dict[Any, Collective] = {}  # by the number of the operator it belongs to
        self.backward = Backward()
        self.kernels = Kernels()
        self.memory = 0
        self.has_loader_workers = False
        self.work = 0.0

    def take(self, event: Event) -> None:
        phase = event.get("ph")
        if phase == "i" and event.get("name") == "[memory]":
            said = event.get("args", {})
            if said.get("Device Type", 0) != 0:  # 0 is the CPU's allocator
                self.memory = max(self.memory, int(said.get("Total Allocated", 0)))
            return
        category = event.get("cat")
        if phase != "X" or category is None or "dur" not in event:
            return
        start = float(event["ts"]) / 1e6
        end = start + float(event["dur"]) / 1e6
        if category in ("cuda_runtime", "cuda_driver"):
            if "Launch" in event["name"]:
                number = int(event.get("args", {}).get("correlation", 0))
                self.kernels.launch(number, start, event.get("tid"))
            return
        if category == "cpu_op":
            self._operator(event, start, end)
        elif category == "user_annotation":
            self._annotation(event, start, end)
        elif category == "kernel":
            self._kernel(event, start, end)
        elif category in ("gpu_memcpy", "gpu_memset"):
            self.copies.add(start, end)
        else:
            return
        self.first, self.last = min(self.first, start), max(self.last, end)

    def _kernel(self, event: Event, start: float, end: float) -> None:
        name, said = str(event["name"]), event.get("args", {})
        nccl = name.lower().startswith(_NCCL) or "ncclKernel" in name or "ncclDevKernel" in name
        talks = nccl or _SYMMETRIC.search(name) is not None
        place = event.get("pid"), event.get("tid")
        index = self.kernels.ran(int(said.get("correlation", -1)), start, end, not talks, place)
        if not talks:
            self.work += threads(said)
            return
        made = Collective(
            operation_named(name) or "other", start, start, end, event.get("tid"), event.get("pid")
        )
        from_parameters(said, made)
        self.collectives.append(made)
        self.by_kernel[index] = made
        if nccl and (number := said.get("External id")) is not None:
            self.kernel_of[number] = made

    def _operator(self, event: Event, start: float, end: float) -> None:
        name, thread = str(event["name"]), event.get("tid")
        if name == "record_param_comms":
            self.parameters.append(_span("", event, start, end))
        elif name.startswith("c10d::"):
            if (operation := operation_named(name[6:])) is not None:
                self.calls.append(_span(operation, event, start, end))
            self.talking[thread].add(start, end)
        elif name.startswith("_c10d_functional::"):
            self.talking[thread].add(start, end)
        elif name.startswith(_WRAPPERS) or re.fullmatch(r"\w+Backward\d*", name):
            self.wrappers.add(start, end)
            self.backward.function(name, thread, start, end)
        else:
            self.operators[thread].add(start, end)
            self.work += products(name, event.get("args", {}))

    def _annotation(self, event: Event, start: float, end: float) -> None:
        name = str(event["name"])
        if name.startswith("ProfilerStep#"):
            self.steps.append(Step(int(name[13:]), start, end))
        elif name.startswith(("gloo:", "shm:")):
            operation = operation_named(name.partition(":")[2])
            if operation is not None:
                self.ran.append(_span(operation, event, start, end))
                self.runs.add(start, end)
        elif name.startswith(("enumerate(DataLoader)", "tutti.input")):
            self.input.add(start, end)
            self.has_loader_workers |= "_MultiProcessing" in name
        elif name.startswith("tutti::"):
            # Imports torch, so only for traces that have them.
            from tutti.comm.operation import parse_tag

            if (tag := parse_tag(name)) is not None:
                self.talking[event.get("tid")].add(start, end)
                operation = operation_named(tag.operation) or tag.operation
                self.tags.append(Tagged(_span(operation, event, start, end), tag))

    def finish(self, file: TraceFile) -> RankTrace:
        about = file.metadata
        ours, world = about.get("tutti") or {}, about.get("distributedInfo") or {}
        base = int(about.get("baseTimeNanoseconds") or 0)
        notes = []
        if file.cut_short:
            notes.append(f"{file.path.name} ends in the middle: what there is was read")
        groups = {str(each["pg_name"]): each for each in world.get("pg_config") or []}
        size = int(ours.get("world_size", world.get("world_size", 1)))
        talking = NEVER
        for gathering in self.talking.values():
            talking |= gathering.times()
        loading = self.input.times()
        recorded = [
            ((int(entry["created_ns"]) - base) / 1e9, str(entry["group"]), int(entry["seq"]))
            for entry in ours.get("recorder") or []
        ]
        calls, tags = self.calls, self.tags
        if self.kernels:
            self._tag_kernels()
            nccl = [s for s in self.parameters if s.arguments.get("External id") in self.kernel_of]
            calls, tags = carried_out(calls, nccl, self.ran, tags)
            compute = self.kernels.times(computing=True)
            communication = self.kernels.times(computing=False) | self.runs.times()
            other = self.copies.times()
        else:
            compute = NEVER
            for thread, operators in self.operators.items():
                mine = operators.times()
                if thread in self.talking:
                    mine -= self.talking[thread].times()
                compute |= mine
            compute -= loading  # the operators of a loader prepare input
            communication = self.runs.times() | talking
            other = self.wrappers.times()
        self.collectives += pair(
            calls,
            self.ran,
            self.parameters,
            tags,
            recorded,
            lambda group: int(groups.get(group, {}).get("pg_size", size)),
            self.backward.accumulates,
        )
        self.collectives.sort(key=lambda each: each.start)
        # The profiler closes a step that the program did not finish, with whatever came after.
        if (finished := ours.get("steps")) is not None:
            self.steps = [step for step in self.steps if step.number < finished]
        self.steps.sort(key=lambda step: step.start)
        for step in self.steps:
            step.gradients = self.backward.gradients(step.start, step.end)
        if self.kernels:
            self._to_the_device()
        if not self.steps and self.last > self.first:
            self.steps = [Step(0, self.first, self.last)]
            notes.append(f"{file.path.name} has no steps: it is explained as one")
        rank = ours.get("rank", world.get("rank"))
        if rank is None:
            number = re.search(r"rank[-_]?(\d+)", file.path.name)
            rank = int(number[1]) if number else -1
        return RankTrace(
            path=file.path,
            rank=int(rank),
            world_size=size,
            backend=str(world.get("backend", ours.get("backend", "unknown"))),
            host=str(about.get("host_name") or ours.get("host", "")),
            base_ns=base,
            on_device=bool(self.kernels),
            steps=self.steps,
            compute=compute,
            communication=communication,
            input=loading,
            other=other,
            collectives=self.collectives,
            groups=groups,
            memory_bytes=max(self.memory, ours.get("device_memory_bytes") or 0) or None,
            host_memory_bytes=ours.get("host_memory_bytes"),
            device_bytes=_smallest(about.get("deviceProperties") or []),
            has_loader_workers=self.has_loader_workers,
            work=self.work,
            about={key: value for key, value in ours.items() if key != "recorder"},
            notes=notes,
        )

    def _tag_kernels(self) -> None:
        """What tutti.comm launches beside NCCL is one communication: a sum on symmetric memory,
        copies to it, and barriers.
        """
        parts: set[int] = set()
        for tagged in self.tags:
            span, tag = tagged.span, tagged.tag
            mine = self.kernels.launched_by(span.thread, span.start, span.end)
            known = [self.by_kernel[each] for each in mine if each in self.by_kernel]
            if not mine or any(each.group for each in known):
                continue  # NCCL's kernels say more than the range around them
            self.kernels.communicate(mine)
            if tag.phase == "wait":
                continue
            parts.update(map(id, known))
            start, end, (process, thread) = self.kernels.extent(mine)
            whole = Collective(span.operation, start, start, end, thread, process)
            fill_from_tag(whole, tag)
            self.collectives.append(whole)
        self.collectives = [each for each in self.collectives if id(each) not in parts]

    def _to_the_device(self) -> None:
        """Steps, gradients and buckets, which the host tells of, at the device's moments."""
        done = self.kernels.computed
        for said in self.parameters:
            made = self.kernel_of.get(said.arguments.get("External id"))
            if made is None or made.operation != "all_reduce":
                continue
            if self.backward.accumulates(said.thread, said.start):
                made.ready = min(done(said.start) or made.arrival, made.arrival)
        for step in self.steps:
            if step.gradients is not None:
                first, last = map(done, step.gradients)
                step.gradients = None if first is None or last is None else (first, last)
            # A step is what was launched in it, until the next one's begins.
            if (span := self.kernels.span(step.start, step.end)) is not None:
                step.start, step.end = span
        for step, following in pairwise(self.steps):
            step.end = following.start
        if self.steps:  # what was launched before the recording began says nothing of itself
            begin = self.steps[0].start
            self.collectives = [each for each in self.collectives if each.end > begin]


def _smallest(devices: list[dict[str, Any]]) -> int | None:
    sizes = [int(each["totalGlobalMem"]) for each in devices if each.get("totalGlobalMem")]
    return min(sizes, default=None)


def _span(operation: str, event: Event, start: float, end: float) -> Span:
    return Span(
        operation,
        start,
        end,
        event.get("pid"),
        event.get("tid"),
        {key: value for key, value in event.get("args", {}).items() if key in _KEPT},
    )
