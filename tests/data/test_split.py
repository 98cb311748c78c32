"""Dividing a batch: exact sums for any ranks and shares."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.data import DataError, split

counts = st.integers(0, 5000)
some_ranks = st.integers(1, 64)
some_shares = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=64)


@given(counts, some_ranks)
def test_an_even_division_loses_nothing_and_differs_by_at_most_one(count: int, ranks: int) -> None:
    parts = split.even(count, ranks)
    assert len(parts) == ranks
    assert sum(parts) == count
    assert max(parts) - min(parts) <= 1


@given(counts, some_shares, st.integers(0, 3))
def test_a_weighted_division_sums_to_the_batch_and_keeps_the_minimum(
    count: int, shares: list[float], minimum: int
) -> None:
    parts = split.weighted(count, shares, minimum)
    assert len(parts) == len(shares)
    assert sum(parts) == count
    assert min(parts) >= (minimum if count >= minimum * len(shares) else 0)


@given(counts, some_shares)
def test_a_weighted_division_stays_within_one_sample_of_the_exact_share(
    count: int, shares: list[float]
) -> None:
    for part, share in zip(split.weighted(count, shares), shares, strict=True):
        # 1e-6: the quota is computed here in floating point, in the code exactly.
        assert abs(part - count * share / math.fsum(shares)) < 1 + 1e-6


@given(counts, some_shares)
def test_a_rank_with_a_larger_share_never_gets_less(count: int, shares: list[float]) -> None:
    by_share = sorted(zip(shares, split.weighted(count, shares), strict=True))
    for (low, fewer), (high, more) in pairwise(by_share):
        assert low == high or fewer <= more


@given(counts, some_ranks, st.floats(1e-3, 1e3))
def test_equal_shares_divide_evenly(count: int, ranks: int, share: float) -> None:
    assert split.weighted(count, [share] * ranks) == split.even(count, ranks)


def test_weighted_divisions_of_known_examples() -> None:
    assert split.weighted(100, [3, 1]) == [75, 25]
    # Quotas 3.33 each: one sample is left, and ties go to the lower rank.
    assert split.weighted(10, [1, 1, 1]) == [4, 3, 3]
    # Quotas 9.9 and 0.1: without a minimum the slow rank would have nothing to do.
    assert split.weighted(10, [99, 1]) == [10, 0]
    assert split.weighted(10, [99, 1], minimum=1) == [9, 1]
    # Holding one rank at the minimum pushes another below it, which is then held as well.
    assert split.weighted(6, [100, 24, 1], minimum=1) == [4, 1, 1]


@given(some_shares.flatmap(lambda now: st.tuples(st.just(now), st.permutations(now))))
def test_measured_shares_sum_to_one_and_lie_between_old_and_new(
    rates_and_old: tuple[list[float], list[float]],
) -> None:
    rates, old = rates_and_old
    shares = split.measured_shares(rates, old, smoothing=0.25)
    assert math.isclose(math.fsum(shares), 1)
    for share, rate, before in zip(shares, rates, old, strict=True):
        ends = sorted((rate / math.fsum(rates), before / math.fsum(old)))
        assert ends[0] * (1 - 1e-9) <= share <= ends[1] * (1 + 1e-9)


def test_a_rank_with_half_the_speed_converges_to_a_third_of_the_batch() -> None:
    # Given two ranks of 200 and 100 samples/s, whatever the cut.
    shares: list[float] | None = None
    for _ in range(20):
        shares = split.measured_shares([200, 100], shares)
    assert shares is not None
    assert split.weighted(300, shares, minimum=1) == [200, 100]


@given(counts, st.integers(1, 9))
def test_microbatches_weigh_by_samples(count: int, accumulation: int) -> None:
    sizes = split.even(count, accumulation)
    assert (len(sizes), sum(sizes)) == (accumulation, count)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_share_that_is_not_positive_and_finite_is_reported(bad: float) -> None:
    with pytest.raises(DataError, match="rank 1 has"):
        split.weighted(10, [1.0, bad])
    with pytest.raises(DataError, match=r"samples/s .* rank 1 has"):
        split.measured_shares([1.0, bad])


def test_impossible_divisions_are_refused() -> None:
    with pytest.raises(DataError, match="over 0 ranks"):
        split.even(10, 0)
    with pytest.raises(DataError, match="-1 samples"):
        split.even(-1, 2)
    with pytest.raises(DataError, match="one per rank"):
        split.weighted(10, [])
    with pytest.raises(DataError, match="2 measured ranks but 3"):
        split.measured_shares([1, 1], [1, 1, 1])
