"""Lines of results: what they say is what the outputs say."""

import json

import pytest
import torch
import torch.nn.functional as F

from tutti.predict.rows import Sums, rows
from tutti.train.task import IGNORED


def test_a_line_has_the_prediction_its_probability_and_the_loss_of_the_target() -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(6, 10), torch.tensor([0, 1, 2, 3, 4, 5])
    sums = Sums()
    lines = [json.loads(line) for line in rows(40, outputs, targets, sums)]
    assert [line["index"] for line in lines] == list(range(40, 46))
    probabilities = outputs.softmax(-1)
    for row, line, target in zip(probabilities, lines, targets.tolist(), strict=True):
        assert list(line) == ["index", "prediction", "probability", "target", "right", "loss"]
        assert line["prediction"] == int(row.argmax())
        assert line["probability"] == pytest.approx(float(row.max()), rel=1e-5)
        assert line["target"] == target
        assert line["right"] == (line["prediction"] == target)
        assert line["loss"] == pytest.approx(-float(row[target].log()), abs=2e-6)
    assert sums.count == 6 and sums.right == sum(line["right"] for line in lines)
    total = F.cross_entropy(outputs.double(), targets, reduction="sum").item()
    assert sums.loss == pytest.approx(total, rel=1e-6)


def test_text_has_an_entry_for_each_token_and_ignored_ones_do_not_count() -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(2, 4, 5), torch.tensor([[1, 2, IGNORED, 0], [IGNORED] * 4])
    sums = Sums()
    first, second = (json.loads(line) for line in rows(0, outputs, targets, sums))
    assert first["prediction"] == outputs[0].argmax(-1).tolist()
    assert first["target"] == [1, 2, None, 0] and len(first["probability"]) == 4
    right = (outputs[0].argmax(-1) == targets[0]).sum().item()
    assert first["right"] == right
    mean = F.cross_entropy(outputs[0], targets[0], ignore_index=IGNORED).item()
    assert first["loss"] == pytest.approx(mean, abs=2e-6)
    assert second["target"] == [None] * 4 and second["loss"] is None and second["right"] == 0
    assert sums.count == 3 and sums.right == right


def test_what_a_diverged_model_says_is_still_json() -> None:
    outputs = torch.tensor([[torch.nan, 0.0], [torch.inf, 0.0]])
    for line in rows(0, outputs, torch.tensor([0, IGNORED]), Sums()):
        told = json.loads(line)
        assert told["probability"] is None and told["loss"] is None
