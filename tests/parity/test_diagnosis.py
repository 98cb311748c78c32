"""The diagnosis of given differences: the facts in its line."""

import math
from dataclasses import replace

import pytest

from tutti.parallel.layout import Layout
from tutti.parity.diagnosis import (
    Difference,
    Scalar,
    Setting,
    StepDifference,
    diagnose,
    merge_ranks,
    worst,
)
from tutti.parity.tolerances import TOLERANCES

ROLES = {
    "embed.weight": "embedding",
    "blocks.0.norm.weight": "norm",
    "blocks.0.attention.wq.weight": "attention.wq",
    "blocks.1.norm.weight": "norm",
    "blocks.1.attention.wq.weight": "attention.wq",
    "head.weight": "head",
}
TOLERANCE = TOLERANCES["float64"]
SAME = Scalar(1e-16, 1.0)
GOOD = [Difference(name, 1e-15) for name in ROLES]
FINE = StepDifference(SAME, GOOD, SAME, GOOD)


def _text(*steps: StepDifference, layout: str = "dp2.tp2", roles: dict[str, str] = ROLES) -> str:
    setting = Setting(Layout.parse(layout), 8, [32, 7, 32], roles)
    text = diagnose(steps, setting, TOLERANCE)
    assert text is not None
    return text


def _scaled(factor: float, *names: str, spread: float = 0.0) -> list[Difference]:
    return [
        Difference(name, abs(factor - 1), factor, 1e-15, spread)
        if name in (names or ROLES)
        else Difference(name, 1e-15)
        for name in ROLES
    ]


def _inconsistent(*names: str, spread: float = 0.0) -> list[Difference]:
    return [
        Difference(name, 0.3, 0.9, 0.25, spread) if name in names else Difference(name, 1e-15)
        for name in ROLES
    ]


def test_no_error_gives_no_diagnosis() -> None:
    setting = Setting(Layout(dp=2), 8, [32], ROLES)
    assert diagnose([FINE], setting, TOLERANCE) is None


@pytest.mark.parametrize(
    ("layout", "factor", "expected"),
    [
        ("dp2", 2.0, "gradients are 2.000 × too large: not divided by dp = 2, or"),
        ("dp2", 0.5, "gradients are 2.000 × too small: divided by dp = 2 once too often"),
        ("shard4", 4.0, "4.000 × too large: not divided by shard = 4"),
        ("dp4", 8.0, "8.000 × too large: not divided by the microbatches = 8"),
        ("dp2", 0.125, "8.000 × too small: divided by the microbatches = 8"),
        ("dp3.shard2", 6.0, "6.000 × too large: not divided by dp × shard = 6"),
        ("dp2.tp2", 2.0, "not divided by dp = 2 or tp = 2"),
        ("dp2", 16.0, "16.000 × too large: not divided by dp × the microbatches = 16"),
        ("dp3.shard2", 48.0, "dp × shard × the microbatches = 48"),
        ("dp3.tp2", 6.0, "not divided by all ranks = 6"),
        ("dp2", 1.7, "1.700 × too large: the factor equals neither the size of an axis"),
        ("dp2", -1.0, "gradients are -1.000 ×"),
    ],
)
def test_a_common_factor_is_named_with_the_axes_of_that_size(
    layout: str, factor: float, expected: str
) -> None:
    assert expected in _text(replace(FINE, gradients=_scaled(factor)), layout=layout)


def test_wrong_norm_gradients_under_tp_are_attributed_to_tp() -> None:
    norms = [name for name, role in ROLES.items() if role == "norm"]
    text = _text(replace(FINE, gradients=_inconsistent(*norms, spread=0.4)))
    assert text.startswith("only norm parameters are wrong, 2 of 2")
    assert "not reduced over tp" in text


def test_ranks_that_disagree_point_to_a_missing_sum() -> None:
    queries = [name for name, role in ROLES.items() if role == "attention.wq"]
    text = _text(replace(FINE, gradients=_inconsistent(*queries, spread=0.4)), layout="shard2")
    assert "only attention.wq parameters are wrong" in text
    assert "ranks disagree: gradients were not summed over shard = 2" in text
    text = _text(replace(FINE, gradients=_inconsistent(*ROLES, spread=0.4)), layout="dp4")
    assert text.startswith("all gradients differ between ranks; the worst is embed.weight")
    assert "not summed over dp = 4" in text


def test_one_parameter_wrong_is_named_with_its_role() -> None:
    assert "only head.weight (head) is wrong, and no single factor" in _text(
        replace(FINE, gradients=_inconsistent("head.weight"))
    )
    assert "only head.weight (head) is wrong, 2.000 × too large: not divided by dp = 2" in _text(
        replace(FINE, gradients=_scaled(2.0, "head.weight"))
    )


def test_a_common_factor_of_some_gradients_is_named() -> None:
    names = ("embed.weight", "head.weight")
    text = _text(replace(FINE, gradients=_scaled(0.5, *names)), layout="pp2")
    assert text.startswith("2 of 6 gradients differ by a common factor; they are 2.000 × too small")
    assert "pp = 2" in text


def test_a_wrong_tied_embedding_is_named() -> None:
    roles = ROLES | {"embed.weight": "tied embedding"}
    half = replace(FINE, gradients=_scaled(0.5, "embed.weight"))
    assert "the tied embedding, is wrong (2.000 × too small)" in _text(half, roles=roles)
    lost = replace(FINE, gradients=_inconsistent("embed.weight"))
    assert "half of its gradient is missing" in _text(lost, roles=roles)


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (31 / 32, "1 of the step's 32 samples is missing"),
        (30 / 32, "2 of the step's 32 samples are missing"),
        (33 / 32, "1 of the step's 32 samples is counted twice"),
        (0.5, "no single factor explains the errors, and the loss differs"),
    ],
)
def test_missing_samples_are_counted_from_the_loss(factor: float, expected: str) -> None:
    loss = Scalar(abs(factor - 1), factor)
    assert expected in _text(StepDifference(loss, _inconsistent(*ROLES), SAME, GOOD))


def test_only_the_first_wrong_value_is_named() -> None:
    loss = replace(FINE, loss=Scalar(1.0, 2.0), updates=_inconsistent(*ROLES))
    assert "the loss is 2.000 × too large, but all gradients agree: the factor is" in _text(loss)
    norm = replace(FINE, norm=Scalar(0.29, 2**-0.5), updates=_inconsistent(*ROLES))
    assert "1.414 × too small, the root of dp = 2 or tp = 2: a part" in _text(norm)
    update = replace(FINE, updates=_inconsistent("head.weight"))
    assert "the update of 1 of 6 parameters differs; the worst is head.weight (head)" in _text(
        update
    )


def test_an_error_of_a_later_step_names_the_step() -> None:
    text = _text(FINE, replace(FINE, gradients=_scaled(2.0)))
    assert text.startswith(
        "only from step 2 on, whose 7 samples are not divisible by 2 data ranks × 8 microbatches: "
    )
    assert _text(FINE, FINE, replace(FINE, gradients=_scaled(2.0))).startswith(
        "only from step 3 on: "
    )


def test_values_that_are_not_finite_are_wrong() -> None:
    nothing = [Difference("head.weight", math.inf), *GOOD[:-1]]
    assert "missing or not finite, for example the gradient of head.weight" in _text(
        replace(FINE, gradients=nothing)
    )
    broken = [Difference("head.weight", math.nan, math.nan, math.nan), *GOOD[:-1]]
    assert "not finite" in _text(replace(FINE, gradients=broken))
    assert worst(broken).name == "head.weight"
    assert Scalar.between(math.nan, 1.0).error == math.inf
    assert Scalar.between(1.0, 0.0).error == math.inf
    assert Scalar.between(0.0, 0.0).error == 0.0


def test_ranks_are_merged_into_the_worst_difference_with_the_spread() -> None:
    left = [Difference("a", 0.1, 0.9), Difference("b", 0.0)]
    right = [Difference("a", 0.4, 1.4), Difference("c", 0.2)]
    a, b, c = merge_ranks([left, right])
    assert (a.name, a.error, a.factor, a.spread) == ("a", 0.4, 1.4, pytest.approx(0.5))
    assert (b.spread, c.error) == (0.0, 0.2)
