"""Formats the output of `tutti scale`: a table, the causes of lost efficiency, and sweeps.

The output has 80 columns, or 60 columns on a narrow terminal.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from tutti.measure.spread import percentile
from tutti.measure.terminal import wrap_line
from tutti.measure.units import ordinal
from tutti.profile.step_breakdown import excess_text
from tutti.scale.efficiency import CAUSE_OF_PART, LOSS_CAUSES, MIN_REPEATS, Scaling
from tutti.scale.forecast import MAX_RANKS, Mode
from tutti.scale.scale_runs import MeasuredRun
from tutti.world.errors import UsageError

_FULL_WIDTH = 80
_SPEED_WIDTH, _NARROW_SPEED_WIDTH = 20, 9
_PROFILE_COMMAND = "for details: tutti profile --trace"
_WIDTHS = {"exposed_comm": 8, "wait": 5, "bubble": 7, "input": 6, "compute": 8, "other": 6}
# {cause: (name of the cause in the verdict, explanation)}
_CAUSES = {
    "exposed_comm": ("exposed communication", "communication that no computation overlaps"),
    "wait": ("waiting", "a collective waits for ranks that arrive later"),
    "bubble": ("pipeline bubble", "a stage waits for another stage"),
    "input": ("input", "the program waits for its data loader"),
    "compute": ("slower compute", "ranks share cores, caches or memory, or batches are small"),
    "gaps": ("host gaps", "no recorded operation runs: Python code, launches, other programs"),
    "rest": ("code around operators", "autograd's engine, DDP's reducer, copies"),
    "slow_steps": ("slow steps", "some steps take much longer than the other steps"),
}


def scale_lines(results: dict[str, Any], width: int = _FULL_WIDTH) -> Iterator[str]:
    """Yield the output lines: the table, the causes of the loss, the fit and the forecast."""
    if rows := results["rows"]:
        title = f"{results['mode']} scaling, with the lost efficiency by cause, in % of the step"
        yield from wrap_line(title, width, "  ")
        yield ""
        yield from _table(results["unit"], rows, width)
        yield ""
        for text in (*_causes(rows), *_fit(results["fit"]), *_forecast(results["forecast"], rows)):
            # A command stays on one line, so that it can be copied.
            is_command = text.startswith(_PROFILE_COMMAND)
            yield from [text] if is_command else wrap_line(text, width, "  ")
    for note in results["notes"]:
        yield from wrap_line(f"note: {note}", width, "  ")


def _table(unit: str, rows: Sequence[dict[str, Any]], width: int) -> Iterator[str]:
    """Yield the header, then one line per number of ranks.

    The column `bubble` is shown only for pipelines. The spread of the throughput is not shown for
    pipelines and on narrow terminals, because the line would be too long.
    """
    has_bubble = any(row["loss"]["bubble"] for row in rows)
    shown = [name for name in LOSS_CAUSES if name != "bubble" or has_bubble]
    causes = "".join(f"{name.removesuffix('_comm'):>{_WIDTHS[name]}}" for name in shown)
    narrow = width < _FULL_WIDTH
    with_spread = not narrow and not has_bubble
    speed_width = _SPEED_WIDTH if with_spread else _NARROW_SPEED_WIDTH
    title = f"{unit} (p25–p75)"
    title = title if with_spread and len(title) <= speed_width else unit
    if len(title) > speed_width:
        title = unit.removesuffix("/s")[: speed_width - 3] + "/s"
    if narrow:
        yield f"ranks{title:>{speed_width}} speedup eff%{causes}"
    else:
        yield f"ranks{title:>{speed_width}} speed-up efficiency %{causes}"
    for row in rows:
        low, high = row["samples_per_s_spread"]
        speed = _short(row["samples_per_s"])
        speed += f" ({_short(low)}–{_short(high)})" * with_spread
        numbers = f"{row['ranks']:>5}{speed:>{speed_width}}"
        share = f"{100 * row['efficiency']:.0f}"
        if narrow:
            numbers += f"{row['speedup']:>8.2f}{share:>5}"
        else:
            if row["efficiency_spread"] != [1.0, 1.0]:  # the base has no spread
                share += f" ({_percents(row['efficiency_spread'])})"
            numbers += f"{row['speedup']:>9.2f}{share:>13}"
        yield numbers + "".join(f"{100 * row['loss'][name]:>{_WIDTHS[name]}.1f}" for name in shown)


def _percents(low_and_high: Sequence[float]) -> str:
    """Return two shares in percent, the lower share first, such as "21–24" or "−1 to 2"."""
    low, high = (f"{100 * share:.0f}".replace("-0", "0") for share in sorted(low_and_high))
    return f"{low}–{high}" if not low.startswith("-") else f"{low} to {high}".replace("-", "−")


def _short(value: float) -> str:
    """Return a number with three digits, such as "12.3k" for 12,345."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g}{unit}" if value < 999.5 * factor else f"{value:.0f}"
    return f"{value:.3g}"


def _causes(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield lines about the causes within `other`, the verdicts, the late rank and slow steps."""
    if len(rows) < 2:
        yield "only one number of ranks was run, but efficiency needs at least two numbers of ranks"
        return
    for row in rows[1:]:
        split = ", ".join(
            f"{_CAUSES.get(name, (name,))[0]} {100 * share:.1f}"
            for name, share in row["other"].items()
        )
        yield f"other with {row['ranks']} ranks: {split}"
    for row in rows[1:]:
        yield row["verdict"]
    row = rows[-1]
    for name in row["named"][:1]:
        yield "{}: {}".format(*_CAUSES[name])
    late, slow = row["late"], row["slow_steps"]
    cause_of_late = "input" if late and late["excess"]["part"] == "input" else "wait"
    if late and cause_of_late in row["named"] and late["excess"]["seconds"] >= 5e-5:
        yield f"rank {late['rank']} {excess_text(late['excess'])} than the other ranks"
    if slow and "slow_steps" in row["named"]:
        often = f"{slow['steps']} of {slow['of_steps']} steps"
        take = "takes" if slow["steps"] == 1 or slow["period"] is not None else "take"
        if slow["period"] is not None:
            often = f"every {ordinal(slow['period'])} step ({often})"
        rank = ""
        if late and not late["steady"]:
            rank = f". In these steps rank {late['rank']} is late: it {excess_text(late['excess'])}"
        elif slow["part"] is not None:
            title = _CAUSES[CAUSE_OF_PART[slow["part"]]][0].removeprefix("slower ")
            rank = (
                f". In slow recorded steps {title} is {1e3 * slow['part_excess_s']:.1f} ms longer"
            )
        yield f"{often} {take} {1e3 * slow['excess_s']:.1f} ms longer than the other steps{rank}"
    yield f"{_PROFILE_COMMAND} {row['folder']}"
    yield "all numbers are medians over the repeats, with quartiles in parentheses"


def verdict(row: dict[str, Any]) -> str:
    """Return a sentence about the lost efficiency, its causes, the noise and the repeats."""
    lost = 1 - row["efficiency"]
    causes = row["loss"] | row["other"]
    verb, sign = ("lose", 1) if lost >= 0 else ("gain", -1)

    def percent(share: float, low_and_high: Sequence[float], unit: str = "") -> str:
        spread = f" ({_percents(low_and_high)})" * (row["repeats"] > 1)
        return f"{100 * share:.0f}{unit}{spread}".replace("-", "−")

    total = percent(sign * lost, [sign * (1 - share) for share in row["efficiency_spread"]], " %")
    large = {
        name: f"{title} {percent(causes[name], row['loss_quartiles'][name])}"
        for name, (title, _) in _CAUSES.items()
        if abs(causes[name]) > row["noise"]
    }
    named = [large.pop(name) for name in row["named"]]
    text: str = f"{row['ranks']} ranks {verb} {total}: "
    text += f"{', '.join(named)}; nothing else is" if named else "no cause is"
    text += " clearly" * bool(large) + f" larger than the noise of {100 * row['noise']:.0f}"
    text += f" (uncertain: {', '.join(large.values())})" * bool(large)
    if row["clear"]:
        return text
    more = row["repeats_needed"] - row["repeats"]
    count = f"{more} more repeat{'s' * (more != 1)}"
    if row["repeats"] < MIN_REPEATS:
        done = f"{row['repeats']} repeat{'s' * (row['repeats'] > 1)}"
        text += f". {done} cannot show how much repeats differ. Add {count} with --repeats "
        return text + f"{row['repeats_needed']} or --until-clear"
    return f"{text}. The repeats disagree: about {count} are needed (--until-clear runs them)"


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
        f"{len(fit['points'])} combinations of operation, ranks and message size{r2}"
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
        below = f"below {100 * float(limit):.0f} %"
        if ranks is None:
            limits.append(f"not {below} up to {MAX_RANKS} ranks")
        else:
            already = "already " * (ranks <= rows[-1]["ranks"])
            limits.append(f"{below} {already}with {ranks} ranks")
    yield f"{title}: {', '.join(limits)}"
    yield forecast["reason"]


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """Return (flag without dashes, values) from a text such as `bucket-mb=1,5,25`."""
    flag, equals, values = text.partition("=")
    flag = flag.strip().lstrip("-").replace("_", "-")
    listed = [value.strip() for value in values.split(",") if value.strip()]
    if not flag or not equals or len(listed) < 2:
        raise UsageError(
            "--sweep must name a flag of tutti train and at least two values, such as "
            f"bucket-mb=1,5,25, got {text}"
        )
    if len(set(listed)) != len(listed):
        raise UsageError(f"--sweep {text}: a value occurs twice. Use each value once.")
    return flag, listed


def sweep_rows(runs: Sequence[MeasuredRun], mode: Mode) -> list[dict[str, Any]]:
    """Return `sweep[]` of the JSON: the rows for each value of the flag.

    `best` is True if the value is faster than all other values by more than the spread of the
    repeats. Efficiency is relative to the run with the fewest ranks and the same value.
    """
    by_value: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        by_value.setdefault(str(run.flags), []).append(run)
    rows = []
    for runs_of_value in by_value.values():
        scaling = Scaling(runs_of_value, mode)
        common = {"flags": runs_of_value[0].flags, "unit": scaling.unit}
        rows += [common | row for row in add_verdicts(scaling.rows())]
    return [row | {"best": _is_best(row, runs, mode)} for row in rows]


def add_verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the key `verdict`. The verdict of the first row, the base, is None."""
    return [row | {"verdict": verdict(row) if number else None} for number, row in enumerate(rows)]


def _is_best(row: dict[str, Any], runs: Sequence[MeasuredRun], mode: Mode) -> bool:
    """Return whether the row's value of the flag is faster than each other value.

    A value is faster if it has the higher throughput in at least 3 of 4 repeats.
    """
    same_size = [run for run in runs if run.ranks == row["ranks"]]
    throughput = Scaling(same_size, mode).throughput
    speeds = {run.repeat: throughput(run) for run in same_size if run.flags == row["flags"]}
    others = [run for run in same_size if run.flags != row["flags"]]
    ratios: dict[str, list[float]] = {str(run.flags): [] for run in others}
    for run in others:
        if run.repeat in speeds:
            ratios[str(run.flags)].append(speeds[run.repeat] / throughput(run))
    return bool(ratios) and all(
        len(values) >= MIN_REPEATS and percentile(values, 25) > 1 for values in ratios.values()
    )


def sweep_lines(
    rows: Sequence[dict[str, Any]], notes: Sequence[str], width: int = _FULL_WIDTH
) -> Iterator[str]:
    """Yield one table with a block per value, and the best value for each number of ranks."""
    if not rows:
        return
    head, *lines = _table(rows[0]["unit"], rows, width)
    yield head
    for value, numbered in groupby(
        zip(rows, lines, strict=True), lambda each: _flags_text(each[0])
    ):
        yield value
        yield from (line for _, line in numbered)
    yield ""
    for ranks in sorted({row["ranks"] for row in rows}):
        same_size = [row for row in rows if row["ranks"] == ranks]
        result = "no value is faster than all others by more than the spread of the repeats"
        if any(row["repeats"] < MIN_REPEATS for row in same_size):
            result = f"the best value is unknown: use --repeats {MIN_REPEATS} to measure the spread"
        elif (best := next((row for row in same_size if row["best"]), None)) is not None:
            result = f"{_flags_text(best)} is best, because it is faster in at least 3 of 4 repeats"
        yield f"with {ranks} rank{'s' * (ranks != 1)} {result}"
    for note in notes:
        yield from wrap_line(f"note: {note}", width, "  ")


def _flags_text(row: dict[str, Any]) -> str:
    return " ".join(f"--{flag} {value}" for flag, value in row["flags"].items())
