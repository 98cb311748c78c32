"""What is printed, and where to: how wide a terminal is, and readers that leave early."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TextIO

_READABLE = 100  # longer lines of text are hard to follow
_IN_FILES = 80
_ENDLESS = 1000


def usable_width(stream: TextIO) -> int:
    """Columns of the terminal; a file or a pipe has no end."""
    return shutil.get_terminal_size().columns if _is_terminal(stream) else _ENDLESS


def readable_width(stream: TextIO) -> int:
    """Columns for text in sentences: those of the terminal, and not too many of them."""
    return min(_READABLE, usable_width(stream)) if _is_terminal(stream) else _IN_FILES


def folded(line: str, width: int, indent: str = "#   ") -> Iterator[str]:
    """A line in as many as it takes; what is longer than `width` begins with `indent` from then."""
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
    """Print a comment between the rows of a table, in lines that fit a terminal."""
    stream = stream or sys.stdout
    for line in folded(f"# {text}", usable_width(stream)):
        print_line(line, stream)


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print at once; where the reader has gone (`| head`), measuring goes on without one."""
    stream = stream or sys.stdout
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        # Nothing that is printed from here on, nor what is still buffered, may fail again.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() or "COLUMNS" in os.environ
