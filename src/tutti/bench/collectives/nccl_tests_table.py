"""Formats the rows of a sweep as a table with the columns of nccl-tests, and as CSV."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tutti.measure.terminal import print_line, print_note, terminal_width

Row = dict[str, Any]
# {column: (unit, width)}
_COLUMNS = {
    "size": ("(B)", 10),
    "count": ("(elements)", 10),
    "type": ("", 8),
    "redop": ("", 6),
    "root": ("", 5),
    "backend": ("", 12),
    "placement": ("", 12),
    "timing": ("", 12),
    "time": ("(us)", 9),
    "algbw": ("(GB/s)", 7),
    "busbw": ("(GB/s)", 7),
    "#wrong": ("", 6),
    "ratio": ("", 7),
    "min": ("(us)", 9),
    "p99": ("(us)", 9),
    "cv%": ("", 6),
}
_LEFT_ALIGNED = ("backend", "placement", "timing")
_SPREAD = ("min", "p99", "cv%")
_PLACEMENTS = {"in": "in-place", "out": "out-of-place"}


@dataclass
class CollectivesTable:
    """Prints rows as soon as they are measured."""

    spread: bool = False  # whether to print the columns min, p99 and cv%
    operation: str = ""  # operation of the last printed row
    columns: Sequence[str] = ()  # columns that are printed for this operation

    def add(self, rows: list[Row]) -> None:
        """Print the rows of one operation and size."""
        if not rows:
            return
        first = rows[0]
        if first["op"] != self.operation:
            self.operation = first["op"]
            placements = {_PLACEMENTS[row["placement"]] for row in rows}
            several = {
                field for field in ("placement", "timing") if len({r[field] for r in rows}) > 1
            }
            self.columns = columns = self._columns_that_fit(several)
            ranks = f"{first['ranks']} rank{'s' * (first['ranks'] != 1)}"
            about = f"{first['dtype']}, redop {first['redop']}, {' and '.join(sorted(placements))}"
            print_note(f"{first['op']}, {ranks}, {about}")
            print_line("#" + _line({name: name for name in columns}, columns)[1:])
            print_line("#" + _line({name: _COLUMNS[name][0] for name in columns}, columns)[1:])
            if self.spread and "cv%" not in columns:
                print_note("the terminal is too narrow for min, p99 and cv: use --json FILE")
        for row in rows:
            hidden = row["wrong"] and "#wrong" not in self.columns
            wrong = f" {row['wrong']} WRONG" if hidden else ""
            print_line(_line(_texts(row, rows), self.columns) + wrong)

    def _columns_that_fit(self, several: set[str]) -> list[str]:
        chosen = {"size", "backend", "time", "busbw", "ratio", *several}
        free = terminal_width() - _width(chosen)
        optional = [_SPREAD] if self.spread else []
        for names in (*optional, ("algbw",), ("#wrong",), ("count", "type", "redop", "root")):
            if _width(names) <= free:
                chosen |= {*names}
                free -= _width(names)
        return [name for name in _COLUMNS if name in chosen]


def _width(columns: Iterable[str]) -> int:
    return sum(1 + _COLUMNS[name][1] for name in columns)


def _line(texts: Mapping[str, str], columns: Sequence[str]) -> str:
    cells = []
    for name in columns:
        width = _COLUMNS[name][1]
        cells.append(
            texts[name].ljust(width) if name in _LEFT_ALIGNED else texts[name].rjust(width)
        )
    return " ".join(cells).rstrip()


def _texts(row: Row, rows: list[Row]) -> dict[str, str]:
    times = row["time_us"]
    return {
        "size": str(row["bytes"]),
        "type": row["dtype"],
        **{name: str(row[name]) for name in ("count", "redop", "root", "backend", "timing")},
        "placement": _PLACEMENTS[row["placement"]],
        "time": _format_us(times["p50"]),
        "algbw": f"{row['algbw_gbs']:.2f}",
        "busbw": f"{row['busbw_gbs']:.2f}",
        "#wrong": str(row["wrong"]),
        "ratio": _ratio(row, rows),
        "min": _format_us(times["min"]),
        "p99": _format_us(times["p99"]),
        "cv%": f"{times['cv']:.1%}",
    }


def _ratio(row: Row, rows: list[Row]) -> str:
    """Return the speed of a row relative to the row of the first backend.

    For grouped calls, return the speed relative to single calls of the same backend.
    """
    kind = (row["placement"], row["timing"])
    comparable = [other for other in rows if (other["placement"], other["timing"]) == kind]
    baseline = comparable[0]
    ungrouped = row["backend"].removesuffix(f" x{row['group']}")
    if ungrouped != row["backend"]:
        baseline = next((other for other in comparable if other["backend"] == ungrouped), row)
    if row is baseline or not row["time_us"]["p50"]:
        return "1"
    ratio = baseline["time_us"]["p50"] / row["time_us"]["p50"]
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


def _format_us(microseconds: float) -> str:
    return f"{microseconds:.2f}" if microseconds < 1000 else f"{microseconds:.0f}"


def csv_text(rows: list[Row]) -> str:
    """Return the rows as CSV with a header. `time_us` becomes columns such as `time_us_p50`."""
    text = io.StringIO()
    for number, row in enumerate(rows):
        flat = {key: value for key, value in row.items() if key != "time_us"}
        flat |= {f"time_us_{name}": value for name, value in row["time_us"].items()}
        writer = csv.DictWriter(text, list(flat))
        if number == 0:
            writer.writeheader()
        writer.writerow(flat)
    return text.getvalue()
