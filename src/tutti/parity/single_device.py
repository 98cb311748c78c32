"""The reference: a plain training loop in float64 on one device.

Layouts are compared with this loop, so it shares no code with engines or with tutti's own step: the
whole batch at once, the mean over all targets, torch's own clipping and torch's own optimizers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.parallel.layout import Layout
from tutti.parity.tolerances import TOLERANCES
from tutti.parity.workload import Workload

OptimizerName = Literal["sgd", "adamw"]
OPTIMIZERS: tuple[OptimizerName, ...] = ("sgd", "adamw")

MOMENTUM = 0.9
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class Scales:
    """Hyperparameters derived from the size of the gradients, so that each has an effect."""

    clip: float
    """A tenth of the norm of the first gradient, so that every step is clipped."""
    sgd_lr: float
    """Such that a step moves the parameters by a hundredth of their norm."""
    adamw_lr: float
    eps: float
    """AdamW divides by √v + eps. With the usual 1e-8, an element whose gradient is rounding error
    would move by a whole learning rate in a random direction. A fraction of the root mean square of
    all gradients (float64: a hundredth) leaves such an element in place, and hardly changes the
    update of other elements."""


@dataclass(frozen=True)
class StepRecord:
    """The results of one step; tensors by parameter name."""

    loss: float
    gradients: dict[str, Tensor]
    """Before clipping."""
    norm: float
    updates: dict[str, Tensor]
    """Parameters after the step minus the initial parameters."""
    buffers: dict[str, Tensor]
    """After the step, as float64."""


def derive_scales(workload: Workload, device: torch.device) -> Scales:
    """Derive the scales from the first gradient of the full batch."""
    model = workload.make_model().to(device, torch.float64)
    _backward(model, *_step(workload, 0, device), microbatches=None)
    norm, weights = (
        math.sqrt(sum(float(each.square().sum()) for each in tensors))
        for tensors in (
            [p.grad for p in model.parameters() if p.grad is not None],
            [p.detach() for p in model.parameters()],
        )
    )
    clip = 0.1 * norm
    count = sum(p.numel() for p in model.parameters())
    return Scales(
        clip=clip,
        sgd_lr=0.01 * weights / clip,
        adamw_lr=1e-3,
        eps=TOLERANCES[workload.options.precision].eps * clip / math.sqrt(count),
    )


def train_single_device(
    workload: Workload, name: OptimizerName, scales: Scales, layout: Layout, device: torch.device
) -> Iterator[StepRecord]:
    """Train on one device; yields the record of each step.

    The layout only matters for a workload whose result depends on the microbatches.
    """
    model = workload.make_model().to(device, torch.float64).train()
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    start = {n: p.detach().clone() for n, p in parameters.items()}
    optimizer = _optimizer(list(parameters.values()), name, scales)
    for number, samples in enumerate(workload.counts):
        microbatches = None
        if workload.by_microbatch:
            count = workload.microbatches(layout)
            microbatches = global_microbatches(samples, layout.data_ranks, count)
        optimizer.zero_grad()
        loss = _backward(model, *_step(workload, number, device), microbatches)
        gradients = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for n, p in parameters.items()
        }
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), scales.clip)
        optimizer.step()
        updates = {n: p.detach() - start[n] for n, p in parameters.items()}
        yield StepRecord(loss, gradients, float(norm), updates, buffers_of(model))


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all buffers in float64; a shared buffer appears under each of its names."""
    named = model.named_buffers(remove_duplicate=False)
    return {n: b.detach().double().clone() for n, b in named if b.numel() and not b.is_complex()}


def global_microbatches(samples: int, data_ranks: int, microbatches: int) -> list[Tensor]:
    """Return the sample indices of each microbatch over all ranks.

    A synchronised batch norm computes its statistics over these samples.

    Each rank takes consecutive samples; if the division leaves a remainder, the first ranks take
    one more. Each rank divides its samples into microbatches in the same way. Microbatches without
    samples are left out.
    """
    count = min(microbatches, -(-samples // data_ranks))
    ranks = [part.tensor_split(count) for part in torch.arange(samples).tensor_split(data_ranks)]
    return [torch.cat(parts) for parts in zip(*ranks, strict=True)]


def _backward(
    model: nn.Module, inputs: Tensor, targets: Tensor, microbatches: list[Tensor] | None
) -> float:
    """Compute gradients of the mean over all targets that are not padding; returns the mean."""
    count = (targets != -100).sum()
    total = 0.0
    for indices in microbatches or [torch.arange(len(inputs))]:
        outputs = model(inputs[indices])
        loss = F.cross_entropy(outputs.flatten(0, -2), targets[indices].flatten(), reduction="sum")
        (loss / count).backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach() / count)
    return total


def _step(workload: Workload, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
    inputs, targets = (tensor.to(device) for tensor in workload.step(number))
    return inputs.double() if inputs.is_floating_point() else inputs, targets


def _optimizer(
    parameters: list[nn.Parameter], name: OptimizerName, scales: Scales
) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=scales.sgd_lr, momentum=MOMENTUM, foreach=False)
    return torch.optim.AdamW(groups, lr=scales.adamw_lr, betas=BETAS, eps=scales.eps, foreach=False)
