"""The order of an epoch: a permutation, the same for everybody, different each epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.data.order import Order, shuffled

seeds = st.integers(0, 2**63)


@given(st.integers(1, 3000), seeds, st.integers(0, 1000))
def test_an_epoch_has_each_sample_once(size: int, seed: int, epoch: int) -> None:
    order = shuffled(np.arange(size), size, seed, epoch)
    assert sorted(order.tolist()) == list(range(size))


@given(st.integers(1, 10**12), seeds, st.data())
def test_any_piece_can_be_had_alone_however_large_the_set(
    size: int, seed: int, data: st.DataObject
) -> None:
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    together = shuffled(np.array(places), size, seed, 0)
    alone = [int(shuffled(np.array([place]), size, seed, 0)[0]) for place in places]
    assert together.tolist() == alone
    assert all(0 <= sample < size for sample in alone)


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Order(1000, seed=5).samples(3, 0, 1000)
    monkeypatch.setattr(Order, "BLOCK", 64)
    order = Order(1000, seed=5)
    pieces = [order.samples(3, start, min(start + 37, 1000)) for start in range(0, 1000, 37)]
    assert np.concatenate(pieces).tolist() == whole.tolist()


def test_the_order_is_fixed_for_ever() -> None:
    # A checkpoint of today must resume in years: these numbers may never change.
    assert shuffled(np.arange(10), 10, seed=0, epoch=0).tolist() == [5, 2, 7, 1, 9, 3, 0, 4, 8, 6]
    assert shuffled(np.arange(10), 10, seed=0, epoch=1).tolist() == [4, 2, 7, 0, 8, 1, 9, 3, 5, 6]
    assert shuffled(np.arange(3), 10**9, seed=7, epoch=2).tolist() == [
        423899678,
        810550551,
        773893648,
    ]


def test_epochs_and_seeds_give_other_orders() -> None:
    orders = {
        tuple(shuffled(np.arange(50), 50, seed, epoch).tolist())
        for seed in range(8)
        for epoch in range(8)
    }
    assert len(orders) == 64


@pytest.mark.parametrize("size", [7, 10, 50])
def test_each_sample_is_as_likely_at_each_place(size: int) -> None:
    trials = 2000
    seen = np.zeros((size, size))
    for seed in range(trials):
        seen[np.arange(size), shuffled(np.arange(size), size, seed, 0)] += 1
    expected = trials / size
    freedom = (size - 1) ** 2
    chi_square = ((seen - expected) ** 2 / expected).sum()
    # Five standard deviations of chi square; fixed seeds, so this either holds for ever or never.
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_without_shuffling_the_order_is_the_index() -> None:
    assert Order(10, shuffle=False).samples(4, 2, 7).tolist() == [2, 3, 4, 5, 6]
