"""Probes: single calls whose latency is measured, in turns with all others, and checked."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tutti.bench.attempt import try_on_all
from tutti.bench.control import Control
from tutti.measure.spread import summarize_us
from tutti.measure.timing import time_back_to_back

_ROUNDS = 8
_MOST_CALLS_PER_ROUND = 1000


def _nothing() -> None:
    """What a rank does that only looks on."""


@dataclass
class Probe:
    """One call, on this rank. Ranks that have no part in it keep the default, and wait.

    `parts`: how many equal parts a call has, each of which is what the name says: 2 where a
    message goes forth and comes back. `of`: whose times count, rank 0's or the slowest rank's.
    `wrong` is asked after the calls, on every rank: how many things are not as they must be.
    """

    name: str
    bytes: int
    call: Callable[[], Any] = _nothing
    parts: int = 1
    of: str = "first"  # or "slowest"
    wrong: Callable[[], int] = lambda: 0
    seconds: list[Tensor] = field(default_factory=list)
    calls: int = 0
    wrong_seen: int = 0


def warm_up(probe: Probe, control: Control, device: torch.device, budget: float) -> str:
    """First calls, and how many of them fit a round; returns why it cannot be done, or nothing."""

    def first_call() -> None:
        probe.call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    _, reason = try_on_all(first_call)
    if not reason:
        probe.calls = 10
        once = float(_round(probe, control, device).mean()) * probe.parts
        probe.calls = min(_MOST_CALLS_PER_ROUND, max(2, math.ceil(budget / _ROUNDS / once)))
    return reason


def run_probes(
    probes: Sequence[Probe],
    control: Control,
    device: torch.device,
    after_round: Callable[[], None],
) -> bool:
    """Measure all probes in rounds; False when somebody asked to stop: less was measured then."""
    for _ in range(_ROUNDS):
        for probe in probes:
            if control.meet():
                return False
            probe.seconds.append(_round(probe, control, device))
            probe.wrong_seen += control.total(probe.wrong())
        after_round()
    return True


def row(probe: Probe, backend: str) -> dict[str, Any]:
    """The probe's row for tables and JSON."""
    seconds = torch.cat(probe.seconds)
    spread = summarize_us(seconds.tolist())
    return {
        "name": probe.name,
        "backend": backend,
        "bytes": probe.bytes,
        "p50_us": spread["p50"],
        "p99_us": spread["p99"],
        "min_us": spread["min"],
        "calls": len(seconds),
        "wrong": probe.wrong_seen,
    }


def _round(probe: Probe, control: Control, device: torch.device) -> Tensor:
    """Seconds of each call, the same on all ranks."""
    control.meet()
    times = torch.zeros(probe.calls, dtype=torch.float64)
    if probe.call is not _nothing:  # who looks on sleeps at the next meeting
        times = time_back_to_back(probe.call, probe.calls, device)
    if probe.of == "first" and control.rank != 0:
        times.zero_()
    return control.largest_of(times) / probe.parts
