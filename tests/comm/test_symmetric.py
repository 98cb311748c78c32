"""Symmetric memory on the CPU: every call of a heap and its tensors, with processes as ranks."""

import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tutti.comm import symmetric
from tutti.world.errors import RanksDiffer, UsageError
from worlds import in_world


def test_available_names_the_backends_of_a_device_with_reasons() -> None:
    assert symmetric.available("cpu")["shm"][0]
    if not torch.cuda.is_available():
        for works, reason in symmetric.available("cuda").values():
            assert not works and "no NVIDIA GPU" in reason


def test_a_heap_without_a_world_names_tutti_init() -> None:
    with pytest.raises(UsageError, match=r"tutti\.init"):
        symmetric.Heap()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_call_has_its_documented_effect(ranks: int) -> None:
    assert in_world(every_call, ranks) == ["done"] * ranks


def every_call(world: Any) -> str:
    with symmetric.Heap(bytes=4 << 20) as heap:
        right, left = (heap.rank + 1) % heap.size, (heap.rank - 1) % heap.size
        assert (heap.rank, heap.size, heap.backend) == (world.rank, world.size, "shm")
        assert heap.device == torch.device("cpu") and "shared memory" in heap.reason
        puts_and_gets(heap, left, right)
        signals(heap, left, right)
        counters(heap, right)
        memory_is_reused(heap)
        mistakes_are_named(heap)
        kept = heap.zeros(8).local
        stats = heap.stats()
        assert stats["puts"] > 0 and stats["allocations"] == 1 and stats["backend"] == "shm"
    # A view that outlives its heap can still be read; the heap itself cannot be used.
    assert kept.sum() == 0
    for use in (lambda: heap.empty(3), heap.barrier, heap.wait, lambda: heap.signal(0)):
        with pytest.raises(UsageError, match="closed"):
            use()
    heap.close()
    groups_have_heaps_of_their_own(world)
    return "done"


def puts_and_gets(heap: symmetric.Heap, left: int, right: int) -> None:
    t = heap.zeros((4, 6))
    assert t.local.shape == (4, 6) and t.local.data_ptr() % 64 == 0
    assert t.peer(heap.rank) is t.local and t.address(heap.rank) == t.local.data_ptr()
    t.put(torch.full((4, 6), float(heap.rank)), to=right)
    heap.barrier()
    assert (t.local == left).all() and (t.peer(right) == heap.rank).all()
    assert torch.equal(t.get(right), torch.full((4, 6), float(heap.rank)))
    assert t.get(right, at=20).tolist() == [heap.rank] * 4
    assert t.get(right, at=2, count=3).tolist() == [heap.rank] * 3
    heap.barrier()
    # Part of a tensor, from and into memory that is not contiguous.
    columns = torch.arange(12.0).view(6, 2) + 100 * heap.rank
    t.put(columns[:, 1], to=right, at=3)
    heap.barrier()
    expected = columns[:, 1] - 100 * heap.rank + 100 * left
    assert torch.equal(t.local.view(-1)[3:9], expected)
    target = torch.zeros(6, 2)
    t.get(heap.rank, at=3, out=target[:, 0])
    assert torch.equal(target[:, 0], expected) and (target[:, 1] == 0).all()
    assert heap.stats()["gets"] == 4 and heap.stats()["get_bytes"] == 4 * (24 + 4 + 3 + 6)
    # Writing through a peer's view is a put.
    heap.barrier()
    t.peer(right)[3, 5] = -1.0 - heap.rank
    heap.barrier()
    assert t.local[3, 5] == -1.0 - left
    heap.free(t)
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int16, torch.float8_e4m3fn):
        with heap.zeros(5, dtype) as t:
            t.put(torch.ones(5).to(dtype), to=right)
            heap.barrier()
            assert t.local.to(torch.complex64).sum() == 5
            heap.barrier()
    with heap.empty(0) as nothing, heap.zeros(()) as scalar:
        nothing.put(torch.empty(0), to=right)
        scalar.put(torch.tensor(7.0), to=right)
        heap.barrier()
        assert scalar.local.item() == 7 and nothing.local.numel() == 0


def signals(heap: symmetric.Heap, left: int, right: int) -> None:
    t = heap.zeros(1000)
    t.put_signal(torch.arange(1000.0) + heap.rank, to=right, slot=3, value=5)
    heap.wait(slot=3, at_least=5, source=left)
    assert torch.equal(t.local, torch.arange(1000.0) + left) and heap.read_signal(3) == 5
    heap.barrier()
    for _ in range(10):
        t.put_signal(torch.ones(2), to=right, slot=4, value=2, at=998, op="add")
    heap.wait(slot=4, at_least=20)
    assert heap.read_signal(4) == 20 and t.local[998:].tolist() == [1, 1]
    heap.signal(right, slot=5, value=9)
    heap.wait(5, 9)
    for to in range(heap.size):
        heap.signal(to, slot=6, value=1, op="add")
    heap.wait(6, heap.size)
    heap.fence()
    heap.quiet()
    for channel in (0, 7, 15, 0):
        heap.barrier(channel)
    # Waiting lets other threads of the process run.
    waiter = threading.Thread(target=heap.wait, args=(8, 1))
    waiter.start()
    heap.signal(heap.rank, slot=8)
    waiter.join(timeout=10)
    assert not waiter.is_alive()
    began = time.monotonic()
    with pytest.raises(symmetric.Timeout, match=r"0\.3 s for signal 9 to reach 2.*value is 0"):
        heap.wait(9, 2, timeout=0.3)
    assert time.monotonic() - began >= 0.3
    # Ctrl-C, or any other signal that Python handles, ends a wait.
    signal.signal(signal.SIGALRM, _raise)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(InterruptedError, match="alarm"):
        heap.wait(9, 2)
    heap.free(t)


def _raise(number: int, frame: object) -> None:
    raise InterruptedError("alarm")


def counters(heap: symmetric.Heap, right: int) -> None:
    c = heap.counters(3)
    assert len(c) == 3 and [c.load(i, at=right) for i in range(3)] == [0, 0, 0]
    heap.barrier()
    for _ in range(heap.size):
        c.fetch_add(1, 2, at=0)
    heap.barrier()
    assert c.load(1, at=0) == 2 * heap.size**2
    c.store(2, 10 + heap.rank, at=right)
    heap.barrier()
    assert c.compare_swap(2, 0, 1, at=right) == 10 + heap.rank == c.load(2, at=right)
    assert c.compare_swap(2, 10 + heap.rank, 1, at=right) == 10 + heap.rank
    heap.barrier()
    assert c.load(2) == 1
    assert c.fetch_add(2, -1) == 1 and c.fetch_add(2, -1) == 0 and c.load(2) == 2**64 - 1
    c.wait(2, 2**64 - 1)
    with pytest.raises(symmetric.Timeout, match=f"counter 0 of rank {right}"):
        c.wait(0, 10**6, timeout=0.2, at=right)
    # Memory that was used before is zero again.
    heap.free(c)
    with heap.counters(3, spacing=8) as packed:
        assert [packed.load(i) for i in range(3)] == [0, 0, 0]
        assert packed.address(1) == packed.address(0) + 8


def memory_is_reused(heap: symmetric.Heap) -> None:
    free = heap.stats()["free_bytes"]
    with heap.empty(1000) as first:
        place = first.offset
        assert heap.stats()["free_bytes"] < free
    assert heap.stats()["free_bytes"] == free
    with heap.empty(500) as second:
        assert second.offset == place
    with pytest.raises(UsageError, match="was freed"):
        first.put(torch.zeros(1), to=0)
    with pytest.raises(UsageError, match="no room for 8388608 bytes"):
        heap.empty(2 << 20)
    with pytest.raises(UsageError, match="already freed"):
        heap.free(first)


def mistakes_are_named(heap: symmetric.Heap) -> None:
    with heap.empty(10) as t, heap.counters(1) as c:
        for mistake, words in (
            (lambda: t.put(torch.zeros(11), to=0), "11 elements at 0 end beyond the tensor's 10"),
            (lambda: t.put(torch.zeros(5), to=0, at=6), "5 elements at 6"),
            (lambda: t.put(torch.zeros(5, dtype=torch.int64), to=0), "torch.float32.*torch.int64"),
            (lambda: t.put(torch.zeros(5), to=heap.size), f"rank {heap.size}"),
            (lambda: t.peer(-1), "rank -1"),
            (lambda: t.get(0, at=8, count=3), "3 elements at 8"),
            (lambda: t.put_signal(torch.zeros(1), to=0, slot=5000), "signals=5001"),
            (lambda: t.put_signal(torch.zeros(1), to=0, op="or"), "'set' or 'add'"),
            (lambda: heap.wait(slot=-1), "slot=-1"),
            (lambda: heap.barrier(16), "channel must be 0 to 15"),
            (lambda: c.load(1), "counter 1"),
            (lambda: heap.counters(0), "count=0"),
            (lambda: heap.empty((2, -1)), "negative"),
            (lambda: symmetric.all_reduce(t, "summ"), "did you mean sum"),
            (lambda: symmetric.all_reduce(t, "bxor"), "not defined for torch.float32"),
            (lambda: symmetric.all_reduce(t, algorithm="tree"), "algorithm='tree'"),
            (lambda: symmetric.all_reduce(t, out=torch.zeros(9)), r"\(10,\) torch.float32"),
            (
                lambda: symmetric.all_reduce(t, algorithm="ring", out=torch.zeros(10)),
                "symmetric tensor of the same heap",
            ),
            (lambda: symmetric.all_gather(t, out=torch.zeros(9)), "ranks × 10"),
            (lambda: symmetric.all_reduce(t.local), "got Tensor.*heap.empty"),
        ):
            with pytest.raises(UsageError, match=words):
                mistake()
        if heap.size == 4:
            with pytest.raises(UsageError, match="multiple of 4"):
                symmetric.reduce_scatter(t)
        else:
            assert symmetric.reduce_scatter(t).shape == (10 // heap.size,)
    for words, mistake in (
        ("support device cpu", {"backend": "cuda"}),
        ("backend='mpi'", {"backend": "mpi"}),
        ("got 0 and", {"bytes": 0}),
        ("timeout", {"timeout": 0.0}),
        ("must be cpu or cuda", {"device": "meta"}),
    ):
        with pytest.raises(UsageError, match=words):
            symmetric.Heap(**mistake)  # type: ignore[arg-type]


def groups_have_heaps_of_their_own(world: Any) -> None:
    if world.size < 4:
        return
    odd = dist.new_group([1, 3])
    even = dist.new_group([0, 2])
    group = odd if world.rank % 2 else even
    with symmetric.Heap(group, bytes=4096) as small, symmetric.Heap(bytes=4096) as large:
        assert (small.rank, small.size) == (world.rank // 2, 2)
        pair, everyone = small.zeros(4), large.zeros(4)
        pair.put(torch.full((4,), float(world.rank)), to=1 - small.rank)
        everyone.local.fill_(1)
        small.barrier()
        assert (pair.local == (world.rank + 2) % 4).all()
        assert symmetric.all_reduce(everyone)[0] == 4 and symmetric.all_reduce(pair)[0] in (2, 4)


def test_different_calls_are_named_and_the_heap_stays_usable() -> None:
    assert in_world(ranks_that_differ, 2) == ["done"] * 2


def ranks_that_differ(world: Any) -> str:
    with pytest.raises(
        RanksDiffer, match=r"rank 0 creates a heap of 4096 .* rank 1 creates a heap of 8192"
    ):
        symmetric.Heap(bytes=4096 * (world.rank + 1))
    with pytest.raises(RanksDiffer, match=r"10 signals.*11 signals"):
        symmetric.Heap(bytes=4096, signals=10 + world.rank)
    with symmetric.Heap(bytes=65536) as heap:
        with pytest.raises(RanksDiffer, match=r"rank 0 calls empty\(\(1,\).*rank 1 calls .*\(2,\)"):
            heap.empty(1 + world.rank)
        with pytest.raises(RanksDiffer, match=r"float32.*float64"):
            heap.zeros(2, (torch.float32, torch.float64)[world.rank])
        first, second = heap.zeros(2), heap.zeros(2)
        with pytest.raises(RanksDiffer, match="calls free"):
            heap.free((first, second)[world.rank])
        with pytest.raises(RanksDiffer, match="calls counters"):
            heap.counters(3) if world.rank else heap.empty(3)
        # One rank has too little memory: all ranks raise RanksDiffer.
        with pytest.raises(RanksDiffer, match="bytes at -1"):
            heap.empty(10 if world.rank else 100_000)
        assert heap.stats()["allocations"] == 2
        assert symmetric.all_reduce(heap.zeros(5)).tolist() == [0] * 5
    return "done"
