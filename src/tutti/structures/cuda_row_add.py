"""Atomic addition of rows to a table in GPU memory that several ranks add to at once (Triton)."""

import torch

from tutti.world.errors import UsageError

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = None

_BLOCK = 256
_ADDABLE = (torch.float32, torch.float64, torch.int32, torch.int64)

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _add(table, rows, values, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.load(rows + tl.program_id(0)).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        value = tl.load(values + tl.program_id(0).to(tl.int64) * columns + column, mask=inside)
        # torch's index_add_ is atomic within one GPU only; peers may add from another GPU.
        tl.atomic_add(
            table + row * columns + column, value, mask=inside, sem="relaxed", scope="sys"
        )


def add_rows(table: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """table[rows[i]] += values[i], each element atomically between all GPUs that map the table."""
    if triton is None:
        raise UsageError("scatter_add on a GPU needs Triton: pip install triton")
    if table.dtype not in _ADDABLE:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _ADDABLE)
        raise UsageError(f"scatter_add on {table.dtype}: it adds {names} atomically")
    columns = table.shape[1]
    grid = (len(rows), triton.cdiv(columns, _BLOCK))
    _add[grid](table, rows.contiguous(), values.contiguous(), columns, BLOCK=_BLOCK)
