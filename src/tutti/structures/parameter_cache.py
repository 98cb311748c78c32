"""ParameterCache: versioned rows that any rank can read while their owners publish new versions."""

import torch

from tutti.comm.shm import native
from tutti.comm.symmetric.heap import Heap
from tutti.structures.distributed_tensor import Placement, RowPlacement, contiguous_indices
from tutti.structures.structure_base import Structure
from tutti.world.errors import UsageError

# Python looks up a global name faster than an attribute of torch. This matters, because
# ParameterCache.lookup takes only about 1 µs.
_empty_like = torch.empty_like


class ParameterCache(Structure):
    """A table of `rows` × `columns`. Each row has an owner that publishes versions of the row.

    Use it if readers and writers are not synchronized: parameters that a server publishes and
    workers fetch, normalization statistics, routing tables, tables of learning rates. A lookup
    works on any rank, takes about 1 µs, never waits, and never returns a mixture of two versions.

    Do not use it to sum contributions of many writers (use DistributedTensor), or for keys that
    are not row numbers (use HashMap). The cache takes twice the memory of its rows, because a new
    version is written beside the version that readers use. So a writer that is killed during a
    write leaves the last version intact.
    """

    def __init__(
        self,
        heap: Heap,
        rows: int,
        columns: int,
        dtype: torch.dtype = torch.float32,
        placement: Placement = "block",
    ) -> None:
        super().__init__(heap, cpu_only=True)
        self.rows = RowPlacement(rows, heap.size, placement)
        self.local_indices = self.rows.indices_of(heap.rank)  # the rows that this rank owns
        self.columns, self.dtype = columns, dtype
        row_bytes = columns * dtype.itemsize
        # Each row has its own cache lines, so publishing a row does not slow down the readers of
        # neighbouring rows.
        stride = -(-self._core.tutti_cell_bytes(row_bytes) // 64) * 64
        memory = self._zeros((self.rows.per_rank * stride,))
        self._native = self._core.tutti_rows_create(
            self._addresses_of(memory),
            heap.size,
            heap.rank,
            rows,
            row_bytes,
            stride,
            self.rows.cyclic,
        )
        self._row = torch.empty(columns, dtype=dtype)
        self._lookup = self._core_holding_gil.tutti_rows_lookup
        self._count = rows
        self._published = 0
        heap.barrier()

    def owner(self, index: int) -> int:
        """Return the rank that publishes a row."""
        return self.rows.owner(index)

    def publish(self, index: int, row: torch.Tensor) -> int:
        """Make `row` the next version of row `index`, and return the version, counted from 1."""
        self._check_open()
        if self.rows.owner(index) != self.rank:
            raise UsageError(
                f"rank {self.rank} cannot publish row {index}, which rank {self.owner(index)} "
                "owns: send the row to its owner, for example through a RingBuffer"
            )
        self._check_tensor("row", row, (self.columns,))
        source = row if row.is_contiguous() else row.contiguous()
        address = source.data_ptr()
        self._published += 1
        # This call needs no timeout parameter, because only threads of this process write this row,
        # and a write is short.
        return self._retry(
            lambda: int(self._core_holding_gil.tutti_rows_publish(self._native, index, address)),
            f"publish of row {index}",
        )

    def publish_all(self, indices: torch.Tensor, rows: torch.Tensor) -> None:
        """Publish `rows[i]` as the next version of row `indices[i]`, one row after another.

        This rank must own the rows. `rows` has shape (*indices.shape, columns).
        """
        self._check_tensor("rows", rows, (*indices.shape, self.columns))
        flat_rows = rows.reshape(-1, self.columns)
        for index, row in zip(indices.reshape(-1).tolist(), flat_rows, strict=True):
            self.publish(index, row)

    def lookup(self, index: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of the newest version of a row. Raises LookupError if there is none."""
        if out is None:
            out = _empty_like(self._row)
        else:
            self._check_tensor("out", out, (self.columns,), contiguous=True)
        if not 0 <= index < self._count:
            self.rows.check(index)
        if self._lookup(self._native, index, out.data_ptr()) <= 0:
            self._lookup_with_retry(index, out)
        return out

    def lookup_versioned(
        self, index: int, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, int]:
        """Return a copy of the newest version of a row, and its version number."""
        out = self._output(out, (self.columns,), contiguous=True)
        self.rows.check(index)
        return out, self._lookup_with_retry(index, out)

    def lookup_many(
        self, indices: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of rows, of shape (*indices.shape, columns), and their versions.

        Each row is one complete version, but different rows may have been read at different times.
        A row that was never published has version 0 and contains zeros.
        """
        self._check_open()
        rows = contiguous_indices(indices)
        out = self._output(out, (*indices.shape, self.columns))
        target = out if out.is_contiguous() else torch.empty_like(out).contiguous()
        versions = torch.empty(indices.shape, dtype=torch.int64)
        bad = self._core.tutti_rows_lookup_many(
            self._native,
            rows.data_ptr(),
            rows.numel(),
            target.data_ptr(),
            versions.data_ptr(),
        )
        if bad >= 0:
            self.rows.check(int(rows.reshape(-1)[bad]))
        return out if target is out else out.copy_(target), versions

    def version(self, index: int) -> int:
        """Return the current version of a row: the number of times that it was published."""
        return int(self._core_holding_gil.tutti_load(self._state(index))) >> native.VERSION_SHIFT

    def wait_for(self, index: int, version: int, timeout: float | None = None) -> int:
        """Wait until a row has at least this version. Return the row's current version.

        Raises Timeout, or PeerDied if the owner of the row has died.
        """
        if version <= 0:
            return self.version(index)
        state = self._await(
            self._state(index),
            version << native.VERSION_SHIFT,
            self.owner(index),
            timeout,
            f"version {version} of row {index}",
        )
        return state >> native.VERSION_SHIFT

    def stats(self) -> dict[str, int]:
        """Return the numbers of this rank's lookups, published rows and retries.

        A retry is a copy that was repeated, because the owner of the row published a version and
        began to write the next version during the copy.
        """
        self._check_open()
        return {
            "lookups": int(self._core.tutti_rows_lookups(self._native)),
            "published": self._published,
            "retries": int(self._core.tutti_rows_retries(self._native)),
        }

    def _release(self) -> None:
        self._lookup = self._refuse
        self._core.tutti_rows_free(self._native)

    def _declare_dead(self, rank: int) -> None:
        self._core.tutti_rows_declare_dead(self._native, rank)

    def _state(self, index: int) -> int:
        self._check_open()
        self.rows.check(index)
        return int(self._core_holding_gil.tutti_rows_state(self._native, index))

    def _lookup_with_retry(self, index: int, out: torch.Tensor) -> int:
        self._check_open()
        address = out.data_ptr()
        version = self._retry(
            lambda: int(self._lookup(self._native, index, address)), f"lookup of row {index}"
        )
        if version:
            return version
        raise LookupError(
            f"row {index} was never published by its owner, rank {self.owner(index)}: use "
            f"wait_for({index}, 1) to wait for its first version"
        )
