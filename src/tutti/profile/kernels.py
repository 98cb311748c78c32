"""The kernels of a trace, and which of the host's launches they come from.

The host runs ahead of its device. What it had asked for at a moment is done when the last kernel
launched until then has ended; what it asks for next begins with the first kernel launched after.
"""

from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.profile.intervals import Numbers, Times, union

Places = NDArray[np.int64]


class Kernels:
    """Kernels and their launches have a number in common; a trace has millions of them."""

    def __init__(self) -> None:
        self._launched, self._launched_at, self._launched_by = array("q"), array("d"), array("q")
        self._ran, self._computes, self._ran_at = array("q"), array("b"), array("q")
        self._began, self._ended = array("d"), array("d")
        # Threads of the host and streams of the device by number, in the order seen.
        self._threads: dict[Any, int] = {}
        self._streams: dict[tuple[Any, Any], int] = {}

    def __len__(self) -> int:
        return len(self._ran)

    def launch(self, number: int, moment: float, thread: Any) -> None:
        """The host launched something."""
        self._launched.append(number)
        self._launched_at.append(moment)
        self._launched_by.append(self._threads.setdefault(thread, len(self._threads)))

    def ran(
        self, number: int, start: float, end: float, computes: bool, stream: tuple[Any, Any]
    ) -> int:
        """A kernel ran, one that computes or one that communicates; returns its index."""
        self._ran.append(number)
        self._computes.append(computes)
        self._began.append(start)
        self._ended.append(end)
        self._ran_at.append(self._streams.setdefault(stream, len(self._streams)))
        return len(self._ran) - 1

    def launched_by(self, thread: Any, start: float, end: float) -> list[int]:
        """Indices of the kernels that a thread launched between two moments."""
        if thread not in self._by_thread:
            return []
        moments, indices = self._by_thread[thread]
        first, last = np.searchsorted(moments, [start, end])
        return [int(each) for each in indices[first:last]]

    def communicate(self, indices: Sequence[int]) -> None:
        """These kernels do not compute; to be said before anything is asked about computing."""
        for index in indices:
            self._computes[index] = False

    def extent(self, indices: Sequence[int]) -> tuple[float, float, tuple[Any, Any]]:
        """From the first start of these to the last end, and the stream of the last."""
        last = max(indices, key=lambda each: self._ended[each])
        start = min(self._began[each] for each in indices)
        return start, self._ended[last], list(self._streams)[self._ran_at[last]]

    def times(self, computing: bool) -> Times:
        """When kernels ran that compute, or that communicate."""
        chosen = np.array(self._computes, dtype=bool) == computing
        return union(np.array(self._began)[chosen], np.array(self._ended)[chosen])

    def computed(self, moment: float) -> float | None:
        """When the device had computed what was launched until a moment; None if nothing was."""
        launches, _, ends = self._computing
        at = int(np.searchsorted(launches, moment, side="right")) - 1
        return float(ends[at]) if at >= 0 else None

    def span(self, start: float, end: float) -> tuple[float, float] | None:
        """From the first kernel launched between two moments to the end of the last one."""
        launches, starts, ends = self._all
        first = int(np.searchsorted(launches, start, side="left"))
        last = int(np.searchsorted(launches, end, side="right")) - 1
        return (float(starts[first]), float(ends[last])) if first <= last else None

    @cached_property
    def _by_thread(self) -> dict[Any, tuple[Numbers, Places]]:
        """Of each thread the moments of launches, in order, and the kernels launched."""
        kernels, launches = self._joined
        moments, threads = np.array(self._launched_at)[launches], np.array(self._launched_by)
        found = {}
        for thread, number in self._threads.items():
            mine = np.flatnonzero(threads[launches] == number)
            mine = mine[np.argsort(moments[mine], kind="stable")]
            found[thread] = moments[mine], kernels[mine]
        return found

    @cached_property
    def _all(self) -> tuple[Numbers, Numbers, Numbers]:
        return self._by_launch(np.ones(len(self._ran), dtype=bool))

    @cached_property
    def _computing(self) -> tuple[Numbers, Numbers, Numbers]:
        return self._by_launch(np.array(self._computes, dtype=bool))

    @cached_property
    def _joined(self) -> tuple[Places, Places]:
        """Kernels whose launch is known, and the launch of each. A graph is one launch of many
        kernels; those of an earlier launch than any are left out.
        """
        by_number = np.argsort(np.array(self._launched))
        numbers = np.array(self._launched, dtype=np.int64)[by_number]
        ran = np.array(self._ran, dtype=np.int64)
        at = np.searchsorted(numbers, ran)
        known = at < len(numbers)
        known[known] = numbers[at[known]] == ran[known]
        return np.flatnonzero(known), by_number[at[known]]

    def _by_launch(self, chosen: NDArray[np.bool_]) -> tuple[Numbers, Numbers, Numbers]:
        """Moments of launches; the first start from each on, and the last end until each: of
        several streams, the one that begins first and the one that is done last count.
        """
        kernels, launches = self._joined
        kept = chosen[kernels]
        kernels, moments = kernels[kept], np.array(self._launched_at)[launches[kept]]
        order = np.argsort(moments, kind="stable")
        starts, ends = (np.array(t)[kernels][order] for t in (self._began, self._ended))
        first = np.minimum.accumulate(starts[::-1])[::-1]
        return moments[order], first, np.maximum.accumulate(ends)
