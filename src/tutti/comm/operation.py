"""One operation from call to result: its process group, tensors, Handle and profiler events."""

import json
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tutti.comm import ledger
from tutti.comm.backend_calls import Finish, dtype_name, issue
from tutti.world.errors import RanksDiffer, UsageError

if TYPE_CHECKING:
    from tutti.comm.grouping import group as Block
    from tutti.comm.path_selection import Table

_KIND_NUMBERS = {kind: number for number, kind in enumerate(ledger.KINDS)}
_SEND = _KIND_NUMBERS["send"]
_REDUCTION_NUMBERS = {name: number for number, name in enumerate(ledger.REDUCTIONS)}
_BYTES_DTYPE = ledger.DTYPES.index("bytes")
_DTYPE_NUMBERS: dict[torch.dtype | None, int] = {
    getattr(torch, name): number for number, name in enumerate(ledger.DTYPES[:_BYTES_DTYPE])
}

# Returns whether a profiler is recording this thread. A call takes 0.05 µs.
profiling = torch._C._autograd._profiler_enabled
CallSite = bytes  # such as `train.py:88 in step`


class CollectiveError(RuntimeError):
    """An operation failed. The message has the operation, its call site and the backend's error."""


class CollectiveTimeout(CollectiveError):
    """Ranks are late. The message names the operation and the source line of each late rank."""


class CollectiveMismatch(CollectiveError, RanksDiffer):
    """Ranks called different operations, and the backend detected the difference."""


class CommGroup:
    """A process group, and the state that tutti.comm keeps for the group on this rank.

    The state consists of operation counts, the ledger (ledger.py), and the tables that determine
    the transfer path of an operation (path_selection.py).

    A CommGroup holds only a weak reference to its process group. torch stops the threads of a
    process group when its last strong reference is deleted, so a strong reference here would keep
    the threads running.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._backends: dict[str, str] = {}
        self.name = str(group.group_name)
        label = str(getattr(group, "group_desc", "") or "undefined").replace("|", "/")
        default_labels = {"default_pg": "default", "undefined": f"group-{self.name}"}
        self.label = default_labels.get(label, label)
        self.rank = group.rank()
        self.size = group.size()
        self.ranks = dist.get_process_group_ranks(group)
        self.collectives = 0  # number of collectives begun so far (the same on all ranks)
        self.p2p_operations = 0  # number of sends and receives that this rank has begun
        self.comparisons = 0  # number of comparisons of calls between ranks (debug mode)
        self.path_tables: dict[str, Table | None] = {}  # rank 0's table for each device type
        self.has_symmetric_memory: bool | None = None  # None means not checked yet
        self.symmetric_stream: int | None = None  # the CUDA stream of all one-shot kernels
        self.ledger = ledger.GroupLedger(self.label, self.name, self.rank, self.size)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's process group."""
        group = self._group()
        if group is None:
            raise UsageError(f"group {self.label} has been destroyed. Create a new group.")
        return group

    @property
    def store(self) -> dist.Store:
        """The store of this group. torch adds a key prefix that is unique to the group."""
        store: dist.Store = c10d._world.pg_map[self.process_group][1]
        return store

    def backend(self, device_type: str) -> str:
        """Return the name of the backend for this type of device, such as gloo, shm or nccl."""
        name = self._backends.get(device_type)
        if name is None:
            group = self.process_group
            if type(group) is dist.ProcessGroup:
                name = str(group._get_backend(torch.device(device_type)).name())
            else:  # a process group written in Python is its own backend
                name = str(group.name())
            name = name.lower()
            # torch 2.15 has several NCCL backends, such as nccl2 and nccl-lazy.
            self._backends[device_type] = name = "nccl" if name.startswith("nccl") else name
        return name

    @property
    def device_types(self) -> set[str]:
        """The types of devices for which the group has a backend: cpu, cuda."""
        return {device.type for device in getattr(self.process_group, "_device_types", [])}

    @property
    def control_device(self) -> torch.device:
        """The device for control data: the CPU if the group has a CPU backend, else the GPU."""
        types = self.device_types
        if not types or "cpu" in types:
            return torch.device("cpu")
        return torch.device(types.pop(), torch.accelerator.current_device_index())

    def check_rank(self, argument: str, rank: int) -> int:
        """Return `rank` if it is a rank of the group. Raise UsageError otherwise."""
        if not 0 <= rank < self.size:
            raise UsageError(
                f"{argument}={rank} must be a rank in group {self.label}, 0 to {self.size - 1}, "
                "not a rank in the world"
            )
        return rank


# Keys are id(process group). An entry is removed when its process group is deleted.
_known_groups: dict[int, CommGroup] = {}
_announced_world: "weakref.ref[dist.ProcessGroup] | None" = None


def comm_group_of(group: dist.ProcessGroup | None) -> CommGroup:
    """Return the CommGroup of a process group. None means all ranks of the world."""
    process_group = c10d.GroupMember.WORLD if group is None else group
    comm_group = _known_groups.get(id(process_group))
    return comm_group if comm_group is not None else _add_group(process_group)


def _add_group(group: object) -> CommGroup:
    global _announced_world
    if group is None:
        raise UsageError("this process has no process group. Call tutti.init() first.")
    if isinstance(group, int):
        raise UsageError("this rank is not in the group. Only ranks of the group may use it.")
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"group={group!r} is not a process group. Use dist.new_group().")
    key = id(group)
    comm_group = _known_groups[key] = CommGroup(group)
    weakref.finalize(group, _known_groups.pop, key, None).atexit = False
    world = c10d.GroupMember.WORLD
    if world is not None and (_announced_world is None or _announced_world() is not world):
        # Publish the address of this process in the store, so that other ranks can read the ledger
        # of this rank for their error messages.
        _announced_world = weakref.ref(world)
        ledger.record_location("comm", comm_group_of(None).ledger.write_location)
        address = json.dumps(ledger.process_address())
        c10d._get_default_store().set(f"tutti/ledger/{dist.get_rank()}", address)
    return comm_group


@dataclass(eq=False, slots=True)
class Operation:
    """One call: its kind, group and tensors, and the conversion of its result.

    `tensor` is the caller's input, and `result` is the tensor that the call returns. `source` and
    `target` are the tensors that the backend reads and writes. They are in wire form: contiguous,
    with a dtype that every backend supports. After the transfer, `finish` converts `target` into
    `result`.
    """

    kind: str
    comm_group: CommGroup
    tensor: torch.Tensor | None
    source: torch.Tensor | None
    target: torch.Tensor | None
    result: torch.Tensor | None
    bytes: int
    reduction: str = ""  # the reduction that the backend performs
    root: int = -1
    finish: Finish | None = None
    op: str = ""  # the reduction that the caller requested
    tag: int = 0
    # For all_to_all: the numbers of elements sent to each rank and received from each rank.
    splits: tuple[list[int], list[int]] | None = None
    sequence: int = 0
    site: CallSite = b""

    @property
    def is_p2p(self) -> bool:
        return self.kind in ("send", "recv")

    @property
    def device(self) -> torch.device | None:
        return None if self.tensor is None else self.tensor.device

    @property
    def is_on_stream(self) -> bool:
        """Whether the operation runs on a CUDA stream, so that the host does not wait for it."""
        return self.tensor is not None and self.tensor.is_cuda

    @property
    def dtype_name(self) -> str:
        """The dtype of the input, such as float32, or "" for a barrier."""
        return "" if self.tensor is None else dtype_name(self.tensor.dtype)

    @property
    def where(self) -> str:
        return self.site.decode(errors="replace") or "unknown"

    def traced(self, phase: str) -> torch.profiler.record_function:
        """Return a context manager that adds an event to a trace. See Tag for the event's name."""
        return torch.profiler.record_function(
            f"tutti::{self.kind}|phase={phase}|group={self.comm_group.label}|bytes={self.bytes}"
            f"|dtype={self.dtype_name}|seq={self.sequence}|ranks={self.comm_group.size}"
        )

    def __str__(self) -> str:
        peer = {"send": f"to {self.root}", "recv": f"from {self.root}"}.get(self.kind, "")
        details = filter(None, (peer, self.op, self.dtype_name, f"{self.bytes} bytes"))
        group = self.comm_group.label
        return f"{self.kind} {self.sequence} of group {group} ({', '.join(details)})"


# The open comm.group() block of this thread. The block collects operations and sends them when it
# ends.
current_block: "ContextVar[Block | None]" = ContextVar("current_block", default=None)
# comm.debug(True) sets this function. It compares the calls of all ranks before they are sent.
compare_calls: Callable[[Sequence[Operation]], None] | None = None


def perform(operation: Operation, wait: bool) -> Any:
    """Send the operation, now or at the end of its comm.group(). Return its result or a Handle."""
    operation.site = ledger.call_site(sys._getframe(2))
    block = current_block.get()
    if block is not None:
        return block.add(operation, wait)
    if compare_calls is not None:
        compare_calls([operation])
    return send(operation, wait)


def send(operation: Operation, wait: bool) -> Any:
    """Record the operation in the ledger, pass it to torch and, if `wait`, wait for it."""
    number = record(operation, ledger.WAITING if wait else ledger.BEGUN)
    on_stream = operation.is_on_stream
    try:
        call: Callable[[Operation, bool], Any] = issue
        if on_stream:
            from tutti.comm.path_selection import sender_of

            call = sender_of(operation)
        if profiling():
            with operation.traced("run" if wait else "issue"):
                work = call(operation, not wait)
                if wait and work is not None:
                    work.wait()
        else:
            work = call(operation, not wait)
            if wait and work is not None:
                work.wait()
    except RuntimeError as error:
        raise failed(operation, number, error) from error
    except Exception:
        operation.comm_group.ledger.mark(number, ledger.FAILED)
        raise
    if not wait:
        return Handle(operation, work, number)
    if operation.finish is not None:
        operation.finish()
    operation.comm_group.ledger.mark(number, ledger.STREAMED if on_stream else ledger.DONE)
    return operation.result


def record(operation: Operation, state: int) -> int:
    """Count the operation, write it to the ledger, and return the number of its ledger entry."""
    comm_group, kind = operation.comm_group, _KIND_NUMBERS[operation.kind]
    if kind < _SEND:
        comm_group.collectives = sequence = comm_group.collectives + 1
    else:
        comm_group.p2p_operations = sequence = comm_group.p2p_operations + 1
    operation.sequence = sequence
    tensor = operation.tensor
    dtype = _BYTES_DTYPE if tensor is None else _DTYPE_NUMBERS.get(tensor.dtype, _BYTES_DTYPE)
    # fmt: off
    return comm_group.ledger.begin(
        sequence, kind, dtype, _REDUCTION_NUMBERS.get(operation.op, 0), operation.root,
        operation.tag, state, operation.bytes, operation.site,
    )
    # fmt: on


def failed(operation: Operation, number: int, error: Exception) -> Exception:
    """Return the exception that replaces a backend's error and names the late ranks."""
    from tutti.comm.collective_errors import collective_error

    seconds = operation.comm_group.ledger.seconds_since_begin(number)
    operation.comm_group.ledger.mark(number, ledger.FAILED)
    return collective_error(operation, seconds, error)


class Handle:
    """An operation that has been started. The handle keeps the operation's tensors alive.

    Call wait() before you read the result or write to the input. The first wait() also performs the
    steps after the transfer (the division of a mean, the copy into a non-contiguous tensor). Later
    calls of wait() return immediately.

    On CUDA, wait() does not block the host. It makes a stream wait for the result: the stream that
    is passed to wait(), or the current stream. Other streams can wait for `event()`.
    """

    def __init__(self, operation: Operation, work: Any, number: int) -> None:
        self.operation, self.work = operation, work
        self._number = number
        self._is_finished = False
        # The reason why wait() raises an error: the comm.group() block is still open, or has
        # failed. "" if wait() is allowed.
        self.cannot_wait = ""
        self._event: torch.cuda.Event | None = None
        self._error: Exception | None = None

    @property
    def result(self) -> torch.Tensor | None:
        """Wait, then return the operation's result, or None if this rank gets no result."""
        return self.wait()

    @property
    def source(self) -> int:
        """Wait, then return the sender's rank in the group, for recv with source=None."""
        self.wait()
        sender = self.operation.root
        return sender if sender >= 0 else int(self.work._source_rank())

    def wait(self, stream: "torch.cuda.Stream | None" = None) -> torch.Tensor | None:
        """Wait for the result and return it. On CUDA, `stream` or the current stream waits."""
        if self.cannot_wait:
            operation = self.operation
            raise UsageError(f"{operation.kind} at {operation.where} {self.cannot_wait}")
        if self._error is not None:
            raise self._error
        if self.operation.is_on_stream:
            self._wait_on(stream or torch.cuda.current_stream(self.operation.device))
        elif stream is not None:
            raise UsageError("wait(stream=…) is for CUDA tensors, but this operation is on the CPU")
        elif not self._is_finished:
            self._finish()
        return self.operation.result

    def is_done(self) -> bool:
        """Return whether wait() would return immediately.

        On CUDA, return whether the result is complete.
        """
        if self.cannot_wait:
            return False
        if self._event is not None:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        return self._is_finished or self.work is None or bool(self.work.is_completed())

    def future(self) -> "torch.futures.Future[torch.Tensor]":
        """Return the result as a torch Future, for DDP communication hooks."""

        def complete(_: Any) -> torch.Tensor | None:
            # Do not call work.wait(), because some backends complete the future before the work.
            if self.operation.finish is not None:
                self.operation.finish()
            self._is_finished = True
            self.operation.comm_group.ledger.mark(self._number, ledger.DONE)
            return self.operation.result

        future: torch.futures.Future[torch.Tensor] = self.work.get_future().then(complete)
        return future

    def event(self) -> "torch.cuda.Event":
        """Return a CUDA event that fires when the result is complete.

        The current stream does not wait for the event.
        """
        if not self.operation.is_on_stream:
            raise UsageError("event() is for CUDA tensors. Use wait() on the CPU.")
        if self._event is None:
            self._wait_on(torch.cuda.Stream(self.operation.device))  # type: ignore[no-untyped-call]
        assert self._event is not None
        return self._event

    def complete(self, work: Any, event: "torch.cuda.Event | None") -> None:
        """Mark the result as complete. On CUDA, the result is complete when `event` fires."""
        self.work, self._event = work, event
        self._is_finished, self.cannot_wait = True, ""

    def _wait_on(self, stream: "torch.cuda.Stream") -> None:
        if self._event is not None:
            stream.wait_event(self._event)
        else:
            with torch.cuda.stream(stream):
                self._finish()
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record(stream)
        # The allocator must not reuse the memory while this stream may still read the tensors.
        for tensor in (self.operation.source, self.operation.target, self.operation.result):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)

    def _finish(self) -> None:
        operation = self.operation
        entries = operation.comm_group.ledger
        entries.mark(self._number, ledger.WAITING)
        try:
            if self.work is not None:
                if profiling():
                    with operation.traced("wait"):
                        self.work.wait()
                else:
                    self.work.wait()
        except RuntimeError as error:
            self._error = failed(operation, self._number, error)
            raise self._error from error
        if operation.finish is not None:
            operation.finish()
        self._is_finished = True
        entries.mark(self._number, ledger.STREAMED if operation.is_on_stream else ledger.DONE)

    def __del__(self) -> None:
        # Dropping a handle without wait() is an error only if wait() would convert the result.
        has_failed = self._error is not None or self.cannot_wait
        if not self._is_finished and self.operation.finish is not None and not has_failed:
            message = f"the handle of {self.operation} was dropped. Call wait() to complete it."
            warnings.warn(message, ResourceWarning, stacklevel=2)


@dataclass(frozen=True)
class Tag:
    """The fields in the name of a profiler event that describes a call of tutti.comm.

        tutti::all_reduce|phase=run|group=default|bytes=4096|dtype=float32|seq=12|ranks=4

    The name has the same form for gloo, shm and NCCL. All fields are in the name, because a trace
    contains the arguments of a record_function only if the profiler records shapes. `phase` is
    `run` for a call that waits. A call with wait=False has two events, with phases `issue` and
    `wait`. `bytes` is the maximum of the input size and the output size, as in nccl-tests.
    `seq` counts the collectives of a group and is the same on every rank. Sends and receives are
    counted separately.
    """

    operation: str
    phase: str
    group: str
    bytes: int
    dtype: str
    sequence: int
    ranks: int


_TAG = re.compile(
    r"tutti::(\w+)\|phase=(\w+)\|group=([^|]*)\|bytes=(\d+)\|dtype=(\w*)\|seq=(\d+)\|ranks=(\d+)"
)


def parse_tag(name: str) -> Tag | None:
    """Return the Tag in the name of a trace event, or None if the event is not from tutti.comm."""
    if (found := _TAG.fullmatch(name)) is None:
        return None
    operation, phase, group, size, dtype, sequence, ranks = found.groups()
    return Tag(operation, phase, group, int(size), dtype, int(sequence), int(ranks))
