"""One device: a plain loop in float64 that knows nothing of engines, ranks or tutti's own step.

It is what layouts are held to, so it shares no code with them: the whole batch at once, the mean
over all its targets, torch's own clipping, torch's own optimizer.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.parallel.layout import Layout
from tutti.parity.case import Case
from tutti.parity.tolerance import TOLERANCES

OptimizerName = Literal["sgd", "adamw"]
OPTIMIZERS: tuple[OptimizerName, ...] = ("sgd", "adamw")

MOMENTUM = 0.9
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class Scales:
    """Numbers that fit the size of the model's gradients, so that nothing compared is idle."""

    clip: float
    """A tenth of the first gradient's norm: clipping acts in every step."""
    sgd_lr: float
    """Such that a step moves the parameters by a hundredth of their norm."""
    adamw_lr: float
    eps: float
    """AdamW divides by √v + eps. At the usual 1e-8, an element whose gradient is rounding error
    would still move by a whole learning rate, in whatever direction the error has. A part of the
    root mean square of all gradients (float64: a hundredth) leaves such an element where it is,
    and nearly all others their division by √v."""


@dataclass(frozen=True)
class StepRecord:
    """What one step came to. Tensors by the parameter's name."""

    loss: float
    gradients: dict[str, Tensor]
    """Before clipping."""
    norm: float
    updates: dict[str, Tensor]
    """Parameters after the step, less those at the start."""
    buffers: dict[str, Tensor]
    """After the step, as float64: running statistics and their counts."""


def scales_of(case: Case, device: torch.device) -> Scales:
    """From the first gradient of the whole batch."""
    model = case.make_model().to(device, torch.float64)
    _backward(model, *_step(case, 0, device), parts=None)
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
        eps=TOLERANCES[case.options.precision].eps * clip / math.sqrt(count),
    )


def train_alone(
    case: Case, name: OptimizerName, scales: Scales, layout: Layout, device: torch.device
) -> Iterator[StepRecord]:
    """Train on one device; gives each step's record.

    The layout matters only where samples of a microbatch see each other, or leave their mark.
    """
    model = case.make_model().to(device, torch.float64).train()
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    start = {n: p.detach().clone() for n, p in parameters.items()}
    optimizer = _optimizer(list(parameters.values()), name, scales)
    for number, samples in enumerate(case.counts):
        parts = None
        if case.by_microbatch:
            parts = global_microbatches(samples, layout.data_ranks, case.microbatches(layout))
        optimizer.zero_grad()
        loss = _backward(model, *_step(case, number, device), parts)
        gradients = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for n, p in parameters.items()
        }
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), scales.clip)
        optimizer.step()
        updates = {n: p.detach() - start[n] for n, p in parameters.items()}
        yield StepRecord(loss, gradients, float(norm), updates, buffers_of(model))


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """All buffers as they are now, as float64; a shared one under each of its names."""
    named = model.named_buffers(remove_duplicate=False)
    return {n: b.detach().double().clone() for n, b in named if b.numel() and not b.is_complex()}


def global_microbatches(samples: int, data_ranks: int, microbatches: int) -> list[Tensor]:
    """Which samples are together in a microbatch, over all ranks: those a batch norm sees as one.

    Ranks take neighbouring samples, the first ones one more where it does not divide; so do the
    microbatches of a rank. Microbatches that no rank has a sample for are left out.
    """
    runs = min(microbatches, -(-samples // data_ranks))
    ranks = [part.tensor_split(runs) for part in torch.arange(samples).tensor_split(data_ranks)]
    return [torch.cat(parts) for parts in zip(*ranks, strict=True)]


def _backward(
    model: nn.Module, inputs: Tensor, targets: Tensor, parts: list[Tensor] | None
) -> float:
    """Gradients of the mean over all targets that count; returns that mean."""
    count = (targets != -100).sum()
    total = 0.0
    for part in parts or [torch.arange(len(inputs))]:
        outputs = model(inputs[part])
        loss = F.cross_entropy(outputs.flatten(0, -2), targets[part].flatten(), reduction="sum")
        (loss / count).backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach() / count)
    return total


def _step(case: Case, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
    inputs, targets = (tensor.to(device) for tensor in case.step(number))
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
