"""The table of a sweep, line by line as it grows: nccl-tests' columns, a line for each backend."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from tutti.measure.terminal import print_line, terminal_width
from tutti.measure.units import format_size

Row = dict[str, Any]
_LEFT_WIDTH = 60
_PLACEMENT_WIDTH = 41
_SPREAD_WIDTH = 27
_NARROW_WIDTH = 47  # the least: size, backend, time, busbw and ratio
# Of the short form, in this order: units and widths.
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


class Table:
    """Prints rows as they come. `placements` are those that each operation is measured in."""

    def __init__(
        self,
        placements: Mapping[str, Sequence[str]],
        timings: int,
        stream: TextIO = sys.stdout,
        spread: bool = False,
    ) -> None:
        self._placements_of = placements
        self._with_spread = spread
        self._with_timing = timings > 1
        self._stream = stream
        self._operation = ""

    def add(self, rows: list[Row]) -> None:
        """Print the rows of one operation and size: a line for each backend."""
        if not rows:
            return
        if rows[0]["op"] != self._operation:
            self._operation = rows[0]["op"]
            self._print_head(rows[0])
        if self._narrow:
            for row in rows:
                self._print(self._narrow_line(row, _baseline(row, rows)))
            return
        lines: dict[tuple[str, str], dict[str, Row]] = {}
        for row in rows:
            lines.setdefault((row["backend"], row["timing"]), {})[row["placement"]] = row
        for by_placement in lines.values():
            self._print(self._line(by_placement, rows))

    @property
    def _placements(self) -> Sequence[str]:
        return self._placements_of[self._operation]

    @property
    def _narrow(self) -> bool:
        left = _LEFT_WIDTH + 13 * self._with_timing
        return terminal_width(self._stream) < left + self._placement_width * len(self._placements)

    @property
    def _placement_width(self) -> int:
        return _PLACEMENT_WIDTH + _SPREAD_WIDTH * self._with_spread

    def _print_head(self, row: Row) -> None:
        ranks = f"{row['ranks']} rank{'s' * (row['ranks'] != 1)}"
        self._print(f"# {row['op']}, {ranks}, {row['dtype']}, redop {row['redop']}")
        if self._narrow:
            columns = {name: _COLUMNS[name] for name in self._narrow_columns}
            names = "".join(f" {name:>{width}}" for name, (_, width) in columns.items())
            units = "".join(f" {unit:>{width}}" for unit, width in columns.values())
            self._print(f"# {'size':>6} {'backend':<12}{names}")
            self._print(f"# {'(B)':>6} {'':<12}{units}")
            if self._with_spread and "cv%" not in columns:
                self._print("# min, p99 and cv have no room here; files have them")
            return
        timing = f" {'timing':<12}" if self._with_timing else ""
        count, spread, blank = len(self._placements), "", ""
        if self._with_spread:
            spread, blank = f" {'min':>9} {'p99':>9} {'cv%':>6}", f" {'(us)':>9} {'(us)':>9}{'':7}"
        names = f" {'time':>9} {'algbw':>7} {'busbw':>7} {'#wrong':>6} {'ratio':>7}{spread}" * count
        units = f" {'(us)':>9} {'(GB/s)':>7} {'(GB/s)':>7}{'':15}{blank}" * count
        width = self._placement_width - 1
        where = "".join(f" {_PLACES[each]:^{width}}" for each in self._placements)
        left = f"{'size':>10} {'count':>10} {'type':>8} {'redop':>6} {'root':>5} "
        left += f"{'backend':<12}{timing}"
        self._print(f"#{' ' * (len(left) - 1)}{where}".rstrip())
        self._print(f"#{left[1:]}{names}")
        self._print(f"#{'(B)':>9} {'(elements)':>10}{' ' * (len(left) - 21)}{units}".rstrip())

    @property
    def _narrow_columns(self) -> list[str]:
        """What there is room for beside the least; what was asked for comes first."""
        told = 13 * (list(self._placements) != ["in"]) + 13 * self._with_timing
        room = terminal_width(self._stream) - _NARROW_WIDTH - told
        found = {"time", "busbw", "ratio"}
        for names in (("min", "p99", "cv%"), ("algbw",), ("#wrong",)):
            width = sum(1 + _COLUMNS[name][1] for name in names)
            if width <= room and (self._with_spread or "cv%" not in names):
                found |= {*names}
                room -= width
        return [name for name in _COLUMNS if name in found]

    def _narrow_line(self, row: Row, first: Row) -> str:
        columns, times = self._narrow_columns, row["time_us"]
        cells = {
            "time": _time(times["p50"]),
            "algbw": f"{row['algbw_gbs']:.2f}",
            "busbw": f"{row['busbw_gbs']:.2f}",
            "#wrong": str(row["wrong"]),
            "ratio": _ratio(row, first),
            "min": _time(times["min"]),
            "p99": _time(times["p99"]),
            "cv%": f"{times['cv']:.1%}",
        }
        shown = "".join(f" {cells[name]:>{_COLUMNS[name][1]}}" for name in columns)
        # What most rows have in common goes without saying.
        place = "" if row["placement"] == "in" else " out-of-place"
        timing = "" if row["timing"] == "back-to-back" else f" {row['timing']}"
        wrong = "" if row["wrong"] == 0 or "#wrong" in columns else f" {row['wrong']} WRONG"
        return f"{format_size(row['bytes']):>8} {row['backend']:<12}{shown}{place}{timing}{wrong}"

    def _line(self, by_placement: dict[str, Row], rows: list[Row]) -> str:
        row = next(iter(by_placement.values()))
        timing = f" {row['timing']:<12}" if self._with_timing else ""
        cells = f"{row['bytes']:>10} {row['count']:>10} {row['dtype']:>8} {row['redop']:>6} "
        cells += f"{row['root']:>5} {row['backend']:<12}{timing}"
        for placement in self._placements:
            each = by_placement.get(placement)
            if each is None:
                cells += f" {'N/A':>9} {'':>7} {'':>7} {'N/A':>6} {'':>7}"
                cells += " " * _SPREAD_WIDTH * self._with_spread
                continue
            time = each["time_us"]
            cells += f" {_time(time['p50']):>9} {each['algbw_gbs']:>7.2f} {each['busbw_gbs']:>7.2f}"
            cells += f" {each['wrong']:>6} {_ratio(each, _baseline(each, rows)):>7}"
            if self._with_spread:
                cells += f" {_time(time['min']):>9} {_time(time['p99']):>9} {time['cv']:>6.1%}"
        return cells

    def _print(self, line: str) -> None:
        print_line(line.rstrip(), self._stream)


_PLACES = {"in": "in-place", "out": "out-of-place"}


def _baseline(row: Row, rows: list[Row]) -> Row:
    """What ratios are against: the first backend's row, and for a group the same one's alone."""
    same = ("placement", "timing")
    alike = [each for each in rows if all(each[key] == row[key] for key in same)]
    alone = row["backend"].removesuffix(f" x{row['group']}")
    if alone != row["backend"]:
        return next((each for each in alike if each["backend"] == alone), row)
    return alike[0]


def _ratio(row: Row, first: Row) -> str:
    if row is first or not row["time_us"]["p50"]:
        return "1"
    ratio = first["time_us"]["p50"] / row["time_us"]["p50"]
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


def _time(microseconds: float) -> str:
    return f"{microseconds:.2f}" if microseconds < 1000 else f"{microseconds:.0f}"
