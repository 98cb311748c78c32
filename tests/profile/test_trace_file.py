"""A trace file of any size and condition is read event by event."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from tutti.profile.rank_trace import IntervalCollector
from tutti.profile.trace_file import TraceFile
from tutti.profile.trace_reader import read_rank


def _event(number: int) -> dict[str, object]:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": f'aten::op "{number}" \\ é',
        "ts": 3884154376643.572 + number,
        "dur": 0.75,
        "args": {"Comms Id": 2**64 - 1, "Input Dims": [[1, 2], []], "External id": number},
    }


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_events_and_the_metadata_around_them_are_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    events = [_event(number) for number in range(3000)]  # several chunks of the file
    content = {"schemaVersion": 1, "traceEvents": events, "host_name": "n1", "base": 179085702}
    text = json.dumps(content, indent=1)
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())

    file = TraceFile(path)

    assert list(file.events()) == events
    assert file.metadata == {"schemaVersion": 1, "host_name": "n1", "base": 179085702}
    assert not file.truncated


def test_a_bare_list_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([_event(1), _event(2)]))

    assert list(TraceFile(path).events()) == [_event(1), _event(2)]


@pytest.mark.parametrize("compressed", [False, True])
def test_the_complete_events_of_a_truncated_file_are_read(tmp_path: Path, compressed: bool) -> None:
    path = tmp_path / "trace.json"
    whole = json.dumps({"traceEvents": [_event(number) for number in range(9000)]}).encode()
    whole = gzip.compress(whole) if compressed else whole
    path.write_bytes(whole[: len(whole) // 2])

    file = TraceFile(path)
    events = list(file.events())

    assert file.truncated
    assert events == [_event(number) for number in range(len(events))]
    assert len(events) > 2000


def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("hello")

    with pytest.raises(ValueError, match="not a trace"):
        list(TraceFile(path).events())


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write('{"traceEvents": [')
        for number in range(25_000):
            file.write(json.dumps(_event(number)) + ",")
        file.write('{"ph": "i"}]}')
    with gzip.open(path) as file:
        size = file.seek(0, 2)

    tracemalloc.start()
    count = sum(1 for _ in TraceFile(path).events())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert count == 25_001
    # Only the current chunks, for any length.
    assert size > 4e6
    assert peak < size / 2


def test_a_rank_is_stored_as_intervals_not_as_events(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write('{"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": [')
        for number in range(25_000):  # operators without gaps between them, of a few names
            place = {"name": f"aten::op{number % 50}", "ts": number, "dur": 1, "tid": 1}
            file.write(json.dumps(_event(number) | place) + ",")
        step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 0}
        file.write(json.dumps(step | {"dur": 30_000}) + "]}")

    tracemalloc.start()
    trace = read_rank(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert trace.compute.seconds == pytest.approx(0.025)
    assert [step.number for step in trace.steps] == [3]
    with gzip.open(path) as file:
        assert peak < 1.5 * file.seek(0, 2)  # as Python objects, events take several times more


def test_adjacent_intervals_are_merged() -> None:
    collector = IntervalCollector()
    for number in range(500_000):
        collector.add(number, number + 1)

    assert collector.intervals().seconds == 500_000
    assert len(collector._edges) < 200_000  # of a million edges
