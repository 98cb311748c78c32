"""The table of a sweep, line by line as it grows: nccl-tests' columns, a line for each backend."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from tutti.bench.sizes import format_size

Row = dict[str, Any]
_LEFT_WIDTH = 60
_PLACEMENT_WIDTH = 41
_SPREAD_WIDTH = 27


def usable_width(stream: TextIO) -> int:
    """Columns of the terminal; a file or a pipe has no end."""
    if stream.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return 1000


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print at once; where the reader has gone (`| head`), measuring goes on without one."""
    stream = stream or sys.stdout
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        # Nothing that is printed from here on, nor what is still buffered, may fail again.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


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
                self._print(_narrow_line(row, _baseline(row, rows)))
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
        return usable_width(self._stream) < left + self._placement_width * len(self._placements)

    @property
    def _placement_width(self) -> int:
        return _PLACEMENT_WIDTH + _SPREAD_WIDTH * self._with_spread

    def _print_head(self, row: Row) -> None:
        ranks = f"{row['ranks']} rank{'s' * (row['ranks'] != 1)}"
        self._print(f"# {row['op']}, {ranks}, {row['dtype']}, redop {row['redop']}")
        if self._narrow:
            self._print(f"# {'size':>6} {'backend':<12} {'time':>9} {'busbw':>7} {'ratio':>7}")
            self._print(f"# {'(B)':>6} {'':<12} {'(us)':>9} {'(GB/s)':>7}")
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


def _narrow_line(row: Row, first: Row) -> str:
    size, time = format_size(row["bytes"]), _time(row["time_us"]["p50"])
    # What most rows have in common goes without saying.
    place = "" if row["placement"] == "in" else " out-of-place"
    timing = "" if row["timing"] == "back-to-back" else f" {row['timing']}"
    wrong = "" if row["wrong"] == 0 else f" {row['wrong']} WRONG"
    return (
        f"{size:>8} {row['backend']:<12} {time:>9} {row['busbw_gbs']:>7.2f} "
        f"{_ratio(row, first):>7}{place}{timing}{wrong}"
    )


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
