"""One operation, from torch's tensors to dense parts, one per rank where it has several.

The compiled front does the same in front/call.h; the algorithms are in the core, once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tutti.comm.shm import native

# As torch counts ReduceOp and as the core does: the same order.
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
KINDS = (
    *("barrier", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"),
    *("gather", "scatter", "all_to_all", "send", "recv"),
)
DTYPES = {
    torch.float64: native.F64,
    torch.float32: native.F32,
    torch.float16: native.F16,
    torch.bfloat16: native.BF16,
    torch.int64: native.I64,
    torch.int32: native.I32,
    torch.int16: native.I16,
    torch.int8: native.I8,
    torch.uint8: native.U8,
    torch.bool: native.BOOL,
}
_REAL = {torch.complex64: native.F32, torch.complex128: native.F64}
_UNSET = timedelta(milliseconds=-1)

# Set in debug mode only: says where in the caller's code the current call is.
where: Callable[[], str] | None = None


@dataclass(slots=True)
class Call:
    """What is to be done, with dense tensors only."""

    kind: int
    asynchronous: bool = True
    timeout: timedelta = _UNSET
    root: int = -1
    peer: int = -1
    tag: int = 0
    dtype: int = native.BYTES
    reduce: int = 0
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)  # the caller's own output tensors
    # The caller's tensors that were not dense, with those that stand in for them.
    stand_ins: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _torch_dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        return KINDS[self.kind]

    def reads(self, tensor: Tensor) -> None:
        self._check(tensor)
        self.inputs.append(tensor if _is_dense(tensor) else _dense(tensor))

    def writes(self, tensor: Tensor) -> None:
        self.outputs.append(self._writable(tensor))

    def updates(self, tensor: Tensor) -> None:
        """In place: the same memory is read and written."""
        self._check(tensor)
        self.results.append(tensor)
        dense = tensor
        if not _is_dense(tensor):
            dense = _dense(tensor)
            self.stand_ins.append((tensor, dense))
        self.inputs.append(dense)
        self.outputs.append(dense)

    def reads_cut(self, whole: Tensor, size: int, rows: Sequence[int] = ()) -> None:
        """One tensor as a part per rank, cut along its first dimension."""
        self._check(whole)
        dense = whole.detach() if _is_dense(whole) else _dense(whole)
        self.inputs.extend(self._cut(dense, size, rows, "input"))

    def writes_cut(self, whole: Tensor, size: int, rows: Sequence[int] = ()) -> None:
        dense = self._writable(whole).detach()
        self.outputs.extend(self._cut(dense, size, rows, "output"))

    def reduces(self, op: Any) -> None:
        # A ReduceOp made by hand has its kind in .op; the constants are the kind itself.
        number = int(getattr(op, "op", op))
        if number >= len(REDUCTIONS):
            raise ValueError(
                f"shm {self.name} knows {', '.join(REDUCTIONS)}; PREMUL_SUM is NCCL's: multiply "
                "the tensor, then use SUM"
            )
        self.reduce = number
        dtype = self._torch_dtype
        if dtype in _REAL:
            if number > 1:
                raise ValueError(f"shm {self.name}: complex numbers can be summed or averaged only")
            self.dtype = _REAL[dtype]
        if number == native.AVG and native.BF16 < self.dtype < native.BYTES:
            raise ValueError(f"shm {self.name}: AVG of {dtype} would cut fractions off: use SUM")
        if self.dtype == native.BYTES:
            known = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
            raise TypeError(
                f"shm {self.name} cannot reduce {dtype}: reduce it as one of {known} instead"
            )

    def check_place(self, mine: Tensor, place: Tensor, rank: int) -> None:
        """What a rank gives must fit the place that the others keep for it."""
        if mine.nbytes != place.nbytes:
            raise ValueError(
                f"shm {self.name}: rank {rank} has {mine.nbytes} bytes for a place of "
                f"{place.nbytes}"
            )

    def copy_back(self) -> None:
        with torch.no_grad():
            for theirs, ours in self.stand_ins:
                theirs.detach().copy_(ours.view_as(theirs))

    def operation(self) -> native.Operation:
        """The same for the core; it points into `inputs` and `outputs`."""
        return native.operation(
            self.kind,
            dtype=self.dtype,
            reduce=self.reduce,
            root=self.root,
            peer=self.peer,
            tag=self.tag,
            ins=[(part.data_ptr(), part.nbytes) for part in self.inputs],
            outs=[(part.data_ptr(), part.nbytes) for part in self.outputs],
        )

    def _check(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            raise ValueError(
                f"shm {self.name} moves CPU tensors, this one is on {tensor.device}: start the "
                "group with backend='cpu:shm,cuda:nccl'"
            )
        if tensor.layout != torch.strided:
            raise ValueError(
                f"shm {self.name} moves dense tensors, this one is {tensor.layout}: use .to_dense()"
            )
        if self._torch_dtype is None:
            self._torch_dtype = tensor.dtype
            self.dtype = DTYPES.get(tensor.dtype, native.BYTES)
        elif tensor.dtype != self._torch_dtype:
            raise TypeError(
                f"shm {self.name}: a {self._torch_dtype} and a {tensor.dtype} tensor in one call"
            )

    def _writable(self, tensor: Tensor) -> Tensor:
        self._check(tensor)
        self.results.append(tensor)
        if _is_dense(tensor):
            return tensor
        dense = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.stand_ins.append((tensor, dense))
        return dense

    def _cut(self, dense: Tensor, size: int, rows: Sequence[int], which: str) -> Sequence[Tensor]:
        if not rows:
            if dense.numel() % size:
                raise ValueError(
                    f"shm {self.name}: {which} of {dense.numel()} elements cannot be cut into "
                    f"{size} equal parts"
                )
            return dense.view(size, -1).unbind() if dense.numel() else [dense] * size
        if len(rows) != size:
            raise ValueError(f"shm {self.name}: {len(rows)} {which} split sizes for {size} ranks")
        height = dense.shape[0] if dense.dim() else 1
        if sum(rows) != height:
            raise ValueError(
                f"shm {self.name}: {which} split sizes sum to {sum(rows)}, the tensor has "
                f"{height} rows"
            )
        return torch.split_with_sizes(dense, list(rows))


def _is_dense(tensor: Tensor) -> bool:
    """Whether its memory holds its values, one after another."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
