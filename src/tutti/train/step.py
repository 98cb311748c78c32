"""One optimizer step (forward, backward, gradient sync, clip, update), and evaluation.

Losses are sums, not means: with a mean over each rank's own samples, the samples of a rank with
fewer samples would get a larger weight. The sum is divided by the number of targets in the whole
step, over all ranks.

A step does not wait for the device: no `.item()`, no branch on a tensor. The loss is returned as a
tensor, and its value is read many steps later.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tutti.comm.collectives import all_reduce
from tutti.data.loader import Batch, Loader
from tutti.data.split import even
from tutti.parallel.engine import Engine
from tutti.parallel.grad_norm import clip_by_global_norm, global_norm
from tutti.parallel.tensor import loss_context
from tutti.train.recipe import Compute
from tutti.train.telemetry import StepTimer
from tutti.world.errors import UsageError

IGNORED = -100  # the target of a token that adds no loss: cross_entropy's default ignore_index
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The autocast dtype of a precision; other precisions compute in the parameters' dtype."""


@dataclass(frozen=True)
class Task:
    """Classification of samples, or of every token of a sample."""

    padded: bool = False
    """Whether targets contain IGNORED."""
    model: str = ""
    """--model, for error messages."""

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of cross entropies in nats, computed in float32 or wider."""
        check_outputs(outputs, targets, self.model)
        logits = outputs.flatten(0, -2)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        # If logits are split along the vocabulary, every tp rank has the same sum.
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the number of correct predictions, as a tensor on the device."""
        return (outputs.argmax(-1) == targets).sum()

    def count(self, targets: Tensor) -> Tensor:
        """Return the number of targets that are not ignored, as a tensor on the device."""
        return (targets != IGNORED).sum()

    def step_count(
        self, targets: Tensor, global_samples: int, group: dist.ProcessGroup | None = None
    ) -> Tensor | int:
        """Return the number of targets in a whole step, over all ranks of the group.

        Without padding the number follows from the number of samples; with padding all ranks sum
        their counts in a collective.
        """
        if not self.padded:
            return global_samples * targets[0].numel() if len(targets) else global_samples
        count = self.count(targets)
        all_reduce(count, group=group)
        return count


def check_outputs(outputs: object, targets: Tensor, model: str) -> None:
    """Raise UsageError unless the outputs are logits for targets that are class indices.

    The shape of the logits must be the shape of the targets, followed by a dim of classes. This
    check reads no tensor values.
    """
    if not isinstance(outputs, Tensor):
        keys = [str(key) for key in outputs] if isinstance(outputs, Mapping) else []
        found = type(outputs).__name__
        if keys:
            found += f" with {', '.join(keys)}"
        elif isinstance(outputs, tuple | list):
            found += f" of {', '.join(type(part).__name__ for part in outputs)}"
        logits = "outputs.logits" if hasattr(outputs, "logits") else "only the logits"
        if "logits" in keys and not hasattr(outputs, "logits"):
            logits = 'outputs["logits"]'
        cure = f"wrap the model in a module whose forward returns {logits}"
    elif targets.dtype not in (torch.int64, torch.uint8):
        raise UsageError(
            f"--dataset: targets have dtype {targets.dtype}; the loss is cross entropy, which "
            "needs class indices: return targets.long(), or train in your own loop "
            "(tutti.parallelize)"
        )
    elif outputs.dim() > 0 and outputs.shape[:-1] == targets.shape:
        return
    else:
        found = f"a tensor of shape {tuple(outputs.shape)}"
        cure = "return one logit per class in the last dim"
        if outputs.dim() > 2 and (outputs.shape[0], *outputs.shape[2:]) == targets.shape:
            cure = "move the classes to the last dim: return outputs.movedim(1, -1)"
    classes = ", ".join([*map(str, targets.shape), "classes"])
    raise UsageError(f"--model {model} returned {found}, expected logits ({classes}): {cure}")


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
        timer: StepTimer | None = None,
    ) -> None:
        """`example` is one real sample, for microbatches in which this rank has no samples."""
        self.engine = engine
        self.optimizer = optimizer
        self.task = task
        self.accumulation = accumulation
        self.example = as_model_dtype(example, engine.model)
        self.clip = clip
        self.device = next(engine.model.parameters()).device
        self.autocast = AUTOCAST.get(compute.precision)
        # Only the range of float16 is too small for gradients; a disabled scaler does nothing.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=compute.precision == "fp16")
        self.timer = timer or StepTimer(self.device, own_time=False)
        self.grad_norm: Tensor | None = None  # of the last step, before clipping; None: unknown
        self._loss_sum: Callable[[Tensor, Tensor], Tensor] = task.loss_sum
        if compute.compile and engine.world.size == 1:
            # With more ranks, parallel/apply.py compiles each block.
            engine.forward = torch.compile(engine.model)
            self._loss_sum = torch.compile(task.loss_sum)

    def __call__(self, batch: Batch, measure_norm: bool = False) -> Tensor:
        """Update the parameters. Return this rank's part of the mean loss, on the device.

        With clipping the gradient norm is always known, otherwise only with `measure_norm`.
        """
        mesh = self.engine.mesh
        group = mesh.data_group if self.task.padded else None
        count = self.task.step_count(batch.targets, batch.global_count, group)
        # At the end of an epoch there may be fewer samples than microbatches. Microbatches that are
        # empty on every rank are omitted. At least one rank has `largest` samples: the mean over
        # ranks, rounded up.
        largest = -(-batch.global_count // mesh.layout.data_ranks)
        # A microbatch's loss is weighted by its size over the global count, not by 1/accumulation.
        sizes = even(batch.count, min(self.accumulation, largest))
        inputs = torch.split(as_model_dtype(batch.inputs, self.engine.model), sizes)
        parts = list(zip(inputs, torch.split(batch.targets, sizes), strict=True))
        # autocast's cache would keep converted weights, with their graph, between microbatches.
        # Backward also runs in this context, but uses the dtypes of forward.
        autocast: AbstractContextManager[None] = nullcontext()
        if self.autocast is not None:
            autocast = torch.autocast(self.device.type, self.autocast, cache_enabled=False)
        with autocast, loss_context(mesh.layout.tp > 1):
            loss = self.engine.run(
                parts,
                lambda outputs, targets: self._loss_sum(outputs, targets) / count,
                example=self.example,
                scale=self.scaler.scale,
                clock=self.timer,
            )
        self.timer.gradients_ready()
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
        return loss


def as_model_dtype(inputs: Tensor, model: nn.Module) -> Tensor:
    """Return inputs in the model's dtype. Datasets have float32; a model may be float64."""
    if not inputs.is_floating_point():
        return inputs
    return inputs.to(next(model.parameters()).dtype)


@dataclass(frozen=True)
class Score:
    """Loss and accuracy of a model on a dataset."""

    loss: float
    accuracy: float
    count: int


@torch.no_grad()
def evaluate(
    engine: Engine, loader: Loader, task: Task, example: Tensor, autocast: torch.dtype | None
) -> Score:
    """Return loss and accuracy of a model over all samples of a loader, over all ranks.

    Sums are in float64 and counts are exact, even if ranks have different numbers of samples.
    """
    model, device = engine.model, engine.world.device
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, count
    for inputs, targets in loader.stream(epochs=1):
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            outputs = engine.infer(as_model_dtype(inputs, model), example)
        if outputs is None or not engine.reports_loss:
            continue
        sums[0] += task.loss_sum(outputs, targets)
        sums[1] += task.correct(outputs, targets)
        sums[2] += task.count(targets)
    for module in was_training:  # not model.train(): the user may have frozen some modules
        module.training = True
    all_reduce(sums)
    loss, correct, count = sums.tolist()
    return Score(loss / count, correct / count, int(count))
