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

from tutti.bench.formulas import OPERATIONS


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
    # Divided by its own time, each point says: α × a + β × b = 1.
    scaled = []
    for point in points:
        rounds, moved = _terms(point.op, point.ranks, point.bytes)
        scaled.append((rounds / point.seconds, moved / point.seconds))
    aa = sum(a * a for a, _ in scaled)
    bb = sum(b * b for _, b in scaled)
    ab = sum(a * b for a, b in scaled)
    a1, b1 = (sum(each[side] for each in scaled) for side in (0, 1))
    candidates = [(0.0, b1 / bb)] if bb else []
    candidates += [(a1 / aa, 0.0)] if aa else []
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        both = ((a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant)
        if min(both) >= 0:
            candidates = [both]

    def error(pair: tuple[float, float]) -> float:
        return sum((pair[0] * a + pair[1] * b - 1) ** 2 for a, b in scaled)

    # Of one kind of message both explain all: then it is bandwidth.
    best = candidates[0]
    for other in candidates[1:]:
        best = other if error(other) < error(best) - 1e-9 else best
    # Against the best time that knows nothing of sizes: weights are those of the fit.
    weights = [1 / point.seconds for point in points]
    level = sum(weights) / sum(each * each for each in weights)
    blind = sum((level * each - 1) ** 2 for each in weights)
    r2 = 1 - error(best) / blind if len(points) > 2 and blind > 1e-12 else None
    return Fit(*best, r2, tuple(points))


def _terms(op: str, ranks: int, size: float) -> tuple[float, float]:
    """Rounds, and bytes over the slowest link."""
    if ranks < 2:
        return 0.0, 0.0
    rounds = 1.0 if op == "send_recv" else math.log2(ranks)
    return rounds, OPERATIONS[op].bus_factor(ranks) * size
