"""Symmetric memory on one NVIDIA GPU that ranks share under MPS: correct results, and times.

Run with `pytest -m gpu -s tests/comm/test_symmetric_cuda.py` to see reasons and times.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from exact_reductions import check_same, reduced, whole_numbers
from tutti.comm import symmetric
from tutti.world.errors import RanksDiffer, UsageError
from worlds import in_world

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

REDUCED = {
    "sum": [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64],
    "mean": [torch.float32],
    "product": [torch.int32],
    "min": [torch.float32],
    "max": [torch.float16, torch.int16],
    "bxor": [torch.int64],
    "bor": [torch.bool],
}
ODD_COUNTS = (1, 3, 64, 255, 4096, 100_001)


def test_available_names_each_cuda_backend_with_a_reason() -> None:
    for backend, (works, reason) in symmetric.available("cuda").items():
        print(f"{backend}: {works}: {reason}")
    assert symmetric.available("cuda")["cuda"][0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_call_has_its_documented_effect_on_a_gpu(ranks: int) -> None:
    results = in_world(every_call, ranks, gpu=True, timeout=240)
    print(json.dumps(results[0], indent=1))
    assert [result["done"] for result in results] == [True] * ranks


def every_call(world: Any) -> dict[str, Any]:
    timings = {}
    began = time.perf_counter()
    with symmetric.Heap(bytes=64 << 20, timeout=20.0) as heap:
        timings["make the heap, s"] = time.perf_counter() - began
        assert (heap.backend, heap.device.type, heap.size) == ("cuda", "cuda", world.size)
        left, right = (heap.rank - 1) % heap.size, (heap.rank + 1) % heap.size
        for step in (
            puts_and_gets,
            signals,
            counters,
            streams,
            graphs,
            repeated,
            collectives,
            mistakes,
        ):
            began = time.perf_counter()
            step(heap, left, right)
            torch.cuda.synchronize()
            timings[f"{step.__name__}, s"] = time.perf_counter() - began
        stats = heap.stats()
        reason = heap.reason
    assert stats["ranks_on_gpu"] == world.size
    with pytest.raises(UsageError, match="closed"):
        heap.barrier()
    staged(world)
    refusals(world)
    return {"done": True, "reason": reason, "stats": stats, "seconds": timings}


def puts_and_gets(heap: symmetric.Heap, left: int, right: int) -> None:
    t = heap.zeros((4, 6))
    assert t.local.is_cuda and t.local.data_ptr() % 256 == 0
    t.put(torch.full((4, 6), float(heap.rank), device=heap.device), to=right)
    heap.barrier()
    assert (t.local == left).all() and (t.peer(right) == heap.rank).all()
    assert torch.equal(t.get(right).cpu(), torch.full((4, 6), float(heap.rank)))
    assert t.get(right, at=20).tolist() == [heap.rank] * 4
    heap.barrier()
    columns = torch.arange(12.0).view(6, 2) + 100 * heap.rank  # on the host, not contiguous
    t.put(columns[:, 1], to=right, at=3)
    heap.barrier()
    assert torch.equal(t.local.view(-1)[3:9].cpu(), columns[:, 1] - 100 * heap.rank + 100 * left)
    on_host = torch.zeros(6)
    t.get(heap.rank, at=3, out=on_host)
    assert torch.equal(on_host, t.local.view(-1)[3:9].cpu())
    heap.barrier()
    heap.free(t)
    for dtype in (torch.bfloat16, torch.bool, torch.int16, torch.complex64):
        with heap.zeros(5, dtype) as t:
            t.put(torch.ones(5, device=heap.device).to(dtype), to=right)
            heap.barrier()
            assert t.local.to(torch.complex64).sum() == 5
            heap.barrier()


def signals(heap: symmetric.Heap, left: int, right: int) -> None:
    t = heap.zeros(1000)
    for turn in range(1, 201):
        t.put_signal(torch.full((1000,), float(turn), device=heap.device), to=right, value=turn)
        heap.wait(at_least=turn, source=left)
        assert (t.local == turn).all(), turn
        heap.signal(left, slot=1, value=turn)  # this rank has read it
        heap.wait(1, turn, source=right)
    assert heap.read_signal(0) == 200
    for _ in range(10):
        t.put_signal(torch.ones(2, device=heap.device), to=right, slot=2, value=3, op="add")
    heap.wait(2, 30)
    assert heap.read_signal(2) == 30
    heap.fence()
    heap.quiet()
    for channel in (0, 3, 15, 0):
        heap.barrier(channel)
    heap.wait(9, 1, timeout=0.5)
    with pytest.raises(symmetric.Timeout, match=r"0\.5 s for signal 9 to reach 1"):
        heap.quiet()
    heap.barrier()  # the heap stays usable after a wait timed out
    heap.quiet()
    heap.free(t)


def counters(heap: symmetric.Heap, left: int, right: int) -> None:
    with heap.counters(3) as c:
        for _ in range(100):
            c.fetch_add(1, 2, at=0)
        heap.barrier()
        assert c.load(1, at=0) == 200 * heap.size
        c.store(2, 10 + heap.rank, at=right)
        heap.barrier()
        assert c.compare_swap(2, 0, 1, at=right) == 10 + heap.rank
        assert c.compare_swap(2, 10 + heap.rank, 1, at=right) == 10 + heap.rank
        heap.barrier()
        assert c.load(2) == 1 and c.fetch_add(2, -2) == 1 and c.load(2) == 2**64 - 1
        c.store(0, heap.rank + 1)
        c.wait(0, right + 1, at=right)
        heap.quiet()
        # A lock by compare_swap on rank 0: no rank sees a partial update of what it protects.
        with heap.zeros(2, torch.int64) as box:
            shared = box.peer(0)
            heap.barrier()
            for _ in range(20):
                while c.compare_swap(1, 200 * heap.size, 1, at=0) != 200 * heap.size:
                    pass
                first, second = shared.tolist()
                assert first == second
                shared += 1
                c.store(1, 200 * heap.size, at=0)
            heap.barrier()
            assert shared.tolist() == [20 * heap.size] * 2
            heap.barrier()


def streams(heap: symmetric.Heap, left: int, right: int) -> None:
    """Only the waiting stream waits; other streams continue."""
    with heap.zeros(1000) as t:
        side = torch.cuda.Stream()
        # The first use of a kernel loads it, which waits for all streams.
        with torch.cuda.stream(side):
            assert (t.local * 2 == 0).all()
        assert torch.ones(10, device=heap.device).sum().item() == 10
        t.put(torch.full((1000,), 0.0, device=heap.device), to=right)
        heap.barrier()
        heap.quiet()
        with torch.cuda.stream(side):
            heap.wait(20, 1, source=left)
            doubled = t.local * 2
        ordinary = torch.ones(10, device=heap.device).sum().item()  # while the side stream waits
        assert ordinary == 10
        t.put_signal(torch.full((1000,), 21.0, device=heap.device), to=right, slot=20)
        torch.cuda.current_stream().wait_stream(side)
        assert (doubled == 42).all()
        heap.barrier()


def graphs(heap: symmetric.Heap, left: int, right: int) -> None:
    """Barriers and all-reduce can be captured and replayed."""
    if heap.size == 1:
        return
    with heap.zeros(4096) as t:
        symmetric.all_reduce(t)
        heap.barrier()
        heap.quiet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            t.local.fill_(1)
            symmetric.all_reduce(t)
            heap.barrier()
            t.local.add_(1)
        for _ in range(5):
            graph.replay()
            torch.cuda.synchronize()
            assert (t.local == heap.size + 1).all()
        heap.barrier()


def repeated(heap: symmetric.Heap, left: int, right: int) -> None:
    """A repeated sum is replayed as a CUDA graph, on any stream and inside other graphs."""
    if heap.size == 1:
        return
    with heap.zeros(4096) as t:
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                for n in range(8):
                    t.local.fill_(n + heap.rank)
                    symmetric.all_reduce(t)
                    expected = heap.size * n + heap.size * (heap.size - 1) / 2
                    assert (t.local == expected).all(), n
            stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            t.local.fill_(1)
            symmetric.all_reduce(t)
        graph.replay()
        torch.cuda.synchronize()
        assert (t.local == heap.size).all()
        heap.barrier()


def collectives(heap: symmetric.Heap, left: int, right: int) -> None:
    for op, dtypes in REDUCED.items():
        for dtype in dtypes:
            for count in ODD_COUNTS:
                inputs = [whole_numbers(count, dtype, rank) for rank in range(heap.size)]
                expected = reduced(inputs, op).to(heap.device)
                local = inputs[heap.rank].to(heap.device)
                with heap.empty(count, dtype) as t, heap.empty(count, dtype) as other:
                    for algorithm in ("auto", "one_shot", "two_shot", "ring"):
                        t.local.copy_(local)
                        symmetric.all_reduce(t, op, algorithm)
                        check_same(t.local, expected, f"{op} {dtype} {count} {algorithm}")
                    t.local.copy_(local)
                    out = symmetric.all_reduce(t, op, out=torch.empty_like(local))
                    check_same(out, expected, f"{op} {dtype} {count} out of place")
                    for algorithm in ("one_shot", "two_shot", "ring"):
                        symmetric.all_reduce(t, op, algorithm, out=other)
                        check_same(
                            other.local, expected, f"{op} {dtype} {count} {algorithm} in heap"
                        )
                        assert torch.equal(t.local, local)
    torch.manual_seed(heap.rank)
    with heap.empty(1 << 20) as t:  # values whose sum depends on the order of addition
        values = torch.randn(1 << 20, device=heap.device)
        for algorithm in ("one_shot", "two_shot", "ring"):
            t.local.copy_(values)
            symmetric.all_reduce(t, algorithm=algorithm)
            heap.barrier()
            assert all(torch.equal(t.peer(rank), t.local) for rank in range(heap.size))
            heap.barrier()
    with heap.empty((3, 2), torch.int64) as t:
        t.local.fill_(heap.rank)
        gathered = symmetric.all_gather(t)
        assert gathered[:, 0].tolist() == [rank for rank in range(heap.size) for _ in range(3)]
    with heap.empty((2 * heap.size, 3)) as t:
        rows = torch.arange(6.0 * heap.size, device=heap.device).view(-1, 3)
        t.local.copy_(rows * (heap.rank + 1))
        local = symmetric.reduce_scatter(t)
        factor = heap.size * (heap.size + 1) / 2
        assert torch.equal(local, rows[2 * heap.rank : 2 * heap.rank + 2] * factor)


def mistakes(heap: symmetric.Heap, left: int, right: int) -> None:
    with heap.empty(10) as t:
        for mistake, words in (
            (lambda: t.put(torch.zeros(11, device=heap.device), to=0), "11 elements at 0"),
            (lambda: heap.wait(slot=5000), "signals=5001"),
            (lambda: symmetric.all_reduce(t, "bxor"), "not defined"),
            (lambda: symmetric.all_reduce(t, out=torch.zeros(10)), "on cuda"),
        ):
            with pytest.raises(UsageError, match=words):
                mistake()
    if heap.size > 1:
        with pytest.raises(RanksDiffer, match=r"rank 0 calls empty\(\(1,\)"):
            heap.empty(1 + heap.rank)


def staged(world: Any) -> None:
    for shape, dtype in (((10, 3), torch.float32), ((), torch.int64), ((1 << 18,), torch.float32)):
        tensor = torch.full(shape, world.rank + 1, dtype=dtype, device=world.device)
        symmetric.all_reduce_staged(tensor)
        assert (tensor == world.size * (world.size + 1) // 2).all(), (shape, dtype)
    part = torch.ones(4, 7, device=world.device).view(-1)[1:12]  # not aligned
    assert (symmetric.all_reduce_staged(part) == world.size).all()
    columns = torch.ones(4, 4, device=world.device).t()[1:]
    assert (symmetric.all_reduce_staged(columns, "max") == 1).all()
    with pytest.raises(UsageError, match="1048576"):
        symmetric.all_reduce_staged(torch.ones(1 << 19, device=world.device))


def refusals(world: Any) -> None:
    with pytest.raises(UsageError, match="does not support device"):
        symmetric.Heap(backend="shm")
    if world.size > 1:  # torch's NVSHMEM crashes where ranks share a GPU
        with pytest.raises(UsageError, match="nvshmem"):
            symmetric.Heap(backend="nvshmem", bytes=4096)
    # A CPU heap beside the CUDA one.
    with symmetric.Heap(device="cpu", bytes=4096) as heap:
        assert symmetric.all_reduce(heap.zeros(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_times_beside_nccl(ranks: int) -> None:
    """Prints the times of one run; asserts only that results are correct."""
    rows = in_world(figures, ranks, gpu=True, timeout=240)[0]
    for name, columns in rows.items():
        print(f"{ranks} ranks on one GPU (software overhead, not links): {name}: {columns}")
    assert rows


def figures(world: Any) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    with symmetric.Heap(bytes=64 << 20, timeout=60.0) as heap:
        peer, first = heap.rank ^ 1, heap.rank % 2 == 0
        box = heap.zeros(256)
        message = torch.ones(256, device=heap.device)
        turns = 0

        def ping_pong() -> None:
            nonlocal turns
            turns += 1
            if first:
                box.put_signal(message, to=peer, value=turns)
                heap.wait(0, turns)
            else:
                heap.wait(0, turns)
                box.put_signal(message, to=peer, value=turns)

        rows["put_signal of 1 KB and back, us"] = _microseconds(ping_pong)
        rows["barrier, us"] = _microseconds(heap.barrier)
        for bytes in (1 << 10, 16 << 10, 128 << 10, 1 << 20, 4 << 20):
            ordinary = torch.zeros(bytes // 4, device=heap.device)
            with heap.zeros(bytes // 4) as t, heap.zeros(bytes // 4) as other:
                t.local.fill_(heap.rank + 1)
                symmetric.all_reduce(t, out=other)
                assert (other.local == heap.size * (heap.size + 1) / 2).all()
                t.local.zero_()
                columns: dict[str, Callable[[], Any]] = {
                    "nccl": lambda tensor=ordinary: dist.all_reduce(tensor),
                    "two_shot": lambda t=t: symmetric.all_reduce(t, algorithm="two_shot"),
                    "one_shot": lambda t=t, o=other: symmetric.all_reduce(
                        t, algorithm="one_shot", out=o
                    ),
                    "ring": lambda t=t: symmetric.all_reduce(t, algorithm="ring"),
                }
                if bytes <= 1 << 20:
                    columns["staged"] = lambda tensor=ordinary: symmetric.all_reduce_staged(tensor)
                heap.barrier()
                rows[f"all_reduce of {bytes} bytes, us"] = {
                    name: _microseconds(call) for name, call in columns.items()
                }
    return rows


def _microseconds(call: Callable[[], Any]) -> float:
    """Return the microseconds per call: the median of 5 runs of 50 calls."""
    for _ in range(10):
        call()
    runs = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(50):
            call()
        torch.cuda.synchronize()
        runs.append((time.perf_counter() - began) / 50 * 1e6)
    return round(statistics.median(runs), 1)
