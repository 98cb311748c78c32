"""The teaching layers compute the same as one device: layers on ranks, and split channels.

Tolerance: the same sums in another order, in float64; 1e-12 relative leaves room for that only.
"""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tutti.parallel.teaching import ColumnLinear, LayersOnRanks, RowLinear, own_slice
from worlds import in_world, run_tutti

TOLERANCE = 1e-12


def _error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value - expected).abs().max() / expected.abs().max())


def _layers(world: tutti.World) -> dict[str, Any]:
    torch.manual_seed(0)
    whole = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)
    ).double()
    inputs = torch.randn(5, 6, dtype=torch.float64)
    placed = LayersOnRanks(copy.deepcopy(whole))
    expected = whole(inputs)
    expected.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}

    outputs = placed.forward(inputs, shape=(5, 8))
    placed.backward(outputs.square().sum() if placed.is_last else None)
    errors = {
        name: _error(parameter.grad, gradients[name])  # type: ignore[arg-type]
        for name, parameter in placed.model.named_parameters()
    }
    return {"errors": errors, "outputs": _error(outputs, expected) if placed.is_last else None}


def _channels(world: tutti.World) -> dict[str, float]:
    errors = {}
    for kind in (ColumnLinear, RowLinear):
        for bias in (True, False):
            torch.manual_seed(0)
            whole = nn.Linear(12, 24, bias=bias, dtype=torch.float64)
            x = torch.randn(3, 5, 12, dtype=torch.float64, requires_grad=True)
            inputs = x.detach().clone().requires_grad_()
            weights = torch.randn(3, 5, 24, dtype=torch.float64)
            expected = whole(x)
            (expected * weights).sum().backward()
            split = kind(whole)
            outputs = split(inputs)
            (outputs * weights).sum().backward()
            assert whole.weight.grad is not None and x.grad is not None
            assert split.weight.grad is not None and inputs.grad is not None
            column = kind is ColumnLinear
            found = {
                "outputs": _error(outputs, expected),
                "inputs": _error(inputs.grad, x.grad),
                "weight": _error(
                    split.weight.grad, own_slice(whole.weight.grad, 0 if column else 1)
                ),
            }
            if bias:
                assert split.bias is not None and split.bias.grad is not None
                whole_bias = whole.bias.grad
                assert whole_bias is not None
                found["bias"] = _error(
                    split.bias.grad, own_slice(whole_bias, 0) if column else whole_bias
                )
            errors |= {f"{kind.__name__} {bias} {what}": error for what, error in found.items()}
    return errors


def _refused(world: tutti.World) -> str:
    try:
        ColumnLinear(nn.Linear(4, 10))
    except ValueError as error:
        return str(error)
    return "nothing"


def _answers(world: tutti.World) -> dict[str, Any]:
    return {"layers": _layers(world), "channels": _channels(world), "refused": _refused(world)}


@pytest.fixture(scope="module")
def three() -> list[Any]:
    return in_world(_answers, 3)


def test_layers_on_ranks_compute_the_same_as_one_device(three: list[Any]) -> None:
    layers = [rank["layers"] for rank in three]
    names = [name for rank in layers for name in rank["errors"]]
    assert names == [f"{n}.{what}" for n in (0, 2, 4, 5) for what in ("weight", "bias")]
    assert all(error < TOLERANCE for rank in layers for error in rank["errors"].values())
    assert [rank["outputs"] is None for rank in layers] == [True, True, False]
    assert layers[-1]["outputs"] < TOLERANCE


def test_split_channels_compute_the_same_as_one_device(three: list[Any]) -> None:
    for rank in three:
        assert len(rank["channels"]) == 14
        assert not {what: e for what, e in rank["channels"].items() if not e < TOLERANCE}


def test_channels_that_cannot_be_split_evenly_are_refused(three: list[Any]) -> None:
    for rank in three:
        assert rank["refused"] == (
            "10 channels cannot be split evenly over 3 ranks: use a multiple of 3, such as 12"
        )


def test_the_example_compares_both_with_one_device() -> None:
    example = Path(__file__).parents[2] / "examples" / "naive_model_parallel.py"
    done = run_tutti("run", "-n", "2", "--device", "cpu", example)
    assert done.returncode == 0, done.stderr
    errors = re.findall(
        r"(layers on ranks|channels split): rank 0 holds (\d+) of 16640 parameters, largest "
        r"error (\S+)",
        done.stdout,
    )
    assert [how for how, _, _ in errors] == ["layers on ranks", "channels split"]
    assert [int(held) for _, held, _ in errors] == [8320, 8384]  # row splits have whole biases
    assert all(float(error) < TOLERANCE for _, _, error in errors)
