"""Predict a data set on all ranks: every sample once, in order, written by rank 0.

A line for each sample:

    {"index": 7, "prediction": 3, "probability": 0.998211, "target": 3, "right": true, "loss": …}

For text, `prediction`, `probability` and `target` are lists with an entry for each token, `right`
is a count, and `loss` is the mean over the tokens that are not padding. An unknown value is null.
Probabilities have 6 significant digits, losses 6 decimals: a float32 loss near 0 has an absolute
precision, not a relative one.
"""

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tutti import comm
from tutti.data import Dataset, Samples, evaluation_loader
from tutti.data.dataset import Pair
from tutti.parallel.engine import Engine
from tutti.parallel.layout import Layout
from tutti.parallel.materialize import Weights
from tutti.predict.prediction_file import PredictionFile, gather_text
from tutti.predict.trained_run import TrainedRun, place_model
from tutti.train.checkpoint import Loaded
from tutti.train.evaluate import Score
from tutti.train.init import agree, build_meta_model, load_dataset
from tutti.train.step import IGNORED, as_model_dtype
from tutti.world.world import World

# Batches of a rank between two exchanges: bounds the text in memory and makes waiting rare.
MAX_BATCHES_PER_ROUND = 8


class RowScatter:
    """Which samples each rank predicts: batches of consecutive samples, scattered in rounds.

    Batch i is samples i·B to i·B + B − 1 for any number of ranks, so the model computes the same
    batches on one rank and on eight. In a round each rank takes `per_round` consecutive batches;
    the rows of all ranks in a round are consecutive, and can be written in order.

        B = 2, per_round = 2, 2 ranks      rank 0: 0 1  2 3             8 9
                                           rank 1:           4 5  6 7        10 11
    """

    def __init__(self, samples: int, batch: int, ranks: int) -> None:
        self.samples, self.batch, self.ranks = samples, batch, ranks
        batches = -(-samples // batch)
        # A small data set is divided evenly rather than given to the first ranks.
        self.per_round = min(MAX_BATCHES_PER_ROUND, max(1, -(-batches // ranks)))
        self.rounds = -(-batches // (self.per_round * ranks))

    def first(self, number: int, rank: int) -> int:
        """Return the first sample of a rank in a round."""
        return min(self.samples, (number * self.ranks + rank) * self.per_round * self.batch)

    def count(self, number: int, rank: int) -> int:
        """Return the samples of a rank in a round: fewer, or none, in the last one."""
        first = self.first(number, rank)
        return min(self.samples, first + self.per_round * self.batch) - first

    def total(self, rank: int) -> int:
        """Return the samples of a rank in all rounds."""
        return sum(self.count(number, rank) for number in range(self.rounds))


class ScatteredSamples(Samples):
    """The samples of one rank, in the order of its rounds."""

    def __init__(self, samples: Samples, scatter: RowScatter, rank: int) -> None:
        self.samples, self.scatter, self.rank = samples, scatter, rank

    def __len__(self) -> int:
        return self.scatter.total(self.rank)

    def fetch(self, indices: Tensor) -> Pair:
        size = self.scatter.per_round * self.scatter.batch
        number = torch.div(indices, size, rounding_mode="floor")
        return self.samples.fetch(indices + (number * (self.scatter.ranks - 1) + self.rank) * size)

    def prepare(self, inputs: Tensor, targets: Tensor) -> Pair:
        return self.samples.prepare(inputs, targets)

    def on(self, device: torch.device) -> "ScatteredSamples":
        """Return the same samples, with the whole data set on the device."""
        return ScatteredSamples(self.samples.on(device), self.scatter, self.rank)


@dataclass(frozen=True)
class SampleSelection:
    """Which samples to predict."""

    split: str = "test"
    dataset: str | None = None
    data_dir: Path | None = None
    limit: int | None = None
    """Only the first N samples."""
    batch: int | None = None
    """Samples per batch on each rank; None: as in training."""


class Predictor:
    """Predicts a data set with the model of a run."""

    def __init__(
        self, world: World, run: TrainedRun, layout: Layout, selection: SampleSelection
    ) -> None:
        self.world, self.trained_run, self.selection = world, run, selection
        dataset, model, weights = agree(self._prepare)
        self.samples: Samples = dataset.test if selection.split == "test" else dataset.train
        self.count = min(len(self.samples), selection.limit or len(self.samples))
        batch = selection.batch or run.recipe.batching.batch
        example = dataset.train.batch([0])[0].to(world.device)
        self.engine: Engine = place_model(
            model, weights, world, layout, as_model_dtype(example, model), batch
        )
        self.loaded: Loaded = run.load(self.engine)
        self.engine.model.eval()
        self.example = as_model_dtype(example, self.engine.model)
        self.scatter = RowScatter(self.count, batch, layout.data_ranks)

    def _prepare(self) -> tuple[Dataset, nn.Module, Weights]:
        recipe, selection = self.trained_run.recipe, self.selection
        data = recipe.data
        if selection.dataset is not None:
            data = replace(data, dataset=selection.dataset)
        if selection.data_dir is not None:
            data = replace(data, data_dir=selection.data_dir)
        recipe = replace(recipe, data=data)
        dataset = load_dataset(recipe)
        model, weights, _ = build_meta_model(recipe, dataset)
        return dataset, model.to(self.trained_run.dtype), weights

    @torch.no_grad()
    def run(self, out: Path) -> Score:
        """Write a line for every sample to `out`; returns the score, the same on every rank."""
        # One rank of each data rank has the outputs; these ranks in the order of their samples.
        places = comm.gather_json([self.engine.mesh.data_rank, self.engine.reports_loss])
        writers = sorted((part, rank) for rank, (part, has_it) in enumerate(places) if has_it)
        rank, sums = self.engine.mesh.data_rank, Sums()
        with ExitStack() as stack:
            file = stack.enter_context(PredictionFile(out)) if self.world.is_first else None
            batches = self._batches(stack)
            for number in range(self.scatter.rounds):
                index = self.scatter.first(number, rank)
                end = index + self.scatter.count(number, rank)
                lines: list[str] = []
                for _ in range(self.scatter.per_round):
                    # Other ranks may need this rank in their forward pass: it runs an empty batch.
                    empty = self.example[:0]
                    inputs, targets = next(batches) if index < end else (empty, empty)
                    outputs = self._infer(inputs)
                    if outputs is not None and self.engine.reports_loss:
                        lines += prediction_lines(index, outputs, targets, sums)
                    index += len(inputs)
                texts = gather_text("".join(lines))
                if file is not None:
                    for _, writer in writers:
                        file.write(texts[writer])
        total = torch.tensor([sums.loss, sums.right, sums.count], dtype=torch.float64)
        loss, right, count = comm.all_reduce(total).tolist()
        return Score(loss / max(1, count), right / max(1, count), int(count))

    def _batches(self, stack: ExitStack) -> Iterator[tuple[Tensor, Tensor]]:
        rank = self.engine.mesh.data_rank
        if not self.scatter.total(rank):
            return
        data = self.trained_run.recipe.data
        loader = evaluation_loader(
            ScatteredSamples(self.samples, self.scatter, rank),
            self.scatter.batch,
            device=self.world.device,
            data_on_device=data.data_on_device,
            workers=data.workers,
        )
        stack.callback(loader.close)
        for batch in loader.stream(epochs=1):
            yield batch.inputs, batch.targets

    def _infer(self, inputs: Tensor) -> Tensor | None:
        autocast = self.trained_run.autocast
        with torch.autocast(self.world.device.type, autocast, enabled=autocast is not None):
            outputs: Tensor | None = self.engine.infer(
                as_model_dtype(inputs, self.engine.model), self.example
            )
        return outputs


@dataclass
class Sums:
    """Sums of a score, in float64: the order of addition does not matter at float32 precision."""

    loss: float = 0.0
    right: int = 0
    count: int = 0


def prediction_lines(first: int, outputs: Tensor, targets: Tensor, sums: Sums) -> list[str]:
    """Return the lines of a batch whose first sample has the index `first`; adds to the sums."""
    logits = outputs if outputs.dtype == torch.float64 else outputs.float()
    log_probabilities = logits.log_softmax(-1)
    best, predictions = log_probabilities.max(-1)
    counted = targets != IGNORED
    known = targets.where(counted, 0).unsqueeze(-1)
    losses = -log_probabilities.gather(-1, known).squeeze(-1).where(counted, 0)
    right = (predictions == targets) & counted
    sums.loss += losses.sum(dtype=torch.float64).item()
    sums.right += int(right.sum())
    sums.count += int(counted.sum())
    columns = (predictions, best.double().exp(), targets, right, losses)
    lines = []
    for index, values in enumerate(zip(*(each.tolist() for each in columns), strict=True), first):
        row = _text_row(*values) if targets.dim() > 1 else _sample_row(*values)
        lines.append(json.dumps({"index": index, **row}) + "\n")
    return lines


def _sample_row(
    prediction: int, probability: float, target: int, right: bool, loss: float
) -> dict[str, Any]:
    known = target != IGNORED
    return {
        "prediction": prediction,
        "probability": _rounded(probability, ".6g"),
        "target": target if known else None,
        "right": right if known else None,
        "loss": _rounded(loss, ".6f") if known else None,
    }


def _text_row(
    predictions: list[int],
    probabilities: list[float],
    targets: list[int],
    right: list[bool],
    losses: list[float],
) -> dict[str, Any]:
    counted = sum(target != IGNORED for target in targets)
    return {
        "prediction": predictions,
        "probability": [_rounded(each, ".6g") for each in probabilities],
        "target": [None if target == IGNORED else target for target in targets],
        "right": sum(right),
        "loss": _rounded(math.fsum(losses) / counted, ".6f") if counted else None,
    }


def _rounded(value: float, digits: str) -> float | None:
    return float(format(value, digits)) if math.isfinite(value) else None  # JSON has no NaN
