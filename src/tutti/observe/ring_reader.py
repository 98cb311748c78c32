"""Reads the rings that recorder.cpp writes, from another process and without torch.

A ring is a file in shared memory, one per rank and per loader worker, in the folder of its job:
/dev/shm/tutti-observe-UID/JOB/PID.ring. Only its owner can read it (mode 0600, folder 0700). The
file outlives the process, so a job that has died can still be explained. Nothing is unpickled: a
ring is a fixed structure of numbers and texts.
"""

import contextlib
import ctypes
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

# The names of operations, in the order of kKinds in recorder.cpp, from 1.
KINDS = (
    "",
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "recv_any_source",
)
PHASES = ("other", "input", "forward", "backward", "optimizer")
STATES = ("", "entered", "completed", "failed")
# c10::ScalarType + 1, c10d::ReduceOp::RedOpType + 1 and c10::DeviceType.
DTYPES = (
    "", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32",
    "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16",
)  # fmt: skip
REDUCTIONS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
DEVICES = {0: "cpu", 1: "cuda"}
RUNNING, ENDED, FAILED = 0, 1, 2  # exit_state

_VERSION = 2
_OPERATIONS, _STEPS, _GROUPS, _SITES = 4096, 4096, 128, 1024
_GROUP_RANKS, _THREADS, _FRAMES, _SITE_BYTES = 512, 8, 24, 256
_i32, _i64, _u16, _u32, _u64 = (
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_uint16,
    ctypes.c_uint32,
    ctypes.c_uint64,
)


def _text(count: int) -> Any:
    return ctypes.c_char * count


# fmt: off
class _Header(ctypes.Structure):
    _fields_ = (
        ("magic", _text(8)), ("version", _u32), ("bytes", _u32), ("pid", _i64), ("rank", _i32),
        ("world_size", _i32), ("local_rank", _i32), ("worker", _i32), ("started", _i64),
        ("realtime_offset", _i64), ("sampled", _i64), ("operations", _u64), ("completed", _u64),
        ("steps", _u64), ("batches", _u64), ("loaders_ended", _u64), ("step_began", _i64),
        ("phase_began", _i64), ("phase", _u32), ("groups", _u32), ("sites", _u32),
        ("exit_state", _u32), ("exited", _i64), ("gil_beat", _i64), ("parent", _i64),
        ("host", _text(64)), ("job", _text(128)), ("boot", _text(40)), ("command", _text(256)),
        ("error", _text(512)), ("backend", _text(32)),
    )


class _Group(ctypes.Structure):
    _fields_ = (
        ("name", _text(64)), ("description", _text(32)), ("backend", _text(32)), ("rank", _i32),
        ("size", _i32), ("listed", _i32), ("collectives", _u32), ("ranks", _u16 * _GROUP_RANKS),
        ("created", _i64), ("used", _i64),
    )


class _Operation(ctypes.Structure):
    _fields_ = (
        ("number", _u64), ("group", _u32), ("sequence", _u32), ("kind", _u16), ("dtype", _u16),
        ("peer", _i32), ("tag", _i32), ("state", ctypes.c_uint8),
        ("asynchronous", ctypes.c_uint8), ("device", ctypes.c_uint8),
        ("reduction", ctypes.c_uint8), ("site", _u32), ("thread", _u32), ("step", _u32),
        ("dims", _u32), ("shape", _u32 * 6), ("elements", _u64), ("entered", _i64),
        ("completed", _i64),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("number", _u64), ("began", _i64), ("ended", _i64), ("phases", _i64 * len(PHASES)),
        ("collection", _i64),
    )


class _Thread(ctypes.Structure):
    _fields_ = (
        ("thread", _u32), ("frames", _u32), ("state", ctypes.c_char), ("name", _text(31)),
        ("system_call", _text(16)), ("file", _text(192)), ("wait_channel", _text(48)),
        ("site", _text(_SITE_BYTES) * _FRAMES),
    )


class _Samples(ctypes.Structure):
    _fields_ = (
        ("version", _u64), ("sampled", _i64), ("threads", _u32), ("reserved", _u32),
        ("thread", _Thread * _THREADS),
    )


class Ring(ctypes.Structure):
    """The layout of a ring. recorder.cpp defines the same layout as `struct Ring`."""

    _fields_ = (
        ("header", _Header), ("sites", _text(_SITE_BYTES) * _SITES), ("group", _Group * _GROUPS),
        ("operation", _Operation * _OPERATIONS), ("step", _Step * _STEPS), ("samples", _Samples),
    )
# fmt: on


@dataclass(frozen=True)
class Group:
    """A process group. `ranks` are global ranks, or () if they are not known."""

    name: str
    description: str
    backend: str
    rank: int
    size: int
    collectives: int
    ranks: tuple[int, ...]

    @property
    def key(self) -> str:
        """The same text on all ranks of the group. Groups with other ranks have another text."""
        return f"{self.name}|{','.join(map(str, self.ranks)) or self.size}"

    @property
    def label(self) -> str:
        """The name that messages show."""
        if self.description and self.description not in ("default_pg", "undefined"):
            return f"group {self.description} (name {self.name})"
        return "the default group" if self.name == "0" else f"group {self.name}"


@dataclass(frozen=True)
class Operation:
    """One collective, send or receive. Times are in seconds of CLOCK_MONOTONIC."""

    number: int
    kind: str
    group: str  # Group.key
    sequence: int
    dtype: str
    shape: tuple[int, ...]
    elements: int
    peer: int  # group rank of the root or of the other end, or -1
    tag: int
    reduction: str
    device: str
    state: str
    site: str
    thread: int
    step: int
    entered: float
    completed: float  # 0 if the operation has not completed
    asynchronous: bool = False  # called with async_op=True; False for sends and receives

    @property
    def pending(self) -> bool:
        return self.state == "entered"

    @property
    def point_to_point(self) -> bool:
        return self.kind in ("send", "recv", "recv_any_source")

    @property
    def signature(self) -> str:
        """The operation with its tensor, for example `all_reduce(sum) of float32 [1024]`."""
        name = f"{self.kind}({self.reduction})" if self.reduction else self.kind
        if self.kind in ("barrier", "monitored_barrier"):
            return name
        return f"{name} of {self.dtype or 'unknown'} {list(self.shape)}"


@dataclass(frozen=True)
class Step:
    """One training step: its times, and seconds by phase."""

    number: int
    began: float
    ended: float
    phases: dict[str, float]
    collection: float  # seconds of garbage collection


@dataclass(frozen=True)
class Thread:
    """A sample of one Python thread. `frames` has texts `FILE:LINE in NAME`, innermost first."""

    thread: int
    name: str
    state: str  # the letter in /proc/PID/task/TID/stat
    system_call: str  # read, write, futex, sleep, poll, …; "" while the thread runs
    file: str  # the file or socket that the system call uses
    wait_channel: str
    frames: tuple[str, ...]


@dataclass(frozen=True)
class Process:
    """What is known of one rank or loader worker at one moment, `time` (CLOCK_MONOTONIC)."""

    pid: int
    rank: int
    world_size: int
    worker: int  # the number of a loader worker, or -1
    parent: int
    host: str
    job: str
    command: str
    backend: str
    started: float  # seconds since 1970
    time: float
    clock_offset: float  # seconds since 1970 minus CLOCK_MONOTONIC, to compare hosts
    alive: bool
    state: str  # the letter in /proc/PID/stat; "" if the process has ended
    exit_state: int
    exited_ago: float | None
    error: str
    steps: int
    batches: int
    loaders_ended: int
    entered: int  # number of operations entered
    completed: int
    step_age: float
    phase: str
    phase_age: float
    gil_age: float  # seconds since a Python thread of the process could run
    sample_age: float
    cpu_seconds: float
    io_bytes: int
    memory_bytes: int
    groups: dict[str, Group] = field(default_factory=dict)
    operations: tuple[Operation, ...] = ()  # oldest first
    step_history: tuple[Step, ...] = ()
    threads: tuple[Thread, ...] = ()  # the main thread first
    network: tuple[str, ...] = ()  # peers with unacknowledged data

    @property
    def progress(self) -> tuple[int, ...]:
        """Counters that change while the training loop makes progress."""
        return (self.steps, self.batches, self.loaders_ended, self.entered, self.completed)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Process":
        values = dict(values)
        values["groups"] = {
            key: Group(**{**group, "ranks": tuple(group["ranks"])})
            for key, group in values["groups"].items()
        }
        values["operations"] = tuple(
            Operation(**{**each, "shape": tuple(each["shape"])}) for each in values["operations"]
        )
        values["step_history"] = tuple(Step(**each) for each in values["step_history"])
        values["threads"] = tuple(
            Thread(**{**each, "frames": tuple(each["frames"])}) for each in values["threads"]
        )
        values["network"] = tuple(values["network"])
        return Process(**values)


# -- folders ---------------------------------------------------------------------------------------


def rings_folder() -> Path:
    """Return the folder of this user's rings. It need not exist."""
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK):
        base = Path(os.environ.get("TMPDIR") or "/tmp")
    return base / f"tutti-observe-{os.getuid()}"


def job_folder(job: str) -> Path:
    """Return the folder of a job's rings."""
    return rings_folder() / (re.sub(r"[^A-Za-z0-9._-]", "_", job) or "job")


def create_job_folder(job: str) -> Path:
    """Create the folder of a job's rings. Raise PermissionError if another user owns it."""
    folder = job_folder(job)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user")
        if status.st_mode & 0o077:
            path.chmod(0o700)
    return folder


def remove_job(job: str) -> None:
    """Remove the rings of a job."""
    shutil.rmtree(job_folder(job), ignore_errors=True)


def jobs() -> list[Path]:
    """Return the folders of all jobs of this user, newest first."""
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(FileNotFoundError):
        for entry in filter(os.DirEntry.is_dir, os.scandir(rings_folder())):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                found.append((entry.stat().st_mtime, Path(entry.path)))
    return [path for _, path in sorted(found, reverse=True)]


def remove_old_jobs(max_age: float = 86400.0, keep: int = 16) -> None:
    """Remove ended jobs that are older than `max_age` seconds, and all but the newest `keep`."""
    ended = 0
    for folder in jobs():
        rings = [path for path in folder.glob("*.ring") if path.stem.isdecimal()]
        if any(_process_state(int(path.stem)) for path in rings):
            continue
        ended += 1
        with contextlib.suppress(OSError):  # another process removes the same job
            age = time.time() - folder.stat().st_mtime
            # A new folder may belong to a job whose ranks have not created their rings yet, or to a
            # job that somebody is about to explain.
            if age > max_age or (ended > keep and age > 600):
                shutil.rmtree(folder, ignore_errors=True)


# -- reading ---------------------------------------------------------------------------------------


def read_job(folder: Path, operations: int = 512, steps: int = 64) -> list[Process]:
    """Return the ranks and loader workers of a job, ranks first, in rank order.

    `operations` and `steps` limit the number of the latest operations and steps of each process.
    """
    found = [read_ring(path, operations, steps) for path in sorted(folder.glob("*.ring"))]
    processes = [process for process in found if process is not None]
    # If a rank was restarted, only its newest process counts.
    newest: dict[tuple[int, int, str], Process] = {}
    processes.sort(key=lambda each: each.started)
    size = next((p.world_size for p in reversed(processes) if p.worker < 0), 0)
    for process in processes:
        if process.worker < 0 and 0 < size <= process.rank:
            continue  # of a larger world, before the job was restarted with fewer ranks
        key = (process.rank, process.worker, process.host if process.worker >= 0 else "")
        if process.worker >= 0:
            key = (process.parent, process.worker, process.host)
        newest[key] = process
    return sorted(newest.values(), key=lambda each: (each.worker, each.rank))


def read_ring(path: Path, operations: int = 512, steps: int = 64) -> Process | None:
    """Return the contents of a ring, or None if it is not (or not yet) a ring of this version."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            raw = file.read(ctypes.sizeof(Ring))
            if len(raw) < ctypes.sizeof(Ring):
                return None
            ring = Ring.from_buffer_copy(raw)
            # The stacks may be half written. A process that died then leaves them so.
            for _ in range(5):
                file.seek(Ring.samples.offset)
                again = _Samples.from_buffer_copy(file.read(ctypes.sizeof(_Samples)))
                if again.version == ring.samples.version and again.version % 2 == 0:
                    break
                ring.samples = again
    except (OSError, ValueError):
        return None
    header = ring.header
    if header.magic != b"tuttiobs" or header.version != _VERSION or header.bytes != len(raw):
        return None
    now = time.monotonic_ns()

    def seconds(value: int) -> float:
        return value / 1e9

    def age(value: int) -> float:
        return max(0.0, (now - value) / 1e9) if value else 0.0

    groups: list[Group] = []
    for number in range(min(header.groups, _GROUPS)):
        group = ring.group[number]
        ranks = tuple(group.ranks[: max(0, min(group.listed, _GROUP_RANKS))])
        if group.name == b"0":  # of a larger world, the ring lists only the first ranks
            ranks = tuple(range(max(0, header.world_size)))
        groups.append(
            Group(
                _decode(group.name),
                _decode(group.description),
                _decode(group.backend),
                group.rank,
                group.size,
                group.collectives,
                ranks,
            )
        )
    first = max(1, header.operations - min(operations, _OPERATIONS) + 1)
    entries: list[Operation] = []
    for number in range(first, header.operations + 1):
        entry = ring.operation[(number - 1) % _OPERATIONS]
        if entry.number != number or entry.group >= len(groups) or entry.kind >= len(KINDS):
            continue  # the entry is being written
        if entry.entered < ring.group[entry.group].created:
            continue  # an operation of the group that had this entry before
        site = _decode(ring.sites[entry.site].value) if 0 < entry.site < _SITES else ""
        entries.append(
            Operation(
                number,
                KINDS[entry.kind],
                groups[entry.group].key,
                entry.sequence,
                DTYPES[entry.dtype] if entry.dtype < len(DTYPES) else f"dtype {entry.dtype}",
                tuple(entry.shape[: min(entry.dims, 6)]),
                entry.elements,
                entry.peer,
                entry.tag,
                REDUCTIONS[entry.reduction] if entry.reduction < len(REDUCTIONS) else "other",
                DEVICES.get(entry.device, f"device {entry.device}"),
                STATES[min(entry.state, 3)],
                site,
                entry.thread,
                entry.step,
                seconds(entry.entered),
                seconds(entry.completed),
                bool(entry.asynchronous),
            )
        )
    history: list[Step] = []
    for number in range(max(1, header.steps - min(steps, _STEPS) + 1), header.steps + 1):
        step = ring.step[(number - 1) % _STEPS]
        if step.number == number:
            phases = {name: seconds(step.phases[i]) for i, name in enumerate(PHASES)}
            history.append(
                Step(
                    number,
                    seconds(step.began),
                    seconds(step.ended),
                    phases,
                    seconds(step.collection),
                )
            )
    threads = [
        Thread(
            sample.thread,
            _decode(sample.name),
            sample.state.decode(errors="replace").strip("\0"),
            _decode(sample.system_call),
            _decode(sample.file),
            _decode(sample.wait_channel),
            tuple(_decode(sample.site[i].value) for i in range(min(sample.frames, _FRAMES))),
        )
        for sample in ring.samples.thread[: min(ring.samples.threads, _THREADS)]
    ]
    process = Process(
        pid=header.pid,
        rank=header.rank,
        world_size=header.world_size,
        worker=header.worker,
        parent=header.parent,
        host=_decode(header.host),
        job=_decode(header.job),
        command=_decode(header.command),
        backend=_decode(header.backend),
        started=seconds(header.started),
        time=seconds(now),
        clock_offset=seconds(header.realtime_offset),
        alive=False,
        state="",
        exit_state=header.exit_state,
        exited_ago=age(header.exited) if header.exited else None,
        error=_decode(header.error),
        steps=header.steps,
        batches=header.batches,
        loaders_ended=header.loaders_ended,
        entered=header.operations,
        completed=header.completed,
        step_age=age(header.step_began),
        phase=PHASES[header.phase] if header.phase < len(PHASES) else "other",
        phase_age=age(header.phase_began),
        gil_age=age(header.gil_beat),
        sample_age=age(header.sampled),
        cpu_seconds=0.0,
        io_bytes=0,
        memory_bytes=0,
        groups={group.key: group for group in groups},
        operations=tuple(entries),
        step_history=tuple(history),
        threads=tuple(threads),
    )
    return _with_process_facts(process, _decode(header.boot))


def read_progress(folder: Path) -> list[tuple[int, ...]]:
    """Return the progress counters of all ranks of a job, without the rest of the rings."""
    counters: list[tuple[int, ...]] = []
    for path in sorted(folder.glob("*.ring")):
        try:
            with path.open("rb") as file:
                raw = file.read(ctypes.sizeof(_Header))
        except OSError:
            continue
        if len(raw) < ctypes.sizeof(_Header):
            continue
        head = _Header.from_buffer_copy(raw)
        if head.magic == b"tuttiobs" and head.version == _VERSION and head.worker < 0:
            counts = (head.steps, head.batches, head.loaders_ended, head.operations, head.completed)
            counters.append((head.rank, *counts, head.exit_state))
    return counters


def _decode(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="replace")


def boot_id() -> str:
    """Return the id of this boot of this host, with its PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot[:8]}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "unknown"


def _with_process_facts(process: Process, boot: str) -> Process:
    """Add what /proc says of the process: whether it lives, its CPU time, I/O and memory."""
    if boot != boot_id():
        if boot.partition("/")[0] != boot_id().partition("/")[0]:
            return process  # written before a reboot
        # A container has other process ids. The recorder samples a living process twice a second.
        return replace(process, alive=process.sample_age < 5.0)
    status = _process_state(process.pid)
    if status is None or status[1] > process.started + 1.0:  # another process has this pid now
        return process
    state, _, cpu = status
    io_bytes = 0
    for line in _lines(f"/proc/{process.pid}/io"):
        if line.startswith(("rchar", "wchar")):
            io_bytes += int(line.split()[1])
    memory = _lines(f"/proc/{process.pid}/statm")
    resident = int(memory[0].split()[1]) * os.sysconf("SC_PAGE_SIZE") if memory else 0
    return replace(
        process,
        alive=state not in ("Z", "X"),
        state=state,
        cpu_seconds=cpu,
        io_bytes=io_bytes,
        memory_bytes=resident,
        network=_unacknowledged(process.pid),
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _process_state(pid: int) -> tuple[str, float, float] | None:
    """Return (state letter, start in seconds since 1970, CPU seconds), or None if it has ended."""
    lines = _lines(f"/proc/{pid}/stat")
    if not lines:
        return None
    fields = lines[0].rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    boot = next((int(line.split()[1]) for line in _lines("/proc/stat") if line[:5] == "btime"), 0)
    cpu = (int(fields[11]) + int(fields[12])) / ticks
    return fields[0], boot + int(fields[19]) / ticks, cpu


def _unacknowledged(pid: int) -> tuple[str, ...]:
    """Return the addresses of TCP peers that have not acknowledged data, with retransmissions."""
    inodes = set()
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            target = os.readlink(entry.path)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except OSError:
        return ()
    peers = []
    for line in [*_lines(f"/proc/{pid}/net/tcp")[1:], *_lines(f"/proc/{pid}/net/tcp6")[1:]]:
        fields = line.split()
        # local, remote, state, tx_queue:rx_queue, timer, retransmissions, uid, timeout, inode
        if len(fields) > 9 and fields[9] in inodes and int(fields[6], 16) > 1:
            peers.append(_address(fields[2]))
    return tuple(sorted(set(peers)))


def _address(text: str) -> str:
    """Return the address of a line in /proc/net/tcp, whose bytes are in host order."""
    raw = text.partition(":")[0]
    words = [bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8)]
    return ".".join(str(byte) for byte in words[-1])


def is_user_frame(frame: str) -> bool:
    """Return whether a frame is of the program itself: not of torch, Python or another library."""
    return not re.search(
        r"/site-packages/|/dist-packages/|/lib/python3|/tutti/(comm|observe|world)/"
        r"|/bin/(?!.*\.py:)",  # such as bin/torchrun
        frame,
    )


def user_frame(frames: Iterable[str]) -> str:
    """Return the innermost frame of the program itself, or else the innermost that is not torch."""
    frames = list(frames)
    for frame in frames:
        if is_user_frame(frame):
            return frame
    return next(
        (each for each in frames if "/torch/" not in each and "/tutti/observe" not in each),
        frames[0] if frames else "",
    )
