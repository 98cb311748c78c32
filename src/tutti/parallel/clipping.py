"""Clipping by the global norm: √ Σ g² over every gradient of the whole model, each counted once.

A rank sees a part of them: its shard, its part of each split matrix, the layers of its stages. What
several ranks hold alike (replicas; a norm's weight under tp) is counted by the first of them.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tutti.parallel.engine import Engine
from tutti.parallel.grid import Grid
from tutti.parallel.pieces import local


@torch.no_grad()
def clip_by_global_norm(engine: Engine, largest: float) -> torch.Tensor:
    """Scale all gradients down so that their global norm is at most `largest`; returns the norm."""
    parameters = [each for each in engine.model.parameters() if each.grad is not None]
    if engine.grid.layout.only_replicas:
        return nn.utils.clip_grad_norm_(parameters, largest)
    total = global_norm(engine)
    gradients = [local(each.grad) for each in parameters if each.grad is not None]
    if gradients:
        # As torch does: a norm of 0 divides nothing, and all stays on the device.
        factor = (largest / (total + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
    return total


@torch.no_grad()
def global_norm(engine: Engine) -> torch.Tensor:
    """The norm over all gradients of the model, on every rank. A collective."""
    mine = [
        local(parameter.grad)
        for name, parameter in engine.model.named_parameters()
        if parameter.grad is not None
        and name not in engine.aliases
        and _counts_here(parameter, engine.grid)
    ]
    squares = torch.zeros((), dtype=torch.float64, device=engine.world.device)
    if mine:
        squares += torch.stack(torch._foreach_norm(mine)).double().square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()


def _counts_here(parameter: nn.Parameter, grid: Grid) -> bool:
    """Whether this rank counts its part: on axes along which it is not cut, only the first does."""
    cut: set[str] = set()
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        placements = zip(names, parameter.placements, strict=True)
        cut = {axis for axis, placement in placements if not placement.is_replicate()}
    return all(grid.rank(axis) == 0 for axis in ("dp", "shard", "tp") if axis not in cut)
