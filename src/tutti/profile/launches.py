"""From the host's clock to the device's work: which kernels were launched until a moment, or after.

The host runs ahead of its device. What it had asked for at a moment is done when the last kernel
launched until then has ended; what it asks for next begins with the first kernel launched after.
"""

from array import array
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tutti.profile.intervals import Numbers


class Launches:
    """Kernels and their launches have a number in common; a trace has millions of them."""

    def __init__(self) -> None:
        self._launched, self._launched_at = array("q"), array("d")
        self._ran, self._computes = array("q"), array("b")
        self._began, self._ended = array("d"), array("d")

    def launch(self, number: int, moment: float) -> None:
        """The host launched something."""
        self._launched.append(number)
        self._launched_at.append(moment)

    def kernel(self, number: int, start: float, end: float, computes: bool) -> None:
        """A kernel ran: one that computes, or one that communicates."""
        self._ran.append(number)
        self._computes.append(computes)
        self._began.append(start)
        self._ended.append(end)

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
    def _all(self) -> tuple[Numbers, Numbers, Numbers]:
        return self._by_launch(np.ones(len(self._ran), dtype=bool))

    @cached_property
    def _computing(self) -> tuple[Numbers, Numbers, Numbers]:
        return self._by_launch(np.array(self._computes, dtype=bool))

    def _by_launch(self, chosen: NDArray[np.bool_]) -> tuple[Numbers, Numbers, Numbers]:
        """Moments of launches; the first start from each on, and the last end until each: of
        several streams, the one that begins first and the one that is done last count.
        """
        by_number = np.argsort(np.array(self._launched))
        numbers = np.array(self._launched, dtype=np.int64)[by_number]
        ran = np.array(self._ran, dtype=np.int64)[chosen]
        # A graph is one launch of many kernels; kernels of an earlier launch than any are left out.
        at = np.searchsorted(numbers, ran)
        known = at < len(numbers)
        known[known] = numbers[at[known]] == ran[known]
        launches = np.array(self._launched_at)[by_number[at[known]]]
        order = np.argsort(launches, kind="stable")
        starts, ends = (np.array(t)[chosen][known][order] for t in (self._began, self._ended))
        first = np.minimum.accumulate(starts[::-1])[::-1]
        return launches[order], first, np.maximum.accumulate(ends)
