"""AdapterStore: adapters are copied whole, switched at once, and evicted only when unused."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tutti.comm import symmetric
from tutti.structures import AdapterStore
from tutti.world.errors import UsageError
from worlds import in_world

TEMPLATE = {"down": (5, 33), "up": (33, 5), "scale": ()}


def filled(number: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(number)) for name, shape in TEMPLATE.items()}


def holds(adapter: Any, number: float) -> bool:
    return list(adapter) == list(TEMPLATE) and all((adapter[n] == number).all() for n in adapter)


def use_adapters(world: Any) -> dict[str, Any]:
    with symmetric.Heap(bytes=16 << 20) as heap:
        _switching(heap)
        _eviction(heap)
        _versions(heap)
        _search_while_slots_change(heap)
        return _count_torn_adapters(heap)


def _switching(heap: symmetric.Heap) -> None:
    with AdapterStore(heap, 4, TEMPLATE) as store:
        with pytest.raises(LookupError, match="no adapter is active"):
            store.active()
        if heap.rank == 0:
            assert store.put("french", filled(1)) == 1
            store.put("german", filled(2))
        heap.barrier()
        assert store.holders("french") == {0: 1}
        heap.barrier()
        with pytest.raises(LookupError, match="no rank has adapter 'latin'"):
            store.prefetch("latin").result()
        futures = [store.prefetch(name) for name in ("french", "german", "french")]
        assert [future.result(timeout=30) for future in futures] == [1, 1, 1]
        for epoch in range(1, 101):
            name = ("french", "german")[epoch % 2]
            assert store.activate(name) == epoch
            adapter = store.active()
            assert (adapter.name, adapter.epoch) == (name, epoch)
            assert holds(adapter, 1 + epoch % 2)
        heap.barrier()
        if heap.rank == 1:
            store.activate("german", everywhere=True)
        heap.barrier()
        assert store.active().name == "german" and store.active().epoch == 101
        heap.barrier()
        if heap.rank == 0:
            store.put("greek", filled(3))
            store.activate("greek", everywhere=True)
        heap.barrier()
        assert holds(store.active(), 3)  # not prefetched: fetched by this call
        assert store.stats()["late"] == (heap.rank != 0)
        heap.barrier()


def _eviction(heap: symmetric.Heap) -> None:
    with AdapterStore(heap, 3, TEMPLATE) as store:
        if heap.rank == 0:
            for number in range(3):
                store.put(f"a{number}", filled(number))
            with pytest.raises(UsageError, match=r"of 3 slots, 3 hold adapters"):
                store.put("a3", filled(3))
        heap.barrier()
        if heap.rank:
            if heap.rank == 1:
                store.put("local", filled(9))
            store.activate("a0")
            with store.active() as held:
                store.activate("a1")
                if heap.rank == 1:  # one was put here, one is active, one is pinned
                    with pytest.raises(UsageError, match="of 3 slots, 1 hold adapters"):
                        store.activate("a2")
                else:
                    store.activate("a2")
                    assert store.resident() == ["a0", "a1", "a2"]
                assert holds(held, 0)
            if heap.rank == 2:
                store.activate("a1")
                store.prefetch("a0").result()
                with pytest.raises(UsageError, match="adapter 'a1' is in use"):
                    store.remove("a1")
                store.remove("a0")
                assert "a0" not in store.resident() and 2 not in store.holders("a0")
        heap.barrier()


def _versions(heap: symmetric.Heap) -> None:
    with AdapterStore(heap, 4, TEMPLATE) as store:
        if heap.rank == 0:
            store.put("x", filled(1))
        heap.barrier()
        assert store.prefetch("x").result() == 1
        store.activate("x")
        old = store.active()
        heap.barrier()
        if heap.rank == 0:
            assert store.put("x", filled(2)) == 2
        heap.barrier()
        assert store.prefetch("x").result() == 2
        # A newer version does not change the tensors of the active adapter.
        assert holds(old, 1) and holds(store.active(), 1)
        store.activate("x")
        assert holds(store.active(), 2) and store.active().version == 2
        wrong = filled(1) | {"up": torch.zeros(3)}
        with pytest.raises(
            UsageError, match=r"'y': up is torch.float32 of \(3,\), but the template has"
        ):
            store.put("y", wrong)
        with pytest.raises(UsageError, match="scale is missing"):
            store.put("y", {name: wrong[name] for name in ("up", "down")} | {"up": filled(1)["up"]})
        with pytest.raises(UsageError, match="1 to 120 bytes"):
            store.activate("n" * 121)
        heap.barrier()
    with pytest.raises(UsageError, match="this AdapterStore is closed"):
        store.activate("x")


def _count_torn_adapters(heap: symmetric.Heap) -> dict[str, Any]:
    """One rank puts new versions without pause while the others fetch and compute."""
    whole = torn = 0
    big = {"weights": (40_000,)}
    with AdapterStore(heap, 4, big) as store:
        done = heap.counters(1)
        if heap.rank == 0:
            number = 0
            while done.load(0, at=0) < heap.size - 1:
                number += 1
                store.put("moving", {"weights": torch.full((40_000,), float(number))})
        else:
            while not store.holders("moving"):
                pass
            stop = threading.Event()
            reader = threading.Thread(target=_read_until, args=(store, stop))
            store.activate("moving")
            reader.start()
            for _ in range(150):
                store.prefetch("moving").result()
                store.activate("moving")
                with store.active() as adapter:
                    weights = adapter["weights"].numpy()
                    torn += not (weights == weights[0]).all()
                    torn += int(weights[0]) != adapter.version
                whole += 1
            stop.set()
            reader.join()
            done.fetch_add(0, at=0)
        heap.barrier()
    return {"whole": whole, "torn": torn}


def _search_while_slots_change(heap: symmetric.Heap) -> None:
    """An adapter stays on rank 0, but each new version is in another slot."""
    with AdapterStore(heap, 4, {"weights": (4,)}) as store:
        newest = store._newest
        _check_never(heap, store, lambda: newest("moving") is None)
        if heap.rank != 0:
            store.prefetch("moving").result()
        heap.barrier()
        # Older copies on other ranks do not hide the newest copy.
        _check_never(heap, store, lambda: newest("moving").rank != 0)
        _check_never(heap, store, lambda: 0 not in store.holders("moving"))


def _check_never(heap: symmetric.Heap, store: AdapterStore, misses: Callable[[], bool]) -> None:
    """Rank 0 puts new versions while the others search."""
    with heap.counters(1) as done:
        if heap.rank == 0:
            store.put("moving", {"weights": torch.zeros(4)})
        heap.barrier()
        if heap.rank == 0:
            while done.load(0, at=0) < heap.size - 1:
                store.put("moving", {"weights": torch.zeros(4)})
        else:
            missed = sum(misses() for _ in range(10_000))
            done.fetch_add(0, at=0)
            assert missed == 0
        heap.barrier()


def _read_until(store: AdapterStore, stop: threading.Event) -> None:
    while not stop.is_set():
        with store.active() as adapter:
            weights = adapter["weights"].numpy()
            assert (weights == weights[0]).all()


def test_adapters_are_fetched_switched_and_evicted() -> None:
    first, *others = in_world(use_adapters, 3)
    assert first == {"whole": 0, "torn": 0}
    assert others == [{"whole": 150, "torn": 0}] * 2
