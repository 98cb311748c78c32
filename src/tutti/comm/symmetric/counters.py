"""Counters: 64-bit words of every rank, changed by any rank in one indivisible step."""

from types import TracebackType
from typing import TYPE_CHECKING, cast

from tutti.comm.symmetric.memory import Gone, Memory
from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.comm.symmetric.heap import Heap

_APART = 64  # bytes: a cache line per counter, so that neighbours do not slow each other down


class Counters:
    """`count` unsigned 64-bit counters per rank, all zero at first.

    `at` says whose counter is meant, None: this rank's.

    Every change is a release and an acquire: what a rank wrote before it changed a counter is seen
    by the rank that reads the new value.
    """

    def __init__(
        self, heap: "Heap", memory: Memory, offset: int, count: int, spacing: int = _APART
    ) -> None:
        self.heap = heap
        self.count = count
        self.offset = offset
        self.spacing = spacing
        self.memory = memory
        self._own = heap.rank

    def fetch_add(self, index: int, value: int = 1, at: int | None = None) -> int:
        """Add, modulo 2^64; returns what was there before. A negative value subtracts."""
        return self.memory.fetch_add(*self._place(index, at), value)

    def compare_swap(self, index: int, expected: int, desired: int, at: int | None = None) -> int:
        """Store `desired` if `expected` is there; returns what was there before."""
        return self.memory.compare_swap(*self._place(index, at), expected, desired)

    def load(self, index: int, at: int | None = None) -> int:
        """The value now (acquire)."""
        return self.memory.load(*self._place(index, at))

    def store(self, index: int, value: int, at: int | None = None) -> None:
        """Set the value (release)."""
        self.memory.store(*self._place(index, at), value)

    def wait(
        self, index: int, at_least: int, timeout: float | None = None, at: int | None = None
    ) -> None:
        """Wait until the counter is `at_least` so much."""
        seconds = self.heap.timeout if timeout is None else timeout
        self.memory.wait_counter(*self._place(index, at), at_least, seconds)

    def address(self, index: int, at: int | None = None) -> int:
        """Where this process sees a counter: for compiled code."""
        return self.memory.address(*self._place(index, at))

    def __len__(self) -> int:
        return self.count

    def __enter__(self) -> "Counters":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if error is None:
            self.heap.free(self)

    def _end(self, reason: str) -> None:
        self.memory = cast(Memory, Gone(reason))

    def _place(self, index: int, at: int | None) -> tuple[int, int]:
        rank = self._own if at is None else at
        if 0 <= index < self.count and 0 <= rank < self.heap.size:
            return rank, self.offset + index * self.spacing
        raise UsageError(
            f"counter {index} of rank {rank}: there are {self.count} on each of "
            f"{self.heap.size} ranks"
        )
