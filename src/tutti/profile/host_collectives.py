"""Assembles each collective of a CPU rank from several trace events.

For example, an all-reduce has these events:

- the call: `c10d::allreduce_` on the caller's thread, with the message size if shapes were
  recorded. An asynchronous call (async_op=True) returns at once.
- the run: `gloo:all_reduce` on a gloo thread, or `shm:all_reduce`. It shows when the operation ran.
- the parameters (shm, not gloo): `record_param_comms` inside the call, with group and sequence
  number.
- the recorder entry (gloo, if tutti captured the trace): an entry of torch's flight recorder, with
  group and sequence number.
- the tag (if the program calls tutti.comm): `tutti::all_reduce|…` around the call, with size, group
  and sequence number. tutti.comm.operation.parse_tag reads the tag.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tutti.profile.rank_trace import Collective, element_bytes, element_count

# gloo implements reduce_scatter with all_reduce, so the run event of a reduce_scatter may have the
# name all_reduce.
_RUN_NAMES = {"reduce_scatter": ("reduce_scatter", "all_reduce")}
_SIZE_PER_RANK = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_MAX_IN_FLIGHT = 64  # maximum number of simultaneous calls of one operation
_CLOCK_TOLERANCE = 2e-6  # seconds: the profiler and the flight recorder read the clock separately


@dataclass(slots=True)
class HostEvent:
    """A host event that belongs to communication."""

    operation: str
    start: float
    end: float
    process: Any
    thread: Any
    arguments: dict[str, Any]
    # A tutti.comm.operation.Tag. The type is not imported, because its module imports torch.
    tag: Any = None


def assemble_collectives(
    calls: list[HostEvent],
    runs: list[HostEvent],
    parameters: list[HostEvent],
    tags: list[HostEvent],
    recorder: Sequence[tuple[float, str, int]],
    group_size: Callable[[str], int],
    accumulates_gradient: Callable[[Any, float], bool],
) -> list[Collective]:
    """Return the collectives that ran on the host.

    The first five arguments are the events that the module docstring describes. An entry of
    `recorder` is (time, group, sequence number).
    """
    _sort_by_start(calls, runs, parameters, tags)
    run_of_call = _match_runs(calls, runs)
    entries = sorted(recorder)
    inner = _EventsByThread(parameters)
    outer = _EventsByThread([event for event in tags if event.tag.phase != "wait"])
    result = []
    used_tags: set[int] = set()
    position = 0
    for number, call in enumerate(calls):
        run = run_of_call.get(number)
        timed = run or call
        collective = Collective(
            operation=call.operation,
            arrival=call.start,
            start=max(timed.start, call.start),
            end=timed.end,
            process=timed.process,
            call_returned=call.end,
            thread=timed.thread,
        )
        while position < len(entries) and entries[position][0] < call.start - _CLOCK_TOLERANCE:
            position += 1
        if position < len(entries) and entries[position][0] <= call.end + _CLOCK_TOLERANCE:
            _, collective.group, collective.sequence = entries[position]
            position += 1
        if call.operation == "all_reduce" and accumulates_gradient(call.thread, call.start):
            collective.bucket_ready = call.start
        _fill_size(collective, call, run, group_size(collective.group))
        if (parameter := inner.first_inside(call)) is not None:
            size = collective.bytes
            # The program called the shm backend, which may call gloo for the traffic between hosts.
            # The recorder entry belongs to this gloo call, so its sequence number is not used.
            collective.sequence = None
            collective.fill_from_arguments(parameter.arguments)
            collective.bytes = max(size, collective.bytes)
        if (tagged := outer.around(call)) is not None:
            used_tags.add(id(tagged))
            fill_from_tag(collective, tagged.tag)
        result.append(collective)
    matched = {id(run) for run in run_of_call.values()}
    for run in runs:
        if id(run) not in matched:  # the call happened before the recording began
            collective = _collective_of(run)
            _fill_size(collective, run, run, group_size(""))
            result.append(collective)
    return result + _from_tags([event for event in tags if id(event) not in used_tags])


def calls_without_kernels(
    calls: list[HostEvent],
    nccl_parameters: list[HostEvent],
    runs: list[HostEvent],
    tags: list[HostEvent],
) -> tuple[list[HostEvent], list[HostEvent]]:
    """On a rank with GPUs, return the calls that gloo ran on the host, and the tags of these calls.

    A call that contains one of the `nccl_parameters` events launched an NCCL kernel, so it is left
    out.
    """
    _sort_by_start(calls, nccl_parameters, runs, tags)
    inner = _EventsByThread(nccl_parameters)
    calls = [call for call in calls if inner.first_inside(call) is None]
    calls = [calls[number] for number in sorted(_match_runs(calls, runs))]
    inner = _EventsByThread(calls)
    return calls, [event for event in tags if inner.first_inside(event) is not None]


def _sort_by_start(*lists: list[HostEvent]) -> None:
    for events in lists:
        events.sort(key=lambda event: event.start)


def fill_from_tag(collective: Collective, tag: Any) -> None:
    """Set the fields of a collective from a tutti.comm tag."""
    collective.group, collective.sequence = f"tutti {tag.group}", tag.sequence
    collective.bytes, collective.dtype = tag.bytes, tag.dtype
    collective.group_size = tag.ranks


def _match_runs(calls: list[HostEvent], runs: list[HostEvent]) -> dict[int, HostEvent]:
    """Return {index of a call: run event of this call}.

    Each run, in time order, is matched with an earlier call of the same operation. A call with the
    same size is preferred.
    """
    waiting: dict[str, list[int]] = defaultdict(list)
    for number, call in enumerate(calls):
        for name in _RUN_NAMES.get(call.operation, (call.operation,)):
            waiting[name].append(number)
    found: dict[int, HostEvent] = {}
    for run in runs:
        queue, size = waiting[run.operation], max(_argument_counts(run), default=0)
        while queue and queue[0] in found:
            queue.pop(0)
        latest = run.start + _CLOCK_TOLERANCE
        in_flight = [n for n in queue[:_MAX_IN_FLIGHT] if calls[n].start <= latest]
        candidates = [n for n in in_flight if n not in found]
        if candidates:  # otherwise the call happened before the recording began
            same_size = (n for n in candidates if size in _argument_counts(calls[n]))
            found[next(same_size, candidates[0])] = run
    return found


def _argument_counts(event: HostEvent) -> list[int]:
    """Return the element counts of the tensors or tensor lists in the first two arguments."""
    dims, kinds = event.arguments.get("Input Dims") or [], event.arguments.get("Input type") or []
    return list(filter(None, map(element_count, dims[:2], kinds[:2])))


def _fill_size(
    collective: Collective, call: HostEvent, run: HostEvent | None, group_size: int
) -> None:
    counts = _argument_counts(call) or (_argument_counts(run) if run else [])
    for event in (run, call):
        for name in event.arguments.get("Input type") or [] if event else []:
            if not collective.dtype and element_bytes(str(name)):
                collective.dtype = str(name)
    collective.bytes = max(counts, default=0) * element_bytes(collective.dtype)
    if collective.operation == "barrier":
        collective.bytes, collective.dtype = 0, ""
    # If an argument is a list of tensors, the trace has only the size of one rank's part of the
    # message.
    if collective.operation in _SIZE_PER_RANK and len(counts) < 2:
        collective.bytes *= group_size
    if collective.is_point_to_point:
        concrete = call.arguments.get("Concrete Inputs") or []
        if len(concrete) > 2 and str(concrete[2]).isdecimal():
            collective.peer = int(concrete[2])


def _collective_of(event: HostEvent) -> Collective:
    times = (event.start, event.start, event.end)
    return Collective(event.operation, *times, event.thread, event.process)


def _from_tags(tags: list[HostEvent]) -> list[Collective]:
    """Return the collectives of tags whose calls have no torch events.

    The `issue` tag and the `wait` tag of an asynchronous call are combined into one collective.
    """
    result: list[Collective] = []
    issued: dict[tuple[str, str, int], Collective] = {}
    for event in tags:
        key = (event.operation, event.tag.group, event.tag.sequence)
        if event.tag.phase == "wait":
            if key in issued:  # otherwise the call has torch events or was not recorded
                issued.pop(key).end = event.end
            continue
        collective = _collective_of(event)
        fill_from_tag(collective, event.tag)
        if event.tag.phase == "issue":
            issued[key] = collective
        result.append(collective)
    return result


class _EventsByThread:
    """Finds the event inside or around a call on the same thread.

    The methods must be called with calls in time order, because they drop older events.
    """

    def __init__(self, events: list[HostEvent]) -> None:
        self._events: dict[Any, deque[HostEvent]] = defaultdict(deque)
        for event in events:
            self._events[event.thread].append(event)

    def first_inside(self, call: HostEvent) -> HostEvent | None:
        events = self._events[call.thread]
        while events and events[0].start < call.start:
            events.popleft()
        return events[0] if events and events[0].start <= call.end else None

    def around(self, call: HostEvent) -> HostEvent | None:
        """Return the event around the call, or None. Each event is returned only once."""
        events = self._events[call.thread]
        while events and events[0].end < call.start:
            events.popleft()
        return events.popleft() if events and events[0].start <= call.start else None
