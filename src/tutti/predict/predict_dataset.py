"""Predict a dataset on all ranks: every sample once, in order, written by rank 0.

The file has a line for each sample:

    {"index": 7, "prediction": 3, "probability": 0.998211, "target": 3, "right": true, "loss": …}

For text, `prediction`, `probability` and `target` are lists with an entry for each token, `right`
is a count, and `loss` is the mean over the tokens that are not padding. An unknown value is null.
Probabilities have 6 significant digits. Losses have 6 decimals, because the rounding error of a
float32 loss near 0 is absolute, not relative.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from tutti.predict.trained_run import TrainedRun, place_model
from tutti.train.checkpoint import Loaded
from tutti.train.evaluate import Score
from tutti.train.init import agree, build_meta_model, load_dataset
from tutti.train.recipe import with_values
from tutti.train.step import IGNORED, as_model_dtype
from tutti.world.errors import UsageError
from tutti.world.world import World

# Batches that a rank predicts between two exchanges. The limit bounds the text in memory; several
# batches per exchange make waiting rare.
MAX_BATCHES_PER_ROUND = 8


def scatter_rows(samples: int, batch: int, ranks: int) -> list[list[range]]:
    """Return which samples each rank predicts in each round: `result[round][rank]`.

    Batch i is samples i·B to i·B + B − 1 for any number of ranks, so the model computes the same
    batches on one rank and on eight. In a round each rank takes up to MAX_BATCHES_PER_ROUND
    consecutive batches; the rows of a round are consecutive, and can be written in order.

        B = 2, 2 batches per round, 2 ranks      rank 0: 0 1  2 3             8 9
                                                 rank 1:           4 5  6 7        10 11
    """
    # A small dataset is divided evenly over all ranks; otherwise only the first ranks would get
    # samples.
    per_round = min(MAX_BATCHES_PER_ROUND, max(1, -(-samples // (batch * ranks))))
    size = per_round * batch
    parts = [range(start, min(start + size, samples)) for start in range(0, samples, size)]
    parts += [range(samples, samples)] * (-len(parts) % ranks)
    return [parts[first : first + ranks] for first in range(0, len(parts), ranks)]


class SelectedSamples(Samples):
    """Some of the samples, in a given order."""

    def __init__(self, samples: Samples, selected: Tensor) -> None:
        self.samples, self.selected = samples, selected

    def __len__(self) -> int:
        return len(self.selected)

    def fetch(self, indices: Tensor) -> Pair:
        return self.samples.fetch(self.selected[indices])

    def prepare(self, inputs: Tensor, targets: Tensor) -> Pair:
        return self.samples.prepare(inputs, targets)

    def on(self, device: torch.device) -> "SelectedSamples":
        return SelectedSamples(self.samples.on(device), self.selected.to(device))


class Predictor:
    """Predicts a dataset with the model of a run.

    dataset, data_dir: replace those of the run. limit: predict only the first N samples. batch:
    samples per batch on each rank; None: as in training.
    """

    def __init__(
        self,
        world: World,
        run: TrainedRun,
        layout: Layout,
        *,
        split: str = "test",
        dataset: str | None = None,
        data_dir: Path | None = None,
        limit: int | None = None,
        batch: int | None = None,
    ) -> None:
        self.world, self.trained_run = world, run
        changes = {"dataset": dataset, "data_dir": data_dir}
        changed = {name: value for name, value in changes.items() if value is not None}
        recipe = with_values(run.recipe, {"data": changed})

        def prepare() -> tuple[Dataset, nn.Module, Weights]:
            found = load_dataset(recipe)
            model, weights, _ = build_meta_model(recipe, found)
            return found, model.to(run.dtype), weights

        found, model, weights = agree(prepare)
        self.samples: Samples = found.test if split == "test" else found.train
        self.count = min(len(self.samples), limit or len(self.samples))
        self.batch = batch or recipe.batching.batch
        example = found.train.batch([0])[0].to(world.device)
        self.engine: Engine = place_model(
            model, weights, world, layout, as_model_dtype(example, model), self.batch
        )
        self.loaded: Loaded = run.load(self.engine)
        self.engine.model.eval()
        self.example = as_model_dtype(example, self.engine.model)

    @torch.no_grad()
    def run(self, out: Path) -> Score:
        """Write a line for every sample to `out`; returns the score, the same on every rank."""
        # One rank of each data rank has the outputs. `writers` are these ranks, by data rank.
        mesh = self.engine.mesh
        places = comm.gather_json([mesh.data_rank, self.engine.reports_loss])
        writers = sorted((part, rank) for rank, (part, has_it) in enumerate(places) if has_it)
        rounds = scatter_rows(self.count, self.batch, mesh.layout.data_ranks)
        sums = Sums()
        with ExitStack() as stack:
            write = stack.enter_context(prediction_file(out)) if self.world.is_first else None
            batches = self._batches([each[mesh.data_rank] for each in rounds], stack)
            for ranges in rounds:
                own = ranges[mesh.data_rank]
                lines: list[str] = []
                # Forward may be collective, so a rank without samples left runs an empty batch.
                for first in range(own.start, own.start + len(ranges[0]), self.batch):
                    empty = self.example[:0]
                    inputs, targets = next(batches) if first < own.stop else (empty, empty)
                    outputs = self._infer(inputs)
                    if outputs is not None and self.engine.reports_loss:
                        lines += prediction_lines(first, outputs, targets, sums)
                texts = gather_text("".join(lines))
                if write is not None:
                    for _, writer in writers:
                        write(texts[writer])
        total = torch.tensor([sums.loss, sums.right, sums.count], dtype=torch.float64)
        loss, right, count = comm.all_reduce(total).tolist()
        return Score(loss / max(1, count), right / max(1, count), int(count))

    def _batches(self, own: list[range], stack: ExitStack) -> Iterator[tuple[Tensor, Tensor]]:
        if not any(own):
            return
        indices = torch.cat([torch.arange(each.start, each.stop) for each in own])
        data = self.trained_run.recipe.data
        loader = evaluation_loader(
            SelectedSamples(self.samples, indices),
            self.batch,
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
    """Sums in float64, so that the order of addition does not change a score in float32."""

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


@contextmanager
def prediction_file(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that appends to a new file, which replaces `path` when it is complete.

    Until then the file's name is `.NAME.PID.partial`. An exception removes the file; only a process
    that is killed leaves it behind.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with _errors_of(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = partial.open("wb")

    def write(text: bytes) -> None:
        with _errors_of(path):
            file.write(text)

    try:
        yield write
        with _errors_of(path):
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
        file.close()


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--out {path}: {reason}: choose another file") from None


def gather_text(text: str) -> list[bytes]:
    """Gather every rank's text on rank 0, in rank order; the other ranks get an empty list."""
    content = text.encode()
    lengths: list[int] = comm.gather_json(len(content))
    padded = bytearray(max(1, *lengths))
    padded[: len(content)] = content
    gathered = comm.gather(torch.frombuffer(padded, dtype=torch.uint8))
    if gathered is None:
        return []
    rows = gathered.view(len(lengths), -1).numpy()
    return [bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]
