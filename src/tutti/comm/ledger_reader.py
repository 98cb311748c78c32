"""Read the ledgers of other processes on this host, even of processes that hang, without torch.

A process has one ledger for each group that called tutti.comm (a memfd "tutti-ledger:LABEL") and
one in each segment of the shm backend (a memfd "tutti-shm:GROUP"), which also contains torch's own
calls of that backend, for example by DDP. Both have the layout of ledger.py.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tutti.comm import ledger

_MEMFD = re.compile(r"/memfd:(tutti-ledger|tutti-shm):(.*) \(deleted\)")


@dataclass(frozen=True)
class OperationRecord:
    """One operation of one process. Ages are in seconds before the ledger was read."""

    operation: str
    group: str  # the label that is shown to users
    group_name: str  # torch's name of the group: the same on all its ranks, different for others
    sequence: int
    bytes: int
    dtype: str
    peer: int  # root, or the other rank of a send or receive; -1 for none
    state: str
    age: float  # since it began
    ended: float | None  # seconds since it ended
    where: str  # the call site
    written_by: str  # tutti-ledger, or tutti-shm for an entry of the shm backend

    def __str__(self) -> str:
        size = f"{self.dtype}, {self.bytes} bytes" if self.dtype else f"{self.bytes} bytes"
        return f"{self.operation} {self.sequence} of group {self.group} ({size})"


@dataclass(frozen=True)
class ProcessLedger:
    """The contents of all ledgers of one process."""

    pid: int
    rank: int = -1  # in the default group, else in the largest group that has a ledger
    size: int = 0
    location: str = ""  # where its main thread was when last recorded
    location_age: float = 0.0
    records: tuple[OperationRecord, ...] = ()  # oldest first

    @property
    def current(self) -> OperationRecord | None:
        """The operation that the process waits for, else the last one that it began."""
        waiting = [record for record in self.records if record.state == "waiting"]
        return waiting[-1] if waiting else self.records[-1] if self.records else None


def processes() -> list[int]:
    """All processes of this host whose ledgers can be read, by pid."""
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [pid for pid in pids if any(True for _ in _ledger_files(pid))]


def read_process(pid: int) -> ProcessLedger | None:
    """The contents of a process's ledgers; None if it has none, has ended or may not be read."""
    now = time.monotonic_ns()  # one time for all ledgers, since ages are compared
    read = [_read_ledger(pid, *file, now) for file in _ledger_files(pid)]
    found = [each for each in read if each is not None]
    if not found:
        return None
    # The rank is taken from the default group, else from the largest group.
    found.sort(key=lambda each: (each[1] != "default", -each[0].size))
    located = [each for each, _ in found if each.location]
    newest = min(located, key=lambda each: each.location_age, default=found[0][0])
    records = [record for each, _ in found for record in each.records]
    calls = [record for record in records if record.written_by == ledger.LABEL]
    distinct = [each for each in records if not any(_is_within(each, call) for call in calls)]
    return replace(
        found[0][0],
        location=newest.location,
        location_age=newest.location_age,
        records=tuple(sorted(distinct, key=lambda record: -record.age)),
    )


def _is_within(record: OperationRecord, call: OperationRecord) -> bool:
    """Whether the shm backend wrote `record` for `call`, the record that has the call site."""
    same = (record.operation, record.group_name) == (call.operation, call.group_name)
    began, ended = record.age <= call.age, call.ended is None or record.age >= call.ended
    return record.written_by != call.written_by and same and began and ended


def _read_ledger(
    pid: int, fd: int, kind: str, label: str, now: int
) -> tuple[ProcessLedger, str] | None:
    path = f"/proc/{pid}/fd/{fd}"
    if kind != ledger.LABEL and _is_own(path):
        # Peers check the owner's lock on a segment to find out whether the owner is alive. A
        # process that closes any descriptor of a file loses its locks on that file, so a process
        # never opens its own segments.
        return None
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(ledger.HEADER.size)
            if len(head) < ledger.HEADER.size:
                return None
            magic, _, entries, rank, size, owner, *rest, name = ledger.HEADER.unpack(head)
            _, _, ledger_at, entry_bytes, location_at, _ = rest
            if magic != ledger.MAGIC or owner != pid or entry_bytes != ledger.ENTRY.size:
                return None  # a peer's segment that this process maps, or another version
            raw = b""
            for _ in range(6):  # until two reads are equal: else an entry was being written
                before, raw = raw, os.pread(file.fileno(), entries * entry_bytes, ledger_at)
                if raw == before:
                    break
            location_raw = os.pread(file.fileno(), ledger.LOCATION.size, location_at)
    except OSError:
        return None
    _, seen, location = ledger.LOCATION.unpack(location_raw)
    entry_list = sorted(ledger.ENTRY.iter_unpack(raw))
    group_name = _text(name)
    records = []
    for number, sequence, operation, dtype, _, peer, _, state, bytes, *times, where in entry_list:
        began, _, ended, _ = times
        if number == 0 or operation >= len(ledger.KINDS) or state >= len(ledger.STATES):
            continue
        records.append(
            OperationRecord(
                operation=ledger.KINDS[operation],
                group=label,
                group_name=group_name,
                sequence=sequence,
                bytes=bytes,
                dtype=ledger.DTYPES[dtype] if operation else "",
                peer=peer,
                state=ledger.STATES[state],
                age=(now - began) / 1e9,
                ended=(now - ended) / 1e9 if ended else None,
                where=_text(where),
                written_by=kind,
            )
        )
    age = (now - seen) / 1e9 if seen else 0.0
    return ProcessLedger(pid, rank, size, _text(location), age, tuple(records)), label


def _is_own(path: str) -> bool:
    """Whether this process has the file open itself."""
    try:
        theirs = os.stat(path)
    except OSError:  # closed meanwhile
        return True
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that listed the directory
            if os.path.samestat(theirs, os.stat(f"/proc/self/fd/{fd}")):
                return True
    return False


def _ledger_files(pid: int) -> Iterator[tuple[int, str, str]]:
    """The files of a process that hold a ledger: descriptor, kind and label."""
    try:
        fds = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # the process has ended, or belongs to another user
        return
    seen: set[int] = set()
    for fd in fds:
        path = f"/proc/{pid}/fd/{fd}"
        try:
            found = _MEMFD.fullmatch(os.readlink(path))
            inode = os.stat(path).st_ino if found else 0
        except OSError:  # closed meanwhile
            continue
        if found and inode not in seen:  # Python's mmap duplicates the descriptor
            seen.add(inode)
            yield int(fd), found[1], found[2]


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="replace")
