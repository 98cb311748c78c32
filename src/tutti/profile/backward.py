"""When gradients came to be, on the clock that is explained.

autograd's engine leaves an event for each function that it runs, on the host. A GPU does that work
later: what the host had asked for at a moment is done when the last kernel launched until then has
ended.
"""

from array import array
from collections import defaultdict
from typing import Any

import numpy as np

from tutti.profile.intervals import Gathering, Numbers, Times

_ENGINE = "autograd::engine::evaluate_function"


class Backward:
    """Collects what autograd's engine did."""

    def __init__(self) -> None:
        self._engine = Gathering()
        self._accumulating: dict[Any, Gathering] = defaultdict(Gathering)
        self._on: dict[Any, Times] = {}
        # Kernels and their launches have a number in common; a trace has millions of them.
        self._launched, self._launched_at = array("q"), array("d")
        self._ended, self._ended_at = array("q"), array("d")
        self._order: tuple[Numbers, Numbers] | None = None

    def function(self, name: str, thread: Any, start: float, end: float) -> None:
        """autograd ran a function."""
        if name.startswith(_ENGINE):
            self._engine.add(start, end)
            if name.endswith("AccumulateGrad"):
                self._accumulating[thread].add(start, end)

    def launch(self, number: int, start: float) -> None:
        """The host launched something."""
        self._launched.append(number)
        self._launched_at.append(start)

    def kernel(self, number: int, end: float) -> None:
        """A kernel that computes ended."""
        self._ended.append(number)
        self._ended_at.append(end)

    def accumulates(self, thread: Any, moment: float) -> bool:
        """Whether a gradient was being stored: who communicates then is a hook on it."""
        if thread not in self._on:
            self._on[thread] = self._accumulating[thread].times()
        times = self._on[thread]
        at = int(np.searchsorted(times.starts, moment, side="right")) - 1
        return at >= 0 and moment <= float(times.ends[at])

    def gradients(self, start: float, end: float) -> tuple[float, float] | None:
        """Between two moments of the host, the first gradient and the end of backward."""
        engine = self._engine.times().between(start, end)
        stored = [
            each.times().between(start, end).starts[:1] for each in self._accumulating.values()
        ]
        first = np.concatenate([*stored, np.empty(0)])
        if not len(first) or not len(engine.ends):
            return None
        return float(first.min()), float(engine.ends[-1])

    def on_device(self, moment: float) -> float | None:
        """When the device had computed what the host had launched; None if that is unknown."""
        if self._order is None:
            self._order = self._by_launch()
        launches, ends = self._order
        at = int(np.searchsorted(launches, moment, side="right")) - 1
        return float(ends[at]) if at >= 0 else None

    def _by_launch(self) -> tuple[Numbers, Numbers]:
        launched, ended = np.array(self._launched), np.array(self._ended)
        _, mine, theirs = np.intersect1d(launched, ended, return_indices=True)
        launches = np.array(self._launched_at)[mine]
        order = np.argsort(launches)
        # Of several streams the one that is done last counts.
        return launches[order], np.maximum.accumulate(np.array(self._ended_at)[theirs][order])
