"""On a CPU one communication leaves several events in a trace; here they become one again.

- `c10d::allreduce_`: the call, on the caller's thread. It returns at once if the call is not
  waited for; with shapes recorded it knows the size.
- `gloo:all_reduce` on a thread of gloo's, `shm:all_reduce`: how long it really took.
- `record_param_comms` within the call (shm, not gloo): group and sequence number.
- an entry of torch's flight recorder (gloo, if we captured the trace): group and sequence number.
- `tutti::all_reduce|…` around the call: all of it, if the program calls tutti.comm.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tutti.profile.collective import Collective, element_bytes, elements, from_parameters

if TYPE_CHECKING:
    from tutti.comm.operation import Tag

# gloo says all_reduce for what it builds out of all_reduce.
_RUN_AS = {"reduce_scatter": ("reduce_scatter", "all_reduce")}
_OF_SHARES = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_AT_ONCE = 64  # calls of an operation that may be under way together
_SLACK = 2e-6  # clocks of events and of the recorder are read at slightly different moments


@dataclass(slots=True)
class Span:
    """An event that has to do with communication."""

    operation: str
    start: float
    end: float
    process: Any
    thread: Any
    arguments: dict[str, Any]


@dataclass(slots=True)
class Tagged:
    """A range of tutti.comm's own, with what its name says."""

    span: Span
    tag: "Tag"


def pair(
    calls: list[Span],
    runs: list[Span],
    parameters: list[Span],
    tags: list[Tagged],
    recorded: Sequence[tuple[float, str, int]],
    ranks_of: Callable[[str], int],
    accumulates: Callable[[Any, float], bool],
) -> list[Collective]:
    """The communications of a rank's host. `recorded`: time, group, sequence."""
    for spans in (calls, runs, parameters):
        spans.sort(key=lambda span: span.start)
    tags.sort(key=lambda tagged: tagged.span.start)
    run_of = _runs_of(calls, runs)
    known = sorted(recorded)
    inner = _Within(parameters)
    outer = _Around(tags)
    result = []
    used: set[int] = set()
    position = 0
    for number, call in enumerate(calls):
        ran = run_of.get(number)
        shown = ran or call
        collective = Collective(
            operation=call.operation,
            arrival=call.start,
            start=max(shown.start, call.start),
            end=max(shown.end, call.end) if ran is None else ran.end,
            process=shown.process,
            returned=call.end,
            thread=shown.thread,
        )
        while position < len(known) and known[position][0] < call.start - _SLACK:
            position += 1
        if position < len(known) and known[position][0] <= call.end + _SLACK:
            _, collective.group, collective.sequence = known[position]
            position += 1
        if call.operation == "all_reduce" and accumulates(call.thread, call.start):
            collective.ready = call.start
        _fill_size(collective, call, ran, ranks_of(collective.group))
        if (said := inner.first_in(call)) is not None:
            size = collective.bytes
            # What the recorder saw then was gloo between the hosts, beneath shm.
            collective.sequence = None
            from_parameters(said.arguments, collective)
            collective.bytes = max(size, collective.bytes)
        if (tagged := outer.around(call)) is not None:
            used.add(id(tagged))
            fill_from_tag(collective, tagged.tag)
        result.append(collective)
    matched = {id(run) for run in run_of.values()}
    result += [_alone(run, ranks_of("")) for run in runs if id(run) not in matched]
    result += _from_tags([tagged for tagged in tags if id(tagged) not in used])
    return result


def carried_out(
    calls: list[Span], by_kernels: list[Span], runs: list[Span], tags: list[Tagged]
) -> tuple[list[Span], list[Tagged]]:
    """Of a rank with kernels: the calls that the host carried out itself, as gloo does, and the
    ranges of tutti.comm around them. `by_kernels` lie within calls that became kernels.
    """
    for spans in (calls, by_kernels, runs):
        spans.sort(key=lambda span: span.start)
    inner = _Within(by_kernels)
    calls = [call for call in calls if inner.first_in(call) is None]
    calls = [calls[number] for number in sorted(_runs_of(calls, runs))]
    inner = _Within(calls)
    tags.sort(key=lambda tagged: tagged.span.start)
    return calls, [each for each in tags if inner.first_in(each.span) is not None]


def _runs_of(calls: list[Span], runs: list[Span]) -> dict[int, Span]:
    """Which run belongs to which call: the first of its operation, of those with its size."""
    waiting: dict[str, list[int]] = defaultdict(list)
    for number, call in enumerate(calls):
        for name in _RUN_AS.get(call.operation, (call.operation,)):
            waiting[name].append(number)
    found: dict[int, Span] = {}
    for run in runs:
        queue, size = waiting[run.operation], max(_counts(run), default=0)
        fitting: list[int] = []
        while queue and queue[0] in found:
            queue.pop(0)
        for number in queue[:_AT_ONCE]:
            if calls[number].start > run.start + _SLACK:
                break
            if number not in found:
                fitting.append(number)
        if not fitting:
            continue  # it was called before the trace began
        number = next((each for each in fitting if size in _counts(calls[each])), fitting[0])
        found[number] = run
    return found


def _counts(span: Span) -> list[int]:
    """Elements of each tensor, or list of tensors, that a call was given first."""
    dims, kinds = span.arguments.get("Input Dims") or [], span.arguments.get("Input type") or []
    counts = [elements(*each) for each in zip(dims[:2], kinds[:2], strict=False)]
    return [count for count in counts if count]


def _fill_size(collective: Collective, call: Span, ran: Span | None, ranks: int) -> None:
    counts = _counts(call) or (_counts(ran) if ran else [])
    for span in (ran, call):
        for name in span.arguments.get("Input type") or [] if span else []:
            if not collective.dtype and element_bytes(str(name)):
                collective.dtype = str(name)
    collective.bytes = max(counts, default=0) * element_bytes(collective.dtype)
    if collective.operation == "barrier":
        collective.bytes, collective.dtype = 0, ""
    # Of lists of tensors only one rank's share is recorded.
    if collective.operation in _OF_SHARES and len(counts) < 2:
        collective.bytes *= ranks
    if collective.is_point_to_point:
        said = call.arguments.get("Concrete Inputs") or []
        if len(said) > 2 and str(said[2]).isdecimal():
            collective.peer = int(said[2])


def fill_from_tag(collective: Collective, tag: "Tag") -> None:
    """Fill in what a range of tutti.comm says."""
    collective.group, collective.sequence = f"tutti {tag.group}", tag.sequence
    collective.bytes, collective.dtype = tag.bytes, tag.dtype
    collective.group_size = tag.ranks


def _alone(run: Span, ranks: int) -> Collective:
    collective = Collective(run.operation, run.start, run.start, run.end, run.thread, run.process)
    _fill_size(collective, run, run, ranks)
    return collective


def _from_tags(tags: list[Tagged]) -> list[Collective]:
    """Calls that no event of torch stands for: the two halves of one become one."""
    result: list[Collective] = []
    open_: dict[tuple[str, str, int], Collective] = {}
    for tagged in tags:
        span, tag = tagged.span, tagged.tag
        key = (span.operation, tag.group, tag.sequence)
        if tag.phase == "wait":
            if key in open_:  # else its call has events of its own, or came before the trace
                open_.pop(key).end = span.end
            continue
        made = Collective(
            span.operation, span.start, span.start, span.end, span.thread, span.process
        )
        fill_from_tag(made, tag)
        if tag.phase == "issue":
            open_[key] = made
        result.append(made)
    return result


class _Within:
    """Finds the first of many spans that lies within a call, on its thread."""

    def __init__(self, spans: list[Span]) -> None:
        self._on: dict[Any, list[Span]] = defaultdict(list)
        for span in spans:
            self._on[span.thread].append(span)
        self._next: dict[Any, int] = defaultdict(int)

    def first_in(self, call: Span) -> Span | None:
        spans, position = self._on[call.thread], self._next[call.thread]
        while position < len(spans) and spans[position].start < call.start:
            position += 1
        self._next[call.thread] = position
        if position < len(spans) and spans[position].start <= call.end:
            return spans[position]
        return None


class _Around:
    """Finds the range of tutti.comm in which a call was made. Each holds one call."""

    def __init__(self, tags: list[Tagged]) -> None:
        self._on: dict[Any, list[Tagged]] = defaultdict(list)
        for tagged in tags:
            if tagged.tag.phase != "wait":
                self._on[tagged.span.thread].append(tagged)

    def around(self, call: Span) -> Tagged | None:
        tags = self._on[call.thread]
        while tags and tags[0].span.end < call.start:
            tags.pop(0)
        if tags and tags[0].span.start <= call.start:
            return tags.pop(0)
        return None
