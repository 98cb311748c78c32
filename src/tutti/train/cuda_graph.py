"""Runs steps as replays of a CUDA graph, for small models whose kernel launches take most time.

All values that change from step to step are in tables on the device: sample indices (the data is on
the device), learning rates, losses and gradient norms. The graph reads and writes one row of these
tables, and advances the row number itself. So the host launches one graph per step, and does
nothing else.
"""

import torch
from torch import Tensor

from tutti.data.loader import Batch, BatchIndices, Loader
from tutti.train.loop import Runner
from tutti.train.recipe import Recipe
from tutti.train.step import Step
from tutti.train.training_schedule import TrainingSchedule

# The first steps run eagerly: they create the optimizer state and select cuDNN kernels.
_WARMUP_STEPS = 3
# Number of rows in each table. After this many steps, the host fills the tables again.
_ROWS = 1024


class GraphRunner(Runner):
    """Runs steps by replaying a graph of the whole step. Incomplete batches run eagerly."""

    def __init__(
        self, step: Step, loader: Loader, schedule: TrainingSchedule, recipe: Recipe
    ) -> None:
        super().__init__(step, loader, schedule, recipe)
        device = step.device
        rank_batch = schedule.rank_batch * schedule.accumulation
        self._indices = torch.zeros(_ROWS, rank_batch, dtype=torch.int64, device=device)
        self._rates = torch.zeros(_ROWS, device=device)
        self._losses = torch.zeros(_ROWS, device=device)
        self._norm_table = torch.zeros(_ROWS, device=device)  # filled if gradients are clipped
        self._row = torch.zeros(1, dtype=torch.int64, device=device)
        self._parts = loader.indices()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager_steps = 0
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, steps: int) -> Tensor:
        losses: list[Tensor] = []
        waiting: list[tuple[BatchIndices, float]] = []
        for _ in range(steps):
            part = next(self._parts)
            self.samples += part.global_count
            self._rank_samples += len(part.indices)
            rate = self.schedule.lr_at(self.samples, self.recipe)
            whole = part.global_count == self.schedule.global_batch
            eager = not whole or self._eager_steps < _WARMUP_STEPS
            if waiting and (eager or len(waiting) == _ROWS):
                losses.append(self._replay(waiting))
                waiting = []
            if eager:
                losses.append(self._eager(part, rate))
                self._log(rate)
            else:
                waiting.append((part, rate))
        if waiting:
            losses.append(self._replay(waiting))
        return torch.cat(losses)

    def close(self) -> None:
        self._graph = None

    def _eager(self, part: BatchIndices, rate: float) -> Tensor:
        # Graph capture requires that the steps before it run on a side stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            indices = part.indices.to(self.step.device)
            self._set_rate(torch.tensor(rate, device=self.step.device))
            batch = self._batch(indices, part.global_count, part)
            loss = self.step(batch).reshape(1)
        torch.cuda.current_stream().wait_stream(self._stream)
        self._eager_steps += 1
        return loss

    def _replay(self, steps: list[tuple[BatchIndices, float]]) -> Tensor:
        count, device = len(steps), self.step.device
        self._indices[:count] = torch.stack([part.indices for part, _ in steps]).to(device)
        self._rates[:count] = torch.tensor([rate for _, rate in steps]).to(device)
        self._row.zero_()
        if self._graph is None:
            self._graph = self._capture(steps[0][0])
        for _ in range(count):
            self._graph.replay()
        if self.step.clip is not None:
            norms = self._norm_table[:count].clone()
            self._norms |= dict(enumerate(norms, len(self._lrs)))
        self._lrs += [rate for _, rate in steps]
        return self._losses[:count].clone()

    def _capture(self, example: BatchIndices) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            indices = self._indices.index_select(0, self._row).view(-1)
            self._set_rate(self._rates.index_select(0, self._row).view(()))
            loss = self.step(self._batch(indices, self.schedule.global_batch, example))
            self._losses.index_copy_(0, self._row, loss.view(1))
            if self.step.grad_norm is not None:
                self._norm_table.index_copy_(0, self._row, self.step.grad_norm.float().view(1))
            self._row.add_(1)
        return graph

    def _set_rate(self, rate: Tensor) -> None:
        for group in self.step.optimizer.param_groups:
            group["lr"].copy_(rate)

    def _batch(self, indices: Tensor, count: int, part: BatchIndices) -> Batch:
        inputs, targets = self.loader.samples.prepare(*self.loader.samples.fetch(indices))
        return Batch(inputs, targets, count, part.start, part.after)
