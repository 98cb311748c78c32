"""SymmetricTensor: a tensor that every rank has at the same place of the heap."""

from types import TracebackType
from typing import TYPE_CHECKING, Literal, cast

import torch

from tutti.comm.symmetric.memory import Gone, Memory
from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.comm.symmetric.heap import Heap


class SymmetricTensor:
    """The same shape and dtype on all ranks; each rank's values are its own.

    Made by `heap.empty` and `heap.zeros`, freed by `heap.free` or at the end of a `with` block, all
    collective. Reading what a peer wrote, or writing where a peer reads, needs an order between the
    two: a signal, a counter or a barrier.
    """

    def __init__(
        self, heap: "Heap", memory: Memory, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.heap = heap
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.count = self.shape.numel()
        self.offset = offset
        self.memory = memory
        self._itemsize = dtype.itemsize
        self._views: list[torch.Tensor | None] = [None] * heap.size
        self.local = self.peer(heap.rank)

    def peer(self, rank: int) -> torch.Tensor:
        """A rank's tensor as a view, without a copy. Valid until the tensor is freed."""
        view = self._views[self._rank(rank)]
        if view is None:
            view = self.memory.view(rank, self.offset, tuple(self.shape), self.dtype)
            self._views[rank] = view
        return view

    def address(self, rank: int) -> int:
        """Where this process sees a rank's tensor: for compiled code."""
        return self.memory.address(self._rank(rank), self.offset)

    def put(self, src: torch.Tensor, to: int, at: int = 0) -> None:
        """Copy `src` into the tensor of rank `to`, from flat element `at` on.

        The peer may read it after a signal or a barrier that follows. On CUDA: enqueued on the
        current stream.
        """
        self._check(src, at)
        self.memory.put(self._rank(to), self.offset + at * self._itemsize, src)

    def get(
        self, source: int, at: int = 0, count: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A copy of `count` elements (all, or as many as `out` has) of rank `source`.

        Without `out` and `count` it has this tensor's shape, else it is flat.
        """
        if out is None:
            shape = tuple(self.shape) if count is None and at == 0 else None
            count = self.count - at if count is None else count
            out = torch.empty(
                (count,) if shape is None else shape, dtype=self.dtype, device=self.local.device
            )
        self._check(out, at)
        self.memory.get(self._rank(source), self.offset + at * self._itemsize, out)
        return out

    def put_signal(
        self,
        src: torch.Tensor,
        to: int,
        slot: int = 0,
        value: int = 1,
        at: int = 0,
        op: Literal["set", "add"] = "set",
    ) -> None:
        """Put, then set the peer's signal `slot` to `value`, or add `value` to it.

        The peer sees the value only after the bytes (release here, acquire in `heap.wait`).
        """
        self._check(src, at)
        self.memory.put_signal(
            self._rank(to),
            self.offset + at * self._itemsize,
            src,
            self.heap.checked_slot(slot),
            value,
            self.heap.checked_op(op),
        )

    def __enter__(self) -> "SymmetricTensor":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        # Freeing is collective; after an error here the others may never come.
        if error is None:
            self.heap.free(self)

    def _end(self, reason: str) -> None:
        self.memory = cast(Memory, Gone(reason))
        self._views = [None] * self.heap.size

    def _rank(self, rank: int) -> int:
        if 0 <= rank < self.heap.size:
            return rank
        raise UsageError(f"rank {rank}: the heap's ranks are 0 to {self.heap.size - 1}")

    def _check(self, other: torch.Tensor, at: int) -> None:
        if other.dtype is not self.dtype:
            raise UsageError(f"the tensor holds {self.dtype}, not {other.dtype}: convert it first")
        if at < 0 or at + other.numel() > self.count:
            raise UsageError(
                f"{other.numel()} elements at {at} end beyond the tensor's {self.count}"
            )
