"""Figures of scaling results: throughput, efficiency, lost efficiency, fit, learning rates."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tutti.measure.units import plural
from tutti.report import plot
from tutti.report.plot import Figure, Row, Table, column
from tutti.report.sources import Result
from tutti.report.summary import learning_rate_rows, scale_rows


def scaling(result: Result) -> Iterator[Figure]:
    """Yield the figures of a scaling result. A sweep has one curve per combination of flags."""
    content, variants = result.content, scale_rows(result)
    if variants:
        rows = [{"variant": flags, **row} for flags in variants for row in variants[flags]]
        mode = content.get("mode") or "unknown"
        yield _throughput(variants, rows, mode, content.get("unit") or "samples/s")
        yield _efficiency(variants, rows, content.get("forecast") or {})
        yield _losses(rows)
    if content.get("fit"):
        yield _fit(content["fit"])


def _throughput(variants: dict[str, list[Row]], rows: list[Row], mode: str, unit: str) -> Figure:
    work = {"strong": "the same work, divided among more ranks", "weak": "equal work per rank"}
    base = rows[0]["samples_per_s"]
    ranks = sorted({row["ranks"] for row in rows})
    ideal = [base * number / rows[0]["ranks"] for number in ranks]
    # Both axes are logarithmic, so ideal scaling is a straight line. Ticks are at factors of two.
    speeds = [*ideal, *column(rows, "samples_per_s")]
    low, high = (math.log2(value / base) for value in (min(speeds), max(speeds)))
    ticks = [base * 2.0**power for power in range(math.floor(low), math.ceil(high) + 1)]
    limits = [math.log10(ticks[0]) - 0.04, math.log10(ticks[-1]) + 0.04]
    dotted = {"color": plot.GREY, "dash": "dot"}
    ideal_line = plot.curve(
        "ideal", 0, ranks, ideal, "%{x} ranks: %{y:,.0f}", mode="lines", line=dotted
    )
    layout = {
        "xaxis": _ranks_axis(ranks),
        "yaxis": plot.log_axis(unit, ticks, at_values=True, range=limits),
    }
    traces = [ideal_line, *_curves(variants, "samples_per_s", 1, "%{x} ranks: %{y:,.1f}")]
    meaning = work.get(mode, "the mode is not recorded")
    words: dict[str, Any] = {"mode": mode.capitalize(), "work": meaning, "unit": unit}
    return _figure("throughput_over_ranks", rows, traces, layout, **words)


def _efficiency(
    variants: dict[str, list[Row]], rows: list[Row], forecast: dict[str, Any]
) -> Figure:
    ahead = sorted(forecast.get("rows") or [], key=lambda row: int(row["ranks"]))
    traces = _curves(variants, "efficiency", 100, "%{x} ranks: %{y:.1f} %")
    about = ""
    if ahead:
        # The dashed line begins at the last measured point.
        shown = [*next(iter(variants.values()))[-1:], *ahead]
        traces.append(
            plot.curve(
                "forecast",
                0,
                column(shown, "ranks"),
                column(shown, "100*efficiency"),
                line={"width": 1.5, "dash": "dash"},
                marker={"size": 7, "symbol": "circle-open"},
                hovertemplate="%{x} ranks: %{y:.1f} %<extra>forecast, not measured</extra>",
            )
        )
        below = [
            f"{100 * float(level):.0f} % with {ranks}"
            for level, ranks in (forecast.get("below") or {}).items()
            if ranks is not None
        ]
        about += " The dashed line is a forecast, not a measurement."
        if below:
            about += f" Efficiency falls below {', '.join(below)} ranks."
    if forecast.get("reason"):
        reason = str(forecast["reason"]).strip().rstrip(".")
        about += f" {reason[:1].upper()}{reason[1:]}."
    all_rows = [row | {"kind": "measured"} for row in rows]
    all_rows += [{"variant": "", "kind": "forecast", **row} for row in ahead]
    layout = {
        "xaxis": _ranks_axis(column(all_rows, "ranks")),
        "yaxis": plot.axis("%", rangemode="tozero"),
        "showlegend": True,
        "shapes": [plot.dotted_line(y=level) for level in (90, 80, 50)],
    }
    return _figure("efficiency_over_ranks", all_rows, traces, layout, forecast=about)


def _losses(rows: list[Row]) -> Figure:
    labels = [f"{plural(row['ranks'], 'rank')} {row['variant']}".strip() for row in rows]
    others = dict.fromkeys(key for row in rows for key in row.get("other") or {})
    causes = [f"{plot.NAMES[name]} %=100*loss.{name}?" for name in plot.LOSS_COLOURS]
    causes += [f"of other: {name} %=100*other.{name}?" for name in others]
    # With only one number of ranks there are no bars, because all causes are 0.
    bars = [
        plot.bar(plot.NAMES[name], labels, shares, colour, "% of the step")
        for name, colour in plot.LOSS_COLOURS.items()
        if any(shares := column(rows, f"100*loss.{name}?"))
    ]
    height = max(340, 150 + 34 * len(rows))
    layout = plot.bar_layout("% of the step", height, barmode="relative", showlegend=True)
    lost = [row | {"lost": 1 - row["efficiency"]} for row in rows]
    return _figure("lost_efficiency", lost, bars, layout, causes=", ".join(causes))


def _fit(fit: dict[str, Any]) -> Figure:
    points = sorted(fit.get("points") or [], key=lambda point: float(point["bytes"]))
    latency = f"α {1e6 * fit['alpha_s']:.3g} µs"
    if fit.get("best_case"):
        latency = "latency unknown (only one message size was measured)"
    beta = fit["beta_s_per_byte"]
    bandwidth = f" and {1e-9 / beta:.3g} GB/s (1/β)" if beta else ""
    r2 = "" if fit.get("r2") is None else f", R² {fit['r2']:.3f}"
    groups = plot.grouped(points, lambda point: f"{point['op']}, {point['ranks']} ranks")
    curves = plot.size_curves(groups, "1e3*seconds", "ms", mode="markers")
    words: dict[str, Any] = {"latency": latency, "bandwidth": bandwidth, "r2": r2}
    return plot.figure("collective_fit", points, *curves, **words)


def learning_rates(result: Result) -> Iterator[Figure]:
    """Yield the loss over learning rates of `tutti scale --sweep lr=…`.

    There is one curve per number of ranks.
    """
    rows = [row | {"diverged": bool(row.get("diverged"))} for row in learning_rate_rows(result)]
    if not rows:
        return
    diverged = any(row["diverged"] for row in rows)
    by_ranks = sorted(plot.grouped(rows, lambda row: row["ranks"]).items())
    curves = []
    for number, (ranks, group) in enumerate(by_ranks):
        rates, losses = column(group, "lr"), column(group, "final_loss?")
        curves.append(plot.curve(plural(ranks, "rank"), number, rates, losses, "%{x}: %{y:.4g}"))
    layout = {
        "xaxis": plot.log_axis("learning rate", column(rows, "lr")),
        "yaxis": plot.axis("loss"),
        "showlegend": True,
    }
    about = " Runs that diverged have no point, but the table lists them." * diverged
    yield plot.figure("learning_rates", rows, curves, layout, diverged=about)


def _figure(key: str, rows: list[Row], *parts: Any, **words: Any) -> Figure:
    """Return a figure. If no row has flags, the table has no column of flags."""
    figure = plot.figure(key, rows, *parts, **words)
    if any(row["variant"] for row in rows):
        return figure
    table = Table(figure.table.head[1:], [row[1:] for row in figure.table.rows])
    return replace(figure, table=table)


def _curves(
    variants: dict[str, list[Row]], key: str, factor: float, hover: str
) -> list[dict[str, Any]]:
    """Return one curve per variant, with error bars to the quartiles."""
    curves = []
    for number, (flags, rows) in enumerate(variants.items()):
        up, down = [], []
        for row in rows:
            low, high = row.get(f"{key}_spread") or (row[key], row[key])
            # With few repeats, the median may be slightly outside of the quartiles.
            up.append(factor * max(0.0, high - row[key]))
            down.append(factor * max(0.0, row[key] - low))
        bars = {"array": up, "arrayminus": down}
        ranks, values = column(rows, "ranks"), [factor * row[key] for row in rows]
        curves.append(plot.curve(flags or "measured", number, ranks, values, hover, error_y=bars))
    return curves


def _ranks_axis(ranks: list[int]) -> dict[str, Any]:
    values = sorted(set(ranks))
    powers_of_two = [value for value in values if value & (value - 1) == 0]
    return plot.log_axis("ranks", values if len(values) <= 10 else powers_of_two, at_values=True)
