"""Figure: a plot or a picture, and always the numbers behind it.

Plots are plain dictionaries, as plotly.js takes them. Text that came from a file may stand in any
of them but in templates (`hovertemplate`, `texttemplate`), which are ours alone: there plotly reads
tags, everywhere else they are taken away before the page is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from tutti.measure.units import format_bytes

# Curves have at most this many points, tables as many rows: a page stays light, and printable.
MOST_POINTS = 400
_TEMPLATES = ("hovertemplate", "texttemplate")


@dataclass(frozen=True)
class Table:
    """Numbers as they are: `head` has the units, the page sorts by value and rounds for the eye."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, and nothing else."""
        columns = zip(*self.rows, strict=True) if self.rows else ([] for _ in self.head)
        return [all(_is_number(cell) for cell in column) for column in columns]


@dataclass(frozen=True)
class Figure:
    """Without traces and pictures, a figure is its table."""

    title: str
    about: str
    table: Table
    traces: Sequence[dict[str, Any]] = ()
    layout: Mapping[str, Any] = field(default_factory=dict)
    pictures: tuple[str, str] | None = None
    """An SVG for light pages, and one for dark."""
    half: bool = False
    """Two of these stand side by side where there is room."""


def for_plotly(figure: Figure) -> dict[str, Any]:
    """What the page's script draws, all text in it made harmless."""
    return {"data": _plain(list(figure.traces)), "layout": _plain(dict(figure.layout))}


def _plain(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each, str(name)) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, key) for each in value]
    if isinstance(value, str) and key not in _TEMPLATES:
        return value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None  # JSON has neither infinity nor nan
    return value


def _is_number(cell: Any) -> bool:
    return cell is None or (isinstance(cell, int | float) and not isinstance(cell, bool))


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis of a plot."""
    return {"title": {"text": title}, **more}


def size_axis(sizes: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis of messages, whose marks are sizes that were sent: 4 B, 64 KB."""
    there = sorted({size for size in sizes if size})
    marks: list[float] = []
    for size in there:  # those that are too near to the one before have no room
        if not marks or size >= marks[-1] * (there[-1] / there[0]) ** 0.13:
            marks.append(size)
    return axis(
        "message",
        type="log",
        tickmode="array",
        tickvals=marks,
        ticktext=[format_bytes(size) for size in marks],
        tickangle=0,
    )


def log_axis(title: str, **more: Any) -> dict[str, Any]:
    """A logarithmic axis without powers of ten in small print."""
    return axis(title, type="log", tickformat=",~g", **more)


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of too many points, the means of stretches of equal length."""
    count = -(-len(points) // MOST_POINTS)
    if count <= 1:
        return list(points)
    pieces = [points[at : at + count] for at in range(0, len(points), count)]
    return [(mean(x for x, _ in piece), mean(y for _, y in piece)) for piece in pieces]


def milliseconds(seconds: float | None) -> float | None:
    """For tables and plots, which show milliseconds."""
    return None if seconds is None else 1e3 * seconds


def percent(share: float | None) -> float | None:
    """For tables and plots, which show per cent."""
    return None if share is None else 100 * share
