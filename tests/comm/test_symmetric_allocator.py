"""Allocator: offsets of tensors in a heap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.comm.symmetric.heap import Allocator
from tutti.world.errors import UsageError


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("allocate"), st.integers(0, 3000)),
            st.tuples(st.just("free"), st.integers(0, 50)),
        ),
        max_size=60,
    ),
    st.sampled_from([64, 256]),
)
def test_allocations_never_overlap_and_all_memory_is_freed(
    calls: list[tuple[str, int]], alignment: int
) -> None:
    allocator = Allocator(16384, alignment)
    live: dict[int, int] = {}
    for call, number in calls:
        if call == "allocate":
            try:
                offset = allocator.allocate(number)
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
            allocator.free(offset)
        assert allocator.free_bytes + sum(allocator.taken.values()) == 16384
    for offset in live:
        allocator.free(offset)
    assert allocator.largest_gap == allocator.free_bytes == 16384


def test_a_full_heap_names_wanted_and_free_bytes() -> None:
    allocator = Allocator(1024)
    allocator.allocate(512)
    with pytest.raises(UsageError, match=r"no room for 600 bytes.*1024 bytes, 512 are free"):
        allocator.allocate(600)
