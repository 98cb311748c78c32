"""Scaling: throughput, efficiency with its forecast, loss by cause, fit; learning rate sweeps."""

import math
from collections.abc import Iterator
from typing import Any

from tutti.measure.units import format_bytes
from tutti.report import plot
from tutti.report.plot import Figure, Table, milliseconds, percent
from tutti.report.sources import Result
from tutti.report.summary import (
    Rows,
    learning_rate,
    learning_rate_rows,
    scale_rows,
    throughput_unit,
)


def scaling(result: Result) -> Iterator[Figure]:
    """One scaling, or all flags of a sweep."""
    content, variants = result.content, scale_rows(result)
    if variants:
        yield _throughput(variants, content.get("mode") or "unknown", throughput_unit(result))
        yield _efficiency(variants, content.get("forecast") or {})
        yield _losses(variants)
    if content.get("fit"):
        yield _fit(content["fit"])


def _throughput(variants: dict[str, Rows], mode: str, unit: str) -> Figure:
    meaning = {
        "strong": ": the same work, divided among more ranks",
        "weak": ": the same work on each rank",
    }.get(mode, "")
    rows = _with_flags(variants)
    base = rows[0][1]
    ranks = sorted({row["ranks"] for _, row in rows})
    ideal = [base["samples_per_s"] * each / base["ranks"] for each in ranks]
    # Both axes are logarithmic: the ideal is a straight line; each tick doubles the one before.
    speeds = [*ideal, *(row["samples_per_s"] for _, row in rows)]
    low, high = (math.log2(value / base["samples_per_s"]) for value in (min(speeds), max(speeds)))
    powers = range(math.floor(low), math.ceil(high) + 1)
    ticks = [base["samples_per_s"] * 2.0**power for power in powers]
    return Figure(
        "Throughput over ranks",
        f"{mode.capitalize()} scaling{meaning}. Error bars are the quartiles of the repeats.",
        _table(
            [
                *("flags", "ranks", unit, "p25", "p75", "step ms", "speed-up"),
                *("efficiency %", "p25 %", "p75 %", "repeats", "late rank"),
            ],
            [
                (
                    *(flags, row["ranks"], row["samples_per_s"]),
                    *(*_quartiles(row, "samples_per_s"), milliseconds(row.get("step_s"))),
                    *(row["speedup"], percent(row["efficiency"])),
                    *(percent(each) for each in _quartiles(row, "efficiency")),
                    *(row.get("repeats"), (row.get("late") or {}).get("rank")),
                )
                for flags, row in rows
            ],
        ),
        [
            {
                "type": "scatter",
                "mode": "lines",
                "name": "ideal",
                "x": ranks,
                "y": ideal,
                "line": {"color": plot.GREY, "dash": "dot", "width": 2},
                "hovertemplate": "%{x} ranks: %{y:,.0f}<extra>ideal</extra>",
            },
            *_curves(variants, "samples_per_s", 1, "%{x} ranks: %{y:,.1f}"),
        ],
        {
            "xaxis": _ranks_axis(ranks),
            "yaxis": plot.log_axis(
                unit,
                ticks,
                at_values=True,
                range=[math.log10(ticks[0]) - 0.04, math.log10(ticks[-1]) + 0.04],
            ),
            "showlegend": True,
        },
        half=True,
    )


def _efficiency(variants: dict[str, Rows], forecast: dict[str, Any]) -> Figure:
    ahead = sorted(forecast.get("rows") or [], key=lambda row: int(row["ranks"]))
    traces = _curves(variants, "efficiency", 100, "%{x} ranks: %{y:.1f} %")
    about = "Relative to the ideal; dotted lines are 90, 80 and 50 %."
    if ahead:
        # The dashed line begins at the last measured point.
        shown = [*next(iter(variants.values()))[-1:], *ahead]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "forecast",
                "x": [row["ranks"] for row in shown],
                "y": [percent(row["efficiency"]) for row in shown],
                "line": {"color": plot.series_colour(0), "width": 1.5, "dash": "dash"},
                "marker": {"color": plot.series_colour(0), "size": 7, "symbol": "circle-open"},
                "hovertemplate": "%{x} ranks: %{y:.1f} %<extra>forecast, not measured</extra>",
            }
        )
        below = [
            f"{100 * float(level):.0f} % with {ranks}"
            for level, ranks in (forecast.get("below") or {}).items()
            if ranks is not None
        ]
        about += " The dashed line is a forecast, not a measurement."
        if below:
            about += f" It falls below {', '.join(below)} ranks."
    if forecast.get("reason"):
        reason = str(forecast["reason"]).strip().rstrip(".")
        about += f" {reason[:1].upper()}{reason[1:]}."
    rows = _with_flags(variants)
    return Figure(
        "Efficiency over ranks",
        about,
        _table(
            ["flags", "ranks", "efficiency %", "is"],
            [
                *((f, row["ranks"], percent(row["efficiency"]), "measured") for f, row in rows),
                *(("", row["ranks"], percent(row["efficiency"]), "forecast") for row in ahead),
            ],
        ),
        traces,
        {
            "xaxis": _ranks_axis([row["ranks"] for row in (*(r for _, r in rows), *ahead)]),
            "yaxis": plot.axis("%", rangemode="tozero"),
            "showlegend": True,
            "shapes": [plot.dotted_line(y=level) for level in (90, 80, 50)],
        },
        half=True,
    )


def _losses(variants: dict[str, Rows]) -> Figure:
    rows = _with_flags(variants)
    labels = [f"{_ranks(row['ranks'])} {flags}".strip() for flags, row in rows]
    others = list(dict.fromkeys(key for _, row in rows for key in row.get("other") or {}))
    return Figure(
        "Lost efficiency by cause",
        "Shares of the step that add up to the efficiency missing to 100 %. A negative share is a "
        "gain over the fewest ranks. The table splits `other`.",
        _table(
            [
                *(
                    "flags",
                    "ranks",
                    "lost %",
                    *(f"{plot.LOSS_NAMES[name]} %" for name in plot.LOSS_COLOURS),
                ),
                *(f"of other: {name} %" for name in others),
            ],
            [
                (
                    *(flags, row["ranks"], percent(1 - row["efficiency"])),
                    *(percent(row["loss"].get(name)) for name in plot.LOSS_COLOURS),
                    *(percent((row.get("other") or {}).get(name)) for name in others),
                )
                for flags, row in rows
            ],
        ),
        # Empty if one number of ranks was measured: nothing is lost.
        [
            plot.bar(
                plot.LOSS_NAMES[name],
                labels,
                [percent(row["loss"].get(name)) for _, row in rows],
                colour,
                "% of the step",
            )
            for name, colour in plot.LOSS_COLOURS.items()
            if any(row["loss"].get(name) for _, row in rows)
        ],
        plot.bar_layout(
            "% of the step", max(340, 150 + 34 * len(rows)), barmode="relative", showlegend=True
        ),
        half=True,
    )


def _fit(fit: dict[str, Any]) -> Figure:
    points = sorted(fit.get("points") or [], key=lambda each: float(each["bytes"]))
    alpha, beta = fit["alpha_s"], fit["beta_s_per_byte"]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for each in points:
        kinds.setdefault(f"{each['op']}, {each['ranks']} ranks", []).append(each)
    latency = f"α {1e6 * alpha:.3g} µs"
    if fit.get("best_case"):
        latency = "latency unknown (only one message size seen)"
    bandwidth = f" and {1e-9 / beta:.3g} GB/s (1/β)" if beta else ""
    r2 = "" if fit.get("r2") is None else f", R² {fit['r2']:.3f}"
    return Figure(
        "Time of collectives in the steps",
        f"Fitted: {latency}{bandwidth}{r2}. The forecast uses this fit.",
        Table(
            ["operation", "ranks", "bytes", "measured ms"],
            [(e["op"], e["ranks"], e["bytes"], milliseconds(e["seconds"])) for e in points],
        ),
        [
            plot.curve(
                name,
                number,
                [each["bytes"] for each in own],
                [milliseconds(each["seconds"]) for each in own],
                "%{text}: %{y:.4g} ms",
                mode="markers",
                text=[format_bytes(each["bytes"]) for each in own],
            )
            for number, (name, own) in enumerate(kinds.items())
        ],
        {
            "xaxis": plot.size_axis([each["bytes"] for each in points]),
            "yaxis": plot.log_axis("ms", [milliseconds(each["seconds"]) for each in points]),
            "showlegend": True,
        },
        half=True,
    )


def learning_rates(result: Result) -> Iterator[Figure]:
    """The loss over learning rates of `tutti scale --sweep lr=…`: a curve for each rank count."""
    rows = learning_rate_rows(result)
    if not rows:
        return
    by_ranks: dict[int, Rows] = {}
    for row in rows:
        by_ranks.setdefault(row["ranks"], []).append(row)
    diverged = any(row.get("diverged") for row in rows)
    yield Figure(
        "Loss over learning rates",
        "Training loss after the last step."
        + " Runs that diverged have no point; the table lists them." * diverged,
        Table(
            [
                *("learning rate", "ranks", "loss", "test loss", "test accuracy %"),
                *("samples/s", "steps", "diverged"),
            ],
            [
                (
                    *(learning_rate(row), row["ranks"]),
                    *(row.get("final_loss"), row.get("test_loss")),
                    *(percent(row.get("test_accuracy")), row.get("samples_per_s")),
                    *(row.get("steps"), bool(row.get("diverged"))),
                )
                for row in rows
            ],
        ),
        [
            plot.curve(
                _ranks(ranks),
                number,
                [learning_rate(row) for row in own],
                [row.get("final_loss") for row in own],
                "%{x}: %{y:.4g}",
            )
            for number, (ranks, own) in enumerate(sorted(by_ranks.items()))
        ],
        {
            "xaxis": plot.log_axis("learning rate", [learning_rate(row) for row in rows]),
            "yaxis": plot.axis("loss"),
            "showlegend": True,
        },
        half=True,
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _with_flags(variants: dict[str, Rows]) -> list[tuple[str, dict[str, Any]]]:
    return [(flags, row) for flags, rows in variants.items() for row in rows]


def _table(head: list[str], rows: list[tuple[Any, ...]]) -> Table:
    """The first column is flags: dropped if there are none."""
    if any(flags for flags, *_ in rows):
        return Table(head, rows)
    return Table(head[1:], [rest for _, *rest in rows])


def _curves(variants: dict[str, Rows], key: str, factor: float, hover: str) -> list[dict[str, Any]]:
    return [
        plot.curve(
            flags or "measured",
            number,
            [row["ranks"] for row in rows],
            [factor * row[key] for row in rows],
            hover,
            error_y=_error_bars(rows, key, factor),
        )
        for number, (flags, rows) in enumerate(variants.items())
    ]


def _error_bars(rows: Rows, key: str, factor: float) -> dict[str, Any]:
    """To the quartiles; the median of few repeats may lie slightly outside of them."""
    up, down = [], []
    for row in rows:
        low, high = _quartiles(row, key)
        up.append(factor * max(0.0, (row[key] if high is None else high) - row[key]))
        down.append(factor * max(0.0, row[key] - (row[key] if low is None else low)))
    return {"type": "data", "array": up, "arrayminus": down, "thickness": 1.2}


def _quartiles(row: dict[str, Any], key: str) -> tuple[float | None, float | None]:
    found = row.get(f"{key}_spread") or (None, None)
    return found[0], found[1]


def _ranks_axis(ranks: list[int]) -> dict[str, Any]:
    values = sorted(set(ranks))
    powers_of_two = [each for each in values if each & (each - 1) == 0]
    return plot.log_axis("ranks", values if len(values) <= 10 else powers_of_two, at_values=True)
