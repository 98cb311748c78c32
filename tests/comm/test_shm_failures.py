"""When ranks differ, are late, die or leave: every rank hears of it, and the text names whom."""

import ctypes
import os
import re
import resource
import signal
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from shm_ranks import Group, errors, outcomes, results

from tutti.comm.shm import native
from tutti.comm.shm.native import core

KINDS = (
    native.BARRIER,
    native.ALL_REDUCE,
    native.REDUCE,
    native.BROADCAST,
    native.ALL_GATHER,
    native.REDUCE_SCATTER,
    native.GATHER,
    native.SCATTER,
    native.ALL_TO_ALL,
)
NAMES = (
    "barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
)


def call(g: Group, kind: int, count: int, root: int, timeout: float = 30, **settings: str) -> None:
    """Any collective on fresh memory."""
    x, is_root = np.zeros(count, np.float32), g.rank == root
    several = [x.copy() for _ in range(g.size)]
    ins, outs = {
        native.BARRIER: ([], []),
        native.ALL_REDUCE: ([x], [x]),
        native.REDUCE: ([x], [x] if is_root else []),
        native.BROADCAST: ([x], []) if is_root else ([], [x]),
        native.ALL_GATHER: ([x], several),
        native.REDUCE_SCATTER: (several, [x]),
        native.GATHER: ([x], several if is_root else []),
        native.SCATTER: (several if is_root else [], [x]),
        native.ALL_TO_ALL: (several, several),
    }[kind]
    rooted = kind in (native.REDUCE, native.BROADCAST, native.GATHER, native.SCATTER)
    g.run(kind, ins, outs, timeout, dtype=native.F32, root=root if rooted else -1, **settings)


def differ(g: Group, how: str) -> None:
    call(g, native.BARRIER, 0, -1)
    odd, where = g.rank == 1, f"train.py:{10 + g.rank} in step"
    x = np.zeros(512 if odd and how == "bytes" else 1024, np.float32)
    settings = {"dtype": native.F32, "reduce": native.SUM, "where": where}
    if how == "dtype" and odd:
        settings["dtype"] = native.I32
    if how == "reduce" and odd:
        settings["reduce"] = native.MAX
    if how == "kind" and odd:
        g.run(native.BARRIER, where=where)
    elif how == "root":
        call(g, native.BROADCAST, 10, g.rank % 2, where=where)
    elif how == "sizes":
        parts = [np.zeros(3 + (odd and p == 0)) for p in range(g.size)]
        g.run(native.ALL_TO_ALL, parts, [np.zeros(3) for _ in parts], where=where)
    else:
        g.run(native.ALL_REDUCE, [x], [x], **settings)
    g.barrier()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "bytes",
            "operation 2 of group default differs between ranks: rank {me} called all_reduce "
            r"\(float32, sum, \d+ bytes\) at train.py:1{me} in step, rank",
        ),
        ("dtype", r"rank 1 called all_reduce \(int32, sum, 4096 bytes\) at train.py:11 in step"),
        ("reduce", r"rank 1 called all_reduce \(float32, max, 4096 bytes\) at train.py:11 in step"),
        ("kind", "rank 1 called barrier at train.py:11 in step"),
        ("root", r"rank 1 called broadcast \(float32, 40 bytes, root 1\) at train.py:11 in step"),
        ("sizes", "rank 1 gives 32 bytes to rank 0, which takes 24"),
    ],
)
def test_given_ranks_that_differ_then_all_are_told_who_called_what_where(
    how: str, said: str
) -> None:
    got = errors(differ, 3, how)
    assert [name for name, _ in got] == ["ShmRanksDiffer"] * 3
    for rank, (_, text) in enumerate(got):
        assert re.search(said.format(me=rank), text), text


def be_late(g: Group) -> tuple[str, str] | None:
    g.barrier()
    if g.rank < 2:
        with pytest.raises(native.ShmTimeout) as first:
            call(g, native.ALL_REDUCE, 1024, -1, timeout=0.3)
        began = time.monotonic()
        with pytest.raises(native.ShmTimeout) as second:
            call(g, native.BARRIER, 0, -1, timeout=30)
        assert time.monotonic() - began < 5, "a broken group fails at once"
        return str(first.value), str(second.value)
    core().tutti_note_place(f"train.py:{80 + g.rank} in step".encode())
    time.sleep(0.8)
    return None


def test_given_late_ranks_when_time_is_up_then_they_are_named_with_where_they_are() -> None:
    got = results(be_late, 4)
    for rank in (0, 1):
        text, again = got[rank]
        assert again == f"{text}: the group cannot be used any more"
        assert re.search(
            r"all_reduce 2 of group default \(float32, 4096 bytes\) timed out after 0\.3 s on "
            r"rank \d: waiting for rank 2 \(pid \d+: last operation 1 barrier, done \d\.\d s ago; "
            r"now at train\.py:82 in step, seen \d\.\d s ago\) and rank 3 \(pid \d+: ",
            text,
        ), text


def die_before(g: Group, kind: int) -> None:
    g.barrier()
    if g.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(20):  # a root may be some rounds ahead before it needs the dead
        call(g, kind, 100_000, 0)


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_given_a_killed_peer_when_a_collective_needs_it_then_all_learn_who_died(kind: int) -> None:
    got = errors(die_before, 3, kind)
    assert [name for name, _ in got] == ["PeerDied"] * 2, got
    for _, text in got:
        assert re.search(r"rank 1 \(pid \d+: last operation \d+ .*of group default has died", text)


def die_amid(g: Group, kind: int) -> None:
    g.barrier()
    if g.rank == 1:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        call(g, kind, 1_000_000, 0)


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_given_a_peer_killed_amid_a_collective_then_nobody_hangs(kind: int) -> None:
    assert [name for name, _ in errors(die_amid, 2, kind)] == ["PeerDied"]


def die_amid_messages(g: Group, dies: int) -> None:
    g.barrier()
    big = np.zeros(4_000_000, np.float32)
    if g.rank == dies:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        if g.rank == 0:
            g.run(native.SEND, [big], peer=1, tag=2)
        else:
            g.run(native.RECV, [], [big], peer=0, tag=2)


@pytest.mark.parametrize("dies", [0, 1])
def test_given_a_peer_killed_amid_a_message_then_the_other_is_told(dies: int) -> None:
    ((name, text),) = errors(die_amid_messages, 2, dies)
    assert name == "PeerDied"
    assert f"rank {dies} (pid " in text


def message_sizes(g: Group) -> None:
    x = np.zeros(10)
    if g.rank == 0:
        g.run(native.SEND, [x[:5]], peer=1, tag=7)
    else:
        g.run(native.RECV, [], [x], peer=0, tag=7)
    g.barrier()


def test_given_a_message_of_another_size_then_both_sizes_are_named() -> None:
    for name, text in errors(message_sizes, 2):
        assert name == "ShmRanksDiffer"
        assert "takes 80 bytes from rank 0 (tag 7), which sent 40" in text


def wait_for_message(g: Group) -> None:
    g.barrier()
    if g.rank == 1:
        g.run(native.RECV, [], [np.zeros(4)], peer=-1, tag=3, timeout=0.2)
    else:
        time.sleep(0.5)


def test_given_no_message_when_time_is_up_then_the_recv_says_so() -> None:
    assert errors(wait_for_message, 2) == [
        ("", ""),
        (
            "ShmTimeout",
            "recv 1 of group default (tag 3, 32 bytes) timed out after 0.2 s on rank 1: waiting "
            "for any rank",
        ),
    ]


def leave_early(g: Group) -> None:
    g.barrier()
    x = np.full(10_000, 5.0, np.float32)
    if g.rank == 0:
        g.run(native.BROADCAST, [x], [], root=0)
        g.run(native.SEND, [x], peer=1, tag=1)
        return  # what it offered is still there for those who come late
    time.sleep(0.3)
    out = np.zeros_like(x)
    g.run(native.BROADCAST, [], [out], root=0)
    assert (out == 5).all()
    if g.rank == 1:
        out[:] = 0
        g.run(native.RECV, [], [out], peer=0, tag=1)
        assert (out == 5).all()
    with pytest.raises(native.PeerLeft, match="rank 0 of group default closed the group"):
        g.run(native.BARRIER)


def test_given_a_rank_that_left_then_its_last_bytes_arrive_and_the_next_wait_says_it_left() -> None:
    results(leave_early, 3)


def abort_in_flight(g: Group) -> list[str]:
    x = np.zeros(100)
    works = [g.submit(native.ALL_REDUCE, [x], [x], dtype=native.F64) for _ in range(3)]
    works.append(g.submit(native.RECV, [], [x], peer=1 - g.rank, tag=4))
    threading.Timer(0.1, g.abort).start()
    names = []
    for work in works:
        with pytest.raises(native.ShmError) as error:
            work.wait()
        names.append(type(error.value).__name__)
    with pytest.raises(native.GroupClosed):
        g.barrier()
    return names


def test_given_an_abort_then_what_runs_and_what_is_queued_fails() -> None:
    def with_one_absent(g: Group) -> list[str]:
        g.barrier()
        if g.rank == 1:
            time.sleep(0.3)
            return []
        return abort_in_flight(g)

    assert results(with_one_absent, 2)[0] == ["GroupClosed"] * 4


def fork_a_child(g: Group) -> int:
    g.barrier()
    pid = os.fork()
    if pid == 0:  # as a data loader's worker would
        code = core().tutti_run(g.handle, ctypes.byref(native.operation(native.BARRIER)), 5)
        core().tutti_group_abort(g.handle)
        core().tutti_group_close(g.handle)
        os._exit(-code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for _ in range(10):
        call(g, native.ALL_REDUCE, 1000, -1)
    time.sleep(0.1)  # long enough for a check of life
    call(g, native.ALL_REDUCE, 1000, -1)
    return status


def test_given_a_forked_child_then_the_group_is_closed_there_and_goes_on_in_the_parent() -> None:
    assert results(fork_a_child, 2) == [-native.CLOSED] * 2


def outlived_by_its_child(g: Group) -> None:
    child = np.zeros(1, np.int64)
    if g.rank == 1:
        child[0] = os.fork()
        if child[0] == 0:
            signal.pause()
        g.run(native.SEND, [child], peer=0)
        g.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    g.run(native.RECV, [], [child], peer=1)
    g.barrier()
    try:
        g.run(native.BARRIER, timeout=10)
    finally:
        os.kill(int(child[0]), signal.SIGKILL)


def test_given_a_dead_rank_whose_forked_child_lives_then_it_counts_as_dead() -> None:
    assert [name for name, _ in errors(outlived_by_its_child, 2)] == ["PeerDied"]


def too_little_memory(g: Group) -> tuple[str, str]:
    with pytest.raises(native.ShmNoMemory) as host:
        if not core().tutti_segment_create(b"all", 1 << 50):
            raise native.last_error()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    with pytest.raises(native.ShmNoMemory) as limit:
        if not core().tutti_segment_create(b"more", 1 << 24):
            raise native.last_error()
    return str(host.value), str(limit.value)


def test_given_too_little_memory_then_the_text_says_how_much_was_needed() -> None:
    ((host, limit),) = results(too_little_memory, 1)
    assert re.search(r"needs 1125899906842624 bytes, and this host has \d+ bytes available", host)
    assert (
        "needs 16777216 bytes, and the limit on the size of a file (ulimit -f) is 1048576" in limit
    )


def leave_nothing(g: Group) -> None:
    def held() -> tuple[int, str]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), "\n".join(re.findall("/memfd:tutti.*", maps))

    before = held()
    for _ in range(20):
        handle = core().tutti_group_create(b"brief", 0, 1, 0, 1)
        x = np.zeros(10)
        Group(handle, 0, 1).submit(native.ALL_REDUCE, [x], [x], dtype=native.F64).wait()
        core().tutti_group_close(handle)
    assert held() == before


def test_given_a_closed_group_then_no_descriptor_mapping_or_thread_is_left() -> None:
    results(leave_nothing, 1)


def read_by_another(g: Group) -> list[tuple[str, int, int, int, str]]:
    """Rank 0 reads rank 1's ledger through /proc, as a program outside the group would."""
    call(g, native.ALL_REDUCE, 16, -1, where="train.py:5 in step")
    core().tutti_note_place(b"train.py:9 in step")
    pid = np.array([os.getpid()])
    pids = [np.empty_like(pid) for _ in range(g.size)]
    g.run(native.ALL_GATHER, [pid], pids)
    g.barrier()
    seen = []
    if g.rank == 0:
        for link in Path(f"/proc/{pids[1][0]}/fd").iterdir():
            if not os.readlink(link).startswith("/memfd:tutti-shm:default"):
                continue
            data = link.read_bytes()
            magic, abi, entries, rank, _size = struct.unpack_from("<8sIIii", data, 0)
            if rank != 1:
                continue
            ledger, entry_bytes, place = struct.unpack_from("<QQQ", data, 48)
            assert (magic, abi, entries) == (b"TUTTISHM", native.ABI, 64)
            assert data[80:208].rstrip(b"\0") == b"default"
            for at in range(ledger, ledger + 2 * entry_bytes, entry_bytes):
                _id, sequence, kind, dtype = struct.unpack_from("<QQII", data, at)
                (state,) = struct.unpack_from("<I", data, at + 36)
                text = data[at + 96 : at + 192].split(b"\0")[0].decode()
                seen.append((sequence, kind, dtype, state, text))
            seen.append(data[place + 16 : place + 272].split(b"\0")[0].decode())
    g.barrier()
    return seen


def test_given_a_running_rank_then_its_ledger_can_be_read_from_outside() -> None:
    assert results(read_by_another, 2)[0] == [
        (1, native.ALL_REDUCE, native.F32, 2, "train.py:5 in step"),
        (2, native.ALL_GATHER, native.BYTES, 2, ""),
        "train.py:9 in step",
    ]


def bad_arguments(g: Group) -> None:
    x = np.zeros(10, np.float32)
    for said, arguments in {
        "root 7 is not a rank of group default of 2": (native.BROADCAST, [x], [], 7),
        "takes 1 parts in and 2 out, got 1 and 1": (native.ALL_GATHER, [x], [x], -1),
        "gives itself 40 bytes and takes 20": (native.ALL_REDUCE, [x], [x[:5]], -1),
    }.items():
        kind, ins, outs, root = arguments
        with pytest.raises(ValueError, match=said):
            g.run(kind, ins, outs, root=root, dtype=native.F32)
    with pytest.raises(ValueError, match="avg of int32 is not defined"):
        g.run(native.ALL_REDUCE, [x], [x], dtype=native.I32, reduce=native.AVG)
    g.barrier()  # a refused call leaves the group as it was


def test_given_bad_arguments_then_the_call_is_refused_with_the_numbers() -> None:
    results(bad_arguments, 2)


def test_given_a_group_that_is_not_connected_then_an_operation_says_so() -> None:
    handle = core().tutti_group_create(b"alone", 0, 2, 0, 1)
    with pytest.raises(ValueError, match="connected to 1 of 2 ranks"):
        Group(handle, 0, 2).barrier()
    core().tutti_group_close(handle)
    assert outcomes(lambda g: None, 1) == [("result", None)]
