"""Writes the events of all ranks into one trace with one clock, for Perfetto and chrome://tracing.

For each collective, arrows lead from the rank that arrived last to the ranks that waited for it.
Traces are read a second time and written event by event, so memory use does not grow with the size
of the traces.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tutti.measure.units import format_bytes
from tutti.profile.collective_matching import MatchedCollective
from tutti.profile.explain import Explanation
from tutti.profile.rank_trace import RankTrace
from tutti.profile.step_breakdown import buckets_in
from tutti.profile.trace_file import MERGED_PREFIX, Event, TraceFile

# A trace identifies processes and flows (arrows) by numbers. Each rank gets its own range of
# numbers of this size.
_PROCESSES_PER_RANK = 1000
_FLOWS_PER_RANK = 1 << 40
_MICROSECONDS = 1e6


def write_merged_trace(path: Path, explanation: Explanation) -> int:
    """Write the merged trace, and return the number of arrows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    out: Any = gzip.open(path, "wt", 3) if path.suffix == ".gz" else open(path, "w")  # noqa: SIM115
    arrows = 0
    with out:
        base_ns = explanation.traces[0].base_ns
        out.write(f'{MERGED_PREFIX}, "displayTimeUnit": "ms", "baseTimeNanoseconds": {base_ns}, ')
        out.write('"traceEvents": [\n{"ph": "M", "name": "tutti", "pid": 0, "tid": 0, "args": {}}')
        for event in _merged_events(explanation):
            out.write(",\n" + json.dumps(event))
            arrows += event.get("cat") == "tutti" and event["ph"] == "f"
        out.write("\n]}\n")
    return arrows


def _merged_events(explanation: Explanation) -> Iterator[Event]:
    ranks: dict[int, _RankEvents] = {}
    for trace, clock in zip(explanation.traces, explanation.clocks, strict=True):
        shift = (trace.base_ns - explanation.traces[0].base_ns) / 1e9 + clock.applied_s
        ranks[trace.rank] = _RankEvents(trace, shift * _MICROSECONDS)
        yield from ranks[trace.rank].events()
    for number, collective in enumerate(explanation.matched):
        yield from _arrow_events(number, collective, ranks)


class _RankEvents:
    """A rank's events, converted to the common clock and the rank's range of process numbers."""

    def __init__(self, trace: RankTrace, shift: float) -> None:
        self._trace, self._shift = trace, shift
        self._processes: dict[Any, int] = {}  # process of the rank → number in the merged trace
        self._labels: dict[Any, str] = {}

    def process(self, original: Any) -> int:
        first = (self._trace.rank + 1) * _PROCESSES_PER_RANK
        return self._processes.setdefault(original, first + len(self._processes))

    def events(self) -> Iterator[Event]:
        for event in TraceFile(self._trace.path).events():
            self._move(event)
            yield event
        yield from self._bucket_events()
        # These names are written last, so that they override the names in the trace.
        for original, number in self._processes.items():
            event = {"ph": "M", "name": "process_name", "pid": number, "tid": 0}
            yield event | {"args": {"name": self._process_name(original)}}

    def _move(self, event: Event) -> None:
        original, name = event.get("pid", 0), event.get("name")
        event["pid"] = self.process(original)
        if event.get("ph") == "M" and name == "process_labels":
            self._labels[original] = str(event.get("args", {}).get("labels", ""))
        if name == "process_sort_index":
            event["args"] = {"sort_index": event["pid"]}
        if name == "process_name":
            event["args"] = {"name": self._process_name(original)}
        if "ts" in event:
            event["ts"] += self._shift
        if isinstance(event.get("id"), int):
            event["id"] += (self._trace.rank + 1) * _FLOWS_PER_RANK

    def _process_name(self, original: Any) -> str:
        label = self._labels.get(original, "" if isinstance(original, int) else str(original))
        return f"rank {self._trace.rank} {label} {self._trace.host}".replace("  ", " ").strip()

    def _bucket_events(self) -> Iterator[Event]:
        """Yield the DDP buckets as asynchronous slices in separate rows, because buckets
        overlap."""
        identity = (self._trace.rank + 1) * _FLOWS_PER_RANK
        for step in self._trace.steps:
            for index, bucket in enumerate(buckets_in(self._trace, step)):
                assert bucket.bucket_ready is not None
                identity += 1
                name = f"bucket {index}, {format_bytes(bucket.bytes)}"
                common = {"cat": "DDP bucket", "id": identity}
                common |= {"pid": self.process("DDP buckets"), "tid": index}
                for phase, title, moment in (
                    ("b", name, bucket.bucket_ready),
                    ("b", "transfer", bucket.transfer_start),
                    ("e", "transfer", bucket.end),
                    ("e", name, bucket.end),
                ):
                    yield {"ph": phase, "name": title, "ts": moment * _MICROSECONDS} | common


def _arrow_events(
    number: int, collective: MatchedCollective, ranks: dict[int, _RankEvents]
) -> Iterator[Event]:
    late = collective.last_rank
    source = collective.members[late]
    for position, (rank, waiter) in enumerate(collective.members.items()):
        if rank == late:
            continue
        # An arrow must end inside the slice to which it points, and must not end before its start.
        finish = min(max(source.start, waiter.transfer_start), waiter.end)
        common: Event = {"cat": "tutti", "name": f"{waiter.operation} waits for rank {late}"}
        # The flow ids of arrows are above the ranges of all ranks.
        common["id"] = (len(ranks) + max(ranks) + 2) * _FLOWS_PER_RANK + number * 4096 + position
        for phase, member, member_rank, moment in (
            ({"ph": "s"}, source, late, min(source.start, finish)),
            ({"ph": "f", "bp": "e"}, waiter, rank, finish),
        ):
            event = common | phase | {"pid": ranks[member_rank].process(member.process)}
            yield event | {"tid": member.thread, "ts": moment * _MICROSECONDS}
