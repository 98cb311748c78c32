"""The ledger: the operations that this rank has called, in memory that other processes can read.

Every call of tutti.comm is written to a ring of entries, one ring per process group, in a memfd
named "tutti-ledger:LABEL". Another process can read the memfd through /proc/PID/fd, even if this
process hangs. Times are in nanoseconds of CLOCK_MONOTONIC, except for fields that are marked as
realtime. This module does not import torch.

All ledgers have the same layout and are read by `read_process`. There are two writers, this module
and shm/core/ledger.c, because neither writer sees all operations. Operations on gloo and NCCL do
not use the C core, and a machine without a compiler has no C core. Calls of torch.distributed on
the shm backend (for example by DDP or FSDP) do not use tutti.comm. If both writers have recorded an
operation, the reader shows the operation once (`_is_within`).
"""

import atexit
import contextlib
import itertools
import mmap
import os
import re
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any

from tutti.comm.shm import native
from tutti.machine.environment import boot_id

# The operations, dtypes and reductions of the enums in shm/core/tutti_shm.h, in the same order,
# with the names that torch and tutti.comm use.
KINDS = native.KINDS
_TORCH_NAMES = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint"}
DTYPES = tuple(  # the last name, bytes, stands for every other dtype
    re.sub(r"^[a-z]+(?=\d)", lambda prefix: _TORCH_NAMES[prefix[0]], name) for name in native.DTYPES
)
REDUCTIONS = tuple("mean" if name == "avg" else name for name in native.REDUCTIONS)
# A streamed operation is enqueued on a CUDA stream. The ledger does not record when the operation
# completes.
STATES = ("begun", "waiting", "done", "failed", "streamed")
BEGUN, WAITING, DONE, FAILED, STREAMED = range(5)

ENTRIES = 256
_LABEL = "tutti-ledger"
_MAGIC = b"TUTTISHM"
# The fields of `tutti_header` in shm/core/ledger.h: magic, version of the layout, number of
# entries, rank, size of the group, pid, token, bytes of the file, offset of the first entry, bytes
# of an entry, offset of the location, time of creation (realtime), group name.
_HEADER = struct.Struct("<8sIIiiqQQQQQq128s")
# The fields of `tutti_entry` in shm/core/ledger.h: number (from 1; the entry is at index
# (number - 1) % entries), sequence, kind, dtype, reduction, root or peer, tag, state, bytes, begun,
# begun (realtime), ended, fingerprint, call site.
_ENTRY = struct.Struct("<QQIIIiIIQQQQQ16x96s")
_LOCATION = struct.Struct("<QQ256s")  # fields: version (odd while being written), time, text
_LOCATION_AT, _ENTRIES_AT = 256, 1024
_BYTES = _ENTRIES_AT + ENTRIES * _ENTRY.size
_STATE_AT, _BEGUN_AT, _ENDED_AT = 36, 48, 64
_pack = _ENTRY.pack_into
_REALTIME_OFFSET = time.time_ns() - monotonic_ns()


class GroupLedger:
    """The ring of entries of one process group in this process."""

    def __init__(self, label: str, name: str, rank: int, size: int) -> None:
        self._file = os.memfd_create(f"{_LABEL}:{label[:200]}", os.MFD_CLOEXEC)
        os.ftruncate(self._file, _BYTES)
        self._map(mmap.mmap(self._file, _BYTES))
        self._numbers = itertools.count(1)
        self._location_version = 0
        # fmt: off
        _HEADER.pack_into(
            self._memory, 0, _MAGIC, 0, ENTRIES, rank, size, os.getpid(), 0, _BYTES, _ENTRIES_AT,
            _ENTRY.size, _LOCATION_AT, time.time_ns(), _clipped(name, 128),
        )
        # fmt: on
        _open_ledgers.add(self)

    # fmt: off
    def begin(self, sequence: int, kind: int, dtype: int, reduction: int, root: int, tag: int,
              state: int, size: int, site: bytes) -> int:
        """Record that an operation of `size` bytes has begun and return its number, for `mark`."""
        number = next(self._numbers)
        now = monotonic_ns()
        _pack(self._memory, _ENTRIES_AT + (number - 1) % 256 * 192, number, sequence, kind, dtype,
              reduction, root, tag, state, size, now, now + _REALTIME_OFFSET, 0, 0, site)
        return number
    # fmt: on

    def mark(self, number: int, state: int) -> None:
        """Record a new state of an operation: waiting, done, failed or streamed."""
        at = _ENTRIES_AT + (number - 1) % ENTRIES * 192
        if self._words[at // 8] == number:  # else a later operation has overwritten the entry
            if state != WAITING:
                self._words[(at + _ENDED_AT) // 8] = monotonic_ns()
            self._memory[at + _STATE_AT] = state

    def seconds_since_begin(self, number: int) -> float:
        """Return how long ago an operation began, or 0 if it is no longer in the ring."""
        at = (_ENTRIES_AT + (number - 1) % ENTRIES * _ENTRY.size) // 8
        if self._words[at] != number:
            return 0.0
        return (monotonic_ns() - self._words[at + _BEGUN_AT // 8]) / 1e9

    def write_location(self, text: str) -> None:
        """Record the source line that the main thread executes."""
        self._location_version += 2
        entry = (monotonic_ns(), _clipped(text, 256))
        _LOCATION.pack_into(self._memory, _LOCATION_AT, self._location_version - 1, *entry)
        self._words[_LOCATION_AT // 8] = self._location_version

    def _map(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("B").cast("q")

    def detach(self) -> None:
        """In a forked child, write to private memory instead of the parent's ledger from now on."""
        os.close(self._file)
        self._file = -1
        self._map(mmap.mmap(-1, _BYTES))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # `close` is a default argument, because this method may run while the interpreter ends,
        # when the name `os` no longer exists.
        if getattr(self, "_file", -1) >= 0:
            close(self._file)


_open_ledgers: "weakref.WeakSet[GroupLedger]" = weakref.WeakSet()


def _detach_all() -> None:
    for ledger in list(_open_ledgers):
        ledger.detach()


os.register_at_fork(after_in_child=_detach_all)


def process_address() -> dict[str, Any]:
    """Return the values that another process needs to find the ledgers of this process.

    `machine` identifies the running system and the PID namespace, because containers on one host
    have different PID namespaces.
    """
    machine = f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}"
    return {"host": os.uname().nodename, "machine": machine, "pid": os.getpid()}


def is_on_this_machine(address: Mapping[str, Any]) -> bool:
    """Return whether the process at this address runs on this machine, in this PID namespace."""
    return bool(address["machine"] == process_address()["machine"])


def _clipped(text: str, limit: int) -> bytes:
    """Return the text as fewer than `limit` bytes. The beginning of a longer text is cut off."""
    raw = text.encode(errors="replace")
    return raw if len(raw) < limit else "…".encode() + raw[-(limit - 4) :]


# ---- Call sites and the location of the main thread, such as `train.py:88 in step` ----

_COMM = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = f"{os.sep}torch{os.sep}"
_LOCATION_SECONDS = 1.0

# Keys are the ids of code objects. Values are the code object and the call-site text of each of its
# lines (None for code of tutti.comm or torch). The code object is stored to keep it alive, so that
# its id is not reused.
_sites: dict[int, tuple[CodeType, dict[int, bytes] | None]] = {}
_location_writers: dict[str, Callable[[str], None]] = {}
# The pid of the process in which the recording thread runs. A forked child has no such thread.
_recording_process: int | None = None


def call_site(frame: FrameType | None) -> bytes:
    """Return the innermost line outside tutti.comm and torch from which a call was made."""
    while frame is not None:
        code = frame.f_code
        site = _sites.get(id(code))
        lines = site[1] if site is not None else _add_site(code)
        if lines is not None:
            line = frame.f_lineno
            text = lines.get(line)
            if text is None:
                path = shown_path(code.co_filename)
                text = lines[line] = _clipped(f"{path}:{line} in {code.co_name}", 96)
            return text
        frame = frame.f_back
    return b""


def _add_site(code: CodeType) -> dict[int, bytes] | None:
    if len(_sites) > 4096:  # limit the memory if a program creates new code objects all the time
        _sites.clear()
    lines: dict[int, bytes] | None = None if is_internal(code.co_filename) else {}
    _sites[id(code)] = code, lines
    return lines


def is_internal(filename: str) -> bool:
    """Return whether a file belongs to tutti.comm, torch or Python's import system."""
    return filename.startswith((_COMM, "<frozen")) or _TORCH in filename


def shown_path(filename: str) -> str:
    """Return the path relative to the working directory if the file is below it, else unchanged."""
    try:
        return filename.removeprefix(os.getcwd() + os.sep)
    except FileNotFoundError:  # the working directory was removed
        return filename


def record_location(backend: str, write: Callable[[str], None]) -> None:
    """Call `write` once a second, from a thread, with the location of the main thread.

    The location is the source line that the main thread executes. `write` stores the location in
    memory that other processes can read, so that a timeout error can name the source line of a late
    rank. Each backend has one `write` function.
    """
    global _recording_process
    _location_writers[backend] = write
    if _recording_process != os.getpid():
        _recording_process = os.getpid()
        end = threading.Event()
        thread = threading.Thread(
            target=_record_locations, args=[end], name="tutti-locations", daemon=True
        )
        thread.start()
        atexit.register(_stop_recording, os.getpid(), end, thread)


def _record_locations(end: threading.Event) -> None:
    main = threading.main_thread().ident
    while main is not None and not end.is_set():
        text = call_site(sys._current_frames().get(main)).decode(errors="replace") or "unknown"
        for write in list(_location_writers.values()):
            write(text)
        end.wait(_LOCATION_SECONDS)


def _stop_recording(process: int, end: threading.Event, thread: threading.Thread) -> None:
    """End the thread before the interpreter is finalized.

    The thread briefly holds references to the frames of the main thread, so it may delete the last
    reference to a process group in these frames and run the destructor of the group. The destructor
    releases the GIL. If the destructor then requests the GIL during finalization, Python ends the
    thread inside the destructor, which aborts the process.
    """
    if process == os.getpid():  # a forked child inherits this handler, but not the thread
        end.set()
        thread.join()


# ---- Reading the ledgers of other processes on this host, even of processes that hang ----

_MEMFD = re.compile(r"/memfd:(tutti-ledger|tutti-shm):(.*) \(deleted\)")


@dataclass(frozen=True)
class OperationRecord:
    """One operation of one process. Ages are relative to the time at which the ledger was read."""

    operation: str
    group: str  # the label that is shown to users
    group_name: str  # torch's name of the group, which all ranks of the group share
    sequence: int
    bytes: int
    dtype: str
    peer: int  # the root, the other rank of a send or receive, or -1
    state: str
    age: float  # seconds since the operation began
    ended_ago: float | None  # seconds since the operation ended, or None if it has not ended
    where: str  # the call site
    written_by: str  # "tutti-ledger", or "tutti-shm" for an entry of the shm backend

    def __str__(self) -> str:
        size = f"{self.dtype}, {self.bytes} bytes" if self.dtype else f"{self.bytes} bytes"
        return f"{self.operation} {self.sequence} of group {self.group} ({size})"


@dataclass(frozen=True)
class ProcessLedger:
    """The contents of all ledgers of one process."""

    pid: int
    rank: int  # in the default group, or in the largest group if the default group has no ledger
    size: int
    location: str  # the last recorded location of the main thread
    location_age: float
    records: tuple[OperationRecord, ...]  # oldest first

    @property
    def current(self) -> OperationRecord | None:
        """The operation that the process waits for, or else the last operation that it began."""
        waiting = [record for record in self.records if record.state == "waiting"]
        return waiting[-1] if waiting else self.records[-1] if self.records else None


def processes() -> list[int]:
    """Return the sorted pids of all processes on this host whose ledgers can be read."""
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [pid for pid in pids if any(True for _ in _ledger_files(pid))]


def read_process(pid: int) -> ProcessLedger | None:
    """Return the contents of a process's ledgers, or None if there are none or access is denied."""
    now = monotonic_ns()  # one time for all ledgers, so that ages can be compared
    ledgers = [_read_ledger(pid, *file, now) for file in _ledger_files(pid)]
    found = [(label, ledger) for label, ledger in ledgers if ledger is not None]
    if not found:
        return None
    _, main = min(found, key=lambda item: (item[0] != "default", -item[1].size))
    located = [ledger for _, ledger in found if ledger.location]
    newest = min(located, key=lambda ledger: ledger.location_age, default=main)
    records = [record for _, ledger in found for record in ledger.records]
    calls = [record for record in records if record.written_by == _LABEL]
    distinct = [record for record in records if not any(_is_within(record, c) for c in calls)]
    return replace(
        main,
        location=newest.location,
        location_age=newest.location_age,
        records=tuple(sorted(distinct, key=lambda record: -record.age)),
    )


def _is_within(record: OperationRecord, call: OperationRecord) -> bool:
    """Return whether the shm backend wrote `record` during `call`, for the same operation.

    The reader then omits `record`, because only `call` has the call site.
    """
    same = (record.operation, record.group_name) == (call.operation, call.group_name)
    began = record.age <= call.age
    ended = call.ended_ago is None or record.age >= call.ended_ago
    return record.written_by != call.written_by and same and began and ended


def _read_ledger(
    pid: int, path: str, written_by: str, label: str, now: int
) -> tuple[str, ProcessLedger | None]:
    if written_by != _LABEL and _is_open_here(path):
        # Peers check the owner's lock on a segment to find out whether the owner is alive. When a
        # process closes any descriptor of a file, it loses its locks on the file. Therefore a
        # process must not open and close its own segments.
        return label, None
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(_HEADER.size)
            if len(head) < _HEADER.size:
                return label, None
            magic, _, entries, rank, size, owner, *rest, name = _HEADER.unpack(head)
            _, _, ledger_at, entry_bytes, location_at, _ = rest
            if magic != _MAGIC or owner != pid or entry_bytes != _ENTRY.size:
                return label, None  # a peer's segment, or the layout of another tutti version
            raw = b""
            for _ in range(6):  # until two reads are equal: otherwise an entry was being written
                before, raw = raw, os.pread(file.fileno(), entries * entry_bytes, ledger_at)
                if raw == before:
                    break
            location_raw = os.pread(file.fileno(), _LOCATION.size, location_at)
    except OSError:
        return label, None
    records = []
    for entry in sorted(_ENTRY.iter_unpack(raw)):
        number, sequence, kind, dtype, _, peer, _, state, bytes, began, _, ended, _, where = entry
        if number == 0 or kind >= len(KINDS) or state >= len(STATES):
            continue
        records.append(
            OperationRecord(
                KINDS[kind],
                label,
                _text(name),
                sequence,
                bytes,
                DTYPES[dtype] if kind else "",
                peer,
                STATES[state],
                (now - began) / 1e9,
                (now - ended) / 1e9 if ended else None,
                _text(where),
                written_by,
            )
        )
    _, recorded, location = _LOCATION.unpack(location_raw)
    age = (now - recorded) / 1e9 if recorded else 0.0
    return label, ProcessLedger(pid, rank, size, _text(location), age, tuple(records))


def _is_open_here(path: str) -> bool:
    """Return whether this process also has the file open."""
    try:
        status = os.stat(path)
    except OSError:  # closed meanwhile
        return True
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # listdir has closed its own descriptor
            if os.path.samestat(status, os.stat(f"/proc/self/fd/{fd}")):
                return True
    return False


def _ledger_files(pid: int) -> Iterator[tuple[str, str, str]]:
    """Yield (path, writer, label) of each ledger file that a process has open."""
    try:
        paths = [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:  # the process has ended, or belongs to another user
        return
    inodes: set[int] = set()
    for path in paths:
        with contextlib.suppress(OSError):  # closed meanwhile
            found = _MEMFD.fullmatch(os.readlink(path))
            inode = os.stat(path).st_ino if found else 0
            if found and inode not in inodes:  # Python's mmap duplicates the descriptor
                inodes.add(inode)
                yield path, found[1], found[2]


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="replace")
