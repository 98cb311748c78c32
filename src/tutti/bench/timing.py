"""How one call is timed on this rank: on the CPU's clock, or by events on the GPU's stream.

Back to back: calls follow each other without a pause, and a call takes from the end of the one
before to its own end: what nccl-tests reports. Isolated: before each call ranks meet, and a call
takes from when the last rank began to when the last had ended; other ranks' clocks are this
rank's own on one host (CLOCK_MONOTONIC).
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# To record an event costs the host as much as a short collective: on GPUs a sample is the mean of
# the calls between two events (nccl-tests takes the mean of all).
_CALLS_PER_EVENT = 10


def back_to_back(call: Callable[[], Any], times: int, device: torch.device) -> Tensor:
    """Seconds of each of `times` calls."""
    if device.type == "cuda":
        return _on_stream(call, times)
    clock = time.perf_counter
    stamps = [0.0] * (times + 1)
    with no_garbage_collection():
        stamps[0] = clock()
        for number in range(1, times + 1):
            call()
            stamps[number] = clock()
    return torch.tensor(stamps, dtype=torch.float64).diff()


def isolated(
    call: Callable[[], Any], times: int, device: torch.device, meet: Callable[[], Any]
) -> tuple[Tensor, Tensor]:
    """When each of `times` calls began and when it had ended, on this host's clock."""
    clock = time.perf_counter
    began, ended = [0.0] * times, [0.0] * times
    with no_garbage_collection():
        for number in range(times):
            meet()
            began[number] = clock()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            ended[number] = clock()
    return torch.tensor(began, dtype=torch.float64), torch.tensor(ended, dtype=torch.float64)


def _on_stream(call: Callable[[], Any], times: int) -> Tensor:
    starts = range(0, times, _CALLS_PER_EVENT)
    sizes = [min(_CALLS_PER_EVENT, times - start) for start in starts]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(sizes) + 1)]  # type: ignore[no-untyped-call]
    with no_garbage_collection():
        events[0].record()
        for number, size in enumerate(sizes, 1):
            for _ in range(size):
                call()
            events[number].record()
        events[-1].synchronize()
    calls = torch.tensor(sizes)
    milliseconds = [before.elapsed_time(after) for before, after in pairwise(events)]
    means = torch.tensor(milliseconds, dtype=torch.float64) / 1e3 / calls
    return means.repeat_interleave(calls)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python's collector waits: its pauses belong to no call."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
