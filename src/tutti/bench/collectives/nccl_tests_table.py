"""Rows of a sweep as a table with the columns of nccl-tests, and as CSV.

On a wide terminal, each backend has one line with in-place and out-of-place columns side by side.
On a narrow terminal, each row has one line with as many columns as fit.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tutti.measure.terminal import print_line, terminal_width
from tutti.measure.units import format_size

Row = dict[str, Any]
# {column: (unit, width)}
_COLUMNS = {
    "time": ("(us)", 9),
    "algbw": ("(GB/s)", 7),
    "busbw": ("(GB/s)", 7),
    "#wrong": ("", 6),
    "ratio": ("", 7),
    "min": ("(us)", 9),
    "p99": ("(us)", 9),
    "cv%": ("", 6),
}
_SPREAD = ("min", "p99", "cv%")
_WIDE_KEY = "{:>10} {:>10} {:>8} {:>6} {:>5} {:<12}"  # size, count, type, redop, root, backend
_WIDE_KEY_WIDTH, _NARROW_KEY_WIDTH = 60, 21
_TIMING_WIDTH = 13  # a timing or "out-of-place" with its space
_PLACEMENTS = {"in": "in-place", "out": "out-of-place"}


@dataclass
class CollectivesTable:
    """Prints rows as soon as they are measured."""

    placements: Mapping[str, Sequence[str]]  # {operation: measured placements}
    timings: int
    spread: bool = False
    operation: str = ""  # operation of the last printed row

    def add(self, rows: list[Row]) -> None:
        """Print the rows of one operation and size."""
        if not rows:
            return
        first = rows[0]
        placements = self.placements[first["op"]]
        columns = [name for name in _COLUMNS if self.spread or name not in _SPREAD]
        width = _WIDE_KEY_WIDTH + _TIMING_WIDTH * (self.timings > 1)
        narrow = terminal_width() < width + len(placements) * _width(columns)
        if narrow:
            columns = self._narrow_columns(placements)
        if first["op"] != self.operation:
            self.operation = first["op"]
            ranks = f"{first['ranks']} rank{'s' * (first['ranks'] != 1)}"
            _print(f"# {first['op']}, {ranks}, {first['dtype']}, redop {first['redop']}")
            self._print_head(columns, [] if narrow else placements)
        if narrow:
            for row in rows:
                _print(_narrow_line(row, rows, columns))
            return
        lines: dict[tuple[str, str], dict[str, Row]] = {}
        for row in rows:
            lines.setdefault((row["backend"], row["timing"]), {})[row["placement"]] = row
        for (_, timing), by_placement in lines.items():
            row = next(iter(by_placement.values()))
            fields = ("bytes", "count", "dtype", "redop", "root", "backend")
            line = _WIDE_KEY.format(*(row[name] for name in fields))
            line += f" {timing:<12}" if self.timings > 1 else ""
            for placement in placements:
                each = by_placement.get(placement)
                texts = {"time": "N/A", "#wrong": "N/A"} if each is None else _texts(each, rows)
                line += _cells(texts, columns)
            _print(line)

    def _print_head(self, columns: Sequence[str], placements: Sequence[str]) -> None:
        """Print the head of the wide table, or of the narrow table if `placements` is empty."""
        names = _cells({name: name for name in columns}, columns)
        units = _cells({name: _COLUMNS[name][0] for name in columns}, columns)
        if not placements:
            _print(f"# {'size':>6} {'backend':<12}{names}")
            _print(f"# {'(B)':>6} {'':<12}{units}")
            if self.spread and "cv%" not in columns:
                _print("# too narrow for min, p99 and cv: use --json")
            return
        key = _WIDE_KEY.format("size", "count", "type", "redop", "root", "backend")
        key += f" {'timing':<12}" if self.timings > 1 else ""
        under = f"{_WIDE_KEY.format('(B)', '(elements)', '', '', '', ''):<{len(key)}}"
        titles = "".join(f" {_PLACEMENTS[each]:^{_width(columns) - 1}}" for each in placements)
        _print(f"#{'':<{len(key) - 1}}{titles}")
        _print(f"#{key[1:]}{names * len(placements)}")
        _print(f"#{under[1:]}{units * len(placements)}")

    def _narrow_columns(self, placements: Sequence[str]) -> list[str]:
        """Return time, busbw and ratio, and as many other columns as fit, requested ones first."""
        chosen = {"time", "busbw", "ratio"}
        suffixes = (list(placements) != ["in"]) + (self.timings > 1)
        free = terminal_width() - _NARROW_KEY_WIDTH - _width(chosen)
        free -= _TIMING_WIDTH * suffixes
        for names in (_SPREAD, ("algbw",), ("#wrong",)):
            if _width(names) <= free and (self.spread or names is not _SPREAD):
                chosen |= {*names}
                free -= _width(names)
        return [name for name in _COLUMNS if name in chosen]


def _print(line: str) -> None:
    print_line(line.rstrip())


def _width(columns: Iterable[str]) -> int:
    return sum(1 + _COLUMNS[name][1] for name in columns)


def _cells(texts: Mapping[str, str], columns: Sequence[str]) -> str:
    return "".join(f" {texts.get(name, ''):>{_COLUMNS[name][1]}}" for name in columns)


def _texts(row: Row, rows: list[Row]) -> dict[str, str]:
    times = row["time_us"]
    return {
        "time": _format_us(times["p50"]),
        "algbw": f"{row['algbw_gbs']:.2f}",
        "busbw": f"{row['busbw_gbs']:.2f}",
        "#wrong": str(row["wrong"]),
        "ratio": _ratio(row, rows),
        "min": _format_us(times["min"]),
        "p99": _format_us(times["p99"]),
        "cv%": f"{times['cv']:.1%}",
    }


def _narrow_line(row: Row, rows: list[Row], columns: Sequence[str]) -> str:
    # The most common placement and timing are not printed, to save space.
    suffix = "" if row["placement"] == "in" else " out-of-place"
    suffix += "" if row["timing"] == "back-to-back" else f" {row['timing']}"
    suffix += "" if row["wrong"] == 0 or "#wrong" in columns else f" {row['wrong']} WRONG"
    key = f"{format_size(row['bytes']):>8} {row['backend']:<12}"
    return key + _cells(_texts(row, rows), columns) + suffix


def _ratio(row: Row, rows: list[Row]) -> str:
    """Format the speed relative to the first backend.

    For grouped calls, it is the speed relative to single calls of the same backend.
    """
    kind = (row["placement"], row["timing"])
    comparable = [each for each in rows if (each["placement"], each["timing"]) == kind]
    baseline = comparable[0]
    ungrouped = row["backend"].removesuffix(f" x{row['group']}")
    if ungrouped != row["backend"]:
        baseline = next((each for each in comparable if each["backend"] == ungrouped), row)
    if row is baseline or not row["time_us"]["p50"]:
        return "1"
    ratio = baseline["time_us"]["p50"] / row["time_us"]["p50"]
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


def _format_us(microseconds: float) -> str:
    return f"{microseconds:.2f}" if microseconds < 1000 else f"{microseconds:.0f}"


def csv_text(rows: list[Row]) -> str:
    """Format the rows as CSV with a header. time_us becomes time_us_p50, time_us_p95, …"""
    text = io.StringIO()
    for number, row in enumerate(rows):
        flat = {key: value for key, value in row.items() if key != "time_us"}
        flat |= {f"time_us_{name}": value for name, value in row["time_us"].items()}
        writer = csv.DictWriter(text, list(flat))
        if number == 0:
            writer.writeheader()
        writer.writerow(flat)
    return text.getvalue()
