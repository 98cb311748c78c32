"""Compressed gradients: bounds of their error, and that replicas stay equal.

Bound for 16-bit sums over R ranks: each rank's gradient g_r is rounded once, and each of the
R − 1 additions rounds a partial sum, so the error of every element is at most R · u · Σ|g_r|, with
u = 2⁻⁸ for bf16 and 2⁻¹¹ for fp16; one more u covers terms of second order. fp16 also rounds to
multiples of 2⁻²⁴ near zero, by half of that each time.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tutti
from splits import batches, cut, sgd, shares, step
from tutti.parallel import EngineOptions, build_engine
from tutti.parallel.ddp import POWERSGD_START
from worlds import in_world


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.gpu)])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The results of three ranks, on the CPU or on one GPU."""
    return in_world(_answer_all, 3, gpu=request.param)


def _answer_all(world: tutti.World) -> dict[str, Any]:
    return {"narrow": _narrow(world), "powersgd": _powersgd(world)}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 3))


def _narrow(world: tutti.World) -> dict[str, float]:
    """The largest error of an element relative to its bound, and the result for large gradients."""
    (batch,) = batches([24], [64], torch.float32, world.device)
    weights = shares("uneven", world.size)
    by_rank = []
    for x, y in cut(batch, weights):
        model = _model().to(world.device)
        (F.cross_entropy(model(x), y, reduction="sum") / len(batch[0])).backward()
        by_rank.append([p.grad.double() for p in model.parameters() if p.grad is not None])
    exact = [torch.stack(parts).sum(0) for parts in zip(*by_rank, strict=True)]
    sizes = [torch.stack(parts).abs().sum(0) for parts in zip(*by_rank, strict=True)]

    results = {}
    for name, u, tiny in (("bf16", 2**-8, 0.0), ("fp16", 2**-11, 2**-25)):
        options = EngineOptions(compress=name, bucket_mb=0.01)  # type: ignore[arg-type]
        engine = build_engine(_model(), world, options)
        optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.0)
        for _ in range(3):  # DDP rebuilds its buckets after the first step
            step(engine, optimizer, batch, weights, 1)
        results[name] = max(
            ((p.grad - g).abs() / ((world.size + 1) * (u * s + tiny) + 1e-7 * s + 1e-30)).max()
            for p, g, s in zip(engine.model.parameters(), exact, sizes, strict=True)
        ).item()  # type: ignore[union-attr]
        optimizer = sgd(engine.model)
        for _ in range(3):
            step(engine, optimizer, batch, weights, 2)
        tutti.check_same(world, model=engine.model)

        # 3 × 20,000 fits fp16 (65,504), and so does 20,000: the scaled loss must not overflow.
        large = build_engine(nn.Linear(1, 1, bias=False), world, options)
        with large.microbatch(True):
            large.backward(
                large(torch.full((1, 1), 60_000.0 / world.size, device=world.device)).sum()
            )
        large.reduce()
        (weight,) = large.model.parameters()
        assert weight.grad is not None
        results[f"{name} large"] = weight.grad.item()
    return results


def test_16_bit_gradients_are_right_to_their_precision_and_the_same_on_all_ranks(
    ranks: list[dict[str, Any]],
) -> None:
    for results in (rank["narrow"] for rank in ranks):
        assert results["bf16"] < 1 and results["fp16"] < 1
        # 2⁻⁸ relative for each of three roundings of bf16, 2⁻¹¹ of fp16.
        assert results["bf16 large"] == pytest.approx(60_000, rel=3 * 2**-8)
        assert results["fp16 large"] == pytest.approx(60_000, rel=3 * 2**-11)


def _powersgd(world: tutti.World) -> dict[str, Any]:
    (batch,) = batches([48], [64], torch.float32, world.device)
    even = shares("even", world.size)
    exact = _model().to(world.device)
    (F.cross_entropy(exact(batch[0]), batch[1], reduction="sum") / len(batch[0])).backward()
    results: dict[str, Any] = {"errors": {}}
    for rank in (1, 4, 12):
        options = EngineOptions(compress="powersgd", powersgd_rank=rank)
        engine = build_engine(_model(), world, options)
        still = torch.optim.SGD(engine.model.parameters(), lr=0.0)
        random = _random_state(world)
        for _ in range(POWERSGD_START + 1):  # the last step is the first that is compressed
            step(engine, still, batch, even, 2)
        wrong = sum((p.grad - q.grad).square().sum() for p, q in _pairs(engine.model, exact))
        whole = sum(q.grad.square().sum() for _, q in _pairs(engine.model, exact))
        results["random numbers"] = torch.equal(random, _random_state(world))
        results["errors"][rank] = (wrong / whole).sqrt().item()

    engine = build_engine(_model(), world, EngineOptions(compress="powersgd"))
    results["before"] = F.cross_entropy(engine.model(batch[0]), batch[1]).item()
    optimizer = sgd(engine.model)
    for _ in range(2 * POWERSGD_START):
        step(engine, optimizer, batch, even, 1)
    tutti.check_same(world, model=engine.model)
    results["after"] = F.cross_entropy(engine.model(batch[0]), batch[1]).item()
    return results


def _random_state(world: tutti.World) -> torch.Tensor:
    on_gpu = world.device.type == "cuda"
    return torch.cuda.get_rng_state(world.device) if on_gpu else torch.get_rng_state()


def _pairs(one: nn.Module, other: nn.Module) -> list[tuple[Any, Any]]:
    return list(zip(one.parameters(), other.parameters(), strict=True))


def test_powersgd_trains_identical_replicas_and_its_error_falls_with_its_rank(
    ranks: list[dict[str, Any]],
) -> None:
    for results in (rank["powersgd"] for rank in ranks):
        assert results["random numbers"]
        errors = results["errors"]
        # Random data: rank 1 loses much of the gradient, rank 12 little.
        assert 1 > errors["1"] > errors["4"] > errors["12"] > 1e-4
        assert results["after"] < results["before"] / 2
