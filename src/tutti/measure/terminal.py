"""Terminal output: width, wrapping, tables, and pipes that the reader closes early."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MAX_TEXT_WIDTH = 100  # longer lines of prose are hard to read
_TEXT_WIDTH_IN_FILES = 80
_UNLIMITED = 1000


def terminal_width(stream: TextIO | None = None) -> int:
    """Columns of the terminal (COLUMNS overrides); a file or a pipe is practically unlimited."""
    stream = stream or sys.stdout
    return shutil.get_terminal_size().columns if _is_terminal(stream) else _UNLIMITED


def text_width(stream: TextIO | None = None) -> int:
    """Columns for prose: the terminal's, at most 100; 80 in files and pipes."""
    stream = stream or sys.stdout
    if not _is_terminal(stream):
        return _TEXT_WIDTH_IN_FILES
    return min(_MAX_TEXT_WIDTH, terminal_width(stream))


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() or "COLUMNS" in os.environ


def wrap_line(line: str, width: int, indent: str = "#   ") -> Iterator[str]:
    """Split a line longer than `width`; continuation lines start with `indent`."""
    if len(line) <= width:
        yield line
        return
    yield from textwrap.wrap(
        line,
        max(20, width),
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def print_note(text: str, stream: TextIO | None = None) -> None:
    """Print a `# comment` between the rows of a table, wrapped to the terminal."""
    for line in wrap_line(f"# {text}", terminal_width(stream)):
        print_line(line, stream)


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print and flush. When the reader has closed the pipe (`| head`), discard all later output.

    A measurement continues then, because its --json file is still wanted.
    """
    stream = stream or sys.stdout
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        # Later prints and the flush at exit must not fail again.
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), stream.fileno())


def console() -> "Console":
    """A rich console on standard output; tables written to a file are not folded at 80 columns."""
    from rich.console import Console

    return Console(width=terminal_width(sys.stdout), highlight=False)


def table_fits(table: "Table", on: "Console") -> bool:
    """Whether the console is wide enough to print every cell of the table on one line."""
    from rich.measure import Measurement

    return Measurement.get(on, on.options.update(max_width=10_000), table).maximum <= on.width
