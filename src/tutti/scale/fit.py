"""What communication costs: t = α × rounds + β × bytes on the slowest link, fitted to runs.

Rounds are those of a tree (log2 of the ranks), bytes those of a ring (2 (n − 1) / n × S for an
all-reduce): libraries choose one or the other by size. Between two ranks α is the latency of a
message and 1 / β the bandwidth.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tutti.measure.bus_bandwidth import OPERATIONS
from tutti.profile.cost import alpha_beta, error


@dataclass(frozen=True)
class Point:
    """An operation of a size, and what it took: waiting left out."""

    op: str
    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """`r2` is None of one or two kinds of message: α and β can be made to meet them exactly."""

    alpha_s: float
    beta_s_per_byte: float
    r2: float | None
    points: tuple[Point, ...]

    @property
    def best_case(self) -> bool:
        """Whether messages of one size are taken for bandwidth alone, which grows least."""
        return not self.alpha_s and len({point.bytes for point in self.points}) < 2

    def seconds(self, op: str, ranks: int, size: float) -> float:
        """What an operation takes among `ranks`."""
        rounds, moved = _terms(op, ranks, size)
        return self.alpha_s * rounds + self.beta_s_per_byte * moved

    def row(self) -> dict[str, Any]:
        """For the JSON."""
        points = [asdict(point) for point in self.points]
        return asdict(self) | {"points": points, "best_case": self.best_case}


def points_in(runs: Iterable[Sequence[Mapping[str, Any]]]) -> list[Point]:
    """The communication of several runs: a point for each operation, size and number of ranks."""
    seen: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for comm in runs:
        for row in comm:
            # What was not matched between ranks includes waiting, and so does the median of a row
            # that has some of it; without a size there is no S.
            known = row["op"] in OPERATIONS and (row["bytes"] or row["op"] == "barrier")
            matched = row["matched"] == row["count"]
            if known and matched and row["ranks"] > 1 and row["transfer_s"]["p50"] > 0:
                key = (row["op"], row["ranks"], row["bytes"] or 0)
                seen[key].append(row["transfer_s"]["p50"])
    return [Point(*key, median(times)) for key, times in sorted(seen.items())]


def fit(points: Sequence[Point]) -> Fit | None:
    """Least squares of relative errors, so that small messages count as much as large ones."""
    if not points:
        return None
    rows = [
        (point.seconds**-2, *_terms(point.op, point.ranks, point.bytes), point.seconds)
        for point in points
    ]
    best = alpha_beta(rows)
    # Against the best time that knows nothing of sizes: it is one for every message.
    level = [(weight, 1.0, 0.0, seconds) for weight, _, _, seconds in rows]
    blind = error(level, alpha_beta(level))
    r2 = 1 - error(rows, best) / blind if len(points) > 2 and blind > 1e-12 else None
    return Fit(*best, r2, tuple(points))


def _terms(op: str, ranks: int, size: float) -> tuple[float, float]:
    """Rounds, and bytes over the slowest link."""
    if ranks < 2:
        return 0.0, 0.0
    rounds = 1.0 if op == "send_recv" else math.log2(ranks)
    return rounds, OPERATIONS[op].bus_factor(ranks) * size
