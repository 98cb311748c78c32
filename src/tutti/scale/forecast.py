"""Forecast: the efficiency of sizes that were not run, from the smallest and the largest that were.

    T(n) = (own(n) + input(n) + exposed(n)) / (1 − share of waiting and bubbles)

own: what a rank does by itself. In weak scaling it stays what it is at the largest size. In strong
scaling a part of it shrinks with the batch and a part does not; both follow from the two sizes.
input shrinks with the batch. exposed grows as the fitted time of the communication does, with the
same part of it hidden, and never more hidden than there is to hide behind. Waiting and bubbles
keep their share of the step. At the largest size T(n) is what was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tutti.measure.bus_bandwidth import OPERATIONS
from tutti.scale.causes import Step
from tutti.scale.fit import Fit
from tutti.scale.job import Mode

LIMITS = (0.9, 0.8, 0.5)
FARTHEST = 4096  # ranks
_DOUBLINGS = 4
# Groups of these axes have the same ranks however many replicas there are.
_FIXED_AXES = ("tp", "pp")

ASSUMED = (
    "all links are alike (one class), every rank has a device of its own, the same part of "
    "communication is hidden, and waiting keeps its share"
)


@dataclass(frozen=True)
class Size:
    """What was measured at a number of ranks."""

    ranks: int
    step: Step
    ideal: float  # length of a step as a part of the base's, if nothing were lost
    hidden: float  # communication behind compute, as a share of the step
    comm: Sequence[dict[str, Any]]


class Forecast:
    """`efficiency(n)` relative to the base, as it is in the table."""

    def __init__(self, base: Size, largest: Size, fit: Fit, mode: Mode) -> None:
        self._base, self._largest, self._fit, self._mode = base, largest, fit, mode
        own, first = _own(largest), _own(base)
        shrinking = 0.0
        if mode == "strong":
            shrinking = max(0.0, (first - own) / (1 - self._batch(largest.ranks)))
        self._fixed = max(0.0, own - shrinking * self._batch(largest.ranks))
        self._shrinking = own - self._fixed  # at the largest size
        self._fitted = self._communication(largest.ranks)

    def efficiency(self, ranks: int) -> float:
        """What would be left at this many ranks."""
        step = self._largest.step
        exposed, hidden = step.timed("exposed"), self._largest.hidden * step.seconds
        shrunk = self._batch(ranks) / self._batch(self._largest.ranks)
        own = self._fixed + self._shrinking * shrunk
        grown = self._communication(ranks) / self._fitted if self._fitted else 1.0
        exposed = max(exposed * grown, (exposed + hidden) * grown - own)
        stalled = (step.timed("wait") + step.timed("bubble")) / step.seconds
        seconds = (own + step.timed("input") * shrunk + exposed) / (1 - stalled)
        ideal = self._largest.ideal * (shrunk if self._mode == "strong" else 1.0)
        return ideal * self._base.step.seconds / seconds

    def _batch(self, ranks: int) -> float:
        """A rank's batch as a part of the base's."""
        return self._base.ranks / ranks if self._mode == "strong" else 1.0

    def _communication(self, ranks: int) -> float:
        """What all messages of the largest size would take among more ranks, by the fit."""
        total = 0.0
        growth = ranks / self._largest.ranks
        shrunk = self._batch(ranks) / self._batch(self._largest.ranks)
        for row in self._largest.comm:
            if row["op"] not in OPERATIONS or row["ranks"] < 2:
                continue
            fixed = row.get("axis") in _FIXED_AXES  # they carry activations: bytes by the batch
            among = row["ranks"] if fixed else round(row["ranks"] * growth)
            size = (row["bytes"] or 0) * (shrunk if fixed else 1.0)
            total += row["count"] * self._fit.seconds(row["op"], among, size)
        return total


def forecast(
    measured: Sequence[tuple[int, float]],
    sizes: tuple[Size, Size] | None,
    fit: Fit | None,
    mode: Mode | None,
) -> dict[str, Any]:
    """The JSON's `forecast`. `measured`: ranks and efficiency of what was run, ascending.

    `mode` None: a step's samples neither stay what they are nor grow as ranks do.
    """
    nothing: dict[str, Any] = {"rows": [], "below": {}, "best_case": False}
    if len(measured) < 2 or sizes is None:
        return nothing | {"reason": "no forecast: it needs at least two sizes that were run"}
    if fit is None:
        return nothing | {
            "reason": "no forecast: no communication between ranks was seen to fit it to"
        }
    if mode is None:
        return nothing | {
            "reason": "no forecast: samples of a step are neither the same at every size (strong) "
            "nor as many more as there are ranks (weak)"
        }
    base, largest = sizes
    model = Forecast(base, largest, fit, mode)
    most = largest.ranks
    ahead = [
        most << doubling for doubling in range(1, _DOUBLINGS + 1) if most << doubling <= FARTHEST
    ]
    curve = {ranks: model.efficiency(ranks) for ranks in range(most + 1, FARTHEST + 1)}
    below = {}
    for limit in LIMITS:
        under = [ranks for ranks, value in measured if value < limit]
        under += [ranks for ranks, value in curve.items() if value < limit]
        below[str(limit)] = under[0] if under else None
    best = "at best, as messages of one size do not tell latency; " if fit.best_case else ""
    return {
        "rows": [{"ranks": ranks, "efficiency": curve[ranks]} for ranks in ahead],
        "below": below,
        "best_case": fit.best_case,
        "reason": f"forecast from {base.ranks} and {most} ranks; {best}it assumes that {ASSUMED}",
    }


def _own(size: Size) -> float:
    """Seconds of what a rank does by itself."""
    return sum(size.step.timed(part) for part in ("compute", "host_gap", "rest"))
