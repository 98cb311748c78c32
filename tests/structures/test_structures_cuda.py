"""The structures on a heap on one NVIDIA GPU that ranks share under MPS."""

from typing import Any

import pytest
import torch

from tutti.comm import symmetric
from tutti.structures import (
    AdapterStore,
    DistributedTensor,
    EndOfStream,
    HashMap,
    ParameterCache,
    PooledCache,
    RingBuffer,
)
from tutti.world.errors import UsageError
from worlds import in_world

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def every_structure(world: Any) -> list[str]:
    done = []
    with symmetric.Heap(bytes=64 << 20, timeout=20.0) as heap:
        for step in (tables, rings, adapters, caches, refusals):
            step(heap)
            torch.cuda.synchronize()
            done.append(step.__name__)
    return done


def tables(heap: symmetric.Heap) -> None:
    generator = torch.Generator().manual_seed(0)
    for placement in ("block", "cyclic"):
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
            for rows, columns in ((1, 1), (100, 5), (64, 300)):
                indices = torch.randint(rows, (heap.size, 50), generator=generator)
                values = torch.randint(-9, 9, (heap.size, 50, columns), generator=generator)
                values = values.to(dtype)
                expected = torch.zeros(rows, columns, dtype=dtype)
                expected.index_add_(0, indices.flatten(), values.flatten(0, 1))
                with DistributedTensor(heap, (rows, columns), dtype, placement) as table:
                    local = (data[heap.rank].to(heap.device) for data in (indices, values))
                    table.scatter_add(*local)
                    heap.barrier()
                    assert torch.equal(table.to_full().cpu(), expected)
                    found = table.gather(indices.to(heap.device))
                    assert torch.equal(found.cpu(), expected[indices])
                    heap.barrier()
                    if heap.rank == 0:
                        on_host = torch.arange(rows)
                        table.scatter(on_host, expected.to(heap.device) + 1)
                    heap.barrier()
                    assert torch.equal(table.local.cpu(), expected[table.local_indices] + 1)
                    heap.barrier()


def rings(heap: symmetric.Heap) -> None:
    with RingBuffer(heap, 0, 1, 3, (1000,), torch.int64) as ring:
        if heap.rank == 0:
            value = torch.empty(1000, dtype=torch.int64, device=heap.device)
            for number in range(200):
                if number % 2:
                    ring.put(value.fill_(number))
                else:
                    with ring.reserve() as slot:
                        slot.fill_(number)
            ring.finish()
        elif heap.rank == 1:
            for number in range(200):
                if number % 3:
                    with ring.next() as item:
                        assert bool((item == number).all())
                else:
                    assert bool((ring.get() == number).all())
            with pytest.raises(EndOfStream):
                ring.get()


def adapters(heap: symmetric.Heap) -> None:
    template = {"down": (16, 512), "up": (512, 16)}
    with AdapterStore(heap, 4, template) as store:
        names = ("first", "second", "third")
        if heap.rank == 0:
            for value, name in enumerate(names):
                store.put(name, {k: torch.full(s, float(value)) for k, s in template.items()})
        heap.barrier()
        heap.quiet()
        for _ in range(3):
            for value, name in enumerate(names):
                store.prefetch(name).result()
                store.activate(name)
                with store.active() as adapter:
                    assert adapter["up"].is_cuda
                    assert all(bool((tensor == value).all()) for tensor in adapter.values())
        heap.barrier()
        heap.quiet()
        if heap.rank == heap.size - 1:
            store.activate("first", everywhere=True)
        heap.barrier()
        heap.quiet()
        assert store.active().name == "first"


def caches(heap: symmetric.Heap) -> None:
    sizes = (8192, 4096 * (heap.size - 1), 16384)
    with PooledCache(heap, *sizes) as cache:
        keys = range(2 + (heap.size - 1) + 4)
        for key in keys:
            value = torch.full((1024,), float(100 * heap.rank + key), device=heap.device)
            assert cache.put(key, value) == []
        assert {cache.tier(key) for key in keys} == {"local", "peer", "host"}
        for _ in range(2):
            for key in keys:
                found = cache.get(key)
                assert found is not None and found.is_cuda
                assert bool((found == 100 * heap.rank + key).all())
        assert len(cache.put("more", torch.zeros(1024, device=heap.device))) == 1


def refusals(heap: symmetric.Heap) -> None:
    for create in (lambda: HashMap(heap, 10), lambda: ParameterCache(heap, 10, 10)):
        with pytest.raises(UsageError, match="needs a CPU heap, but this heap is on cuda"):
            create()


@pytest.mark.parametrize("ranks", [2, 4])
def test_structures_on_a_gpu_return_the_stored_values(ranks: int) -> None:
    done = in_world(every_structure, ranks, gpu=True, timeout=240)
    assert done == [["tables", "rings", "adapters", "caches", "refusals"]] * ranks
