"""The cost of communication, fitted to the runs, and the efficiency with more ranks than were run.

Fit: t = α × rounds + β × bytes on the slowest link. Rounds are those of a tree (log2 of the ranks),
bytes those of a ring (2 (n − 1) / n × S for an all-reduce): libraries choose one of them by size.
Between two ranks α is the latency of a message and 1 / β the bandwidth.

Forecast, from the smallest and the largest size that were run:

    T(n) = (own(n) + input(n) + exposed(n)) / (1 − share of waiting and bubbles)

own: a rank's own work. In weak scaling it stays as it is at the largest size; in strong scaling one
part of it shrinks with the batch and one does not, and both follow from the two sizes. input
shrinks with the batch. exposed grows like the fitted time of the communication, with the same share
hidden, and never more hidden than there is own work to hide behind. Waiting and bubbles keep their
share of the step. At the largest size T(n) is the measured step.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tutti.measure.alpha_beta import fit_alpha_beta, squared_error
from tutti.measure.bus_bandwidth import OPERATIONS
from tutti.scale.scale_job import Mode

LIMITS = (0.9, 0.8, 0.5)  # efficiencies whose number of ranks is reported
MOST_RANKS = 4096
_DOUBLINGS = 4
# Groups of these axes keep their number of ranks however many replicas there are.
_FIXED_AXES = ("tp", "pp")
_ASSUMPTIONS = (
    "all links are of one class, every rank has its own device, the same share of communication "
    "is hidden, and waiting keeps its share of the step"
)


@dataclass(frozen=True)
class CommPoint:
    """One kind of message and its time, without waiting."""

    op: str
    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class CommFit:
    """`r2` is None for one or two kinds of message: α and β can then fit them exactly."""

    alpha_s: float
    beta_s_per_byte: float
    r2: float | None
    points: tuple[CommPoint, ...]

    @property
    def best_case(self) -> bool:
        """Whether one message size was seen: all time counts as bandwidth, which grows least."""
        return not self.alpha_s and len({point.bytes for point in self.points}) < 2

    def seconds(self, op: str, ranks: int, size: float) -> float:
        rounds, moved = _rounds_and_bytes(op, ranks, size)
        return self.alpha_s * rounds + self.beta_s_per_byte * moved

    def row(self) -> dict[str, Any]:
        """`fit` in the JSON."""
        return asdict(self) | {"best_case": self.best_case}


def comm_points(runs: Iterable[Sequence[Mapping[str, Any]]]) -> list[CommPoint]:
    """A point for each operation, number of ranks and size in the `comm[]` rows of several runs."""
    times: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for comm in runs:
        for row in comm:
            # The time of an unmatched collective includes waiting; without a size there is no S.
            has_size = row["op"] in OPERATIONS and (row["bytes"] or row["op"] == "barrier")
            matched = row["matched"] == row["count"]
            if has_size and matched and row["ranks"] > 1 and row["transfer_s"]["p50"] > 0:
                key = (row["op"], row["ranks"], row["bytes"] or 0)
                times[key].append(row["transfer_s"]["p50"])
    return [CommPoint(*key, median(values)) for key, values in sorted(times.items())]


def fit_comm(points: Sequence[CommPoint]) -> CommFit | None:
    """Least squares of relative errors: small messages count as much as large ones."""
    if not points:
        return None
    rows = [
        (point.seconds**-2, *_rounds_and_bytes(point.op, point.ranks, point.bytes), point.seconds)
        for point in points
    ]
    best = fit_alpha_beta(rows)
    # r² compares with the best constant: one time for every message.
    constant = [(weight, 1.0, 0.0, seconds) for weight, _, _, seconds in rows]
    total = squared_error(constant, fit_alpha_beta(constant))
    r2 = 1 - squared_error(rows, best) / total if len(points) > 2 and total > 1e-12 else None
    return CommFit(*best, r2, tuple(points))


def _rounds_and_bytes(op: str, ranks: int, size: float) -> tuple[float, float]:
    if ranks < 2:
        return 0.0, 0.0
    rounds = 1.0 if op == "send_recv" else math.log2(ranks)
    return rounds, OPERATIONS[op].bus_factor(ranks) * size


@dataclass(frozen=True)
class ScalePoint:
    """A measured size; seconds per step without the profiler."""

    ranks: int
    ideal: float  # ideal step length relative to the base's
    seconds: float
    own: float  # compute, gaps and rest
    input: float
    exposed: float
    hidden: float  # communication behind compute
    stalled_share: float  # waiting and bubbles, as a share of the step
    comm: Sequence[Mapping[str, Any]]


class EfficiencyModel:
    """`efficiency(n)` relative to the base."""

    def __init__(self, base: ScalePoint, largest: ScalePoint, fit: CommFit, mode: Mode) -> None:
        self._base, self._largest, self._fit, self._mode = base, largest, fit, mode
        shrinking = 0.0
        if mode == "strong":
            batch = self._relative_batch(largest.ranks)
            shrinking = max(0.0, (base.own - largest.own) / (1 - batch)) * batch
        self._fixed = max(0.0, largest.own - shrinking)
        self._shrinking = largest.own - self._fixed  # at the largest size
        self._comm_at_largest = self._comm_seconds(largest.ranks)

    def efficiency(self, ranks: int) -> float:
        largest = self._largest
        shrunk = self._relative_batch(ranks) / self._relative_batch(largest.ranks)
        own = self._fixed + self._shrinking * shrunk
        growth = self._comm_seconds(ranks) / self._comm_at_largest if self._comm_at_largest else 1.0
        exposed = max(largest.exposed * growth, (largest.exposed + largest.hidden) * growth - own)
        seconds = (own + largest.input * shrunk + exposed) / (1 - largest.stalled_share)
        ideal = largest.ideal * (shrunk if self._mode == "strong" else 1.0)
        return ideal * self._base.seconds / seconds

    def _relative_batch(self, ranks: int) -> float:
        """A rank's batch relative to the base's."""
        return self._base.ranks / ranks if self._mode == "strong" else 1.0

    def _comm_seconds(self, ranks: int) -> float:
        """The fitted time of all messages of the largest size among more ranks."""
        total = 0.0
        growth = ranks / self._largest.ranks
        shrunk = self._relative_batch(ranks) / self._relative_batch(self._largest.ranks)
        for row in self._largest.comm:
            if row["op"] not in OPERATIONS or row["ranks"] < 2:
                continue
            fixed = row.get("axis") in _FIXED_AXES  # activations: bytes shrink with the batch
            group = row["ranks"] if fixed else round(row["ranks"] * growth)
            size = (row["bytes"] or 0) * (shrunk if fixed else 1.0)
            total += row["count"] * self._fit.seconds(row["op"], group, size)
        return total


def forecast(
    measured: Sequence[tuple[int, float]],
    ends: tuple[ScalePoint, ScalePoint] | None,
    fit: CommFit | None,
    mode: Mode | None,
) -> dict[str, Any]:
    """`forecast` in the JSON. `measured`: ranks and efficiency of the runs, ascending.

    `ends`: the smallest and the largest size. `mode` None: the samples of a step neither stay the
    same nor grow with the ranks.
    """
    if len(measured) < 2 or ends is None:
        return no_forecast("it needs runs with at least two numbers of ranks")
    if fit is None:
        return no_forecast("no communication between ranks was recorded to fit")
    if mode is None:
        return no_forecast(
            "the samples of a step are neither the same with every number of ranks (strong) nor "
            "proportional to it (weak)"
        )
    base, largest = ends
    model = EfficiencyModel(base, largest, fit, mode)
    most = largest.ranks
    shown = [most << n for n in range(1, _DOUBLINGS + 1) if most << n <= MOST_RANKS]
    curve = {ranks: model.efficiency(ranks) for ranks in range(most + 1, MOST_RANKS + 1)}
    below = {}
    for limit in LIMITS:
        under = (ranks for ranks, value in (*measured, *curve.items()) if value < limit)
        below[str(limit)] = next(under, None)
    best = "at best (latency unknown: only one message size seen); " if fit.best_case else ""
    return {
        "rows": [{"ranks": ranks, "efficiency": curve[ranks]} for ranks in shown],
        "below": below,
        "best_case": fit.best_case,
        "reason": f"forecast from {base.ranks} and {most} ranks; {best}it assumes that "
        f"{_ASSUMPTIONS}",
    }


def no_forecast(reason: str) -> dict[str, Any]:
    """`forecast` in the JSON if there is none."""
    return {"rows": [], "below": {}, "best_case": False, "reason": f"no forecast: {reason}"}
