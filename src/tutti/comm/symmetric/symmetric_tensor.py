"""SymmetricTensor and Counters: objects that every rank has at the same offset of the heap."""

from typing import TYPE_CHECKING, Literal, NoReturn, Self, TypeAlias, cast

import torch

from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.comm.symmetric.cpu_heap import CpuMemory
    from tutti.comm.symmetric.cuda_heap import CudaMemory
    from tutti.comm.symmetric.heap import Heap

    HeapMemory: TypeAlias = CpuMemory | CudaMemory  # both have the same methods

CHANNELS = 16  # barriers of different channels are independent of each other


class Released:
    """Replaces the memory of a closed heap or freed tensor: any use raises UsageError(reason)."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(self._reason)


class HeapObject:
    """An object in a heap. The end of a `with` block frees the object on all ranks."""

    def __init__(self, heap: "Heap", offset: int) -> None:
        self.heap, self.memory, self.offset = heap, heap.memory, offset

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        # Freeing is collective. After an error on this rank, other ranks may never call free().
        if error is None:
            self.heap.free(self)

    def release(self, reason: str) -> None:
        """Make every later use of this object raise UsageError(reason)."""
        self.memory = cast("HeapMemory", Released(reason))


class SymmetricTensor(HeapObject):
    """A tensor with the same shape and dtype on all ranks. Each rank has its own values.

    `heap.empty` and `heap.zeros` create the tensor. `heap.free` or the end of a `with` block frees
    the tensor. These calls are collective. If two ranks access the same elements and one of them
    writes, a signal, a counter or a barrier must order the two accesses.
    """

    def __init__(
        self, heap: "Heap", offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        super().__init__(heap, offset)
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.count = self.shape.numel()
        self.bytes = self.count * dtype.itemsize
        self._itemsize = dtype.itemsize
        self._ranks, self._signals = heap.size, heap.signals
        self._views: list[torch.Tensor | None] = [None] * heap.size
        self.local = self.peer(heap.rank)
        self.sum_in_place = self.memory.collectives.sum_in_place(self.local)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"SymmetricTensor({list(self.shape)}, {dtype}, at {self.offset} of {self.heap})"

    def peer(self, rank: int) -> torch.Tensor:
        """Return a view of a rank's tensor. The view is valid until the tensor is freed."""
        if not 0 <= rank < self._ranks:
            self.heap.refuse_rank(rank)
        view = self._views[rank]
        if view is None:
            view = self.memory.view(rank, self.offset, tuple(self.shape), self.dtype)
            self._views[rank] = view
        return view

    def address(self, rank: int) -> int:
        """Return the address of a rank's tensor in this process, for compiled code."""
        if not 0 <= rank < self._ranks:
            self.heap.refuse_rank(rank)
        return self.memory.address(rank, self.offset)

    def put(self, src: torch.Tensor, to: int, at: int = 0) -> None:
        """Copy `src` into the tensor of rank `to`, starting at flat element `at`.

        The peer may read the data after a signal or a barrier that follows the put. On CUDA the
        copy is enqueued on the current stream.
        """
        first, bytes = at * self._itemsize, src.nbytes
        if src.dtype is not self.dtype or at < 0 or first + bytes > self.bytes:
            self._does_not_fit(src, at)
        if not 0 <= to < self._ranks:
            self.heap.refuse_rank(to)
        self.memory.put(to, self.offset + first, src, bytes)

    def get(
        self, source: int, at: int = 0, count: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a copy of `count` elements of rank `source`, starting at flat element `at`.

        The default of `count` is all remaining elements, or the number of elements of `out`.
        Without `out`, a copy of the whole tensor has this tensor's shape, and other copies are
        flat.
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
            self.heap.refuse_rank(source)
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
        """Put `src`, then set the peer's signal `slot` to `value`, or add `value` to the signal.

        A peer that sees the new signal also sees the data (release here, acquire in `heap.wait`).
        """
        first, bytes = at * self._itemsize, src.nbytes
        if src.dtype is not self.dtype or at < 0 or first + bytes > self.bytes:
            self._does_not_fit(src, at)
        if not 0 <= to < self._ranks:
            self.heap.refuse_rank(to)
        if not 0 <= slot < self._signals or (op != "set" and op != "add"):
            self.heap.refuse_signal(slot, op)
        add = 1 if op == "add" else 0
        self.memory.put_signal(to, self.offset + first, src, bytes, slot, value, add)

    def release(self, reason: str) -> None:
        super().release(reason)
        self.sum_in_place = None
        self._views = [None] * self._ranks

    def _does_not_fit(self, other: torch.Tensor, at: int) -> NoReturn:
        if other.dtype is not self.dtype:
            raise UsageError(f"the heap's tensor is {self.dtype}: convert the {other.dtype} tensor")
        raise UsageError(
            f"{other.numel()} elements at {at} end beyond the tensor's {self.count} elements"
        )


class Counters(HeapObject):
    """`count` unsigned 64-bit counters per rank, initially zero, `spacing` bytes apart.

    In all methods, `at` is the rank whose counter is used. None means this rank. Every change is an
    atomic operation with release and acquire order: a rank that reads the new value also sees
    everything that the changing rank wrote before the change.
    """

    def __init__(self, heap: "Heap", offset: int, count: int, spacing: int) -> None:
        super().__init__(heap, offset)
        self.count, self.spacing = count, spacing
        self._bases = {rank: self.memory.address(rank, offset) for rank in range(heap.size)}
        self._own_base = self._bases[heap.rank]

    def fetch_add(self, index: int, value: int = 1, at: int | None = None) -> int:
        """Add modulo 2^64, and return the previous value. A negative value subtracts."""
        return self.memory.fetch_add(self.address(index, at), value)

    def compare_swap(self, index: int, expected: int, desired: int, at: int | None = None) -> int:
        """Store `desired` if the value is `expected`, and return the previous value."""
        return self.memory.compare_swap(self.address(index, at), expected, desired)

    def load(self, index: int, at: int | None = None) -> int:
        """Return the current value (acquire)."""
        return self.memory.load(self.address(index, at))

    def store(self, index: int, value: int, at: int | None = None) -> None:
        """Set the value (release)."""
        self.memory.store(self.address(index, at), value)

    def wait(
        self, index: int, at_least: int, timeout: float | None = None, at: int | None = None
    ) -> None:
        """Wait until the counter is at least `at_least`."""
        seconds = self.heap.timeout if timeout is None else timeout
        counter = f"counter {index} of rank {self.heap.rank if at is None else at}"
        self.memory.wait_word(self.address(index, at), at_least, None, seconds, counter)

    def address(self, index: int, at: int | None = None) -> int:
        """Return the address of a counter in this process."""
        if 0 <= index < self.count and (at is None or at in self._bases):
            return (self._own_base if at is None else self._bases[at]) + index * self.spacing
        raise UsageError(
            f"counter {index} of rank {at} does not exist: ranks 0 to {self.heap.size - 1} have "
            f"{self.count} counters each"
        )

    def __len__(self) -> int:
        return self.count
