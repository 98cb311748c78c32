"""Symmetric memory when ranks die, leave or are on other hosts: every wait ends with a reason."""

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from heap_ranks import HEAD, run_ranks
from tutti.comm.shm import native
from tutti.comm.symmetric import cpu_heap
from tutti.comm.symmetric.heap_rendezvous import HeapRendezvous
from tutti.world.errors import UsageError
from worlds import start_warm


def test_a_peer_that_dies_or_leaves_ends_every_wait(tmp_path: Path) -> None:
    program = """
heap = symmetric.Heap(bytes=65536)
other = symmetric.Heap(bytes=65536)
t, c = heap.zeros(10_000), heap.counters(1)
heap.barrier()
if rank == 1:  # leaves one heap on an error, without the others
    try:
        with other:
            raise ValueError
    except ValueError:
        pass
if rank == 0:
    caught(lambda: other.wait(0, source=1))
    caught(other.barrier)
heap.barrier()
if rank == 2:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
caught([lambda: heap.wait(0, source=2), lambda: heap.wait(0)][rank])
caught([lambda: c.wait(0, 1), lambda: symmetric.all_reduce(t)][rank])
caught([heap.barrier, lambda: heap.empty(3)][rank])
caught(heap.barrier)
# Calls that need no peer, or only a living one, still work.
t.put(torch.ones(5), to=1 - rank)
assert time.monotonic() - began < 10
caught(heap.close)
caught(lambda: heap.signal(0))
os._exit(0)  # gloo would wait for the dead rank
"""
    (code0, out0), (code1, out1), (code2, _) = run_ranks(program, 3, tmp_path)
    assert (code0, code1, code2) == (0, 0, -signal.SIGKILL), out0 + out1
    lines0, lines1 = out0.splitlines(), out1.splitlines()
    assert lines0[0].startswith("PeerLeft 1 rank 1 closed the heap while this rank waited for sig")
    assert lines0[1].startswith("PeerLeft 1")
    for line in (*lines0[2:5], *lines1[:2]):
        assert line.startswith("PeerDied 2 rank 2 died while this rank waited for "), out0 + out1
    assert "all_reduce" in lines1[1]
    for line in (lines0[5], *lines1[2:4]):
        assert line.startswith("UsageError - this heap is unusable after"), out0 + out1
    # A heap that is unusable closes without waiting for the others.
    assert lines0[6] == lines1[4] == "nothing raised"
    assert lines0[7].startswith("UsageError - this heap is closed")


def test_a_late_rank_is_named(tmp_path: Path) -> None:
    program = """
if rank == 0:
    caught(lambda: symmetric.Heap(bytes=4096, timeout=0.5))
dist.barrier()
group = dist.new_group([0, 1])
dist.barrier()
heap = symmetric.Heap(group, bytes=4096, timeout=2)
if rank == 0:
    caught(heap.barrier)
    caught(heap.barrier)
dist.barrier()
"""
    (code0, out0), (code1, out1) = run_ranks(program, 2, tmp_path)
    assert (code0, code1) == (0, 0), out0 + out1
    first, second, third = out0.splitlines()
    assert first.startswith("Timeout - symmetric.Heap: rank 0 waited 0.5 s for rank 1")
    assert second.startswith("Timeout - rank 0 waited 2 s for rank 1 in a barrier")
    assert third.startswith("UsageError - this heap is unusable")


def test_a_heap_that_fails_half_way_leaves_nothing_in_the_backend(tmp_path: Path) -> None:
    program = """
import gc
from tutti.comm.shm import native, native_group, register
from tutti.comm.symmetric.cpu_heap import CpuMemory

register()
group = dist.new_group(backend="shm")
heap = symmetric.Heap(group, bytes=4096)
exchange = CpuMemory.exchange

def delay_exchange(number):
    exchanges = iter(range(1, 100))
    def delayed(self, text, what):
        if rank == 1 and next(exchanges) == number:
            dist.barrier()  # until rank 0 has timed out
        return exchange(self, text, what)
    CpuMemory.exchange = delayed

def memory(name):
    gc.collect()
    return sum(name in line for line in open("/proc/self/maps"))

delay_exchange(1)
caught(lambda: symmetric.Heap(group, bytes=4096, timeout=0.5))
print(native.core().tutti_group_remove_block(native_group(group), 2), memory("tutti-shm:heap 2"))
rank or dist.barrier()
t, before = heap.zeros(8), memory("tutti-shm:heap 1")
heap.memory.timeout = 0.5
delay_exchange(2)  # the second of three exchanges that connect the heap's own collectives
caught(lambda: symmetric.all_reduce(t))
print(memory("tutti-shm:heap 1") - before)
rank or dist.barrier()
dist.barrier()
"""
    (code0, out0), (code1, out1) = run_ranks(program, 2, tmp_path)
    assert (code0, code1) == (0, 0), out0 + out1
    heap, left, reduction, more = out0.splitlines()
    assert heap.startswith("Timeout - rank 0 waited 0.5 s for rank 1 in Heap"), out0
    assert left == f"{native.BAD_ARGUMENT} 0", out0
    assert reduction.startswith("Timeout - rank 0 waited 0.5 s for rank 1 in all_reduce"), out0
    assert more == "0", out0


def test_no_memory_is_left_when_all_ranks_are_killed(tmp_path: Path) -> None:
    program = """
heap = symmetric.Heap(bytes=1 << 20)
t = heap.zeros(1000)
open(f"{folder}/ready{rank}", "w").close()
heap.wait(timeout=50)
"""
    (tmp_path / "program.py").write_text(HEAD + program)
    ranks = [start_warm([tmp_path / "program.py", str(rank), "2", tmp_path]) for rank in range(2)]
    try:
        deadline = time.monotonic() + 40
        while len(list(tmp_path.glob("ready*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        heaps = heap_files(*(rank.pid for rank in ranks))
        assert len(heaps) == 2
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    all_pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    assert not heaps & heap_files(*all_pids)


def heap_files(*pids: int) -> set[tuple[int, int]]:
    """Return the heaps that these processes hold open, as device and inode."""
    found = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                if "memfd:tutti-shm:heap" in str(link.readlink()):
                    found.add((link.stat().st_dev, link.stat().st_ino))
            except OSError:  # closed meanwhile, or another user's
                continue
    return found


class OtherHostRendezvous(HeapRendezvous):
    """The rendezvous of rank 0 with a rank 1 that has boot id `boot`."""

    def __init__(self, boot: str, size: int = 2) -> None:
        self.rank, self.size, self.number = 0, size, 1
        self.boot = boot

    def exchange(self, value: Any) -> list[Any]:
        if not isinstance(value, dict):
            return [value, None]
        value |= {"host": "ox", "boot": "here"}
        peer = value | {"host": "owl", "boot": self.boot, "pid": 1, "fd": 99999}
        return [value, peer][: self.size]


def test_ranks_on_different_hosts_are_refused_by_name() -> None:
    with pytest.raises(
        UsageError, match=r"rank 0 is on ox and rank 1 is on owl: make a group per host"
    ):
        cpu_heap._open_segments(OtherHostRendezvous("there"), native.core(), 4096, 1, 1)
    with pytest.raises(UsageError, match=r"rank 0 cannot open the memory of rank 1 \(process 1 on"):
        cpu_heap._open_segments(OtherHostRendezvous("here"), native.core(), 4096, 1, 1)


def test_too_little_memory_names_the_bytes_needed() -> None:
    with pytest.raises(UsageError, match=str(1 << 50)):
        cpu_heap._open_segments(OtherHostRendezvous("here", 1), native.core(), 1 << 50, 1, 1)


def test_a_mapping_lives_as_long_as_a_tensor_in_it() -> None:
    import torch

    core = native.core()
    segment = core.tutti_segment_create(b"test", 4096)
    fd = core.tutti_segment_fd(segment)
    block = cpu_heap._as_buffer(core, segment, 4096)
    tensor = torch.frombuffer(block, dtype=torch.float32)
    assert ctypes.sizeof(block) == 4096
    del block
    tensor.fill_(3)
    assert os.fstat(fd).st_size == 4096 and tensor.sum() == 3 * 1024
    del tensor
    with pytest.raises(OSError):
        os.fstat(fd)
