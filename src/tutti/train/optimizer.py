"""The optimizer of a recipe: SGD or AdamW, fused where torch can, decaying matrices only."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tutti.train.recipe import Optimization


def build_optimizer(
    model: nn.Module, options: Optimization, lr: float, capturable: bool = False
) -> torch.optim.Optimizer:
    """The optimizer for a model's parameters.

    `capturable`: its step will be part of a CUDA graph, so the learning rate must be a tensor on
    the device, which the graph reads anew at each replay.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        # Biases and the gains of norms have one dimension: decay would only distort them.
        {
            "params": [p for p in parameters if p.dim() >= 2],
            "weight_decay": options.weight_decay,
        },
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    rate: float | torch.Tensor = lr
    if capturable:
        rate = torch.tensor(lr, device=parameters[0].device)
    if options.optimizer == "sgd":
        # For parameters that are spread over ranks torch has no rule for the fused kernel, and
        # takes tens of seconds to find one for a list of them over a mesh of three axes.
        spread = any(isinstance(p, DTensor) for p in parameters)
        return torch.optim.SGD(
            groups, lr=rate, momentum=options.momentum, fused=not spread, foreach=False
        )
    # A kernel over many parameters wants them all alike: plain ones beside split ones, which a plan
    # may leave, are taken one at a time.
    alike = len({(isinstance(p, DTensor), getattr(p, "device_mesh", None)) for p in parameters}) < 2
    return torch.optim.AdamW(
        groups,
        lr=rate,
        betas=options.betas,
        fused=alike,
        foreach=None if alike else False,
        capturable=capturable,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the coming step, without waiting for the device."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
