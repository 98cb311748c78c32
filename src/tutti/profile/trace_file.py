"""Streaming reader of a trace file: Chrome JSON as Kineto writes it, plain or gzipped.

A trace may be larger than memory. The file is read in chunks; only the current event and the
metadata beside the event list are kept.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]

# A merged trace begins with this text: it shows all ranks and is not the trace of one rank.
MERGED_PREFIX = '{"tutti": {"merged": true}'
_CHUNK = 1 << 18  # characters read at once
_LARGEST_VALUE = 1 << 26  # characters of one event or one metadata value
_SPACE = " \t\r\n"


class TraceFile:
    """`for event in TraceFile(path).events()`; afterwards `metadata` is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.truncated = False  # the file ends early: the program was killed or the disk was full

    def events(self) -> Iterator[Event]:
        """The events in file order."""
        with _open(self.path) as stream:
            text = _JsonStream(stream)
            try:
                yield from self._read(text)
            except EOFError:
                self.truncated = True
        if text.damaged:
            self.truncated = True

    def _read(self, text: "_JsonStream") -> Iterator[Event]:
        first = text.peek()
        if first == "[":  # Chrome allows a bare list
            yield from self._list(text)
            return
        if first != "{":
            raise ValueError(f"{self.path} is not a trace: it begins with {first!r}")
        for _ in text.items_until("}"):
            key = text.value()
            if text.peek() != ":":
                raise ValueError(f"{self.path} is not JSON: no colon after {key!r}")
            text.skip()
            if key == "traceEvents":
                yield from self._list(text)
            else:
                self.metadata[str(key)] = text.value()

    def _list(self, text: "_JsonStream") -> Iterator[Event]:
        if text.peek() != "[":
            raise ValueError(f"{self.path} is not a trace: traceEvents is not a list")
        for _ in text.items_until("]"):
            event = text.value()
            if isinstance(event, dict):
                yield event


def is_merged(path: Path) -> bool:
    """Whether `write_merged_trace` wrote this file."""
    try:
        with _open(path) as stream:
            return stream.read(len(MERGED_PREFIX)) == MERGED_PREFIX
    except (OSError, EOFError, zlib.error):
        return False


class _JsonStream:
    """JSON values from a text stream, through a window of characters that moves forward."""

    def __init__(self, stream: io.TextIOBase) -> None:
        self.damaged = False
        self._stream = stream
        self._window = ""
        self._position = 0
        self._ended = False
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def peek(self) -> str:
        """The next character that is not white space."""
        while True:
            while self._position < len(self._window) and self._window[self._position] in _SPACE:
                self._position += 1
            if self._position < len(self._window):
                return self._window[self._position]
            self._read_chunk()

    def skip(self) -> None:
        self._position += 1

    def items_until(self, closing: str) -> Iterator[None]:
        """Enter a list or object, stop before each item, and leave after `closing`."""
        self.skip()
        while (mark := self.peek()) != closing:
            if mark == ",":
                self.skip()
            else:
                yield
        self.skip()

    def value(self) -> Any:
        """The value that begins at the current position."""
        self.peek()
        while True:
            try:
                value, end = self._decode(self._window, self._position)
                if end < len(self._window) or self._ended:  # otherwise a number may continue
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
                f"not JSON, or one value has more than {_LARGEST_VALUE:,} characters: {begin}…"
            )
        try:
            chunk = self._stream.read(_CHUNK)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            chunk, self.damaged = "", True
        if not chunk:
            self._ended = True
        self._window = self._window[self._position :] + chunk
        self._position = 0


def _open(path: Path) -> io.TextIOWrapper:
    with open(path, "rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    raw: Any = gzip.open(path, "rb") if gzipped else open(path, "rb")  # noqa: SIM115
    return io.TextIOWrapper(raw, encoding="utf-8", errors="replace")
