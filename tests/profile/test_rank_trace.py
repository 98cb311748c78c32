"""Interval sets are compared with sets of integers."""

from hypothesis import given
from hypothesis import strategies as st

from tutti.profile.rank_trace import Intervals

pairs = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda p: (p[0], p[0] + p[1])), max_size=12
)


def _cells(times: Intervals) -> set[int]:
    return {
        cell
        for start, end in zip(times.starts, times.ends, strict=True)
        for cell in range(int(start), int(end))
    }


def _grid(intervals: list[tuple[int, int]]) -> set[int]:
    return {cell for start, end in intervals for cell in range(start, end)}


@given(pairs, pairs)
def test_union_intersection_and_difference_equal_those_of_sets(
    one: list[tuple[int, int]], two: list[tuple[int, int]]
) -> None:
    a, b = Intervals.of(one), Intervals.of(two)

    assert _cells(a | b) == _grid(one) | _grid(two)
    assert _cells(a & b) == _grid(one) & _grid(two)
    assert _cells(a - b) == _grid(one) - _grid(two)
    assert a.seconds == len(_grid(one))
    assert (a & b).seconds + (a - b).seconds == a.seconds


@given(pairs, st.integers(0, 30), st.integers(0, 20))
def test_between_keeps_the_part_inside_the_limits(
    one: list[tuple[int, int]], start: int, length: int
) -> None:
    inside = Intervals.of(one).between(start, start + length)

    assert _cells(inside) == _grid(one) & set(range(start, start + length))
