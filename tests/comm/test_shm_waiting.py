"""Who waits how long: limits are kept, and a callback may wait for whatever else is under way."""

import ctypes
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from shm_ranks import Group, errors, results

from forked_ranks import forked
from shm_cases import group_of
from tutti.comm.shm import native
from tutti.comm.shm.native import core

FRONTS = ("compiled", "plain")


def impatient(g: Group) -> None:
    """Rank 1 comes only after rank 0 has given up a wait."""
    for _ in range(5):
        x, word = np.ones(1000), np.zeros(1)
        if g.rank == 1:
            g.run(native.RECV, [], [word], peer=0, timeout=20)
        work = g.submit(native.ALL_REDUCE, [x], [x], timeout=5, dtype=native.F64)
        if g.rank == 0:
            with pytest.raises(native.ShmTimeout, match=r"all_reduce .* is not done yet"):
                work.wait(0.05)
            g.run(native.SEND, [word], peer=1)
        work.wait()
        assert (x == 2).all()


def test_given_a_late_peer_when_a_wait_has_a_limit_then_it_ends_in_time() -> None:
    results(impatient, 2)


def impatient_by_torch(rank: int) -> list[str]:
    """Rank 1 comes only after rank 0 has given up a wait."""
    texts = []
    for front in FRONTS:
        group = group_of(front)
        for _ in range(3):
            if rank == 1:
                dist.recv(torch.ones(1), 0, group)
            work = dist.all_reduce(torch.ones(1000), group=group, async_op=True)
            if rank == 0:
                try:
                    work.wait(timedelta(seconds=0.1))
                    texts.append(f"{front}: no error")
                except Exception as error:
                    if type(error).__name__ != "ShmTimeout":
                        raise
                dist.send(torch.ones(1), 1, group)
            work.wait()
    return texts


def test_a_wait_with_a_limit_ends_in_time_and_the_operation_goes_on() -> None:
    assert forked(impatient_by_torch, 2, timeout=40) == [[], []]


class CalledBack:
    """A recv with a callback; what that returns or raises is kept in `said`."""

    def __init__(self, g: Group, tag: int, calls: Callable[[], Any]) -> None:
        self.said: list[Any] = []

        def call(argument: int, code: int, text: bytes) -> None:
            try:
                self.said.append(calls())
            except Exception as error:
                self.said.append(error)

        self.keeps = native.Done(call)
        self.got = np.zeros(4)
        operation = g.operation(native.RECV, [], [self.got], peer=1, tag=tag)
        done = ctypes.cast(self.keeps, ctypes.c_void_p)
        self.handle = core().tutti_submit(g.handle, ctypes.byref(operation), 20, done, None)

    def wait(self, limit: float = -1) -> int:
        return int(core().tutti_work_wait(self.handle, limit))


def calls_back_amid_messages(g: Group) -> Any:
    """Rank 1 takes rank 0's large message, reduces and only then sends what rank 0 waits for."""
    large, x, word = np.ones(5_000_000), np.ones(10), np.zeros(4)
    settings = {"dtype": native.F64, "timeout": 5}
    if g.rank == 1:
        time.sleep(0.2)  # rank 0 waits by then
        g.run(native.SEND, [word], peer=0, tag=2)
        g.run(native.RECV, [], [large], peer=0, tag=3)
        g.run(native.ALL_REDUCE, [x], [x], **settings)
        g.run(native.SEND, [word], peer=0, tag=1)
        return None
    sent = g.submit(native.SEND, [large], peer=1, tag=3)
    reduces = CalledBack(g, 2, lambda: g.run(native.ALL_REDUCE, [x], [x], **settings))
    g.run(native.RECV, [], [word], peer=1, tag=1)
    sent.wait()
    reduces.wait()
    return reduces.said


def test_given_a_waiter_inside_a_callback_then_messages_still_move() -> None:
    assert results(calls_back_amid_messages, 2) == [[None], None]


def all_over_at_once(g: Group, waits: bool) -> Any:
    """The callbacks of recvs that end together wait for a later, and for an earlier one."""
    g.barrier()
    if g.rank == 1:
        time.sleep(0.3)
        return None  # leaves, and all recvs from it fail
    recvs: list[CalledBack] = []
    recvs.append(CalledBack(g, 1, lambda: recvs[2].wait(20)))
    recvs.append(CalledBack(g, 2, lambda: recvs[0].wait(20)))
    recvs.append(CalledBack(g, 3, lambda: 0))
    if waits:
        recvs[0].wait()
    else:
        while not core().tutti_work_is_done(recvs[0].handle):
            time.sleep(0.01)
    codes = [recv.wait() for recv in recvs]
    return codes + [recv.said for recv in recvs]


@pytest.mark.parametrize("waits", [True, False], ids=["waiter", "courier"])
def test_given_messages_that_end_together_then_their_callbacks_may_wait_for_each_other(
    waits: bool,
) -> None:
    left = native.PEER_LEFT
    assert results(all_over_at_once, 2, waits)[0] == [left] * 3 + [[left], [left], [0]]


def then_reduces(rank: int) -> list[str]:
    """As `calls_back_amid_messages`, by torch's futures."""
    texts = []
    for front in FRONTS:
        group, x = group_of(front), torch.ones(4)
        if rank == 0:
            sent = dist.isend(torch.ones(5_000_000), 1, group, tag=3)
            asked = dist.irecv(torch.zeros(4), 1, group, tag=2)
            reduced = asked.get_future().then(lambda _, x=x, g=group: dist.all_reduce(x, group=g))
            dist.recv(torch.zeros(4), 1, group, tag=1)
            sent.wait()
            reduced.wait()
        else:
            time.sleep(0.2)  # rank 0 waits by then
            dist.send(torch.ones(4), 0, group, tag=2)
            dist.recv(torch.zeros(5_000_000), 0, group, tag=3)
            dist.all_reduce(x, group=group)
            dist.send(torch.ones(4), 0, group, tag=1)
        if not (x == 2).all():
            texts.append(f"{front}: {x}")
    return texts


def test_a_future_of_a_message_may_start_a_collective_that_others_reach_by_messages() -> None:
    assert forked(then_reduces, 2, timeout=30) == [[], []]


def forked_amid(g: Group) -> list[int]:
    """A child of rank 0 waits for what its parent began."""
    g.barrier()
    if g.rank == 1:
        time.sleep(0.5)
    x, got = np.ones(10), np.zeros(4)
    works = [g.submit(native.ALL_REDUCE, [x], [x], dtype=native.F64)]
    works.append(g.submit(native.RECV, [], [got], peer=1 - g.rank))
    codes = []
    if g.rank == 0:
        time.sleep(0.1)  # the worker has the turn by then
        for work in works:
            child = os.fork()
            if child == 0:
                os._exit(-core().tutti_work_wait(work.handle, 2))
            codes.append(-os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    g.run(native.SEND, [np.ones(4)], peer=1 - g.rank)
    for work in works:
        work.wait()
    assert (x == 2).all() and (got == 1).all()
    return codes


def test_given_a_forked_child_then_it_cannot_wait_for_its_parents_operations() -> None:
    assert results(forked_amid, 2)[0] == [native.CLOSED] * 2


def send_behind_another(g: Group) -> None:
    if g.rank == 1:
        time.sleep(1.5)
        return
    large = np.zeros(1_000_000)
    g.submit(native.SEND, [large], peer=1, tag=1, timeout=30)
    g.run(native.SEND, [large[:5]], peer=1, tag=2, timeout=0.2)


def test_given_a_message_behind_another_then_its_own_timeout_counts() -> None:
    name, text = errors(send_behind_another, 2)[0]
    assert name == "ShmTimeout"
    assert "send 2 of group default (tag 2, 40 bytes) timed out after 0.2 s" in text
