"""RingBuffer: a stream of slots from one rank to another."""

import time
from typing import Any

import pytest
import torch

from tutti.comm import symmetric
from tutti.structures import ConsumerGone, EndOfStream, RingBuffer
from tutti.world.errors import UsageError
from worlds import in_world


def use_rings(world: Any) -> int:
    taken = 0
    with symmetric.Heap(bytes=4 << 20) as heap:
        for slots in (1, 2, 8):
            for shape in ((1,), (3, 5), (4096,)):
                taken += _everything_arrives_in_order(heap, slots, shape)
        _both_ways_at_once(heap)
        _full_and_empty(heap)
        _ends_and_mistakes(heap)
    return taken


def _everything_arrives_in_order(heap: symmetric.Heap, slots: int, shape: tuple[int, ...]) -> int:
    """Every slot is filled with its number, which detects a read too early or too late."""
    count, taken = 500, 0
    with RingBuffer(heap, 2, 0, slots, shape, torch.int64) as ring:
        if heap.rank == 2:
            value = torch.empty(shape, dtype=torch.int64)
            for number in range(count):
                if number % 3 == 0:
                    with ring.reserve() as slot:
                        slot.fill_(number)
                else:
                    ring.put(value.fill_(number))
            ring.finish()
        elif heap.rank == 0:
            for number in range(count):
                if number % 2:
                    with ring.next() as item:
                        assert (item.numpy() == number).all()
                else:
                    assert (ring.get().numpy() == number).all()
                taken += 1
            with pytest.raises(EndOfStream, match=f"rank 2 has finished after {count} slots"):
                ring.get()
            assert ring.stats()["slots"] == count
    return taken


def _both_ways_at_once(heap: symmetric.Heap) -> None:
    with (
        RingBuffer(heap, 0, 1, 2, (1024,)) as there,
        RingBuffer(heap, 1, 0, 2, (1024,)) as back,
    ):
        for number in range(500):
            if heap.rank == 0:
                there.put(torch.full((1024,), float(number)))
                assert back.get()[7] == number + 0.5
            elif heap.rank == 1:
                with there.next() as item, back.reserve() as slot:
                    torch.add(item, 0.5, out=slot)


def _full_and_empty(heap: symmetric.Heap) -> None:
    with RingBuffer(heap, 0, 1, 3, slot_bytes=10) as ring:
        value = torch.arange(10, dtype=torch.uint8)
        if heap.rank == 0:
            assert [ring.try_put(value + n) for n in range(4)] == [True, True, True, False]
            with pytest.raises(
                symmetric.Timeout, match="a free slot in a ring of 3 slots to rank 1"
            ):
                ring.put(value, timeout=0.05)
            assert len(ring) == 3
        heap.barrier()
        if heap.rank == 1:
            with pytest.raises(ValueError, match="keeps"), ring.next():
                raise ValueError("an error keeps the slot")
            first = [ring.try_get() for _ in range(4)]
            assert [None if item is None else int(item[0]) for item in first] == [0, 1, 2, None]
            with pytest.raises(
                symmetric.Timeout, match="slot 3 of a ring from rank 0, but rank 0 is alive"
            ):
                ring.get(timeout=0.05)
        heap.barrier()
        if heap.rank == 0:
            with pytest.raises(ValueError, match="nothing"), ring.reserve() as slot:
                slot.fill_(99)
                raise ValueError("nothing is sent")
            assert len(ring) == 0
        heap.barrier()


def _ends_and_mistakes(heap: symmetric.Heap) -> None:
    with RingBuffer(heap, 0, 1, 2, (2,)) as ring:
        if heap.rank == 0:
            ring.put(torch.ones(2))
            ring.put(torch.ones(2))
            ring.finish()
            with pytest.raises(UsageError, match=r"put: .* finish\(\)"):
                ring.put(torch.ones(2))
            with pytest.raises(
                UsageError, match=r"get on rank 0.*producer is rank 0 and the consumer is rank 1"
            ):
                ring.get()
        elif heap.rank == 1:
            assert sum(int(item.sum()) for item in ring) == 4
        else:
            with pytest.raises(UsageError, match=r"put on rank 2.*producer is rank 0"):
                ring.put(torch.ones(2))
    with RingBuffer(heap, 0, 1, 2, (2,)) as ring:
        if heap.rank == 0:
            with pytest.raises(UsageError, match=r"value is torch.float32 of shape \(3,\)"):
                ring.put(torch.ones(3))
            with pytest.raises(ConsumerGone, match="rank 1 has cancelled the ring after 1 slots"):
                for _ in range(10):
                    ring.put(torch.ones(2))
        elif heap.rank == 1:
            ring.get()
            time.sleep(0.05)
            ring.cancel()
            with pytest.raises(UsageError, match=r"get: .* cancel\(\)"):
                ring.get()
    for ends in ((0, 0), (0, heap.size)):
        with pytest.raises(UsageError, match="two different ranks"):
            RingBuffer(heap, *ends, slot_bytes=1)
    with pytest.raises(UsageError, match="slot_shape"):
        RingBuffer(heap, 0, 1)
    with pytest.raises(UsageError, match="this RingBuffer is closed"):
        ring.put(torch.ones(2))


def test_a_ring_delivers_every_slot_in_order_and_ends_cleanly() -> None:
    assert in_world(use_rings, 3) == [4_500, 0, 0]
