"""HashMap: a dictionary that all ranks change at once."""

import time
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tutti.comm import symmetric
from tutti.structures import Full, HashMap
from tutti.world.errors import UsageError
from worlds import in_world

RANKS = 3
# Few keys, so that calls meet; both ends of the range; more keys than the map takes.
KEYS = st.one_of(st.integers(0, 12), st.sampled_from([2**63, 2**64 - 2]), st.integers(0, 200))
CALLS = st.sampled_from(["put", "put", "add", "add", "get", "delete", "contains", "len"])
PLAN = st.lists(
    st.tuples(st.integers(0, RANKS - 1), CALLS, KEYS, st.integers(-99, 99)), max_size=60
)


def planned() -> list[Any]:
    """Plans that hypothesis thinks of; all are carried out in one world."""
    plans: list[Any] = []

    @settings(max_examples=40, derandomize=True, database=None, phases=[Phase.generate])
    @given(PLAN)
    def collect(plan: list[Any]) -> None:
        plans.append(plan)

    collect()
    return plans


def follow_plans(world: Any, plans: list[Any]) -> int:
    calls = 0
    with symmetric.Heap(bytes=1 << 20) as heap:
        for number, plan in enumerate(plans):
            with HashMap(heap, 16, (2,), torch.int64) as found:
                wanted: dict[int, int] = {}
                for turn, (rank, call, key, value) in enumerate(plan):
                    if rank == heap.rank:
                        _called_as_on_a_dict(found, wanted, call, key, value)
                    else:
                        _dict_call(wanted, call, key, value)
                    calls += 1
                    heap.barrier()
                    if turn % 20 == 19:  # what `Full` refused is not there: agree on what is
                        _same(found, wanted)
                        heap.barrier()
                _same(found, wanted)
                if number % 3 == 0:
                    found.compact()
                    _same(found, wanted)
                    assert sum(found.stats()["deleted_keys"]) == 0  # type: ignore[arg-type]
                heap.barrier()
    return calls


def _dict_call(wanted: dict[int, int], call: str, key: int, value: int) -> None:
    if call == "put":
        wanted[key] = value
    elif call == "add":
        wanted[key] = wanted.get(key, 0) + value
    elif call == "delete":
        wanted.pop(key, None)


def _called_as_on_a_dict(
    found: HashMap, wanted: dict[int, int], call: str, key: int, value: int
) -> None:
    there = key in wanted
    if call == "put":
        assert found.put(key, value) == (not there)
    elif call == "add":
        assert found.add(key, torch.tensor([value, value])) == (not there)
    elif call == "delete":
        assert found.delete(key) == there
    elif call == "contains":
        assert (key in found) == there
    elif call == "len":
        assert len(found) == len(wanted)
    else:
        got = found.get(key)
        assert (None if got is None else got.tolist()) == ([wanted[key]] * 2 if there else None)
    _dict_call(wanted, call, key, value)


def _same(found: HashMap, wanted: dict[int, int]) -> None:
    assert len(found) == len(wanted)
    keys = torch.tensor([key - 2**64 if key >= 2**63 else key for key in wanted], dtype=torch.int64)
    values, there = found.get_many(keys)
    assert there.all() and values[:, 0].tolist() == list(wanted.values())
    mine, _ = found.local_items()
    owned = [key for key in wanted if found.owner(key) == found.rank]
    assert sorted(int(key) % 2**64 for key in mine) == sorted(owned)


def test_any_sequence_of_calls_by_any_ranks_gives_what_a_dict_gives() -> None:
    # 200 different keys would not fit into 16: keep to plans whose keys do.
    plans = [plan for plan in planned() if len({key for _, _, key, _ in plan}) <= 16]
    calls = sum(map(len, plans))
    assert len(plans) >= 15 and calls >= 100
    assert in_world(follow_plans, RANKS, plans) == [calls] * RANKS


def race(world: Any) -> dict[str, Any]:
    with symmetric.Heap(bytes=8 << 20) as heap:
        _additions_all_count(heap)
        _mistakes_are_named(heap)
        return _hunt_for_torn_values(heap)


def _additions_all_count(heap: symmetric.Heap) -> None:
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
        with HashMap(heap, 200, (3,), dtype) as sums:
            ones = torch.ones(3, dtype=dtype)
            for number in range(2000):  # every rank inserts and adds to the same keys
                sums.add(number % 50, ones)
            sums.add_many(torch.arange(200).repeat(5), ones.expand(1000, 3))
            heap.barrier()
            values, found = sums.get_many(torch.arange(200))
            wanted = torch.tensor([heap.size * (45 if key < 50 else 5) for key in range(200)])
            assert found.all() and torch.equal(values, wanted[:, None].expand(-1, 3).to(dtype))
            assert len(sums) == 200
            heap.barrier()


def _mistakes_are_named(heap: symmetric.Heap) -> None:
    with HashMap(heap, 4, value_bytes=5) as raw:
        if heap.rank == 0:
            limit = raw.stats()["limit_per_rank"]
            with pytest.raises(
                Full, match=rf"limit is {limit} \(capacity 4 over .*larger capacity"
            ):
                for key in range(1000):
                    raw.put(key, torch.full((5,), key % 256, dtype=torch.uint8))
            assert len(raw) >= 4 and raw[3].tolist() == [3] * 5
            for key in range(1000):
                raw.delete(key)
            assert len(raw) == 0 and 3 not in raw and raw.get(3) is None
            with pytest.raises(Full, match=r"or call compact\(\)"):
                raw.put_many(torch.arange(1000, 2000), torch.zeros(1000, 5, dtype=torch.uint8))
            with pytest.raises(KeyError):
                raw[3]
            for key in (-1, 2**64 - 1, 2**64):
                with pytest.raises(UsageError, match=r"keys are 0 to 2\^64 - 2"):
                    raw.get(key)
            with pytest.raises(UsageError, match=r"add on values of torch\.uint8"):
                raw.add(0, 1)
            with pytest.raises(UsageError, match=r"value is torch.float32 of shape \(5,\)"):
                raw.put(0, torch.zeros(5))
            with pytest.raises(UsageError, match=r"keys hold 2\^64 - 1"):
                raw.get_many(torch.tensor([-1]))
        heap.barrier()
    with pytest.raises(UsageError, match="this HashMap is closed"):
        raw.get(0)


def _hunt_for_torn_values(heap: symmetric.Heap) -> dict[str, Any]:
    reads = torn = missing = 0
    with HashMap(heap, 8, (257,), torch.int64) as found:
        done = heap.counters(1)
        value = torch.zeros(257, dtype=torch.int64)
        if heap.rank == 0:
            found.put(5, value)
        heap.barrier()
        if heap.rank < 2:  # two writers of one key
            number = heap.rank
            deadline = time.monotonic() + 60
            while done.load(0, at=0) < heap.size - 2 and time.monotonic() < deadline:
                number += 2
                found.put(5, value.fill_(number))
        else:
            numbers = value.numpy()
            for _ in range(50_000):
                missing += found.get(5, out=value) is None
                torn += not (numbers == numbers[0]).all()
                reads += 1
            done.fetch_add(0, at=0)
        heap.barrier()
        writes = found.stats()["writes"]
    return {"reads": reads, "torn": torn, "missing": missing, "writes": writes}


def test_concurrent_writers_lose_nothing_and_no_value_is_torn() -> None:
    *writers, reader = in_world(race, 3)
    assert all(writer["writes"] > 1000 for writer in writers)
    assert reader == {"reads": 50_000, "torn": 0, "missing": 0, "writes": 0}
