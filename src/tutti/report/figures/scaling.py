"""Scaling: throughput against the ideal, efficiency with its forecast, and where the rest went."""

import math
from collections.abc import Iterator
from typing import Any

from tutti.measure.units import format_bytes
from tutti.report.collect import Result
from tutti.report.figure import (
    Figure,
    Table,
    axis,
    log_axis,
    milliseconds,
    percent,
    size_axis,
)
from tutti.report.key_numbers import Rows, of_scale, unit_of
from tutti.report.palette import GREY, LOSS_NAMES, LOSSES, series, sign


def figures(result: Result) -> Iterator[Figure]:
    """Of one scaling, or of all flags that a sweep tried."""
    content, variants = result.content, of_scale(result)
    if variants:
        yield _throughput(variants, content.get("mode") or "unknown", unit_of(result))
        yield _efficiency(variants, content.get("forecast") or {})
        yield _losses(variants)
    if content.get("fit"):
        yield _fit(content["fit"])


def _throughput(variants: dict[str, Rows], mode: str, unit: str) -> Figure:
    meaning = {
        "strong": "the same work, divided among more ranks",
        "weak": "the same work on each rank",
    }.get(mode, "")
    first = next(iter(variants.values()))
    ranks = sorted({row["ranks"] for rows in variants.values() for row in rows})
    ideal = [first[0]["samples_per_s"] * each / first[0]["ranks"] for each in ranks]
    marks = _doublings(
        first[0]["samples_per_s"],
        [*ideal, *(row["samples_per_s"] for rows in variants.values() for row in rows)],
    )
    return Figure(
        "Throughput over ranks",
        f"{mode.capitalize()} scaling{': ' + meaning if meaning else ''}. Whiskers are the "
        "quartiles of the repeats.",
        _table(
            [
                *("flags", "ranks", unit, "p25", "p75", "step ms", "speed-up"),
                *("efficiency %", "p25 %", "p75 %", "repeats", "late rank"),
            ],
            [
                (
                    *(flags, row["ranks"], row["samples_per_s"]),
                    *(*_pair(row, "samples_per_s_spread"), milliseconds(row.get("step_s"))),
                    *(row["speedup"], percent(row["efficiency"])),
                    *(percent(each) for each in _pair(row, "efficiency_spread")),
                    *(row.get("repeats"), (row.get("late") or {}).get("rank")),
                )
                for flags, rows in variants.items()
                for row in rows
            ],
        ),
        [
            {
                "type": "scatter",
                "mode": "lines",
                "name": "ideal",
                "x": ranks,
                "y": ideal,
                "line": {"color": GREY, "dash": "dot", "width": 2},
                "hovertemplate": "%{x} ranks: %{y:,.0f}<extra>ideal</extra>",
            },
            *_curves(variants, "samples_per_s", 1, "%{x} ranks: %{y:,.1f}"),
        ],
        {
            "xaxis": _ranks_axis(ranks),
            # Both axes logarithmic: the ideal is a straight line; from mark to mark it doubles.
            "yaxis": axis(
                unit,
                type="log",
                tickmode="array",
                range=[math.log10(marks[0]) - 0.04, math.log10(marks[-1]) + 0.04],
                tickvals=marks,
                ticktext=[f"{each:,.0f}" if each >= 10 else f"{each:.3g}" for each in marks],
            ),
            "showlegend": True,
        },
        half=True,
    )


def _efficiency(variants: dict[str, Rows], forecast: dict[str, Any]) -> Figure:
    ahead = sorted(forecast.get("rows") or [], key=lambda row: int(row["ranks"]))
    traces = _curves(variants, "efficiency", 100, "%{x} ranks: %{y:.1f} %")
    about = "Of the ideal; dotted are 90, 80 and 50 %."
    if ahead:
        # From the last measured point on, so that the eye follows.
        shown = [*next(iter(variants.values()))[-1:], *ahead]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "forecast",
                "x": [row["ranks"] for row in shown],
                "y": [percent(row["efficiency"]) for row in shown],
                "line": {"color": series(0), "width": 1.5, "dash": "dash"},
                "marker": {"color": series(0), "size": 7, "symbol": "circle-open"},
                "hovertemplate": "%{x} ranks: %{y:.1f} %<extra>forecast, not measured</extra>",
            }
        )
        below = [
            f"{100 * float(level):.0f} % at {ranks}"
            for level, ranks in (forecast.get("below") or {}).items()
            if ranks is not None
        ]
        about += " Dashed is a forecast, nobody measured it."
        if below:
            about += f" It is under {', '.join(below)} ranks."
    if forecast.get("reason"):
        said = str(forecast["reason"]).strip().rstrip(".")
        about += f" {said[:1].upper()}{said[1:]}."
    measured = [(flags, row) for flags, rows in variants.items() for row in rows]
    return Figure(
        "Efficiency over ranks",
        about,
        _table(
            ["flags", "ranks", "efficiency %", "is"],
            [
                *((f, row["ranks"], percent(row["efficiency"]), "measured") for f, row in measured),
                *(("", row["ranks"], percent(row["efficiency"]), "forecast") for row in ahead),
            ],
        ),
        traces,
        {
            "xaxis": _ranks_axis([row["ranks"] for row in (*(r for _, r in measured), *ahead)]),
            "yaxis": axis("%", rangemode="tozero"),
            "showlegend": True,
            "shapes": [
                {
                    "type": "line",
                    "xref": "paper",
                    "x0": 0,
                    "x1": 1,
                    "y0": level,
                    "y1": level,
                    "line": {"dash": "dot", "width": 1, "color": GREY},
                }
                for level in (90, 80, 50)
            ],
        },
        half=True,
    )


def _losses(variants: dict[str, Rows]) -> Figure:
    rows = [(flags, row) for flags, each in variants.items() for row in each]
    names = [
        f"{row['ranks']} rank{'s' * (row['ranks'] != 1)} {flags}".strip() for flags, row in rows
    ]
    others = list(dict.fromkeys(key for _, row in rows for key in row.get("other") or {}))
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": LOSS_NAMES[name],
            "y": names,
            "x": [percent(row["loss"].get(name)) for _, row in rows],
            "marker": {"color": colour},
            "hovertemplate": "%{y}: %{x:.2f} % of the step<extra>%{fullData.name}</extra>",
        }
        for name, colour in LOSSES.items()
        if any(row["loss"].get(name) for _, row in rows)
    ]
    return Figure(
        "Where the lost efficiency went",
        "Shares of the step that add up to what is missing to 100 %. A share below zero is a gain "
        "against the fewest ranks. The table splits the last one.",
        _table(
            [
                *("flags", "ranks", "lost %", *(f"{LOSS_NAMES[name]} %" for name in LOSSES)),
                *(f"of other: {name} %" for name in others),
            ],
            [
                (
                    *(flags, row["ranks"], percent(1 - row["efficiency"])),
                    *(percent(row["loss"].get(name)) for name in LOSSES),
                    *(percent((row.get("other") or {}).get(name)) for name in others),
                )
                for flags, row in rows
            ],
        ),
        traces,  # none, where one number of ranks was measured: nothing is lost
        {
            "barmode": "relative",
            "height": max(340, 150 + 34 * len(rows)),
            "xaxis": axis("% of the step"),
            "yaxis": {"autorange": "reversed", "type": "category"},
            "showlegend": True,
        },
        half=True,
    )


def _fit(fit: dict[str, Any]) -> Figure:
    points = sorted(fit.get("points") or [], key=lambda each: float(each["bytes"]))
    alpha, beta = fit["alpha_s"], fit["beta_s_per_byte"]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for each in points:
        kinds.setdefault(f"{each['op']}, {each['ranks']} ranks", []).append(each)
    latency = "α unknown (one size)" if fit.get("best_case") else f"α {1e6 * alpha:.3g} µs"
    speed = f" and {1e-9 / beta:.3g} GB/s (1/β)" if beta else ""
    quality = "" if fit.get("r2") is None else f", R² {fit['r2']:.3f}"
    return Figure(
        "Time of collectives in the steps",
        f"Fitted: {latency}{speed}{quality}. A forecast rests on it.",
        Table(
            ["operation", "ranks", "bytes", "measured ms"],
            [(e["op"], e["ranks"], e["bytes"], milliseconds(e["seconds"])) for e in points],
        ),
        [
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [each["bytes"] for each in own],
                "y": [milliseconds(each["seconds"]) for each in own],
                "text": [format_bytes(each["bytes"]) for each in own],
                "marker": {"color": series(number), "symbol": sign(number), "size": 9},
                "hovertemplate": "%{text}: %{y:.4g} ms<extra>%{fullData.name}</extra>",
            }
            for number, (name, own) in enumerate(kinds.items())
        ],
        {
            "xaxis": size_axis([each["bytes"] for each in points]),
            "yaxis": log_axis("ms"),
            "showlegend": True,
        },
        half=True,
    )


def _table(head: list[str], rows: list[tuple[Any, ...]]) -> Table:
    """Flags come first, and only where there are any."""
    if any(flags for flags, *_ in rows):
        return Table(head, rows)
    return Table(head[1:], [rest for _, *rest in rows])


def _curves(
    variants: dict[str, Rows], key: str, factor: float, template: str
) -> list[dict[str, Any]]:
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": flags or "measured",
            "x": [row["ranks"] for row in rows],
            "y": [factor * row[key] for row in rows],
            "error_y": _whiskers(rows, key, factor),
            "line": {"color": series(number), "width": 2.5},
            "marker": {"color": series(number), "symbol": sign(number), "size": 8},
            "hovertemplate": template + "<extra>%{fullData.name}</extra>",
        }
        for number, (flags, rows) in enumerate(variants.items())
    ]


def _whiskers(rows: Rows, key: str, factor: float) -> dict[str, Any]:
    """Up and down to the quartiles; the middle of repeats may lie outside them by a hair."""
    up, down = [], []
    for row in rows:
        low, high = _pair(row, f"{key}_spread")
        up.append(factor * max(0.0, (row[key] if high is None else high) - row[key]))
        down.append(factor * max(0.0, row[key] - (row[key] if low is None else low)))
    return {"type": "data", "array": up, "arrayminus": down, "thickness": 1.2}


def _doublings(base: float, values: list[float]) -> list[float]:
    low, high = (math.log2(edge(values) / base) for edge in (min, max))
    return [base * 2.0**power for power in range(math.floor(low), math.ceil(high) + 1)]


def _ranks_axis(ranks: list[int]) -> dict[str, Any]:
    there = sorted(set(ranks))
    marks = there if len(there) <= 10 else [each for each in there if each & (each - 1) == 0]
    return axis("ranks", type="log", tickmode="array", tickvals=marks, ticktext=marks)


def _pair(row: dict[str, Any], key: str) -> tuple[float | None, float | None]:
    found = row.get(key) or (None, None)
    return found[0], found[1]
