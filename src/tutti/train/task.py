"""The task of a run: its loss and its metric, computed as sums that can be added over all ranks.

If each rank computed the mean over its own samples, a sample on a rank with fewer samples would
have a larger weight. Therefore each rank computes a pair: the sum of losses, and the sum of their
weights. The loss of a step is the sum of losses over all ranks, divided by the sum of weights over
all ranks.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tutti.comm.collectives import all_reduce
from tutti.data.nested import Nested, count_rows, describe
from tutti.train.recipe_check import metric_name
from tutti.world.errors import UsageError

IGNORED = -100  # a target that is ignored in the loss: the default ignore_index of cross_entropy

TaskFunction = Callable[[Any, Any], Any]
"""(outputs, targets) → one value per sample, or a pair (values, weights)."""
Sums = tuple[Tensor, Tensor]
"""The sum of values, and the sum of their weights."""


@dataclass(frozen=True)
class Task:
    """A loss and a metric. The defaults are for classification."""

    padded: bool = False
    """Whether targets contain IGNORED."""
    model: str = ""
    """The value of --model, for error messages."""
    loss: str = "cross_entropy"
    """The value of --loss."""
    metric: str = "accuracy"
    """The value of --metric."""
    shifts_labels: bool = False
    """With --loss model: whether the model compares the output at each position with the label at
    the next position, as causal language models do."""
    own_loss: TaskFunction | None = None
    """The function of --loss module:function."""
    own_metric: TaskFunction | None = None
    """The function of --metric module:function."""

    @property
    def metric_name(self) -> str | None:
        """The metric's name in result files, without the prefix `test_`, or None if none is set."""
        return metric_name(self.metric)

    @property
    def weights_from_loss(self) -> bool:
        """Whether the weights of a batch are known only after the loss has been computed."""
        return self.own_loss is not None or self.loss == "model"

    def model_inputs(self, inputs: Nested, targets: Nested, model: nn.Module) -> Nested:
        """Return the arguments of the model's forward.

        With --loss model, the targets are arguments, too. If the targets are a dict, its keys are
        the argument names. Other targets are passed as `labels`.
        """
        if self.loss != "model":
            return inputs
        names = list(inspect.signature(model.forward).parameters)
        if not isinstance(inputs, dict):
            values = inputs if isinstance(inputs, tuple | list) else (inputs,)
            inputs = dict(zip(names, values, strict=False))
        return {**inputs, **(targets if isinstance(targets, dict) else {"labels": targets})}

    def loss_sums(self, outputs: Any, targets: Nested) -> Sums:
        """Return the sums of losses and weights of a batch, computed in float32 or float64."""
        if self.own_loss is not None:
            losses = self.own_loss(outputs, targets)
            return _sums(losses, count_rows(targets), f"--loss {self.loss}")
        if self.loss == "model":
            return self._model_loss(outputs, targets)
        if self.loss == "cross_entropy":
            return self._cross_entropy(outputs, targets), self.count(targets)
        outputs, targets = self._same_shape(outputs, targets)
        if self.loss == "mse":
            losses = F.mse_loss(outputs, targets, reduction="none")
        else:
            losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        return _sums(losses, len(targets), f"--loss {self.loss}")

    def metric_sums(self, outputs: Any, targets: Nested) -> Sums:
        """Return the sums of the metric's values and of their weights."""
        if self.own_metric is not None:
            values = self.own_metric(outputs, targets)
            return _sums(values, count_rows(targets), f"--metric {self.metric}")
        if self.metric == "accuracy" and self.loss != "bce":
            dim = class_dim(outputs, targets, self.model)
            return (outputs.argmax(dim) == targets).sum(), self.count(targets)
        outputs, targets = self._same_shape(outputs, targets)
        if self.metric == "accuracy":
            values = ((outputs > 0) == (targets > 0.5)).to(outputs.dtype)
        else:
            function = F.mse_loss if self.metric == "mse" else F.l1_loss
            values = function(outputs, targets, reduction="none")
        return _sums(values, len(targets), f"--metric {self.metric}")

    def count(self, targets: Tensor) -> Tensor:
        """Return the number of targets that are not ignored, as a tensor on the device."""
        return (targets != IGNORED).sum()

    def step_count(
        self, targets: Nested, global_samples: int, group: dist.ProcessGroup | None = None
    ) -> Tensor | int:
        """Return the sum of weights of a whole step over all ranks. Called before forward.

        Without padding, the sum is computed from the number of samples. With padding, the ranks add
        their counts in an all_reduce.
        """
        if self.loss != "cross_entropy":
            return global_samples
        if not self.padded:
            return global_samples * targets[0].numel() if len(targets) else global_samples
        count = self.count(targets)
        all_reduce(count, group=group)
        return count

    def _cross_entropy(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the sum of cross entropies in nats."""
        if class_dim(outputs, targets, self.model) != 1 or outputs.dim() == 2:
            outputs, targets = outputs.flatten(0, -2), targets.flatten()
        logits = _wide(outputs)
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        # If the logits are sharded along the vocabulary, every tp rank has the same loss.
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def _model_loss(self, outputs: Any, targets: Nested) -> Sums:
        """Return the sums of losses and weights. The model's loss is assumed to be a mean.

        For token labels, the sum of weights is the number of labels that are not ignored. For other
        labels, it is the number of samples.
        """
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        loss = getattr(outputs, "loss", None) if loss is None else loss
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError(
                f"--model {self.model} returned {describe(outputs)} without a scalar loss, which "
                "--loss model needs. Use --loss cross_entropy or package.module:function."
            )
        weight = torch.tensor(float(count_rows(targets)), dtype=torch.float64, device=loss.device)
        if isinstance(targets, Tensor) and targets.dim() > 1 and not targets.is_floating_point():
            labels = targets[..., 1:] if self.shifts_labels else targets
            weight = self.count(labels).double()
        return _wide(loss).reshape(()) * weight.to(_wide(loss).dtype), weight

    def _same_shape(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and targets with the same shape and dtype.

        If one of them has an additional last dim of size 1, this dim is also added to the other.
        """
        if isinstance(outputs, Tensor) and isinstance(targets, Tensor):
            shape = tuple(outputs.shape)
            if shape == (*targets.shape, 1):  # torch would broadcast (N, 1) and (N) to (N, N)
                targets = targets.unsqueeze(-1)
            elif (*shape, 1) == tuple(targets.shape):
                outputs = outputs.unsqueeze(-1)
            if outputs.shape == targets.shape:
                outputs = _wide(outputs)
                return outputs, targets.to(outputs.dtype)
        own = f"--{'loss' if self.own_loss is None else 'metric'}"
        name = self.loss if self.own_loss is None else self.metric
        raise UsageError(
            f"--model {self.model} returned {describe(outputs)}, but {own} {name} needs the shape "
            f"of the targets, {describe(targets)}: return that shape, or use {own} module:function"
        )


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _sums(result: Any, samples: int, flag: str) -> Sums:
    """Check the result of a loss or metric function, and return the sums of values and weights.

    If the function returns no weights, the value of a sample is the mean over its elements, and its
    weight is 1.
    """
    if isinstance(result, tuple | list) and len(result) == 2:
        values, weights = result
        if isinstance(values, Tensor) and isinstance(weights, Tensor):
            return _wide(values).sum(), weights.detach().sum(dtype=torch.float64)
    if isinstance(result, Tensor) and result.dim() and len(result) == samples:
        values = _wide(result) if result.is_floating_point() else result.float()
        means = values.flatten(1).mean(1) if values.dim() > 1 else values
        count = torch.tensor(float(len(values)), dtype=torch.float64, device=values.device)
        return means.sum(), count
    cure = "return one value per sample (reduction='none'), or a pair of tensors (values, weights)"
    if isinstance(result, Tensor) and result.dim() == 0:
        cure = "the means of several ranks cannot be combined into one mean; " + cure
    raise UsageError(f"{flag} returned {describe(result)} for {samples} samples: {cure}")


def class_dim(outputs: object, targets: Tensor, model: str) -> int:
    """Return the class dim of the outputs. Raise UsageError if they are no logits for the targets.

    The classes are in the last dim, as for tokens, or in dim 1, as for images (N, C, H, W). If the
    shapes allow both, the class dim is the last dim for outputs of up to 3 dims, and dim 1 for
    outputs of more dims. This function reads only shapes and dtypes, no tensor values.
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
        cure = f"wrap the model in a module whose forward returns {logits}, or use --loss "
        cure += "module:function"
    elif not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.uint8):
        found = f"dtype {targets.dtype}" if isinstance(targets, Tensor) else describe(targets)
        raise UsageError(
            f"--dataset: targets have {found}, but --loss cross_entropy needs class indices. "
            "Return targets.long(), or use --loss mse, bce or module:function."
        )
    else:
        last = outputs.dim() > 0 and outputs.shape[:-1] == targets.shape
        first = outputs.dim() > 2 and (outputs.shape[0], *outputs.shape[2:]) == targets.shape
        if first and (outputs.dim() > 3 or not last):
            return 1
        if last:
            return outputs.dim() - 1
        found = f"a tensor of shape {tuple(outputs.shape)}"
        cure = "return one logit per class in the last dim or in dim 1"
    classes = ", ".join([*map(str, targets.shape), "classes"])
    raise UsageError(f"--model {model} returned {found}, expected logits ({classes}): {cure}")
