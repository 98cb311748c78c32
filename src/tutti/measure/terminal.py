"""Terminal output: width, wrapping, tables, and output to a closed pipe."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNLIMITED = 1000


def terminal_width(stream: TextIO | None = None) -> int:
    """Return COLUMNS if it is set, else the columns of the terminal, or 1000 for a file or pipe."""
    is_terminal = (stream or sys.stdout).isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size().columns if is_terminal else _UNLIMITED


def text_width(stream: TextIO | None = None) -> int:
    """Return the columns for prose: the terminal width, at most 100, or 80 for files and pipes."""
    width = terminal_width(stream)
    return 80 if width == _UNLIMITED else min(100, width)


def wrap_line(line: str, width: int, indent: str = "#   ") -> Iterator[str]:
    """Yield a line wrapped at `width`. Continuation lines start with `indent`."""
    if len(line) <= width:
        yield line
        return
    wrapper = textwrap.TextWrapper(
        max(20, width), subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    yield from wrapper.wrap(line)


def print_note(text: str, stream: TextIO | None = None) -> None:
    """Print a `# comment` between the rows of a table, wrapped to the terminal."""
    for line in wrap_line(f"# {text}", terminal_width(stream)):
        print_line(line, stream)


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print a line and flush. If the reader has closed the pipe (`| head`), discard all output.

    No error is raised, so that a measurement continues and writes its --json file.
    """
    stream = stream or sys.stdout
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        # Later prints and the flush at exit must not raise BrokenPipeError again.
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), stream.fileno())


def console() -> "Console":
    """Return a rich console on standard output. Tables in files are not wrapped at 80 columns."""
    from rich.console import Console

    return Console(width=terminal_width(sys.stdout), highlight=False)


def table_fits(table: "Table", on: "Console") -> bool:
    """Return whether the console is wide enough to print every cell of the table on one line."""
    from rich.measure import Measurement

    return Measurement.get(on, on.options.update(max_width=10_000), table).maximum <= on.width
