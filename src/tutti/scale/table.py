"""What `tutti scale` prints: a table of 80 columns, or of 60; text is as wide as it may be."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from tutti.scale.causes import LOSS
from tutti.scale.forecast import FARTHEST

_FULL_WIDTH = 80
_SPEED = 20
_LOOK = "look at it: tutti profile --trace"
_NARROW = {"exposed_comm": "exposed"}
_WIDTHS = {"exposed_comm": 8, "wait": 5, "bubble": 7, "input": 6, "other": 6}
_MEANING = {
    "exposed_comm": "communication that nothing computes behind",
    "wait": "waiting for ranks that come later",
    "bubble": "the pipeline's bubble",
    "input": "waiting for input",
    "compute": "slower compute (ranks share cores, caches or memory; small batches)",
    "gaps": "gaps in which nothing is seen to run (Python, launches, other programs)",
    "rest": "what surrounds operators (autograd's engine, DDP's reducer, copies)",
    "unexplained": "seen in no part: recorded steps differ from timed ones (small steps, noise)",
}


def lines(results: dict[str, Any], width: int = _FULL_WIDTH) -> Iterator[str]:
    """The table of all sizes, what the loss is due to, the fit, the forecast."""
    rows = results["rows"]
    if rows:
        title = f"{results['mode']} scaling; the loss of efficiency by cause, in % of the step"
        yield from _wrapped(title, width)
        yield ""
        yield from table(rows, results["unit"], width)
        yield ""
        for text in (*_largest(rows), *_fit(results["fit"]), *_forecast(results["forecast"], rows)):
            # A command is there to be copied: it stays in one line.
            yield from [text] if text.startswith(_LOOK) else _wrapped(text, width)
    yield from note_lines(results["notes"], width)


def note_lines(notes: Sequence[str], width: int = _FULL_WIDTH) -> Iterator[str]:
    """What a reader should know."""
    for note in notes:
        yield from _wrapped(f"note: {note}", width)


def table(rows: Sequence[dict[str, Any]], unit: str, width: int = _FULL_WIDTH) -> Iterator[str]:
    """A line for each size."""
    title = f"{unit} (p25–p75)"
    title = title if len(title) <= _SPEED else unit
    causes = "".join(f"{_NARROW.get(name, name):>{_WIDTHS[name]}}" for name in LOSS)
    if width < _FULL_WIDTH:
        yield f"ranks{unit.removesuffix('/s')[:7] + '/s':>10} speedup eff%{causes}"
    else:
        yield f"ranks{title:>{_SPEED}} speed-up  efficiency %{causes}"
    for row in rows:
        yield table_line(row, width)


def table_line(row: dict[str, Any], width: int = _FULL_WIDTH) -> str:
    """One size; a narrow terminal has no room for spreads."""
    low, high = row["samples_per_s_spread"]
    speed = f"{_short(row['samples_per_s'])} ({_short(low)}–{_short(high)})"
    low, high = (round(100 * each) for each in row["efficiency_spread"])
    share = f"{100 * row['efficiency']:.0f}"
    share += f" ({low}–{high})" if row["efficiency_spread"] != [1.0, 1.0] else ""  # of the base
    causes = "".join(f"{100 * row['loss'][name]:>{_WIDTHS[name]}.1f}" for name in LOSS)
    if width < _FULL_WIDTH:
        figures = f"{_short(row['samples_per_s']):>10}{row['speedup']:>8.2f}"
        return f"{row['ranks']:>5}{figures}{100 * row['efficiency']:>5.0f}{causes}"
    return f"{row['ranks']:>5}{speed:>{_SPEED}}{row['speedup']:>9.2f}{share:>14}{causes}"


def _largest(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Which cause to look at first, at the largest size."""
    if len(rows) < 2:
        yield "one size was run: there is nothing to compare it with"
        return
    for row in rows[1:]:
        split = ", ".join(f"{name} {100 * share:.1f}" for name, share in row["other"].items())
        yield f"other at {row['ranks']} ranks: {split}"
    row = rows[-1]
    lost = 1 - row["efficiency"]
    if lost <= 0.005:
        yield f"{row['ranks']} ranks lose nothing that could be told from noise"
        return
    shares = {name: row["loss"][name] for name in LOSS if name != "other"} | row["other"]
    cause = max(shares, key=lambda name: shares[name])
    share = shares[cause]
    text = (
        f"{row['ranks']} ranks lose {100 * lost:.1f} % of a step; the largest cause, "
        f"{100 * share:.1f} %, is {_MEANING[cause]}"
    )
    instead = (row["late"] or {}).get("instead")
    if cause == "wait" and instead and instead["seconds"] >= 5e-5:
        part = {"host_gap": "gaps"}.get(instead["part"], instead["part"])
        text += f": rank {row['late']['rank']} has {1e3 * instead['seconds']:.1f} ms more of {part}"
    yield f"{text}."
    yield f"{_LOOK} {row['folder']}"
    yield "speed-up and efficiency are the middle of the ratios within a repeat"


def _fit(fit: dict[str, Any] | None) -> Iterator[str]:
    if fit is None:
        return
    beta = fit["beta_s_per_byte"]
    speed = f"{1 / beta / 1e9:.3g} GB/s" if beta else "no limit of bandwidth seen"
    if fit["best_case"]:
        yield f"communication: {speed} (1/β); of one size of message α is not known"
        return
    kinds = len(fit["points"])
    sure = f", r² {fit['r2']:.2f}" if fit["r2"] is not None else ""
    yield (
        f"communication: α {1e6 * fit['alpha_s']:.4g} µs and {speed} (1/β), fitted to {kinds} "
        f"kinds of message{sure}"
    )


def _forecast(forecast: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not forecast["rows"]:
        yield forecast["reason"]
        return
    title = "forecast, at best" if forecast["best_case"] else "forecast"
    ahead = ", ".join(
        f"{100 * row['efficiency']:.0f} % at {row['ranks']}" for row in forecast["rows"]
    )
    yield f"{title}: efficiency {ahead} ranks"
    limits = []
    for limit, ranks in forecast["below"].items():
        if ranks is None:
            when = f"not before {FARTHEST} ranks"
        elif ranks <= rows[-1]["ranks"]:
            when = f"already at {ranks}"
        else:
            when = f"at {ranks} ranks"
        limits.append(f"under {100 * float(limit):.0f} % {when}")
    yield f"{title}: {', '.join(limits)}"
    yield forecast["reason"]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)


def _short(value: float) -> str:
    """Three digits: 12.3k for 12,345."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g}{unit}" if value < 999.5 * factor else f"{value:.0f}"
    return f"{value:.3g}"
