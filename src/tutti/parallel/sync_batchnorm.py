"""Batch norm with statistics over the microbatches of all data ranks, as on one device.

On CUDA, torch's SyncBatchNorm is used. It has fused kernels, but does not support CPU tensors.
Parameters and buffers are the same as in a plain BatchNorm, so that checkpoints are
interchangeable. For the N values xᵢ of a channel, over all samples and pixels:

    μ = Σ xᵢ / N        σ² = Σ (xᵢ − μ)² / N        x̂ᵢ = (xᵢ − μ) / √(σ² + ε)

    ∂L/∂xᵢ = γ / √(σ² + ε) · (dyᵢ − Σ dyⱼ / N − x̂ᵢ · Σ dyⱼ x̂ⱼ / N)

dyᵢ is ∂L/∂yᵢ, the gradient of the output. All sums are over all ranks, with one collective in
forward and one in backward. Each rank computes its own part of the gradients of γ and β. The engine
sums these parts like all other gradients.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from tutti.comm.collectives import all_gather, all_reduce
from tutti.parallel.mesh import Mesh
from tutti.world.errors import UsageError


def convert_batchnorms(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Replace every batch norm with a synchronised batch norm that has the same parameters.

    Parameters and buffers are kept. Call this function on every rank. Returns the model, or the new
    norm if the model itself is a batch norm.
    """
    if isinstance(model, _BatchNorm) and not isinstance(model, JointBatchNorm):
        if type(model) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
            return _synchronised(model, mesh)
        raise UsageError(
            f"--sync-batchnorm cannot replace {type(model).__name__}, because its forward may "
            "differ from torch's: use BatchNorm1d, BatchNorm2d or BatchNorm3d in the model"
        )
    for name, child in model._modules.items():
        if child is not None:
            setattr(model, name, convert_batchnorms(child, mesh))
    return model


def _synchronised(plain: _BatchNorm, mesh: Mesh) -> nn.Module:
    kind = CudaBatchNorm if mesh.world.device.type == "cuda" else CpuBatchNorm
    norm = kind(plain.num_features, plain.eps, plain.momentum, False, plain.track_running_stats)
    norm.affine = plain.affine
    norm.weight, norm.bias = plain.weight, plain.bias
    norm.running_mean, norm.running_var = plain.running_mean, plain.running_var
    norm.num_batches_tracked = plain.num_batches_tracked
    norm.process_group = mesh.batchnorm_group
    return norm.train(plain.training)


class JointBatchNorm(_BatchNorm, ABC):
    """A batch norm with statistics over all ranks. Some ranks may have no samples.

    In evaluation without running statistics, each rank uses only its own samples, as torch does.
    """

    process_group: Any = None
    without_samples: bool = False
    """True while this rank runs on example inputs. These inputs must not affect the statistics, but
    the rank must take part in every collective."""

    # torch.compile would break the graph at the collective and recompile for each batch size.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:
        if not (self.without_samples and self.training):
            return self._forward(input)
        # Run the same collectives as the other ranks, in the same order, but without samples.
        zero = self._forward(input[:0]).sum()
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                zero = zero + parameter.sum() * 0  # gives the parameter a gradient of 0
        return F.softsign(input) + zero.to(input.dtype)  # any finite values suffice

    @abstractmethod
    def _forward(self, input: Tensor) -> Tensor:
        """Normalise the input with the statistics of the samples of all ranks."""


class CudaBatchNorm(JointBatchNorm, nn.SyncBatchNorm):
    """torch's SyncBatchNorm, extended to run without samples."""

    def _forward(self, input: Tensor) -> Tensor:
        if input.numel() or not self.training:
            return nn.SyncBatchNorm.forward(self, input)
        # A rank without samples would send zeros in the dtype of its input, but ranks with 16-bit
        # samples send float32 sums. So the input is converted first.
        return nn.SyncBatchNorm.forward(self, input.to(_wide(input))).to(input.dtype)


class CpuBatchNorm(JointBatchNorm):
    """A synchronised batch norm for CPU tensors of any float dtype. It is slow on CUDA."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"a batch norm needs at least 2 dims, got {input.dim()}")

    def _forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super(JointBatchNorm, self).forward(input)
        self._check_input_dim(input)
        mean, variance, count = _statistics(input.detach(), self.process_group)
        if count == 1:
            raise ValueError("a batch norm in training needs more than 1 value per channel")
        if count > 0:
            self._update(mean, variance * (count / (count - 1)))
        statistics = mean, (variance + self.eps).rsqrt(), count
        args = (input, self.weight, self.bias, statistics, self.process_group)
        return _Normalise.apply(*args)  # type: ignore[no-any-return, no-untyped-call]

    def _update(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        # If momentum is None, the running statistics are the mean over all microbatches so far.
        share = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), share)


def _statistics(x: Tensor, group: Any) -> tuple[Tensor, Tensor, int]:
    """Return each channel's mean and biased variance, and the count, over all ranks.

    In one collective, every rank r sends its mean mᵣ, its sum Σ (xᵢ − mᵣ)² and its count nᵣ. The
    variance is computed with Σ (xᵢ − μ)² = Σᵣ [Σ (xᵢ − mᵣ)² + nᵣ (mᵣ − μ)²]. A variance from Σ xᵢ²
    would lose precision by cancellation if the mean is far from 0.
    """
    x = x.to(_wide(x))
    dims = [0, *range(2, x.dim())]  # all dims but the channels
    n = x.numel() // x.shape[1]
    mean = x.sum(dims) / max(n, 1)
    squares = (x - _channels(mean, x)).square().sum(dims)
    local = torch.cat([mean, squares, mean.new_tensor([n])])
    all_ranks = all_gather(local, group=group).view(-1, len(local))
    means, squared, counts = torch.split(all_ranks, [len(mean), len(mean), 1], dim=1)
    count = int(counts.sum())
    mean = (means * counts).sum(0) / max(count, 1)
    variance = (squared + counts * (means - mean).square()).sum(0) / max(count, 1)
    return mean, variance, count


class _Normalise(torch.autograd.Function):
    """Normalises in one autograd node, so that all ranks have the same order of collectives."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Any, group: Any
    ) -> Tensor:
        mean, rstd, ctx.count = statistics
        ctx.group = group
        ctx.save_for_backward(x, weight, mean, rstd)
        y = _standardised(x, mean, rstd)
        if weight is not None:
            y = y * _channels(weight, x)
        if bias is not None:
            y = y + _channels(bias, x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dy = dy.to(_wide(x))
        normed = _standardised(x, mean, rstd)
        dims = [0, *range(2, x.dim())]
        dbias, dweight = dy.sum(dims), (dy * normed).sum(dims)
        dx = None
        if ctx.needs_input_grad[0]:  # equal on all ranks, because the model is the same
            sums = torch.stack([dbias, dweight])
            all_reduce(sums, group=ctx.group)
            mean_dy, mean_dy_normed = sums / max(ctx.count, 1)
            dx = dy - _channels(mean_dy, x) - normed * _channels(mean_dy_normed, x)
            dx = dx * _channels(rstd if weight is None else rstd * weight, x)
            dx = dx.to(x.dtype)
        dtype = x.dtype if weight is None else weight.dtype
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        weight_gradient = dweight.to(dtype) if needs_weight else None
        return dx, weight_gradient, dbias.to(dtype) if needs_bias else None, None, None


def _standardised(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return (x.to(mean.dtype) - _channels(mean, x)) * _channels(rstd, x)


def _channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over x: float32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)
