"""DDP's buckets on a timeline: gradients of several parameters that are all-reduced together.

ready      the last gradient of the bucket was there, and the reducer called all_reduce
started    data began to move: every rank had called, and the messages before it left room
done       the sum was there
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tutti.profile.collective import Collective
from tutti.profile.rank_trace import RankTrace, Step


@dataclass(frozen=True)
class Bucket:
    """One bucket in one step of one rank; seconds from the step's start."""

    rank: int
    step: int
    index: int
    bytes: int
    ready_s: float
    started_s: float
    done_s: float


def buckets(traces: Sequence[RankTrace]) -> list[Bucket]:
    """All of them, by rank, step and the order in which they were called."""
    return [
        Bucket(
            rank=trace.rank,
            step=step.number,
            index=index,
            bytes=each.bytes,
            ready_s=each.ready - step.start,
            started_s=each.waited_until - step.start,
            done_s=each.end - step.start,
        )
        for trace in traces
        for step in trace.steps
        for index, each in enumerate(in_step(trace, step))
        if each.ready is not None
    ]


def in_step(trace: RankTrace, step: Step) -> list[Collective]:
    """The buckets of a step in the order in which they were called."""
    found = [
        each
        for each in trace.collectives
        if each.ready is not None and step.start <= each.arrival < step.end
    ]
    return sorted(found, key=lambda each: (each.ready, each.arrival))


def bucket_rows(traces: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """`buckets[]` of the JSON."""
    return [asdict(each) for each in buckets(traces)]
