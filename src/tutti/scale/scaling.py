"""Scaling: throughput, speed-up and efficiency at each size, with spread, and the loss by cause.

Ratios are taken within a repeat, where all sizes had the same machine. A row's efficiency and its
causes are those of the repeat in the middle (the mean of two, if there are two): so they add up,
and the traces of that repeat show them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from tutti.measure.spread import percentile
from tutti.scale.causes import LOSS, OTHER, causes, efficiency
from tutti.scale.fit import Fit, fit, points_in
from tutti.scale.forecast import Size, forecast
from tutti.scale.job import Mode
from tutti.scale.measured import Measured

# Numbers of samples that differ by no more are the same: the last batch of an epoch is smaller.
_ALIKE = 0.05


@dataclass(frozen=True)
class _Pair:
    """A run and the smallest size of the same repeat."""

    run: Measured
    base: Measured
    ideal: float

    @property
    def efficiency(self) -> float:
        return efficiency(self.run.step, self.base.step, self.ideal)


class Scaling:
    """What runs at several sizes say, as far as they were made."""

    def __init__(self, runs: Sequence[Measured], mode: Mode) -> None:
        self.runs = list(runs)
        self.mode = mode
        self.sizes = sorted({run.ranks for run in runs})
        self._counted = all(run.samples for run in runs)

    @property
    def seen_mode(self) -> Mode | None:
        """As the samples say where they are counted, else as --mode does; None is neither."""
        modes: tuple[Mode, ...] = (self.mode, "strong", "weak")
        return next(
            (mode for mode in modes if all(self._fits(run, mode) for run in self.runs)), None
        )

    @property
    def unit(self) -> str:
        """What throughput counts. Without the number of samples it counts steps."""
        if self._counted:
            return "samples/s"
        return "ranks × steps/s" if self.mode == "weak" else "steps/s"

    def throughput(self, run: Measured) -> float:
        """In that unit."""
        alike = run.ranks if self.mode == "weak" else 1
        each = (run.samples if self._counted else alike) or 1
        return each / run.step.seconds

    def rows(self) -> list[dict[str, Any]]:
        """A row for each size of which a ratio is known."""
        return [self._row(ranks) for ranks in self.sizes if self._pairs(ranks)]

    def fit(self) -> Fit | None:
        """α and β from the communication of all runs."""
        return fit(points_in(run.comm for run in self.runs))

    def results(self) -> dict[str, Any]:
        """What the JSON says of one set of flags."""
        rows, line = self.rows(), self.fit()
        ends = None
        if len(rows) > 1:
            last = _middle(self._pairs(rows[-1]["ranks"]))[0]
            ends = (_size(last.base, 1.0), _size(last.run, last.ideal))
        seen = [(row["ranks"], row["efficiency"]) for row in rows]
        return {
            "mode": self.seen_mode or self.mode,
            "unit": self.unit,
            "rows": rows,
            "fit": None if line is None else line.row(),
            "forecast": forecast(seen, ends, line, self.seen_mode),
        }

    def notes(self) -> list[str]:
        """What a reader should know."""
        notes = [note for run in self.runs for note in run.notes]
        if not self._counted:
            notes.append(
                f"samples per step are not known (no DataLoader of torch is used): "
                f"throughput is in {self.unit}, --mode {self.mode} says what the script does"
            )
        taken = f", {self.seen_mode} scaling" if self.seen_mode else ""
        for run in self.runs:
            if not self._fits(run, self.mode):
                base = self._base(run)
                notes.append(
                    f"--mode {self.mode}, but a step has {base.samples:g} samples at {base.ranks} "
                    f"and {run.samples:g} at {run.ranks} ranks: these samples are counted{taken}"
                )
        return list(dict.fromkeys(notes))

    def _base(self, run: Measured) -> Measured:
        smallest = (each for each in self.runs if each.ranks == self.sizes[0])
        return next((each for each in smallest if each.flags == run.flags), run)

    def _fits(self, run: Measured, mode: Mode) -> bool:
        """Whether its samples are those of the mode; where none are counted, --mode is believed."""
        base = self._base(run)
        if not self._counted:
            return mode == self.mode
        wanted = run.ranks / base.ranks if mode == "weak" else 1.0
        return abs((run.samples or 0) / (base.samples or 1) / wanted - 1) <= _ALIKE

    def _pairs(self, ranks: int) -> list[_Pair]:
        """In every repeat that has both: the run of this size and the smallest one."""
        bases = {run.repeat: run for run in self.runs if run.ranks == self.sizes[0]}
        return [
            _Pair(run, bases[run.repeat], self._ideal(run, bases[run.repeat]))
            for run in self.runs
            if run.ranks == ranks and run.repeat in bases
        ]

    def _ideal(self, run: Measured, base: Measured) -> float:
        """f: how long a step would be, as a part of the base's, if nothing were lost."""
        more = run.ranks / base.ranks
        if self._counted:
            return (run.samples or 1) / (base.samples or 1) / more
        return 1.0 if self.mode == "weak" else 1 / more

    def _row(self, ranks: int) -> dict[str, Any]:
        pairs = self._pairs(ranks)
        speeds = sorted(self.throughput(run) for run in self.runs if run.ranks == ranks)
        ratios = sorted(pair.efficiency for pair in pairs)
        chosen = _middle(pairs)
        split = [causes(each.run.step, each.base.step, each.ideal) for each in chosen]
        return {
            "ranks": ranks,
            "samples_per_s": percentile(speeds, 50),
            "samples_per_s_spread": [percentile(speeds, 25), percentile(speeds, 75)],
            "step_s": mean(each.run.step.seconds for each in chosen),
            "speedup": percentile(ratios, 50) * ranks / self.sizes[0],
            "efficiency": percentile(ratios, 50),
            "efficiency_spread": [percentile(ratios, 25), percentile(ratios, 75)],
            "loss": {name: mean(loss[name] for loss, _ in split) for name in LOSS},
            "other": {name: mean(other[name] for _, other in split) for name in OTHER},
            "late": chosen[0].run.late,
            "folder": str(chosen[0].run.folder),
            "repeats": len(speeds),
        }


def _middle(pairs: Sequence[_Pair]) -> list[_Pair]:
    """The one in the middle, or the two."""
    ordered = sorted(pairs, key=lambda pair: pair.efficiency)
    return ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]


def _size(run: Measured, ideal: float) -> Size:
    return Size(run.ranks, run.step, ideal, run.hidden, run.comm)
