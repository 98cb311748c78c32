"""Every layout and every option of it: the loss and gradients of one plain loop.

Tolerance: float64 sums in another order differ by some units of 2⁻⁵³, here up to 3e-15 relative to
the largest gradient of a parameter; 1e-12 catches any wrong factor, sum or sign.
"""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

import tutti
from tutti.models import (
    GPT,
    EfficientNet,
    EfficientNetConfig,
    GPTConfig,
    WideResNet,
    WideResNetConfig,
)
from tutti.parallel import EngineOptions, Layout, build_engine
from tutti.parallel.blocks import compile_blocks
from tutti.parallel.clipping import clip_by_global_norm
from tutti.parallel.engine import Engine, Objective
from tutti.parallel.options import ParallelOptions, Recompute
from tutti.parallel.recompute import recompute_activations
from tutti.parallel.tensor import loss_context
from tutti.train.task import Task
from worlds import in_world

TOLERANCE = 1e-12
SAMPLES, MICROBATCHES = 8, 2
TASK = Task()


def _gpt(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=32, max_seq_len=16, layers=2, dim=32, heads=4, kv_heads=4, tied=tied
    )
    model = GPT(config).double()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms start as ones, which hides what is done to them
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def _tokens(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(32, (SAMPLES, 17))
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def _plain(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = TASK.loss_sum(model(inputs), targets) / targets.numel()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def _step(
    engine: Engine, inputs: torch.Tensor, targets: torch.Tensor, shares: list[int]
) -> torch.Tensor:
    """One step in which data rank r has `shares[r]` samples; the loss over all ranks."""
    rank, total = engine.grid.data_rank, targets.numel()
    mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    x, y = inputs[mine], targets[mine]
    sizes = [len(x) // MICROBATCHES + (n < len(x) % MICROBATCHES) for n in range(MICROBATCHES)]
    parts = list(zip(x.split(sizes), y.split(sizes), strict=True))
    objective = Objective(
        of_inputs=lambda a, b: TASK.loss_sum(engine(a), b) / total,
        of_outputs=lambda outputs, b: TASK.loss_sum(outputs, b) / total,
        example=inputs[:1],
    )
    with loss_context(engine.grid.layout.tp > 1):
        loss = engine.run(parts, objective)
    torch.distributed.all_reduce(loss)
    return loss


def _error(engine: Engine, expected: dict[str, torch.Tensor]) -> float:
    worst = 0.0
    for name, parameter in engine.model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        right = expected[engine.aliases.get(name, name)]
        worst = max(worst, float((whole - right).abs().max() / right.abs().max()))
    return worst


def _even(data_ranks: int) -> list[int]:
    return [SAMPLES // data_ranks] * data_ranks


def _uneven(data_ranks: int) -> list[int]:
    """Where there are others, the last data rank has no sample at all."""
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


def _all_layouts(world: tutti.World) -> dict[str, Any]:
    inputs, targets = _tokens(world.device)
    loss, gradients = _plain(_gpt().to(world.device), inputs, targets)
    tied_loss, tied_gradients = _plain(_gpt(tied=True).to(world.device), inputs, targets)
    told: dict[str, Any] = {}
    for layout in Layout.every(world.size):
        if layout.pp > 1:
            continue  # tests/parallel/test_pipeline.py
        for name, variant in VARIANTS.items():
            if getattr(layout, USELESS.get(name, "size")) == 1:
                continue
            engine = build_engine(
                _gpt(variant.get("tied", False)),
                world,
                None,
                ParallelOptions(layout=str(layout), **variant.get("options", {})),
                example=inputs[:1],
                recompute=variant.get("recompute", "none"),
            )
            shares = _uneven if "shares" in variant else _even
            seen = _step(engine, inputs, targets, shares(layout.data_ranks))
            right = (tied_loss, tied_gradients) if "tied" in variant else (loss, gradients)
            norm = torch.stack([each.norm() for each in right[1].values()]).norm()
            clipped = clip_by_global_norm(engine, float(norm) / 2)
            half = {each: gradient / 2 for each, gradient in right[1].items()}
            told[f"{layout}, {name}"] = {
                "loss": float((seen - right[0]).abs()),
                "norm": float((clipped - norm).abs()),
                # torch divides by norm + 1e-6, which is 3e-7 of what it should be here.
                "clipped gradients": max(0.0, _error(engine, half) - 2e-6),
            }
            outputs = engine.infer(inputs, inputs[:1])
            whole = _gpt(variant.get("tied", False)).to(world.device)
            with torch.no_grad():
                told[f"{layout}, {name}"]["outputs"] = float((outputs - whole(inputs)).abs().max())
    return told


def _gradients(world: tutti.World) -> dict[str, float]:
    """Without clipping in between, at the tolerance that catches everything."""
    inputs, targets = _tokens(world.device)
    _, gradients = _plain(_gpt().to(world.device), inputs, targets)
    told = {}
    for layout in Layout.every(world.size):
        if layout.pp == 1:
            options = ParallelOptions(layout=str(layout))
            engine = build_engine(_gpt(), world, None, options, example=inputs[:1])
            for shares in (_even, _uneven):
                engine.model.zero_grad()
                _step(engine, inputs, targets, shares(layout.data_ranks))
                told[f"{layout}, {shares.__name__}"] = _error(engine, gradients)
    return told


def _compiled(world: tutti.World) -> dict[str, float]:
    """As --compile does it, with a backend that writes no C++, which would take a minute.

    Two sizes of batch, as at the end of an epoch.
    """
    inputs, targets = _tokens(world.device)
    told = {}
    for name, whole in {"dp2": False, "shard2": False, "tp2": False, "tp2, whole": True}.items():
        layout = name.split(",")[0]
        options = ParallelOptions(layout=layout, sequence_parallel=not whole)
        engine = build_engine(_gpt(), world, None, options, example=inputs[:1])
        compile_blocks(engine.model, backend="aot_eager")
        for size in (8, 4):
            x, y = inputs[:size], targets[:size]
            engine.model.zero_grad()
            _step(engine, x, y, [size // engine.grid.layout.data_ranks] * 2)
            told[f"{name}, {size}"] = _error(engine, _plain(_gpt().to(world.device), x, y)[1])
    return told


def _compiled_and_recomputed(world: tutti.World) -> dict[str, Any]:
    """Both at once: that it is right is not enough, as an uncompiled block is right as well."""
    inputs, targets = _tokens(world.device)
    gradients = _plain(_gpt().to(world.device), inputs, targets)[1]
    shares = {"dp2": [4, 4], "tp2": [8, 8]}
    told = {}
    for layout, what in (("dp2", "full"), ("tp2", "full"), ("tp2", "selective")):
        torch.compiler.reset()
        counters.clear()
        with pytest.MonkeyPatch.context() as patch:
            quick = functools.partial(compile_blocks, backend="aot_eager")
            patch.setattr("tutti.parallel.techniques.compile_blocks", quick)
            options = ParallelOptions(layout=layout)
            engine = build_engine(
                *(_gpt(), world, None, options), example=inputs[:1], recompute=what, compile=True
            )
        _step(engine, inputs, targets, shares[layout])
        told[f"{layout}, {what}"] = {
            "error": _error(engine, gradients),
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": len(counters["graph_break"]),
        }
    return told


def _batch_norms(world: tutti.World) -> dict[str, Any]:
    """Sharded, and synchronised over all that have other samples: as one device sees it."""
    told = {}
    torch.manual_seed(0)
    model = WideResNet(WideResNetConfig(depth=10, width=1, classes=4)).double()
    inputs, targets = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.arange(8) % 4
    plain = copy.deepcopy(model)
    for part in (slice(0, 4), slice(4, 8)):  # a microbatch of all ranks is one batch
        (TASK.loss_sum(plain(inputs[part]), targets[part]) / 8).backward()  # type: ignore[no-untyped-call]
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    for layout in ("dp4", "shard4", "dp2.shard2"):
        options = EngineOptions(sync_batchnorm=True)
        engine = build_engine(copy.deepcopy(model), world, options, ParallelOptions(layout=layout))
        mine = [inputs[n : n + 1] for n in (world.rank, 4 + world.rank)]
        labels = [targets[n : n + 1] for n in (world.rank, 4 + world.rank)]
        objective = Objective(
            lambda a, b, engine=engine: TASK.loss_sum(engine(a), b) / 8,  # type: ignore[misc]
            lambda outputs, b: outputs,
        )
        engine.run(list(zip(mine, labels, strict=True)), objective)
        engine.share_buffers()
        buffers = dict(engine.model.named_buffers())
        statistics = [
            float((buffers[name] - right).abs().max())
            for name, right in plain.named_buffers()
            if name.endswith(("mean", "var"))
        ]
        told[layout] = {"gradients": _error(engine, gradients), "statistics": max(statistics)}
    return told


def _recomputed_norms(world: tutti.World) -> dict[str, float]:
    """A block that runs twice counts its batch once: running statistics do not depend on it."""
    torch.manual_seed(0)
    model = WideResNet(WideResNetConfig(depth=10, width=1, classes=4)).double()
    inputs = torch.randn(4, 3, 8, 8, dtype=torch.float64)[world.rank :][:1]
    seen: dict[str, dict[str, torch.Tensor]] = {}
    for what in ("none", "selective", "full"):
        for joint in (False, True):
            engine = build_engine(
                copy.deepcopy(model),
                world,
                EngineOptions(sync_batchnorm=joint),
                recompute=what,  # type: ignore[arg-type]
            )
            engine(inputs).sum().backward()
            seen[f"{what} {joint}"] = dict(engine.model.named_buffers())
    return {
        f"{what} {joint}": max(
            float((value - seen[f"none {joint}"][name]).abs().max())
            for name, value in seen[f"{what} {joint}"].items()
        )
        for what in ("selective", "full")
        for joint in (False, True)
    }


def _answer(world: tutti.World) -> dict[str, Any]:
    return {
        "recomputed norms": _recomputed_norms(world),
        "layouts": _all_layouts(world),
        "gradients": _gradients(world),
        "norms": _batch_norms(world),
    }


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    """What four ranks answer, in one world: each start costs seconds."""
    return in_world(_answer, 4, timeout=240)


@pytest.mark.timeout(300)
def test_every_layout_and_option_gives_the_loss_norm_and_outputs_of_one_device(
    four: list[dict[str, Any]],
) -> None:
    for rank in four:
        assert len(rank["layouts"]) == 45
        wrong = {
            name: seen
            for name, seen in rank["layouts"].items()
            if not all(error < TOLERANCE for error in seen.values())
        }
        assert not wrong


@pytest.mark.timeout(300)
def test_every_gradient_is_that_of_one_device(four: list[dict[str, Any]]) -> None:
    for rank in four:
        assert len(rank["gradients"]) == 12
        assert not {n: error for n, error in rank["gradients"].items() if not error < TOLERANCE}


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


@pytest.mark.timeout(300)
def test_compiled_blocks_give_the_gradients_of_one_device() -> None:
    for rank in in_world(_compiled, 2, timeout=240):
        assert len(rank) == 8
        assert not {n: error for n, error in rank.items() if not error < TOLERANCE}


def test_blocks_are_compiled_where_they_are_recomputed_too() -> None:
    for rank in in_world(_compiled_and_recomputed, 2, timeout=240):
        assert len(rank) == 3
        for name, told in rank.items():
            assert told["error"] < TOLERANCE, name
            assert (told["graphs"], told["breaks"]) == (1, 0), name  # one for all blocks


@pytest.mark.parametrize("what", ["full", "selective"])
def test_one_rank_compiles_the_whole_with_blocks_that_are_recomputed(what: Recompute) -> None:
    """As --compile does it on one rank: the compiler meets torch's checkpoint in its own graph."""
    inputs, targets = _tokens(torch.device("cpu"))
    gradients = _plain(_gpt(), inputs, targets)[1]
    torch.compiler.reset()
    model = _gpt()
    recompute_activations(model, what)
    whole = torch.compile(lambda x, y: TASK.loss_sum(model(x), y), backend="aot_eager")
    (whole(inputs, targets) / targets.numel()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


def test_a_model_of_many_different_blocks_is_compiled_to_its_end() -> None:
    model = EfficientNet(EfficientNetConfig(stem_stride=2)).eval()
    torch.compiler.reset()
    counters.clear()
    compile_blocks(model, backend="eager")
    with torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    assert counters["frames"]["total"] == counters["frames"]["ok"] > 8  # torch's own limit


def _on_a_gpu(world: tutti.World) -> dict[str, float]:
    return _gradients(world)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_every_gradient_is_that_of_one_device_on_a_gpu() -> None:
    for errors in in_world(_on_a_gpu, 4, gpu=True, timeout=240):
        assert len(errors) == 12
        assert not {name: error for name, error in errors.items() if not error < TOLERANCE}
