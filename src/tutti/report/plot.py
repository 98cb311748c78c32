"""Figure: a plot or a picture with a table of its numbers; colours, axes, common plotly traces.

Plots are plain dictionaries for plotly.js. Text from files may appear anywhere except in templates
(`hovertemplate`, `texttemplate`), in which plotly interprets tags: only tutti.report writes
templates. All other text is escaped before the page is written.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from tutti.measure.units import format_bytes

# The maximum number of points of a curve and rows of its table: the page stays small and printable.
MOST_POINTS = 400
_TEMPLATES = ("hovertemplate", "texttemplate")

# The colours of Okabe and Ito, which people with any colour vision can distinguish. A part of a
# step has the same colour in every figure.
BLUE, SKY, ORANGE, VERMILION = "#0072b2", "#56b4e9", "#e69f00", "#d55e00"
GREEN, PURPLE, GREY, PALE = "#009e73", "#cc79a7", "#7d8590", "#b6bdc7"
PART_COLOURS = {
    "compute": BLUE,
    "hidden": SKY,
    "exposed": ORANGE,
    "wait": VERMILION,
    "bubble": PURPLE,
    "input": GREEN,
    "host_gap": GREY,
    "rest": PALE,
}
PART_NAMES = {name: name for name in PART_COLOURS} | {
    "hidden": "hidden communication",
    "exposed": "exposed communication",
    "host_gap": "gaps",
}
LOSS_COLOURS = {
    "exposed_comm": ORANGE,
    "wait": VERMILION,
    "bubble": PURPLE,
    "input": GREEN,
    "other": GREY,
}
LOSS_NAMES = {name: name for name in LOSS_COLOURS} | {"exposed_comm": "exposed communication"}
_SERIES_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY)
DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Unrounded numbers; `head` names the units. The page sorts by value and rounds for display."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]

    @property
    def numeric(self) -> list[bool]:
        """Whether each column holds only numbers."""
        columns = zip(*self.rows, strict=True) if self.rows else ([] for _ in self.head)
        return [all(_is_number(cell) for cell in column) for column in columns]


def _is_number(cell: Any) -> bool:
    return cell is None or (isinstance(cell, int | float) and not isinstance(cell, bool))


@dataclass(frozen=True)
class Figure:
    """A plot or pictures, with a table; without traces and pictures, only the table is shown."""

    title: str
    about: str
    table: Table
    traces: Sequence[dict[str, Any]] = ()
    layout: Mapping[str, Any] = field(default_factory=dict)
    pictures: tuple[str, str] | None = None
    """An SVG for light pages, and one for dark pages."""
    half: bool = False
    """Whether the figure has half the width of a wide page."""


HalfFigure = partial(Figure, half=True)


def column(rows: Iterable[Mapping[str, Any]], source: str) -> list[Any]:
    """The value of `source` in each row: `time_us.p50`, `100*share`, `late.rank?` (optional)."""
    factor, _, path = source.rpartition("*")
    optional = path.endswith("?")
    values = []
    for row in rows:
        value: Any = row
        for key in path.removesuffix("?").split("."):
            value = (value or {}).get(key) if optional else value[key]
        values.append(value if value is None or not factor else float(factor) * value)
    return values


def table(rows: Sequence[Mapping[str, Any]], columns: str) -> Table:
    """A table with `columns` such as `ranks, step ms=1e3*step_s.mean`: titles and sources."""
    named = [each.partition("=") for each in columns.split(", ")]
    values = [column(rows, source or title) for title, _, source in named]
    return Table([title.removesuffix("?") for title, *_ in named], list(zip(*values, strict=True)))


def grouped(rows: Iterable[Row], name: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """The rows grouped by `name(row)`, in order."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return groups


def plotly_data(figure: Figure) -> dict[str, Any]:
    """The data and layout that the page's script draws, with all text escaped."""
    return {"data": _escape(list(figure.traces)), "layout": _escape(dict(figure.layout))}


def _escape(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _escape(each, str(name)) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_escape(each, key) for each in value]
    if isinstance(value, str) and key not in _TEMPLATES:
        return value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no infinity and no nan
    return value


def bar(
    name: str, labels: Sequence[str], values: Sequence[Any], colour: str, unit: str, **more: Any
) -> dict[str, Any]:
    """A horizontal bar for each label."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": labels,
        "x": values,
        "marker": {"color": colour},
        "hovertemplate": f"%{{y}}: %{{x:.4~g}} {unit}<extra>%{{fullData.name}}</extra>",
        **more,
    }


def curve(
    name: str, number: int, x: Sequence[Any], y: Sequence[Any], hover: str = "", **more: Any
) -> dict[str, Any]:
    """Points joined by lines, in the colour and with the symbol of series `number`.

    `hover` is a plotly template; without one plotly shows both coordinates.
    """
    colour = series_colour(number)
    symbol = _SYMBOLS[number % len(_SYMBOLS)]
    trace = {"type": "scatter", "mode": "lines+markers", "name": name, "x": x, "y": y}
    trace["line"] = {"color": colour, "width": 2} | more.pop("line", {})
    trace["marker"] = {"color": colour, "symbol": symbol, "size": 8} | more.pop("marker", {})
    if hover:
        trace["hovertemplate"] = hover + "<extra>%{fullData.name}</extra>"
    return trace | more


def heatmap(
    columns: Sequence[str], rows: Sequence[str], cells: Any, unit: str, **more: Any
) -> dict[str, Any]:
    """A heat map; the numbers of a small matrix are printed in the cells."""
    values = [cell for row in cells for cell in row if cell]
    return {
        "type": "heatmap",
        "x": columns,
        "y": rows,
        "z": cells,
        "zmin": 0,
        "zmax": max(values, default=1),
        "hoverongaps": False,
        "xgap": 2,
        "ygap": 2,
        "texttemplate": "%{z:.3~g}" if len(rows) <= 10 else "",
        "colorbar": {"title": {"text": unit}, "thickness": 10},
        **more,
    }


def heatmap_layout(rows: Sequence[str]) -> dict[str, Any]:
    return {
        "height": min(620, 190 + 34 * len(rows)),
        "xaxis": {"type": "category", "side": "top", "showgrid": False},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
    }


def bar_layout(title: str, height: float, **more: Any) -> dict[str, Any]:
    """The layout of horizontal bars: the first label at the top, `title` below the values."""
    return {"height": height, "xaxis": axis(title), "yaxis": dict(LABEL_AXIS), **more}


LABEL_AXIS = {"autorange": "reversed", "type": "category"}


def dotted_line(colour: str = GREY, **at: float) -> dict[str, Any]:
    """A dotted line across the plot at x=… or y=…."""
    ((name, value),) = at.items()
    across = "y" if name == "x" else "x"
    ends = {f"{name}0": value, f"{name}1": value, f"{across}0": 0, f"{across}1": 1}
    line = {"dash": "dot", "width": 1, "color": colour}
    return {"type": "line", f"{across}ref": "paper", **ends, "line": line}


def series_colour(number: int) -> str:
    """The colour of a numbered run, backend or rank."""
    return _SERIES_COLOURS[number % len(_SERIES_COLOURS)]


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def log_axis(
    title: str, values: Sequence[float | None], *, at_values: bool = False, **more: Any
) -> dict[str, Any]:
    """A logarithmic axis with explicit ticks that do not overlap.

    Ticks are at round numbers, or at `values` if `at_values` is set.
    """
    ticks = sorted({value for value in values if value and value > 0})
    if len(ticks) > 1 and not at_values:
        round_ticks = _round_ticks(ticks[0], ticks[-1])
        ticks = round_ticks if len(round_ticks) > 1 else ticks
    ticks = _spaced(ticks)
    return axis(
        title,
        type="log",
        tickmode="array",
        tickvals=ticks,
        ticktext=[f"{tick:,.0f}" if tick >= 1000 else f"{tick:.3g}" for tick in ticks],
        **more,
    )


def size_figure(
    title: str,
    about: str,
    numbers: Table,
    lines: Mapping[str, Sequence[Row]],
    source: str,
    unit: str,
    height: int | None = None,
    **more: Any,
) -> Figure:
    """A value over message size, both logarithmic, with a line for each group of rows.

    Ticks are at message sizes that occur, such as 64 KiB. A value of 0 is left out, because it has
    no logarithm.
    """
    every = [row for rows in lines.values() for row in rows]
    values = {name: [value or None for value in column(lines[name], source)] for name in lines}
    ticks = _spaced(sorted({row["bytes"] for row in every if row["bytes"]}), 0.13)
    size_axis = axis("message", type="log", tickmode="array", tickvals=ticks, tickangle=0)
    size_axis["ticktext"] = [format_bytes(size) for size in ticks]
    layout = {
        "xaxis": size_axis,
        "yaxis": log_axis(unit, [value for each in values.values() for value in each]),
        "showlegend": True,
    }
    traces = [
        curve(
            name,
            number,
            column(rows, "bytes"),
            values[name],
            f"%{{text}}: %{{y:.4g}} {unit}",
            text=[format_bytes(row["bytes"]) for row in rows],
            **more,
        )
        for number, (name, rows) in enumerate(lines.items())
    ]
    return HalfFigure(
        title, about, numbers, traces, layout | ({"height": height} if height else {})
    )


def _round_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten in a range; in a long range only the powers of ten."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 4 else (1,)
    candidates = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    return [tick for tick in candidates if 0.99 * low <= tick <= 1.01 * high]


def _spaced(ticks: Sequence[float], gap: float = 0.07) -> list[float]:
    """The ticks that are at least a fraction `gap` of the logarithmic axis apart."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or tick >= kept[-1] * (ticks[-1] / ticks[0]) ** gap:
            kept.append(tick)
    return kept


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS points, each the mean of the same number of neighbouring points."""
    count = -(-len(points) // MOST_POINTS)
    if count <= 1:
        return list(points)
    stretches = [points[start : start + count] for start in range(0, len(points), count)]
    return [(fmean(x for x, _ in each), fmean(y for _, y in each)) for each in stretches]
