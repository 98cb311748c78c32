"""PooledCache: values move between tiers, and every drop is reported."""

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tutti.comm import symmetric
from tutti.structures import PooledCache
from tutti.world.errors import UsageError
from worlds import in_world

CALLS = st.sampled_from(["put", "put", "put", "get", "get", "borrow", "return", "remove"])
PLAN = st.lists(st.tuples(CALLS, st.integers(0, 30), st.integers(0, 700)), min_size=20)


def generated_plans() -> list[Any]:
    plans: list[Any] = []

    @settings(max_examples=50, derandomize=True, database=None, phases=[Phase.generate])
    @given(PLAN)
    def collect(plan: list[Any]) -> None:
        plans.append(plan)

    collect()
    return plans


def use_caches(world: Any, plans: list[Any]) -> dict[str, int]:
    totals = {"calls": 0, "dropped": 0, "promoted": 0, "peer_hits": 0, "host_hits": 0}
    with symmetric.Heap(bytes=4 << 20) as heap:
        _tiers_in_order(heap)
        _mistakes_are_named(heap)
        for number, plan in enumerate(plans):
            # In every second plan the ranks use different keys.
            _run_plan(heap, plan, number, totals)
    return totals


def _value(key: int, bytes: int) -> torch.Tensor:
    return torch.full((bytes,), key * 7 % 251, dtype=torch.uint8)


def _run_plan(heap: symmetric.Heap, plan: list[Any], number: int, totals: dict[str, int]) -> None:
    lost: list[Any] = []
    with PooledCache(heap, 1024, 1024, number % 3 * 800, on_drop=lost.append) as cache:
        expected: dict[int, int] = {}
        borrowed: dict[int, tuple[Any, torch.Tensor]] = {}
        for call, name, bytes in plan:
            key = (name + 100 * heap.rank) if number % 2 else name
            totals["calls"] += 1
            if call == "put" and key not in expected:
                before = len(lost)
                expected[key] = bytes
                dropped = cache.put(key, _value(key, bytes))
                assert lost[before:] == dropped and not set(dropped) & set(borrowed)
                for dropped_key in dropped:
                    del expected[dropped_key]
            elif call == "get":
                value = cache.get(key)
                assert (value is not None) == (key in expected)
                assert value is None or torch.equal(value, _value(key, expected[key]))
            elif call == "borrow" and key in expected and key not in borrowed:
                block = cache.borrow(key)
                borrowed[key] = (block, block.__enter__())
            elif call == "return" and borrowed:
                block, _ = borrowed.pop(next(iter(borrowed)))
                block.__exit__(None, None, None)
            elif call == "remove" and key in expected and key not in borrowed:
                cache.remove(key)
                del expected[key]
            assert len(cache) == len(expected)
            for key, (_, view) in borrowed.items():
                assert torch.equal(view, _value(key, expected[key])), "a borrowed value has moved"
        for block, _ in borrowed.values():
            block.__exit__(None, None, None)
        for key, bytes in expected.items():
            value = cache.get(key)
            assert value is not None and torch.equal(value, _value(key, bytes))
        stats = cache.stats()
        assert stats["dropped"] == len(lost)
        assert sum(stats[f"{tier}_bytes"] for tier in ("local", "peer", "host")) == sum(
            expected.values()
        )
        for name in totals.keys() & stats.keys():
            totals[name] += stats[name]


def _tiers_in_order(heap: symmetric.Heap) -> None:
    values = [torch.full((16, 16), float(n)) for n in range(8)]  # 1 KiB each
    with PooledCache(heap, 2048, 1024 * (heap.size - 1), 2048) as cache:
        own = [(n, heap.rank) for n in range(8)]
        dropped = [cache.put(key, value) for key, value in zip(own, values, strict=True)]
        capacity = 2 + (heap.size - 1) + 2
        assert sum(map(len, dropped)) == 8 - capacity
        assert [key for keys in dropped for key in keys] == own[: 8 - capacity]
        assert cache.tier(own[7]) == "local" and cache.tier(own[5]) == "peer"
        assert cache.tier(own[8 - capacity]) == "host" and cache.get("never") is None
        oldest = cache.get(own[8 - capacity])
        assert oldest is not None and oldest[3, 3] == 8 - capacity
        assert cache.tier(own[8 - capacity]) == "local", "a get promotes a value"
        assert len(cache) == capacity, "a get drops nothing"
        with cache.borrow(own[8 - capacity]) as view:
            assert view.data_ptr() != oldest.data_ptr() and torch.equal(view, oldest)
        heap.barrier()


def _mistakes_are_named(heap: symmetric.Heap) -> None:
    with PooledCache(heap, 1024) as cache:
        assert cache.put("large", torch.zeros(1025, dtype=torch.uint8)) == ["large"]
        assert "large" not in cache and len(cache) == 0
        assert cache.put("a", torch.ones(3)) == []
        with pytest.raises(UsageError, match="'a' already has a value"):
            cache.put("a", torch.ones(3))
        with cache.borrow("a"), pytest.raises(UsageError, match="is borrowed"):
            cache.remove("a")
        with pytest.raises(KeyError), cache.borrow("b"):
            pass
        cache.remove("a")
        with pytest.raises(KeyError):
            cache.remove("a")
    with pytest.raises(UsageError, match="local_bytes must be 64"):
        PooledCache(heap, 1)
    with pytest.raises(UsageError, match="this PooledCache is closed"):
        cache.get("a")


def test_no_value_is_lost_silently_by_any_sequence_of_calls() -> None:
    plans = generated_plans()
    for totals in in_world(use_caches, 3, plans):
        assert totals["calls"] == sum(map(len, plans))
        # The sequences cover every path.
        assert all(totals.values()), totals
