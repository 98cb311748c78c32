"""Timing of repeated calls on this rank, with the CPU's clock or with CUDA events on the stream.

Back to back: calls follow each other without a pause, as in nccl-tests. The time of a call is the
interval from the end of the previous call to the end of this call.

Isolated: ranks synchronize before each call. The time of a call is the interval from the latest
start on any rank to the latest end on any rank. The start and end times of different ranks can be
compared only on one host, because each host has its own CLOCK_MONOTONIC.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# Recording a CUDA event takes as much host time as a short collective. Therefore a sample on GPUs
# is the mean over several calls between two events. (nccl-tests uses the mean over all calls.)
_CALLS_PER_EVENT = 10


def time_back_to_back(call: Callable[[], Any], times: int, device: torch.device) -> Tensor:
    """Make `times` calls back to back, and return the seconds of each call."""
    if device.type == "cuda":
        return _time_by_events(call, times, _CALLS_PER_EVENT)
    clock = time.perf_counter
    stamps = [0.0] * (times + 1)
    with no_garbage_collection():
        stamps[0] = clock()
        for number in range(1, times + 1):
            call()
            stamps[number] = clock()
    return torch.tensor(stamps, dtype=torch.float64).diff()


def _time_by_events(call: Callable[[], Any], times: int, calls_per_event: int) -> Tensor:
    starts = range(0, times, calls_per_event)
    calls = [min(calls_per_event, times - start) for start in starts]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]  # type: ignore[no-untyped-call]
    with no_garbage_collection():
        events[0].record()
        for number, count in enumerate(calls, 1):
            for _ in range(count):
                call()
            events[number].record()
        events[-1].synchronize()
    counts = torch.tensor(calls)
    milliseconds = [before.elapsed_time(after) for before, after in pairwise(events)]
    means = torch.tensor(milliseconds, dtype=torch.float64) / 1e3 / counts
    return means.repeat_interleave(counts)


def time_total(call: Callable[[], Any], times: int, device: torch.device) -> float:
    """Return the total seconds of `times` calls, measured by CUDA events or the CPU's clock."""
    if device.type == "cuda":
        return float(_time_by_events(call, times, calls_per_event=times).sum())
    return float(time_back_to_back(call, times, device).sum())


def time_isolated(
    call: Callable[[], Any], times: int, device: torch.device, synchronize: Callable[[], Any]
) -> tuple[Tensor, Tensor]:
    """Make `times` calls, with a call of `synchronize` before each call.

    Return the start times and the end times of `call`, in seconds.
    """
    clock = time.perf_counter
    starts, ends = [0.0] * times, [0.0] * times
    with no_garbage_collection():
        for number in range(times):
            synchronize()
            starts[number] = clock()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            ends[number] = clock()
    return torch.tensor(starts, dtype=torch.float64), torch.tensor(ends, dtype=torch.float64)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector, because its pauses would be included in samples."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
