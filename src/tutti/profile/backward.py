"""When gradients came to be: autograd's engine leaves an event for each function that it runs."""

from collections import defaultdict
from typing import Any

import numpy as np

from tutti.profile.intervals import Gathering, Times

_ENGINE = "autograd::engine::evaluate_function"


class Backward:
    """Collects what autograd's engine did."""

    def __init__(self) -> None:
        self._engine = Gathering()
        self._accumulating: dict[Any, Gathering] = defaultdict(Gathering)
        self._on: dict[Any, Times] = {}

    def function(self, name: str, thread: Any, start: float, end: float) -> None:
        """autograd ran a function."""
        if name.startswith(_ENGINE):
            self._engine.add(start, end)
            if name.endswith("AccumulateGrad"):
                self._accumulating[thread].add(start, end)

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
