"""Gradient clipping by the global norm √ Σ g², the sum over all gradients of the whole model.

A rank holds only some of the gradients: its shards, its part of each split matrix, the layers of
its stages. Every gradient is counted once. If several ranks hold the same gradient (replicas, or
the weight of a norm under tp), only the first of these ranks counts it.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tutti.comm.collectives import all_reduce
from tutti.parallel.engine import Engine
from tutti.parallel.mesh import Mesh


@torch.no_grad()
def clip_by_global_norm(engine: Engine, largest: float) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `largest`; returns the norm."""
    parameters = [each for each in engine.model.parameters() if each.grad is not None]
    if engine.mesh.layout.only_replicas:
        return nn.utils.clip_grad_norm_(parameters, largest)
    total = global_norm(engine)
    gradients = [local_shard(each.grad) for each in parameters if each.grad is not None]
    if gradients:
        # The same formula as in torch: 1e-6 avoids a division by zero, and no value is copied to
        # the host.
        factor = (largest / (total + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
    return total


@torch.no_grad()
def global_norm(engine: Engine) -> torch.Tensor:
    """The norm over all gradients of the model. Call it on every rank: it is a collective."""
    counted = [
        local_shard(parameter.grad)
        for name, parameter in engine.model.named_parameters()
        if parameter.grad is not None
        and name not in engine.aliases
        and all(engine.mesh.rank(axis) == 0 for axis in replicated_axes(parameter, engine.mesh))
    ]
    squares = torch.zeros((), dtype=torch.float64, device=engine.world.device)
    if counted:
        squares += torch.stack(torch._foreach_norm(counted)).double().square().sum()
    all_reduce(squares)
    return squares.sqrt()


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, detached; a plain tensor is its own shard."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replicated_axes(tensor: torch.Tensor, mesh: Mesh) -> tuple[str, ...]:
    """The axes among dp, shard and tp along which all ranks hold the same values of a parameter."""
    split: set[str] = set()
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        placements = zip(names, tensor.placements, strict=True)
        split = {axis for axis, placement in placements if not placement.is_replicate()}
    return tuple(axis for axis in ("dp", "shard", "tp") if axis not in split)
