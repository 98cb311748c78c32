"""The ledger: another process can read the operations of a rank and the line at which it hangs."""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tutti import comm
from tutti.comm import collective_errors, ledger
from tutti.comm.ledger import GroupLedger, ProcessLedger, processes, read_process
from tutti.comm.shm import native
from tutti.world.world import World
from worlds import in_world, run_command, run_tutti, start_warm


def _begin(group: GroupLedger, sequence: int, kind: str = "all_reduce") -> int:
    site = ledger.call_site(sys._getframe())
    number, dtype = ledger.KINDS.index(kind), ledger.DTYPES.index("int8")
    return group.begin(sequence, number, dtype, 0, -1, 0, ledger.WAITING, 64, site)


def _read_own() -> ProcessLedger:
    process = read_process(os.getpid())
    assert process is not None
    return process


def test_a_reader_gets_the_last_256_operations_with_their_call_sites_and_states() -> None:
    group = GroupLedger("mesh_dp", "17", 1, 1024)
    numbers = [_begin(group, sequence) for sequence in range(1, 401)]
    for number in numbers[:-1]:
        group.mark(number, ledger.DONE)
    message = _begin(group, 5, "recv")
    group.mark(message, ledger.FAILED)

    process = _read_own()
    assert (process.rank, process.size) == (1, 1024)
    records = [record for record in process.records if record.group_name == "17"]
    assert len(records) == 256
    assert [record.sequence for record in records[:-1]] == list(range(146, 401))
    *done, waiting, failed = records
    assert {record.state for record in done} == {"done"}
    assert all(record.ended_ago is not None for record in done)
    assert (failed.operation, failed.state) == ("recv", "failed")
    assert waiting is process.current and waiting.state == "waiting" and waiting.ended_ago is None
    assert str(waiting) == "all_reduce 400 of group mesh_dp (int8, 64 bytes)"
    line = _begin.__code__.co_firstlineno + 1
    assert waiting.where == f"{ledger.shown_path(__file__)}:{line} in _begin"
    assert os.getpid() in processes()


def test_marking_an_operation_that_was_overwritten_changes_nothing() -> None:
    group = GroupLedger("marked", "18", 0, 2048)
    first = _begin(group, 1)
    for sequence in range(2, ledger.ENTRIES + 2):
        _begin(group, sequence)
    group.mark(first, ledger.FAILED)
    assert "failed" not in {record.state for record in _read_own().records}
    assert group.seconds_since_begin(first) == 0.0


def test_a_long_call_site_keeps_its_end() -> None:
    name = "f" * 200 + "end"
    code = compile(f"def {name}(): return call_site(_getframe())", "long.py", "exec")
    scope: dict[str, Any] = {"call_site": ledger.call_site, "_getframe": sys._getframe}
    exec(code, scope)  # noqa: S102
    site = scope[name]()
    assert len(site) < 96 and site.endswith(b"ffend")


def test_the_ledger_of_a_destroyed_group_is_gone() -> None:
    group = GroupLedger("short", "19", 0, 4096)
    _begin(group, 1)
    assert _read_own().size == 4096
    del group
    process = read_process(os.getpid())
    assert process is None or process.size != 4096


def test_a_forked_child_writes_to_its_own_ledgers() -> None:
    group = GroupLedger("parent", "20", 0, 4096)
    _begin(group, 7)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        none_at_first = read_process(os.getpid()) is None
        _begin(group, 8)  # is not recorded: the group is the parent's
        own = GroupLedger("child", "21", 0, 1)
        _begin(own, 1)
        sequences = [record.sequence for record in _read_own().records]
        os.write(writing, json.dumps([none_at_first, sequences]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert json.loads(os.read(reading, 100)) == [True, [1]]
    local = [record.sequence for record in _read_own().records if record.group_name == "20"]
    assert local == [7]


def test_the_names_have_the_order_of_the_enums_of_the_shm_core() -> None:
    short = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}
    dtypes = [re.sub(r"^[a-z]+(?=\d)", lambda m: short[m[0]], name) for name in ledger.DTYPES]
    assert native.KINDS == ledger.KINDS
    assert tuple(dtypes) == native.DTYPES
    assert tuple(name.replace("mean", "avg") for name in ledger.REDUCTIONS) == native.REDUCTIONS
    assert len(native.STATES) == ledger.STATES.index("streamed")  # the shm backend has no streams


def test_a_process_without_a_ledger_reads_as_none() -> None:
    assert read_process(1) is None
    assert read_process(2**22 + 5) is None


def _late(world: World) -> str:
    group = dist.new_group(timeout=timedelta(seconds=2), group_desc="late", backend="gloo")
    comm.all_reduce(torch.ones(2), group=group)
    reports = _wait_for_the_late(world, group)
    _get_default_store().add("raised", world.rank < 2)
    dist.barrier()  # on shm: no rank ends while others still wait
    return reports


def _wait_for_the_late(world: World, group: dist.ProcessGroup) -> str:
    if world.rank == 2:
        _stay_away()
        return "late"
    if world.rank == 3:
        with contextlib.suppress(comm.CollectiveError):
            comm.broadcast(torch.ones(1), group=group)
        return "wrong"
    try:
        handle = comm.all_reduce(torch.ones(256), "mean", group=group, wait=False)
        handle.wait()
    except comm.CollectiveTimeout as error:
        with pytest.raises(comm.CollectiveTimeout):  # raises the same error again
            handle.wait()
        return str(error)
    except comm.CollectiveError:
        return "lost"  # the first rank whose gloo times out closes its connections
    return "in time"


def _stay_away() -> None:
    """Return when both waiting ranks have raised."""
    store = _get_default_store()
    while store.add("raised", 0) < 2:
        time.sleep(0.02)


def test_a_timeout_names_the_late_rank_its_operation_and_its_location() -> None:
    here = ledger.shown_path(__file__)
    texts = in_world(_late, 4)
    assert texts[2:] == ["late", "wrong"] and texts[:2] != ["lost", "lost"]
    for rank, text in enumerate(texts[:2]):
        if text == "lost":
            continue
        expected = f"all_reduce 2 of group late (mean, float32, 1024 bytes) at {here}:"
        assert text.startswith(expected), text
        assert f"s on rank {rank}: rank 2 has not arrived (pid " in text, text
        assert "last all_reduce 1, done " in text and " in _stay_away, seen " in text, text
        # The broadcast of rank 3 may have ended when the others read its ledger.
        assert "rank 3 called broadcast 2 of group late (float32, 4 bytes) at " in text, text
        assert f"rank {1 - rank} has arrived" in text, text


def _late_on_shm(world: World) -> list[str]:
    reports = []
    third: list[Callable[[dist.ProcessGroup], Any]]
    third = [lambda group: comm.broadcast(torch.ones(1), group=group), lambda group: _stay_away()]
    for call in third:
        group = dist.new_group(timeout=timedelta(seconds=2), group_desc="late", backend="shm")
        comm.all_reduce(torch.ones(2), group=group)
        try:
            comm.all_reduce(torch.ones(256), group=group) if world.rank < 2 else call(group)
            reports.append("in time")
        except comm.CollectiveError as error:
            reports.append(str(error))
        _get_default_store().add("raised", world.rank < 2 and call is third[-1])
        dist.barrier()
    return reports


def test_on_shm_a_wrong_call_raises_at_once_and_a_late_rank_at_the_timeout() -> None:
    *others, (wrong, _) = in_world(_late_on_shm, 3)
    assert wrong.startswith("broadcast 2 of group late (float32, 4 bytes) at "), wrong
    for rank, (differs, late) in enumerate(others):
        begin = "all_reduce 2 of group late (sum, float32, 1024 bytes) at "
        assert differs.startswith(begin) and late.startswith(begin), (differs, late)
        assert f"rank {rank} called all_reduce (float32, sum, 1024 bytes), rank 2 " in differs
        assert "waiting for rank 2 (pid " in late and " in _stay_away, seen " in late, late


def test_ranks_without_a_readable_ledger_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        ranks = (0, 10, 20, 30)
        label = "dp"
        name = "dp"

    near = ledger.process_address()
    gone = subprocess.Popen(["true"])
    gone.wait()
    store = dist.HashStore()
    store.set("tutti/ledger/10", json.dumps({**near, "pid": gone.pid}))
    store.set("tutti/ledger/20", json.dumps({**near, "machine": "other", "host": "node7"}))
    store.set("tutti/ledger/30", json.dumps({**near, "pid": 1}))
    monkeypatch.setattr(collective_errors.c10d, "_get_default_store", lambda: store)
    process_of = collective_errors._process_of
    never, ended, away, closed = (process_of(Group(), rank) for rank in range(4))  # type: ignore[arg-type]
    assert isinstance(never, str) and isinstance(ended, str)
    assert isinstance(away, str) and isinstance(closed, str)
    assert never.startswith("has not called tutti.comm yet")
    assert ended.startswith(f"has ended (pid {gone.pid} on ")
    assert away.startswith("is on host node7") and "tutti world --ledger" in away
    assert closed.startswith("(pid 1) has no ledger")


_STUCK = """
import ctypes, os, signal, time, torch, tutti
from tutti import comm

def waits():
    comm.all_reduce(torch.ones(4))

def in_c_code():
    ctypes.PyDLL(None).sleep(60)  # holds the GIL: no thread of this process runs

def stopped():
    time.sleep(1.5)
    os.kill(os.getpid(), signal.SIGSTOP)

with tutti.init(device="cpu") as world:
    comm.broadcast(torch.ones(2, dtype=torch.int64))
    time.sleep(1.2)
    [waits, in_c_code, stopped][world.rank]()
"""


@contextlib.contextmanager
def _stuck_world(folder: Path) -> Iterator[None]:
    script = folder / "stuck.py"
    script.write_text(_STUCK)
    run = ["-m", "tutti", "run", "-n", "3", "--device", "cpu", "--grace", "0.2", script]
    with start_warm(run) as started:
        try:
            yield
        finally:
            started.send_signal(signal.SIGTERM)
            started.communicate(timeout=30)


def test_the_command_shows_ranks_that_hang_in_different_ways(tmp_path: Path) -> None:
    def rows(*flags: str) -> dict[str, dict[str, Any]]:
        words = ["world", "--json", tmp_path / "rows.json", "--ledger", *flags]
        done = run_tutti(*words, env={"COLUMNS": "200"})
        assert done.returncode == 0, done.stderr
        found = json.loads((tmp_path / "rows.json").read_text())["rows"]
        ours = [row for row in found if "stuck.py" in row["called at"]]
        assert all(row["rank"] in done.stdout for row in ours)
        return {row["rank"]: row for row in ours}

    def stopped(pid: int) -> bool:
        return " T " in Path(f"/proc/{pid}/stat").read_text()

    with _stuck_world(tmp_path):
        deadline = time.monotonic() + 60
        actual: dict[str, dict[str, Any]] = {}
        while time.monotonic() < deadline:
            actual = rows()
            if len(actual) == 3 and stopped(actual["2 of 3"]["pid"]):
                break
            time.sleep(0.3)
        first, second, third = (actual[f"{rank} of 3"] for rank in range(3))
        assert first["operation"] == "all_reduce 2 of group default (float32, 16 bytes)"
        assert first["state"].startswith("waiting for") and " in waits" in first["called at"]
        for row in (second, third):
            assert row["operation"] == "broadcast 1 of group default (int64, 16 bytes)"
            assert row["state"].startswith("done ")
        assert " in <module>" in second["main thread"]  # the last location that could be recorded
        assert " in stopped" in third["main thread"]
        assert rows(str(first["pid"])).keys() == {"0 of 3"}


def test_the_command_reports_that_a_process_has_no_ledger() -> None:
    done = run_tutti("world", "--ledger", "1")
    assert done.returncode == 2
    assert "--ledger 1: this process has ended" in done.stderr and done.stderr.count("\n") == 1


_SHM_RANK = """
import ctypes, os, sys
from tutti.comm.ledger import read_process
from tutti.comm.shm import native

core = native.core()
group = core.tutti_group_create(b"mesh_tp", 0, 1, 1 << 16, 7)
data = (ctypes.c_float * 4)(1, 2, 3, 4)
part = [(ctypes.addressof(data), 16)]
for where in ("a.py:1 in first", "b.py:2 in second"):
    call = native.operation(native.ALL_REDUCE, ins=part, outs=part, dtype=native.F32, where=where)
    native.raise_for(core.tutti_run(group, ctypes.byref(call), 5.0))
core.tutti_note_location(b"train.py:88 in step")
print(read_process(os.getpid()), flush=True)
sys.stdin.read()
"""


def test_the_segments_of_the_shm_backend_are_read_from_outside_only() -> None:
    pytest.importorskip("tutti.comm.shm.native").core_path()
    with subprocess.Popen(
        [sys.executable, "-c", _SHM_RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"  # the owner would lose its lock on the segment
        found = read_process(process.pid)
        process.communicate("")
    assert found is not None
    assert (found.rank, found.size, found.location) == (0, 1, "train.py:88 in step")
    first, second = found.records
    assert (first.operation, first.group, first.sequence) == ("all_reduce", "mesh_tp", 1)
    assert (second.dtype, second.bytes, second.state) == ("float32", 16, "done")
    assert second.where == "b.py:2 in second" and second.written_by == "tutti-shm"


@pytest.mark.parametrize(
    ("filename", "internal"),
    [
        (comm.__file__, True),
        (torch.__file__, True),
        ("<frozen importlib._bootstrap>", True),
        (__file__, False),
        (ctypes.__file__, False),
    ],
)
def test_frames_of_tutti_comm_and_torch_are_internal(filename: str, internal: bool) -> None:
    assert ledger.is_internal(filename) == internal


_ENDS = """
import atexit, os, sys, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate()], flush=True))
from tutti.comm.ledger import record_location
record_location("test", lambda text: None)
assert "tutti-locations" in [thread.name for thread in threading.enumerate()]
if os.fork() == 0:
    sys.exit()
os.wait()
"""


def test_the_thread_that_records_locations_ends_before_the_interpreter() -> None:
    """Handlers run in reverse order: this one prints the threads that finalization would meet."""
    done = run_command([sys.executable, "-c", _ENDS])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['MainThread']"] * 2  # of a forked child, then its parent
