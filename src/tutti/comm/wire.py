"""The form in which a tensor travels, so that every backend gives the same result.

gloo and NCCL neither move nor reduce some dtypes that torch has (int16, float8), differ in what
bool and complex mean, and want contiguous memory. What merely moves, travels as bytes. What is
reduced is mapped to something that every backend reduces alike.
"""

from collections.abc import Callable

import torch

from tutti.world.errors import UsageError, did_you_mean

Finish = Callable[[], None]

REDUCTIONS = ("sum", "mean", "product", "min", "max", "band", "bor", "bxor")
_BITWISE = ("band", "bor", "bxor")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
_EVERYWHERE = frozenset((*_FLOATS, *_INTEGERS))
# Logic on bools, in operations that also give 0 or 1 on the bytes that bools are.
_ON_BOOL = {"sum": "max", "max": "max", "bor": "max", "product": "min", "min": "min"}
_ON_BOOL |= {"band": "min", "bxor": "bxor"}

# Logic on bits that travel as a byte each; of a sum of bits the lowest one is their exclusive or.
_ON_BITS = {"band": "min", "bor": "max", "bxor": "sum"}

# What needs no mapping at all: the usual case, found by one look.
PLAIN = frozenset((dtype, op) for dtype in _EVERYWHERE for op in ("sum", "product", "min", "max"))


def moving(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a form that every backend moves: flat, and bytes if need be.

    It shares memory with a contiguous tensor, so that it can also be received into, unless that is
    a view whose memory holds the conjugates or the negatives of its values.
    """
    flat = _resolved(tensor).contiguous().view(-1)
    return flat if flat.dtype in _EVERYWHERE else flat.view(torch.uint8)


def receiving(out: torch.Tensor) -> tuple[torch.Tensor, Finish | None]:
    """What to receive into for `out`, and what to do then: copy, if `out` cannot take it itself."""
    target = moving(out)
    if target.data_ptr() == out.data_ptr():
        return target, None
    return target, lambda: _fill(out, target.view(out.dtype).view(out.shape))


class Reducing:
    """How tensors of one dtype are reduced by one operation on one backend."""

    def __init__(self, dtype: torch.dtype, op: str, backend: str) -> None:
        _refuse_nonsense(dtype, op)
        self.dtype = dtype
        # NCCL has no logic on bits.
        self.by_bits = op in _BITWISE and backend == "nccl"
        self.widens = dtype == torch.int16 and backend != "shm" and not self.by_bits
        # gloo knows no mean in every version; NCCL and shm divide on the way.
        self.divides = op == "mean" and backend not in ("nccl", "shm")
        if self.divides:
            op = "sum"
        if self.by_bits:
            self.reduction = _ON_BITS[op]
        else:
            self.reduction = _ON_BOOL[op] if dtype == torch.bool else op

    def wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """What travels: the tensor's own memory where possible, else a copy."""
        values = _resolved(tensor)
        if self.by_bits:
            whole = values.to(torch.uint8) if self.dtype == torch.bool else values
            return ((whole.unsqueeze(-1) >> self._bits(tensor)) & 1).to(torch.uint8)
        if self.dtype.is_complex:
            return torch.view_as_real(values.contiguous())
        if self.dtype == torch.bool:
            return values.contiguous().view(torch.uint8)
        return values.to(torch.int32) if self.widens else values.contiguous()

    def finish(self, wire: torch.Tensor, result: torch.Tensor, ranks: int) -> Finish | None:
        """What turns the wire, once reduced over `ranks`, into the result; None for nothing."""
        must_copy = wire.data_ptr() != result.data_ptr()
        if not must_copy and not self.divides:
            return None

        @torch.no_grad()
        def finish() -> None:
            if self.divides:
                wire.div_(ranks)
            if must_copy:
                result.copy_(self._back(wire))

        return finish

    def _bits(self, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(8 * self.dtype.itemsize, device=like.device)

    def _back(self, wire: torch.Tensor) -> torch.Tensor:
        if self.by_bits:
            return ((wire & 1).to(torch.int64) << self._bits(wire)).sum(-1).to(self.dtype)
        if self.dtype.is_complex:
            return torch.view_as_complex(wire)
        return wire.view(torch.bool) if self.dtype == torch.bool else wire


def _refuse_nonsense(dtype: torch.dtype, op: str) -> None:
    has_fractions = dtype.is_floating_point or dtype.is_complex
    if op not in REDUCTIONS:
        raise UsageError(f"op={op!r} is no reduction: {did_you_mean(op, REDUCTIONS)}")
    if op in _BITWISE and has_fractions:
        raise UsageError(f"op={op!r} of {_name(dtype)} has no meaning: view it as integers")
    if op == "mean" and not has_fractions:
        raise UsageError(
            f"op='mean' of {_name(dtype)} would cut fractions off: use sum, or cast it to float32"
        )
    if dtype.is_complex and op not in ("sum", "mean"):
        raise UsageError(f"op={op!r} of {_name(dtype)}: complex numbers have sum and mean only")
    if not dtype.is_complex and dtype not in {*_EVERYWHERE, torch.bool, torch.int16}:
        raise UsageError(f"{_name(dtype)} is moved but not reduced: cast it to float32 first")


def check_out(out: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """`out`, if it has the shape, dtype and device that the operation will write."""
    if tuple(out.shape) != tuple(shape) or out.dtype != like.dtype or out.device != like.device:
        raise UsageError(
            f"out has shape {list(out.shape)}, {_name(out.dtype)} on {out.device}, and must have "
            f"{list(shape)}, {_name(like.dtype)} on {like.device}"
        )
    return out


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The values themselves in memory: backends know nothing of lazy conjugates and negatives."""
    return tensor.detach().resolve_conj().resolve_neg()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    tensor.copy_(values)
