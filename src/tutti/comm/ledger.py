"""The ledger: what this rank communicates, in memory that other processes can read.

gloo keeps no record of what it does, and a process that hangs cannot be asked. So every call goes
into a ring of records in a memfd named "tutti-ledger": no file, no lock, nothing left behind. A
reader opens it through /proc/PID/fd, whatever the process is doing (ledger_reader.py).

Writing must cost next to nothing: a record is one struct.pack_into, names are written once and
referred to by number. A reader that meets a record just being written reads it again.
"""

import itertools
import json
import mmap
import os
import struct
from collections.abc import Mapping
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any

from tutti.comm import place
from tutti.machine.environment import boot_id

LABEL = "tutti-ledger"
MAGIC = b"TUTTILED"
VERSION = 1

KINDS = (
    *("barrier", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather"),
    *("scatter", "all_to_all", "send", "recv"),
)
# streamed: handed to a CUDA stream; when it ends there, only the stream knows.
STATES = ("none", "begun", "waiting", "done", "failed", "streamed")
BEGUN, WAITING, DONE, FAILED, STREAMED = range(1, 6)

# Where everything lies. Numbers are little-endian; times are of CLOCK_MONOTONIC, in nanoseconds.
HEADER = struct.Struct("<8sIiiiq64s")  # magic, version, pid, rank, size, start, host
PLACE_AT, PLACE = 128, struct.Struct("<Qq240s")  # changes (odd: being written), when, text
GROUPS_AT, GROUP_BYTES, GROUPS = 1024, 128, 64
GROUP = struct.Struct("<QQii40s40s")  # collectives, messages, rank, size, label, name
RECORDS_AT, RECORD_BYTES, RECORDS = 16384, 64, 256
# number, sequence, began, ended, bytes, site, line, peer or root, group, dtype, kind, state
RECORD = struct.Struct("<QQqqQIIiHHBB")
ENDED_AT, STATE_AT = 24, 57
_pack = RECORD.pack_into
NAMES_AT, NAME_BYTES, NAMES = 32768, 160, 512
BYTES = NAMES_AT + NAME_BYTES * NAMES


class _Book:
    """The memory of one process's ledger."""

    def __init__(self) -> None:
        self.file = os.memfd_create(LABEL, os.MFD_CLOEXEC)
        os.ftruncate(self.file, BYTES)
        self.memory = mmap.mmap(self.file, BYTES)
        self.words = memoryview(self.memory).cast("B").cast("q")
        self.numbers = itertools.count(1)
        self.names: dict[object, int] = {}
        self.sites: dict[int, tuple[int, CodeType]] = {}
        self.groups: dict[str, int] = {}
        self.place_changes = 0
        self.name("?")
        self.introduce(-1, 0, "")

    def introduce(self, rank: int, size: int, host: str) -> None:
        me = (MAGIC, VERSION, os.getpid(), rank, size, monotonic_ns(), _text(host, 64))
        HEADER.pack_into(self.memory, 0, *me)

    def name(self, name: object) -> int:
        """The number of a name, which is written when it is first seen; 0 once there are 512."""
        number = self.names.get(name)
        if number is None:
            if len(self.names) == NAMES:
                return 0
            number = self.names[name] = len(self.names)
            at = NAMES_AT + number * NAME_BYTES
            self.memory[at : at + NAME_BYTES] = _text(str(name), NAME_BYTES).ljust(
                NAME_BYTES, b"\0"
            )
        return number

    def site(self, code: CodeType) -> int:
        """The number of a place in the code, -1 where it is not the user's."""
        number = -1
        if not place.is_ours(code.co_filename):
            number = self.name(f"{place.shown_path(code.co_filename)} in {code.co_name}")
        # The code object is kept, so that its address never comes to mean another. Code that is
        # made anew for every call must not be kept without end.
        if len(self.sites) > 4096:
            self.sites.clear()
        self.sites[id(code)] = number, code
        return number


_book: _Book | None = None


def begin(
    kind: int,
    group: int,
    sequence: int,
    size: int,
    dtype: object,
    peer: int,
    site: int,
    line: int,
    state: int,
) -> int:
    """Write that an operation has begun; returns its number, for `mark`."""
    book = _book or _open()
    number = next(book.numbers)
    named = book.names.get(dtype)
    if named is None:
        named = book.name(dtype)
    at = RECORDS_AT + number % RECORDS * RECORD_BYTES
    now = monotonic_ns()
    # fmt: off
    _pack(book.memory, at, number, sequence, now, 0, size, site, line, peer, group, named, kind,
          state)
    # fmt: on
    # The group's count of collectives, or of messages (send 9, recv 10).
    book.words[(GROUPS_AT // 8 + (kind >= 9)) + group * (GROUP_BYTES // 8)] = sequence
    return number


def mark(number: int, state: int) -> None:
    """Write that an operation is now waited for, done or failed."""
    book = _book
    if book is None:
        return
    at = RECORDS_AT + number % RECORDS * RECORD_BYTES
    if book.words[at // 8] == number:  # else later operations have taken its place
        if state != WAITING:
            book.words[(at + ENDED_AT) // 8] = monotonic_ns()
        book.memory[at + STATE_AT] = state


def seconds_since_begin(number: int) -> float:
    """How long ago an operation began; 0 if it is no longer in the ledger."""
    book = _book or _open()
    at = (RECORDS_AT + number % RECORDS * RECORD_BYTES) // 8
    return (monotonic_ns() - book.words[at + 2]) / 1e9 if book.words[at] == number else 0.0


def caller(frame: FrameType | None) -> tuple[int, int]:
    """The place outside tutti.comm and torch that a call came from: its number and line."""
    sites = (_book or _open()).sites
    while frame is not None:
        code = frame.f_code
        known = sites.get(id(code))
        number = known[0] if known is not None else (_book or _open()).site(code)
        if number >= 0:
            return number, frame.f_lineno
        frame = frame.f_back
    return 0, 0


def site_text(site: int, line: int) -> str:
    """`train.py:88 in step`, from what `caller` returned."""
    book = _book or _open()
    at = NAMES_AT + site * NAME_BYTES
    name = bytes(book.memory[at : at + NAME_BYTES]).rstrip(b"\0").decode(errors="replace")
    return placed(name, line)


def placed(name: str, line: int) -> str:
    """Put the line number where it belongs: `train.py in step`, 88 → `train.py:88 in step`."""
    path, within, function = name.rpartition(" in ")
    return f"{path}:{line} in {function}" if within else name


def add_group(label: str, name: str, rank: int, size: int) -> int:
    """Enter a group; returns its number. The last of 64 stands for all that come later."""
    book = _book or _open()
    number = book.groups.setdefault(name, min(len(book.groups), GROUPS - 1))
    entry = GROUP.pack(0, 0, rank, size, _text(label, 40), _text(name, 40))
    at = GROUPS_AT + number * GROUP_BYTES
    book.memory[at : at + GROUP.size] = entry
    return number


def introduce(rank: int, size: int, host: str) -> None:
    """Write who this process is in its world."""
    (_book or _open()).introduce(rank, size, host)


def address() -> str:
    """Where another process of this host finds the ledger, as JSON."""
    book = _book or _open()
    where = {"host": os.uname().nodename, "machine": _machine()}
    return json.dumps({**where, "pid": os.getpid(), "fd": book.file})


def is_near(address: Mapping[str, Any]) -> bool:
    """Whether the process at this address (read from JSON) can be looked at from here."""
    return bool(address["machine"] == _machine())


def _machine() -> str:
    """The running system and its view of processes: a container has a view of its own."""
    return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}"


def note_place(text: str) -> None:
    """Write where the main thread is."""
    book = _book
    if book is not None:
        book.place_changes += 2
        entry = (monotonic_ns(), _text(text, 240))
        PLACE.pack_into(book.memory, PLACE_AT, book.place_changes - 1, *entry)
        book.words[PLACE_AT // 8] = book.place_changes


def _open() -> _Book:
    global _book
    if _book is None:
        _book = _Book()
        place.add_sink(note_place)
        place.start_noting_places()
    return _book


def _forget() -> None:
    """In a forked child: the ledger is the parent's, and stays so."""
    global _book
    if _book is not None:
        os.close(_book.file)
        _book = None


os.register_at_fork(after_in_child=_forget)


def _text(text: str, limit: int) -> bytes:
    """The text in at most `limit` bytes; of a longer one the end, which says more."""
    raw = text.encode(errors="replace")
    return raw if len(raw) < limit else "…".encode() + raw[-(limit - 4) :]
