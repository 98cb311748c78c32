"""Which samples a step takes: a function of (seed, epoch, position), independent of ranks."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.data import DataError, GlobalSampler, Position, split
from tutti.data.sampler import EpochOrder, shuffled

sizes = st.integers(1, 400)
batches = st.integers(1, 100)
seeds = st.integers(0, 2**63)


def steps(sampler: GlobalSampler, at: Position, until_epoch: int) -> list[list[int]]:
    """The samples of each step from `at` on."""
    drawn = []
    at = sampler.normalise(at)
    while at.epoch < until_epoch:
        draw = sampler.draw(at)
        assert draw.start == at
        drawn.append(draw.indices.tolist())
        at = draw.after
    return drawn


@given(sizes, batches, st.integers(0, 5))
def test_an_epoch_with_a_short_last_batch_has_each_sample_once(
    size: int, batch: int, seed: int
) -> None:
    sampler = GlobalSampler(size, batch, seed=seed, drop_last=False)
    epoch = steps(sampler, Position(), 1)
    assert sorted(i for step in epoch for i in step) == list(range(size))
    assert len(epoch) == len(sampler)
    assert [len(step) for step in epoch[:-1]] == [batch] * (len(epoch) - 1)
    assert len(epoch[-1]) == (size % batch or batch)


@given(sizes, batches)
def test_drop_last_leaves_only_full_batches(size: int, batch: int) -> None:
    if batch > size:
        with pytest.raises(
            DataError, match=f"{batch} samples is larger than the dataset of {size}"
        ):
            GlobalSampler(size, batch)
        return
    epoch = steps(GlobalSampler(size, batch), Position(), 1)
    assert [len(step) for step in epoch] == [batch] * (size // batch)
    assert len({i for step in epoch for i in step}) == batch * (size // batch)


@given(sizes, batches, st.integers(1, 9), st.integers(1, 9), st.data())
def test_a_step_has_the_same_samples_for_any_number_of_ranks(
    size: int, batch: int, ranks: int, others: int, data: st.DataObject
) -> None:
    sampler = GlobalSampler(size, batch, drop_last=False)
    shares = data.draw(st.lists(st.floats(0.01, 100), min_size=others, max_size=others))
    for step in steps(sampler, Position(), 2):
        for cut in (split.even(len(step), ranks), split.weighted(len(step), shares, minimum=1)):
            parts = [step[slice(*split.bounds(cut, rank))] for rank in range(len(cut))]
            assert [i for part in parts for i in part] == step


@given(sizes, batches, st.booleans(), st.data())
def test_a_resume_at_any_step_continues_the_stream(
    size: int, batch: int, drop_last: bool, data: st.DataObject
) -> None:
    batch = min(batch, size)
    sampler = GlobalSampler(size, batch, seed=3, drop_last=drop_last)
    whole = steps(sampler, Position(), 3)
    done = data.draw(st.integers(0, len(whole)))
    at = Position()
    for _ in range(done):
        at = sampler.draw(at).after
    # The position is saved and loaded by another sampler, as after a restart.
    state = json.loads(json.dumps(sampler.state_dict(at)))
    again = GlobalSampler(size, batch, seed=3, drop_last=drop_last)
    assert steps(again, again.position(state), 3) == whole[done:]


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 50))
def test_a_resume_with_another_batch_takes_the_same_samples_in_the_same_order(
    size: int, batch: int, other: int
) -> None:
    first = GlobalSampler(size, batch, drop_last=False)
    second = GlobalSampler(size, other, drop_last=False)
    at = first.draw(Position()).after
    rest = [i for step in steps(first, at, 2) for i in step]
    resumed = steps(second, second.position(first.state_dict(at)), 2)
    assert [i for step in resumed for i in step] == rest


def test_epochs_differ_and_repeat_with_the_seed() -> None:
    sampler = GlobalSampler(100, 100, seed=1)
    first, second = steps(sampler, Position(), 2)
    assert first != second
    assert steps(GlobalSampler(100, 100, seed=1), Position(), 2) == [first, second]
    assert steps(GlobalSampler(100, 100, seed=2), Position(), 1) != [first]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 99}, "size 99, but this dataset has 100: resume with the same dataset"),
        ({"seed": 4}, "seed 4, but this dataset has 0: resume with the same seed"),
        ({"shuffle": False}, "shuffle False"),
        ({"position": 101}, "101 is outside 100 samples"),
        ({"position": -1}, "-1 is outside"),
        ({"position": "5"}, "damaged"),
        ({"epoch": -1}, "damaged"),
    ],
)
def test_a_position_of_other_data_is_refused(change: dict[str, object], message: str) -> None:
    sampler = GlobalSampler(100, 10)
    with pytest.raises(DataError, match=message):
        sampler.position(sampler.state_dict(Position()) | change)


def test_empty_data_and_empty_batches_are_refused() -> None:
    with pytest.raises(DataError, match="0 samples"):
        GlobalSampler(0, 1)
    with pytest.raises(DataError, match="at least 1 sample, got 0"):
        GlobalSampler(10, 0)


@given(st.integers(1, 3000), seeds, st.integers(0, 1000))
def test_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = shuffled(np.arange(size), size, seed, epoch)
    assert sorted(order.tolist()) == list(range(size))


@given(st.integers(1, 10**12), seeds, st.data())
def test_each_position_can_be_computed_alone_for_any_size(
    size: int, seed: int, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    batched = shuffled(np.array(positions), size, seed, 0)
    alone = [int(shuffled(np.array([position]), size, seed, 0)[0]) for position in positions]
    assert batched.tolist() == alone
    assert all(0 <= sample < size for sample in alone)


def test_the_order_does_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = EpochOrder(1000, seed=5).samples(3, 0, 1000)
    monkeypatch.setattr(EpochOrder, "BLOCK", 64)
    order = EpochOrder(1000, seed=5)
    slices = [order.samples(3, start, min(start + 37, 1000)) for start in range(0, 1000, 37)]
    assert np.concatenate(slices).tolist() == whole.tolist()


def test_the_order_never_changes_between_versions() -> None:
    # Old checkpoints must resume in the same order: these numbers may never change.
    assert shuffled(np.arange(10), 10, seed=0, epoch=0).tolist() == [5, 2, 7, 1, 9, 3, 0, 4, 8, 6]
    assert shuffled(np.arange(10), 10, seed=0, epoch=1).tolist() == [4, 2, 7, 0, 8, 1, 9, 3, 5, 6]
    assert shuffled(np.arange(3), 10**9, seed=7, epoch=2).tolist() == [
        423899678,
        810550551,
        773893648,
    ]


def test_every_epoch_and_seed_has_its_own_order() -> None:
    orders = {
        tuple(shuffled(np.arange(50), 50, seed, epoch).tolist())
        for seed in range(8)
        for epoch in range(8)
    }
    assert len(orders) == 64


@pytest.mark.parametrize("size", [7, 10, 50])
def test_each_sample_is_equally_likely_at_each_position(size: int) -> None:
    trials = 2000
    counts = np.zeros((size, size))
    for seed in range(trials):
        counts[np.arange(size), shuffled(np.arange(size), size, seed, 0)] += 1
    expected = trials / size
    freedom = (size - 1) ** 2
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # Five standard deviations of chi square; the seeds are fixed, so the result never varies.
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_without_shuffling_the_order_is_the_index() -> None:
    assert EpochOrder(10, shuffle=False).samples(4, 2, 7).tolist() == [2, 3, 4, 5, 6]
