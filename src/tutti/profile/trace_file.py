"""A trace file, event by event: Chrome's JSON as Kineto writes it, plain or gzipped.

A trace may be larger than memory. It is read in pieces; only the event at hand and what stands
beside the list of events (the metadata) are kept.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]

# A trace of all ranks together begins with it: it is a picture of the others, not one more rank.
MERGED = '{"tutti": {"merged": true}'
_PIECE = 1 << 18  # characters read at once
_LARGEST = 1 << 26  # characters of one event or one value of metadata
_SPACE = " \t\r\n"


class TraceFile:
    """`for event in TraceFile(path).events()`: after it, `metadata` is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.cut_short = False  # the file ends before its end: a program was killed, a disk full

    def events(self) -> Iterator[Event]:
        """The events in the file's order."""
        with _open(self.path) as stream:
            text = _Text(stream)
            try:
                yield from self._read(text)
            except EOFError:
                self.cut_short = True
        if text.damaged:
            self.cut_short = True

    def _read(self, text: "_Text") -> Iterator[Event]:
        first = text.look()
        if first == "[":  # Chrome allows a bare list
            yield from self._list(text)
            return
        if first != "{":
            raise ValueError(f"{self.path} is no trace: it begins with {first!r}")
        text.skip()
        while (mark := text.look()) != "}":
            if mark == ",":
                text.skip()
                continue
            key = text.value()
            if text.look() != ":":
                raise ValueError(f"{self.path} is no JSON: no colon after {key!r}")
            text.skip()
            if key == "traceEvents":
                yield from self._list(text)
            else:
                self.metadata[str(key)] = text.value()

    def _list(self, text: "_Text") -> Iterator[Event]:
        if text.look() != "[":
            raise ValueError(f"{self.path} is no trace: traceEvents is no list")
        text.skip()
        while (mark := text.look()) != "]":
            if mark == ",":
                text.skip()
                continue
            event = text.value()
            if isinstance(event, dict):
                yield event
        text.skip()


def is_merged(path: Path) -> bool:
    """Whether a file is what `write_timeline` made of several."""
    try:
        with _open(path) as stream:
            return stream.read(len(MERGED)) == MERGED
    except (OSError, EOFError, zlib.error):
        return False


class _Text:
    """The file's characters as a window that moves on."""

    def __init__(self, stream: io.TextIOBase) -> None:
        self.damaged = False
        self._stream = stream
        self._window = ""
        self._at = 0
        self._ended = False
        self._scan = json.JSONDecoder(strict=False).raw_decode

    def look(self) -> str:
        """The next character that is no space."""
        while True:
            while self._at < len(self._window) and self._window[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._window):
                return self._window[self._at]
            self._more()

    def skip(self) -> None:
        self._at += 1

    def value(self) -> Any:
        """The value that begins here."""
        self.look()
        while True:
            try:
                value, end = self._scan(self._window, self._at)
                if end < len(self._window) or self._ended:  # else a number may go on
                    self._at = end
                    return value
            except json.JSONDecodeError:
                if self._ended:
                    raise EOFError from None
            self._more()

    def _more(self) -> None:
        if self._ended:
            raise EOFError
        if len(self._window) - self._at > _LARGEST:
            begin = self._window[self._at : self._at + 60]
            raise ValueError(f"no JSON, or a value of more than {_LARGEST} characters: {begin}…")
        try:
            piece = self._stream.read(_PIECE)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            piece, self.damaged = "", True
        if not piece:
            self._ended = True
        self._window = self._window[self._at :] + piece
        self._at = 0


def _open(path: Path) -> io.TextIOWrapper:
    with open(path, "rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    raw: Any = gzip.open(path, "rb") if gzipped else open(path, "rb")  # noqa: SIM115
    return io.TextIOWrapper(raw, encoding="utf-8", errors="replace")
