"""Predicting a dataset: which rank gets which samples, and the lines of the results."""

import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tutti.data import TensorSamples
from tutti.predict.predict_dataset import (
    MAX_BATCHES_PER_ROUND,
    SelectedSamples,
    prediction_lines,
    scatter_rows,
)
from tutti.train.task import IGNORED

SIZES = {"samples": st.integers(1, 300), "batch": st.integers(1, 9), "ranks": st.integers(1, 7)}


@given(**SIZES)
def test_the_rounds_of_all_ranks_in_order_are_the_dataset(
    samples: int, batch: int, ranks: int
) -> None:
    rounds = scatter_rows(samples, batch, ranks)
    rows = [row for ranges in rounds for each in ranges for row in each]
    assert rows == list(range(samples)) and {len(ranges) for ranges in rounds} == {ranks}


@given(**SIZES)
def test_the_batches_do_not_depend_on_the_number_of_ranks(
    samples: int, batch: int, ranks: int
) -> None:
    rounds = scatter_rows(samples, batch, ranks)
    numbers = torch.arange(samples)
    batches = []
    for rank in range(ranks):
        expected = [row for ranges in rounds for row in ranges[rank]]
        indices = torch.tensor(expected, dtype=torch.int64)
        selected = SelectedSamples(TensorSamples(numbers, numbers), indices)
        own = selected.batch(range(len(selected)))[0]
        assert own.tolist() == expected
        batches += [part.tolist() for part in torch.split(own, batch)] if len(own) else []
    assert sorted(batches) == [part.tolist() for part in torch.split(numbers, batch)]


@given(**SIZES)
def test_ranks_differ_by_at_most_one_round_of_batches(samples: int, batch: int, ranks: int) -> None:
    rounds = scatter_rows(samples, batch, ranks)
    totals = [sum(len(ranges[rank]) for ranges in rounds) for rank in range(ranks)]
    assert max(totals) - min(totals) <= len(rounds[0][0]) <= MAX_BATCHES_PER_ROUND * batch
    assert all(len(ranges[0]) == max(map(len, ranges)) for ranges in rounds)
    if samples <= batch * ranks:  # at most one batch per rank: one round
        assert len(rounds) == 1 and len(rounds[0][0]) <= batch


def test_a_line_has_prediction_probability_target_and_loss() -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(6, 10), torch.tensor([0, 1, 2, 3, 4, 5])
    text, sums = prediction_lines(40, outputs, targets)
    lines = [json.loads(line) for line in text]
    assert [line["index"] for line in lines] == list(range(40, 46))
    probabilities = outputs.softmax(-1)
    for row, line, target in zip(probabilities, lines, targets.tolist(), strict=True):
        assert list(line) == ["index", "prediction", "probability", "target", "right", "loss"]
        assert line["prediction"] == int(row.argmax())
        assert line["probability"] == pytest.approx(float(row.max()), rel=1e-5)
        assert line["target"] == target
        assert line["right"] == (line["prediction"] == target)
        assert line["loss"] == pytest.approx(-float(row[target].log()), abs=2e-6)
    assert sums[1:].tolist() == [sum(line["right"] for line in lines), 6]
    total = F.cross_entropy(outputs.double(), targets, reduction="sum").item()
    assert sums[0].item() == pytest.approx(total, rel=1e-6)


def test_text_has_an_entry_per_token_and_padding_does_not_count() -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(2, 4, 5), torch.tensor([[1, 2, IGNORED, 0], [IGNORED] * 4])
    lines, sums = prediction_lines(0, outputs, targets)
    first, second = map(json.loads, lines)
    assert first["prediction"] == outputs[0].argmax(-1).tolist()
    assert first["target"] == [1, 2, None, 0] and len(first["probability"]) == 4
    right = (outputs[0].argmax(-1) == targets[0]).sum().item()
    assert first["right"] == right
    mean = F.cross_entropy(outputs[0], targets[0], ignore_index=IGNORED).item()
    assert first["loss"] == pytest.approx(mean, abs=2e-6)
    assert second["target"] == [None] * 4 and second["loss"] is None and second["right"] == 0
    assert sums[1:].tolist() == [right, 3]


def test_lines_of_a_diverged_model_are_valid_json() -> None:
    outputs = torch.tensor([[torch.nan, 0.0], [torch.inf, 0.0]])
    for line in prediction_lines(0, outputs, torch.tensor([0, IGNORED]))[0]:
        row = json.loads(line)
        assert row["probability"] is None and row["loss"] is None
