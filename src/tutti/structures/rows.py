"""Where the rows of a table lie when ranks share them."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from tutti.world.errors import UsageError

Placement = Literal["block", "cyclic"]


@dataclass(frozen=True)
class Rows:
    """`rows` rows over `size` ranks: consecutive blocks, or row i on rank i % size."""

    rows: int
    size: int
    placement: Placement = "block"

    def __post_init__(self) -> None:
        if self.placement not in get_args(Placement):
            raise UsageError(f"placement {self.placement!r}: choose block or cyclic")
        if self.rows < 1:
            raise UsageError(f"a table of {self.rows} rows: it needs at least one")

    @property
    def cyclic(self) -> bool:
        return self.placement == "cyclic"

    @property
    def per_rank(self) -> int:
        """Rows that every rank has room for: the last ones may have fewer."""
        return -(-self.rows // self.size)

    def owner(self, index: int) -> int:
        """The rank whose memory holds a row."""
        self.check(index)
        return index % self.size if self.cyclic else index // self.per_rank

    def place(self, index: int) -> int:
        """Which of its owner's rows it is."""
        self.check(index)
        return index // self.size if self.cyclic else index % self.per_rank

    def of(self, rank: int) -> torch.Tensor:
        """The indices of a rank's rows, in the order in which they lie there."""
        if self.cyclic:
            return torch.tensor(range(rank, self.rows, self.size), dtype=torch.int64)
        begin = min(rank * self.per_rank, self.rows)
        return torch.arange(begin, min(begin + self.per_rank, self.rows))

    def check(self, index: int) -> None:
        if not 0 <= index < self.rows:
            raise IndexError(f"row {index}: the rows are 0 to {self.rows - 1}")


def plain_indices(indices: torch.Tensor) -> torch.Tensor:
    """The same indices as compiled code reads them."""
    if indices.dtype is torch.int64 and indices.is_cpu and indices.is_contiguous():
        return indices
    return indices.to("cpu", torch.int64).contiguous()
