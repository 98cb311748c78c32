"""DistributedTensor: the rows of one large tensor, sharded over the ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from tutti.comm.symmetric.heap import Heap
from tutti.structures.structure_base import Structure, addable
from tutti.world.errors import UsageError

Placement = Literal["block", "cyclic"]


@dataclass(frozen=True)
class RowPlacement:
    """The distribution of `rows` rows over `size` ranks.

    Placement "block" gives each rank consecutive rows. "cyclic" puts row i on rank i % size.
    """

    rows: int
    size: int
    placement: Placement = "block"

    def __post_init__(self) -> None:
        if self.placement not in get_args(Placement):
            raise UsageError(f"placement must be block or cyclic, got {self.placement!r}")
        if self.rows < 1:
            raise UsageError(f"a table needs at least 1 row, got {self.rows}")

    @property
    def cyclic(self) -> bool:
        return self.placement == "cyclic"

    @property
    def per_rank(self) -> int:
        """The number of rows for which each rank has memory. The last ranks may hold fewer rows."""
        return -(-self.rows // self.size)

    def owner(self, index: int) -> int:
        """Return the rank whose memory holds a row."""
        self.check(index)
        return index % self.size if self.cyclic else index // self.per_rank

    def position(self, index: int) -> int:
        """Return the position of a row in its owner's memory."""
        self.check(index)
        return index // self.size if self.cyclic else index % self.per_rank

    def indices_of(self, rank: int) -> torch.Tensor:
        """Return the indices of a rank's rows, in the order of their positions."""
        if self.cyclic:
            return torch.tensor(range(rank, self.rows, self.size), dtype=torch.int64)
        begin = min(rank * self.per_rank, self.rows)
        return torch.arange(begin, min(begin + self.per_rank, self.rows))

    def check(self, index: int) -> None:
        if not 0 <= index < self.rows:
            raise IndexError(f"row {index} does not exist: the rows are 0 to {self.rows - 1}")


def contiguous_indices(indices: torch.Tensor) -> torch.Tensor:
    """Return the indices as a contiguous int64 tensor on the CPU, for compiled code."""
    if indices.dtype is torch.int64 and indices.is_cpu and indices.is_contiguous():
        return indices
    return indices.to("cpu", torch.int64).contiguous()


class DistributedTensor(Structure):
    """A table of `rows` × `columns`, sharded over all ranks, with access by row index.

    Use it for a table that is too large for one rank, or that all ranks change: embeddings, feature
    stores, histograms, sums of sparse gradients. Any rank can gather and add rows at any time, and
    the owner of a row does not take part. Block placement keeps neighbouring rows together. Cyclic
    placement spreads frequently used rows, such as the first rows, over the ranks.

    Do not use it if readers need consistent rows while other ranks write (use ParameterCache), or
    for dense sums of whole tensors (an all-reduce is faster).

    `scatter_add` adds every element atomically: no concurrent addition is lost. The order of
    additions is not fixed, so float sums may differ in the last bits from run to run. `gather` and
    `scatter` are plain copies. Before you read data that another rank wrote, synchronize with that
    rank by `heap.barrier()` or a signal. On CUDA, all calls are enqueued on the current stream.
    """

    def __init__(
        self,
        heap: Heap,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        placement: Placement = "block",
    ) -> None:
        super().__init__(heap)
        rows, self.columns = shape
        self.rows = RowPlacement(rows, heap.size, placement)
        self.shape, self.dtype = torch.Size(shape), dtype
        self._table = self._zeros((self.rows.per_rank, self.columns), dtype)
        self.local_indices = self.rows.indices_of(heap.rank)  # in the order of the rows in `local`
        self._counts = dict.fromkeys(("gathered", "scattered", "added"), 0)
        self._native = None
        if heap.device.type == "cpu":
            row_bytes = self.columns * dtype.itemsize
            self._native = self._core.tutti_rows_create(
                self._addresses_of(self._table),
                heap.size,
                heap.rank,
                rows,
                row_bytes,
                row_bytes,
                self.rows.cyclic,
            )
        heap.barrier()

    @property
    def local(self) -> torch.Tensor:
        """A view of the rows in this rank's memory. `local_indices` contains their indices."""
        self._check_open()
        return self._table.local[: len(self.local_indices)]

    def owner(self, index: int) -> int:
        """Return the rank that holds a row."""
        return self.rows.owner(index)

    def row(self, index: int) -> torch.Tensor:
        """Return a view of one row, on any rank."""
        self._check_open()
        return self._table.peer(self.rows.owner(index))[self.rows.position(index)]

    def gather(self, indices: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return copies of the rows at `indices`, with shape (*indices.shape, columns)."""
        self._check_open()
        shape = (*indices.shape, self.columns)
        if out is None:
            out = torch.empty(shape, dtype=self.dtype, device=self.heap.device)
        else:
            self._check_tensor("out", out, shape)
        count = indices.numel()
        self._counts["gathered"] += count
        if self._native is None:
            flat = out.view(-1, self.columns)
            for rank, here, there in self._by_owner(indices):
                flat[here] = self._table.peer(rank)[there]
            return out
        target = out if out.is_contiguous() else torch.empty_like(out).contiguous()
        rows, data = contiguous_indices(indices), target.data_ptr()
        bad = self._core.tutti_rows_gather(self._native, rows.data_ptr(), count, data)
        if bad >= 0:
            self.rows.check(int(rows.reshape(-1)[bad]))
        return out if target is out else out.copy_(target)

    def scatter(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Store `values[i]` as row `indices[i]`. Concurrent writes to one row may mix values."""
        self._check_open()
        self._check_tensor("values", values, (*indices.shape, self.columns))
        self._counts["scattered"] += indices.numel()
        if self._native is None:
            for rank, here, there in self._by_owner(indices):
                self._table.peer(rank)[there] = values.reshape(-1, self.columns)[here]
            return
        self._call(self._core.tutti_rows_scatter, indices, values.contiguous())

    def scatter_add(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Add `values[i]` to row `indices[i]`. No concurrent addition is lost.

        If an index occurs several times, all its values are added.
        """
        self._check_open()
        self._check_tensor("values", values, (*indices.shape, self.columns))
        code = addable(self.dtype, "scatter_add")
        self._counts["added"] += indices.numel()
        if self._native is None:
            from tutti.comm.symmetric.cuda_kernels import add_rows

            for rank, here, there in self._by_owner(indices):
                add_rows(self._table.peer(rank), there, values.reshape(-1, self.columns)[here])
            return
        self._call(self._core.tutti_rows_scatter_add, indices, values.contiguous(), code)

    def to_full(self) -> torch.Tensor:
        """Return all rows in order, as an ordinary tensor on this rank."""
        self._check_open()
        full = torch.empty(self.shape, dtype=self.dtype, device=self.heap.device)
        for rank in range(self.size):
            indices = self.rows.indices_of(rank)
            if len(indices):
                full[indices.to(full.device)] = self._table.peer(rank)[: len(indices)]
        return full

    def stats(self) -> dict[str, int | str]:
        """Return the placement, and the numbers of all, local, gathered, stored and added rows."""
        return {
            "rows": self.rows.rows,
            "local_rows": len(self.local_indices),
            "placement": self.rows.placement,
            **self._counts,
        }

    def _release(self) -> None:
        if self._native is not None:
            self._core.tutti_rows_free(self._native)

    def _by_owner(self, indices: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield (rank, positions in `indices`, positions in the rank's memory) for each rank that
        owns at least one of the rows."""
        flat = indices.reshape(-1).to(self.heap.device, torch.int64)
        outside = flat[(flat < 0) | (flat >= self.rows.rows)]
        if len(outside):
            self.rows.check(int(outside[0]))
        divisor = self.size if self.rows.cyclic else self.rows.per_rank
        quotient, rest = flat // divisor, flat % divisor
        owners, positions = (rest, quotient) if self.rows.cyclic else (quotient, rest)
        for rank in range(self.size):
            here = (owners == rank).nonzero().flatten()
            if len(here):
                yield rank, here, positions[here]

    def _call(
        self, function: Any, indices: torch.Tensor, data: torch.Tensor, *dtype_code: int
    ) -> None:
        """Call a function of the C core that writes `data` to the rows at `indices`."""
        rows = contiguous_indices(indices)
        bad = function(self._native, rows.data_ptr(), rows.numel(), data.data_ptr(), *dtype_code)
        if bad >= 0:
            self.rows.check(int(rows.reshape(-1)[bad]))
