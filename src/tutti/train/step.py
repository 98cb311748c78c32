"""One optimizer step (forward, backward, gradient sync, clip, update), and evaluation.

The loss of a step is the sum of the losses of all samples on all ranks, divided by the sum of their
weights (see task.py).

A step does not wait for the device: it calls no `.item()` and does not branch on tensor values. The
loss is returned as a tensor, and its value is read many steps later.
"""

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tutti.comm.collectives import all_reduce
from tutti.data.loader import Batch, Loader
from tutti.data.nested import Nested, map_tensors, split_rows
from tutti.data.split import even
from tutti.parallel.engine import Engine
from tutti.parallel.grad_norm import clip_by_global_norm, global_norm
from tutti.parallel.tensor import loss_context
from tutti.train.ema import MovingAverage
from tutti.train.memory import MemoryByCause
from tutti.train.recipe import Compute
from tutti.train.task import IGNORED, Task
from tutti.train.telemetry import StepTimer
from tutti.world.errors import UsageError

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The autocast dtype of each precision with autocast. Others compute in the parameters' dtype."""


class Step:
    """The step of a training run: `loss = step(batch)`."""

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        task: Task,
        compute: Compute,
        example: Nested,
        accumulation: int = 1,
        clip: float | None = None,
        timer: StepTimer | None = None,
        memory: MemoryByCause | None = None,
        ema: MovingAverage | None = None,
    ) -> None:
        """`example` is one sample. It is used in microbatches in which this rank has no samples."""
        self.engine = engine
        self.optimizer = optimizer
        self.task = task
        self.accumulation = accumulation
        self.example = as_model_dtype(example, engine.model)
        self.clip = clip
        self.device = next(engine.model.parameters()).device
        self.autocast = AUTOCAST.get(compute.precision)
        # Only float16 needs a loss scaler, because small gradients underflow in its range.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=compute.precision == "fp16")
        self.timer = timer or StepTimer(self.device, own_time=False)
        self.memory = memory
        self.ema = ema
        self.grad_norm: Tensor | None = None  # of the last step, before clipping; None if unknown
        self._loss_sums = task.loss_sums
        if compute.compile and engine.world.size == 1:
            # With more ranks, parallel/apply.py compiles each block.
            engine.forward = torch.compile(engine.model)
            self._loss_sums = torch.compile(task.loss_sums)

    def __call__(self, batch: Batch, measure_norm: bool = False) -> Tensor:
        """Update the parameters. Return this rank's contribution to the mean loss, on the device.

        If gradients are clipped or `measure_norm` is True, `grad_norm` is set, otherwise it is
        None.
        """
        with self.memory.step() if self.memory else nullcontext():
            return self._step(batch, measure_norm)

    def _step(self, batch: Batch, measure_norm: bool) -> Tensor:
        mesh = self.engine.mesh
        group = mesh.data_group if self.task.padded else None
        count = self.task.step_count(batch.targets, batch.global_count, group)
        # At the end of an epoch, there may be fewer samples than microbatches. Then microbatches
        # that are empty on every rank are omitted. `largest` is the mean number of samples per
        # rank, rounded up, so at least one rank has `largest` samples.
        largest = -(-batch.global_count // mesh.layout.data_ranks)
        # Microbatches may have different sizes. Therefore the sum of losses of each microbatch is
        # divided by the count of the whole step, and not by (size of the microbatch ×
        # accumulation).
        sizes = even(batch.count, min(self.accumulation, largest))
        inputs = split_rows(as_model_dtype(batch.inputs, self.engine.model), sizes)
        targets = split_rows(as_loss_dtype(batch.targets, self.engine.model), sizes)
        parts = [
            (self.task.model_inputs(one, labels, self.engine.model), labels)
            for one, labels in zip(inputs, targets, strict=True)
        ]
        weights: list[Tensor] = []

        def loss_of(outputs: Nested, targets: Nested) -> Tensor:
            loss, weight = self._loss_sums(outputs, targets)
            weights.append(weight)
            return loss / count

        # Disable autocast's cache, because it would keep converted weights, and their autograd
        # graph, from one microbatch to the next. The backward pass also runs in this context, but
        # its operations have the dtypes of the forward pass.
        autocast: AbstractContextManager[None] = nullcontext()
        if self.autocast is not None:
            autocast = torch.autocast(self.device.type, self.autocast, cache_enabled=False)
        try:
            with autocast, loss_context(mesh.layout.tp > 1):
                loss = self.engine.run(
                    parts,
                    loss_of,
                    example=self.example,
                    scale=self.scaler.scale,
                    clock=self.timer,
                )
        except IndexError as error:
            # Catch the error here and not in the loss function, because the loss function may be
            # compiled. On a GPU, torch raises a CUDA error instead, which is not handled here.
            if found := re.fullmatch(r"Target (-?\d+) is out of bounds\.", str(error)):
                raise UsageError(
                    f"--dataset: a target is {found[1]}, but the outputs of --model "
                    f"{self.task.model} have fewer classes. Correct the target, or use {IGNORED} "
                    "for targets that the loss should ignore."
                ) from None
            raise
        self.timer.gradients_ready()
        if self.task.weights_from_loss:
            loss = self._divide_by_weights(loss, weights, batch.global_count)
        self.grad_norm = None
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            self.grad_norm = clip_by_global_norm(self.engine, self.clip)
        elif measure_norm:
            self.scaler.unscale_(self.optimizer)
            self.grad_norm = global_norm(self.engine)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update()
        return loss

    def _divide_by_weights(self, loss: Tensor, weights: list[Tensor], samples: int) -> Tensor:
        """Divide the loss and the gradients by the sum of weights over all ranks.

        The weights are known only after the forward pass. Before this call, the loss and the
        gradients are divided by `samples` instead, so multiply by samples / weights.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for weight in weights if self.engine.reports_loss else []:
            total += weight
        if self.engine.world.size > 1:
            all_reduce(total)
        factor = torch.where(total > 0, samples / total, 0.0)
        for parameter in self.engine.trained.values():
            if (gradient := parameter.grad) is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                local.mul_(factor.to(local.dtype))
        return loss * factor.to(loss.dtype)


def as_model_dtype(inputs: Nested, model: nn.Module) -> Nested:
    """Convert floating-point inputs to the model's dtype, which may be float64."""
    return _as_dtype(inputs, next(model.parameters()).dtype)


def as_loss_dtype(targets: Nested, model: nn.Module) -> Nested:
    """Convert floating-point targets to float64 for a float64 model, else to float32."""
    return _as_dtype(targets, torch.promote_types(next(model.parameters()).dtype, torch.float32))


def _as_dtype(value: Nested, dtype: torch.dtype) -> Nested:
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


@dataclass(frozen=True)
class Score:
    """Loss and metric of a model on a dataset."""

    loss: float
    metric: float | None  # None if the task has no metric
    count: int  # with cross entropy, targets that are not ignored; with other losses, samples
    name: str | None = "accuracy"  # name of the metric

    def describe(self) -> str:
        """Return the name and value of the metric as text. An accuracy is shown in percent."""
        if self.metric is None:
            return ""
        value = f"{100 * self.metric:.2f} %" if self.name == "accuracy" else f"{self.metric:.4g}"
        return f"{self.name} {value}"


@torch.no_grad()
def evaluate(
    engine: Engine,
    loader: Loader,
    task: Task,
    example: Nested,
    autocast: torch.dtype | None,
    batches: int | None = None,
) -> Score:
    """Return the loss and the metric over all samples of all ranks' loaders.

    If `batches` is given, use only this number of batches. Sums are computed in float64. The result
    is exact even if ranks have different numbers of samples.
    """
    model, device = engine.model, engine.world.device
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    # The five sums: losses, weights of losses, metric values, weights of metric values, count.
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    for batch in islice(loader.stream(epochs=1), batches):
        targets = as_loss_dtype(batch.targets, model)
        inputs = task.model_inputs(as_model_dtype(batch.inputs, model), targets, model)
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            outputs = engine.infer(inputs, example)
        if outputs is None or not engine.reports_loss:
            continue
        found = [*task.loss_sums(outputs, targets)]
        found += task.metric_sums(outputs, targets) if task.metric_name else [found[1]] * 2
        sums[:4] += torch.stack([value.double() for value in found])
        sums[4] += task.count(targets) if task.loss == "cross_entropy" else batch.count
    for module in was_training:  # not model.train(), which would change modules in eval mode
        module.training = True
    all_reduce(sums)
    loss, loss_weight, metric, metric_weight, count = sums.tolist()
    value = metric / metric_weight if task.metric_name and metric_weight else None
    mean = loss / loss_weight if loss_weight else float("nan")
    return Score(mean, value, int(count), task.metric_name)
