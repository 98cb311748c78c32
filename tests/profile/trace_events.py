"""Traces written by hand in the format of Kineto for an NCCL run: kernels with the arguments of
record_param_comms. Times are microseconds.
"""

import json
from pathlib import Path
from typing import Any

from tutti.profile.explain import Explanation

STEP = 1000.0
FLOATS = 1_000_000


def x(category: str, name: str, start: float, end: float, **arguments: Any) -> dict[str, Any]:
    event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start}
    return event | {"pid": 0, "tid": 7, "args": arguments}


def step(number: int) -> dict[str, Any]:
    return x("user_annotation", f"ProfilerStep#{number}", number * STEP, (number + 1) * STEP)


def all_reduce(start: float, end: float, sequence: int) -> dict[str, Any]:
    fields = {
        "Collective name": "allreduce",
        "Process Group Name": "0",
        "In msg nelems": FLOATS,
        "Out msg nelems": FLOATS,
        "dtype": "Float",
        "Seq": sequence,
        "Group size": 2,
        "Process Group Ranks": "[0, 1]",
    }
    return x("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL()", start, end, **fields)


def write(
    folder: Path,
    rank: int,
    events: list[dict[str, Any]],
    base: int = 0,
    host: str = "n0",
    name: str = "",
    **metadata: Any,
) -> Path:
    """Write a trace; `metadata` is stored beside the events."""
    path = folder / (name or f"rank{rank}.json")
    info = {"backend": "nccl", "rank": rank, "world_size": 2} | metadata.pop("distributedInfo", {})
    content = {"distributedInfo": info, "host_name": host, "baseTimeNanoseconds": base}
    path.write_text(json.dumps(content | metadata | {"traceEvents": events}))
    return path


def parts(explanation: Explanation, rank: int, step: int) -> dict[str, float]:
    found = next(s for s in explanation.steps if (s.rank, s.step) == (rank, step))
    return {name: round(1e6 * seconds, 3) for name, seconds in found.parts.items() if seconds}


def launched(name: str, at: float, start: float, end: float, number: int) -> list[dict[str, Any]]:
    """Return a launch on host thread 7, and its kernel on stream 20."""
    return [
        x("cuda_runtime", "cudaLaunchKernel", at, at + 1, correlation=number),
        x("kernel", name, start, end, correlation=number) | {"tid": 20},
    ]


def tag(operation: str, phase: str, sequence: int) -> str:
    return (
        f"tutti::{operation}|phase={phase}|group=dp|bytes=4096|dtype=float32|seq={sequence}|ranks=2"
    )
