"""The ledger: the operations that this rank has called, in memory that other processes can read.

gloo keeps no record of its operations, and a process that hangs cannot report them. So every call
of tutti.comm is written to a ring of entries, one ring per process group, in a memfd that is named
"tutti-ledger:LABEL": no file, no lock, nothing to clean up. Another process can open the memfd
through /proc/PID/fd, even if this process hangs (ledger_reader.py).

The layout is the same as that of the ledger in a segment of the shm backend (shm/core/ledger.h),
which records torch's own calls of that backend (for example by DDP), so one reader reads both.
Numbers are little-endian, there are no pointers, and times are nanoseconds of CLOCK_MONOTONIC
unless a name contains realtime.

Writing an entry is one struct.pack_into. A reader repeats its read until two reads are equal, so
that it does not use an entry that is being written.
"""

import itertools
import json
import mmap
import os
import re
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any

from tutti.comm.shm import native
from tutti.machine.environment import boot_id

# Operations, dtypes and reductions are those of the enums in shm/core/tutti_shm.h, under the names
# that torch and tutti.comm use.
KINDS = native.KINDS
_TORCH_NAMES = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint"}
DTYPES = tuple(  # the last one, bytes, stands for every other dtype
    re.sub(r"^[a-z]+(?=\d)", lambda prefix: _TORCH_NAMES[prefix[0]], name) for name in native.DTYPES
)
REDUCTIONS = tuple("mean" if name == "avg" else name for name in native.REDUCTIONS)
# streamed: enqueued on a CUDA stream; the ledger does not record when the stream completes it.
STATES = ("begun", "waiting", "done", "failed", "streamed")
BEGUN, WAITING, DONE, FAILED, STREAMED = range(5)

LABEL = "tutti-ledger"
MAGIC = b"TUTTISHM"
# magic, abi, entries, rank, size, pid, token, bytes, ledger offset, entry bytes, location offset,
# created (realtime), group name
HEADER = struct.Struct("<8sIIiiqQQQQQq128s")
# number (from 1; entry at (number - 1) % entries), sequence, kind, dtype, reduction, root or peer,
# tag, state, bytes, begun, begun (realtime), ended, fingerprint, call site
ENTRY = struct.Struct("<QQIIIiIIQQQQQ16x96s")
LOCATION = struct.Struct("<QQ256s")  # version (odd while being written), time, text
ENTRIES = 256
_LOCATION_AT, _ENTRIES_AT = 256, 1024
_BYTES = _ENTRIES_AT + ENTRIES * ENTRY.size
_STATE_AT, _BEGUN_AT, _ENDED_AT = 36, 48, 64
_pack = ENTRY.pack_into
_REALTIME_OFFSET = time.time_ns() - monotonic_ns()


class GroupLedger:
    """The ring of entries of one process group in this process."""

    def __init__(self, label: str, name: str, rank: int, size: int) -> None:
        self._file = os.memfd_create(f"{LABEL}:{label[:200]}", os.MFD_CLOEXEC)
        os.ftruncate(self._file, _BYTES)
        self._map(mmap.mmap(self._file, _BYTES))
        self._numbers = itertools.count(1)
        self._location_version = 0
        # fmt: off
        HEADER.pack_into(
            self._memory, 0, MAGIC, 0, ENTRIES, rank, size, os.getpid(), 0, _BYTES, _ENTRIES_AT,
            ENTRY.size, _LOCATION_AT, time.time_ns(), _clipped(name, 128),
        )
        # fmt: on
        _open_ledgers.add(self)

    def begin(
        self,
        kind: int,
        dtype: int,
        reduction: int,
        root: int,
        tag: int,
        state: int,
        sequence: int,
        size: int,
        site: bytes,
    ) -> int:
        """Record that an operation of `size` bytes has begun; returns its number, for `mark`."""
        number = next(self._numbers)
        now = monotonic_ns()
        # fmt: off
        _pack(self._memory, _ENTRIES_AT + (number - 1) % 256 * 192, number, sequence, kind, dtype,
              reduction, root, tag, state, size, now, now + _REALTIME_OFFSET, 0, 0, site)
        # fmt: on
        return number

    def mark(self, number: int, state: int) -> None:
        """Record a new state of an operation: waiting, done, failed or streamed."""
        at = _ENTRIES_AT + (number - 1) % ENTRIES * 192
        if self._words[at // 8] == number:  # else a later operation has overwritten the entry
            if state != WAITING:
                self._words[(at + _ENDED_AT) // 8] = monotonic_ns()
            self._memory[at + _STATE_AT] = state

    def seconds_since_begin(self, number: int) -> float:
        """How long ago an operation began; 0 if it is no longer in the ring."""
        at = (_ENTRIES_AT + (number - 1) % ENTRIES * ENTRY.size) // 8
        if self._words[at] != number:
            return 0.0
        return (monotonic_ns() - self._words[at + _BEGUN_AT // 8]) / 1e9

    def write_location(self, text: str) -> None:
        """Write the source line at which the main thread is."""
        self._location_version += 2
        entry = (monotonic_ns(), _clipped(text, 256))
        LOCATION.pack_into(self._memory, _LOCATION_AT, self._location_version - 1, *entry)
        self._words[_LOCATION_AT // 8] = self._location_version

    def _map(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("B").cast("q")

    def detach(self) -> None:
        """In a forked child: replace the parent's memory by memory that no reader opens."""
        os.close(self._file)
        self._file = -1
        self._map(mmap.mmap(-1, _BYTES))

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)


_open_ledgers: "weakref.WeakSet[GroupLedger]" = weakref.WeakSet()


def _detach_all() -> None:
    for ledger in list(_open_ledgers):
        ledger.detach()


os.register_at_fork(after_in_child=_detach_all)


# The ledger of the default group: it also holds the location of the main thread, and stays open
# when the group is destroyed.
_world_ledger: GroupLedger | None = None


def record_locations_in(ledger: GroupLedger) -> None:
    """Write the location of the main thread to this ledger, once a second, from now on."""
    global _world_ledger
    _world_ledger = ledger
    record_location(_write_world_location)


def _write_world_location(text: str) -> None:
    if _world_ledger is not None:
        _world_ledger.write_location(text)


def process_address() -> str:
    """The host, machine and pid by which another process finds this one's ledgers, as JSON."""
    where = {"host": os.uname().nodename, "machine": _machine()}
    return json.dumps({**where, "pid": os.getpid()})


def is_on_this_machine(address: Mapping[str, Any]) -> bool:
    """Whether the process at this address runs on this machine, in this PID namespace."""
    return bool(address["machine"] == _machine())


def _machine() -> str:
    """The running system and its PID namespace: each container has its own namespace."""
    return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}"


def _clipped(text: str, limit: int) -> bytes:
    """The text in fewer than `limit` bytes; of a longer text, the end, which is more specific."""
    raw = text.encode(errors="replace")
    return raw if len(raw) < limit else "…".encode() + raw[-(limit - 4) :]


# Call sites and the location of the main thread, both as `train.py:88 in step`.

_COMM = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = f"{os.sep}torch{os.sep}"
_LOCATION_SECONDS = 1.0

# Keys are the ids of code objects. Values are the code object itself, which keeps it alive so that
# its id is not reused, and the texts of its lines, or None for code of tutti.comm or torch.
_sites: dict[int, tuple[CodeType, dict[int, bytes] | None]] = {}
_location_sinks: list[Callable[[str], None]] = []
# The pid of the process in which the recording thread runs: a forked child has no such thread.
_recording_process: int | None = None


def call_site(frame: FrameType | None) -> bytes:
    """The innermost line outside tutti.comm and torch from which a call was made."""
    while frame is not None:
        code = frame.f_code
        known = _sites.get(id(code))
        lines = known[1] if known is not None else _add_site(code)
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
    if len(_sites) > 4096:  # code that is generated for every call must not be kept forever
        _sites.clear()
    lines: dict[int, bytes] | None = None if is_internal(code.co_filename) else {}
    _sites[id(code)] = code, lines
    return lines


def is_internal(filename: str) -> bool:
    """Whether a file belongs to tutti.comm, torch or Python's import system, not to the user."""
    return filename.startswith((_COMM, "<frozen")) or _TORCH in filename


def shown_path(filename: str) -> str:
    """The path relative to the working directory if the file is below it, else unchanged."""
    try:
        here = os.getcwd() + os.sep
    except FileNotFoundError:
        return filename
    return filename.removeprefix(here)


def record_location(sink: Callable[[str], None]) -> None:
    """Call `sink` once a second, from a thread, with the location of the main thread.

    A sink writes the location to memory that other processes can read, so that the error of a
    timeout can name the line at which a late rank is.
    """
    global _recording_process
    if sink not in _location_sinks:
        _location_sinks.append(sink)
    if _recording_process != os.getpid():
        _recording_process = os.getpid()
        threading.Thread(target=_record_locations, name="tutti-locations", daemon=True).start()


def _record_locations() -> None:
    main = threading.main_thread().ident
    while main is not None:
        text = call_site(sys._current_frames().get(main)).decode(errors="replace") or "unknown"
        for sink in list(_location_sinks):
            sink(text)
        time.sleep(_LOCATION_SECONDS)
