"""The gradients of a model after backward, the same ones in the same order on every rank."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from tutti.world.errors import UsageError


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that get gradients, by name; the same order on every rank."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def gradients(parameters: Mapping[str, nn.Parameter], find_unused: bool) -> list[torch.Tensor]:
    """The gradients that are to be summed over ranks.

    With find_unused, a parameter that got a gradient on some rank gets zeros where it has none,
    and one that got none anywhere keeps none, so that an optimizer leaves it alone.
    """
    if find_unused:
        parameters = _used_somewhere(parameters)
        for each in parameters.values():
            if each.grad is None:
                each.grad = torch.zeros_like(each)
    check_all_used(parameters)
    return [each.grad for each in parameters.values() if each.grad is not None]


def check_all_used(parameters: Mapping[str, nn.Parameter], cure: str = "use --find-unused") -> None:
    """Raise UsageError if a parameter got no gradient: other ranks would wait for it, or not."""
    for name, parameter in parameters.items():
        if parameter.grad is None:
            raise UsageError(
                f"parameter {name} got no gradient in this step: {cure}, or "
                "requires_grad_(False) if it is not meant to be trained"
            )


def _used_somewhere(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    device = next(iter(parameters.values())).device
    ranks = torch.tensor(
        [each.grad is not None for each in parameters.values()], dtype=torch.int32, device=device
    )
    dist.all_reduce(ranks)
    used = zip(parameters.items(), ranks.tolist(), strict=True)
    return {name: each for (name, each), count in used if count > 0}
