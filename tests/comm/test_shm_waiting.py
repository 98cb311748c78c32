"""Time limits of waits are kept, and forked children do not wait for their parent."""

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from forked_ranks import forked
from shm_cases import group_of
from shm_ranks import Group, errors, results
from tutti.comm.shm import native
from tutti.comm.shm.native import core


def impatient(g: Group) -> None:
    """Rank 1 arrives only after a wait of rank 0 has timed out."""
    for _ in range(5):
        x, word = np.ones(1000), np.zeros(1)
        if g.rank == 1:
            g.run(native.RECV, [], [word], peer=0, timeout=20)
        work = g.submit(native.ALL_REDUCE, [x], [x], timeout=5, dtype=native.F64)
        if g.rank == 0:
            with pytest.raises(native.ShmTimeout, match=r"all_reduce .* not finished"):
                work.wait(0.05)
            g.run(native.SEND, [word], peer=1)
        work.wait()
        assert (x == 2).all()


def test_given_a_late_peer_when_a_wait_has_a_limit_then_it_ends_in_time() -> None:
    results(impatient, 2)


def impatient_by_torch(rank: int) -> list[str]:
    """Rank 1 arrives only after a wait of rank 0 has timed out."""
    texts = []
    group = group_of()
    for _ in range(3):
        if rank == 1:
            dist.recv(torch.ones(1), 0, group)
        work = dist.all_reduce(torch.ones(1000), group=group, async_op=True)
        if rank == 0:
            try:
                work.wait(timedelta(seconds=0.1))
                texts.append("no error")
            except Exception as error:
                if type(error).__name__ != "ShmTimeout":
                    raise
            dist.send(torch.ones(1), 1, group)
        work.wait()
    return texts


def test_a_wait_with_a_limit_ends_in_time_and_the_operation_continues() -> None:
    assert forked(impatient_by_torch, 2, timeout=40) == [[], []]


def given_up_together(rank: int) -> list[str]:
    """Coalesced messages: each message arrives within the limit, but all messages do not."""
    texts, word, cpu = [], torch.ones(1), torch.device("cpu")
    group = group_of()
    if rank == 1:
        dist.recv(word, 0, group)
        for _ in range(10):
            time.sleep(0.4)
            dist.send(word, 0, group, tag=1)
        dist.recv(word, 0, group)
        dist.send(word, 0, group, tag=1)
        return texts
    got = [torch.zeros(1) for _ in range(11)]
    group._start_coalescing(cpu)
    for each in got:
        dist.irecv(each, 1, group, tag=1)
    together = group._end_coalescing(cpu)
    dist.send(word, 1, group)
    try:
        together.wait(timedelta(seconds=0.7))
        texts.append("no error")
    except native.ShmTimeout:
        if int(sum(got)) == 10:
            texts.append("timed out only in the wait for the last part")
    dist.send(word, 1, group)
    together.wait(timedelta(seconds=20))
    if int(sum(got)) != 11:
        texts.append(f"{got}")
    return texts


def test_a_wait_for_several_operations_has_one_limit_for_all() -> None:
    assert forked(given_up_together, 2, timeout=60) == [[], []]


def forked_amid(g: Group) -> list[int]:
    """Let a forked child of rank 0 wait for an operation that its parent started."""
    g.barrier()
    if g.rank == 1:
        time.sleep(0.5)
    x, got = np.ones(10), np.zeros(4)
    works = [g.submit(native.ALL_REDUCE, [x], [x], dtype=native.F64)]
    works.append(g.submit(native.RECV, [], [got], peer=1 - g.rank))
    codes = []
    if g.rank == 0:
        time.sleep(0.1)  # so that the worker runs the collective
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


def test_given_a_message_behind_another_then_its_own_timeout_applies() -> None:
    name, text = errors(send_behind_another, 2)[0]
    assert name == "ShmTimeout"
    assert "send 2 of group default (tag 2, 40 bytes) timed out after 0.2 s" in text


# ---- Time limits of calls and groups ----


def all_reduce_of(group: Any, seconds: float) -> None:
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=seconds)
    group.allreduce([torch.ones(3)], options).wait()


BY_CALL: dict[str, Callable[[Any, float], Any]] = {
    "all_reduce": all_reduce_of,
    "monitored_barrier": lambda group, s: group.monitored_barrier(timedelta(seconds=s)),
}
BY_GROUP: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(3), group=group),
    "sparse": lambda group: dist.all_reduce(torch.ones(3).to_sparse(), group=group),
    "coalesced": lambda group: group.allreduce_coalesced([torch.ones(3)] * 2).wait(),
    "barrier": lambda group: dist.barrier(group),
    "recv": lambda group: dist.recv(torch.ones(3), 1, group),
}


def only_rank_0_calls(rank: int) -> dict[str, str]:
    """The errors of rank 0, whose calls no other rank joins."""
    texts = {}
    calls: dict[str, Callable[[Any], Any]] = {}
    for name, by_call in BY_CALL.items():
        calls[f"call {name}"] = lambda group, by_call=by_call: by_call(group, 0.001)
    for name, by_group in BY_GROUP.items():
        calls[f"group {name}"] = by_group
    for name, call in calls.items():
        group = dist.new_group(backend="shm", timeout=timedelta(seconds=25))
        backend = group._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=25)
        group.monitored_barrier()  # all ranks arrive
        if name.startswith("group"):
            group.set_timeout(timedelta(seconds=0.25))
            assert backend.options._timeout == timedelta(seconds=0.25)
        if rank == 0:
            with pytest.raises(native.ShmTimeout) as caught:
                call(group)
            texts[name] = str(caught.value)
        dist.barrier()
    return texts


def test_a_limit_of_a_call_or_a_group_ends_the_call_and_names_the_missing_ranks() -> None:
    texts, *others = forked(only_rank_0_calls, 6)
    assert others == [{}] * 5 and len(texts) == len(BY_CALL) + len(BY_GROUP)
    for name, text in texts.items():
        assert ("0.001 s" if name.startswith("call") else "0.25 s") in text, text
        missing = text[text.index("waiting for") :]
        # A gather waits for one rank after another, as the sum of sparse tensors does.
        expected = [1] if name in ("group recv", "group sparse") else range(1, 6)
        assert all(re.search(rf"\b{rank}\b", missing) for rank in expected), text
