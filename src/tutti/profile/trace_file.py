"""Reads a trace file event by event. The format is Kineto's Chrome JSON, plain or gzipped.

A trace may be larger than memory. So the file is read in chunks, and only the current event and the
metadata outside of the event list are kept.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]

# A merged trace begins with this text. It contains all ranks, so it cannot be read as the trace of
# one rank.
MERGED_PREFIX = '{"tutti": {"merged": true}'
_CHUNK = 1 << 18  # number of characters read at once
_LARGEST_VALUE = 1 << 26  # maximum number of characters of one event or one metadata value
_SPACE = " \t\r\n"


class TraceFile:
    """A trace file. `metadata` is complete after all `events()` have been read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.truncated = False  # whether the file ends early (program killed, or disk full)
        # The part of the file in memory, and the position of the next character in this part.
        self._window, self._position = "", 0
        self._ended = False
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def events(self) -> Iterator[Event]:
        """Yield the events in file order. This method can be called only once."""
        with _open(self.path) as self._stream:
            try:
                if self._peek() == "[":  # the format also allows a plain list of events
                    yield from self._list()
                else:
                    yield from self._object()
            except EOFError:
                self.truncated = True

    def _object(self) -> Iterator[Event]:
        if (first := self._peek()) != "{":
            raise ValueError(f"{self.path} is not a trace: it begins with {first!r}")
        for _ in self._items_until("}"):
            key = self._value()
            if self._peek() != ":":
                raise ValueError(f"{self.path} is not JSON: there is no colon after {key!r}")
            self._position += 1
            if key == "traceEvents":
                yield from self._list()
            else:
                self.metadata[str(key)] = self._value()

    def _list(self) -> Iterator[Event]:
        if self._peek() != "[":
            raise ValueError(f"{self.path} is not a trace: traceEvents is not a list")
        for _ in self._items_until("]"):
            event = self._value()
            if isinstance(event, dict):
                yield event

    def _peek(self) -> str:
        """Return the next character that is not white space."""
        while True:
            while self._position < len(self._window) and self._window[self._position] in _SPACE:
                self._position += 1
            if self._position < len(self._window):
                return self._window[self._position]
            self._read_chunk()

    def _items_until(self, closing: str) -> Iterator[None]:
        """Yield before each item of a list or object, and end after the character `closing`."""
        self._position += 1
        while (mark := self._peek()) != closing:
            if mark == ",":
                self._position += 1
            else:
                yield
        self._position += 1

    def _value(self) -> Any:
        """Return the JSON value that begins at the current position."""
        self._peek()
        while True:
            try:
                value, end = self._decode(self._window, self._position)
                # A number at the end of the window may continue in the next chunk.
                if end < len(self._window) or self._ended:
                    self._position = end
                    return value
            except json.JSONDecodeError:
                if self._ended:
                    raise EOFError from None
            self._read_chunk()

    def _read_chunk(self) -> None:
        if self._ended:
            raise EOFError
        if len(self._window) - self._position > _LARGEST_VALUE:
            begin = self._window[self._position : self._position + 60]
            raise ValueError(
                "the file is not JSON, or a value has more than "
                f"{_LARGEST_VALUE:,} characters: {begin}…"
            )
        try:
            chunk = self._stream.read(_CHUNK)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            chunk, self.truncated = "", True
        self._ended = not chunk
        self._window = self._window[self._position :] + chunk
        self._position = 0


def is_merged(path: Path) -> bool:
    """Return whether `write_merged_trace` wrote this file."""
    try:
        with _open(path) as stream:
            return stream.read(len(MERGED_PREFIX)) == MERGED_PREFIX
    except (OSError, EOFError, zlib.error):
        return False


def _open(path: Path) -> io.TextIOWrapper:
    with open(path, "rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    raw: Any = gzip.open(path, "rb") if gzipped else open(path, "rb")  # noqa: SIM115
    return io.TextIOWrapper(raw, encoding="utf-8", errors="replace")
