"""Formats the output of `tutti scale`: a table of 80 columns (60 if narrow), causes and sweeps."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from tutti.measure.spread import percentile
from tutti.measure.terminal import wrap_line
from tutti.profile.step_breakdown import excess_text
from tutti.scale.efficiency import LOSS_CAUSES, Scaling
from tutti.scale.forecast import MAX_RANKS, Mode
from tutti.scale.scale_runs import MeasuredRun
from tutti.world.errors import UsageError

_FULL_WIDTH = 80
_SPEED_WIDTH = 20
_PROFILE_COMMAND = "for details: tutti profile --trace"
_WIDTHS = {"exposed_comm": 8, "wait": 5, "bubble": 7, "input": 6, "other": 6}
_MEANINGS = {
    "exposed_comm": "communication without compute to hide behind",
    "wait": "waiting for ranks that arrive later",
    "bubble": "the pipeline bubble",
    "input": "waiting for input",
    "compute": "slower compute (ranks share cores, caches or memory, or batches are small)",
    "gaps": "gaps in which nothing recorded runs (Python, launches, other programs)",
    "rest": "code around operators (autograd's engine, DDP's reducer, copies)",
    "unexplained": "unknown, because recorded steps differ from timed steps (short steps, noise)",
}
_MIN_REPEATS = 3  # quartiles of fewer repeats do not show the spread


def scale_lines(results: dict[str, Any], width: int = _FULL_WIDTH) -> Iterator[str]:
    """Yield the table of all numbers of ranks, the causes of the loss, the fit and the forecast."""
    if rows := results["rows"]:
        title = f"{results['mode']} scaling, with the loss of efficiency by cause, in % of the step"
        yield from wrap_line(title, width, "  ")
        yield ""
        yield _table_head(results["unit"], width)
        yield from (_table_line(row, width) for row in rows)
        yield ""
        for text in (*_causes(rows), *_fit(results["fit"]), *_forecast(results["forecast"], rows)):
            # A command stays on one line, so that it can be copied.
            is_command = text.startswith(_PROFILE_COMMAND)
            yield from [text] if is_command else wrap_line(text, width, "  ")
    for note in results["notes"]:
        yield from wrap_line(f"note: {note}", width, "  ")


def _table_head(unit: str, width: int) -> str:
    causes = "".join(f"{name.removesuffix('_comm'):>{_WIDTHS[name]}}" for name in LOSS_CAUSES)
    if width < _FULL_WIDTH:
        return f"ranks{unit.removesuffix('/s')[:7] + '/s':>10} speedup eff%{causes}"
    title = f"{unit} (p25–p75)"
    title = title if len(title) <= _SPEED_WIDTH else unit
    return f"ranks{title:>{_SPEED_WIDTH}} speed-up  efficiency %{causes}"


def _table_line(row: dict[str, Any], width: int) -> str:
    """Return the line of one number of ranks. A narrow terminal has no space for spreads."""
    causes = "".join(f"{100 * row['loss'][name]:>{_WIDTHS[name]}.1f}" for name in LOSS_CAUSES)
    if width < _FULL_WIDTH:
        numbers = f"{_short(row['samples_per_s']):>10}{row['speedup']:>8.2f}"
        return f"{row['ranks']:>5}{numbers}{100 * row['efficiency']:>5.0f}{causes}"
    low, high = row["samples_per_s_spread"]
    speed = f"{_short(row['samples_per_s'])} ({_short(low)}–{_short(high)})"
    share = f"{100 * row['efficiency']:.0f}"
    if row["efficiency_spread"] != [1.0, 1.0]:  # the base has no spread
        low, high = (round(100 * limit) for limit in row["efficiency_spread"])
        share += f" ({low}–{high})"
    return f"{row['ranks']:>5}{speed:>{_SPEED_WIDTH}}{row['speedup']:>9.2f}{share:>14}{causes}"


def _short(value: float) -> str:
    """Return a number with three digits, such as 12.3k for 12,345."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g}{unit}" if value < 999.5 * factor else f"{value:.0f}"
    return f"{value:.3g}"


def _causes(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the causes within `other`, and the largest cause with the most ranks."""
    if len(rows) < 2:
        yield "only one number of ranks was run, but efficiency needs at least two"
        return
    for row in rows[1:]:
        split = ", ".join(f"{name} {100 * share:.1f}" for name, share in row["other"].items())
        yield f"other with {row['ranks']} ranks: {split}"
    row = rows[-1]
    lost = 1 - row["efficiency"]
    if lost <= 0.005:
        yield f"the loss of {row['ranks']} ranks is not larger than noise"
        return
    shares = {name: row["loss"][name] for name in LOSS_CAUSES if name != "other"} | row["other"]
    cause = max(shares, key=lambda name: shares[name])
    late = ""
    if cause == "wait" and row["late"] and row["late"]["instead"]["seconds"] >= 5e-5:
        late = f": rank {row['late']['rank']} {excess_text(row['late']['instead'])}"
    yield (
        f"{row['ranks']} ranks lose {100 * lost:.1f} % of a step. The largest cause, "
        f"{100 * shares[cause]:.1f} %, is {_MEANINGS[cause]}{late}."
    )
    yield f"{_PROFILE_COMMAND} {row['folder']}"
    yield "speed-up and efficiency are medians over the repeats"


def _fit(fit: dict[str, Any] | None) -> Iterator[str]:
    if fit is None:
        return
    beta = fit["beta_s_per_byte"]
    speed = f"{1 / beta / 1e9:.3g} GB/s" if beta else "unlimited bandwidth"
    if fit["best_case"]:
        yield f"communication: {speed} (1/β), latency unknown (all messages have one size)"
        return
    r2 = f", r² {fit['r2']:.2f}" if fit["r2"] is not None else ""
    yield (
        f"communication: α {1e6 * fit['alpha_s']:.4g} µs and {speed} (1/β), fitted to "
        f"{len(fit['points'])} kinds of message{r2}"
    )


def _forecast(forecast: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not forecast["rows"]:
        yield forecast["reason"]
        return
    title = "forecast, at best" if forecast["best_case"] else "forecast"
    values = ", ".join(
        f"{100 * row['efficiency']:.0f} % with {row['ranks']}" for row in forecast["rows"]
    )
    yield f"{title}: efficiency {values} ranks"
    limits = []
    for limit, ranks in forecast["below"].items():
        when = f"not up to {MAX_RANKS} ranks"
        if ranks is not None:
            when = f"{'already ' * (ranks <= rows[-1]['ranks'])}with {ranks} ranks"
        limits.append(f"below {100 * float(limit):.0f} % {when}")
    yield f"{title}: {', '.join(limits)}"
    yield forecast["reason"]


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """Return the flag without its dashes, and its values, from a text like `bucket-mb=1,5,25`."""
    flag, equals, values = text.partition("=")
    flag = flag.strip().lstrip("-").replace("_", "-")
    listed = [value.strip() for value in values.split(",") if value.strip()]
    if not flag or not equals or len(listed) < 2:
        raise UsageError(
            "--sweep must have a flag of tutti train and at least two values, such as "
            f"bucket-mb=1,5,25, got {text}"
        )
    if len(set(listed)) != len(listed):
        raise UsageError(f"--sweep {text}: a value occurs twice. Use each value once.")
    return flag, listed


def sweep_rows(runs: Sequence[MeasuredRun], mode: Mode) -> list[dict[str, Any]]:
    """Return `sweep[]` of the JSON: the rows of each value of the flag.

    `best` means that the value is faster than all others by more than the spread of the repeats.
    Efficiency is relative to the run with the fewest ranks and the same value.
    """
    by_value: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        by_value.setdefault(str(run.flags), []).append(run)
    rows = []
    for runs_of_value in by_value.values():
        scaling = Scaling(runs_of_value, mode)
        common = {"flags": runs_of_value[0].flags, "unit": scaling.unit}
        rows += [common | row for row in scaling.rows()]
    return [row | {"best": _is_best(row, runs, mode)} for row in rows]


def _is_best(row: dict[str, Any], runs: Sequence[MeasuredRun], mode: Mode) -> bool:
    """Return whether the row's value is faster than each other value in at least 3 of 4 repeats."""
    same_size = [run for run in runs if run.ranks == row["ranks"]]
    throughput = Scaling(same_size, mode).throughput
    speeds = {run.repeat: throughput(run) for run in same_size if run.flags == row["flags"]}
    others = [run for run in same_size if run.flags != row["flags"]]
    ratios: dict[str, list[float]] = {str(run.flags): [] for run in others}
    for run in others:
        if run.repeat in speeds:
            ratios[str(run.flags)].append(speeds[run.repeat] / throughput(run))
    return bool(ratios) and all(
        len(values) >= _MIN_REPEATS and percentile(values, 25) > 1 for values in ratios.values()
    )


def sweep_lines(
    rows: Sequence[dict[str, Any]], notes: Sequence[str], width: int = _FULL_WIDTH
) -> Iterator[str]:
    """Yield one table with a block for each value, and the best value for each number of ranks."""
    if not rows:
        return
    yield _table_head(rows[0]["unit"], width)
    for value, rows_of_value in groupby(rows, key=_flags_text):
        yield value
        yield from (_table_line(row, width) for row in rows_of_value)
    yield ""
    for ranks in sorted({row["ranks"] for row in rows}):
        same_size = [row for row in rows if row["ranks"] == ranks]
        result = "no value is faster than the others by more than the spread of the repeats"
        if any(row["repeats"] < _MIN_REPEATS for row in same_size):
            result = f"no value is best. Use --repeats {_MIN_REPEATS} to measure the spread"
        elif (best := next((row for row in same_size if row["best"]), None)) is not None:
            result = f"{_flags_text(best)} is best, because it is faster in at least 3 of 4 repeats"
        yield f"with {ranks} rank{'s' * (ranks != 1)} {result}"
    for note in notes:
        yield from wrap_line(f"note: {note}", width, "  ")


def _flags_text(row: dict[str, Any]) -> str:
    return " ".join(f"--{flag} {value}" for flag, value in row["flags"].items())
