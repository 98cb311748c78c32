"""The run of `tutti bench symmetric`: latency probes in turns, then all-reduces on each backend."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tutti.bench.collectives.backends import open_backends
from tutti.bench.collectives.cases import case_groups
from tutti.bench.collectives.interleaved_sweep import Sweep, SweepSettings
from tutti.bench.rank_control import RankControl, try_on_all_ranks
from tutti.bench.symmetric.latency_probes import Probe, all_probes
from tutti.comm.symmetric import Heap
from tutti.measure.spread import summarize_us
from tutti.measure.timing import time_back_to_back
from tutti.world.world import World

Row = dict[str, Any]
_HEAP_BYTES = 256 << 20
_ROUNDS = 8
_MAX_CALLS_PER_ROUND = 1000
_BACKENDS = {
    "cpu": ("gloo", "shm", "symmetric", "one-shot", "two-shot", "ring"),
    "cuda": ("nccl", "one-shot", "two-shot", "ring"),
}


@dataclass
class SymmetricBench:
    """Settings and the results so far; the same on all ranks."""

    world: World
    control: RankControl
    budget: float  # seconds per row
    report: Callable[[list[Row]], None]  # called with rows when they are final
    rows: list[Row] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    stopped: bool = False
    complete: bool = False  # every row was measured
    save: Callable[[], None] = lambda: None
    """Called after each round of probes and each size of all-reduce."""

    def run(self, sizes: Sequence[int]) -> None:
        """Measure everything. Collective."""
        with Heap(bytes=_HEAP_BYTES, device=self.world.device) as heap, ExitStack() as stack:
            self._run_probes(heap, stack)
        if not self.stopped:
            self._compare_all_reduces(sizes)
        self.complete = not self.stopped

    # ---- Probes ----

    def _run_probes(self, heap: Heap, stack: ExitStack) -> None:
        probes: list[Probe] = []
        for name, make in all_probes(heap, stack):
            made, reason = try_on_all_ranks(lambda make=make: list(make()))  # type: ignore[misc]
            if made is None:
                self.skipped.append({"name": name, "reason": reason})
            for probe in made or ():
                reason = self._warm_up(probe)
                if reason:
                    self.skipped.append({"name": probe.name, "reason": reason})
                else:
                    probes.append(probe)
        for _ in range(_ROUNDS):
            for probe in probes:
                if self.control.check_stop():
                    self.stopped = True
                    break
                probe.seconds.append(self._round(probe))
                probe.total_wrong += self.control.sum_over_ranks(probe.wrong())
            self.rows = []
            for probe in (probe for probe in probes if probe.seconds):
                seconds = torch.cat(probe.seconds).tolist()
                measured = (summarize_us(seconds), len(seconds), probe.total_wrong)
                self.rows.append(_row(probe.name, heap.backend, probe.bytes, *measured))
            self.save()
            if self.stopped:
                break
        self.report(self.rows)

    def _warm_up(self, probe: Probe) -> str:
        """Make the first calls and choose the number of calls per round.

        Returns the reason if a call failed, else "".
        """
        device = self.world.device

        def first_call() -> None:
            if probe.call is not None:
                probe.call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        _, reason = try_on_all_ranks(first_call)
        if not reason:
            probe.calls = 10
            once = float(self._round(probe).mean()) * probe.parts
            wanted = math.ceil(self.budget / _ROUNDS / once)
            probe.calls = min(_MAX_CALLS_PER_ROUND, max(2, wanted))
        return reason

    def _round(self, probe: Probe) -> Tensor:
        """Return the seconds of each call of one round. The same on all ranks."""
        self.control.check_stop()
        times = torch.zeros(probe.calls, dtype=torch.float64)
        if probe.call is not None:  # the other ranks sleep in the next barrier
            times = time_back_to_back(probe.call, probe.calls, self.world.device)
        if not probe.slowest_rank and self.control.rank != 0:
            times.zero_()
        return self.control.max_of_tensor(times) / probe.parts

    # ---- All-reduces ----

    def _compare_all_reduces(self, sizes: Sequence[int]) -> None:
        world = self.world
        groups = case_groups("all_reduce", sizes, torch.float32, world)

        def add(measured: list[Row]) -> None:
            fields = ("backend", "bytes", "time_us", "calls", "wrong")
            rows = [_row("all_reduce", *(row[field] for field in fields)) for row in measured]
            self.rows += rows
            self.report(rows)
            self.save()

        with open_backends(_BACKENDS[world.device.type], world, max(sizes)) as (backends, missing):
            settings = SweepSettings(budget=self.budget)
            sweep = Sweep(backends, settings, self.control, world)
            sweep.run(groups, add)
            self.stopped = sweep.stopped
        for each in missing + sweep.skipped:
            name = f"all_reduce {each['backend']}"
            self.skipped.append({"name": name, "reason": each["reason"]})


def _row(
    name: str, backend: str, size: int, times: dict[str, float], calls: int, wrong: int
) -> Row:
    percentiles = {f"{each}_us": times[each] for each in ("p50", "p99", "min")}
    names = {"name": name, "backend": backend, "bytes": size}
    return {**names, **percentiles, "calls": calls, "wrong": wrong}
