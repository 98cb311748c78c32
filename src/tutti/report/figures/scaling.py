"""Scaling: throughput against the ideal, efficiency with its forecast, and where the rest went."""

from collections.abc import Iterator
from typing import Any

from tutti.report.collect import Result
from tutti.report.figure import (
    Figure,
    Table,
    axis,
    log_axis,
    milliseconds,
    percent,
    size_axis,
    size_text,
)
from tutti.report.palette import BLUE, GREY, LOSS_NAMES, LOSSES, series, sign


def figures(result: Result) -> Iterator[Figure]:
    """Four views of one scaling, and its sweep."""
    content = result.content
    rows = sorted(content["rows"], key=lambda row: int(row["ranks"]))
    table = _numbers(rows)
    yield _throughput(rows, table, content)
    yield _efficiency(rows, content.get("forecast") or {})
    yield _losses(rows)
    if content.get("fit"):
        yield _fit(content["fit"])
    if content.get("sweep"):
        yield _sweep(content["sweep"])


def _numbers(rows: list[dict[str, Any]]) -> Table:
    return Table(
        [
            *("ranks", "samples/s", "p25", "p75", "step ms", "speed-up", "efficiency %"),
            *("efficiency p25 %", "p75 %", "repeats"),
        ],
        [
            (
                *(row["ranks"], row["samples_per_s"], *_pair(row, "samples_per_s_spread")),
                *(milliseconds(row.get("step_s")), row["speedup"], percent(row["efficiency"])),
                *(percent(each) for each in _pair(row, "efficiency_spread")),
                row.get("repeats"),
            )
            for row in rows
        ],
    )


def _throughput(rows: list[dict[str, Any]], table: Table, content: dict[str, Any]) -> Figure:
    ranks = [row["ranks"] for row in rows]
    ideal = [rows[0]["samples_per_s"] * each / rows[0]["ranks"] for each in ranks]
    mode = content.get("mode") or "unknown"
    meaning = {
        "strong": "the same work, divided among more ranks",
        "weak": "the same work on each rank",
    }.get(mode, "")
    unit = content.get("unit") or "samples/s"
    return Figure(
        "Throughput over ranks",
        f"{mode.capitalize()} scaling{': ' + meaning if meaning else ''}. Whiskers are the "
        "quartiles of the repeats.",
        table,
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
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "measured",
                "x": ranks,
                "y": [row["samples_per_s"] for row in rows],
                "error_y": _whiskers(rows, "samples_per_s", 1),
                "line": {"color": BLUE, "width": 2.5},
                "marker": {"color": BLUE, "size": 8},
                "hovertemplate": "%{x} ranks: %{y:,.0f}<extra>measured</extra>",
            },
        ],
        {
            "xaxis": _ranks_axis(ranks),
            # Both axes logarithmic: the ideal is a straight line; marks are what it would give.
            "yaxis": axis(
                unit,
                type="log",
                tickmode="array",
                tickvals=ideal,
                ticktext=[f"{each:,.0f}" if each >= 10 else f"{each:.3g}" for each in ideal],
            ),
            "showlegend": True,
        },
        half=True,
    )


def _efficiency(rows: list[dict[str, Any]], forecast: dict[str, Any]) -> Figure:
    ahead = sorted(forecast.get("rows") or [], key=lambda row: int(row["ranks"]))
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "measured",
            "x": [row["ranks"] for row in rows],
            "y": [percent(row["efficiency"]) for row in rows],
            "error_y": _whiskers(rows, "efficiency", 100),
            "line": {"color": BLUE, "width": 2.5},
            "marker": {"color": BLUE, "size": 8},
            "hovertemplate": "%{x} ranks: %{y:.1f} %<extra>measured</extra>",
        }
    ]
    about = "Of the ideal."
    if ahead:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "forecast",
                # From the last measured point on, so that the eye follows.
                "x": [row["ranks"] for row in (rows[-1], *ahead)],
                "y": [percent(row["efficiency"]) for row in (rows[-1], *ahead)],
                "line": {"color": BLUE, "width": 1.5, "dash": "dash"},
                "marker": {"color": BLUE, "size": 7, "symbol": "circle-open"},
                "hovertemplate": "%{x} ranks: %{y:.1f} %<extra>forecast, not measured</extra>",
            }
        )
        below = [
            f"{100 * float(level):.0f} % at {ranks} ranks"
            for level, ranks in (forecast.get("below") or {}).items()
            if ranks is not None
        ]
        about += " Dashed is a forecast, nobody measured it."
        if below:
            about += f" It falls under {', '.join(below)}."
    if forecast.get("reason"):
        about += f" {str(forecast['reason']).rstrip('.').capitalize()}."
    ranks = [row["ranks"] for row in (*rows, *ahead)]
    return Figure(
        "Efficiency over ranks",
        about,
        Table(
            ["ranks", "efficiency %", "is"],
            [
                *((row["ranks"], percent(row["efficiency"]), "measured") for row in rows),
                *((row["ranks"], percent(row["efficiency"]), "forecast") for row in ahead),
            ],
        ),
        traces,
        {
            "xaxis": _ranks_axis(ranks),
            "yaxis": axis("%", range=[0, 105]),
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


def _losses(rows: list[dict[str, Any]]) -> Figure:
    names = [f"{row['ranks']} ranks" if row["ranks"] != 1 else "1 rank" for row in rows]
    others = list(dict.fromkeys(key for row in rows for key in row.get("other") or {}))
    return Figure(
        "Where the lost efficiency went",
        "Shares of the step that add up to what is missing to 100 %. A share below zero is a gain "
        "against the first row. The table splits the last one.",
        Table(
            [
                *("ranks", "lost %", *(f"{LOSS_NAMES[name]} %" for name in LOSSES)),
                *(f"of other: {name} %" for name in others),
            ],
            [
                (
                    *(row["ranks"], percent(1 - row["efficiency"])),
                    *(percent(row["loss"].get(name)) for name in LOSSES),
                    *(percent((row.get("other") or {}).get(name)) for name in others),
                )
                for row in rows
            ],
        ),
        [
            {
                "type": "bar",
                "orientation": "h",
                "name": LOSS_NAMES[name],
                "y": names,
                "x": [percent(row["loss"].get(name)) for row in rows],
                "marker": {"color": colour},
                "hovertemplate": "%{y}: %{x:.2f} % of the step<extra>%{fullData.name}</extra>",
            }
            for name, colour in LOSSES.items()
            if any(row["loss"].get(name) for row in rows)
        ]
        # Should nothing be lost, an empty plot would look like a fault.
        or [{"type": "bar", "orientation": "h", "y": names, "x": [0.0 for _ in names]}],
        {
            "barmode": "relative",
            "height": 150 + 34 * max(2, len(rows)),
            "xaxis": axis("% of the step"),
            "yaxis": {"autorange": "reversed", "type": "category"},
            "showlegend": True,
        },
    )


def _fit(fit: dict[str, Any]) -> Figure:
    points = sorted(fit.get("points") or [], key=lambda each: float(each["bytes"]))
    alpha, beta = fit["alpha_s"], fit["beta_s_per_byte"]
    kinds = dict.fromkeys((each["op"], each["ranks"]) for each in points)
    speed = f", 1/β = {1e-9 / beta:.3g} GB/s" if beta else ""
    return Figure(
        "Time of collectives in the steps",
        f"Fitted: α = {1e6 * alpha:.3g} µs of latency{speed}; "
        f"R² = {fit['r2']:.3f}. The forecast rests on it.",
        Table(
            ["operation", "ranks", "bytes", "measured ms"],
            [(e["op"], e["ranks"], e["bytes"], milliseconds(e["seconds"])) for e in points],
        ),
        [
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"{op}, {ranks} ranks",
                "x": [e["bytes"] for e in points if (e["op"], e["ranks"]) == (op, ranks)],
                "y": [1e3 * e["seconds"] for e in points if (e["op"], e["ranks"]) == (op, ranks)],
                "text": [
                    size_text(e["bytes"]) for e in points if (e["op"], e["ranks"]) == (op, ranks)
                ],
                "marker": {"color": series(number), "symbol": sign(number), "size": 8},
                "hovertemplate": "%{text}: %{y:.4g} ms<extra>%{fullData.name}</extra>",
            }
            for number, (op, ranks) in enumerate(kinds)
        ],
        {
            "xaxis": size_axis([each["bytes"] for each in points]),
            "yaxis": log_axis("ms", dtick="D2"),
            "showlegend": True,
        },
        half=True,
    )


def _sweep(rows: list[dict[str, Any]]) -> Figure:
    """Flags that were tried; which columns there are besides is up to the sweep."""
    flags = [_flags(row) for row in rows]
    return Figure(
        "Sweep",
        "The same job with other flags.",
        Table(
            ["flags", "ranks", "samples/s", "step ms", "efficiency %"],
            [
                (
                    *(flag, row.get("ranks"), row.get("samples_per_s")),
                    *(milliseconds(row.get("step_s")), percent(row.get("efficiency"))),
                )
                for flag, row in zip(flags, rows, strict=True)
            ],
        ),
        [
            {
                "type": "bar",
                "orientation": "h",
                "y": [
                    f"{flag}, {row.get('ranks')} ranks"
                    for flag, row in zip(flags, rows, strict=True)
                ],
                "x": [row.get("samples_per_s") for row in rows],
                "marker": {"color": BLUE},
                "width": 0.6,
                "hovertemplate": "%{y}: %{x:,.0f}<extra></extra>",
            }
        ],
        {
            "height": 140 + 30 * max(2, len(rows)),
            "xaxis": axis("samples/s", rangemode="tozero"),
            "yaxis": {"autorange": "reversed", "type": "category"},
        },
        half=True,
    )


def _flags(row: dict[str, Any]) -> str:
    flags = row.get("flags")
    if isinstance(flags, dict):
        return " ".join(f"{name} {value}" for name, value in flags.items())
    if isinstance(flags, list):
        return " ".join(map(str, flags))
    return str(flags if flags is not None else row.get("flag", "as it is"))


def _ranks_axis(ranks: list[int]) -> dict[str, Any]:
    there = sorted(set(ranks))
    marks = there if len(there) <= 10 else [each for each in there if each & (each - 1) == 0]
    return axis("ranks", type="log", tickmode="array", tickvals=marks, ticktext=marks)


def _whiskers(rows: list[dict[str, Any]], key: str, factor: float) -> dict[str, Any]:
    pairs = [_pair(row, f"{key}_spread") for row in rows]
    return {
        "type": "data",
        "array": [
            factor * (b - r[key]) if b is not None else 0
            for r, (_, b) in zip(rows, pairs, strict=True)
        ],
        "arrayminus": [
            factor * (r[key] - a) if a is not None else 0
            for r, (a, _) in zip(rows, pairs, strict=True)
        ],
        "thickness": 1.2,
    }


def _pair(row: dict[str, Any], key: str) -> tuple[float | None, float | None]:
    found = row.get(key) or (None, None)
    return found[0], found[1]
