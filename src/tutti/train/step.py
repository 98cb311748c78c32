"""One optimizer step: microbatches forward and backward, one synchronisation, clip, update.

Nothing in here waits for the device: no `.item()`, no branch on a tensor. The loss comes back as a
tensor; whoever wants its value asks for it much later.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from tutti.data.loader import Batch
from tutti.data.split import microbatches
from tutti.parallel.clipping import clip_by_global_norm
from tutti.parallel.engine import Engine, Objective
from tutti.parallel.tensor import loss_context
from tutti.train.arrivals import Arrivals
from tutti.train.recipe import Compute
from tutti.train.task import Task

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Step:
    """The step of a training run: `loss = step(batch)`."""

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        task: Task,
        compute: Compute,
        example: Tensor,
        accumulation: int = 1,
        clip: float | None = None,
        measure: bool = False,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.engine = engine
        self.optimizer = optimizer
        self.task = task
        self.accumulation = accumulation
        # One real sample, for the microbatches in which this rank has none.
        self.example = as_computed(example, engine.model)
        self.clip = clip
        self.device = next(engine.model.parameters()).device
        self.autocast = _AUTOCAST.get(compute.precision)
        # Only float16 has too small a range for gradients; disabled, the scaler does nothing.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=compute.precision == "fp16")
        self._measure = measure
        self._arrivals = arrivals or Arrivals(self.device, known=False)
        self._forward_seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._split_logits = engine.grid.layout.tp > 1
        self.loss_sum: Callable[[Tensor, Tensor], Tensor] = self._loss_sum
        if compute.compile and engine.world.size == 1:
            self.loss_sum = torch.compile(self._loss_sum)  # else block by block: see Techniques

    def __call__(self, batch: Batch) -> Tensor:
        """Update the parameters; returns this rank's part of the mean loss, on the device."""
        group = self.engine.grid.data_group if self.task.padded else None
        count = self.task.step_count(batch.targets, batch.global_count, group)
        # At the ragged end of an epoch there may be fewer samples than microbatches: one that is
        # empty on every rank is left out. Some rank has at least the mean.
        most = -(-batch.global_count // self.engine.grid.layout.data_ranks)
        runs = min(self.accumulation, most)
        sizes = microbatches(batch.count, runs)
        inputs = torch.split(as_computed(batch.inputs, self.engine.model), sizes)
        parts = list(zip(inputs, torch.split(batch.targets, sizes), strict=True))

        forwards = 0

        def of_inputs(x: Tensor, y: Tensor) -> Tensor:
            nonlocal forwards
            with self._forward_clock():
                part = self.loss_sum(x, y) / count
            forwards += 1
            if forwards == runs:  # not where this rank only helps others in a microbatch
                self._arrivals.watch(part)
            return part

        def of_outputs(outputs: Tensor, y: Tensor) -> Tensor:
            return self.task.loss_sum(outputs, y) / count

        objective = Objective(of_inputs, of_outputs, self.scaler.scale, self.example)
        with self._precision(), loss_context(self._split_logits):
            loss = self.engine.run(parts, objective)
        self._arrivals.met()
        self._update()
        return loss

    def take_forward_seconds(self) -> float:
        """Seconds of forward passes since the last call: a rank's own pace, with no waiting.

        The backward pass would not do: it ends when the slowest rank's gradients have come. Asked
        for at a pulse, when the device has been waited for anyway.
        """
        for start, end in self._events:
            end.synchronize()
            self._forward_seconds += start.elapsed_time(end) / 1000
        taken, self._forward_seconds, self._events = self._forward_seconds, 0.0, []
        return taken

    @contextmanager
    def _forward_clock(self) -> Iterator[None]:
        if not self._measure:
            yield
        elif self.device.type == "cuda":
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)  # type: ignore[no-untyped-call]
            start.record()
            yield
            end.record()
            self._events.append((start, end))
        else:
            began = time.perf_counter()
            yield
            self._forward_seconds += time.perf_counter() - began

    def _loss_sum(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.task.loss_sum(self.engine(inputs), targets)

    def _precision(self) -> AbstractContextManager[None]:
        if self.autocast is None:
            return nullcontext()
        # No cache: it would keep casts of the weights, with their history, from one microbatch to
        # the next. Backward runs in here too; it computes in the types that forward chose.
        return torch.autocast(self.device.type, self.autocast, cache_enabled=False)

    def _update(self) -> None:
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            clip_by_global_norm(self.engine, self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def as_computed(inputs: Tensor, model: nn.Module) -> Tensor:
    """Inputs in the model's type: data sets give float32, a float64 model needs float64."""
    if not inputs.is_floating_point():
        return inputs
    return inputs.to(next(model.parameters()).dtype)
