"""One communication of one rank, as its trace shows it: what, with whom, and when.

`arrival` is when the program came to it: the call, or on a GPU the moment its stream reached the
kernel. `start` to `end` is when it ran; a thread pool may start it later than it was called.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

_NAMES = (  # the longer before what it contains
    *("reducescatter", "allreduce", "allgather", "alltoall", "broadcast", "barrier"),
    *("sendrecv", "reduce", "gather", "scatter", "send", "recv"),
)
_SPELLED = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
}
_ELEMENT_BYTES = {
    **dict.fromkeys(("double", "long", "int64", "float64", "complexfloat", "uint64"), 8),
    **dict.fromkeys(("float", "int", "int32", "float32", "uint32", "longlong"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("byte", "char", "bool", "unsignedchar", "signedchar", "int8", "uint8"), 1),
    "complexdouble": 16,
}
POINT_TO_POINT = ("send", "recv", "send_recv")
# No rank can leave one of these before every rank has arrived.
SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


@dataclass(slots=True)
class Collective:
    """Times are seconds on the rank's own clock until ranks are aligned."""

    operation: str
    arrival: float
    start: float
    end: float
    thread: Any  # where the viewer shows it: process and thread of the event
    process: Any
    group: str = ""
    sequence: int | None = None
    bytes: int = 0
    dtype: str = ""
    group_ranks: tuple[int, ...] = ()
    group_size: int = 0
    peer: int | None = None  # of a send or a receive, in its group
    axis: str | None = None  # of the layout: dp, shard, tp, pp, or world
    returned: float = 0.0  # on a CPU, when the call gave the caller its thread back
    # Of a bucket of DDP's, when the last of its gradients was there.
    ready: float | None = None
    # Filled in when ranks are matched: when the last rank arrived, and which one it was.
    last_arrival: float | None = None
    last_rank: int | None = None

    @property
    def is_point_to_point(self) -> bool:
        return self.operation in POINT_TO_POINT

    @property
    def waited_until(self) -> float:
        """Where waiting for the last rank ends and moving data begins."""
        if self.last_arrival is None:
            return self.start
        return min(max(self.start, self.last_arrival), self.end)


def operation_named(name: str) -> str | None:
    """all_reduce for c10d::allreduce_, gloo:all_reduce, ncclDevKernel_AllReduce_Sum_f32_RING_LL"""
    letters = re.sub(r"[^a-z]", "", name.lower())
    found = next((each for each in _NAMES if each in letters), None)
    return None if found is None else _SPELLED.get(found, found)


def element_bytes(dtype: str) -> int:
    """Bytes of an element, by any of the names that traces use; 0 if unknown."""
    name = dtype.lower().removeprefix("c10::").replace(" ", "")
    if name.startswith("float8") or name.startswith("complex<"):
        return {"complex<float>": 8, "complex<double>": 16}.get(name, 1)
    return _ELEMENT_BYTES.get(name, 0)


def elements(dims: Any, kind: str) -> int:
    """How many elements an argument has: a tensor, or all tensors of a list together."""
    if not isinstance(dims, list):
        return 0
    if kind == "TensorList":
        return sum(math.prod(each) for each in dims)
    return math.prod(dims) if element_bytes(kind) else 0


def from_parameters(arguments: dict[str, Any], collective: Collective) -> None:
    """Fill in what record_param_comms says; NCCL's kernels carry a copy of it."""
    name = str(arguments.get("Collective name", ""))
    collective.operation = operation_named(name) or collective.operation
    collective.group = str(arguments.get("Process Group Name", ""))
    collective.dtype = str(arguments.get("dtype", ""))
    counts = [arguments.get("In msg nelems", 0), arguments.get("Out msg nelems", 0)]
    largest = max((int(count) for count in counts if isinstance(count, int)), default=0)
    collective.bytes = largest * element_bytes(collective.dtype)
    sequence = arguments.get("Seq")
    if isinstance(sequence, int) and sequence >= 0:
        collective.sequence = sequence
    collective.group_size = int(arguments.get("Group size", 0) or 0)
    ranks = re.findall(r"\d+", str(arguments.get("Process Group Ranks", "")))
    if len(ranks) == collective.group_size:  # else the list was cut
        collective.group_ranks = tuple(int(rank) for rank in ranks)
    for key in ("Dst Rank", "Src Rank"):
        if collective.is_point_to_point and isinstance(arguments.get(key), int):
            collective.peer = int(arguments[key])
