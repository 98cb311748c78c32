"""Read the ledgers of other processes on this host, whatever they are doing, without torch.

There are two kinds: tutti.comm's own (ledger.py) and, for each group of the shm backend, the one
in the rank's segment (shm/core/ledger.h), which also has what torch itself sends, for DDP say.
"""

import contextlib
import os
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tutti.comm import ledger

_LEDGER = re.compile(r"/memfd:(tutti-ledger|tutti-shm:.*) \(deleted\)")


@dataclass(frozen=True)
class Record:
    """One operation of one process. Ages are in seconds, counted back from the reading."""

    operation: str
    group: str
    group_name: str  # the group's name in torch, the same on all its ranks and on no others
    sequence: int
    bytes: int
    dtype: str
    peer: int  # root, or the other rank of a send or receive; -1 for none
    state: str
    age: float  # since it began
    ended: float | None  # since it ended
    where: str
    written_by: str = "tutti.comm"

    def __str__(self) -> str:
        size = f"{self.dtype}, {self.bytes} bytes" if self.dtype else f"{self.bytes} bytes"
        return f"{self.operation} {self.sequence} of group {self.group} ({size})"


@dataclass(frozen=True)
class Circle:
    """A group as one process sees it, and how many calls it has begun there."""

    label: str
    name: str
    rank: int
    size: int
    collectives: int
    messages: int


@dataclass(frozen=True)
class Account:
    """What the ledgers of one process say."""

    pid: int
    rank: int = -1  # in the world; -1 if it is in none
    size: int = 0
    host: str = ""
    place: str = ""  # where its main thread was when last looked at
    place_age: float = 0.0
    circles: tuple[Circle, ...] = ()
    records: tuple[Record, ...] = field(default=())  # oldest first

    @property
    def current(self) -> Record | None:
        """The operation it waits for, else the last one that it began."""
        waiting = [record for record in self.records if record.state in ("waiting", "running")]
        return waiting[-1] if waiting else self.records[-1] if self.records else None

    def circle(self, name: str) -> Circle | None:
        """The group of this name in torch."""
        return next((each for each in self.circles if each.name == name), None)


def processes() -> list[int]:
    """All processes of this host whose ledgers can be read, by pid."""
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [pid for pid in pids if any(True for _ in _ledgers(pid))]


def read_process(pid: int) -> Account | None:
    """What the ledgers of a process say; None if it has none, has gone or may not be read."""
    found = []
    now = time.monotonic_ns()  # one for all: ages are compared
    for fd, label in _ledgers(pid):
        read = read_ledger if label == ledger.LABEL else _read_segment
        found.append(read(pid, fd, now))
    accounts = [account for account in found if account is not None]
    if not accounts:
        return None
    # Who the process is: its own word first, else its place in the largest group it is in.
    accounts.sort(key=lambda account: (account.host == "", -account.size))
    records = [record for account in accounts for record in account.records]
    ours = [record for record in records if record.written_by == "tutti.comm"]
    told = [each for each in records if not any(_is_within(each, call) for call in ours)]
    return replace(
        accounts[0],
        circles=tuple(circle for account in accounts for circle in account.circles),
        records=tuple(sorted(told, key=lambda record: -record.age)),
    )


def _is_within(record: Record, call: Record) -> bool:
    """Whether shm wrote this record for that call of tutti.comm, which says more."""
    alike = (record.operation, record.group_name) == (call.operation, call.group_name)
    began, ended = record.age <= call.age, call.ended is None or record.age >= call.ended
    return record.written_by != call.written_by and alike and began and ended


def read_ledger(pid: int, fd: int, now: int) -> Account | None:
    """What tutti.comm of that process has written into its file `fd`."""
    raw = _stable_read(pid, fd)
    if raw is None or len(raw) < ledger.BYTES:
        return None
    magic, version, owner, rank, size, _, host = ledger.HEADER.unpack_from(raw)
    # A fork without our leave (vfork, a debugger's) may hold its parent's file.
    if magic != ledger.MAGIC or version != ledger.VERSION or owner != pid:
        return None
    _, seen, place = ledger.PLACE.unpack_from(raw, ledger.PLACE_AT)
    circles = tuple(_circles(raw))
    return Account(
        pid=pid,
        rank=rank,
        size=size,
        host=_text(host),
        place=_text(place),
        place_age=(now - seen) / 1e9 if seen else 0.0,
        circles=circles,
        records=tuple(_records(raw, circles, now)),
    )


_SEGMENT = struct.Struct("<8sIIiiqQQQQQq128s")
_ENTRY = struct.Struct("<QQIIIiIIQQQQQ16x96s")
_SEGMENT_PLACE = struct.Struct("<QQ256s")
_SEGMENT_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "bytes"),
)
_SEGMENT_STATES = ("queued", "running", "done", "failed")


def _read_segment(pid: int, fd: int, now: int) -> Account | None:
    """What the shm backend of that process has written into the segment of one group."""
    path = f"/proc/{pid}/fd/{fd}"
    if _is_own(path):
        # The owner's lock on the file tells peers that it lives, and a process that closes any
        # descriptor of a file loses its locks on it: so never from inside.
        return None
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(_SEGMENT.size)
            if len(head) < _SEGMENT.size:
                return None
            magic, _, entries, rank, size, owner, *rest, name = _SEGMENT.unpack(head)
            _, _, ledger_at, entry_bytes, place_at, _ = rest
            if magic != b"TUTTISHM" or owner != pid:  # a peer maps it, too
                return None
            raw = os.pread(file.fileno(), entries * entry_bytes, ledger_at)
            place_raw = os.pread(file.fileno(), _SEGMENT_PLACE.size, place_at)
    except OSError:
        return None
    group = _text(name)
    _, seen, place = _SEGMENT_PLACE.unpack(place_raw)
    starts = range(0, len(raw), entry_bytes)
    lines = sorted(_ENTRY.unpack_from(raw, at) for at in starts)
    records = tuple(_segment_record(line, group, now) for line in lines if line[0] > 0)
    return Account(
        pid=pid,
        rank=rank,
        size=size,
        place=_text(place),
        place_age=(now - seen) / 1e9 if seen else 0.0,
        records=records,
    )


def _segment_record(line: tuple[Any, ...], group: str, now: int) -> Record:
    _, sequence, kind, dtype, _, peer, _, state, size, began, _, ended, _, where = line
    return Record(
        operation=ledger.KINDS[kind],
        group=group,
        group_name=group,
        sequence=sequence,
        bytes=size,
        dtype=_SEGMENT_DTYPES[dtype] if kind else "",
        peer=peer,
        state=_SEGMENT_STATES[state],
        age=(now - began) / 1e9,
        ended=(now - ended) / 1e9 if ended else None,
        where=_text(where),
        written_by="shm",
    )


def _is_own(path: str) -> bool:
    """Whether this process has the file open itself."""
    try:
        theirs = os.stat(path)
    except OSError:  # gone meanwhile
        return True
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed the directory
            if os.path.samestat(theirs, os.stat(f"/proc/self/fd/{fd}")):
                return True
    return False


def _circles(raw: bytes) -> Iterator[Circle]:
    for number in range(ledger.GROUPS):
        at = ledger.GROUPS_AT + number * ledger.GROUP_BYTES
        collectives, messages, rank, size, label, name = ledger.GROUP.unpack_from(raw, at)
        if size == 0:
            return
        yield Circle(_text(label), _text(name), rank, size, collectives, messages)


def _records(raw: bytes, circles: tuple[Circle, ...], now: int) -> Iterator[Record]:
    slots = range(ledger.RECORDS_AT, ledger.RECORDS_AT + ledger.RECORDS * ledger.RECORD_BYTES, 64)
    for fields in sorted(ledger.RECORD.unpack_from(raw, at) for at in slots):
        number, sequence, began, ended, size, site, line, peer, group, dtype, kind, state = fields
        if number == 0 or kind >= len(ledger.KINDS) or state >= len(ledger.STATES):
            continue
        circle = circles[group] if group < len(circles) else None
        named = _name(raw, dtype)
        yield Record(
            operation=ledger.KINDS[kind],
            group=circle.label if circle else "?",
            group_name=circle.name if circle else "",
            sequence=sequence,
            bytes=size,
            dtype="" if named == "None" else named.removeprefix("torch."),
            peer=peer,
            state=ledger.STATES[state],
            age=(now - began) / 1e9,
            ended=(now - ended) / 1e9 if ended else None,
            where=ledger.placed(_name(raw, site), line),
        )


def _name(raw: bytes, number: int) -> str:
    at = ledger.NAMES_AT + number * ledger.NAME_BYTES
    return _text(raw[at : at + ledger.NAME_BYTES])


def _stable_read(pid: int, fd: int) -> bytes | None:
    """The file, read twice alike where possible: else a record was just being written."""
    try:
        file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        size = os.fstat(file).st_size
        before = os.pread(file, size, 0)
        for _ in range(5):
            after = os.pread(file, size, 0)
            if after == before:
                break
            before = after
        return before
    finally:
        os.close(file)


def _ledgers(pid: int) -> Iterator[tuple[int, str]]:
    """The files of a process that hold a ledger: number and label."""
    try:
        fds = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # it has gone, or is somebody else's
        return
    seen: set[int] = set()
    for fd in fds:
        path = f"/proc/{pid}/fd/{fd}"
        try:
            found = _LEDGER.fullmatch(os.readlink(path))
            inode = os.stat(path).st_ino if found else 0
        except OSError:  # closed meanwhile
            continue
        if found and inode not in seen:  # Python's mmap opens the file a second time
            seen.add(inode)
            yield int(fd), found[1]


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="replace")
