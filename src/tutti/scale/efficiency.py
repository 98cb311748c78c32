"""Speed-up and efficiency for each number of ranks, and the lost efficiency by cause.

A step with N ranks takes T(N) seconds. The ideal step time is f × T(base), where base is the
smallest number of ranks. In weak scaling every rank keeps its batch, and f is 1. In strong scaling
the ranks divide one batch, and f is base / N. Efficiency is E = f × T(base) / T(N). A step time is
the sum of its parts (compute, waiting, …), so the lost efficiency is a sum over the parts:

    1 − E = Σ (part(N) − f × part(base)) / T(N)

One repeat runs every number of ranks once. Runs are compared only within one repeat, because the
speed of the machine may change between repeats. A row has the results for one number of ranks: the
medians and the quartiles, over the repeats, of the efficiency and of each cause. The medians of the
causes do not add up exactly to the median of the lost efficiency. The difference is added to
`unexplained`, so the causes of a row add up to its lost efficiency.

The noise of a row is the largest of these values:

    1 % of the step, or 5 % if fewer than 3 repeats do not show the spread
    1.82 × IQR / √repeats, where IQR is the interquartile range of the efficiency: half the width of
        the 95 % confidence interval of the median, if the repeats are normally distributed
    2 × |unexplained|

The verdict is a sentence about a row. It names a cause if the cause is larger than the noise and
both of its quartiles have the same sign. Larger causes are named first. Two causes count as equally
large if they differ by at most the noise, or if the ranges between their quartiles overlap. Equally
large causes are named in the order of the table, so that noise does not change their order. A
verdict is clear if there are at least 3 repeats and one of two conditions holds: the largest cause
is named, or the noise and all causes are at most 3 % of the step.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from tutti.measure.spread import percentile, quartiles
from tutti.scale.forecast import Mode, Ratio, comm_points, fit_comm, forecast
from tutti.scale.scale_runs import MeasuredRun, MeasuredStep

_PART_OF_CAUSE = {
    "exposed_comm": "exposed",
    "wait": "wait",
    "bubble": "bubble",
    "input": "input",
    "compute": "compute",
    "gaps": "host_gap",
    "rest": "rest",
    "slow_steps": "slow_steps",
    "unexplained": "unexplained",
}
CAUSE_OF_PART = {part: cause for cause, part in _PART_OF_CAUSE.items()}
LOSS_CAUSES = ("exposed_comm", "wait", "bubble", "input", "compute", "other")
OTHER_CAUSES = ("gaps", "rest", "slow_steps", "unexplained")  # their sum is the cause `other`
MIN_REPEATS = 3  # quartiles of fewer repeats do not show the spread
_MIN_NOISE, _NOISE_WITHOUT_SPREAD, _CLEAR_NOISE = 0.01, 0.05, 0.03
# For n normally distributed samples, the 95 % confidence limits of the median are
# ± 1.96 × 1.253 σ / √n, and the interquartile range (IQR) is 1.349 σ.
_CONFIDENCE = 1.96 * 1.253 / 1.349
# Two runs have the same number of samples per step if the relative difference is at most this
# value. A small difference is allowed, because the last batch of an epoch may be smaller.
_SAME_SAMPLES = 0.05


def loss_by_cause(step: MeasuredStep, base: MeasuredStep, ideal: float) -> dict[str, float]:
    """Return {cause: lost share of the step}. A gain is a negative loss.

    The cause `other` is split into OTHER_CAUSES.
    """
    return {
        cause: (step.parts[part] - ideal * base.parts[part]) / step.seconds
        for cause, part in _PART_OF_CAUSE.items()
    }


def significance(
    losses: Sequence[Mapping[str, float]], efficiencies: Sequence[float]
) -> dict[str, Any]:
    """Return medians and quartiles over the repeats, the noise, and the causes above the noise.

    `repeats_needed` estimates the number of repeats that make the verdict clear. The estimate
    assumes that the noise is proportional to 1 / √repeats.
    """
    lost, count = 1 - median(efficiencies), len(efficiencies)
    causes = {name: median(loss[name] for loss in losses) for name in losses[0]}
    causes["unexplained"] = lost - sum(v for name, v in causes.items() if name != "unexplained")
    spread = {name: list(quartiles([loss[name] for loss in losses])) for name in causes}
    low, high = quartiles(efficiencies)
    least = _MIN_NOISE if count >= MIN_REPEATS else _NOISE_WITHOUT_SPREAD
    unexplained = abs(causes["unexplained"])
    noise = max(least, _CONFIDENCE * (high - low) / math.sqrt(count), 2 * unexplained)
    candidates = sorted(causes.keys() - {"unexplained"}, key=lambda name: -abs(causes[name]))
    named = [
        name
        for name in _by_size(causes, spread, noise)
        if abs(causes[name]) > noise and spread[name][0] * spread[name][1] > 0
    ]
    largest = abs(causes[candidates[0]])
    small = max(noise, largest) <= _CLEAR_NOISE
    clear = count >= MIN_REPEATS and (candidates[0] in named or small)
    needed = math.ceil(count * (noise / max(largest, _CLEAR_NOISE)) ** 2)
    return {
        "causes": causes,
        "quartiles": spread,
        "noise": noise,
        "named": named,
        "clear": clear,
        "repeats_needed": count if clear else max(needed, count + 2, MIN_REPEATS),
    }


def _by_size(
    causes: Mapping[str, float], spread: Mapping[str, Sequence[float]], noise: float
) -> list[str]:
    """Return the causes, largest first. Equally large causes keep the order of `causes`."""

    sizes = {name: sorted(map(abs, (*spread[name], causes[name]))) for name in causes}
    left = [name for name in causes if name != "unexplained"]
    result = []
    while left:
        largest = max(left, key=lambda name: abs(causes[name]))
        limit = min(sizes[largest][0], abs(causes[largest]) - noise)
        first = next(name for name in left if name == largest or sizes[name][-1] >= limit)
        result.append(first)
        left.remove(first)
    return result


class Scaling:
    """The results of runs with several numbers of ranks."""

    def __init__(self, runs: Sequence[MeasuredRun], mode: Mode) -> None:
        self.runs = list(runs)
        self.mode = mode
        self.sizes = sorted({run.ranks for run in runs})
        self._counted = all(run.samples for run in runs)

    @property
    def actual_mode(self) -> Mode | None:
        """The mode (weak or strong) that agrees with the measured numbers of samples per step.

        The mode is None if neither mode agrees. If the numbers of samples are unknown, the mode is
        the value of --mode.
        """
        modes: tuple[Mode, ...] = (self.mode, "strong", "weak")
        return next((mode for mode in modes if all(self._fits(r, mode) for r in self.runs)), None)

    @property
    def unit(self) -> str:
        """The unit of throughput: samples/s, or steps/s if the number of samples is unknown."""
        steps = "ranks × steps/s" if self.mode == "weak" else "steps/s"
        return "samples/s" if self._counted else steps

    def throughput(self, run: MeasuredRun) -> float:
        per_step = run.ranks if self.mode == "weak" else 1
        return ((run.samples if self._counted else per_step) or 1) / run.step.seconds

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per number of ranks, if at least one repeat has this and the base run."""
        return [self._row(ranks) for ranks in self.sizes if self._ratios(ranks)]

    def results(self) -> dict[str, Any]:
        """Return the results of one set of flags, with the keys of the JSON."""
        rows, fit = self.rows(), fit_comm(comm_points(run.comm for run in self.runs))
        ends = _middle(self._ratios(rows[-1]["ranks"]))[0] if len(rows) > 1 else None
        measured = [(row["ranks"], row["efficiency"]) for row in rows]
        return {
            "mode": self.actual_mode or self.mode,
            "unit": self.unit,
            "rows": rows,
            "fit": None if fit is None else fit.row(),
            "forecast": forecast(measured, ends, fit, self.actual_mode),
        }

    def notes(self) -> list[str]:
        notes = [note for run in self.runs for note in run.notes]
        if not self._counted:
            notes.append(
                "the number of samples per step is unknown (no torch DataLoader is used), so "
                f"throughput is in {self.unit}, and the script is assumed to scale as --mode "
                f"{self.mode} states"
            )
        actual = f" ({self.actual_mode} scaling)" if self.actual_mode else ""
        for run in self.runs:
            if not self._fits(run, self.mode):
                base = self._base(run)
                notes.append(
                    f"--mode {self.mode} does not agree with the number of samples per step, "
                    f"which is {base.samples:g} with {base.ranks} ranks and {run.samples:g} with "
                    f"{run.ranks} ranks. The results use these numbers{actual}."
                )
        return list(dict.fromkeys(notes))

    def _base(self, run: MeasuredRun) -> MeasuredRun:
        smallest = (other for other in self.runs if other.ranks == self.sizes[0])
        return next((other for other in smallest if other.flags == run.flags), run)

    def _fits(self, run: MeasuredRun, mode: Mode) -> bool:
        """Return whether the number of samples per step agrees with `mode`.

        If the number of samples is unknown, return whether `mode` is the value of --mode.
        """
        base = self._base(run)
        if not self._counted:
            return mode == self.mode
        expected = run.ranks / base.ranks if mode == "weak" else 1.0
        return abs((run.samples or 0) / (base.samples or 1) / expected - 1) <= _SAME_SAMPLES

    def _ratios(self, ranks: int) -> list[Ratio]:
        """Return one Ratio per repeat: the run with `ranks` ranks and the base run of the repeat.

        A repeat in which one of the two runs is missing is left out.
        """
        bases = {run.repeat: run for run in self.runs if run.ranks == self.sizes[0]}
        ratios = []
        for run in self.runs:
            if run.ranks == ranks and (base := bases.get(run.repeat)) is not None:
                growth = ranks / base.ranks
                ideal = 1.0 if self.mode == "weak" else 1 / growth
                if self._counted:
                    ideal = (run.samples or 1) / (base.samples or 1) / growth
                ratios.append(Ratio(run, base, ideal))
        return ratios

    def _row(self, ranks: int) -> dict[str, Any]:
        ratios = self._ratios(ranks)
        speeds = [self.throughput(run) for run in self.runs if run.ranks == ranks]
        efficiencies = [ratio.efficiency for ratio in ratios]
        chosen = _middle(ratios)
        losses = [loss_by_cause(run.step, base.step, ideal) for run, base, ideal in ratios]
        result = significance(losses, efficiencies)
        causes, spread = result["causes"], result["quartiles"]
        other = {name: causes[name] for name in OTHER_CAUSES}
        others = [sum(loss[name] for name in OTHER_CAUSES) for loss in losses]
        return {
            "ranks": ranks,
            "samples_per_s": percentile(speeds, 50),
            "samples_per_s_spread": [percentile(speeds, 25), percentile(speeds, 75)],
            "step_s": fmean(ratio.run.step.seconds for ratio in chosen),
            "speedup": percentile(efficiencies, 50) * ranks / self.sizes[0],
            "efficiency": percentile(efficiencies, 50),
            "efficiency_spread": [percentile(efficiencies, 25), percentile(efficiencies, 75)],
            "loss": {name: causes[name] for name in LOSS_CAUSES if name != "other"}
            | {"other": sum(other.values())},
            "other": other,
            "loss_quartiles": spread | {"other": list(quartiles(others))},
            **{key: result[key] for key in ("noise", "named", "clear", "repeats_needed")},
            "late": _most_common(
                [ratio.run.late for ratio in ratios],
                key=lambda late: (late["rank"], late["steady"], late["period"]),
                size=lambda late: late["cost_s"]["typical"],
            ),
            "slow_steps": _most_common(
                [ratio.run.slow for ratio in ratios],
                key=lambda slow: slow["period"],
                size=lambda slow: slow["excess_s"],
            ),
            "folder": str(chosen[0].run.folder),
            "repeats": len(speeds),
        }


def _middle(ratios: Sequence[Ratio]) -> list[Ratio]:
    """Return the ratio with the median efficiency. If the number is even, return the middle two."""
    ordered = sorted(ratios, key=lambda ratio: ratio.efficiency)
    return ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]


def _most_common(
    rows: Sequence[dict[str, Any] | None],
    key: Callable[[dict[str, Any]], Any],
    size: Callable[[dict[str, Any]], float],
) -> dict[str, Any] | None:
    """Return the row of median size among the rows with the most common key.

    Each repeat has a row or None. The result is None if most repeats have no row.
    """
    present = [row for row in rows if row is not None]
    if not present or 2 * len(present) < len(rows):
        return None
    ((common, _),) = Counter(map(key, present)).most_common(1)
    found = sorted((row for row in present if key(row) == common), key=size)
    return found[(len(found) - 1) // 2]
