"""Predict a data set on all ranks: in order, every sample once, written by rank 0 as it comes."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.data import Dataset, Samples, evaluation_loader
from tutti.parallel.engine import Engine
from tutti.parallel.layout import Layout
from tutti.predict.deal import Deal, DealtSamples
from tutti.predict.placing import place
from tutti.predict.result_file import ResultFile, gather_text
from tutti.predict.rows import Sums, rows
from tutti.predict.saved_run import SavedRun
from tutti.train.checkpoint import Loaded
from tutti.train.datasets import load_dataset
from tutti.train.evaluate import Score
from tutti.train.models import build_model
from tutti.train.step import as_computed
from tutti.train.together import together
from tutti.world.exchange import gather_json
from tutti.world.world import World


@dataclass(frozen=True)
class Subject:
    """Which samples to predict."""

    split: str = "test"
    dataset: str | None = None
    data_dir: Path | None = None
    limit: int | None = None
    """Only the first so many."""
    batch: int | None = None
    """Samples at a time on each rank; None: as in training."""


class Predictor:
    """A run's model over a data set, from `run(out)` to its score."""

    def __init__(self, world: World, run: SavedRun, layout: Layout, subject: Subject) -> None:
        self.world, self.saved, self.subject = world, run, subject
        dataset, model = together(self._prepare)
        self.samples: Samples = dataset.test if subject.split == "test" else dataset.train
        self.count = min(len(self.samples), subject.limit or len(self.samples))
        batch = subject.batch or run.recipe.batching.batch
        example = dataset.train.batch([0])[0].to(world.device)
        self.engine: Engine = place(model, world, layout, as_computed(example, model), batch)
        self.loaded: Loaded = run.load(self.engine)
        self.engine.model.eval()
        self.example = as_computed(example, self.engine.model)
        self.deal = Deal(self.count, batch, layout.data_ranks)

    def _prepare(self) -> tuple[Dataset, torch.nn.Module]:
        recipe, subject = self.saved.recipe, self.subject
        data = recipe.data
        if subject.dataset is not None:
            data = replace(data, dataset=subject.dataset)
        if subject.data_dir is not None:
            data = replace(data, data_dir=subject.data_dir)
        recipe = replace(recipe, data=data)
        dataset = load_dataset(recipe)
        return dataset, build_model(recipe, dataset).to(self.world.device, self.saved.dtype)

    @torch.no_grad()
    def run(self, out: Path) -> Score:
        """Write a line for every sample to `out`; the score is the same on every rank."""
        # Ranks in the order of their samples; of those with the same ones, one has the results.
        places = gather_json([self.engine.grid.data_rank, self.engine.speaks])
        writers = sorted((part, rank) for rank, (part, speaks) in enumerate(places) if speaks)
        rank, sums = self.engine.grid.data_rank, Sums()
        with ExitStack() as stack:
            file = stack.enter_context(ResultFile(out)) if self.world.is_first else None
            batches = self._batches(stack)
            for turn in range(self.deal.turns):
                first, last = self.deal.first(turn, rank), self.deal.count(turn, rank)
                last += first
                lines: list[str] = []
                for _ in range(self.deal.run):
                    inputs, targets = next(batches) if first < last else self._nothing
                    outputs = self._infer(inputs)
                    if outputs is not None and self.engine.speaks:
                        lines += rows(first, outputs, targets, sums)
                    first += len(inputs)
                texts = gather_text("".join(lines))
                if file is not None and texts is not None:
                    for _, writer in writers:
                        file.write(texts[writer])
        total = torch.tensor([sums.loss, sums.right, sums.count], dtype=torch.float64)
        dist.all_reduce(total)
        loss, right, count = total.tolist()
        return Score(loss / max(1, count), right / max(1, count), int(count))

    @property
    def _nothing(self) -> tuple[Tensor, Tensor]:
        return self.example[:0], self.example[:0]

    def _batches(self, stack: ExitStack) -> Iterator[tuple[Tensor, Tensor]]:
        rank = self.engine.grid.data_rank
        if not self.deal.total(rank):
            return
        data = self.saved.recipe.data
        loader = evaluation_loader(
            DealtSamples(self.samples, self.deal, rank),
            self.deal.batch,
            device=self.world.device,
            data_on_device=data.data_on_device,
            workers=data.workers,
        )
        stack.callback(loader.close)
        for batch in loader.stream(epochs=1):
            yield batch.inputs, batch.targets

    def _infer(self, inputs: Tensor) -> Tensor | None:
        narrow = self.saved.autocast
        with torch.autocast(self.world.device.type, narrow, enabled=narrow is not None):
            outputs: Tensor | None = self.engine.infer(
                as_computed(inputs, self.engine.model), self.example
            )
        return outputs
