"""Symmetric memory under load on the CPU: no lost update, no torn or premature read."""

import time
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm import symmetric
from worlds import in_world


def test_no_update_is_lost_and_no_read_is_premature() -> None:
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
        # Barriers: no rank is ever a whole turn ahead.
        turns = heap.counters(1)
        for turn in range(1, 501):
            turns.store(0, turn)
            heap.barrier()
            assert all(turns.load(0, at=rank) >= turn for rank in range(heap.size))
            heap.barrier()
            assert all(turns.load(0, at=rank) <= turn + 1 for rank in range(heap.size))
        signals_never_overtake_their_bytes(heap, 5000)
    # The same with one core per rank, so that ranks run at the same time.
    pair = dist.new_group([0, 1])
    if world.rank < 2:
        with symmetric.Heap(pair, bytes=1 << 20) as heap:
            signals_never_overtake_their_bytes(heap, 20_000)
    dist.barrier()
    return "done"


def signals_never_overtake_their_bytes(heap: symmetric.Heap, count: int) -> None:
    """Even ranks send to the next rank: 8 slots in turn, each filled with its number."""
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
            values = slots.local[row]
            assert values[0].item() == number and bool((values == number).all()), (number, values)
            heap.signal(peer, slot=1, value=number)
    heap.barrier()
    heap.free(slots)
