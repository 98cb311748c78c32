"""Batch norm over the microbatch of all ranks, as if one device had all its samples.

torch has such a module for CUDA and refuses CPU tensors. On CUDA its fused kernels are used; on
the CPU, the module here. Both hold the state of a plain BatchNorm under the same names, so that
checkpoints go from one to the other. Statistics of all N samples and pixels, xᵢ of this channel:

    μ = Σ xᵢ / N        σ² = Σ (xᵢ − μ)² / N        x̂ᵢ = (xᵢ − μ) / √(σ² + ε)

    ∂L/∂xᵢ = γ / √(σ² + ε) · (dyᵢ − Σ dyⱼ / N − x̂ᵢ · Σ dyⱼ x̂ⱼ / N)

All sums are over the ranks: one exchange in forward, one in backward. Gradients of γ and β are
this rank's share; the engine adds them up with all others.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from tutti.parallel.grid import Grid
from tutti.world.errors import UsageError
from tutti.world.world import World


def convert(model: nn.Module, grid: Grid) -> nn.Module:
    """Replace every batch norm by a synchronised one with the same parameters and buffers.

    Call it on every rank. Returns the model, or its replacement if it is a batch norm itself.
    """
    # With replicas a group of its own: its exchanges may not be mistaken for those of gradients,
    # which come in another order on a rank that left parameters unused.
    group = dist.new_group() if grid.layout.only_replicas else grid.data_group
    return _convert(model, grid.world, group)


def _convert(module: nn.Module, world: World, group: Any) -> nn.Module:
    if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        return _synchronised(module, world, group)  # type: ignore[arg-type]
    if isinstance(module, _BatchNorm) and not isinstance(module, JointBatchNorm):
        raise UsageError(
            f"--sync-batchnorm cannot replace {type(module).__name__}, a batch norm with a forward "
            "of its own: use torch's BatchNorm1d, 2d or 3d in the model"
        )
    for name, child in module._modules.items():
        if child is not None:
            setattr(module, name, _convert(child, world, group))
    return module


def _synchronised(plain: _BatchNorm, world: World, group: Any) -> nn.Module:
    kind = CudaBatchNorm if world.device.type == "cuda" else CpuBatchNorm
    norm = kind(plain.num_features, plain.eps, plain.momentum, False, plain.track_running_stats)
    norm.affine = plain.affine
    norm.weight, norm.bias = plain.weight, plain.bias
    norm.running_mean, norm.running_var = plain.running_mean, plain.running_var
    norm.num_batches_tracked = plain.num_batches_tracked
    norm.process_group = group
    return norm.train(plain.training)


class JointBatchNorm(_BatchNorm, ABC):
    """A batch norm whose statistics are those of all ranks; one of them may have no samples.

    In evaluation, and with no running statistics, each rank stands alone, as with torch's.
    """

    process_group: Any = None
    idle: bool = False
    """Set while this rank runs a dummy: its inputs must count nowhere, and still it must take part
    in every exchange."""

    # The compiler would cut it at its exchange, into graphs for each number of samples.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.idle and self.training):
            return self._forward(input)
        # No samples, through the same exchanges in the same places of forward and backward.
        zero = self._forward(input[:0]).sum()
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                zero = zero + parameter.sum() * 0  # torch's leaves them without a gradient
        return F.softsign(input) + zero.to(input.dtype)  # any values will do, if they are finite

    @abstractmethod
    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        """The norm itself, over the samples of all ranks."""


class CudaBatchNorm(JointBatchNorm, nn.SyncBatchNorm):
    """torch's own, which can also idle."""

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.numel() == 0 and self.training:
            # For no samples torch sends zeros in the input's type, but peers with samples of
            # 16 bits send sums of 32.
            return nn.SyncBatchNorm.forward(self, input.to(_wide(input))).to(input.dtype)
        return nn.SyncBatchNorm.forward(self, input)


class CpuBatchNorm(JointBatchNorm):
    """For CPU tensors of any float type; also right where it would run on CUDA, but slower."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"a batch norm needs samples and channels, got {input.dim()} dims")

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super(JointBatchNorm, self).forward(input)
        self._check_input_dim(input)
        mean, variance, count = _statistics(input.detach(), self.process_group)
        if count == 1:
            raise ValueError("a batch norm in training needs more than 1 value per channel")
        if count > 0:
            self._update(mean, variance * (count / (count - 1)))
        rstd = (variance + self.eps).rsqrt()
        args = (input, self.weight, self.bias, mean, rstd, count, self.process_group)
        return _Normalise.apply(*args)  # type: ignore[no-any-return, no-untyped-call]

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, unbiased_variance: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        # momentum=None: the plain mean of all microbatches so far.
        share = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), share)


def _statistics(x: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Mean, biased variance and count of each channel over all ranks, in one exchange.

    Every rank sends its own mean mᵣ, Σ (xᵢ − mᵣ)² and count nᵣ. Sums of squares around 0 would
    lose the variance of data that is far from 0; around each rank's mean they do not:
    Σ (xᵢ − μ)² = Σᵣ [Σ (xᵢ − mᵣ)² + nᵣ (mᵣ − μ)²].
    """
    x = x.to(_wide(x))
    dims = _all_but_channels(x)
    n = x.numel() // x.shape[1]
    mean = x.sum(dims) / max(n, 1)
    squares = (x - _channels(mean, x)).square().sum(dims)
    mine = torch.cat([mean, squares, mean.new_tensor([n])])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    sizes = [len(mean), len(mean), 1]
    means, squared, counts = torch.split(torch.stack(everyone), sizes, dim=1)
    count = int(counts.sum())
    mean = (means * counts).sum(0) / max(count, 1)
    variance = (squared + counts * (means - mean).square()).sum(0) / max(count, 1)
    return mean, variance, count


class _Normalise(torch.autograd.Function):
    """One node, so that its exchange in backward has one place among those of other layers."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        count: int,
        group: Any,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.count, ctx.group = count, group
        y = _standardised(x, mean, rstd)
        if weight is not None:
            y = y * _channels(weight, x)
        if bias is not None:
            y = y + _channels(bias, x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dy = dy.to(_wide(x))
        normed = _standardised(x, mean, rstd)
        dims = _all_but_channels(x)
        dbias, dweight = dy.sum(dims), (dy * normed).sum(dims)
        dx = None
        if ctx.needs_input_grad[0]:  # the same on all ranks: it is the same model
            sums = torch.stack([dbias, dweight])
            dist.all_reduce(sums, group=ctx.group)
            mean_dy, mean_dy_normed = sums / max(ctx.count, 1)
            dx = dy - _channels(mean_dy, x) - normed * _channels(mean_dy_normed, x)
            dx = dx * _channels(rstd if weight is None else rstd * weight, x)
            dx = dx.to(x.dtype)
        return (
            dx,
            dweight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            dbias.to(x.dtype if weight is None else weight.dtype)
            if ctx.needs_input_grad[2]
            else None,
            *[None] * 4,
        )


def _standardised(x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    return (x.to(mean.dtype) - _channels(mean, x)) * _channels(rstd, x)


def _channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _wide(x: torch.Tensor) -> torch.dtype:
    """The type that sums are made in: 32 bits at least."""
    return torch.promote_types(x.dtype, torch.float32)
