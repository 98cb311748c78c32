"""Loads a trained run, places its model on ranks, and writes predictions for a dataset.

Rank 0 writes a line for each sample, in the order of the dataset:

    {"index": 7, "prediction": 3, "probability": 0.998211, "target": 3, "right": true, "loss": …}

For text, `prediction`, `probability` and `target` are lists with an entry for each token, `right`
is a count, and `loss` is the mean over the tokens that are not padding. An unknown value is null.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tutti import comm
from tutti.data import Dataset, Samples, evaluation_loader
from tutti.data.dataset import Pair
from tutti.data.nested import map_tensors
from tutti.models.config import GPTConfig, ModelError, split_source
from tutti.models.pretrained import check_source
from tutti.parallel.apply import build_engine
from tutti.parallel.engine import Engine, count_replicas
from tutti.parallel.layout import Layout, ParallelOptions
from tutti.parallel.materialize import Weights, materialize
from tutti.train.checkpoint import Checkpoints, Loaded
from tutti.train.checkpoint.format import Damaged, read_index
from tutti.train.init import agree, build_meta_model, check_same_dataset, load_dataset
from tutti.train.recipe import RECIPES, Compute, Recipe, with_values
from tutti.train.run_directory import (
    check_generates_text,
    checkpoint_step,
    read_trained_run,
    saved_steps,
    step_name,
)
from tutti.train.step import AUTOCAST, Score, as_model_dtype
from tutti.train.task import IGNORED, class_dim
from tutti.world.errors import UsageError
from tutti.world.world import World

Precision = Literal["float32", "bf16", "fp16", "float64"]
MAX_BATCHES_PER_ROUND = 8  # after this many batches of each rank, rank 0 gathers the lines


@dataclass(frozen=True)
class TrainedRun:
    """A trained model: a run directory of `tutti train`, or the folder of --model hf:FOLDER."""

    path: Path
    recipe: Recipe
    step: int | None  # step of the checkpoint; None: the newest complete checkpoint
    has_checkpoint: bool = True  # False: `path` is the folder of --model hf:FOLDER
    # Whether to load the moving average of the weights. None: load it if the checkpoint has one.
    ema: bool | None = None

    @classmethod
    def open(
        cls, path: Path, checkpoint: str, precision: Precision | None, ema: bool | None
    ) -> "TrainedRun":
        """Read the recipe, and check that there is a checkpoint. `checkpoint`: see --checkpoint."""
        recipe = read_trained_run(path, checkpoint)
        if precision is not None:
            recipe = replace(recipe, compute=replace(recipe.compute, precision=precision))
        return cls(path, recipe, checkpoint_step(path, checkpoint), ema=ema)

    @classmethod
    def of_folder(cls, model: str, precision: Precision | None) -> "TrainedRun":
        """Return the model of --model hf:FOLDER, with the weights of the folder."""
        source = split_source(model)
        if source is None or source[0] != "hf":
            raise UsageError(
                f"--model {model} must be hf:FOLDER. For a model of tutti train, use --run."
            )
        try:
            check_source(*source)
        except ModelError as error:
            raise UsageError(str(error)) from None
        compute = Compute(precision=precision or "model")
        recipe = replace(RECIPES["hf"], model=model, compute=compute)
        return cls(Path(source[1]), recipe, None, has_checkpoint=False)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.recipe.compute.precision == "float64" else torch.float32

    def gpt_config(self) -> GPTConfig:
        """Return the configuration of the GPT, with the vocabulary size of the checkpoint."""
        architecture = self.recipe.architecture
        check_generates_text(self.recipe, self.path)
        assert isinstance(architecture, GPTConfig)
        seq_len = max(architecture.max_seq_len, self.recipe.data.seq_len)
        return replace(architecture, vocab_size=self._saved_vocabulary(), max_seq_len=seq_len)

    def load(self, engine: Engine) -> Loaded:
        """Load the checkpoint into this rank's shards. All ranks must call this method."""
        checkpoints = Checkpoints(self.path / "checkpoints")
        return checkpoints.load(
            engine.model, step=self.step, rng=False, aliases=engine.aliases, use_ema=self.ema
        )

    def _saved_vocabulary(self) -> int:
        directory = self.path / "checkpoints"
        steps = saved_steps(directory) if self.step is None else [self.step]
        problem = ""
        for step in reversed(steps):
            try:
                index = read_index(directory / step_name(step))
                return index["tensors"]["model.embed.weight"]["shape"][0]
            except KeyError:
                problem = f"{step_name(step)} has no embed.weight, so it is not a gpt"
            except Damaged as error:
                problem = f"{step_name(step)} is damaged: {error}"
        raise UsageError(f"--run {self.path}: {problem}. Use another --checkpoint.")


def place_model(
    model: nn.Module, weights: Weights, world: World, layout: Layout, example: Tensor, batch: int
) -> Engine:
    """Distribute a model, which is on the meta device, by a layout. All ranks must call this."""
    if layout.only_replicas:
        materialize(model, world.device)
        weights.fill(model)  # needed for buffers that are not in checkpoints
        weights.release()
        return Engine(model, world, f"{count_replicas(world)}, no communication")
    return build_engine(
        model,
        world,
        # An input may have only one token, which sequence parallelism cannot divide. Predictions
        # need full logits, so the loss is not computed in parallel.
        parallel=ParallelOptions(layout=str(layout), sequence_parallel=False, loss_parallel=False),
        example=example,
        # A pipeline is full when it has as many microbatches as stages.
        microbatches=layout.pp,
        microbatch_size=-(-batch // layout.pp),
        weights=weights,
    )


def scatter_rows(samples: int, batch: int, ranks: int) -> list[list[range]]:
    """Return which samples each rank predicts in each round: `result[round][rank]`.

    Batch i is samples i·B to i·B + B − 1 for any number of ranks, so the model computes the same
    batches on one rank and on eight. In a round each rank takes up to MAX_BATCHES_PER_ROUND
    consecutive batches, so the rows of a round are consecutive.

        B = 2, 2 batches per round, 2 ranks      rank 0: 0 1  2 3             8 9
                                                 rank 1:           4 5  6 7        10 11
    """
    # With fewer batches per round, a small dataset is divided evenly over all ranks.
    per_round = min(MAX_BATCHES_PER_ROUND, max(1, -(-samples // (batch * ranks))))
    size = per_round * batch
    parts = [range(start, min(start + size, samples)) for start in range(0, samples, size)]
    parts += [range(samples, samples)] * (-len(parts) % ranks)
    return [parts[first : first + ranks] for first in range(0, len(parts), ranks)]


class SelectedSamples(Samples):
    """A selection of samples, in a given order."""

    def __init__(self, samples: Samples, selected: Tensor) -> None:
        self.samples, self.selected = samples, selected

    def __len__(self) -> int:
        return len(self.selected)

    def fetch(self, indices: Tensor) -> Pair:
        return self.samples.fetch(self.selected[indices])

    def prepare(self, inputs: Tensor, targets: Tensor) -> Pair:
        return self.samples.prepare(inputs, targets)

    def to(self, device: torch.device) -> "SelectedSamples":
        return SelectedSamples(self.samples.to(device), self.selected.to(device))


class Predictor:
    """Predicts a dataset with the model of a run. The arguments are flags of tutti predict."""

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
        changes = {name: value for name, value in changes.items() if value is not None}
        recipe = with_values(run.recipe, {"data": changes})
        if recipe.task.loss != "cross_entropy":
            raise UsageError(
                f"--run: tutti predict needs a run that was trained with --loss cross_entropy, but "
                f"the run has --loss {recipe.task.loss}: use tutti export, and predict in your own "
                "program"
            )

        def prepare() -> tuple[Dataset, nn.Module, Weights]:
            data = load_dataset(recipe)
            if not len(data.test if split == "test" else data.train):
                raise UsageError(f"--split {split}: this part of dataset {data.name} is empty")
            model, weights, _ = build_meta_model(recipe, data, saved_weights=False)
            return data, model, weights

        loaded, model, weights = agree(prepare)
        check_same_dataset(world, loaded, recipe.length.seed)
        self.samples: Samples = loaded.test if split == "test" else loaded.train
        self.count = min(len(self.samples), limit or len(self.samples))
        self.batch = batch or recipe.batching.batch
        example = map_tensors(lambda t: t.to(world.device), loaded.train.batch([0])[0])
        self.engine: Engine = place_model(
            model, weights, world, layout, as_model_dtype(example, model), self.batch
        )
        self.loaded: Loaded = run.load(self.engine)
        self.engine.model.eval()
        self.example = as_model_dtype(example, self.engine.model)

    @torch.no_grad()
    def run(self, out: Path) -> Score:
        """Write a line for every sample to `out`. Return the score, which is equal on all ranks."""
        # In each replica, one rank has the outputs. `writers` lists these ranks in the order of
        # their data ranks.
        mesh, has_outputs = self.engine.mesh, self.engine.reports_loss
        ranks = enumerate(comm.gather_json([mesh.data_rank, has_outputs]))
        writers = sorted((data_rank, rank) for rank, (data_rank, writes) in ranks if writes)
        rounds = scatter_rows(self.count, self.batch, mesh.layout.data_ranks)
        # Sums are in float64, so that the order of addition does not change the float32 score.
        sums = torch.zeros(3, dtype=torch.float64)
        empty = map_tensors(lambda t: t[:0], self.example)
        autocast = AUTOCAST.get(self.trained_run.recipe.compute.precision)
        with ExitStack() as stack:
            write = stack.enter_context(prediction_file(out)) if self.world.is_first else None
            batches = self._batches([ranges[mesh.data_rank] for ranges in rounds], stack)
            for ranges in rounds:
                own_range = ranges[mesh.data_rank]
                lines: list[str] = []
                # Forward may have collectives, so a rank that has no samples left runs forward with
                # an empty batch.
                for first in range(own_range.start, own_range.start + len(ranges[0]), self.batch):
                    inputs, targets = next(batches) if first < own_range.stop else (empty, empty)
                    inputs = as_model_dtype(inputs, self.engine.model)
                    with torch.autocast(self.world.device.type, autocast, enabled=bool(autocast)):
                        outputs = self.engine.infer(inputs, self.example)
                    if outputs is not None and has_outputs:
                        dim = class_dim(outputs, targets, self.trained_run.recipe.model)
                        outputs = outputs.movedim(dim, -1)
                        new_lines, new_sums = prediction_lines(first, outputs, targets)
                        lines += new_lines
                        sums += new_sums
                texts = gather_text("".join(lines))
                if write is not None:
                    for _, writer in writers:
                        write(texts[writer])
        loss, right, count = comm.all_reduce(sums).tolist()
        return Score(loss / max(1, count), right / max(1, count), int(count))

    def _batches(
        self, own_ranges: list[range], stack: ExitStack
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if not any(own_ranges):
            return
        indices = torch.cat([torch.arange(part.start, part.stop) for part in own_ranges])
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


def prediction_lines(first: int, outputs: Tensor, targets: Tensor) -> tuple[list[str], Tensor]:
    """Return the lines of a batch whose first sample has the index `first`, and its sums.

    The three sums are the sum of losses, the number of right predictions, and the number of targets
    that are not padding.
    """
    logits = outputs if outputs.dtype == torch.float64 else outputs.float()
    log_probabilities = logits.log_softmax(-1)
    best, predictions = log_probabilities.max(-1)
    counted = targets != IGNORED
    padded_with_0 = targets.where(counted, 0).unsqueeze(-1)
    losses = -log_probabilities.gather(-1, padded_with_0).squeeze(-1).where(counted, 0)
    right = (predictions == targets) & counted
    columns = (predictions, best.double().exp(), targets, right, losses)
    rows = enumerate(zip(*(column.tolist() for column in columns), strict=True), first)
    lines = [json.dumps({"index": index, **_row(*values)}) + "\n" for index, values in rows]
    sums = [losses.sum(dtype=torch.float64), right.sum(), counted.sum()]
    return lines, torch.tensor([float(value) for value in sums], dtype=torch.float64)


def _row(prediction: Any, probability: Any, target: Any, right: Any, loss: Any) -> dict[str, Any]:
    """Return the row of a sample. For text, the arguments are lists with one value per token."""
    if isinstance(target, list):
        counted = sum(token != IGNORED for token in target)
        return {
            "prediction": prediction,
            "probability": [_rounded(value, ".6g") for value in probability],
            "target": [None if token == IGNORED else token for token in target],
            "right": sum(right),
            "loss": _rounded(math.fsum(loss) / counted, ".6f") if counted else None,
        }
    has_target = target != IGNORED
    return {
        "prediction": prediction,
        "probability": _rounded(probability, ".6g"),
        "target": target if has_target else None,
        "right": right if has_target else None,
        "loss": _rounded(loss, ".6f") if has_target else None,
    }


# Probabilities have 6 significant digits. Losses have 6 decimals, because a float32 loss near 0 has
# an absolute rounding error that does not shrink with the loss.
def _rounded(value: float, digits: str) -> float | None:
    return float(format(value, digits)) if math.isfinite(value) else None  # JSON has no NaN


@contextmanager
def prediction_file(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that appends to a new file, which replaces `path` when it is complete.

    Until then the file's name is `.NAME.PID.partial`. An exception removes this file.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with _file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = partial.open("wb")

    def write(text: bytes) -> None:
        with _file_errors(path):
            file.write(text)

    try:
        yield write
        with _file_errors(path):
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
        file.close()


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"--out {path} cannot be written ({error.strerror}): choose another file"
        ) from None


def gather_text(text: str) -> list[bytes]:
    """Gather every rank's text on rank 0, in rank order. Other ranks get an empty list."""
    content = text.encode()
    lengths: list[int] = comm.gather_json(len(content))
    padded = bytearray(max(1, *lengths))
    padded[: len(content)] = content
    gathered = comm.gather(torch.frombuffer(padded, dtype=torch.uint8))
    if gathered is None:
        return []
    rows = gathered.view(len(lengths), -1).numpy()
    return [bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]
