"""A rank's batches: in the sampler's order, with a position that counts received batches."""

import gc
import json
import os
import threading
import traceback
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset as MapDataset

from tutti.data import (
    Batch,
    DataError,
    GlobalSampler,
    Loader,
    MapSamples,
    Position,
    Samples,
    TensorSamples,
    evaluation_loader,
)


def numbered(size: int) -> TensorSamples:
    """Sample i has input [i] and target -i, so a batch shows which samples it holds."""
    numbers = torch.arange(size)
    return TensorSamples(numbers.view(-1, 1), -numbers)


class Counting(Samples):
    """Numbered samples that count fetches and fail at fetch number `fails`."""

    def __init__(self, size: int, fails: int | None = None) -> None:
        self.size, self.fails = size, fails
        self.fetches = 0

    def __len__(self) -> int:
        return self.size

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        self.fetches += 1
        if self.fetches == self.fails:
            raise OSError("the disk is gone")
        return indices.view(-1, 1), -indices


def taken(batches: Iterator[Batch] | Loader) -> list[list[int]]:
    steps = []
    for inputs, targets in batches:
        assert inputs.flatten().tolist() == (-targets).tolist()
        steps.append(inputs.flatten().tolist())
    return steps


def drawn(size: int, batch: int, epochs: int = 1, **options: bool) -> list[list[int]]:
    sampler = GlobalSampler(size, batch, **options)
    at, steps = Position(), []
    while at.epoch < epochs:
        draw = sampler.draw(at)
        steps.append(draw.indices.tolist())
        at = draw.after
    return steps


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("tutti-data")}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert threads() == set()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 7])
def test_batches_come_in_the_order_of_the_sampler(prefetch: int) -> None:
    loader = Loader(Counting(103), 10, drop_last=False, prefetch=prefetch)
    assert len(loader) == 11
    assert taken(loader) == drawn(103, 10, drop_last=False)
    assert taken(loader.stream(2)) == drawn(103, 10, 3, drop_last=False)[11:]


@settings(max_examples=50)
@given(
    st.integers(1, 60), st.integers(1, 30), st.integers(1, 5), st.sampled_from([0, 2]), st.data()
)
def test_the_ranks_together_take_every_sample_of_each_step(
    size: int, batch: int, ranks: int, prefetch: int, data: st.DataObject
) -> None:
    shares = data.draw(
        st.none() | st.lists(st.floats(0.1, 10), min_size=ranks, max_size=ranks), "shares"
    )
    loaders = [
        Loader(
            numbered(size),
            batch,
            rank=rank,
            ranks=ranks,
            shares=shares,
            shuffle=False,
            drop_last=False,
            prefetch=prefetch,
        )
        for rank in range(ranks)
    ]
    together = []
    for parts in zip(*loaders, strict=True):  # strict: all ranks take the same number of steps
        step = [i for part in parts for i in part.inputs.flatten().tolist()]
        assert {part.global_count for part in parts} == {len(step)}
        assert sum(part.count for part in parts) == len(step)
        assert len({part.after for part in parts}) == 1
        together.append(step)
    assert together == drawn(size, batch, shuffle=False, drop_last=False)


@settings(max_examples=40)
@given(st.data())
def test_a_run_resumed_with_other_ranks_continues_with_the_same_samples(
    data: st.DataObject,
) -> None:
    size, batch, prefetch = data.draw(st.integers(12, 50)), 6, data.draw(st.sampled_from([0, 3]))
    ranks, others = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))

    def world(ranks: int) -> list[Loader]:
        return [
            Loader(Counting(size), batch, rank=rank, ranks=ranks, seed=9, prefetch=prefetch)
            for rank in range(ranks)
        ]

    def run(loaders: list[Loader], steps: int) -> list[list[int]]:
        streams = [loader.stream() for loader in loaders]
        done = []
        for _ in range(steps):
            parts = [next(stream) for stream in streams]
            done.append([i for part in parts for i in part.inputs.flatten().tolist()])
        return done

    steps, rest = data.draw(st.integers(0, 20)), 10
    uninterrupted = run(world(1), steps + rest)
    first = world(ranks)
    before = run(first, steps)
    states = [json.dumps(loader.state_dict()) for loader in first]
    assert len(set(states)) == 1  # the state is the same on every rank
    second = world(others)
    for loader in second:
        loader.load_state_dict(json.loads(states[0]))
    assert before + run(second, rest) == uninterrupted


def test_the_position_counts_received_batches_and_not_prefetched_batches() -> None:
    samples = Counting(100)
    loader = Loader(samples, 10, prefetch=4)
    fetched_ahead = threading.Event()
    for step, batch in enumerate(loader, start=1):
        assert loader.position == batch.after
        assert loader.state_dict()["position"] == (10 * step if step < 10 else 0)
        while step == 1 and samples.fetches < 5:  # the thread runs ahead, the position does not
            fetched_ahead.wait(0.001)
    assert loader.position == Position(epoch=1, sample=0)
    assert samples.fetches == 10  # not into the next epoch


def test_at_most_prefetch_batches_are_made_ahead() -> None:
    samples = Counting(1000)
    loader = Loader(samples, 10, prefetch=3)
    stream = loader.stream()
    next(stream)
    while samples.fetches < 4:
        threading.Event().wait(0.001)
    threading.Event().wait(0.05)  # time in which an unbounded thread would fetch more
    assert samples.fetches == 4
    stream.close()


def test_leaving_a_loop_ends_its_thread_and_a_new_loop_continues() -> None:
    loader = Loader(Counting(100), 10, prefetch=2)
    for _ in loader:
        assert threads() == {"tutti-data-rank0"}
        break
    assert threads() == set()
    assert taken(loader) == drawn(100, 10)[1:]


def test_a_loop_whose_body_fails_ends_its_thread() -> None:
    loader = Loader(Counting(100), 10, prefetch=2)

    def train() -> None:
        for _ in loader:
            raise KeyError("in the step")

    with pytest.raises(KeyError):
        train()
    assert threads() == set()


def test_an_abandoned_loop_and_an_unused_loader_leave_no_thread() -> None:
    iter(Loader(Counting(100), 10, prefetch=2))
    stream = Loader(Counting(100), 10, prefetch=2).stream()
    next(stream)
    del stream
    gc.collect()
    assert threads() == set()


def test_close_ends_the_running_loop() -> None:
    loader = Loader(Counting(100), 10, prefetch=2)
    stream = loader.stream()
    next(stream)
    loader.close()
    assert threads() == set()
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_second_loop_ends_the_first_and_no_batch_is_given_twice(prefetch: int) -> None:
    loader = Loader(Counting(100), 10, prefetch=prefetch)
    first, second = loader.stream(), loader.stream()
    received = [next(first).inputs, next(second).inputs]
    assert [s.flatten().tolist() for s in received] == drawn(100, 10)[:2]
    with pytest.raises(RuntimeError, match="another loop was started"):
        next(first)
    assert next(second).inputs.flatten().tolist() == drawn(100, 10)[2]
    second.close()


def test_an_error_in_the_thread_is_raised_in_the_loop_with_its_traceback() -> None:
    loader = Loader(Counting(100, fails=3), 10, prefetch=5)
    received = []
    with pytest.raises(OSError, match="the disk is gone") as error:
        for batch in loader:
            received.append(batch.inputs.flatten().tolist())
    assert received == drawn(100, 10)[:2]
    where = "".join(traceback.format_tb(error.value.__traceback__))
    assert 'raise OSError("the disk is gone")' in where
    assert loader.position == Position(
        0, 20
    )  # the received batches; the others can be fetched again
    assert threads() == set()
    assert taken(loader) == drawn(100, 10)[2:]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_new_shares_apply_from_the_next_step_on_every_rank(prefetch: int) -> None:
    loaders = [Loader(Counting(400), 40, rank=r, ranks=2, prefetch=prefetch) for r in range(2)]
    counts, steps = [], []
    streams = [loader.stream(1) for loader in loaders]
    for step, parts in enumerate(zip(*streams, strict=True)):
        counts.append([part.count for part in parts])
        steps.append([i for part in parts for i in part.inputs.flatten().tolist()])
        if step == 3:
            for loader in loaders:
                loader.set_shares([3, 1])
    assert counts == [[20, 20]] * 4 + [[30, 10]] * 6
    assert steps == drawn(400, 40)  # batches made ahead are neither lost nor duplicated


def test_every_rank_gets_at_least_one_sample() -> None:
    batch = next(iter(Loader(numbered(100), 10, rank=1, ranks=2, shares=[1000, 1])))
    assert batch.count == 1


@settings(max_examples=50)
@given(st.integers(1, 50), st.integers(1, 8), st.integers(1, 9))
def test_evaluation_has_each_sample_once_and_equal_steps_on_all_ranks(
    size: int, rank_batch: int, ranks: int
) -> None:
    loaders = [
        evaluation_loader(numbered(size), rank_batch, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    for _ in range(2):  # and again, as after each epoch of training
        steps = [taken(loader) for loader in loaders]
        assert len({len(rank_steps) for rank_steps in steps}) == 1
        received = sorted(i for rank_steps in steps for step in rank_steps for i in step)
        assert received == list(range(size))


def test_data_on_the_device_gives_the_same_batches_without_a_thread() -> None:
    samples = TensorSamples(torch.arange(50).view(-1, 1), -torch.arange(50), lambda x: x * 1)
    loader = Loader(samples, 8, data_on_device=True)
    stream = loader.stream(1)
    first = next(stream)
    assert threads() == set()
    assert [first.inputs.flatten().tolist(), *taken(stream)] == drawn(50, 8)


def test_indices_match_the_batches() -> None:
    loader = Loader(numbered(50), 8, rank=1, ranks=2)
    drawn_indices = list(loader.indices(1))
    assert [each.indices.tolist() for each in drawn_indices] == [step[4:] for step in drawn(50, 8)]
    assert loader.position == Position(1, 0)
    assert drawn_indices[0].global_count == 8


def test_batches_are_prepared() -> None:
    samples = TensorSamples(torch.ones(4, 2, dtype=torch.uint8), torch.zeros(4), lambda x: x / 2)
    for prefetch in (0, 2):
        (batch,) = Loader(samples, 4, prefetch=prefetch)
        assert batch.inputs.tolist() == [[0.5, 0.5]] * 4


class Heavy(MapDataset[tuple[int, int]]):
    """A user's dataset; the target of a sample is the id of the process that made it."""

    def __init__(self, fails: int = -1) -> None:
        self.fails = fails

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == self.fails:
            raise KeyError(f"no sample {index}")
        return index, os.getpid()


def children() -> int:
    import multiprocessing

    return len(multiprocessing.active_children())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_workers_give_the_same_batches_from_other_processes(prefetch: int) -> None:
    generator = torch.get_rng_state()
    loader = Loader(MapSamples(Heavy()), 4, workers=2, prefetch=prefetch, drop_last=False)
    batches = list(loader)
    assert [b.inputs.tolist() for b in batches] == drawn(23, 4, drop_last=False)
    processes = {pid for b in batches for pid in b.targets.tolist()}
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert [b.after.sample for b in batches] == [4, 8, 12, 16, 20, 0]
    # torch's global generator is unchanged: a resumed run draws the same dropout masks.
    assert torch.equal(torch.get_rng_state(), generator)
    assert children() == 0


def test_workers_end_with_the_loop_and_with_an_error() -> None:
    loader = Loader(MapSamples(Heavy()), 4, workers=2)
    for _ in loader:
        break
    gc.collect()
    assert children() == 0
    with pytest.raises(KeyError, match="no sample 7"):
        list(Loader(MapSamples(Heavy(fails=7)), 4, workers=1, drop_last=False))
    assert children() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 2, "rank": 2}, "rank must be 0 to 1 for 2 ranks, got 2"),
        ({"ranks": 11}, "10 samples for 11 ranks.*use at most 10 ranks"),
        ({"ranks": 5}, "global batch must be at least 5.*got 4"),
        ({"ranks": 2, "shares": [1, 2, 3]}, "3 shares for 2 ranks"),
        ({"ranks": 2, "shares": [1, 0]}, "rank 1 has 0"),
        ({"prefetch": -1}, "--prefetch must be at least 0, got -1"),
        ({"workers": -1}, "--workers must be at least 0, got -1"),
        ({"workers": 1, "data_on_device": True}, "--workers 1 has no effect with --data-on-device"),
    ],
)
def test_wrong_options_are_refused_by_the_constructor(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        Loader(numbered(10), 4, **options)  # type: ignore[arg-type]


def test_a_position_of_another_dataset_is_refused_and_changes_nothing() -> None:
    loader = Loader(numbered(10), 4)
    other = Loader(numbered(11), 4).state_dict()
    with pytest.raises(DataError, match="size 11, but this dataset has 10"):
        loader.load_state_dict(other)
    assert loader.position == Position()
