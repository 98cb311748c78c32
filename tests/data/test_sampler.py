"""Which samples a step takes: a function of (seed, epoch, position), never of the ranks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.data import DataError, GlobalSampler, Position, split

sizes = st.integers(1, 400)
batches = st.integers(1, 100)


def steps(sampler: GlobalSampler, at: Position, until_epoch: int) -> list[list[int]]:
    """The samples of each step from `at` on."""
    drawn = []
    at = sampler.settle(at)
    while at.epoch < until_epoch:
        draw = sampler.draw(at)
        assert draw.start == at
        drawn.append(draw.indices.tolist())
        at = draw.after
    return drawn


@given(sizes, batches, st.integers(0, 5))
def test_an_epoch_with_its_ragged_end_has_each_sample_once(
    size: int, batch: int, seed: int
) -> None:
    sampler = GlobalSampler(size, batch, seed=seed, drop_last=False)
    epoch = steps(sampler, Position(), 1)
    assert sorted(i for step in epoch for i in step) == list(range(size))
    assert len(epoch) == len(sampler)
    assert [len(step) for step in epoch[:-1]] == [batch] * (len(epoch) - 1)
    assert len(epoch[-1]) == (size % batch or batch)


@given(sizes, batches)
def test_dropping_the_last_leaves_full_batches_only(size: int, batch: int) -> None:
    if batch > size:
        with pytest.raises(
            DataError, match=f"{batch} samples is larger than the data set of {size}"
        ):
            GlobalSampler(size, batch)
        return
    epoch = steps(GlobalSampler(size, batch), Position(), 1)
    assert [len(step) for step in epoch] == [batch] * (size // batch)
    assert len({i for step in epoch for i in step}) == batch * (size // batch)


@given(sizes, batches, st.integers(1, 9), st.integers(1, 9), st.data())
def test_the_ranks_together_take_the_same_samples_however_many_they_are(
    size: int, batch: int, ranks: int, others: int, data: st.DataObject
) -> None:
    sampler = GlobalSampler(size, batch, drop_last=False)
    shares = data.draw(st.lists(st.floats(0.01, 100), min_size=others, max_size=others))
    for step in steps(sampler, Position(), 2):
        for cut in (split.even(len(step), ranks), split.weighted(len(step), shares, minimum=1)):
            parts = [step[slice(*split.bounds(cut, rank))] for rank in range(len(cut))]
            assert [i for part in parts for i in part] == step


@given(sizes, batches, st.booleans(), st.data())
def test_a_resume_at_any_step_gives_the_rest_of_the_stream(
    size: int, batch: int, drop_last: bool, data: st.DataObject
) -> None:
    batch = min(batch, size)
    sampler = GlobalSampler(size, batch, seed=3, drop_last=drop_last)
    whole = steps(sampler, Position(), 3)
    done = data.draw(st.integers(0, len(whole)))
    at = Position()
    for _ in range(done):
        at = sampler.draw(at).after
    # When the position goes through a file to another sampler, as after a restart
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
        ({"size": 99}, "size 99, this data set has 100: resume with the data set"),
        ({"seed": 4}, "seed 4, this data set has 0: resume with the same seed"),
        ({"shuffle": False}, "shuffle False"),
        ({"position": 101}, "101 is outside the data set of 100"),
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
    with pytest.raises(DataError, match="takes nothing"):
        GlobalSampler(10, 0)
