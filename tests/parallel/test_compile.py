"""Compiled blocks, in layouts and with recomputation, give the gradients of a plain loop."""

import functools
from typing import Any

import pytest
import torch
from one_step import (
    TASK,
    TOLERANCE,
    plain_step,
    small_gpt,
    some_tokens,
    step_of,
    worst_error,
)
from torch._dynamo.utils import counters

import tutti
from tutti.models import EfficientNet, EfficientNetConfig
from tutti.parallel import build_engine
from tutti.parallel.layout import ParallelOptions, Recompute
from tutti.parallel.recompute import compile_blocks, recompute_activations
from worlds import in_world


def _compiled(world: tutti.World) -> dict[str, float]:
    """Compile as --compile does, but with a backend without C++ code, which would take a minute.

    Two sizes of batch, as at the end of an epoch, where a second compilation is different.
    """
    inputs, targets = some_tokens(world.device)
    results = {}
    sizes = {"dp2": (8, 4), "shard2": (8,), "tp2": (8, 4), "tp2, whole": (8,)}
    for name in sizes:
        layout = name.split(",")[0]
        options = ParallelOptions(layout=layout, sequence_parallel=name != "tp2, whole")
        engine = build_engine(small_gpt(), world, None, options, example=inputs[:1])
        compile_blocks(engine.model, backend="aot_eager")
        for size in sizes[name]:
            x, y = inputs[:size], targets[:size]
            engine.model.zero_grad()
            step_of(engine, x, y, [size // engine.mesh.layout.data_ranks] * 2)
            results[f"{name}, {size}"] = worst_error(
                engine, plain_step(small_gpt().to(world.device), x, y)[1]
            )
    return results


def _compiled_and_recomputed(world: tutti.World) -> dict[str, Any]:
    """Recompute and compile; graphs are counted, since an uncompiled block is also correct."""
    inputs, targets = some_tokens(world.device)
    gradients = plain_step(small_gpt().to(world.device), inputs, targets)[1]
    shares = {"dp2": [4, 4], "tp2": [8, 8]}
    results = {}
    for layout, what in (("dp2", "full"), ("tp2", "full"), ("tp2", "selective")):
        torch.compiler.reset()
        counters.clear()
        with pytest.MonkeyPatch.context() as patch:
            quick = functools.partial(compile_blocks, backend="aot_eager")
            patch.setattr("tutti.parallel.apply.compile_blocks", quick)
            options = ParallelOptions(layout=layout)
            engine = build_engine(
                *(small_gpt(), world, None, options),
                example=inputs[:1],
                recompute=what,
                compile=True,
            )
        step_of(engine, inputs, targets, shares[layout])
        results[f"{layout}, {what}"] = {
            "error": worst_error(engine, gradients),
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": len(counters["graph_break"]),
        }
    return results


@pytest.mark.timeout(300)
def test_compiled_blocks_give_the_gradients_of_one_device() -> None:
    for rank in in_world(_compiled, 2, timeout=240):
        assert len(rank) == 6
        assert not {n: error for n, error in rank.items() if not error < TOLERANCE}


@pytest.mark.timeout(300)
def test_recomputed_blocks_are_compiled() -> None:
    for rank in in_world(_compiled_and_recomputed, 2, timeout=240):
        assert len(rank) == 3
        for name, results in rank.items():
            assert results["error"] < TOLERANCE, name
            assert (results["graphs"], results["breaks"]) == (1, 0), name  # one for all blocks


@pytest.mark.parametrize("what", ["full", "selective"])
def test_one_rank_compiles_a_whole_model_with_recomputed_blocks(what: Recompute) -> None:
    """As --compile does on one rank: the graph of the model contains torch's checkpoint."""
    inputs, targets = some_tokens(torch.device("cpu"))
    gradients = plain_step(small_gpt(), inputs, targets)[1]
    torch.compiler.reset()
    model = small_gpt()
    recompute_activations(model, what)
    whole = torch.compile(lambda x, y: TASK.loss_sums(model(x), y)[0], backend="aot_eager")
    (whole(inputs, targets) / targets.numel()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


def test_all_blocks_of_a_model_with_many_different_blocks_are_compiled() -> None:
    model = EfficientNet(EfficientNetConfig(stem_stride=2)).eval()
    torch.compiler.reset()
    counters.clear()
    compile_blocks(model, backend="eager")
    with torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    assert counters["frames"]["total"] == counters["frames"]["ok"] > 8  # torch's own limit
