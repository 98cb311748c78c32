"""What is seen of one parameter, one step, one run under a layout: errors, and factors.

No torch in this file: a diagnosis is made of these numbers alone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tutti.parity.tolerance import Tolerance


@dataclass(frozen=True)
class Difference:
    """A tensor a (a parameter's gradient or update, a buffer) against the reference's b."""

    name: str
    error: float
    """max |a − b| / max |b|, the worst of all ranks that hold it."""
    factor: float = 1.0
    """The f for which f·b is nearest to a."""
    residual: float = 0.0
    """max |a − f·b| / max |b|: what the factor does not explain."""
    spread: float = 0.0
    """By how much the factors of ranks differ that should hold the same values."""


@dataclass(frozen=True)
class Scalar:
    """A number a, the loss or the norm, against the reference's b."""

    error: float
    factor: float

    @classmethod
    def between(cls, a: float, b: float) -> "Scalar":
        """|a − b| / |b| and a / b; a number that is not finite is infinitely wrong."""
        if not (math.isfinite(a) and math.isfinite(b)):
            return cls(math.inf, math.nan)
        if b == 0:
            return cls(0.0, 1.0) if a == 0 else cls(math.inf, math.inf)
        return cls(abs(a - b) / abs(b), a / b)


@dataclass(frozen=True)
class StepDifference:
    """One step, in the order in which its values come about: each needs those before it."""

    loss: Scalar
    gradients: Sequence[Difference]
    """Summed over ranks and gathered, before they are clipped."""
    norm: Scalar
    """The global norm by which they were clipped."""
    updates: Sequence[Difference]
    """Parameters after the step, less those at the start."""
    buffers: Sequence[Difference] = ()
    """Buffers after the step: training only writes them, so nothing above depends on them."""
    own_buffers: Sequence[str] = ()
    """Those that are not compared: each data rank has one of its own, and is right to."""

    def within(self, tolerance: Tolerance) -> bool:
        """Whether nothing in this step is further off than rounding explains."""
        return not (
            self.loss.error > tolerance.loss
            or self.norm.error > tolerance.loss
            or wrong(self.gradients, tolerance.gradient)
            or wrong(self.updates, tolerance.update)
            or wrong(self.buffers, tolerance.buffer)
        )


def wrong(differences: Iterable[Difference], tolerance: float) -> list[Difference]:
    """Those above the tolerance; NaN is above any."""
    return [each for each in differences if not each.error <= tolerance]


def worst(differences: Iterable[Difference]) -> Difference:
    """The one with the largest error."""
    return max(differences, key=lambda each: each.error if each.error == each.error else math.inf)


def merged(by_rank: Iterable[Iterable[Difference]]) -> list[Difference]:
    """One difference for each parameter: the worst of the ranks that hold it, and their spread."""
    found: dict[str, list[Difference]] = {}
    for differences in by_rank:
        for each in differences:
            found.setdefault(each.name, []).append(each)
    together = []
    for name, each_rank in found.items():
        bad = worst(each_rank)
        factors = [each.factor for each in each_rank]
        residuals = [each.residual for each in each_rank]
        spread = max(max(factors) - min(factors), max(residuals) - min(residuals))
        together.append(Difference(name, bad.error, bad.factor, bad.residual, spread))
    return together


def of_own_samples(
    by_rank: Sequence[tuple[int, Sequence[Difference]]], tolerance: float
) -> list[str]:
    """Names of what differs between data ranks, and is the same on all ranks of each.

    `by_rank`: the data rank and what was seen there, for every rank.
    """
    apart = {
        each.name
        for one in {data_rank for data_rank, _ in by_rank}
        for each in merged(seen for data_rank, seen in by_rank if data_rank == one)
        if each.spread > tolerance
    }
    everywhere = merged(seen for _, seen in by_rank)
    return [e.name for e in everywhere if e.spread > tolerance and e.name not in apart]
