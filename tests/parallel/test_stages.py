"""How a model is cut into stages: layers, costs, balance, and which stages a rank holds."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tutti.models.config import GPTConfig, LeNetConfig
from tutti.models.gpt import GPT
from tutti.models.lenet import LeNet
from tutti.parallel.layout import (
    ParallelOptions,
    ScheduleName,
    check_microbatches,
    check_stages,
)
from tutti.parallel.pipeline.block_units import find_units
from tutti.parallel.pipeline.schedules import rank_of, stages_of
from tutti.parallel.pipeline.stages import (
    counted_flops,
    cut_by_cost,
    cut_evenly,
    keep_layers,
    layer_names,
    layer_units,
    layer_view,
    plan_stages,
)
from tutti.parallel.pipeline.tied_weights import find_ties, untie
from tutti.world.errors import UsageError

CONFIG = GPTConfig(vocab_size=32, max_seq_len=8, layers=3, dim=16, heads=2)


def _gpt(tied: bool = False) -> GPT:
    torch.manual_seed(0)
    return GPT(
        GPTConfig(vocab_size=32, max_seq_len=8, layers=3, dim=16, heads=2, tied=tied)
    ).double()


def test_the_layers_of_a_gpt_are_embedding_blocks_norm_and_head() -> None:
    names = ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    assert layer_names(_gpt()) == names
    assert layer_units(_gpt()) == [[name] for name in names]


def test_layers_without_parameters_stay_with_the_one_before_them() -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 2), nn.Softmax(-1)
    )
    assert layer_names(model) == ["0", "1", "2", "3", "4", "5"]
    assert layer_units(model) == [["0", "1", "2", "3"], ["4", "5"]]


@pytest.mark.parametrize("take", [keep_layers, layer_view])
def test_consecutive_stages_compute_the_outputs_of_the_model(take: object) -> None:
    tokens = torch.randint(32, (2, 8))
    expected = _gpt()(tokens)
    x = tokens
    for names in (["embed", "blocks.0"], ["blocks.1"], ["blocks.2", "norm", "head"]):
        x = take(_gpt(), names)(x)  # type: ignore[operator]
    assert torch.equal(x, expected)


def test_a_stage_names_its_parameters_as_the_whole_model_does() -> None:
    whole = dict(_gpt().named_parameters())
    stage = keep_layers(_gpt(), ["blocks.1", "norm"])
    names = [name for name, _ in stage.named_parameters()]
    assert names and set(names) < set(whole)
    assert all(name.startswith(("blocks.1.", "norm.")) for name in names)
    second = keep_layers(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["1"])
    assert [name for name, _ in second.named_parameters()] == ["1.weight", "1.bias"]


def test_a_view_shares_layers_and_nothing_else() -> None:
    model = _gpt()
    view = layer_view(model, ["blocks.1"])
    assert view.get_submodule("blocks.1") is model.get_submodule("blocks.1")
    view.register_forward_hook(lambda *_: None)
    assert not model._forward_hooks
    assert layer_names(model) == ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    assert layer_names(view) == ["blocks.1"]


class _Loose(nn.Module):
    cuttable = True

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))
        self.layer = nn.Linear(2, 2)


def test_a_model_that_cannot_be_cut_is_refused_with_the_cure() -> None:
    with pytest.raises(UsageError, match=r"LeNet cannot be cut .* no repeated blocks"):
        find_units(LeNet(LeNetConfig()).to("meta"), torch.zeros(1, 1, 28, 28))
    with pytest.raises(UsageError, match="parameter gain belongs to no layer"):
        layer_names(_Loose())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 5))
def test_no_cut_has_a_cheaper_most_expensive_stage(costs: list[int], stages: int) -> None:
    if stages > len(costs):
        return

    def largest(ends: Sequence[int]) -> int:
        starts = [0, *ends]
        return max(sum(costs[a:b]) for a, b in zip(starts, [*ends, len(costs)], strict=True))

    best = min(map(largest, itertools.combinations(range(1, len(costs)), stages - 1)))
    parts = cut_by_cost(costs, stages)
    assert len(parts) == stages and all(len(part) for part in parts)
    assert [layer for part in parts for layer in part] == list(range(len(costs)))
    assert max(sum(costs[layer] for layer in part) for part in parts) == best


def test_among_equally_good_cuts_the_most_even_one_is_taken() -> None:
    # The first layer is the largest stage in any cut; the other layers are cut evenly.
    assert [len(part) for part in cut_by_cost([9, 1, 1, 1, 1], 3)] == [1, 2, 2]


@given(st.integers(1, 40), st.integers(1, 12))
def test_even_cuts_differ_by_one_layer_at_most(count: int, stages: int) -> None:
    if stages > count:
        return
    sizes = [len(part) for part in cut_evenly(count, stages)]
    assert sum(sizes) == count and len(sizes) == stages
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


def test_counted_costs_are_the_flops_of_a_training_step() -> None:
    batch, length, dim = 2, 8, CONFIG.dim
    tokens = batch * length
    costs = counted_flops(
        _gpt(), layer_units(_gpt()), torch.zeros(batch, length, dtype=torch.int64)
    )
    embed, *blocks, norm, head = costs
    assert embed == norm == 0  # no matrix products
    assert head == 3 * 2 * tokens * dim * CONFIG.vocab_size
    projections = 4 * dim * dim + 3 * dim * CONFIG.hidden
    attention = 2 * length * dim
    assert blocks == [3 * 2 * tokens * (projections + attention)] * 3
    # The FLOPs of the whole model, as counted by its config.
    assert sum(costs) == CONFIG.flops_per_token(length) * tokens


def test_a_plan_has_every_layer_once_and_balances_by_cost() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 64))
    example = torch.zeros(1, 4)
    by_cost = plan_stages(model, 2, ParallelOptions(), example)
    assert by_cost == [["0", "1", "2"], ["3"]]
    evenly = plan_stages(model, 2, ParallelOptions(balance="even"), example)
    assert evenly == [["0", "1"], ["2", "3"]]


def test_more_stages_than_layers_are_refused_with_the_equation_and_a_cure() -> None:
    with pytest.raises(UsageError) as error:
        check_stages(6, 8, 2)
    for fact in ("pp8 with 2 stages per rank", "8 × 2 = 16 layers", "has 6", "use pp3 or pp6"):
        assert fact in str(error.value)
    with pytest.raises(UsageError, match="pp8 needs 8 layers, but the model has 6: use pp6"):
        check_stages(6, 8, 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
def test_every_stage_is_on_one_rank(name: ScheduleName) -> None:
    per_rank = ParallelOptions(pipeline_schedule=name).virtual_stages
    held = [stages_of(name, rank, 4, per_rank) for rank in range(4)]
    assert sorted(stage for stages in held for stage in stages) == list(range(4 * per_rank))
    for rank, stages in enumerate(held):
        assert [rank_of(name, stage, 4) for stage in stages] == [rank] * per_rank
    if name == "zbv":
        assert held == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_too_few_microbatches_are_refused_with_the_nearest_number() -> None:
    with pytest.raises(UsageError, match=r"--accumulation 2 .* pp4.* --accumulation 4$"):
        check_microbatches("1f1b", 4, 2)
    with pytest.raises(UsageError, match=r"5 // 2 = 2 rounds.*: use --accumulation 6$"):
        check_microbatches("interleaved", 2, 5)
    check_microbatches("gpipe", 2, 5)
    check_microbatches("zero-bubble", 4, 10)  # two rounds of five


def test_tied_parameters_are_found_across_stages_and_copied_on_one_rank() -> None:
    model = _gpt(tied=True)
    stages = [["embed", "blocks.0"], ["blocks.1"], ["blocks.2", "norm", "head"]]
    (tie,) = find_ties(model, stages)
    assert tie == {0: ["embed.weight"], 2: ["head.weight"]}
    assert find_ties(model, [layer_names(model)]) == []  # one stage
    assert find_ties(_gpt(), stages) == []
    assert model.embed is not None and model.head is not None
    untie(model, [tie], held=[0])
    assert model.head.weight is model.embed.weight  # the layer goes to another rank anyway
    untie(model, [tie], held=[0, 2])
    assert model.head.weight is not model.embed.weight
    assert torch.equal(model.head.weight, model.embed.weight)
