"""Counters: 64-bit words of every rank, changed by any rank in one indivisible step."""

from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, cast

from tutti.comm.symmetric.memory import Gone, Memory
from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.comm.symmetric.heap import Heap


class Counters:
    """`count` unsigned 64-bit counters per rank, all zero at first, `spacing` bytes apart.

    `at` says whose counter is meant, None: this rank's. Every change is a release and an acquire:
    what a rank wrote before it changed a counter is seen by the rank that reads the new value.
    """

    def __init__(self, heap: "Heap", memory: Memory, offset: int, count: int, spacing: int) -> None:
        self.heap = heap
        self.memory = memory
        self.offset = offset
        self.count = count
        self.spacing = spacing
        self._bases = {rank: memory.address(rank, offset) for rank in range(heap.size)}
        self._own = self._bases[heap.rank]

    def fetch_add(self, index: int, value: int = 1, at: int | None = None) -> int:
        """Add, modulo 2^64; returns what was there before. A negative value subtracts."""
        return self.memory.fetch_add(self.address(index, at), value)

    def compare_swap(self, index: int, expected: int, desired: int, at: int | None = None) -> int:
        """Store `desired` if `expected` is there; returns what was there before."""
        return self.memory.compare_swap(self.address(index, at), expected, desired)

    def load(self, index: int, at: int | None = None) -> int:
        """The value now (acquire)."""
        return self.memory.load(self.address(index, at))

    def store(self, index: int, value: int, at: int | None = None) -> None:
        """Set the value (release)."""
        self.memory.store(self.address(index, at), value)

    def wait(
        self, index: int, at_least: int, timeout: float | None = None, at: int | None = None
    ) -> None:
        """Wait until the counter is `at_least` so much."""
        self.memory.wait_word(
            self.address(index, at),
            at_least,
            None,
            self.heap.timeout if timeout is None else timeout,
            f"counter {index} of rank {self.heap.rank if at is None else at}",
        )

    def address(self, index: int, at: int | None = None) -> int:
        """Where this process sees a counter."""
        if 0 <= index < self.count and (at is None or at in self._bases):
            return (self._own if at is None else self._bases[at]) + index * self.spacing
        self._refuse(index, at)

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
        # Freeing is collective; after an error here the others may never come.
        if error is None:
            self.heap.free(self)

    def end(self, reason: str) -> None:
        """Refuse every use from now on; the heap has taken the memory back."""
        self.memory = cast(Memory, Gone(reason))

    def _refuse(self, index: int, at: int | None) -> NoReturn:
        raise UsageError(
            f"counter {index} of rank {at}: there are {self.count} on each of ranks 0 to "
            f"{self.heap.size - 1}"
        )
