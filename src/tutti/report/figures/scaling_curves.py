"""Scaling: throughput, efficiency with its forecast, loss by cause, fit; learning rate sweeps."""

import math
from collections.abc import Iterator
from typing import Any

from tutti.report import plot
from tutti.report.plot import Figure, HalfFigure, Row, Table, column
from tutti.report.sources import Result
from tutti.report.summary import learning_rate, learning_rate_rows, scale_rows, throughput_unit


def scaling(result: Result) -> Iterator[Figure]:
    """The figures of one scaling series, or of all flags of a sweep."""
    content, variants = result.content, scale_rows(result)
    if variants:
        rows = [{"variant": flags, **row} for flags, own in variants.items() for row in own]
        mode = content.get("mode") or "unknown"
        yield _throughput(variants, rows, mode, throughput_unit(result))
        yield _efficiency(variants, rows, content.get("forecast") or {})
        yield _losses(rows)
    if content.get("fit"):
        yield _fit(content["fit"])


def _throughput(variants: dict[str, list[Row]], rows: list[Row], mode: str, unit: str) -> Figure:
    meaning = {
        "strong": ": the same work, divided among more ranks",
        "weak": ": the same work on each rank",
    }.get(mode, "")
    base = rows[0]["samples_per_s"]
    ranks = sorted({row["ranks"] for row in rows})
    ideal = [base * each / rows[0]["ranks"] for each in ranks]
    # Both axes are logarithmic: the ideal is a straight line. Each tick is twice the previous tick.
    speeds = [*ideal, *column(rows, "samples_per_s")]
    low, high = (math.log2(value / base) for value in (min(speeds), max(speeds)))
    ticks = [base * 2.0**power for power in range(math.floor(low), math.ceil(high) + 1)]
    limits = [math.log10(ticks[0]) - 0.04, math.log10(ticks[-1]) + 0.04]
    ideal_line = {
        "type": "scatter",
        "mode": "lines",
        "name": "ideal",
        "x": ranks,
        "y": ideal,
        "line": {"color": plot.GREY, "dash": "dot", "width": 2},
        "hovertemplate": "%{x} ranks: %{y:,.0f}<extra>ideal</extra>",
    }
    return HalfFigure(
        "Throughput over ranks",
        f"{mode.capitalize()} scaling{meaning}. Error bars are the quartiles of the repeats.",
        _table(
            [
                row | _quartiles(row, "samples_per_s") | _quartiles(row, "efficiency")
                for row in rows
            ],
            f"flags=variant, ranks, {unit}=samples_per_s, p25=samples_per_s_p25, "
            "p75=samples_per_s_p75, step ms=1e3*step_s?, speed-up=speedup, "
            "efficiency %=100*efficiency, p25 %=100*efficiency_p25, p75 %=100*efficiency_p75, "
            "repeats?, late rank=late.rank?",
        ),
        [ideal_line, *_curves(variants, "samples_per_s", 1, "%{x} ranks: %{y:,.1f}")],
        {
            "xaxis": _ranks_axis(ranks),
            "yaxis": plot.log_axis(unit, ticks, at_values=True, range=limits),
            "showlegend": True,
        },
    )


def _efficiency(
    variants: dict[str, list[Row]], rows: list[Row], forecast: dict[str, Any]
) -> Figure:
    ahead = sorted(forecast.get("rows") or [], key=lambda row: int(row["ranks"]))
    traces = _curves(variants, "efficiency", 100, "%{x} ranks: %{y:.1f} %")
    about = "Relative to the ideal; dotted lines are 90, 80 and 50 %."
    if ahead:
        # The dashed line begins at the last measured point.
        shown = [*next(iter(variants.values()))[-1:], *ahead]
        traces.append(
            plot.curve("forecast", 0, column(shown, "ranks"), column(shown, "100*efficiency"))
            | {
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
    every = [row | {"is": "measured"} for row in rows]
    every += [{"variant": "", "is": "forecast", **row} for row in ahead]
    return HalfFigure(
        "Efficiency over ranks",
        about,
        _table(every, "flags=variant, ranks, efficiency %=100*efficiency, is"),
        traces,
        {
            "xaxis": _ranks_axis(column(every, "ranks")),
            "yaxis": plot.axis("%", rangemode="tozero"),
            "showlegend": True,
            "shapes": [plot.dotted_line(y=level) for level in (90, 80, 50)],
        },
    )


def _losses(rows: list[Row]) -> Figure:
    labels = [f"{_ranks(row['ranks'])} {row['variant']}".strip() for row in rows]
    others = dict.fromkeys(key for row in rows for key in row.get("other") or {})
    columns = ["flags=variant", "ranks", "lost %=100*lost"]
    columns += [f"{plot.LOSS_NAMES[name]} %=100*loss.{name}?" for name in plot.LOSS_COLOURS]
    columns += [f"of other: {name} %=100*other.{name}?" for name in others]
    return HalfFigure(
        "Lost efficiency by cause",
        "Shares of the step that add up to the efficiency missing to 100 %. A negative share is a "
        "gain over the fewest ranks. The table splits `other`.",
        _table([row | {"lost": 1 - row["efficiency"]} for row in rows], ", ".join(columns)),
        # Empty if only one number of ranks was measured: then no efficiency is lost.
        [
            plot.bar(plot.LOSS_NAMES[name], labels, shares, colour, "% of the step")
            for name, colour in plot.LOSS_COLOURS.items()
            if any(shares := column(rows, f"100*loss.{name}?"))
        ],
        plot.bar_layout(
            "% of the step", max(340, 150 + 34 * len(rows)), barmode="relative", showlegend=True
        ),
    )


def _fit(fit: dict[str, Any]) -> Figure:
    points = sorted(fit.get("points") or [], key=lambda each: float(each["bytes"]))
    latency = f"α {1e6 * fit['alpha_s']:.3g} µs"
    if fit.get("best_case"):
        latency = "latency unknown (only one message size seen)"
    beta = fit["beta_s_per_byte"]
    bandwidth = f" and {1e-9 / beta:.3g} GB/s (1/β)" if beta else ""
    r2 = "" if fit.get("r2") is None else f", R² {fit['r2']:.3f}"
    return plot.size_figure(
        "Time of collectives in the steps",
        f"Fitted: {latency}{bandwidth}{r2}. The forecast uses this fit.",
        plot.table(points, "operation=op, ranks, bytes, measured ms=1e3*seconds"),
        plot.grouped(points, lambda each: f"{each['op']}, {each['ranks']} ranks"),
        "1e3*seconds",
        "ms",
        mode="markers",
    )


def learning_rates(result: Result) -> Iterator[Figure]:
    """The loss over learning rates of `tutti scale --sweep lr=…`: a curve per number of ranks."""
    rows = [
        row | {"lr": learning_rate(row), "diverged": bool(row.get("diverged"))}
        for row in learning_rate_rows(result)
    ]
    if not rows:
        return
    diverged = any(row["diverged"] for row in rows)
    by_ranks = sorted(plot.grouped(rows, lambda row: row["ranks"]).items())
    yield HalfFigure(
        "Loss over learning rates",
        "Training loss after the last step."
        + " Runs that diverged have no point; the table lists them." * diverged,
        plot.table(
            rows,
            "learning rate=lr, ranks, loss=final_loss?, test loss=test_loss?, "
            "test accuracy %=100*test_accuracy?, samples/s=samples_per_s?, steps?, diverged",
        ),
        [
            plot.curve(
                _ranks(ranks),
                number,
                column(own, "lr"),
                column(own, "final_loss?"),
                "%{x}: %{y:.4g}",
            )
            for number, (ranks, own) in enumerate(by_ranks)
        ],
        {
            "xaxis": plot.log_axis("learning rate", column(rows, "lr")),
            "yaxis": plot.axis("loss"),
            "showlegend": True,
        },
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _table(rows: list[Row], columns: str) -> Table:
    """A table whose first column, the flags, is dropped if no row has flags."""
    has_flags = any(row["variant"] for row in rows)
    return plot.table(rows, columns if has_flags else columns.partition(", ")[2])


def _curves(
    variants: dict[str, list[Row]], key: str, factor: float, hover: str
) -> list[dict[str, Any]]:
    return [
        plot.curve(
            flags or "measured",
            number,
            column(rows, "ranks"),
            [factor * row[key] for row in rows],
            hover,
            error_y=_error_bars(rows, key, factor),
        )
        for number, (flags, rows) in enumerate(variants.items())
    ]


def _error_bars(rows: list[Row], key: str, factor: float) -> dict[str, Any]:
    """Error bars to the quartiles; of few repeats, the median may be slightly outside of them."""
    up, down = [], []
    for row in rows:
        low, high = row.get(f"{key}_spread") or (row[key], row[key])
        up.append(factor * max(0.0, high - row[key]))
        down.append(factor * max(0.0, row[key] - low))
    return {"type": "data", "array": up, "arrayminus": down, "thickness": 1.2}


def _quartiles(row: Row, key: str) -> Row:
    low, high = row.get(f"{key}_spread") or (None, None)
    return {f"{key}_p25": low, f"{key}_p75": high}


def _ranks_axis(ranks: list[int]) -> dict[str, Any]:
    values = sorted(set(ranks))
    powers_of_two = [each for each in values if each & (each - 1) == 0]
    return plot.log_axis("ranks", values if len(values) <= 10 else powers_of_two, at_values=True)
