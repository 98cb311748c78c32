"""A callback may wait for any other operation, on any thread and in any order."""

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from forked_ranks import forked
from shm_cases import group_of
from shm_ranks import Group, results
from tutti.comm.shm import native
from tutti.comm.shm.native import core


class CalledBack:
    """An operation with a callback, and the value that the callback returns or raises."""

    def __init__(self, g: Group, operation: native.Operation, calls: Callable[[], Any]) -> None:
        self._said: Future[Any] = Future()

        def call(argument: int, code: int, text: bytes) -> None:
            try:
                self._said.set_result(calls())
            except Exception as error:
                self._said.set_exception(error)

        self._keeps = operation, native.DoneCallback(call)
        done = ctypes.cast(self._keeps[1], ctypes.c_void_p)
        self.handle = core().tutti_submit(g.handle, ctypes.byref(operation), 20, done, None)

    @property
    def said(self) -> Any:
        return self._said.result(20)

    def wait(self, limit: float = -1) -> int:
        return int(core().tutti_work_wait(self.handle, limit))


def recv(g: Group, tag: int, calls: Callable[[], Any]) -> CalledBack:
    return CalledBack(g, g.operation(native.RECV, [], [np.zeros(4)], peer=1, tag=tag), calls)


def reduce(g: Group, calls: Callable[[], Any]) -> CalledBack:
    x = np.ones(10)
    return CalledBack(g, g.operation(native.ALL_REDUCE, [x], [x], dtype=native.F64), calls)


def calls_back_amid_messages(g: Group) -> Any:
    """Rank 1 receives rank 0's large message, reduces, and then sends the message for rank 0."""
    large, x, word = np.ones(5_000_000), np.ones(10), np.zeros(4)
    settings = {"dtype": native.F64, "timeout": 5}
    if g.rank == 1:
        time.sleep(0.2)  # so that rank 0 is waiting
        g.run(native.SEND, [word], peer=0, tag=2)
        g.run(native.RECV, [], [large], peer=0, tag=3)
        g.run(native.ALL_REDUCE, [x], [x], **settings)
        g.run(native.SEND, [word], peer=0, tag=1)
        return None
    sent = g.submit(native.SEND, [large], peer=1, tag=3)
    reduces = recv(g, 2, lambda: g.run(native.ALL_REDUCE, [x], [x], **settings))
    g.run(native.RECV, [], [word], peer=1, tag=1)
    sent.wait()
    return reduces.said


def test_given_a_waiter_inside_a_callback_then_messages_still_move() -> None:
    assert results(calls_back_amid_messages, 2) == [None, None]


def send_word(g: Group) -> None:
    """All callbacks are registered: rank 1 may continue."""
    g.run(native.SEND, [np.ones(1)], peer=1, tag=9)


def await_word(g: Group) -> None:
    g.run(native.RECV, [], [np.zeros(1)], peer=0, tag=9)


def all_over_at_once(g: Group, waits: bool) -> Any:
    """The callbacks of recvs that end together wait for a later recv and for an earlier recv."""
    if g.rank == 1:
        await_word(g)
        return None  # leaves the group, so that all recvs from it fail
    recvs: list[CalledBack] = []
    recvs.append(recv(g, 1, lambda: recvs[2].wait(20)))
    recvs.append(recv(g, 2, lambda: recvs[0].wait(20)))
    recvs.append(recv(g, 3, lambda: 0))
    send_word(g)
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
    assert results(all_over_at_once, 2, waits)[0] == [left] * 3 + [left, left, 0]


def one_after_another(g: Group, waits: bool) -> list[int]:
    """The first callback waits for the last operation. The other callbacks wait for the first."""
    if g.rank == 1:
        await_word(g)
        for _ in range(4):
            g.run(native.ALL_REDUCE, [np.ones(10)], [np.ones(10)], dtype=native.F64)
        return []
    works: list[CalledBack] = []
    works.append(reduce(g, lambda: works[3].wait()))
    works.append(reduce(g, lambda: works[0].wait() or works[0].said))
    works.append(reduce(g, lambda: works[2].wait()))  # its own
    works.append(reduce(g, lambda: works[0].wait() or works[0].said))
    send_word(g)
    if waits:
        works[3].wait()
    return [work.said for work in works]


@pytest.mark.parametrize("waits", [True, False], ids=["waiter", "worker"])
def test_given_collectives_then_their_callbacks_may_wait_for_earlier_and_later_ones(
    waits: bool,
) -> None:
    assert results(one_after_another, 2, waits)[0] == [0] * 4


def then_wait_for_each_other(rank: int) -> list[str]:
    """As `one_after_another`, with torch's futures."""
    ended: list[str] = []
    group = group_of()
    if rank == 1:
        time.sleep(0.3)
        for _ in range(3):
            dist.all_reduce(torch.ones(10), group=group)
        return ended
    a, b, c = (dist.all_reduce(torch.ones(10), group=group, async_op=True) for _ in range(3))
    futures = _wait_for_each_other(a, b, c, ended.append)
    torch.futures.wait_all(futures)
    return ended


def _wait_for_each_other(a: Any, b: Any, c: Any, note: Callable[[str], None]) -> list[Any]:
    first = a.get_future().then(lambda _: (c.wait(), note("first")))
    others = (each.get_future().then(lambda _: (first.wait(), note("other"))) for each in (b, c))
    return [first, *others]


def test_futures_of_collectives_may_wait_for_each_others_callbacks() -> None:
    assert forked(then_wait_for_each_other, 2, timeout=30) == [["first", "other", "other"], []]


def then_reduces(rank: int) -> list[str]:
    """As `calls_back_amid_messages`, with torch's futures."""
    texts = []
    group, x = group_of(), torch.ones(4)
    if rank == 0:
        sent = dist.isend(torch.ones(5_000_000), 1, group, tag=3)
        received = dist.irecv(torch.zeros(4), 1, group, tag=2)
        reduced = received.get_future().then(lambda _, x=x, g=group: dist.all_reduce(x, group=g))
        dist.recv(torch.zeros(4), 1, group, tag=1)
        sent.wait()
        reduced.wait()
    else:
        time.sleep(0.2)  # so that rank 0 is waiting
        dist.send(torch.ones(4), 0, group, tag=2)
        dist.recv(torch.zeros(5_000_000), 0, group, tag=3)
        dist.all_reduce(x, group=group)
        dist.send(torch.ones(4), 0, group, tag=1)
    if not (x == 2).all():
        texts.append(f"{x}")
    return texts


def test_a_future_of_a_message_may_start_a_collective_that_others_reach_by_messages() -> None:
    assert forked(then_reduces, 2, timeout=30) == [[], []]
