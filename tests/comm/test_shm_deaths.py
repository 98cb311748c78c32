"""A rank dies, leaves, aborts or forks: its peers get an error that names it, and none hangs."""

import ctypes
import os
import re
import signal
import threading
import time

import numpy as np
import pytest

from shm_ranks import COLLECTIVES, Group, call, errors, results
from tutti.comm.shm import native
from tutti.comm.shm.native import core


def die_before(g: Group, kind: int) -> None:
    g.barrier()
    if g.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(20):  # a root may run some rounds ahead before it waits for the dead rank
        call(g, kind, 100_000, 0)


@pytest.mark.parametrize("kind", COLLECTIVES.values(), ids=COLLECTIVES)
def test_given_a_killed_peer_then_the_error_on_every_rank_names_the_dead_rank(kind: int) -> None:
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


@pytest.mark.parametrize("kind", COLLECTIVES.values(), ids=COLLECTIVES)
def test_given_a_peer_killed_during_a_collective_then_no_rank_hangs(kind: int) -> None:
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
def test_given_a_peer_killed_during_a_message_then_the_other_rank_gets_an_error(dies: int) -> None:
    ((name, text),) = errors(die_amid_messages, 2, dies)
    assert name == "PeerDied"
    assert f"rank {dies} (pid " in text


def leave_early(g: Group) -> None:
    g.barrier()
    x = np.full(10_000, 5.0, np.float32)
    if g.rank == 0:
        g.run(native.BROADCAST, [x], [], root=0)
        g.run(native.SEND, [x], peer=1, tag=1)
        return  # its bytes stay available to slower ranks
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


def test_given_a_rank_that_left_then_its_last_bytes_arrive_and_the_next_wait_fails() -> None:
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


def test_given_an_abort_then_running_and_queued_operations_fail() -> None:
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
    if pid == 0:  # like a worker of a data loader
        code = core().tutti_run(g.handle, ctypes.byref(native.operation(native.BARRIER)), 5)
        core().tutti_group_abort(g.handle)
        core().tutti_group_close(g.handle)
        os._exit(-code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for _ in range(10):
        call(g, native.ALL_REDUCE, 1000, -1)
    time.sleep(0.1)  # longer than the interval of liveness checks
    call(g, native.ALL_REDUCE, 1000, -1)
    return status


def test_given_a_forked_child_then_the_group_is_closed_in_the_child_and_works_in_the_parent() -> (
    None
):
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
