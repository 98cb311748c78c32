"""Write all ranks into one trace on one clock, for ui.perfetto.dev and chrome://tracing.

An arrow leads from the rank that arrived last at a collective to each rank that waited for it.
Traces are read a second time and written event by event: memory does not grow with their size.
"""

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tutti.measure.units import format_bytes
from tutti.profile.collective_matching import MatchedCollective
from tutti.profile.communication_summary import buckets_in
from tutti.profile.explain import Explanation
from tutti.profile.rank_trace import RankTrace
from tutti.profile.trace_file import MERGED_PREFIX, Event, TraceFile

# Processes and flows (arrows) have numbers in a trace; each rank gets a separate range.
_PROCESSES_PER_RANK = 1000
_FLOWS_PER_RANK = 1 << 40
_MICROSECONDS = 1e6


def write_merged_trace(path: Path, explanation: Explanation) -> int:
    """Write the merged trace; returns the number of arrows."""
    traces = explanation.traces
    with _open_for_writing(path) as out:
        out.write(MERGED_PREFIX + ', "displayTimeUnit": "ms", "baseTimeNanoseconds": ')
        out.write(f'{traces[0].base_ns}, "traceEvents": [\n')
        out.write('{"ph": "M", "name": "tutti", "pid": 0, "tid": 0, "args": {}}')
        movers: dict[int, _RankMover] = {}
        for trace, clock in zip(traces, explanation.clocks, strict=True):
            shift = (trace.base_ns - traces[0].base_ns) / 1e9 + clock.applied_s
            mover = movers[trace.rank] = _RankMover(trace, shift * _MICROSECONDS)
            for event in TraceFile(trace.path).events():
                mover.move(event)
                out.write(",\n" + json.dumps(event))
            for event in (*_bucket_events(trace, mover), *mover.process_names()):
                out.write(",\n" + json.dumps(event))
        arrows = 0
        for number, collective in enumerate(explanation.matched):
            for event in _arrow_events(number, collective, movers):
                out.write(",\n" + json.dumps(event))
                arrows += event["ph"] == "f"
        out.write("\n]}\n")
    return arrows


class _RankMover:
    """Moves a rank's events to the common clock and to the rank's range of process numbers."""

    def __init__(self, trace: RankTrace, shift: float) -> None:
        self._rank = trace.rank
        self._host = trace.host
        self._shift = shift
        self._numbers: dict[Any, int] = {}
        self._labels: dict[Any, str] = {}

    def process(self, given: Any) -> int:
        number = self._numbers.setdefault(given, len(self._numbers))
        return (self._rank + 1) * _PROCESSES_PER_RANK + number

    def move(self, event: Event) -> None:
        given = event.get("pid", 0)
        if event.get("ph") == "M" and event.get("name") == "process_labels":
            self._labels[given] = str(event.get("args", {}).get("labels", ""))
        event["pid"] = self.process(given)
        if event.get("name") == "process_sort_index":
            event["args"] = {"sort_index": event["pid"]}
        if event.get("name") == "process_name":
            event["args"] = {"name": self._name(given)}
        if "ts" in event:
            event["ts"] = event["ts"] + self._shift
        if isinstance(event.get("id"), int):
            event["id"] += (self._rank + 1) * _FLOWS_PER_RANK

    def process_names(self) -> Iterator[Event]:
        """Events that name all processes; written last, they override the names in the trace."""
        for given in self._numbers:
            event = {"ph": "M", "name": "process_name", "pid": self.process(given), "tid": 0}
            yield event | {"args": {"name": self._name(given)}}

    def _name(self, given: Any) -> str:
        label = self._labels.get(given, "" if isinstance(given, int) else str(given))
        return f"rank {self._rank} {label} {self._host}".replace("  ", " ").strip()


def _bucket_events(trace: RankTrace, mover: _RankMover) -> Iterator[Event]:
    """A row for each DDP bucket: a slice from ready to done, and one from started to done in it.

    Buckets overlap, so they are written as asynchronous slices with an id, not as slices of a
    thread.
    """
    identity = (trace.rank + 1) * _FLOWS_PER_RANK
    for step in trace.steps:
        for index, each in enumerate(buckets_in(trace, step)):
            assert each.bucket_ready is not None
            identity += 1
            name = f"bucket {index}, {format_bytes(each.bytes)}"
            common = {"cat": "DDP bucket", "id": identity}
            common |= {"pid": mover.process("DDP buckets"), "tid": index}
            for phase, title, moment in (
                ("b", name, each.bucket_ready),
                ("b", "transfer", each.transfer_start),
                ("e", "transfer", each.end),
                ("e", name, each.end),
            ):
                yield {"ph": phase, "name": title, "ts": moment * _MICROSECONDS} | common


def _arrow_events(
    number: int, collective: MatchedCollective, movers: dict[int, _RankMover]
) -> Iterator[Event]:
    late = collective.last_rank
    source = collective.members[late]
    for position, (rank, each) in enumerate(collective.members.items()):
        if rank == late:
            continue
        # Flow ids beyond the ranges of all ranks.
        identity = (len(movers) + max(movers) + 2) * _FLOWS_PER_RANK + number * 4096 + position
        begin = source.start * _MICROSECONDS
        # An arrow must end inside the slice to which it points, and not before the arrow begins.
        finish = max(begin, each.transfer_start * _MICROSECONDS)
        finish = min(finish, each.end * _MICROSECONDS)
        common = {"cat": "tutti", "name": f"{each.operation} waits for rank {late}", "id": identity}
        for phase, one, on_rank, moment in (
            ("s", source, late, min(begin, finish)),
            ("f", each, rank, finish),
        ):
            event = common | {"ph": phase, "pid": movers[on_rank].process(one.process)}
            event |= {"tid": one.thread, "ts": moment}
            yield event | ({"bp": "e"} if phase == "f" else {})


def _open_for_writing(path: Path) -> io.TextIOBase:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        return gzip.open(path, "wt", encoding="utf-8", compresslevel=3)
    return open(path, "w", encoding="utf-8")
