"""Symmetric memory on CPU: what each call promises, with real processes as ranks."""

import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tutti.comm import shm, symmetric
from tutti.comm.shm.compiled import compiled_front
from tutti.comm.symmetric.allocator import Allocator
from tutti.comm.symmetric.staged import _stages as stages
from tutti.world.errors import RanksDiffer, UsageError
from worlds import in_world

REDUCED = {
    "sum": [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32],
    "mean": [torch.float32, torch.bfloat16],
    "product": [torch.float32, torch.int64],
    "min": [torch.float32, torch.int16, torch.uint8],
    "max": [torch.float64, torch.float16, torch.int8],
    "band": [torch.int32],
    "bor": [torch.uint8, torch.bool],
    "bxor": [torch.int64],
}
ODD_COUNTS = (0, 1, 3, 15, 17, 255, 4097)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(0, 3000)),
            st.tuples(st.just("give"), st.integers(0, 50)),
        ),
        max_size=60,
    ),
    st.sampled_from([64, 256]),
)
def test_allocations_never_overlap_and_all_room_comes_back(
    calls: list[tuple[str, int]], alignment: int
) -> None:
    allocator = Allocator(16384, alignment)
    live: dict[int, int] = {}
    for call, number in calls:
        if call == "take":
            try:
                offset = allocator.take(number)
            except UsageError:
                assert allocator.largest_gap < number or allocator.largest_gap == 0
                continue
            assert offset % alignment == 0 and offset + number <= 16384
            for other, length in live.items():
                assert offset + max(number, 1) <= other or other + max(length, 1) <= offset
            live[offset] = number
        elif live:
            offset = sorted(live)[number % len(live)]
            del live[offset]
            allocator.give(offset)
        assert allocator.free + sum(allocator.taken.values()) == 16384
    for offset in live:
        allocator.give(offset)
    assert allocator.largest_gap == allocator.free == 16384


def test_a_full_heap_says_what_is_missing() -> None:
    allocator = Allocator(1024)
    allocator.take(512)
    with pytest.raises(UsageError, match=r"no room for 600 bytes.*1024 bytes 512 are free"):
        allocator.take(600)


def test_there_is_shared_memory_on_cpu_and_a_reason_for_what_there_is_not() -> None:
    assert symmetric.available("cpu")["shm"][0]
    if not torch.cuda.is_available():
        for works, reason in symmetric.available("cuda").values():
            assert not works and "no NVIDIA GPU" in reason


def test_a_heap_without_a_world_says_how_to_get_one() -> None:
    with pytest.raises(UsageError, match=r"tutti\.init"):
        symmetric.Heap()


# ---- One-sided memory ----


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_call_does_what_it_promises(ranks: int) -> None:
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
        collectives(heap)
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
    staged(world)
    torch_distributed_needs_no_copies(world)
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
    # Writing through a peer's view is a put.
    heap.barrier()
    t.peer(right)[3, 5] = -1.0 - heap.rank
    heap.barrier()
    assert t.local[3, 5] == -1.0 - left
    heap.free(t)
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int16, torch.float8_e4m3fn):
        with heap.zeros(5, dtype) as each:
            each.put(torch.ones(5).to(dtype), to=right)
            heap.barrier()
            assert each.local.to(torch.complex64).sum() == 5
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
    with pytest.raises(UsageError, match="freed before"):
        heap.free(first)


def mistakes_are_named(heap: symmetric.Heap) -> None:
    with heap.empty(10) as t, heap.counters(1) as c:
        for mistake, words in (
            (lambda: t.put(torch.zeros(11), to=0), "11 elements at 0 end beyond the tensor's 10"),
            (lambda: t.put(torch.zeros(5), to=0, at=6), "5 elements at 6"),
            (lambda: t.put(torch.zeros(5, dtype=torch.int64), to=0), "float32, not torch.int64"),
            (lambda: t.put(torch.zeros(5), to=heap.size), f"rank {heap.size}"),
            (lambda: t.peer(-1), "rank -1"),
            (lambda: t.get(0, at=8, count=3), "3 elements at 8"),
            (lambda: t.put_signal(torch.zeros(1), to=0, slot=5000), "signals=5001"),
            (lambda: t.put_signal(torch.zeros(1), to=0, op="or"), "'set' or 'add'"),
            (lambda: heap.wait(slot=-1), "slot=-1"),
            (lambda: heap.barrier(16), "channels are 0 to 15"),
            (lambda: c.load(1), "counter 1"),
            (lambda: heap.counters(0), "count=0"),
            (lambda: heap.empty((2, -1)), "negative"),
            (lambda: symmetric.all_reduce(t, "summ"), "did you mean sum"),
            (lambda: symmetric.all_reduce(t, "bxor"), "no meaning for torch.float32"),
            (lambda: symmetric.all_reduce(t, algorithm="tree"), "algorithm='tree'"),
            (lambda: symmetric.all_reduce(t, out=torch.zeros(9)), r"\(10,\) torch.float32"),
            (
                lambda: symmetric.all_reduce(t, algorithm="ring", out=torch.zeros(10)),
                "symmetric tensor of the same heap",
            ),
            (lambda: symmetric.all_gather(t, out=torch.zeros(9)), "ranks × 10"),
            (lambda: symmetric.all_reduce(t.local), "of a Tensor: make it with heap.empty"),
        ):
            with pytest.raises(UsageError, match=words):
                mistake()
        if heap.size == 4:
            with pytest.raises(UsageError, match="multiple of 4"):
                symmetric.reduce_scatter(t)
        else:
            assert symmetric.reduce_scatter(t).shape == (10 // heap.size,)
    for words, mistake in (
        ("serve device cpu", {"backend": "cuda"}),
        ("backend='mpi'", {"backend": "mpi"}),
        ("bytes=0", {"bytes": 0}),
        ("timeout", {"timeout": 0.0}),
        ("lies on cpu or cuda", {"device": "meta"}),
    ):
        with pytest.raises(UsageError, match=words):
            symmetric.Heap(**mistake)  # type: ignore[arg-type]


def collectives(heap: symmetric.Heap) -> None:
    for op, dtypes in REDUCED.items():
        for dtype in dtypes:
            for count in ODD_COUNTS if heap.size < 4 else (3, 4097):
                inputs = [_values(count, dtype, rank) for rank in range(heap.size)]
                expected = _reduced(inputs, op)
                with heap.empty(count, dtype) as t, heap.empty(count, dtype) as other:
                    for algorithm in ("auto", "one_shot", "two_shot", "ring"):
                        t.local.copy_(inputs[heap.rank])
                        symmetric.all_reduce(t, op, algorithm)
                        _same(t.local, expected, f"{op} {dtype} {count} {algorithm}")
                    t.local.copy_(inputs[heap.rank])
                    out = symmetric.all_reduce(t, op, out=torch.empty(count, dtype=dtype))
                    _same(out, expected, f"{op} out of place")
                    for algorithm in ("one_shot", "two_shot", "ring"):
                        symmetric.all_reduce(t, op, algorithm, out=other)
                        _same(other.local, expected, f"{op} {algorithm} into the heap")
                        assert torch.equal(t.local, inputs[heap.rank])
    # Large enough for several chunks, and values whose sum depends on the order of adding.
    torch.manual_seed(heap.rank)
    with heap.empty(300_001) as t:
        results = []
        values = torch.randn(300_001) * 10 ** torch.randint(-3, 4, (300_001,))
        for algorithm in ("one_shot", "two_shot", "ring"):
            t.local.copy_(values)
            results.append(symmetric.all_reduce(t, algorithm=algorithm).clone())
            heap.barrier()
            assert all(torch.equal(t.peer(rank), t.local) for rank in range(heap.size))
            heap.barrier()
        assert torch.equal(results[0], results[1])
        assert torch.allclose(results[0], results[2], rtol=1e-4, atol=1e-2)
    with heap.empty((3, 2), torch.int64) as t:
        t.local.fill_(heap.rank)
        gathered = symmetric.all_gather(t)
        assert gathered.shape == (3 * heap.size, 2)
        assert gathered[:, 0].tolist() == [rank for rank in range(heap.size) for _ in range(3)]
        stacked = torch.empty((heap.size, 3, 2), dtype=torch.int64)
        assert symmetric.all_gather(t, out=stacked)[-1].unique().tolist() == [heap.size - 1]
    with heap.empty((2 * heap.size, 3)) as t:
        rows = torch.arange(6.0 * heap.size).view(-1, 3)
        t.local.copy_(rows * (heap.rank + 1))
        mine = symmetric.reduce_scatter(t)
        factor = heap.size * (heap.size + 1) / 2
        assert torch.equal(mine, rows[2 * heap.rank : 2 * heap.rank + 2] * factor)
        assert torch.equal(symmetric.reduce_scatter(t, "max"), mine / factor * heap.size)


def _values(count: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Small whole numbers: their sums and products are exact in every dtype."""
    return ((torch.arange(count) * 7 + rank * 3) % 3 + (dtype != torch.bool)).to(dtype)


def _reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    wide = [part.double() if part.is_floating_point() else part for part in parts]
    total = wide[0]
    for part in wide[1:]:
        total = {
            "sum": torch.add,
            "mean": torch.add,
            "product": torch.mul,
            "min": torch.minimum,
            "max": torch.maximum,
            "band": torch.bitwise_and,
            "bor": torch.bitwise_or,
            "bxor": torch.bitwise_xor,
        }[op](total, part)
    return (total / len(parts) if op == "mean" else total).to(parts[0].dtype)


def _same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert torch.equal(found, expected), f"{what}: {found[:8]} is not {expected[:8]}"


def groups_have_heaps_of_their_own(world: Any) -> None:
    if world.size < 4:
        return
    odd = dist.new_group([1, 3])
    even = dist.new_group([0, 2])
    group = odd if world.rank % 2 else even
    with symmetric.Heap(group, bytes=4096) as small, symmetric.Heap(bytes=4096) as large:
        assert (small.rank, small.size) == (world.rank // 2, 2)
        mine, all_of = small.zeros(4), large.zeros(4)
        mine.put(torch.full((4,), float(world.rank)), to=1 - small.rank)
        all_of.local.fill_(1)
        small.barrier()
        assert (mine.local == (world.rank + 2) % 4).all()
        assert symmetric.all_reduce(all_of)[0] == 4 and symmetric.all_reduce(mine)[0] in (2, 4)


def staged(world: Any) -> None:
    for shape, dtype in (((10, 3), torch.float32), ((), torch.int64), ((1 << 17,), torch.float32)):
        tensor = torch.ones(shape, dtype=dtype)
        assert (symmetric.all_reduce_staged(tensor) == world.size).all()
    columns = torch.ones(4, 4).t()[1:]
    assert (symmetric.all_reduce_staged(columns, "max") == 1).all()
    with pytest.raises(UsageError, match="1048576"):
        symmetric.all_reduce_staged(torch.ones(1 << 19))
    groups = [dist.new_group() for _ in range(2)]
    symmetric.all_reduce_staged(torch.ones(1), group=groups[0])
    destroyed = next(stage for stage in stages.values() if stage.heap.group is groups[0])
    dist.destroy_process_group(groups[0])
    symmetric.all_reduce_staged(torch.ones(1), group=groups[1])
    assert destroyed.heap.closed and destroyed not in stages.values()


def torch_distributed_needs_no_copies(world: Any) -> None:
    """The backend `shm` knows the heaps of its groups, and works on their tensors in place."""
    shm.register()
    for front in ("compiled", "plain") if compiled_front()[0] else ("plain",):
        group = dist.new_group(backend="cpu:shm", pg_options=shm.ShmOptions(front=front))
        with symmetric.Heap(group, bytes=1 << 20) as heap:
            assert heap.stats()["known_to_backend"] == 1
            t = heap.zeros(100_000)
            kept = t.local
            for tensor in (t.local, t.local[500:700], t.local[:0]):
                tensor.fill_(world.rank + 1)
                dist.all_reduce(tensor, group=group)
                assert (tensor == world.size * (world.size + 1) / 2).all()
            # Different places on different ranks: not in place, but right.
            part = t.local[world.rank * 8 :][:64].fill_(1)
            dist.all_reduce(part, group=group)
            assert (part == world.size).all()
            heap.barrier()
        dist.all_reduce(kept.fill_(1), group=group)
        assert (kept == world.size).all()
        with symmetric.Heap(group, bytes=4096) as heap:  # its group ends before the heap does
            dist.destroy_process_group(group)
            heap.barrier()


def test_ranks_that_differ_are_named_and_the_heap_goes_on() -> None:
    assert in_world(ranks_that_differ, 2) == ["done"] * 2


def ranks_that_differ(world: Any) -> str:
    with pytest.raises(RanksDiffer, match=r"rank 0 makes a heap of 4096 .* rank 1 one of 8192"):
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
        # One rank has no room for what it asks for: all are told of the difference.
        with pytest.raises(RanksDiffer, match="bytes at -1"):
            heap.empty(10 if world.rank else 100_000)
        assert heap.stats()["allocations"] == 2
        assert symmetric.all_reduce(heap.zeros(5)).tolist() == [0] * 5
    return "done"


# ---- Stress ----


def test_nothing_is_lost_or_seen_too_early() -> None:
    results = in_world(stress, 4, timeout=100)
    assert results == ["done"] * 4


def stress(world: Any) -> str:
    with symmetric.Heap(bytes=1 << 20) as heap:
        c, box = heap.counters(4), heap.zeros(2, torch.int64)
        # Additions from all ranks to one counter: none is lost, and no ticket is given twice.
        tickets = heap.zeros((4, 5000), torch.int64)
        for turn in range(5000):
            tickets.local[0, turn] = c.fetch_add(0, 1, at=0)
        tickets.put(tickets.local[0], to=0, at=5000 * heap.rank)
        heap.barrier()
        assert c.load(0, at=0) == 20_000
        if heap.rank == 0:
            assert torch.equal(tickets.local.view(-1).sort().values, torch.arange(20_000))
        # A lock by compare_swap: two words that are always changed together never differ.
        shared = box.peer(0)
        for _ in range(300):
            while c.compare_swap(1, 0, 1, at=0) != 0:
                time.sleep(0)
            assert shared[0].item() == shared[1].item()
            shared[0] += 1
            shared[1] += 1
            c.store(1, 0, at=0)
        heap.barrier()
        assert shared.tolist() == [1200, 1200]
        # Barriers: nobody is ever a whole turn ahead.
        turns = heap.counters(1)
        for turn in range(1, 501):
            turns.store(0, turn)
            heap.barrier()
            assert all(turns.load(0, at=rank) >= turn for rank in range(heap.size))
            heap.barrier()
            assert all(turns.load(0, at=rank) <= turn + 1 for rank in range(heap.size))
        signals_never_overtake_their_bytes(heap, 5000)
    # The same with a core for each rank, where they really run at the same time.
    pair = dist.new_group([0, 1])
    if world.rank < 2:
        with symmetric.Heap(pair, bytes=1 << 20) as heap:
            signals_never_overtake_their_bytes(heap, 20_000)
    dist.barrier()
    return "done"


def signals_never_overtake_their_bytes(heap: symmetric.Heap, count: int) -> None:
    """Even ranks send to the next: 8 slots in turn, each full of its number."""
    slots = heap.zeros((8, 64), torch.int64)
    sending = heap.rank % 2 == 0
    peer = heap.rank + 1 if sending else heap.rank - 1
    message = torch.empty(64, dtype=torch.int64)
    heap.signal(heap.rank, slot=0, value=0)
    heap.signal(heap.rank, slot=1, value=0)
    heap.barrier()
    for number in range(1, count + 1):
        row = number % 8
        if sending:
            if number > 8:
                heap.wait(1, number - 8, source=peer)
            slots.put_signal(message.fill_(number), to=peer, slot=0, value=number, at=64 * row)
        else:
            heap.wait(0, number, source=peer)
            seen = slots.local[row]
            assert seen[0].item() == number and bool((seen == number).all()), (number, seen)
            heap.signal(peer, slot=1, value=number)
    heap.barrier()
    heap.free(slots)
