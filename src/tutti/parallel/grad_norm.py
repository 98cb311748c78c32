"""The global gradient norm over all ranks of a layout, and gradient clipping by this norm."""

import torch
from torch import Tensor, nn

from tutti.comm.collectives import all_reduce
from tutti.parallel.engine import Engine
from tutti.parallel.mesh import local_shard, replicated_axes


@torch.no_grad()
def global_norm(engine: Engine) -> Tensor:
    """Return the norm √ Σ g² of all gradients, without waiting for the device.

    Call this function on every rank. A rank holds only a part of the gradients: its shards, its
    part of each split matrix, and the layers of its stages. If several ranks hold the same gradient
    (replicas, or a norm weight under tp), only the first of these ranks counts the gradient.
    """
    mesh = engine.mesh
    used = [(name, p) for name, p in engine.model.named_parameters() if p.grad is not None]
    if mesh.layout.only_replicas:
        return nn.utils.get_total_norm([p.grad for _, p in used if p.grad is not None])
    gradients = {name: local_shard(p.grad) for name, p in used if p.grad is not None}
    counted = [
        gradients[name]
        for name, parameter in used
        if name not in engine.aliases
        and all(mesh.rank(axis) == 0 for axis in replicated_axes(parameter, mesh))
    ]
    squares = torch.zeros((), dtype=torch.float64, device=engine.world.device)
    if counted:
        squares += torch.stack(torch._foreach_norm(counted)).double().square().sum()
    all_reduce(squares)
    return squares.sqrt()


@torch.no_grad()
def clip_by_global_norm(engine: Engine, max_norm: float) -> Tensor:
    """Scale gradients to a global norm of at most `max_norm`. Return the norm before scaling."""
    norm = global_norm(engine)
    if engine.mesh.layout.only_replicas:
        nn.utils.clip_grads_with_norm_(engine.model.parameters(), max_norm, norm)
        return norm
    gradients = [local_shard(p.grad) for p in engine.model.parameters() if p.grad is not None]
    if gradients:
        # This is torch's formula: 1e-6 avoids a division by zero. The factor stays on the device,
        # so the host does not wait for the device.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
    return norm
