"""Training schedule: batch sizes, steps and learning rates, and which values are refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.train.recipe import RECIPES, Recipe, with_values
from tutti.train.training_schedule import make_schedule
from tutti.world.errors import UsageError


def recipe(**values: object) -> Recipe:
    flat = with_values(RECIPES["lenet"], {"optimization": {"schedule": "constant", "warmup": 0.0}})
    return with_values(flat, values)


def test_the_global_batch_is_derived_with_a_reason() -> None:
    schedule = make_schedule(
        recipe(batching={"batch": 32, "accumulation": 3}), ranks=4, samples=10_000
    )
    assert schedule.global_batch == 32 * 4 * 3
    assert schedule.reasons["global_batch"] == "batch 32 × 4 ranks × accumulation 3"
    assert schedule.reasons["layout"] == "a replica on 4 ranks"
    alone = make_schedule(recipe(batching={"batch": 32}), ranks=1, samples=10_000)
    assert alone.reasons["layout"] == "a replica on 1 rank"


def test_a_global_batch_sets_the_batch_per_rank() -> None:
    schedule = make_schedule(recipe(batching={"global_batch": 384, "accumulation": 3}), 4, 10_000)
    assert schedule.rank_batch == 32


def test_an_indivisible_global_batch_is_refused_with_the_nearest_valid_ones() -> None:
    with pytest.raises(UsageError, match=r"--global-batch 100 .* 3 ranks .* = 3: use 99 or 102"):
        make_schedule(recipe(batching={"global_batch": 100}), 3, 10_000)


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 4), (True, 3)])
def test_drop_last_skips_the_smaller_last_step(drop_last: bool, steps: int) -> None:
    batching = {"batch": 30, "drop_last": drop_last}
    schedule = make_schedule(recipe(batching=batching, length={"epochs": 2.0}), 1, 100)
    assert schedule.steps_per_epoch == steps and schedule.steps == 2 * steps
    assert schedule.samples == (180 if drop_last else 200)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 8.0), ("sqrt", 8**0.5)])
def test_the_learning_rate_scales_with_the_batch_by_the_stated_rule(
    rule: str, factor: float
) -> None:
    scaled = recipe(
        optimization={"lr": 0.1, "lr_scale": rule, "lr_batch": 64}, batching={"batch": 128}
    )
    assert make_schedule(scaled, 4, 100_000).peak_lr == pytest.approx(0.1 * factor)


@given(ranks=st.integers(1, 8), done=st.floats(0, 1))
def test_the_learning_rate_depends_on_samples_and_not_on_ranks(ranks: int, done: float) -> None:
    same = recipe(
        optimization={"schedule": "cosine", "warmup": 0.1, "lr": 0.5},
        batching={"global_batch": 840},
        length={"epochs": 3.0},
    )
    one, many = make_schedule(same, 1, 84_000), make_schedule(same, ranks, 84_000)
    samples = int(done * one.samples)
    assert many.lr_at(samples, same) == one.lr_at(samples, same)
    assert 0 <= many.lr_at(samples, same) <= 0.5


def test_warm_up_rises_and_cosine_falls_to_the_final_rate() -> None:
    cosine = recipe(
        optimization={"schedule": "cosine", "warmup": 0.1, "lr": 1.0, "final_lr": 0.2},
        batching={"batch": 10},
        length={"epochs": 1.0},
    )
    schedule = make_schedule(cosine, 1, 1000)
    assert schedule.lr_at(50, cosine) == pytest.approx(0.5)
    assert schedule.lr_at(100, cosine) == pytest.approx(1.0)
    half = 0.2 + 0.8 * (1 + math.cos(math.pi / 2)) / 2
    assert schedule.lr_at(550, cosine) == pytest.approx(half)
    assert schedule.lr_at(1000, cosine) == pytest.approx(0.2)


def test_linear_decay() -> None:
    linear = recipe(
        optimization={"schedule": "linear", "lr": 1.0},
        batching={"batch": 10},
        length={"epochs": 1.0},
    )
    assert make_schedule(linear, 1, 1000).lr_at(250, linear) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batching": {"batch": 0}}, "--batch must be at least 1, got 0"),
        ({"batching": {"accumulation": 0}}, "--accumulation .* got 0"),
        ({"batching": {"split": "2,1,1"}}, "3 shares for 2 ranks"),
        ({"batching": {"split": "most"}}, "--split must be even, measured, or shares .* got most"),
        ({"length": {"epochs": 0.0}}, "--epochs must be finite and positive, got 0.0"),
        ({"length": {"steps": 0}}, "--steps .* got 0"),
        ({"batching": {"batch": 600, "drop_last": True}}, "larger than the dataset of 1000"),
        ({"optimization": {"warmup": 1.5}}, "--warmup .* got 1.5"),
        ({"optimization": {"lr_scale": "sqrt"}}, "--lr-scale sqrt needs --lr-batch"),
        ({"optimization": {"lr_scale": "sqrt", "lr_batch": -1}}, "--lr-batch .* got -1"),
        ({"optimization": {"momentum": -1.0}}, "--momentum .* got -1.0"),
        ({"optimization": {"betas": (2.0, 3.0)}}, "--betas"),
        ({"optimization": {"weight_decay": -1.0}}, "--weight-decay .* got -1.0"),
        ({"optimization": {"lr": float("nan")}}, "--lr .* got nan"),
        ({"length": {"epochs": float("inf")}}, "--epochs .* got inf"),
        ({"length": {"checkpoint_every": 0}}, "--checkpoint-every .* got 0"),
    ],
)
def test_invalid_values_are_refused_in_one_line(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_schedule(recipe(**values), 2, 1000)
