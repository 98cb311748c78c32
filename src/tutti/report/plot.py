"""Figures, colours, axes and plotly traces. A figure is a plot or a picture, with a table.

Plots are plain dictionaries for plotly.js. All text is escaped before the page is written, except
the templates `hovertemplate` and `texttemplate`, in which plotly interprets HTML tags. Templates
never contain text from files.
"""

import html
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from tutti.measure.units import format_bytes

# Maximum number of points in a curve and of rows in its table, to limit the size of the page.
MAX_POINTS = 400

# Colours for all marks except the parts of a step and the causes of lost efficiency. colours.toml
# has the same values.
BLUE, SKY, ORANGE, VERMILION = "#0072b2", "#56b4e9", "#e69f00", "#d55e00"
GREEN, PURPLE, GREY = "#009e73", "#cc79a7", "#7d8590"
_STYLE = tomllib.loads(Path(__file__).with_name("colours.toml").read_text())
_TEXTS = tomllib.loads(Path(__file__).with_name("figures.toml").read_text())
PART_COLOURS, LOSS_COLOURS = _STYLE["parts"], _STYLE["losses"]
NAMES = {name: name for name in (*PART_COLOURS, *LOSS_COLOURS)} | _STYLE["names"]
_SERIES_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY)
COLOURS = len(_SERIES_COLOURS)
DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A table of exact numbers. The page shows rounded numbers. `head` has the column titles."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]

    @property
    def numeric(self) -> list[bool]:
        """For each column, whether it contains only numbers."""
        columns = zip(*self.rows, strict=True) if self.rows else ([] for _ in self.head)
        kinds = ({type(cell) for cell in column} for column in columns)
        return [kind <= {int, float, type(None)} for kind in kinds]


@dataclass(frozen=True)
class Figure:
    """A plot or pictures, with a table. If there is neither, only the table is shown."""

    title: str
    description: str
    table: Table
    traces: Sequence[dict[str, Any]] = ()
    layout: Mapping[str, Any] = field(default_factory=dict)
    pictures: tuple[str, str] | None = None
    """(SVG for the light theme of the page, SVG for the dark theme)."""
    half_width: bool = False
    """Whether the figure takes half of the width of a wide page."""
    x_axes: Mapping[str, str] = field(default_factory=dict)
    """{key: title} of the x axes that the reader can choose for training curves.

    The x values of a trace are in `x` for the key "step", and in `xs[key]` for any other key.
    """
    variants: Mapping[str, tuple[Sequence[dict[str, Any]], Mapping[str, Any]]] = field(
        default_factory=dict
    )
    """{name: (traces, layout)} of the variants that the reader can choose.

    The first variant has the same data as `traces` and `layout`.
    """

    def __post_init__(self) -> None:
        """Raise TypeError if a value is not a number. plotly would draw it as a category."""
        labels = self.layout.get("yaxis", {}).get("type") == "category"
        for trace in self.traces:
            across = labels or trace.get("orientation") == "h"
            key = "z" if "z" in trace else "x" if across else "y"
            for value in trace[key]:
                numbers = value if isinstance(value, list | tuple) else [value]
                if wrong := [cell for cell in numbers if not isinstance(cell, int | float | None)]:
                    raise TypeError(f"{wrong[0]!r} is not a number")


def column(rows: Iterable[Mapping[str, Any]], source: str) -> list[Any]:
    """Return the value of `source` in each row.

    `source` is a path such as `time_us.p50` or `spread.0`. It may have a factor, as in `100*share`.
    If it ends in `?`, the value is None in rows without this path.
    """
    factor, _, path = source.rpartition("*")
    optional = path.endswith("?")
    values = []
    for row in rows:
        value: Any = row
        for key in path.removesuffix("?").split("."):
            if isinstance(value, list | tuple):
                value = value[int(key)]
            else:
                value = (value or {}).get(key) if optional else value[key]
        values.append(value if value is None or not factor else float(factor) * value)
    return values


def table(rows: Sequence[Mapping[str, Any]], columns: str) -> Table:
    """Return a table. Each of the comma-separated `columns` is `source` or `title=source`."""
    pairs = [text.partition("=") for text in columns.split(", ")]
    values = [column(rows, source or title) for title, _, source in pairs]
    return Table([title.removesuffix("?") for title, *_ in pairs], list(zip(*values, strict=True)))


def figure(
    key: str,
    rows: Sequence[Mapping[str, Any]],
    traces: Sequence[dict[str, Any]] = (),
    layout: Mapping[str, Any] | None = None,
    pictures: tuple[str, str] | None = None,
    x_axes: Mapping[str, str] | None = None,
    variants: Mapping[str, tuple[Sequence[dict[str, Any]], Mapping[str, Any]]] | None = None,
    **words: object,
) -> Figure:
    """Return a figure with the texts of `key` in figures.toml.

    `words` replace the names in braces in the texts.
    """
    texts = _TEXTS[key]
    keys = ("title", "description", "columns")
    title, description, columns = (texts[name].format(**words) for name in keys)
    half_width = texts.get("half_width", False)
    numbers = table(rows, columns)
    return Figure(
        *(title, description.strip(), numbers, traces, layout or {}, pictures, half_width),
        x_axes=x_axes or {},
        variants=variants or {},
    )


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Return {key(row): rows with this key}, in the order of the first row of each group."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def plotly_data(figure: Figure) -> dict[str, Any]:
    """Return the data and layout for the script of the page, with all text escaped."""
    variants = [
        {"data": _escape(list(traces)), "layout": _escape(dict(layout))}
        for traces, layout in figure.variants.values() or [(figure.traces, figure.layout)]
    ]
    return {"variants": variants, "x_axes": _escape(dict(figure.x_axes))}


def _escape(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _escape(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape(item, key) for item in value]
    if isinstance(value, str) and key not in ("hovertemplate", "texttemplate", "run"):
        return html.escape(value, quote=False)
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no infinity and no nan
    return value


def bar(
    name: str, labels: Sequence[str], values: Sequence[Any], colour: str, unit: str, **more: Any
) -> dict[str, Any]:
    """Return a trace with one horizontal bar per label."""
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
    """Return a trace of points joined by lines, with the colour and symbol of series `number`.

    `hover` is a plotly template. Without a template, plotly shows both coordinates.
    """
    colour = _SERIES_COLOURS[number % len(_SERIES_COLOURS)]
    symbol = _SYMBOLS[number % len(_SYMBOLS)]
    trace = {"type": "scatter", "mode": "lines+markers", "name": name, "x": x, "y": y}
    trace["line"] = {"color": colour, "width": 2} | more.pop("line", {})
    trace["marker"] = {"color": colour, "symbol": symbol, "size": 8} | more.pop("marker", {})
    if hover:
        trace["hovertemplate"] = hover + "<extra>%{fullData.name}</extra>"
    return trace | more


def heatmap(
    columns: Sequence[str],
    rows: Sequence[str],
    cells: Sequence[Sequence[Any]],
    unit: str,
    hover: str,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (traces, layout) of a heatmap. The cells of a small matrix show their numbers."""
    trace = {
        "type": "heatmap",
        "x": columns,
        "y": rows,
        "z": cells,
        "zmin": 0,
        "zmax": max((cell for row in cells for cell in row if cell), default=1),
        "hoverongaps": False,
        "xgap": 2,
        "ygap": 2,
        "texttemplate": "%{z:.3~g}" if len(rows) <= 10 else "",
        "colorbar": {"title": {"text": unit}, "thickness": 10},
        "hovertemplate": f"{hover}<extra></extra>",
    }
    layout = {
        "height": min(620, 190 + 34 * len(rows)),
        "xaxis": {"type": "category", "side": "top", "showgrid": False},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
    }
    return [trace], layout


def bar_layout(title: str, height: float, **more: Any) -> dict[str, Any]:
    """Return the layout of horizontal bars, with the first label at the top."""
    labels = {"autorange": "reversed", "type": "category"}
    return {"height": height, "xaxis": axis(title), "yaxis": labels, **more}


def dotted_line(colour: str = GREY, **at: float) -> dict[str, Any]:
    """Return a dotted line across the plot at x=… or y=…."""
    ((name, value),) = at.items()
    across = "y" if name == "x" else "x"
    ends = {f"{name}0": value, f"{name}1": value, f"{across}0": 0, f"{across}1": 1}
    line = {"dash": "dot", "width": 1, "color": colour}
    return {"type": "line", f"{across}ref": "paper", **ends, "line": line}


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def log_axis(
    title: str, values: Sequence[float | None], *, at_values: bool = False, **more: Any
) -> dict[str, Any]:
    """Return a logarithmic axis with explicit ticks that do not overlap.

    Ticks are at 1, 2 and 5 times the powers of ten. If the axis has more than four decades, ticks
    are only at the powers of ten. With `at_values`, ticks are at `values`.
    """
    ticks = sorted({value for value in values if value and value > 0})
    if len(ticks) > 1 and not at_values:
        first, last = math.floor(math.log10(ticks[0])), math.ceil(math.log10(ticks[-1]))
        factors = (1, 2, 5) if last - first <= 4 else (1,)
        powers = range(first, last + 1)
        candidates = [factor * 10.0**power for power in powers for factor in factors]
        inside = [tick for tick in candidates if 0.99 * ticks[0] <= tick <= 1.01 * ticks[-1]]
        ticks = inside if len(inside) > 1 else ticks
    ticks = _spaced(ticks)
    return axis(
        title,
        type="log",
        tickmode="array",
        tickvals=ticks,
        ticktext=[f"{tick:,.0f}" if tick >= 1000 else f"{tick:.3g}" for tick in ticks],
        **more,
    )


def size_curves(
    lines: Mapping[str, Sequence[Row]], source: str, unit: str, **more: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (traces, layout) of the values of `source` over message size, with a curve per group.

    Both axes are logarithmic. The ticks of the x axis are at measured sizes, such as 64 KiB. A
    value of 0 is omitted, because it has no logarithm.
    """
    values = {name: [value or None for value in column(lines[name], source)] for name in lines}
    sizes = {row["bytes"] for rows in lines.values() for row in rows if row["bytes"]}
    ticks = _spaced(sorted(sizes), 0.13)
    size_axis = axis("message", type="log", tickmode="array", tickvals=ticks, tickangle=0)
    size_axis["ticktext"] = [format_bytes(size) for size in ticks]
    layout = {
        "xaxis": size_axis,
        "yaxis": log_axis(unit, [value for line in values.values() for value in line]),
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
    return traces, layout


def _spaced(ticks: Sequence[float], gap: float = 0.07) -> list[float]:
    """Return ticks with a distance of at least `gap` times the length of the logarithmic axis."""
    spaced: list[float] = []
    for tick in ticks:
        if not spaced or tick >= spaced[-1] * (ticks[-1] / ticks[0]) ** gap:
            spaced.append(tick)
    return spaced


def thin(
    points: Sequence[tuple[float, float]], limit: int = MAX_POINTS
) -> list[tuple[float, float]]:
    """Return at most `limit` points. Each point is the mean of a group of adjacent points."""
    size = max(1, -(-len(points) // limit))
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]
