"""AdapterDirectory: what every rank has in its slots, readable by all, and which is to be active.

A record per slot: a sequence number (odd while the slot is being written), then the version, the
length of the name and the name. The sequence covers the record and the slot's tensors alike.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tutti.comm.symmetric.symmetric_tensor import SymmetricTensor
from tutti.structures import native
from tutti.world.errors import UsageError

NAME_BYTES = 120
_RECORD = 192  # bytes, of which 24 + NAME_BYTES are used
_CELL = 320  # bytes of the announcement: a cell with a name in it


class Listing(NamedTuple):
    """One adapter in one slot of a rank, as its record had it at `sequence`."""

    rank: int
    slot: int
    sequence: int
    version: int
    name: str


class AdapterDirectory:
    """The records of all ranks. Only their owner writes a rank's records; anybody announces."""

    def __init__(self, memory: SymmetricTensor, rank: int, size: int, slots: int) -> None:
        self.rank, self.size, self.slots = rank, size, slots
        self._core, self._quick = native.core(), native.quick()
        bases = [memory.address(peer) for peer in range(size)]
        # The announcement, in rank 0's memory, is a row of a table that has one row per rank.
        self._announced = self._core.tutti_rows_create(
            native.pointers(bases), size, rank, size, NAME_BYTES, _CELL, 0
        )
        self._announcement = self._core.tutti_rows_state(self._announced, 0)
        self._records = [base + _CELL for base in bases]

    @staticmethod
    def bytes(slots: int) -> int:
        """Memory that a directory takes on every rank."""
        return _CELL + slots * _RECORD

    def record(self, rank: int, slot: int) -> int:
        """The address of a slot's sequence number."""
        return self._records[rank] + slot * _RECORD

    def begin(self, slot: int) -> None:
        """A slot of this rank is about to be written: copies of it made from now on are refused."""
        self._quick.tutti_slot_begin(self.record(self.rank, slot))

    def end(self, slot: int, name: str, version: int) -> None:
        """A slot of this rank holds this now; version 0: nothing."""
        record, text = self.record(self.rank, slot), name.encode()
        words = (ctypes.c_uint64 * 2)(version, len(text))
        self._quick.tutti_slot_write(record + 8, ctypes.addressof(words), 16)
        self._quick.tutti_slot_write(record + 24, text.ljust(NAME_BYTES, b"\0"), NAME_BYTES)
        self._quick.tutti_slot_end(record)

    def sequence(self, rank: int, slot: int) -> int:
        """A slot's sequence number now."""
        return int(self._quick.tutti_load(self.record(rank, slot)))

    def of(self, rank: int) -> Iterator[Listing]:
        """What a rank has now; slots that are being written are left out."""
        buffer = ctypes.create_string_buffer(16 + NAME_BYTES)
        target = ctypes.addressof(buffer)
        for slot in range(self.slots):
            record = self.record(rank, slot)
            sequence = self.sequence(rank, slot)
            if sequence == 0 or sequence % 2:
                continue
            if self._quick.tutti_slot_copy(target, record + 8, len(buffer), record, sequence):
                version, length = (ctypes.c_uint64 * 2).from_buffer(buffer)
                if version:
                    name = buffer.raw[16 : 16 + length].decode()
                    yield Listing(rank, slot, sequence, version, name)

    def newest(self, name: str) -> Listing | None:
        """The newest copy that any rank has; of equals, the nearest: this rank's own first."""
        ranks = [(self.rank + i) % self.size for i in range(self.size)]
        copies = self._found(ranks, lambda: [c for rank in ranks for c in self.copies(rank, name)])
        return max(copies, key=lambda copy: copy.version, default=None)

    def copies(self, rank: int, name: str) -> list[Listing]:
        """What a rank has of an adapter now; several while older versions are still read."""
        return self._found([rank], lambda: [c for c in self.of(rank) if c.name == name])

    def _found(self, ranks: list[int], look: Callable[[], list[Listing]]) -> list[Listing]:
        """What a look at these ranks finds.

        A new version is written to another slot before the old one goes. Who looks slot by slot may
        miss both, so "there is none" counts only if nothing has changed meanwhile.
        """
        while True:
            before = self._sequences(ranks)
            copies = look()
            if copies or before == self._sequences(ranks):
                return copies

    def _sequences(self, ranks: list[int]) -> list[int]:
        return [self.sequence(rank, slot) for rank in ranks for slot in range(self.slots)]

    # ---- The announcement ----

    @property
    def announcements(self) -> int:
        """How many there were: when it grows, there is a new one."""
        return int(self._quick.tutti_load(self._announcement)) >> native.VERSION_SHIFT

    def announce(self, name: str) -> int:
        """A compiled call (see Structure): the number of this announcement, or why not yet."""
        text = name.encode().ljust(NAME_BYTES, b"\0")
        return int(self._quick.tutti_rows_publish(self._announced, 0, text))

    def announced(self) -> tuple[int, str]:
        """The number and the name of the last announcement; a negative number: look again."""
        text = ctypes.create_string_buffer(NAME_BYTES + 1)
        number = self._quick.tutti_rows_lookup(self._announced, 0, ctypes.addressof(text))
        return int(number), text.value.decode()

    def declare_dead(self, rank: int) -> None:
        """A rank that died while it announced no longer counts."""
        self._core.tutti_rows_declare_dead(self._announced, rank)

    def free(self) -> None:
        self._core.tutti_rows_free(self._announced)


def checked_name(name: str) -> str:
    """The name, if it fits into a record."""
    length = len(name.encode())
    if 0 < length <= NAME_BYTES and "\0" not in name:
        return name
    raise UsageError(f"adapter name {name!r} takes {length} bytes: 1 to {NAME_BYTES} are allowed")
