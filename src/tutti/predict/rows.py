"""From a model's outputs to lines of JSON, one for each sample, and to their sums.

{"index": 7, "prediction": 3, "probability": 0.998211, "target": 3, "right": true, "loss": 0.001791}

Of text, `prediction`, `probability` and `target` are lists with an entry for each token, `right`
counts, and `loss` is the mean over the tokens that count. What is not known is null.

Probabilities have 6 significant digits, losses 6 decimals: for a loss near 0 float32 has an
absolute precision, not a relative one.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.train.task import IGNORED


@dataclass
class Sums:
    """What a score is made of; in float64, so that adding up in another order changes nothing."""

    loss: float = 0.0
    right: int = 0
    count: int = 0


def rows(first: int, outputs: Tensor, targets: Tensor, sums: Sums) -> list[str]:
    """The lines of a batch whose first sample has the index `first`; adds to the sums."""
    logits = outputs if outputs.dtype == torch.float64 else outputs.float()
    likely = logits.log_softmax(-1)
    best, predictions = likely.max(-1)
    counted = targets != IGNORED
    known = targets.where(counted, 0).unsqueeze(-1)
    losses = -likely.gather(-1, known).squeeze(-1).where(counted, 0)
    right = (predictions == targets) & counted
    sums.loss += losses.sum(dtype=torch.float64).item()
    sums.right += int(right.sum())
    sums.count += int(counted.sum())
    columns = zip(
        predictions.tolist(),
        best.double().exp().tolist(),
        targets.tolist(),
        right.tolist(),
        losses.tolist(),
        strict=True,
    )
    line = _text_row if targets.dim() > 1 else _row
    return [line(index, *column) for index, column in enumerate(columns, start=first)]


def _row(
    index: int, prediction: int, probability: float, target: int, right: bool, loss: float
) -> str:
    known = target != IGNORED
    return _line(
        index,
        str(prediction),
        _digits(probability),
        str(target) if known else "null",
        json.dumps(right) if known else "null",
        _decimals(loss) if known else "null",
    )


def _text_row(
    index: int,
    predictions: list[int],
    probabilities: list[float],
    targets: list[int],
    right: list[bool],
    losses: list[float],
) -> str:
    counted = sum(target != IGNORED for target in targets)
    return _line(
        index,
        _list(map(str, predictions)),
        _list(map(_digits, probabilities)),
        _list("null" if target == IGNORED else str(target) for target in targets),
        str(sum(right)),
        _decimals(math.fsum(losses) / counted) if counted else "null",
    )


def _line(index: int, prediction: str, probability: str, target: str, right: str, loss: str) -> str:
    return (
        f'{{"index": {index}, "prediction": {prediction}, "probability": {probability}, '
        f'"target": {target}, "right": {right}, "loss": {loss}}}\n'
    )


def _list(items: Iterable[str]) -> str:
    return f"[{', '.join(items)}]"


def _digits(value: float) -> str:
    # JSON has no word for NaN: a model that has diverged does not know.
    return f"{value:.6g}" if math.isfinite(value) else "null"


def _decimals(value: float) -> str:
    return f"{value:.6f}" if math.isfinite(value) else "null"
