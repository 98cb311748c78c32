"""Fit the time of communication to the runs, and forecast the efficiency with more ranks.

Fit: t = α × rounds + β × bytes, in seconds. `rounds` is the number of rounds of a tree algorithm,
which is log2 of the number of ranks. `bytes` is the number of bytes that a ring algorithm sends
over the slowest link, which is 2 (n − 1) / n × S for an all-reduce of S bytes with n ranks. The fit
combines a tree and a ring, because libraries use trees for small messages and rings for large
messages. Between two ranks, α is the latency of a message and 1 / β is the bandwidth in bytes/s.

Forecast for n ranks, from the run with the fewest ranks and the run with the most ranks:

    T(n) = (own(n) + input(n) + exposed(n)) / (1 − share of waiting and bubbles)

own(n) is the time of a rank's own work. In weak scaling, own(n) is the value measured with the most
ranks. In strong scaling, own(n) is a constant plus a term that is proportional to the batch of a
rank. The two runs determine the constant and the term. input(n) is proportional to the batch of a
rank. exposed(n) is proportional to the fitted time of all communication, because the hidden share
of communication is assumed to stay the same. The hidden time cannot exceed own(n). If n is the
number of ranks of the largest run, T(n) is the measured step time.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import median
from typing import Any, Literal, NamedTuple

from tutti.measure.collective_bandwidth import OPERATIONS, fit_alpha_beta, squared_error
from tutti.scale.scale_runs import MeasuredRun

Mode = Literal["strong", "weak"]

# For each of these values, the forecast gives the smallest number of ranks with an efficiency below
# the value.
LIMITS = (0.9, 0.8, 0.5)
MAX_RANKS = 4096
_DOUBLINGS = 4
# With more ranks there are more replicas, so the process groups of these axes keep their size.
_FIXED_AXES = ("tp", "pp")


@dataclass(frozen=True)
class CommPoint:
    """The median time of a collective, without waiting, at one number of ranks and message size."""

    op: str
    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class CommFit:
    """The fitted α and β. With one or two points `r2` is None, because the fit can be exact."""

    alpha_s: float
    beta_s_per_byte: float
    r2: float | None
    points: tuple[CommPoint, ...]

    @property
    def best_case(self) -> bool:
        """Whether all messages have one size and the fit attributes all time to bandwidth.

        With more ranks, the bandwidth term grows less than the latency term, so a forecast from
        this fit is a best case.
        """
        return not self.alpha_s and len({point.bytes for point in self.points}) < 2

    def seconds(self, op: str, ranks: int, size: float) -> float:
        rounds, moved = _rounds_and_bytes(op, ranks, size)
        return self.alpha_s * rounds + self.beta_s_per_byte * moved

    def row(self) -> dict[str, Any]:
        """Return the value of `fit` in the JSON."""
        return asdict(self) | {"best_case": self.best_case}


def comm_points(runs: Iterable[Sequence[Mapping[str, Any]]]) -> list[CommPoint]:
    """Return one point per operation, number of ranks and message size in the `comm[]` rows."""
    times: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for row in chain.from_iterable(runs):
        # A collective that was not matched between the ranks is left out, because its time includes
        # waiting. An operation of unknown message size is left out, unless it is a barrier.
        has_size = row["op"] in OPERATIONS and (row["bytes"] or row["op"] == "barrier")
        matched = row["matched"] == row["count"]
        if has_size and matched and row["ranks"] > 1 and row["transfer_s"]["p50"] > 0:
            times[row["op"], row["ranks"], row["bytes"] or 0].append(row["transfer_s"]["p50"])
    return [CommPoint(*key, median(values)) for key, values in sorted(times.items())]


def fit_comm(points: Sequence[CommPoint]) -> CommFit | None:
    """Fit α and β to the points.

    The fit minimizes the relative error, so that small messages count as much as large messages.
    """
    if not points:
        return None
    rows = [
        (point.seconds**-2, *_rounds_and_bytes(point.op, point.ranks, point.bytes), point.seconds)
        for point in points
    ]
    best = fit_alpha_beta(rows)
    # r² compares the fit with a model in which every message takes the same time.
    constant = [(weight, 1.0, 0.0, seconds) for weight, _, _, seconds in rows]
    total = squared_error(constant, fit_alpha_beta(constant))
    r2 = 1 - squared_error(rows, best) / total if len(points) > 2 and total > 1e-12 else None
    return CommFit(*best, r2, tuple(points))


def _rounds_and_bytes(op: str, ranks: int, size: float) -> tuple[float, float]:
    if ranks < 2:
        return 0.0, 0.0
    rounds = 1.0 if op == "send_recv" else math.log2(ranks)
    return rounds, OPERATIONS[op].bus_factor(ranks) * size


class Ratio(NamedTuple):
    """A run and the base run, which is the run with the fewest ranks in the same repeat.

    `ideal` is the ideal step time of the run, divided by the step time of the base run.
    """

    run: MeasuredRun
    base: MeasuredRun
    ideal: float

    @property
    def efficiency(self) -> float:
        return self.ideal * self.base.step.seconds / self.run.step.seconds


class EfficiencyModel:
    """Predicts the efficiency with n ranks from the runs with the fewest and the most ranks."""

    def __init__(self, ends: Ratio, fit: CommFit, mode: Mode) -> None:
        self._ends, self._fit, self._mode = ends, fit, mode
        self._largest, step = ends.run, ends.run.step
        self._own, base_own = (
            run.step.seconds - run.step.total("input", "exposed", "wait", "bubble")
            for run in (ends.run, ends.base)
        )
        self._input, self._exposed = step.total("input"), step.total("exposed")
        self._hidden = ends.run.hidden * step.seconds
        self._busy_share = 1 - step.total("wait", "bubble") / step.seconds
        proportional = 0.0  # the time of own work that is proportional to the batch of a rank
        if mode == "strong":
            batch = ends.base.ranks / ends.run.ranks  # batch of a rank, relative to the base run
            proportional = max(0.0, (base_own - self._own) / (1 - batch)) * batch
        self._constant = max(0.0, self._own - proportional)
        self._comm_at_largest = self._comm_seconds(ends.run.ranks)

    def efficiency(self, ranks: int) -> float:
        batch = self._batch(ranks)
        own_seconds = self._constant + (self._own - self._constant) * batch
        growth = self._comm_seconds(ranks) / self._comm_at_largest if self._comm_at_largest else 1.0
        exposed = max(self._exposed * growth, (self._exposed + self._hidden) * growth - own_seconds)
        seconds = (own_seconds + self._input * batch + exposed) / self._busy_share
        return self._ends.ideal * batch * self._ends.base.step.seconds / seconds

    def _batch(self, ranks: int) -> float:
        """Return (batch of a rank) / (batch of a rank in the run with the most ranks)."""
        return self._largest.ranks / ranks if self._mode == "strong" else 1.0

    def _comm_seconds(self, ranks: int) -> float:
        """Return the fitted seconds of the largest run's collectives, if `ranks` ranks ran them."""
        total = 0.0
        for row in self._largest.comm:
            if row["op"] not in OPERATIONS or row["ranks"] < 2:
                continue
            group, size = round(row["ranks"] * ranks / self._largest.ranks), row["bytes"] or 0
            if row.get("axis") in _FIXED_AXES:  # activations; their size follows the batch
                group, size = row["ranks"], size * self._batch(ranks)
            total += row["count"] * self._fit.seconds(row["op"], group, size)
        return total


def forecast(
    measured: Sequence[tuple[int, float]],
    ends: Ratio | None,
    fit: CommFit | None,
    mode: Mode | None,
) -> dict[str, Any]:
    """Return the value of `forecast` in the JSON.

    `measured` is a list of (number of ranks, efficiency), in ascending order. `ends` contains the
    run with the fewest ranks and the run with the most ranks. `mode` is None if the number of
    samples per step is neither constant nor proportional to the number of ranks.
    """
    if len(measured) < 2 or ends is None:
        return no_forecast("a forecast needs runs with at least two numbers of ranks")
    if fit is None:
        return no_forecast("no communication between ranks was recorded")
    if mode is None:
        return no_forecast(
            "the number of samples per step is neither constant (strong scaling) nor proportional "
            "to the number of ranks (weak scaling)"
        )
    model = EfficiencyModel(ends, fit, mode)
    largest = ends.run.ranks
    shown = [largest << n for n in range(1, _DOUBLINGS + 1) if largest << n <= MAX_RANKS]
    curve = {ranks: model.efficiency(ranks) for ranks in range(largest + 1, MAX_RANKS + 1)}
    below = {}
    for limit in LIMITS:
        under = (ranks for ranks, value in (*measured, *curve.items()) if value < limit)
        below[str(limit)] = next(under, None)
    best = ", at best (all messages have one size, so the latency is unknown)" * fit.best_case
    return {
        "rows": [{"ranks": ranks, "efficiency": curve[ranks]} for ranks in shown],
        "below": below,
        "best_case": fit.best_case,
        "reason": f"forecast from {ends.base.ranks} and {largest} ranks{best}. It assumes that all "
        "links have the same speed, that every rank has its own device, and that the hidden share "
        "of communication and the waiting share of the step stay the same",
    }


def no_forecast(reason: str) -> dict[str, Any]:
    """Return the value of `forecast` in the JSON if no forecast is possible."""
    return {"rows": [], "below": {}, "best_case": False, "reason": f"no forecast: {reason}"}
