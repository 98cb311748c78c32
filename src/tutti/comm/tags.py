"""A name for each call in the profiler's trace, the same for gloo, shm and NCCL.

    tutti::all_reduce|phase=run|group=default|bytes=4096|dtype=float32|seq=12|ranks=4

Everything is in the name: a trace shows the arguments of a record_function only if shapes were
recorded, too. `phase` is run for a call that waits, issue and wait for the two halves of one that
does not. `bytes` are counted as nccl-tests counts them: the larger side of the operation. `seq`
counts the collectives of a group, the same on every rank; sends and receives count by themselves.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tutti.comm.operation import Operation

# True in a thread whose work a profiler records. A look costs 0.05 µs.
profiling = torch._C._autograd._profiler_enabled


@dataclass(frozen=True)
class Tag:
    """What a name in a trace says about a call of tutti.comm."""

    operation: str
    phase: str
    group: str
    bytes: int
    dtype: str
    sequence: int
    ranks: int


def tag_of(operation: "Operation", phase: str) -> str:
    """The name of a call in a trace."""
    return (
        f"tutti::{operation.kind}|phase={phase}|group={operation.members.label}"
        f"|bytes={operation.bytes}|dtype={operation.dtype_name}|seq={operation.sequence}"
        f"|ranks={operation.members.size}"
    )


def span(operation: "Operation", phase: str) -> torch.profiler.record_function:
    """A context in which the profiler sees the call."""
    return torch.profiler.record_function(tag_of(operation, phase))


_FORM = re.compile(
    r"tutti::(?P<operation>\w+)\|phase=(?P<phase>\w+)\|group=(?P<group>[^|]*)"
    r"\|bytes=(?P<bytes>\d+)\|dtype=(?P<dtype>\w*)\|seq=(?P<sequence>\d+)\|ranks=(?P<ranks>\d+)"
)


def parse_tag(name: str) -> Tag | None:
    """Read the name of an event in a trace; None if it is not one of ours."""
    found = _FORM.fullmatch(name)
    if found is None:
        return None
    return Tag(
        operation=found["operation"],
        phase=found["phase"],
        group=found["group"],
        bytes=int(found["bytes"]),
        dtype=found["dtype"],
        sequence=int(found["sequence"]),
        ranks=int(found["ranks"]),
    )
