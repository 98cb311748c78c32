"""Sets of time intervals as sorted numpy arrays: overlapping intervals are counted once."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Intervals:
    """Disjoint intervals [start, end) in ascending order, in seconds."""

    starts: Floats
    ends: Floats

    @staticmethod
    def of(pairs: Iterable[tuple[float, float]]) -> "Intervals":
        """The union of (start, end) pairs that may overlap."""
        flat = np.array([edge for pair in pairs for edge in pair], dtype=np.float64)
        return merge(flat[0::2], flat[1::2])

    @property
    def seconds(self) -> float:
        return float(np.sum(self.ends - self.starts))

    def __and__(self, other: "Intervals") -> "Intervals":
        return self._where(other, inside=True)

    def __sub__(self, other: "Intervals") -> "Intervals":
        return self._where(other, inside=False)

    def _where(self, other: "Intervals", inside: bool) -> "Intervals":
        """The segments of this set that lie inside (or outside) the other set."""
        edges = np.unique(np.concatenate([self.starts, self.ends, other.starts, other.ends]))
        kept = self._contains(edges) & (other._contains(edges) == inside)
        return merge(edges[:-1][kept[:-1]], edges[1:][kept[:-1]])

    def _contains(self, moments: Floats) -> npt.NDArray[np.bool_]:
        begun = np.searchsorted(self.starts, moments, side="right")
        return begun > np.searchsorted(self.ends, moments, side="right")

    def __or__(self, other: "Intervals") -> "Intervals":
        return merge(
            np.concatenate([self.starts, other.starts]), np.concatenate([self.ends, other.ends])
        )

    def between(self, start: float, end: float) -> "Intervals":
        """The part of the set that lies in [start, end)."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left"))
        starts, ends = self.starts[first:last], self.ends[first:last]
        return merge(np.maximum(starts, start), np.minimum(ends, end))

    def shifted(self, seconds: float) -> "Intervals":
        return Intervals(self.starts + seconds, self.ends + seconds)


EMPTY = Intervals(np.empty(0), np.empty(0))


class IntervalCollector:
    """Collects intervals in any order and merges them from time to time.

    Memory grows with the number of gaps between intervals, not with the number of intervals.
    """

    _MERGE_EVERY = 65_536  # edges

    def __init__(self) -> None:
        self._edges = array("d")
        self._limit = self._MERGE_EVERY

    def add(self, start: float, end: float) -> None:
        self._edges.append(start)
        self._edges.append(end)
        if len(self._edges) >= self._limit:
            merged = self.intervals()
            self._edges = array("d", np.stack([merged.starts, merged.ends], axis=1).ravel())
            self._limit = 2 * len(self._edges) + self._MERGE_EVERY

    def intervals(self) -> Intervals:
        flat = np.array(self._edges, dtype=np.float64)
        return merge(flat[0::2], flat[1::2])


def merge(starts: Floats, ends: Floats) -> Intervals:
    """The union of intervals in any order; empty and negative intervals are dropped."""
    positive = ends > starts
    starts, ends = starts[positive], ends[positive]
    if not len(starts):
        return EMPTY
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    opens = np.concatenate([[True], starts[1:] > ends[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return Intervals(starts[opens], ends[closes])
