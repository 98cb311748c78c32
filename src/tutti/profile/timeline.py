"""All ranks in one trace, on one clock, with an arrow from the rank that came last to a collective
to each that waited for it. Opens in ui.perfetto.dev and chrome://tracing.

Traces are read a second time and written as they are read: memory does not grow with them.
"""

import gzip
import io
import json
from pathlib import Path
from typing import Any

from tutti.measure.units import format_bytes
from tutti.profile.buckets import in_step
from tutti.profile.explain import Explanation
from tutti.profile.matching import Meeting
from tutti.profile.rank_trace import RankTrace
from tutti.profile.trace_file import MERGED, Event, TraceFile

# A viewer knows processes by whole numbers; each rank gets a range of its own.
_PROCESSES_PER_RANK = 1000
_FLOWS_PER_RANK = 1 << 40
_MICROSECONDS = 1e6


def write_timeline(path: Path, explanation: Explanation) -> int:
    """Write the merged trace; returns how many arrows it has."""
    traces = explanation.traces
    first = traces[0]
    with _open(path) as out:
        out.write(MERGED + ', "displayTimeUnit": "ms", "baseTimeNanoseconds": ')
        out.write(f'{first.base_ns}, "traceEvents": [\n')
        out.write('{"ph": "M", "name": "tutti", "pid": 0, "tid": 0, "args": {}}')
        places = {}
        for trace, clock in zip(traces, explanation.clocks, strict=True):
            shift = (trace.base_ns - first.base_ns) / 1e9 + clock.applied_s
            rank = _Rank(trace, shift * _MICROSECONDS)
            for event in TraceFile(trace.path).events():
                rank.move(event)
                out.write(",\n" + json.dumps(event))
            for event in _buckets(trace, rank):
                out.write(",\n" + json.dumps(event))
            for event in rank.names():
                out.write(",\n" + json.dumps(event))
            places[trace.rank] = rank
        arrows = 0
        for number, meeting in enumerate(explanation.meetings):
            for event in _arrows(number, meeting, places):
                out.write(",\n" + json.dumps(event))
                arrows += event["ph"] == "f"
        out.write("\n]}\n")
    return arrows


class _Rank:
    """Moves a rank's events to the common clock and to process numbers of its own."""

    def __init__(self, trace: RankTrace, shift: float) -> None:
        self._rank = trace.rank
        self._host = trace.host
        self._shift = shift
        self._numbers: dict[Any, int] = {}
        self._said: dict[Any, str] = {}

    def process(self, given: Any) -> int:
        number = self._numbers.setdefault(given, len(self._numbers))
        return (self._rank + 1) * _PROCESSES_PER_RANK + number

    def move(self, event: Event) -> None:
        given = event.get("pid", 0)
        if event.get("ph") == "M" and event.get("name") == "process_labels":
            self._said[given] = str(event.get("args", {}).get("labels", ""))
        event["pid"] = self.process(given)
        if event.get("name") == "process_sort_index":
            event["args"] = {"sort_index": event["pid"]}
        if event.get("name") == "process_name":
            event["args"] = {"name": self._name(given)}
        if "ts" in event:
            event["ts"] = event["ts"] + self._shift
        if isinstance(event.get("id"), int):
            event["id"] += (self._rank + 1) * _FLOWS_PER_RANK

    def names(self) -> list[Event]:
        """Names of all processes, last: they hold over what the trace itself said."""
        return [
            {
                "ph": "M",
                "name": "process_name",
                "pid": self.process(given),
                "tid": 0,
                "args": {"name": self._name(given)},
            }
            for given in self._numbers
        ]

    def _name(self, given: Any) -> str:
        label = self._said.get(given, "" if isinstance(given, int) else str(given))
        return f"rank {self._rank} {label} {self._host}".replace("  ", " ").strip()


def _buckets(trace: RankTrace, rank: _Rank) -> list[Event]:
    """A row for each bucket of DDP's: from ready to done, and within it from started to done.

    They overlap, so they are no slices of a thread but asynchronous ones, which have an id.
    """
    made = []
    identity = (trace.rank + 1) * _FLOWS_PER_RANK
    for step in trace.steps:
        for index, each in enumerate(in_step(trace, step)):
            assert each.ready is not None
            identity += 1
            row = f"bucket {index}, {format_bytes(each.bytes)}"
            common = {"cat": "DDP bucket", "id": identity}
            common |= {"pid": rank.process("DDP buckets"), "tid": index}
            for phase, name, moment in (
                ("b", row, each.ready),
                ("b", "moves", each.waited_until),
                ("e", "moves", each.end),
                ("e", row, each.end),
            ):
                made.append({"ph": phase, "name": name, "ts": moment * _MICROSECONDS} | common)
    return made


def _arrows(number: int, meeting: Meeting, places: dict[int, _Rank]) -> list[Event]:
    late = meeting.last_rank
    source = meeting.members[late]
    made = []
    for position, (rank, each) in enumerate(meeting.members.items()):
        if rank == late:
            continue
        common = {"cat": "tutti", "name": f"{each.operation} waits for rank {late}"}
        # Ids beyond every rank's own.
        identity = (len(places) + max(places) + 2) * _FLOWS_PER_RANK + number * 4096 + position
        begin = source.start * _MICROSECONDS
        # An arrow ends in the slice that it points to, and not before it began.
        finish = max(begin, each.waited_until * _MICROSECONDS)
        finish = min(finish, each.end * _MICROSECONDS)
        for phase, one, where, moment in (
            ("s", source, late, min(begin, finish)),
            ("f", each, rank, finish),
        ):
            made.append(
                {
                    **common,
                    "ph": phase,
                    "id": identity,
                    "pid": places[where].process(one.process),
                    "tid": one.thread,
                    "ts": moment,
                    **({"bp": "e"} if phase == "f" else {}),
                }
            )
    return made


def _open(path: Path) -> io.TextIOBase:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        return gzip.open(path, "wt", encoding="utf-8", compresslevel=3)
    return open(path, "w", encoding="utf-8")
