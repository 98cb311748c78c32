"""The harness: both sides of a pair take turns, and each round gives one ratio.

In a round each side makes a few calls; who begins changes from round to round, so that neither
always finds the machine as the other left it. A side's time in a round is that of its slowest rank.
What disturbs the machine for longer than a round disturbs both sides, so the ratio of a round is
steadier than either time. The speed-up is the median of the rounds' ratios, its spread reaches from
their lower to their upper quartile: half of all rounds lie within it.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from tutti.bench.control import Control
from tutti.bench.pairs.catalogue import Listed
from tutti.bench.pairs.likeness import difference, snapshot
from tutti.bench.pairs.pair import Pair, Setting
from tutti.bench.unsupported import Unsupported
from tutti.measure.spread import percentile
from tutti.measure.timing import no_garbage_collection
from tutti.world.errors import UsageError
from tutti.world.exchange import gather_json

_FEWEST_ROUNDS = 6
_MOST_CALLS = 1000
# Other code ran since a side's last turn: an untimed call brings its data and threads back. Where a
# call is this long, what it finds cold no longer matters.
_LONG_CALL_SECONDS = 0.05

Row = dict[str, Any]
Result = TypeVar("Result")


@dataclass
class _Side:
    call: Callable[[], Any]
    seconds: float = 0.0  # of one call, roughly
    calls: int = 1  # in each round
    rounds: list[float] = field(default_factory=list)  # seconds of a call, by round


class Duels:
    """Measures pairs one after the other and keeps their rows; the same on all ranks."""

    def __init__(self, setting: Setting, control: Control, budget: float, rounds: int) -> None:
        self.rows: list[Row] = []
        self.stopped = False
        self.complete = False  # nothing is missing
        self._setting = setting
        self._control = control
        self._budget = budget
        self._rounds = rounds

    def run(self, chosen: Iterable[Listed], report: Callable[[Row], None]) -> None:
        """Measure pairs; `report` gets the row of each as soon as it is known. Collective."""
        for listed in chosen:
            row = self._row(listed)
            if self.stopped:
                return
            self.rows.append(row)
            report(row)
        self.complete = True

    def _row(self, listed: Listed) -> Row:
        named = {"name": listed.name, "about": listed.about}
        nothing = dict.fromkeys(("baseline_ms", "optimized_ms", "speedup", "spread"))
        pair, trouble = _together(lambda: listed.load()(self._setting))
        if pair is None:
            return {**named, **nothing, "check": trouble}
        try:
            sides = _Side(pair.baseline), _Side(pair.optimized)
            check, trouble = _together(lambda: self._compare(pair))
            if check is None or check.startswith("different"):
                return {**named, **nothing, "check": check or trouble, "note": pair.reason}
            if not self._take_turns(*sides):
                return {}
            # What was timed is what is checked: the calls of the last round count, too.
            return {**named, **_figures(*sides), "check": self._compare(pair), "note": pair.reason}
        finally:
            pair.close()

    def _compare(self, pair: Pair) -> str:
        """Call both sides and say how their results compare; the same words on all ranks."""
        results = []
        for call in (pair.baseline, pair.optimized):
            results.append(snapshot(call()))
        apart = self._control.largest([difference(*results)])[0]
        if apart == 0:
            return "equal"
        if apart <= pair.tolerance:
            return f"within {pair.tolerance:g}: {apart:.2g}"
        return f"different: {apart:.2g}, allowed is {pair.tolerance:g}"

    def _take_turns(self, baseline: _Side, optimized: _Side) -> bool:
        """All rounds; False when somebody asked to stop."""
        for side in (baseline, optimized):
            side.seconds = self._timed(side)  # warmer than the first call, which was the check's
        both = baseline.seconds + optimized.seconds
        rounds = max(_FEWEST_ROUNDS, min(self._rounds, int(self._budget / both)))
        for side in (baseline, optimized):
            share = self._budget / 2 / rounds / side.seconds
            side.calls = min(_MOST_CALLS, max(1, math.ceil(share)))
        for number in range(rounds):
            for side in (baseline, optimized) if number % 2 == 0 else (optimized, baseline):
                if self._control.meet():
                    self.stopped = True
                    return False
                if side.seconds < _LONG_CALL_SECONDS:
                    side.call()
                side.rounds.append(self._timed(side))
        return True

    def _timed(self, side: _Side) -> float:
        """Seconds of one call, the mean over a round's, as the slowest rank saw it."""
        self._finish()
        with no_garbage_collection():
            began = time.perf_counter()
            for _ in range(side.calls):
                side.call()
            self._finish()
            seconds = time.perf_counter() - began
        return max(1e-9, self._control.largest([seconds / side.calls])[0])

    def _finish(self) -> None:
        if self._setting.on_gpu:
            torch.cuda.synchronize(self._setting.device)


def _figures(baseline: _Side, optimized: _Side) -> Row:
    ratios = sorted(b / o for b, o in zip(baseline.rounds, optimized.rounds, strict=True))
    low, high = percentile(ratios, 25), percentile(ratios, 75)
    return {
        "baseline_ms": _middle_ms(baseline),
        "optimized_ms": _middle_ms(optimized),
        "speedup": round(percentile(ratios, 50), 4),
        "spread": {"p25": round(low, 4), "p75": round(high, 4)},
        "verdict": "faster" if low > 1 else "slower" if high < 1 else "no difference",
        "rounds": len(ratios),
        "calls_per_round": {"baseline": baseline.calls, "optimized": optimized.calls},
    }


def _middle_ms(side: _Side) -> float:
    return round(percentile(sorted(side.rounds), 50) * 1e3, 6)


def _together(action: Callable[[], Result]) -> tuple[Result | None, str]:
    """Its result, or None and "skipped: …" or "failed: …" where it is so on any rank."""
    result: Result | None = None
    trouble = ""
    try:
        result = action()
    except Unsupported as error:
        trouble = f"skipped: {error}"
    except UsageError as error:
        trouble = f"failed: {error}"
    except Exception as error:  # a pair may be anybody's: its failure is a row, not the run's end
        said = str(error).splitlines()
        trouble = f"failed: {type(error).__name__}: {said[0] if said else ''}"
    troubles = [each for each in gather_json(trouble) if each]
    if not troubles:
        return result, ""
    return None, next((each for each in troubles if each.startswith("failed")), troubles[0])
