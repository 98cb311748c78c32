"""AdapterSlots: which adapter is in each of this rank's slots, who reads it, and which may go."""

import threading
from dataclasses import dataclass

from tutti.structures.adapter_directory import AdapterDirectory
from tutti.world.errors import UsageError


@dataclass(eq=False)
class Slot:
    """One of this rank's own slots. Only this process writes them; peers copy from them."""

    number: int
    name: str = ""
    version: int = 0  # 0: nothing in it
    home: bool = False  # put here, not fetched: never evicted
    filling: bool = False
    pins: int = 0
    used: int = 0  # when: the higher, the later


class AdapterSlots:
    """The slots of one rank. Callers hold `lock` from a look to what they do because of it."""

    def __init__(self, directory: AdapterDirectory, count: int) -> None:
        self.lock = threading.RLock()
        self.active: tuple[Slot, ...] = ()  # the active one and the one before it
        self.evicted = 0
        self._directory = directory
        self._slots = [Slot(number) for number in range(count)]
        self._clock = 0

    def find(self, name: str) -> Slot | None:
        """The slot with the newest version of an adapter."""
        with self.lock:
            found = [slot for slot in self._slots if slot.version and slot.name == name]
            return max(found, key=lambda slot: slot.version, default=None)

    def names(self) -> list[str]:
        """The adapters that are here, least recently used first."""
        with self.lock:
            return [s.name for s in sorted(self._slots, key=lambda s: s.used) if s.version]

    def in_use(self, slot: Slot) -> bool:
        """Whether somebody writes it, reads it, or may still read it."""
        return slot.filling or slot.pins > 0 or slot in self.active

    def touch(self, slot: Slot) -> None:
        """It was used now."""
        self._clock += 1
        slot.used = self._clock

    def begin(self, wanted: str) -> Slot:
        """An empty slot, or the least recently used one that nobody needs, ready to be written."""
        loose = [
            slot
            for slot in self._slots
            if not self.in_use(slot) and (not slot.home or slot.name == wanted)
        ]
        if not loose:
            count, homes = len(self._slots), sum(slot.home for slot in self._slots)
            raise UsageError(
                f"no slot for adapter {wanted!r} on rank {self._directory.rank}: of {count} slots "
                f"{homes} hold adapters that were put here, the others are in use: use more slots, "
                "or remove() adapters"
            )
        # First an empty one, then an older version of the same adapter, then the oldest.
        slot = min(loose, key=lambda s: (s.version > 0, s.name != wanted, s.used))
        self.evicted += slot.version > 0 and slot.name != wanted
        slot.filling, slot.version = True, 0
        self._directory.begin(slot.number)
        return slot

    def finish(self, slot: Slot, name: str, version: int, home: bool) -> None:
        """A slot that was begun holds this now; older versions go when nobody reads them."""
        self._directory.end(slot.number, name, version)
        slot.name, slot.version, slot.home, slot.filling = name, version, home, False
        self.touch(slot)
        for old in self._slots:
            if old is not slot and old.version and old.name == name:
                old.home = False
                if not self.in_use(old):
                    self.clear(old)

    def clear(self, slot: Slot) -> None:
        """Nothing is in it any more."""
        self._directory.begin(slot.number)
        self._directory.end(slot.number, "", 0)
        slot.name, slot.version, slot.home, slot.filling = "", 0, False, False

    def pin(self, slot: Slot, name: str, version: int) -> None:
        """Keep what is in it, if it still is what the reader saw."""
        with self.lock:
            if (slot.name, slot.version) != (name, version):
                raise UsageError(f"adapter {name!r} has left its slot: call active() again")
            slot.pins += 1

    def unpin(self, slot: Slot) -> None:
        with self.lock:
            slot.pins -= 1
