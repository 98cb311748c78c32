"""Converts tensors to a wire form that every backend can send, and calls torch's process groups.

Backends do not support all dtypes of torch (for example int16 and float8), treat bool and complex
differently, and need contiguous memory. Data that is only moved is therefore sent as bytes if some
backend does not support its dtype. Data that is reduced is converted to a dtype and a reduction
that give the same result on every backend.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from tutti.comm.ledger import REDUCTIONS
from tutti.world.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from tutti.comm.operation import Operation

Finish = Callable[[], None]

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# The dtypes that every backend supports.
_SUPPORTED = frozenset((*_FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8))
# For each reduction of bool, the reduction of the bytes 0 and 1 that gives the same result.
_ON_BOOL = {
    "sum": "max",
    "max": "max",
    "bor": "max",
    "product": "min",
    "min": "min",
    "band": "min",
    "bxor": "bxor",
}
# For each bitwise reduction, the reduction that gives the same result if each bit is sent as one
# byte. The xor of bits is the lowest bit of their sum.
_ON_BITS = {"band": "min", "bor": "max", "bxor": "sum"}

# The pairs of dtype and reduction that need no conversion, so that the common case is one lookup.
UNCONVERTED = frozenset(
    (dtype, op) for dtype in _SUPPORTED for op in ("sum", "product", "min", "max")
)


def to_wire(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a form that every backend can send: flat, as bytes if necessary.

    If the tensor is contiguous and is not a lazy conjugate or negative view, the result shares the
    tensor's memory and can also be used as a receive buffer.
    """
    flat = _resolved(tensor).contiguous().view(-1)
    return flat if flat.dtype in _SUPPORTED else flat.view(torch.uint8)


def wire_buffer(out: torch.Tensor) -> tuple[torch.Tensor, Finish | None]:
    """Return a receive buffer for `out`, and a function that copies the buffer to `out`.

    The function is None if the buffer shares the memory of `out`.
    """
    target = to_wire(out)
    if target.data_ptr() == out.data_ptr():
        return target, None

    @torch.no_grad()
    def finish() -> None:
        out.copy_(target.view(out.dtype).view(out.shape))

    return target, finish


class WireReduction:
    """Converts tensors of one dtype to a form that a backend can reduce, and back."""

    def __init__(self, dtype: torch.dtype, op: str, backend: str) -> None:
        _check_reduction(dtype, op)
        self.dtype = dtype
        # NCCL has no bitwise reductions, so each bit is sent as one byte.
        self.by_bits = op in _ON_BITS and backend == "nccl"
        # gloo and NCCL cannot reduce int16, so int16 is sent as int32.
        self.widens = dtype == torch.int16 and backend != "shm" and not self.by_bits
        # NCCL and shm have a mean, but not every version of gloo has one. On gloo, `finish` divides
        # the sum.
        self.divides = op == "mean" and backend not in ("nccl", "shm")
        if self.divides:
            op = "sum"
        if self.by_bits:
            self.reduction = _ON_BITS[op]
        else:
            self.reduction = _ON_BOOL[op] if dtype == torch.bool else op

    def wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the wire form: a view of the tensor's memory if possible, otherwise a copy."""
        values = _resolved(tensor)
        if self.by_bits:
            integers = values.to(torch.uint8) if self.dtype == torch.bool else values
            return ((integers.unsqueeze(-1) >> self._bits(tensor)) & 1).to(torch.uint8)
        if self.dtype.is_complex:
            return torch.view_as_real(values.contiguous())
        if self.dtype == torch.bool:
            return values.contiguous().view(torch.uint8)
        return values.to(torch.int32) if self.widens else values.contiguous()

    def finish(self, wire: torch.Tensor, result: torch.Tensor, ranks: int) -> Finish | None:
        """Return a function that converts the reduced wire form to `result`.

        Return None if no conversion is necessary.
        """
        must_copy = wire.data_ptr() != result.data_ptr()
        if not must_copy and not self.divides:
            return None

        @torch.no_grad()
        def finish() -> None:
            if self.divides:
                wire.div_(ranks)
            if must_copy:
                result.copy_(self._from_wire(wire))

        return finish

    def _bits(self, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(8 * self.dtype.itemsize, device=like.device)

    def _from_wire(self, wire: torch.Tensor) -> torch.Tensor:
        if self.by_bits:
            return ((wire & 1).to(torch.int64) << self._bits(wire)).sum(-1).to(self.dtype)
        if self.dtype.is_complex:
            return torch.view_as_complex(wire)
        return wire.view(torch.bool) if self.dtype == torch.bool else wire


def _check_reduction(dtype: torch.dtype, op: str) -> None:
    name = dtype_name(dtype)
    has_fractions = dtype.is_floating_point or dtype.is_complex
    if op not in REDUCTIONS:
        raise UsageError(f"op={op!r} is not a reduction: {did_you_mean(op, REDUCTIONS)}")
    if op in _ON_BITS and has_fractions:
        raise UsageError(f"op={op!r} is not defined for {name}. Use an integer dtype.")
    if op == "mean" and not has_fractions:
        raise UsageError(f"op='mean' of {name} would truncate. Use op='sum', or cast to float32.")
    if dtype.is_complex and op not in ("sum", "mean"):
        raise UsageError(f"op={op!r} is not defined for {name}. Use sum or mean.")
    if not dtype.is_complex and dtype not in {*_SUPPORTED, torch.bool, torch.int16}:
        raise UsageError(f"{name} cannot be reduced. Cast the tensor to float32 first.")


def check_out(out: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return `out` if its shape, dtype and device fit the result. Raise UsageError otherwise."""
    if tuple(out.shape) != tuple(shape) or out.dtype != like.dtype or out.device != like.device:
        raise UsageError(
            f"out has shape {list(out.shape)} and dtype {dtype_name(out.dtype)} on {out.device}, "
            f"but must have shape {list(shape)} and dtype {dtype_name(like.dtype)} on {like.device}"
        )
    return out


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as float32."""
    return str(dtype).removeprefix("torch.")


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without lazy conjugation or negation, which backends do not support."""
    return tensor.detach().resolve_conj().resolve_neg()


# torch 2.13 renamed these methods of the process group, and warns if the old names are used.
_new_names = hasattr(dist.ProcessGroup, "all_gather_single")
_ALL_GATHER = "all_gather_single" if _new_names else "_allgather_base"
_REDUCE_SCATTER = "reduce_scatter_single" if _new_names else "_reduce_scatter_base"
_ALL_TO_ALL = "all_to_all_single" if _new_names else "alltoall_base"

# Backends do not modify options objects, so all calls with the same key share one object.
_options_cache: dict[tuple[str, bool, str, int], Any] = {}


def issue(call: "Operation", asynchronous: bool) -> Any:
    """Pass the operation to torch and return its Work, or None if the operation is complete.

    All operations of tutti.comm on torch's process groups start here. This function calls methods
    of the process group instead of functions of torch.distributed, because these functions expect
    ranks of the world instead of ranks of the group and add several microseconds per call.
    """
    kind, group = call.kind, call.comm_group.process_group
    if kind == "send":
        return group.send([call.source], call.root, call.tag)  # type: ignore[list-item]
    if kind == "recv":
        if call.root < 0:
            return group.recv_anysource([call.target], call.tag)  # type: ignore[list-item]
        return group.recv([call.target], call.root, call.tag)  # type: ignore[list-item]
    if kind == "barrier":
        return dist.barrier(group, async_op=asynchronous)
    key = (kind, asynchronous, call.reduction, call.root)
    options = _options_cache.get(key) or _options(key)
    if kind == "all_reduce":
        return group.allreduce([call.target], options)  # type: ignore[list-item]
    if kind == "all_gather":
        return getattr(group, _ALL_GATHER)(call.target, call.source, options)
    if kind == "reduce_scatter":
        return getattr(group, _REDUCE_SCATTER)(call.target, call.source, options)
    if kind == "broadcast":
        return group.broadcast([call.target], options)  # type: ignore[list-item]
    if kind == "reduce":
        return group.reduce([call.target], options)  # type: ignore[list-item]
    if kind == "all_to_all":
        ins, outs = call.splits or ([], [])
        return getattr(group, _ALL_TO_ALL)(call.target, call.source, outs, ins, options)
    whole = call.target if kind == "gather" else call.source  # None if this rank is not the root
    parts = [] if whole is None else [list(whole.view(call.comm_group.size, -1).unbind(0))]
    if kind == "gather":
        return group.gather(parts, [call.source], options)  # type: ignore[list-item]
    return group.scatter([call.target], parts, options)  # type: ignore[list-item]


def _options(key: tuple[str, bool, str, int]) -> Any:
    kind, asynchronous, reduction, root = key
    name = kind.title().replace("_", "")  # AllToAll, ReduceScatter
    name = {"AllReduce": "Allreduce", "AllGather": "Allgather"}.get(name, name)
    options = _options_cache[key] = getattr(c10d, f"{name}Options")()
    if hasattr(options, "asyncOp"):
        options.asyncOp = asynchronous
    if reduction:
        name = "AVG" if reduction == "mean" else reduction.upper()
        options.reduceOp = getattr(dist.ReduceOp, name)
    if root >= 0:
        options.rootRank = root
    return options
