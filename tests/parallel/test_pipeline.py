"""A pipeline computes what one device does: loss and every gradient, under every schedule.

Tolerance: sums in another order differ by a few units of 2⁻⁵³; 1e-10 relative leaves room for the
depth of the model and catches any sample, microbatch or copy that is counted twice or not at all.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tutti
from tutti.models.config import GPTConfig
from tutti.models.gpt import GPT
from tutti.parallel.engine import Objective, Pair
from tutti.parallel.layout import Layout
from tutti.parallel.options import ParallelOptions
from tutti.parallel.pipeline.build import build_pipeline
from tutti.parallel.pipeline.engine import Pipeline
from worlds import in_world

TOLERANCE = 1e-10
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")


def _gpt(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=32, max_seq_len=8, layers=6, dim=16, heads=2, tied=tied)
    return GPT(config).double()


def _sequential() -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(7) for layer in (nn.Linear(12, 12), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), *hidden, nn.Linear(12, 5)).double()


def _batch(kind: str, samples: int) -> Pair:
    generator = torch.Generator().manual_seed(samples)
    if kind == "sequential":
        inputs = torch.randn(samples, 6, dtype=torch.float64, generator=generator)
        return inputs, torch.randint(5, (samples,), generator=generator)
    tokens = torch.randint(32, (samples, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def _objective(count: int, example: torch.Tensor) -> Objective:
    def of_outputs(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = outputs.flatten(0, -2)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum") / count

    def of_inputs(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a pipeline has no forward of its own")

    # A factor that must show in gradients and not in the loss.
    return Objective(of_inputs, of_outputs, lambda part: part * 8, example)


def _plain(model: nn.Module, batch: Pair) -> tuple[float, dict[str, torch.Tensor]]:
    """One device, the whole batch at once: the loss and every gradient, times 8."""
    inputs, targets = batch
    outputs = model(inputs).flatten(0, -2)
    loss = F.cross_entropy(outputs, targets.flatten(), reduction="mean")
    (loss * 8).backward()
    named = model.named_parameters(remove_duplicate=False)
    gradients = {name: each.grad.clone() for name, each in named}  # type: ignore[union-attr]
    model.zero_grad()
    return loss.item(), gradients


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value - expected).abs().max() / expected.abs().max())


def _compare(
    engine: Pipeline, whole: nn.Module, kind: str, data_rank: int, data_ranks: int
) -> dict[str, Any]:
    """Steps of full and of ragged batches; the largest errors, and what the ranks have said."""
    seen: dict[str, Any] = {"loss": [], "worst": 0.0, "names": []}
    size, most = engine.microbatch_size, engine.microbatches
    # Full, a few samples short, so few that microbatches are missing, and full again.
    for samples in (size * most * data_ranks, size * most * data_ranks - 3, data_ranks, 12):
        batch = _batch(kind, samples)
        loss, gradients = _plain(whole, batch)
        share = samples // data_ranks + (data_rank < samples % data_ranks)
        before = sum(samples // data_ranks + (r < samples % data_ranks) for r in range(data_rank))
        mine = [each[before : before + share] for each in batch]
        microbatches = list(zip(*[each.split(size) for each in mine], strict=True))
        count = batch[1].numel()
        engine.model.zero_grad()
        part = engine.run(microbatches, _objective(count, batch[0][:1]))
        seen["loss"].append([part.item(), loss])
        for name, parameter in engine.model.named_parameters():
            assert parameter.grad is not None, name
            error = _error(_full(parameter.grad), gradients[name])
            seen["worst"] = max(seen["worst"], error)
    seen["names"] = [name for name, _ in engine.model.named_parameters()]
    seen["aliases"] = engine.aliases
    seen["described"] = engine.description
    inputs = _batch(kind, 5)[0]
    outputs = engine.infer(inputs)
    seen["outputs"] = None if outputs is None else _error(outputs, whole(inputs))
    seen["nothing"] = engine.infer(inputs[:0], inputs[:1]) is None
    return seen


def _all_schedules(world: tutti.World, kind: str) -> dict[str, Any]:
    grid = Layout(pp=world.size).grid(world)
    results = {}
    for schedule in SCHEDULES:
        whole = _sequential() if kind == "sequential" else _gpt(kind == "tied")
        engine = build_pipeline(
            copy.deepcopy(whole),
            grid,
            ParallelOptions(pipeline_schedule=schedule),  # type: ignore[arg-type]
            _batch(kind, 2)[0],
            microbatches=4,
            microbatch_size=3,
        )
        results[schedule] = _compare(engine, whole, kind, 0, 1)
    return results


@pytest.mark.parametrize(("ranks", "kind"), [(2, "sequential"), (2, "tied"), (4, "untied")])
def test_a_pipeline_computes_what_one_device_does(ranks: int, kind: str) -> None:
    told = in_world(_all_schedules, ranks, kind)
    whole = _sequential() if kind == "sequential" else _gpt(kind == "tied")
    for schedule in SCHEDULES:
        of = [rank[schedule] for rank in told]
        for step in range(4):
            losses = [rank["loss"][step] for rank in of]
            assert sum(part for part, _ in losses) == pytest.approx(losses[0][1], rel=TOLERANCE)
            assert sum(part != 0 for part, _ in losses) == 1, schedule  # one rank speaks
        for rank in of:
            assert rank["worst"] < TOLERANCE, schedule
            assert rank["described"] == of[0]["described"]
            assert rank["nothing"]
        assert sum(rank["outputs"] is not None for rank in of) == 1
        assert all((rank["outputs"] or 0) < TOLERANCE for rank in of)
        # Every parameter is on one rank, under its name in the whole model; a tied one on two.
        names = [name for rank in of for name in rank["names"] if name not in rank["aliases"]]
        assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
        aliases = [rank["aliases"] for rank in of if rank["aliases"]]
        assert aliases == ([{"head.weight": "embed.weight"}] if kind == "tied" else [])
