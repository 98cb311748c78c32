"""The content of one rank's trace: steps, intervals of each activity, and collectives.

A set of time intervals is stored as two sorted numpy arrays, the starts and the ends. Overlapping
intervals are merged.
"""

import math
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# No rank leaves one of these operations before every rank of the group has arrived.
SYNCHRONIZING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")

# The first name that matches is used. So a name comes before the names that are part of it:
# all_reduce comes before reduce.
_OPERATIONS = (
    "reduce_scatter",
    "all_reduce",
    "all_gather",
    "all_to_all",
    "broadcast",
    "barrier",
    "send_recv",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
)
_ELEMENT_BYTES = {
    **dict.fromkeys(("double", "long", "int64", "float64", "uint64"), 8),
    **dict.fromkeys(("complexfloat", "complex<float>"), 8),
    **dict.fromkeys(("float", "int", "int32", "float32", "uint32", "longlong"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("byte", "char", "bool", "unsignedchar", "signedchar", "int8", "uint8"), 1),
    **dict.fromkeys(("complexdouble", "complex<double>"), 16),
}
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Intervals:
    """Disjoint intervals [start, end) in ascending order, in seconds."""

    starts: Floats
    ends: Floats

    @staticmethod
    def of(pairs: Iterable[tuple[float, float]]) -> "Intervals":
        """Return the union of (start, end) pairs that may overlap."""
        flat = np.array([edge for pair in pairs for edge in pair], dtype=np.float64)
        return merge(flat[0::2], flat[1::2])

    @property
    def seconds(self) -> float:
        return float(np.sum(self.ends - self.starts))

    def __and__(self, other: "Intervals") -> "Intervals":
        return self._where(other, inside=True)

    def __sub__(self, other: "Intervals") -> "Intervals":
        return self._where(other, inside=False)

    def _where(self, other: "Intervals", inside: bool) -> "Intervals":
        """Return the parts of this set that lie inside (or outside) the other set."""
        edges = np.unique(np.concatenate([self.starts, self.ends, other.starts, other.ends]))
        selected = self.contains(edges) & (other.contains(edges) == inside)
        return merge(edges[:-1][selected[:-1]], edges[1:][selected[:-1]])

    def contains(self, moments: Floats) -> npt.NDArray[np.bool_]:
        """Return, for each moment, whether it lies in the set."""
        begun = np.searchsorted(self.starts, moments, side="right")
        return begun > np.searchsorted(self.ends, moments, side="right")

    def __or__(self, other: "Intervals") -> "Intervals":
        return merge(
            np.concatenate([self.starts, other.starts]), np.concatenate([self.ends, other.ends])
        )

    def longer_than(self, seconds: float) -> "Intervals":
        """Return the intervals that take at least `seconds`."""
        chosen = self.ends - self.starts >= seconds
        return Intervals(self.starts[chosen], self.ends[chosen])

    def between(self, start: float, end: float) -> "Intervals":
        """Return the part of the set that lies in [start, end)."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left"))
        starts, ends = self.starts[first:last], self.ends[first:last]
        return merge(np.maximum(starts, start), np.minimum(ends, end))


EMPTY = Intervals(np.empty(0), np.empty(0))


class IntervalCollector:
    """Collects intervals in any order, and merges them whenever many have been added.

    So memory use grows with the number of gaps between intervals, not with the number of intervals.
    """

    _MERGE_EVERY = 65_536  # number of starts and ends

    def __init__(self) -> None:
        self._edges = array("d")
        self._limit = self._MERGE_EVERY

    def add(self, start: float, end: float) -> None:
        self._edges.append(start)
        self._edges.append(end)
        if len(self._edges) >= self._limit:
            merged = self.intervals()
            self._edges = array("d", np.stack([merged.starts, merged.ends], axis=1).ravel())
            self._limit = 2 * len(self._edges) + self._MERGE_EVERY

    def intervals(self) -> Intervals:
        flat = np.array(self._edges, dtype=np.float64)
        return merge(flat[0::2], flat[1::2])


@dataclass
class NamedSpans:
    """The operators or kernels of a trace that compute, sorted by start time."""

    names: list[str]
    name: npt.NDArray[np.int32]  # index into `names`
    starts: Floats
    ends: Floats

    def between(self, start: float, end: float) -> "NamedSpans":
        """Return the spans that start in [start, end)."""
        first, last = np.searchsorted(self.starts, [start, end])
        part = slice(int(first), int(last))
        return NamedSpans(self.names, self.name[part], self.starts[part], self.ends[part])


class SpanCollector:
    """Collects named spans of several threads. Of nested spans, only the outermost is kept.

    A span with the name `""` is dropped together with all spans inside it.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {"": 0}
        self._name, self._thread = array("i"), array("i")
        self._starts, self._ends = array("d"), array("d")
        self._threads: dict[Any, int] = {}

    def add(self, name: str, start: float, end: float, thread: Any) -> None:
        self._name.append(self._names.setdefault(name, len(self._names)))
        self._thread.append(self._threads.setdefault(thread, len(self._threads)))
        self._starts.append(start)
        self._ends.append(end)

    def spans(self, without: Intervals) -> NamedSpans:
        """Return the outermost named spans that do not start inside `without`."""
        threads = np.frombuffer(self._thread, dtype=np.int32)
        names = np.frombuffer(self._name, dtype=np.int32)
        starts, ends = np.frombuffer(self._starts), np.frombuffer(self._ends)
        order = np.lexsort((-ends, starts, threads))
        kept = []
        for thread in range(len(self._threads)):
            mine = order[threads[order] == thread]
            ended = np.concatenate([[-np.inf], np.maximum.accumulate(ends[mine])[:-1]])
            kept.append(mine[starts[mine] >= ended])
        chosen = np.concatenate(kept) if kept else np.empty(0, dtype=np.int64)
        chosen = chosen[~without.contains(starts[chosen]) & (names[chosen] > 0)]
        chosen = chosen[np.argsort(starts[chosen], kind="stable")]
        return NamedSpans(list(self._names), names[chosen], starts[chosen], ends[chosen])


def merge(starts: Floats, ends: Floats) -> Intervals:
    """Return the union of unsorted intervals. Intervals with end ≤ start are dropped."""
    positive = ends > starts
    starts, ends = starts[positive], ends[positive]
    if not len(starts):
        return EMPTY
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    opens = np.concatenate([[True], starts[1:] > ends[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return Intervals(starts[opens], ends[closes])


@dataclass(slots=True)
class Collective:
    """One collective or point-to-point operation of one rank.

    Times are in seconds, on the rank's own clock until the clocks are aligned. `arrival` is the
    time at which the program reached the operation. On a CPU this is the time of the call, and on a
    GPU the time at which the stream reached the kernel. The operation ran from `start` to `end`.
    `start` may be later than `arrival`, because a thread pool may start the operation after the
    call.
    """

    operation: str
    arrival: float
    start: float
    end: float
    thread: Any  # thread and process of the event, for the merged trace
    process: Any
    group: str = ""
    sequence: int | None = None
    bytes: int = 0
    dtype: str = ""
    group_ranks: tuple[int, ...] = ()
    group_size: int = 0
    peer: int | None = None  # group rank of the peer of a send or receive
    axis: str | None = None  # the mesh axis (dp, shard, tp or pp), or `world`
    call_returned: float = 0.0  # on a CPU: the time at which the call returned
    # For a DDP bucket: the time at which the last gradient of the bucket was computed.
    bucket_ready: float | None = None
    # The time at which the last rank arrived, and the number of this rank. match_collectives sets
    # both.
    last_arrival: float | None = None
    last_rank: int | None = None

    @property
    def is_point_to_point(self) -> bool:
        return self.operation in ("send", "recv", "send_recv")

    @property
    def transfer_start(self) -> float:
        """The time at which waiting for the last rank ends and the transfer of data starts."""
        if self.last_arrival is not None:
            return min(max(self.start, self.last_arrival), self.end)
        # If the peer's trace does not contain the operation, a receive is assumed to be all
        # waiting. This also applies to NCCL's batch_isend_irecv, which is one kernel without a
        # peer.
        return self.end if self.operation in ("recv", "send_recv") else self.start

    def fill_from_arguments(self, arguments: dict[str, Any]) -> None:
        """Set the fields from the arguments of a record_param_comms event or an NCCL kernel."""
        self.operation = operation_named(arguments.get("Collective name", "")) or self.operation
        self.group = str(arguments.get("Process Group Name", ""))
        self.dtype = str(arguments.get("dtype", ""))
        counts = [arguments.get("In msg nelems"), arguments.get("Out msg nelems")]
        largest = max((count for count in counts if isinstance(count, int)), default=0)
        self.bytes = largest * element_bytes(self.dtype)
        sequence = arguments.get("Seq")
        if isinstance(sequence, int) and sequence >= 0:
            self.sequence = sequence
        self.group_size = int(arguments.get("Group size", 0) or 0)
        ranks = re.findall(r"\d+", str(arguments.get("Process Group Ranks", "")))
        if len(ranks) == self.group_size:  # Kineto truncates long lists
            self.group_ranks = tuple(int(rank) for rank in ranks)
        peer = arguments.get("Src Rank", arguments.get("Dst Rank"))
        if self.is_point_to_point and isinstance(peer, int):
            self.peer = peer


@dataclass
class Step:
    """One training step. In most traces it is a `ProfilerStep#N` range."""

    number: int
    start: float
    end: float
    # (time of the first gradient, end of backward), if known.
    gradients: tuple[float, float] | None = None
    backward_start: float | None = None
    # The time at which each gradient was accumulated.
    accumulated: list[float] = field(default_factory=list)


@dataclass
class RankTrace:
    """The content of one rank's trace. Times are in seconds since `base_ns` (a Unix time in ns)."""

    path: Path
    rank: int
    world_size: int
    backend: str
    host: str
    base_ns: int
    on_device: bool
    steps: list[Step]
    compute: Intervals
    communication: Intervals
    input: Intervals
    other: Intervals  # GPU: copies. CPU: code that calls operators, such as autograd's engine
    operators: NamedSpans
    collectives: list[Collective]
    groups: dict[str, dict[str, Any]]
    memory_bytes: int | None  # peak memory of the device allocator
    host_memory_bytes: int | None  # peak memory of the process
    memory: dict[str, Any] | None  # peak memory by cause in bytes, if --memory was given
    device_bytes: int | None  # total memory of the device
    has_loader_workers: bool
    of_tutti_train: bool  # whether `tutti train` ran the recorded steps
    # The amount of computation, to compare ranks: the number of GPU threads, or the number of
    # multiplications on a CPU. 0 means unknown.
    compute_estimate: float
    # The share of the operators that run inside a data loader. The recording cost is proportional
    # to the number of operators, so the same share of the recording cost belongs to the part
    # `input`.
    operators_in_input: float
    capture_info: dict[str, Any]  # metadata that Capture added to the trace
    notes: list[str] = field(default_factory=list)
    # The time in functions of DDP's reducer: mul_out (copies a gradient to its bucket),
    # copy_bucket_to_grad and search_unused_parameters.
    reducer: dict[str, Intervals] = field(default_factory=dict)

    def shift(self, seconds: float) -> None:
        """Add `seconds` to every time, to convert the trace to a different clock."""
        for name in ("compute", "communication", "input", "other"):
            intervals = getattr(self, name)
            setattr(self, name, Intervals(intervals.starts + seconds, intervals.ends + seconds))
        self.operators.starts += seconds
        self.operators.ends += seconds
        for name, intervals in self.reducer.items():
            moved = Intervals(intervals.starts + seconds, intervals.ends + seconds)
            self.reducer[name] = moved
        for step in self.steps:
            step.start, step.end = step.start + seconds, step.end + seconds
            step.accumulated = [moment + seconds for moment in step.accumulated]
            if step.backward_start is not None:
                step.backward_start += seconds
            if step.gradients is not None:
                step.gradients = step.gradients[0] + seconds, step.gradients[1] + seconds
        for collective in self.collectives:
            for name in ("arrival", "start", "end", "call_returned", "bucket_ready"):
                if (moment := getattr(collective, name)) is not None:
                    setattr(collective, name, moment + seconds)

    def collectives_called_in(self, step: Step) -> list[Collective]:
        return [call for call in self.collectives if step.start <= call.arrival < step.end]


def operation_named(name: str) -> str | None:
    """Return the operation in a name, or None: all_reduce in ncclDevKernel_AllReduce_Sum_f32."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    return next((op for op in _OPERATIONS if op.replace("_", "") in letters), None)


def element_bytes(dtype: str) -> int:
    """Return the bytes per element of a dtype that is named as in traces, or 0 if unknown."""
    name = dtype.lower().removeprefix("c10::").replace(" ", "")
    return 1 if name.startswith("float8") else _ELEMENT_BYTES.get(name, 0)


def element_count(dims: Any, kind: str) -> int:
    """Return the number of elements of a tensor, or of all tensors in a list of tensors."""
    if isinstance(dims, list) and kind == "TensorList":
        return sum(map(math.prod, dims))
    return math.prod(dims) if isinstance(dims, list) and element_bytes(kind) else 0
