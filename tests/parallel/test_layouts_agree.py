"""Every layout and every option gives the loss and gradients of a plain loop (one_step.py)."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from one_step import (
    SAMPLES,
    TASK,
    TOLERANCE,
    plain_step,
    small_gpt,
    some_tokens,
    step_of,
    worst_error,
)

import tutti
from tutti.models import WideResNet, WideResNetConfig
from tutti.parallel import EngineOptions, Layout, build_engine
from tutti.parallel.grad_norm import clip_by_global_norm, global_norm
from tutti.parallel.layout import ParallelOptions
from worlds import in_world


def _even(data_ranks: int) -> list[int]:
    return [SAMPLES // data_ranks] * data_ranks


def _uneven(data_ranks: int) -> list[int]:
    """If there are several data ranks, the last one has no samples."""
    return [[SAMPLES], [SAMPLES, 0], [5, 3, 0], [1, 5, 2, 0]][data_ranks - 1]


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "uneven": {"shares": "uneven"},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "no reshard": {"options": {"reshard": False}},
    "no prefetch": {"options": {"prefetch": 0}},
    "prefetch 2": {"options": {"prefetch": 2}},
    "whole sequence": {"options": {"sequence_parallel": False}},
    "whole logits": {"options": {"loss_parallel": False}},
    "tied": {"tied": True},
}
USELESS = {"no reshard": "shard", "no prefetch": "shard", "prefetch 2": "shard"}
USELESS |= {"whole sequence": "tp", "whole logits": "tp"}


def _all_layouts(world: tutti.World, variants: Sequence[str] = tuple(VARIANTS)) -> dict[str, Any]:
    inputs, targets = some_tokens(world.device)
    plain = plain_step(small_gpt().to(world.device), inputs, targets)
    tied = plain_step(small_gpt(tied=True).to(world.device), inputs, targets)
    results: dict[str, Any] = {}
    for layout in Layout.every(world.size):
        if layout.pp > 1:
            continue  # tests/parallel/test_pipeline.py
        for name in variants:
            variant = VARIANTS[name]
            if getattr(layout, USELESS.get(name, "size")) == 1:
                continue
            engine = build_engine(
                small_gpt(variant.get("tied", False)),
                world,
                None,
                ParallelOptions(layout=str(layout), **variant.get("options", {})),
                example=inputs[:1],
                recompute=variant.get("recompute", "none"),
            )
            shares = _uneven if "shares" in variant else _even
            loss = step_of(engine, inputs, targets, shares(layout.data_ranks))
            expected_loss, gradients = tied if "tied" in variant else plain
            error = worst_error(engine, gradients)
            norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
            measured = global_norm(engine)
            clipped = clip_by_global_norm(engine, float(norm) / 2)
            half = {parameter: gradient / 2 for parameter, gradient in gradients.items()}
            results[f"{layout}, {name}"] = {
                "loss": float((loss - expected_loss).abs()),
                "gradients": error,
                "norm": float(max((measured - norm).abs(), (clipped - norm).abs())),
                # torch divides by norm + 1e-6, a relative error of 3e-7 here.
                "clipped gradients": max(0.0, worst_error(engine, half) - 2e-6),
            }
            outputs = engine.infer(inputs, inputs[:1])
            whole = small_gpt(variant.get("tied", False)).to(world.device)
            with torch.no_grad():
                results[f"{layout}, {name}"]["outputs"] = float(
                    (outputs - whole(inputs)).abs().max()
                )
    return results


def _batch_norms(world: tutti.World) -> dict[str, Any]:
    """Batch norms in sharded layouts, with the statistics of all data ranks, as on one device."""
    results = {}
    torch.manual_seed(0)
    model = WideResNet(WideResNetConfig(depth=10, width=1, classes=4)).double()
    inputs, targets = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.arange(8) % 4
    plain = copy.deepcopy(model)
    for part in (slice(0, 4), slice(4, 8)):  # a microbatch of all ranks is one batch
        (TASK.loss_sums(plain(inputs[part]), targets[part])[0] / 8).backward()  # type: ignore[no-untyped-call]
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    for layout in ("dp4", "shard4", "dp2.shard2"):
        options = EngineOptions(sync_batchnorm=True)
        engine = build_engine(copy.deepcopy(model), world, options, ParallelOptions(layout=layout))
        local = [inputs[n : n + 1] for n in (world.rank, 4 + world.rank)]
        labels = [targets[n : n + 1] for n in (world.rank, 4 + world.rank)]
        engine.run(list(zip(local, labels, strict=True)), lambda a, b: TASK.loss_sums(a, b)[0] / 8)
        engine.share_buffers()
        buffers = dict(engine.model.named_buffers())
        statistics = [
            float((buffers[name] - right).abs().max())
            for name, right in plain.named_buffers()
            if name.endswith(("mean", "var"))
        ]
        results[layout] = {
            "gradients": worst_error(engine, gradients),
            "statistics": max(statistics),
        }
    return results


def _recomputed_norms(world: tutti.World) -> dict[str, float]:
    """A recomputed block counts its batch once in its running statistics."""
    torch.manual_seed(0)
    model = WideResNet(WideResNetConfig(depth=10, width=1, classes=4)).double()
    inputs = torch.randn(4, 3, 8, 8, dtype=torch.float64)[world.rank :][:1]
    buffers: dict[str, dict[str, torch.Tensor]] = {}
    for what in ("none", "selective", "full"):
        for joint in (False, True):
            engine = build_engine(
                copy.deepcopy(model),
                world,
                EngineOptions(sync_batchnorm=joint),
                recompute=what,  # type: ignore[arg-type]
            )
            engine(inputs).sum().backward()
            buffers[f"{what} {joint}"] = dict(engine.model.named_buffers())
    return {
        f"{what} {joint}": max(
            float((value - buffers[f"none {joint}"][name]).abs().max())
            for name, value in buffers[f"{what} {joint}"].items()
        )
        for what in ("selective", "full")
        for joint in (False, True)
    }


def _answer(world: tutti.World) -> dict[str, Any]:
    return {
        "recomputed norms": _recomputed_norms(world),
        "layouts": _all_layouts(world),
        "norms": _batch_norms(world),
    }


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    """The results of four ranks, in one world, since a start takes seconds."""
    return in_world(_answer, 4, timeout=240)


@pytest.mark.timeout(300)
def test_every_layout_and_option_gives_the_step_and_outputs_of_one_device(
    four: list[dict[str, Any]],
) -> None:
    for rank in four:
        assert len(rank["layouts"]) == 45
        wrong = {
            name: errors
            for name, errors in rank["layouts"].items()
            if not all(error < TOLERANCE for error in errors.values())
        }
        assert not wrong


@pytest.mark.timeout(300)
def test_batch_norms_are_synchronised_over_shards_and_replicas(
    four: list[dict[str, Any]],
) -> None:
    for rank in four:
        for layout, errors in rank["norms"].items():
            assert all(error < TOLERANCE for error in errors.values()), layout


@pytest.mark.timeout(300)
def test_recomputing_leaves_running_statistics_alone(four: list[dict[str, Any]]) -> None:
    for rank in four:
        assert len(rank["recomputed norms"]) == 4
        assert max(rank["recomputed norms"].values()) == 0


def _on_a_gpu(world: tutti.World) -> dict[str, float]:
    results = _all_layouts(world, ("plain", "uneven"))
    return {name: errors["gradients"] for name, errors in results.items()}


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_every_gradient_is_that_of_one_device_on_a_gpu() -> None:
    for errors in in_world(_on_a_gpu, 4, gpu=True, timeout=240):
        assert len(errors) == 12
        assert not {name: error for name, error in errors.items() if not error < TOLERANCE}
