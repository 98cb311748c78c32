"""Structures when a rank is killed: waits end and name the rank; values stay intact."""

import signal
from pathlib import Path

from heap_ranks import run_ranks

HEAD = """
from tutti.comm.shm.native import core
from tutti.structures import *

def die():
    os.kill(os.getpid(), signal.SIGKILL)

heap = symmetric.Heap(bytes=1 << 20)
"""


def outputs(program: str, size: int, folder: Path, dead: int) -> list[list[str]]:
    ranks = run_ranks(HEAD + program + "\nos._exit(0)\n", size, folder)
    for rank, (code, out) in enumerate(ranks):
        assert code == (-signal.SIGKILL if rank == dead else 0), f"rank {rank}: {code}\n{out}"
    return [out.splitlines() for _, out in ranks]


def test_a_killed_producer_is_named_after_its_last_slot(tmp_path: Path) -> None:
    program = """
ring = RingBuffer(heap, 0, 1, 4, (1000,))
other = RingBuffer(heap, 1, 0, 4, (1000,))
if rank == 0:
    for number in range(3):
        ring.put(torch.full((1000,), float(number)))
    with ring.reserve() as slot:  # dies while it writes a slot
        slot[:500] = 99
        die()
for number in range(3):
    with ring.next() as item:
        assert (item == number).all()
caught(lambda: ring.get())
caught(lambda: [other.put(torch.ones(1000)) for _ in range(9)])
assert other.stats()["slots"] == 4
"""
    _, (first, second) = outputs(program, 2, tmp_path, dead=0)
    assert first.startswith("PeerDied 0 rank 0 died while this rank waited for slot 3 of a ring")
    assert second.startswith(
        "PeerDied 0 rank 0 died while this rank waited for a free slot in a ring of 4"
    )


def test_a_killed_writer_leaves_values_intact_and_blocks_no_rank(tmp_path: Path) -> None:
    program = """
cache = ParameterCache(heap, 3, 100)
found = HashMap(heap, 16, (100,))
store = AdapterStore(heap, 3, {"w": (100,)})
cache.publish(rank, torch.full((100,), float(rank)))
if rank == 1:
    found.put(5, torch.full((100,), 5.0))
    store.put("adapter", {"w": torch.ones(100)})
heap.barrier()
if rank == 1:
    # The state of a rank that is killed during a write: it holds the claims, and half of the next
    # version is written.
    state = core().tutti_rows_state(cache._native, 1)
    before = core().tutti_load(state)
    assert core().tutti_compare_swap(state, before, before | 2) == before
    row = cache._views_kept[1].view(torch.float32)
    row[2:102][:50] = 99  # version 2 would go into the first copy
    shard = found._views_kept[found.owner(5)].view(torch.int64)
    at = int((shard == 6).nonzero()[0]) + 1
    state = shard.data_ptr() + 8 * at
    before = core().tutti_load(state)
    assert core().tutti_compare_swap(state, before, before | 2) == before
    announcement = store._announcement
    assert core().tutti_compare_swap(announcement, 0, 2) == 0
    die()
for _ in range(1000):
    assert (cache.lookup(1) == 1).all() and (found[5] == 5).all()
caught(lambda: cache.wait_for(1, 2))
found.add(5, torch.ones(100))  # takes over the dead rank's claim, unless the other rank has done so
store.activate("adapter", everywhere=True)  # and copies from the dead rank's memory
assert (store.active()["w"] == 1).all()
# The heap has lost a rank, so ranks 0 and 2 synchronise by signals.
heap.signal(to=2 - rank, slot=7)
heap.wait(slot=7, source=2 - rank)
assert (found[5] == 7).all(), found[5]
assert len(found) == 1
"""
    first, _, third = outputs(program, 3, tmp_path, dead=1)
    for lines in (first, third):
        (line,) = lines
        assert line.startswith(
            "PeerDied 1 rank 1 died while this rank waited for version 2 of row 1"
        )
