"""Finds faster settings of a training job by timing short runs on this machine: `tutti tune`.

The search changes one setting at a time. It keeps a change only if the gain is larger than the
variation between runs. Candidates for the next setting include all changes that were kept. A
candidate first runs once, and is dropped if its step is much slower than the best step so far.
Otherwise the candidate (B) and the best settings (A) run alternately, in the order AB BA AB. At the
end, the best settings and the original settings run alternately. The reported gain comes only from
this final comparison.

If a candidate fails, for example because memory is exhausted, its row of the result contains the
error. Every run is a separate job with a time limit, so a failed run leaves no processes behind.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tutti.measure.spread import quartiles
from tutti.measure.units import format_seconds
from tutti.profile.try_advice import TimedRun, change_text, time_run, with_flags
from tutti.world.errors import UsageError

Change = dict[str, Any]
"""The changed settings of a run: `flags` of tutti train, or the arguments of DDP, FSDP2 and
DataLoader that profile/program_settings.py can change. An empty dict means the original
settings."""
Candidates = Callable[[str, Change, TimedRun], Iterable[Change]]
"""A function (name of a setting, best changes so far, first run) → changes to try."""

_TIMED_SECONDS, _MIN_STEPS, _MAX_STEPS = 2.0, 8, 60
_MUCH_SLOWER = 1.1  # a candidate is dropped if its first run is slower by this factor
_LEAST_GAIN = 0.01  # minimum gain of a kept change, as a share of the step time
# The time limit of a run is _LIMIT_FACTOR × the longest run so far, but at least _SHORTEST_LIMIT
# seconds.
_LIMIT_FACTOR, _SHORTEST_LIMIT = 8, 120.0
_COMPARED_LOSSES = 5


@dataclass
class Search:
    """The state of one search."""

    command: Sequence[str]
    candidates: Candidates
    settings: Sequence[str]  # names of the settings, in the order in which they are tried
    folder: Path  # for the output and traces of all runs
    budget_s: float
    # Maximum relative change of the losses. None means that the program's losses are unknown.
    loss_tolerance: float | None = None
    pairs: int = 3  # pairs of runs that compare a candidate with the best settings
    # Pairs of runs in the final comparison. If the budget is short, there are fewer pairs, but at
    # least `pairs`.
    final_pairs: int = 5
    rows: list[dict[str, Any]] = field(default_factory=list)
    stopped: bool = False  # whether Ctrl-C stopped the search

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._steps = _MIN_STEPS
        self._runs = 0
        self._longest = 0.0  # seconds of the longest run in a comparison
        self._losses: list[float] = []  # the losses of the first run

    def execute(self) -> dict[str, Any]:
        """Try candidates until none is left or the budget is used. Return the result."""
        first = self._run({}, compared=True)
        if first.code or first.step_s is None:
            raise UsageError(
                f"the job cannot be tuned, because its first run failed: {_failure(first)}. See "
                f"{first.log}."
            )
        self._losses = self._read_losses(first)
        self._steps = min(_MAX_STEPS, max(_MIN_STEPS, round(_TIMED_SECONDS / first.step_s)))
        report(f"original settings: {1e3 * first.step_s:.2f} ms per step")
        best: Change = {}
        best_s = first.step_s
        try:
            for setting in self.settings:
                for change in self.candidates(setting, best, first):
                    # If a change was kept, also reserve time for the final comparison.
                    runs = 1 + 2 * self.pairs * (2 if best else 1)
                    if not self._has_time_for(runs):
                        report(self._budget_is_used(runs))
                        return self._result(best)
                    step_s = self._try(setting, best, best_s, change)
                    if step_s is not None:
                        best, best_s = _merged(best, change), step_s
        except KeyboardInterrupt:
            self.stopped = True
        return self._result(best)

    def _try(self, setting: str, best: Change, best_s: float, change: Change) -> float | None:
        """Compare a candidate with the best settings. Return its step time, or None if not kept."""
        row: dict[str, Any] = {"setting": setting, "change": change_text(change), "kept": False}
        self.rows.append(row)
        row["result"] = self._compare(row, best, best_s, _merged(best, change))
        report(f"{row['change']}: {row['result']}")
        return row["step_s"] if row["kept"] else None

    def _compare(self, row: dict[str, Any], best: Change, best_s: float, candidate: Change) -> str:
        """Fill the candidate's row, and return the result as text."""
        run = self._run(candidate)
        if run.code or run.step_s is None:
            return f"failed: {_failure(run)}"
        row["step_s"] = run.step_s
        if (difference := self._loss_difference(run)) is not None:
            return f"not kept: {difference}"
        if run.step_s > best_s * _MUCH_SLOWER:
            return f"slower: {1e3 * run.step_s:.2f} ms per step"
        pairs = self._pairs(best, candidate, self.pairs)
        if isinstance(pairs, str):
            return f"failed: {pairs}"
        gains = [1 - changed / before for before, changed in pairs]
        low, high = quartiles(gains)
        row |= {"gain_share": median(gains), "gain_share_quartiles": [low, high]}
        row["step_s"] = median(changed for _, changed in pairs)
        row["kept"] = min(gains) > 0 and median(gains) >= _LEAST_GAIN
        verdict = "not kept, slower" if max(gains) <= 0 else "not kept, not faster in every pair"
        verdict = "kept" if row["kept"] else verdict
        return (
            f"{verdict}: gain {100 * median(gains):.1f} % of the step (quartiles "
            f"{100 * low:.1f} to {100 * high:.1f})"
        )

    def _pairs(self, before: Change, after: Change, pairs: int) -> list[tuple[float, float]] | str:
        """Return both step times of each pair of runs, or the reason why a run failed."""
        results = []
        for number in range(pairs):
            seconds: dict[bool, float] = {}
            for changed in (False, True) if number % 2 == 0 else (True, False):
                run = self._run(after if changed else before, compared=True)
                if run.code or run.step_s is None:
                    return _failure(run)
                seconds[changed] = run.step_s
            results.append((seconds[False], seconds[True]))
        return results

    def _result(self, best: Change) -> dict[str, Any]:
        """Compare the best settings with the original settings, and return the whole result."""
        result: dict[str, Any] = {
            "rows": self.rows,
            "change": best,
            "keep": change_text(best),
            "gain": None,
            "complete": not self.stopped,
        }
        if best and not self.stopped:
            pairs = max(self.final_pairs, self.pairs)
            while pairs > self.pairs and not self._has_time_for(2 * pairs):
                pairs -= 1
            try:
                found = self._pairs({}, best, pairs)
            except KeyboardInterrupt:
                found, self.stopped = "stopped by Ctrl-C", True
            if not isinstance(found, str):
                speedups = [before / after for before, after in found]
                low, high = quartiles(speedups)
                result["gain"] = {
                    "before_s": [before for before, _ in found],
                    "after_s": [after for _, after in found],
                    "speedup": {"p50": median(speedups), "quartiles": [low, high]},
                    "clear": min(speedups) > 1,
                }
            else:
                result["complete"] = False
        spent = time.monotonic() - self._began
        return result | {"runs": self._runs, "steps": self._steps, "seconds": spent}

    # -- single runs -------------------------------------------------------------------------------

    def _run(self, change: Change, compared: bool = False) -> TimedRun:
        self._runs += 1
        began = time.monotonic()
        limit_s = max(_SHORTEST_LIMIT, _LIMIT_FACTOR * self._longest)
        run = time_run(
            with_flags(self.command, change.get("flags", {})),
            {name: value for name, value in change.items() if name != "flags"},
            self._steps,
            self.folder / f"run{self._runs}",
            limit_s if self._longest else max(limit_s, self.budget_s),
        )
        if compared:
            self._longest = max(self._longest, time.monotonic() - began)
        return run

    def _has_time_for(self, runs: int) -> bool:
        """Return whether `runs` more runs fit into the remaining budget."""
        return self.budget_s - (time.monotonic() - self._began) > runs * self._longest

    def _budget_is_used(self, runs: int) -> str:
        if self.rows:
            return "--budget is used up: the remaining candidates are not tried"
        needed = (self._runs + runs) * self._longest
        return (
            f"--budget {self.budget_s:.0f}s is too short: a run takes {self._longest:.0f} s, and a "
            f"candidate needs up to {runs} runs. Use --budget {needed:.0f}s or more."
        )

    def _read_losses(self, run: TimedRun) -> list[float]:
        if self.loss_tolerance is None:
            return []
        losses = []
        with (run.log.parent / "run" / "metrics" / "rank0.jsonl").open() as lines:
            for line in lines:
                row = json.loads(line)
                losses += [row["loss"]] if "loss" in row else []
        return losses[:_COMPARED_LOSSES]

    def _loss_difference(self, run: TimedRun) -> str | None:
        """Return a sentence if the first losses differ from the original losses, or None."""
        if self.loss_tolerance is None:
            return None
        pairs = list(zip(self._losses, self._read_losses(run), strict=False))
        largest = max((abs(a - b) / max(abs(a), 1e-12) for a, b in pairs), default=0.0)
        if pairs and largest <= self.loss_tolerance:
            return None
        return f"the losses of the first {len(pairs)} steps change by {100 * largest:.2g} %"


def program_candidates(setting: str, best: Change, first: TimedRun, cores: int) -> Iterator[Change]:
    """Yield the changes to try for one setting of a user's own program.

    These settings do not change the results of the program. `cores` is the number of CPU cores per
    rank.
    """
    program = first.program
    if setting == "bucket size":
        for ddp in program.get("ddp", [])[:1]:
            for size in _spread_out(sorted(map(float, ddp["other_buckets"])), 5):
                yield {"ddp": {"bucket_cap_mb": size}}
    elif setting == "gradient_as_bucket_view":
        for ddp in program.get("ddp", [])[:1]:
            if not ddp["gradient_as_bucket_view"]:
                yield {"ddp": {"gradient_as_bucket_view": True}}
    elif setting == "prefetch" and program.get("fsdp"):
        if not any(unit["forward_prefetch"] for unit in program["fsdp"]):
            yield {"fsdp": {"forward_prefetch": True}}
    elif setting == "loader workers" and program.get("loader"):
        loader = program["loader"]
        for workers in (1, 2, 4, 8):
            if workers != loader["workers"] and workers <= max(1, cores):
                yield {"loader": {"num_workers": workers}, "loader_at": loader["constructed_at"]}


PROGRAM_SETTINGS = ("loader workers", "bucket size", "gradient_as_bucket_view", "prefetch")


def _spread_out(values: Sequence[float], count: int) -> list[float]:
    """Return at most `count` evenly spaced values, including the first and the last value."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def _merged(first: Change, second: Mapping[str, Any]) -> Change:
    merged = dict(first)
    for name, value in second.items():
        merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return merged


def _failure(run: TimedRun) -> str:
    """Return one line that says why a run failed or could not be timed."""
    if run.code == 124:
        return "the run exceeded its time limit"
    if not run.code:
        return "the program took too few steps to be timed"
    lines = [line.strip() for line in run.log.read_text(errors="replace").splitlines()]
    named = [line for line in lines if "rror" in line or "memory" in line]
    # If one rank runs out of memory, the other ranks lose their connection and report errors too.
    causes = [line for line in named if re.search(r"out of ?memory|allocate.*memory", line, re.I)]
    reason = (causes or named or [line for line in lines if line] or [""])[-1]
    return f"exit code {run.code}, {reason[:200]}"


def result_lines(result: Mapping[str, Any], program: bool) -> Iterator[str]:
    """Yield the lines that describe the result of a search."""
    runs = result["runs"]
    tried = f"{runs} run{'s' * (runs > 1)} of {result['steps']} timed steps in "
    tried += format_seconds(result["seconds"])
    if not result["rows"]:
        yield f"no candidate was tried ({tried})"
        return
    if not result["change"]:
        yield f"no candidate's gain was larger than the variation between runs ({tried})"
        return
    gain = result["gain"]
    if gain is None:
        yield f"the final comparison was not completed ({tried})"
    else:
        low, high = gain["speedup"]["quartiles"]
        before, after = median(gain["before_s"]), median(gain["after_s"])
        yield (
            f"speed-up {gain['speedup']['p50']:.2f} × (quartiles {low:.2f} to {high:.2f}): "
            f"{1e3 * before:.2f} ms per step before, {1e3 * after:.2f} ms after ({tried})"
        )
        if not gain["clear"]:
            yield "the gain is not larger than the variation between runs"
    yield f"{'change' if program else 'add the flags'}: {result['keep']}"


def report(text: str) -> None:
    """Print a line about the progress of the search."""
    print(f"tutti tune: {text}", file=sys.stderr, flush=True)
