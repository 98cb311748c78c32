"""MemoryTier: one level of a pooled cache, some bytes of memory that hold values under keys."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from tutti.comm.symmetric.heap import Allocator

UNIT = 64  # bytes: values begin at multiples of it


@dataclass
class Held:
    """A value where it lies. `area` is -1 where every value is a tensor of its own."""

    view: torch.Tensor
    bytes: int
    area: int = -1
    offset: int = 0
    pins: int = 0


class MemoryTier(ABC):
    """Values in the order of their last use. It stores where there is room, and evicts nothing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: OrderedDict[Hashable, Held] = OrderedDict()
        self.hits = 0

    def store(self, key: Hashable, data: torch.Tensor) -> bool:
        """Keep a copy in a free place, as the most recently used value; False if there is none."""
        held = self._take(data)
        if held is None:
            return False
        held.view.copy_(data)
        self.values[key] = held
        return True

    def drop(self, key: Hashable) -> None:
        """Forget a value and free its place."""
        self._give(self.values.pop(key))

    @abstractmethod
    def could_store(self, data: torch.Tensor) -> bool:
        """Whether data would fit if all values that are not pinned were gone."""

    def oldest(self) -> Hashable:
        """The least recently used value that is not pinned."""
        return next(key for key, held in self.values.items() if not held.pins)

    @property
    def bytes(self) -> int:
        """Bytes of all values."""
        return sum(held.bytes for held in self.values.values())

    def _pinned(self) -> list[Held]:
        return [held for held in self.values.values() if held.pins]

    @abstractmethod
    def _take(self, data: torch.Tensor) -> Held | None:
        """A free place for data, or None."""

    @abstractmethod
    def _give(self, held: Held) -> None:
        """Free a place."""


class AreaTier(MemoryTier):
    """Values in areas of symmetric memory that only this rank's cache writes."""

    def __init__(self, name: str, areas: list[torch.Tensor]) -> None:
        super().__init__(name)
        self._areas = areas
        self._rooms = [Allocator(area.numel(), UNIT) for area in areas]

    def could_store(self, data: torch.Tensor) -> bool:
        wanted, pinned = _bytes(data), self._pinned()
        return any(
            wanted <= _largest_gap(room.bytes, [p for p in pinned if p.area == number])
            for number, room in enumerate(self._rooms)
        )

    def _take(self, data: torch.Tensor) -> Held | None:
        wanted = _bytes(data)
        fitting = [n for n, room in enumerate(self._rooms) if room.largest_gap >= _rounded(wanted)]
        if not fitting:
            return None
        # Areas of several peers fill up evenly.
        area = max(fitting, key=lambda number: self._rooms[number].free)
        offset = self._rooms[area].take(wanted)
        view = self._areas[area][offset : offset + wanted].view(data.dtype).view(data.shape)
        return Held(view, wanted, area, offset)

    def _give(self, held: Held) -> None:
        self._rooms[held.area].give(held.offset)


class HostTier(MemoryTier):
    """Values in ordinary memory of the host, pinned for a GPU, at most `limit` bytes."""

    def __init__(self, limit: int, pinned: bool) -> None:
        super().__init__("host")
        self._limit = self._room = limit
        self._pin_memory = pinned

    def could_store(self, data: torch.Tensor) -> bool:
        return _bytes(data) <= self._limit - sum(held.bytes for held in self._pinned())

    def _take(self, data: torch.Tensor) -> Held | None:
        wanted = _bytes(data)
        if wanted > self._room:
            return None
        self._room -= wanted
        view = torch.empty(data.shape, dtype=data.dtype, pin_memory=self._pin_memory)
        return Held(view, wanted)

    def _give(self, held: Held) -> None:
        self._room += held.bytes


def _bytes(data: torch.Tensor) -> int:
    return data.numel() * data.itemsize


def _rounded(bytes: int) -> int:
    return max(1, -(-bytes // UNIT)) * UNIT


def _largest_gap(bytes: int, pinned: list[Held]) -> int:
    end, largest = 0, 0
    for held in sorted(pinned, key=lambda held: held.offset):
        largest = max(largest, held.offset - end)
        end = held.offset + _rounded(held.bytes)
    return max(largest, bytes - end)
