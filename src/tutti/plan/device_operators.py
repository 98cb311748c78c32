"""Runs a model on meta tensors with the operators that torch would choose on a GPU or a CPU.

Meta tensors have a shape and a dtype but no memory, so a model of any size can run on any machine.
In a few cases, the operators that torch runs depend on the device: attention kernels, fused norms,
dropout, and the casts of autocast. For meta tensors, torch would choose unfused fallback operators.
`DeviceOperators` calls the operators of the planned device (a GPU or a CPU) instead.
"""

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

DeviceKind = Literal["cuda", "cpu"]

_aten = torch.ops.aten
_MAX_HEAD_DIM = 256  # flash attention supports no larger head dim

# CUDA autocast computes the functions in _NARROW in its 16-bit dtype and the functions in _WIDE in
# float32. The lists are needed, because torch's autocast does not convert meta tensors.
_NARROW = {
    F.linear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    F.scaled_dot_product_attention,
    F.prelu,
    torch.addmm,
    torch.addbmm,
    torch.baddbmm,
    torch.bmm,
    torch.mm,
    torch.mv,
    torch.matmul,
    torch.einsum,
    Tensor.addmm,
    Tensor.baddbmm,
    Tensor.bmm,
    Tensor.mm,
    Tensor.mv,
    Tensor.matmul,
    Tensor.__matmul__,
}
_WIDE = {
    F.layer_norm,
    F.group_norm,
    F.softmax,
    F.log_softmax,
    F.softplus,
    F.cross_entropy,
    F.nll_loss,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.kl_div,
    F.binary_cross_entropy_with_logits,
    F.cosine_similarity,
    torch.layer_norm,
    torch.group_norm,
    torch.softmax,
    torch.log_softmax,
    torch.exp,
    torch.log,
    torch.pow,
    torch.rsqrt,
    torch.reciprocal,
    torch.cumsum,
    torch.logsumexp,
    Tensor.softmax,
    Tensor.log_softmax,
    Tensor.exp,
    Tensor.log,
    Tensor.pow,
    Tensor.__pow__,
    Tensor.rsqrt,
    Tensor.reciprocal,
    Tensor.cumsum,
    Tensor.logsumexp,
}


class DeviceOperators(TorchFunctionMode):
    """Context manager: functions on meta tensors call the operators of the planned device."""

    def __init__(self, device: DeviceKind, autocast: torch.dtype | None) -> None:
        super().__init__()
        self._cuda = device == "cuda"
        self._autocast = autocast

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._autocast is not None:
            # Only CUDA autocast computes norms, softmax and losses in float32. CPU autocast
            # computes them in the dtype of their inputs.
            dtype = torch.float32 if func in _WIDE and self._cuda else None
            dtype = self._autocast if func in _NARROW else dtype
            if dtype is not None:
                args, kwargs = _cast((args, kwargs), dtype)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if self._cuda:
            if func in (F.rms_norm, torch.rms_norm):
                return _rms_norm(*args, **kwargs)
            if func is F.dropout:
                return _dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return the output of the attention kernel that torch would choose for these inputs."""
        tensors = (query, key, value)
        sixteen_bits = query.dtype in (torch.bfloat16, torch.float16)
        small = max(query.shape[-1], value.shape[-1]) <= _MAX_HEAD_DIM
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            # torch converts a boolean mask to a mask of 0 and -inf in the dtype of the query.
            attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
        if not self._cuda and dropout_p == 0.0 and query.dim() == 4:
            result = _aten._scaled_dot_product_flash_attention_for_cpu(
                *tensors, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
        elif self._cuda and sixteen_bits and small and attn_mask is None and query.dim() == 4:
            result = _aten._scaled_dot_product_flash_attention(
                *tensors, dropout_p, is_causal, False, scale=scale
            )
        elif self._cuda and query.dtype != torch.float64 and not enable_gqa and query.dim() == 4:
            if attn_mask is not None:
                attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
            result = _aten._scaled_dot_product_efficient_attention(
                *tensors, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
            )
        else:
            return F.scaled_dot_product_attention(
                *tensors, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        output: Tensor = result[0]
        return output


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floating and value.dtype != torch.float64 else value

    return tree_map(cast, values)


def _rms_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    # torch's fused CUDA kernel needs a weight in the dtype of the input. Otherwise torch uses the
    # unfused operators.
    if weight is not None and weight.dtype != input.dtype:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the unused fused kernel
            return torch.rms_norm(input, normalized_shape, weight, eps)
    output: Tensor = FusedRmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return output


class FusedRmsNorm(torch.autograd.Function):
    """A stand-in for torch's fused RMS norm with the same memory traffic and saved tensors.

    The tensors saved for backward are the input, the weight and one float32 number per row.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = input.new_empty(input.shape[:-dims] + (1,) * dims, dtype=torch.float32)
        ctx.save_for_backward(input, weight, rows)
        return input * 1.0  # reads the input and writes the output, as the fused kernel does

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        input, weight, _ = ctx.saved_tensors
        of_weight = None if weight is None else torch.empty_like(weight)
        return gradients[0] * input, of_weight, None


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if p == 0.0 or not training:
        return input
    output: Tensor = torch.native_dropout(input, p, True)[0]
    return output


def workspace_bytes(operator: str, args: tuple[Any, ...], outputs: Sequence[Tensor]) -> int:
    """Return the bytes of temporary memory that a CUDA operator allocates, without its outputs."""
    if operator in ("convolution", "convolution_backward"):
        return _convolution_workspace(operator, args, outputs)
    if operator == "_scaled_dot_product_flash_attention_backward":
        # The workspace contains the query's gradient in float32 and one float32 per row. If several
        # query heads share a key head, the workspace also contains the gradients of keys and values
        # for every query head.
        query, key = args[1], args[2]
        batch, heads, length, size = query.shape
        rows = batch * heads * -(-length // 128) * 128
        padded = -(-size // 32) * 32
        total: int = 4 * rows * (padded + 1)
        if key.shape[1] != heads:
            total += 2 * batch * heads * key.shape[2] * size * query.element_size()
        return total
    if operator == "_scaled_dot_product_efficient_attention_backward":
        return int(4 * args[1].shape[0] * args[1].shape[1] * args[1].shape[2])
    return 0


# (Bytes of a convolution's workspace) / (bytes of its input or output, whichever is larger). The
# values are fitted to the peak memory of WideResNets with full recomputation on one H200
# (benchmarks/plan_gpu_h200_20261117.json).
_CONVOLUTION_WORKSPACE = {torch.bfloat16: 2.1, torch.float16: 2.1, torch.float32: 4.5}


def _convolution_workspace(operator: str, args: tuple[Any, ...], outputs: Sequence[Tensor]) -> int:
    """Return the workspace bytes of a cuDNN convolution.

    cuDNN chooses kernels by measurement. Its fast kernels compute in the memory format NHWC, so
    they copy NCHW tensors into the workspace. Tensors that are already NHWC need no workspace, and
    grouped or depthwise convolutions use none.
    """
    backward = operator == "convolution_backward"
    first, groups = args[0], args[9] if backward else args[8]
    if groups != 1 or first.dim() != 4:
        return 0
    if first.is_contiguous(memory_format=torch.channels_last):
        return 0
    other = args[1] if backward else outputs[0]
    factor = _CONVOLUTION_WORKSPACE.get(first.dtype, 0.0)
    return int(factor * max(first.nbytes, other.nbytes))
