"""Sets of time as arrays of disjoint intervals, sorted: what overlaps is counted once."""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Times:
    """Disjoint intervals [start, end), in order; seconds."""

    starts: Numbers
    ends: Numbers

    @staticmethod
    def of(pairs: Iterable[tuple[float, float]]) -> "Times":
        """The union of intervals that may overlap."""
        flat = np.array([edge for pair in pairs for edge in pair], dtype=np.float64)
        return union(flat[0::2], flat[1::2])

    @property
    def seconds(self) -> float:
        return float(np.sum(self.ends - self.starts))

    def __and__(self, other: "Times") -> "Times":
        return _combine(self, other, lambda here, there: here & there)

    def __sub__(self, other: "Times") -> "Times":
        return _combine(self, other, lambda here, there: here & ~there)

    def __or__(self, other: "Times") -> "Times":
        return union(
            np.concatenate([self.starts, other.starts]), np.concatenate([self.ends, other.ends])
        )

    def between(self, start: float, end: float) -> "Times":
        """What of it lies between two moments."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left"))
        return union(
            np.clip(self.starts[first:last], start, end), np.clip(self.ends[first:last], start, end)
        )

    def shifted(self, seconds: float) -> "Times":
        return Times(self.starts + seconds, self.ends + seconds)


NEVER = Times(np.empty(0), np.empty(0))


class Gathering:
    """Collects intervals as they come, in any order; memory grows with the gaps between them."""

    _SOME = 65_536

    def __init__(self) -> None:
        self._edges = array("d")
        self._limit = self._SOME

    def add(self, start: float, end: float) -> None:
        self._edges.append(start)
        self._edges.append(end)
        if len(self._edges) >= self._limit:
            merged = self.times()
            self._edges = array("d", np.stack([merged.starts, merged.ends], axis=1).ravel())
            self._limit = 2 * len(self._edges) + self._SOME

    def times(self) -> Times:
        flat = np.array(self._edges, dtype=np.float64)
        return union(flat[0::2], flat[1::2])


def union(starts: Numbers, ends: Numbers) -> Times:
    """The union of intervals that may overlap, in any order."""
    real = ends > starts
    starts, ends = starts[real], ends[real]
    if not len(starts):
        return NEVER
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    opens = np.concatenate([[True], starts[1:] > ends[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return Times(starts[opens], ends[closes])


def _combine(one: Times, two: Times, keep: Callable[[Flags, Flags], Flags]) -> Times:
    """Walk over all edges of both; keep the stretches between edges for which `keep` holds."""
    edges = np.concatenate([one.starts, one.ends, two.starts, two.ends])
    if not len(edges):
        return NEVER
    count = len(one.starts)
    in_one = np.zeros(len(edges), dtype=np.int64)
    in_two = np.zeros(len(edges), dtype=np.int64)
    in_one[:count], in_one[count : 2 * count] = 1, -1
    rest = len(two.starts)
    in_two[2 * count : 2 * count + rest], in_two[2 * count + rest :] = 1, -1
    order = np.argsort(edges, kind="stable")
    edges = edges[order]
    kept = keep(np.cumsum(in_one[order]) > 0, np.cumsum(in_two[order]) > 0)[:-1]
    return union(edges[:-1][kept], edges[1:][kept])
