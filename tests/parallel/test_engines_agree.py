"""All engines, with any number of ranks and any split, give the parameters of a plain loop.

Tolerance: sums in another order differ by a few units of 2⁻⁵³ per step, 1e-15 relative; 1e-12
leaves room for five steps and catches any wrong weight, the smallest of which is 1/24.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from splits import ENGINES, batches, plain_training, sgd, shares, step, worst_error
from tutti.parallel import EngineOptions, build_engine
from worlds import in_world

TOLERANCE = 1e-12
Results = dict[str, list[Any]]  # the results of each rank


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double()


def _train_with_all(world: tutti.World) -> dict[str, float]:
    # At the end of an epoch there are fewer samples than ranks × microbatches.
    steps = batches([24, 24, 7, 24, 5], [6], torch.float64, world.device)
    expected = plain_training(_model(0).to(world.device), steps)
    engines = dict(ENGINES)
    if world.size > 2:  # two ranks are enough to test these options
        for name in ("ddp copies", "ddp static", "ddp find-unused"):
            del engines[name]
    if world.size == 1:
        engines["single"] = EngineOptions(engine="single")
        engines["dataparallel"] = EngineOptions(engine="dataparallel")
    errors = {}
    for split in ["even", "uneven", "one rank without"][: 1 if world.size == 1 else 3]:
        for accumulate in (1, 3):
            for name, options in engines.items():
                if options.static_graph and accumulate > 1:
                    continue  # refused: see below
                # Rank 0 broadcasts its parameters: other ranks may start from any values.
                engine = build_engine(_model(world.rank), world, options)
                optimizer = sgd(engine.model)
                for batch in steps:
                    step(engine, optimizer, batch, shares(split, world.size), accumulate)
                tutti.check_same(world, model=engine.model)
                errors[f"{name}, {split}, {accumulate}"] = worst_error(engine.model, expected)
    return errors


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_engines_agree_with_a_plain_loop_over_the_whole_batch(ranks: int) -> None:
    for errors in in_world(_train_with_all, ranks):
        assert len(errors) == {1: 17, 2: 39, 3: 24, 4: 24}[ranks]
        wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
        assert not wrong


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 3])
def test_engines_agree_on_a_gpu(ranks: int) -> None:
    for errors in in_world(_train_with_all, ranks, gpu=True, timeout=240):
        assert not {name: error for name, error in errors.items() if not error < TOLERANCE}


def _answer_all(world: tutti.World) -> dict[str, Any]:
    return {
        "branch": _branch(world),
        "messages": _messages(world),
        "idle": _idle(world),
        "share": _share(world),
        "refusals": _refusals(world),
    }


@pytest.fixture(scope="module")
def two() -> Results:
    """The results of two ranks for the tests below, in one world, since a start takes seconds."""
    ranks = in_world(_answer_all, 2)
    return {key: [rank[key] for rank in ranks] for key in ranks[0]}


class _Branches(nn.Module):
    """Uses one of two layers, selected by the first input value; a third layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.left(x) if x[0, 0] > 0 else self.right(x)
        return result


def _branch(world: tutti.World) -> dict[str, Any]:
    torch.manual_seed(0)
    model = _Branches().double()
    # Rank 0 takes left, then right; rank 1 takes left twice; in step 2 all take left.
    signs = {0: [[1, -1], [1, 1]], 1: [[1, 1], [1, 1]]}
    x = torch.randn(2, 2, 2, 5, 4, dtype=torch.float64)  # step, rank, microbatch, sample, feature
    for rank in range(2):
        for number in range(2):
            for part in range(2):
                x[number, rank, part, 0, 0] = float(signs[rank][number][part])
    expected = copy.deepcopy(model)
    optimizer = sgd(expected)
    for number in range(2):
        optimizer.zero_grad()
        for part in x[number].flatten(0, 1):
            (expected(part).square().sum() / 20).backward()
        optimizer.step()

    results: dict[str, Any] = {}
    for name, options in {
        "scratch": EngineOptions(engine="scratch", find_unused=True),
        "no-overlap": EngineOptions(overlap=False, find_unused=True),
        "ddp": EngineOptions(find_unused=True),
    }.items():
        engine = build_engine(copy.deepcopy(model), world, options)
        optimizer = sgd(engine.model)
        for number in range(2):
            optimizer.zero_grad()
            for index, part in enumerate(x[number, world.rank]):
                with engine.microbatch(index == 1):
                    engine.backward(engine(part).square().sum() / 20)
            engine.reduce()
            optimizer.step()
        results[name] = worst_error(engine.model, expected)

    for name, options in {
        "scratch strict": EngineOptions(engine="scratch"),
        "no-overlap strict": EngineOptions(overlap=False),
        "ddp strict": EngineOptions(),
    }.items():
        engine = build_engine(copy.deepcopy(model), world, options)
        with engine.microbatch(True):
            engine.backward(engine(x[0, world.rank, 0]).sum())
        try:
            engine.reduce()
        except tutti.UsageError as error:
            results[name] = str(error)
    return results


def test_unused_parameters_are_found_with_find_unused_and_named_without(two: Results) -> None:
    for results in two["branch"]:
        for name in ("scratch", "no-overlap", "ddp"):
            assert results[name] < TOLERANCE, name
        for name in ("scratch strict", "no-overlap strict", "ddp strict"):
            assert "got no gradient in this step: use --find-unused" in results[name]


def _messages(world: tutti.World) -> dict[str, list[int]]:
    """How many all-reduces a step takes, with one microbatch and with three."""
    (batch,) = batches([24], [6], torch.float64, world.device)
    counts: dict[str, list[int]] = {}
    for name, options in ENGINES.items():
        engine = build_engine(_model(0), world, options)
        optimizer = sgd(engine.model)
        for _ in range(2):  # DDP rebuilds its buckets after the first step
            step(engine, optimizer, batch, shares("even", world.size), 1)
        counts[name] = []
        for accumulate in [1] if options.static_graph else [1, 3]:
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            ) as profile:
                step(engine, optimizer, batch, shares("even", world.size), accumulate)
            counts[name].append(sum(event.name == "c10d::allreduce_" for event in profile.events()))
    return counts


def test_a_step_communicates_once_however_many_microbatches_it_has(two: Results) -> None:
    for counts in two["messages"]:
        assert counts["scratch each"] == [8, 8]  # the model has eight parameters
        assert counts["scratch grouped"] == [1, 1]
        for name in ("ddp", "ddp copies", "ddp no-overlap"):
            assert 1 < counts[name][0] < 8 and len(set(counts[name])) == 1, name
        assert counts["ddp find-unused"][0] == counts["ddp find-unused"][1]


def _idle(world: tutti.World) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(16, 3)
    )
    results = {}
    for name, options in ENGINES.items():
        engine = build_engine(copy.deepcopy(model), world, options)
        buffers = [buffer.clone() for buffer in engine.model.buffers()]
        example = torch.randn(1, 1, 4, 4)
        random = torch.get_rng_state()
        if not options.static_graph:
            engine.empty_microbatch(example, last=False)
        engine.empty_microbatch(example, last=True)
        engine.reduce()
        results[name] = [
            all(torch.equal(a, b) for a, b in zip(buffers, engine.model.buffers(), strict=True)),
            torch.equal(random, torch.get_rng_state()),
            all(p.grad is not None and not p.grad.any() for p in engine.model.parameters()),
            all(layer.training for layer in engine.model.modules()),
        ]
    return results


def test_an_empty_microbatch_adds_zeros_and_changes_no_state(two: Results) -> None:
    for results in two["idle"]:
        assert results == {name: [True, True, True, True] for name in ENGINES}


def _share(world: tutti.World) -> list[float]:
    model = nn.BatchNorm1d(3)
    engine = build_engine(model, world, EngineOptions())
    engine(torch.full((4, 3), float(world.rank)).add_(torch.arange(4.0)[:, None]))
    engine.share_buffers()
    tutti.check_same(world, model=engine.model)
    assert model.running_mean is not None
    return model.running_mean.tolist()  # type: ignore[no-any-return]


def test_sharing_gives_all_ranks_the_running_statistics_of_rank_0(two: Results) -> None:
    first, second = two["share"]
    assert first == second == pytest.approx([0.15, 0.15, 0.15])


def _refusals(world: tutti.World) -> list[str]:
    messages = []
    for model, options in [
        (nn.Linear(2, 2), EngineOptions(engine="single")),
        (nn.Linear(2, 2), EngineOptions(engine="dataparallel")),
        (nn.ReLU(), EngineOptions()),
        (nn.Sequential(nn.SyncBatchNorm(2)), EngineOptions()),
    ]:
        try:
            build_engine(model, world, options)
        except tutti.UsageError as error:
            messages.append(str(error))
    static = build_engine(nn.Linear(2, 2), world, EngineOptions(static_graph=True))
    try:
        with static.microbatch(last=False):
            pass
    except tutti.UsageError as error:
        messages.append(str(error))
    return messages


def test_engines_refuse_worlds_and_models_that_they_cannot_run(two: Results) -> None:
    for messages in two["refusals"]:
        assert (
            "--engine single" in messages[0]
            and "2 ranks" in messages[0]
            and "--ranks 1" in messages[0]
        )
        assert "--engine dataparallel" in messages[1] and "2 ranks" in messages[1]
        assert "requires a gradient" in messages[2] and "--engine single" in messages[2]
        assert (
            "layer 0 is torch's SyncBatchNorm" in messages[3] and "--sync-batchnorm" in messages[3]
        )
        assert "--static-graph" in messages[4] and "--accumulation 1" in messages[4]


def test_description_of_an_engine() -> None:
    with tutti.init(device="cpu") as world:
        messages = [
            build_engine(nn.Linear(2, 2), world, options).description
            for options in (
                EngineOptions(engine="single"),
                EngineOptions(engine="dataparallel"),
                EngineOptions(engine="scratch", scratch_reduce="each"),
                EngineOptions(compress="bf16"),
                EngineOptions(overlap=False),
                EngineOptions(compress="powersgd"),
            )
        ]
    assert messages == [
        "single: one rank on cpu, no communication",
        "dataparallel: one device (cpu), so nothing is split",
        "scratch: 1 replica, one all-reduce per gradient, after backward",
        "ddp: 1 replica, buckets of 25 MiB all-reduced during backward, sent as bf16",
        "ddp: 1 replica, buckets of 25 MiB all-reduced after backward",
        "ddp: 1 replica, buckets of 25 MiB all-reduced during backward, PowerSGD of rank 2 "
        "from step 10",
    ]
