"""SymmetricTensor: a tensor that every rank has at the same place of the heap."""

from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn, cast

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
        self.memory = memory
        self.offset = offset
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.count = self.shape.numel()
        self.bytes = self.count * dtype.itemsize
        self._itemsize = dtype.itemsize
        self._ranks = heap.size
        self._slots = heap.signals
        self._views: list[torch.Tensor | None] = [None] * heap.size
        self.local = self.peer(heap.rank)
        self.sum_in_place = memory.sum_in_place(self.local)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"SymmetricTensor({list(self.shape)}, {dtype}, at {self.offset} of {self.heap})"

    def peer(self, rank: int) -> torch.Tensor:
        """A rank's tensor as a view, without a copy. Valid until the tensor is freed."""
        if not 0 <= rank < self._ranks:
            self._no_rank(rank)
        view = self._views[rank]
        if view is None:
            view = self.memory.view(rank, self.offset, tuple(self.shape), self.dtype)
            self._views[rank] = view
        return view

    def address(self, rank: int) -> int:
        """Where this process sees a rank's tensor: for compiled code."""
        if not 0 <= rank < self._ranks:
            self._no_rank(rank)
        return self.memory.address(rank, self.offset)

    def put(self, src: torch.Tensor, to: int, at: int = 0) -> None:
        """Copy `src` into the tensor of rank `to`, from flat element `at` on.

        The peer may read it after a signal or a barrier that follows. On CUDA: enqueued on the
        current stream.
        """
        first, bytes = at * self._itemsize, src.nbytes
        if src.dtype is not self.dtype or at < 0 or first + bytes > self.bytes:
            self._does_not_fit(src, at)
        if not 0 <= to < self._ranks:
            self._no_rank(to)
        self.memory.put(to, self.offset + first, src, bytes)

    def get(
        self, source: int, at: int = 0, count: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A copy of `count` elements (all, or as many as `out` has) of rank `source`.

        Without `out` and `count` it has this tensor's shape, else it is flat.
        """
        if out is None:
            whole = count is None and at == 0
            count = self.count - at if count is None else count
            shape = self.shape if whole else torch.Size((max(count, 0),))
            out = torch.empty(shape, dtype=self.dtype, device=self.local.device)
        first, bytes = at * self._itemsize, out.nbytes
        if out.dtype is not self.dtype or at < 0 or first + bytes > self.bytes:
            self._does_not_fit(out, at)
        if not 0 <= source < self._ranks:
            self._no_rank(source)
        self.memory.get(source, self.offset + first, out, bytes)
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
        first, bytes = at * self._itemsize, src.nbytes
        if src.dtype is not self.dtype or at < 0 or first + bytes > self.bytes:
            self._does_not_fit(src, at)
        if not 0 <= to < self._ranks:
            self._no_rank(to)
        if not 0 <= slot < self._slots or (op != "set" and op != "add"):
            self.heap.refuse_signal(slot, op)
        self.memory.put_signal(
            to, self.offset + first, src, bytes, slot, value, 1 if op == "add" else 0
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

    def end(self, reason: str) -> None:
        """Refuse every use from now on; the heap has taken the memory back."""
        self.memory = cast(Memory, Gone(reason))
        self.sum_in_place = None
        self._views = [None] * self._ranks

    def _no_rank(self, rank: int) -> NoReturn:
        raise UsageError(f"rank {rank}: the heap's ranks are 0 to {self._ranks - 1}")

    def _does_not_fit(self, other: torch.Tensor, at: int) -> NoReturn:
        if other.dtype is not self.dtype:
            raise UsageError(f"the tensor holds {self.dtype}, not {other.dtype}: convert it first")
        raise UsageError(f"{other.numel()} elements at {at} end beyond the tensor's {self.count}")
