"""The harness of `tutti bench pairs`: each round times both sides of a pair and gives their ratio.

In a round, each side makes a few calls. Even rounds start with the baseline, and odd rounds start
with the optimized form. The time of a side in a round is the time of its slowest rank. A
disturbance longer than a round affects both sides, so the ratio varies less than the times. The
speed-up is the median of the ratios over all rounds. The spread is the interval between the first
and the third quartile of the ratios.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tutti.bench import Unsupported
from tutti.bench.pairs import Pair, PairEntry, Setting
from tutti.bench.rank_control import RankControl, try_on_all_ranks
from tutti.measure.spread import percentile
from tutti.measure.timing import no_garbage_collection
from tutti.world.errors import UsageError

_MIN_ROUNDS = 6
_MAX_CALLS = 1000
# If a call is shorter, one untimed call before each timed turn warms up caches and threads.
_LONG_CALL_SECONDS = 0.05

_STATISTICS = ("baseline_ms", "optimized_ms", "speedup", "spread")
Row = dict[str, Any]
Result = TypeVar("Result")
Snapshot = tuple[list[Tensor], str]


@dataclass
class _Side:
    call: Callable[[], Any]
    seconds: float = 0.0  # estimated time of one call
    calls: int = 1  # number of calls per round
    rounds: list[float] = field(default_factory=list)  # seconds per call in each round


@dataclass
class PairedRuns:
    """Measures pairs one after the other and collects one row per pair. All ranks have all rows."""

    setting: Setting
    control: RankControl
    budget: float  # seconds per pair
    max_rounds: int
    rows: list[Row] = field(default_factory=list)
    stopped: bool = False

    def run(self, entry: PairEntry) -> None:
        """Measure a pair, and add its row unless the run was stopped. All ranks must call it."""
        row = self._measure(entry)
        if not self.stopped:
            self.rows.append(row)

    def add_failed(self, entry: PairEntry, error: str) -> None:
        """Add a row for a pair whose ranks crashed and were started again."""
        check = f"failed: {error.replace('failed: ', '', 1)}"
        named = {"name": entry.name, "about": entry.about}
        self.rows.append({**named, **dict.fromkeys(_STATISTICS), "check": check})

    def _measure(self, entry: PairEntry) -> Row:
        named = {"name": entry.name, "about": entry.about}
        no_statistics = dict.fromkeys(_STATISTICS)
        pair, error = _try_on_all_ranks(lambda: entry.make(self.setting))
        if pair is None:
            return {**named, **no_statistics, "check": error}
        try:
            sides = _Side(pair.baseline), _Side(pair.optimized)
            check, error = _try_on_all_ranks(lambda: self._compare_results(pair))
            if check is None or check.startswith("different"):
                return {**named, **no_statistics, "check": check or error, "note": pair.reason}
            if not self._alternate(*sides):
                return {}
            # Compare the results again, because a timed call may have changed later results.
            check = self._compare_results(pair)
            return {**named, **_statistics(*sides), "check": check, "note": pair.reason}
        finally:
            pair.close()

    def _compare_results(self, pair: Pair) -> str:
        """Call both sides once, and describe the difference. All ranks return the same text."""
        results = [snapshot(call()) for call in (pair.baseline, pair.optimized)]
        error = self.control.max_over_ranks([difference(*results)])[0]
        if error == 0:
            return "equal"
        if error <= pair.tolerance:
            return f"error {error:.2g} (tolerance {pair.tolerance:g})"
        return f"different: error {error:.2g} exceeds the tolerance {pair.tolerance:g}"

    def _alternate(self, baseline: _Side, optimized: _Side) -> bool:
        """Measure all rounds. Return False if a rank received a stop signal."""
        for side in (baseline, optimized):
            side.seconds = self._time(side)
        both = baseline.seconds + optimized.seconds
        rounds = max(_MIN_ROUNDS, min(self.max_rounds, int(self.budget / both)))
        for side in (baseline, optimized):
            share = self.budget / 2 / rounds / side.seconds
            side.calls = min(_MAX_CALLS, max(1, math.ceil(share)))
        for number in range(rounds):
            for side in (baseline, optimized) if number % 2 == 0 else (optimized, baseline):
                if self.control.check_stop():
                    self.stopped = True
                    return False
                if side.seconds < _LONG_CALL_SECONDS:
                    side.call()
                side.rounds.append(self._time(side))
        return True

    def _time(self, side: _Side) -> float:
        """Make the calls of one round. Return the seconds per call on the slowest rank."""
        device = self.setting.device
        synchronize = partial(getattr(torch, device.type).synchronize, device)  # torch.cpu, .cuda
        synchronize()
        with no_garbage_collection():
            started = time.perf_counter()
            for _ in range(side.calls):
                side.call()
            synchronize()
            seconds = time.perf_counter() - started
        return max(1e-9, self.control.max_over_ranks([seconds / side.calls])[0])


def _statistics(baseline: _Side, optimized: _Side) -> Row:
    ratios = [b / o for b, o in zip(baseline.rounds, optimized.rounds, strict=True)]
    low, high = percentile(ratios, 25), percentile(ratios, 75)
    return {
        "baseline_ms": round(median(baseline.rounds) * 1e3, 6),
        "optimized_ms": round(median(optimized.rounds) * 1e3, 6),
        "speedup": round(median(ratios), 4),
        "spread": {"p25": round(low, 4), "p75": round(high, 4)},
        "verdict": "faster" if low > 1 else "slower" if high < 1 else "no difference",
        "rounds": len(ratios),
        "calls_per_round": {"baseline": baseline.calls, "optimized": optimized.calls},
    }


def _try_on_all_ranks(action: Callable[[], Result]) -> tuple[Result | None, str]:
    """Run `action` on every rank. All ranks must call this function.

    Return (result, ""). If any rank raised an exception, return (None, text), where the text starts
    with "skipped: " or "failed: ". If a user's pair fails, the error is reported in the row of the
    pair, and the run continues.
    """

    def attempt() -> Result:
        try:
            return action()
        except Unsupported as error:
            raise UsageError(f"skipped: {error}") from None
        except UsageError as error:
            raise UsageError(f"failed: {error}") from None
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            raise UsageError(f"failed: {type(error).__name__}: {first_line}") from None

    return try_on_all_ranks(attempt)


# ---- Comparing results ----


def snapshot(result: Any) -> Snapshot:
    """Copy a result to the CPU, because the next call may overwrite the result's tensors."""
    leaves, structure = tree_flatten(result)
    for leaf in leaves:
        if not isinstance(leaf, Tensor | bool | int | float | complex):
            found = type(leaf).__name__
            raise UsageError(
                f"a side returned {found}. It must return tensors, numbers, or lists, tuples or "
                "dicts of them"
            )
    return [torch.as_tensor(leaf).detach().to("cpu", copy=True) for leaf in leaves], str(structure)


def difference(baseline: Snapshot, optimized: Snapshot) -> float:
    """Return the largest relative error, max |a - b| / max |a|, over all tensors.

    The error is infinite if the structures or shapes differ, or if a result contains NaN.
    """
    (a, a_structure), (b, b_structure) = baseline, optimized
    if a_structure != b_structure:
        return math.inf
    return max(map(_relative_error, a, b), default=0.0)


def _relative_error(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    error, scale = float((a.to(wide) - b.to(wide)).abs().max()), float(a.to(wide).abs().max())
    if error == 0:
        return 0.0
    return error / scale if scale > 0 and not math.isnan(error) else math.inf
