"""Dropout in layouts: which ranks must draw the same masks, and which different ones.

A mask is what a dropout makes of ones. Masks of 256 elements are equal by chance with probability
2⁻²⁵⁶, so equal means: the same numbers were drawn.
"""

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import tutti
from tutti.parallel import Layout, build_engine
from tutti.parallel.engine import Engine
from tutti.parallel.layout import ParallelOptions, Recompute
from tutti.parallel.tensor import loss_context
from tutti.train.checkpoint.training_state import rng_state, set_rng_state
from tutti.train.task import Task
from worlds import in_world

TASK = Task()
WORDS, LENGTH, WIDTH = 16, 8, 32
Masks = dict[str, list[str]]
SEEN: Masks = {}


def _note(where: str, mask: torch.Tensor) -> None:
    if not torch.is_grad_enabled():
        return  # the run in which a pipeline finds its shapes
    mask = mask.to_local() if isinstance(mask, DTensor) else mask
    SEEN.setdefault(where, []).append("".join("01"[int(bit)] for bit in mask.flatten()[:256] > 0))


class Drop(nn.Dropout):
    """nn.Dropout that records its masks."""

    def __init__(self, where: str) -> None:
        super().__init__(0.5)
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = super().forward(torch.ones_like(x))
        _note(self.where, mask)
        return x * mask


class Inner(nn.Module):
    """Like attention: dropout on the whole input, on a rank's part, and on the residual stream."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.before = Drop(f"{where} before")
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.inside = Drop(f"{where} inside")
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.after = Drop(f"{where} after")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inside(torch.tanh(self.up(self.before(x))))
        mask = F.dropout(torch.ones_like(y), 0.5)  # as attention draws its own, without a module
        _note(f"{self.where} functional", mask)
        return self.after(self.down(y * mask))


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Inner(f"{number}")
        self.drop = Drop(f"{number} stream")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [("embed", nn.Embedding(WORDS, WIDTH)), ("first", Block(0)), ("second", Block(1))]
    return nn.Sequential(
        OrderedDict([*layers, ("head", nn.Linear(WIDTH, WORDS, bias=False))])
    ).double()


def _engine(world: tutti.World, layout: str, recompute: Recompute, **options: Any) -> Engine:
    engine = build_engine(
        _model(),
        world,
        parallel=ParallelOptions(layout=layout, **options),
        example=torch.zeros(1, LENGTH, dtype=torch.int64, device=world.device),
        microbatches=2,
        microbatch_size=2,
        recompute=recompute,
    )
    engine.seed_rng(7)
    return engine


def _step(engine: Engine) -> Masks:
    """Run one step of two microbatches; returns the masks that this rank drew."""
    SEEN.clear()
    tokens = torch.arange(4 * LENGTH, device=engine.world.device).view(4, LENGTH) % WORDS
    with loss_context(engine.mesh.layout.tp > 1):
        parts = [(tokens[:2], tokens[:2]), (tokens[2:], tokens[2:])]
        engine.run(parts, lambda outputs, targets: TASK.loss_sums(outputs, targets)[0])
    return {where: list(masks) for where, masks in SEEN.items()}


def _gradients(engine: Engine) -> dict[str, float]:
    """A hash of the whole gradient of every parameter; ranks must agree on shared parameters."""
    found = {}
    for name, parameter in engine.model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[name] = float(
            (whole.cpu() * torch.arange(whole.numel()).view(whole.shape).cos()).sum()
        )
    return found


def _masks_and_gradients(world: tutti.World, layouts: list[Any]) -> list[Any]:
    results = []
    for layout, sequence_parallel in layouts:
        options = {"sequence_parallel": sequence_parallel, "balance": "even"}
        engine = _engine(world, layout, "none", **options)
        masks = _step(engine)
        gradients = _gradients(engine)
        saved = rng_state()
        more = _step(engine)
        set_rng_state(saved)
        resumed = _step(engine)
        again = _step(_engine(world, layout, "none", **options))
        twice = _engine(world, layout, "full", **options)
        recomputed = _step(twice)
        results.append(
            {
                "masks": masks,
                "reproducible": masks == again,
                "resumed": more == resumed and more != masks,
                "recomputed": _first_runs(recomputed, masks),
                "recomputed gradients": _close(gradients, _gradients(twice)),
                "gradients": gradients,
            }
        )
    return results


def _first_runs(recomputed: Masks, masks: Masks) -> bool:
    """With recomputation every mask is drawn twice, with the same values."""
    return all(
        set(recomputed[where]) == set(masks[where]) and len(recomputed[where]) > len(masks[where])
        for where in masks
        if "stream" not in where  # the last dropout of a block is not recomputed
    )


def _close(a: dict[str, float], b: dict[str, float]) -> bool:
    return all(abs(a[name] - b[name]) <= 1e-9 * max(1.0, abs(a[name])) for name in a)


TWO = [("tp2", True), ("tp2", False), ("dp2", True), ("pp2", True)]
FOUR = [("dp2.tp2", False), ("shard2.tp2", True), ("tp2.pp2", False)]


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, bool], list[Any]]:
    found = {}
    for ranks, layouts in ((2, TWO), (4, FOUR)):
        per_rank = in_world(_masks_and_gradients, ranks, layouts, timeout=110)
        for number, key in enumerate(layouts):
            found[key] = [rank[number] for rank in per_rank]
    return found


def _pairs(layout: str, axis: str) -> list[tuple[int, int]]:
    """Pairs of ranks that differ on one axis only."""
    axes = Layout.parse(layout).axes
    step = {"tp": 1, "shard": axes["tp"], "dp": axes["tp"] * axes["shard"]}
    step["pp"] = step["dp"] * axes["dp"]
    ranks = range(Layout.parse(layout).size)
    return [(r, r + step[axis]) for r in ranks if r // step[axis] % axes[axis] == 0]


@pytest.mark.parametrize("layout", [*TWO, *FOUR])
def test_masks_differ_between_calls_and_are_equal_for_equal_seeds(
    results: dict[tuple[str, bool], list[Any]], layout: tuple[str, bool]
) -> None:
    for rank in results[layout]:
        drawn = [mask for masks in rank["masks"].values() for mask in masks]
        assert len(drawn) >= 2 * 5 and len(set(drawn)) == len(drawn)
        assert rank["reproducible"]
        assert rank["resumed"]  # from the saved state of the generators only


@pytest.mark.parametrize("layout", [*TWO, *FOUR])
def test_recomputation_draws_the_same_masks(
    results: dict[tuple[str, bool], list[Any]], layout: tuple[str, bool]
) -> None:
    for rank in results[layout]:
        assert rank["recomputed"] and rank["recomputed gradients"]


@pytest.mark.parametrize("layout", [key for key in [*TWO, *FOUR] if "tp2" in key[0]])
def test_tp_ranks_draw_equal_masks_for_whole_tensors_and_different_ones_for_parts(
    results: dict[tuple[str, bool], list[Any]], layout: tuple[str, bool]
) -> None:
    for a, b in _pairs(layout[0], "tp"):
        _shared_where_they_must(results[layout][a], results[layout][b], splits_sequence=layout[1])


@pytest.mark.gpu
def test_masks_on_a_gpu() -> None:
    layouts = [("tp2", True), ("tp2", False)]
    first, second = in_world(_masks_and_gradients, 2, layouts, gpu=True, timeout=240)
    for one, other, (_, splits_sequence) in zip(first, second, layouts, strict=True):
        _shared_where_they_must(one, other, splits_sequence)
        assert one["reproducible"] and one["resumed"] and one["recomputed gradients"]


def _shared_where_they_must(one: Any, other: Any, splits_sequence: bool) -> None:
    """Masks and gradients of two tp ranks."""
    assert one["masks"].keys() == other["masks"].keys()
    for where in one["masks"]:
        part = where.split()[1]
        split = part in ("inside", "functional") or (splits_sequence and part != "before")
        for first_mask, second_mask in zip(one["masks"][where], other["masks"][where], strict=True):
            assert (first_mask != second_mask) == split, where
    # Parameters that both ranks hold must have equal gradients, so their masks must be equal.
    for name, gradient in one["gradients"].items():
        assert gradient == pytest.approx(other["gradients"][name], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("layout", "axis"),
    [
        (("dp2", True), "dp"),
        (("dp2.tp2", False), "dp"),
        (("shard2.tp2", True), "shard"),
        (("pp2", True), "pp"),
        (("tp2.pp2", False), "pp"),
    ],
)
def test_data_ranks_and_stages_draw_different_masks(
    results: dict[tuple[str, bool], list[Any]], layout: tuple[str, bool], axis: str
) -> None:
    for a, b in _pairs(layout[0], axis):
        one, other = (
            {mask for masks in results[layout][rank]["masks"].values() for mask in masks}
            for rank in (a, b)
        )
        assert not one & other


class Gated(nn.Module):
    """Two column layers, then a row layer, each with a LoRA adapter that has dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


class GatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def _adapter_masks(world: tutti.World, sequence_parallel: bool) -> tuple[Masks, dict[str, float]]:
    """Run a step of a model with adapters. Return the masks and the gradients of this rank."""
    from tutti.models.lora_layers import LoraOptions, adapted_layers, adapter_layer, add_adapters

    torch.manual_seed(0)
    layers = [("embed", nn.Embedding(WORDS, WIDTH)), ("first", GatedBlock())]
    layers += [("second", GatedBlock()), ("head", nn.Linear(WIDTH, WORDS, bias=False))]
    model = nn.Sequential(OrderedDict(layers)).double()
    add_adapters(model, LoraOptions.parse("rank=4,dropout=0.5,targets=all-linear"))
    for name, layer in adapted_layers(model):
        layer.lora_dropout["default"] = Drop(f"{name} adapter")  # type: ignore[index, operator]
        nn.init.normal_(adapter_layer(layer, "lora_B").weight)
    options = ParallelOptions(layout="tp2", sequence_parallel=sequence_parallel)
    engine = build_engine(model, world, parallel=options, recompute="full")
    engine.seed_rng(7)
    masks = _step(engine)
    gradients = {name: p for name, p in engine.model.named_parameters() if p.grad is not None}
    return masks, {name: float(_whole_gradient(p).abs().sum()) for name, p in gradients.items()}


def _whole_gradient(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_adapters_of_column_layers_share_masks_and_those_of_row_layers_do_not(
    sequence_parallel: bool,
) -> None:
    (masks, gradients), (other_masks, other_gradients) = in_world(
        _adapter_masks, 2, sequence_parallel
    )
    assert masks.keys() == other_masks.keys() and len(masks) == 6  # three layers of two blocks
    for where, drawn in masks.items():
        is_row = where.split()[0].endswith("down")
        assert (set(drawn) == set(other_masks[where])) is not is_row, where
        # Two microbatches, each recomputed once with the same mask.
        assert len(set(drawn)) == 2, where
    assert gradients == pytest.approx(other_gradients, rel=1e-12)
    assert all(("lora_A" in name) or ("lora_B" in name) for name in gradients)
