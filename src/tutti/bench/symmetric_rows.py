"""The rows of `tutti bench symmetric`: probes in turns, then all-reduces beside other backends."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from tutti.bench.attempt import try_on_all
from tutti.bench.case import Case
from tutti.bench.contenders import contenders
from tutti.bench.control import Control
from tutti.bench.one_sided import one_sided_probes
from tutti.bench.probe import Probe, row, run_probes, warm_up
from tutti.bench.structure_probes import structure_probes
from tutti.bench.sweep import Plan, Sweep
from tutti.comm.symmetric import Heap
from tutti.measure.bus_bandwidth import OPERATIONS
from tutti.world.world import World

Row = dict[str, Any]
_HEAP_BYTES = 256 << 20
_COMPARED = {
    "cpu": ("gloo", "shm", "symmetric", "one-shot", "two-shot", "ring"),
    "cuda": ("nccl", "one-shot", "two-shot", "ring"),
}


@dataclass
class Symmetric:
    """What was measured so far."""

    world: World
    control: Control
    budget: float  # seconds for each row
    rows: list[Row] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    stopped: bool = False
    complete: bool = False  # nothing is missing
    keep: Callable[[], None] = lambda: None
    """Called whenever the rows have changed: after a round of probes, and after a size."""

    def run(self, sizes: Sequence[int], report: Callable[[list[Row]], None]) -> None:
        """Measure everything; `report` gets rows as soon as they are known. Collective."""
        with Heap(bytes=_HEAP_BYTES, device=self.world.device) as heap, ExitStack() as stack:
            self._run_probes(heap, stack, report)
        if not self.stopped:
            self._compare_all_reduces(sizes, report)
        self.complete = not self.stopped

    def _run_probes(
        self, heap: Heap, stack: ExitStack, report: Callable[[list[Row]], None]
    ) -> None:
        probes: list[Probe] = []
        for name, make in chain(one_sided_probes(heap), structure_probes(heap, stack)):
            made, reason = try_on_all(lambda make=make: list(make()))  # type: ignore[misc]
            if made is None:
                self.skipped.append({"name": name, "reason": reason})
            for probe in made or ():
                reason = warm_up(probe, self.control, self.world.device, self.budget)
                if reason:
                    self.skipped.append({"name": probe.name, "reason": reason})
                else:
                    probes.append(probe)

        def take() -> None:
            self.rows = [row(probe, heap.backend) for probe in probes if probe.seconds]
            self.keep()

        self.stopped = not run_probes(probes, self.control, self.world.device, take)
        take()
        report(self.rows)

    def _compare_all_reduces(
        self, sizes: Sequence[int], report: Callable[[list[Row]], None]
    ) -> None:
        world, operation = self.world, OPERATIONS["all_reduce"]
        names = _COMPARED[world.device.type]
        with contenders(names, world, max(sizes)) as (found, missing):
            sweep = Sweep(found, Plan(budget=self.budget), self.control, world.device)
            lines = [
                [Case(operation, size // 4, torch.float32, "in", world.rank, world.size)]
                for size in sizes
                if size >= 4
            ]
            sweep.run(lines, lambda measured: self._take(measured, report))
            self.stopped = sweep.stopped
        for each in missing + sweep.skipped:
            name = f"all_reduce {each['backend']}"
            self.skipped.append({"name": name, "reason": each["reason"]})

    def _take(self, measured: list[Row], report: Callable[[list[Row]], None]) -> None:
        rows = [
            {
                "name": "all_reduce",
                "backend": each["backend"],
                "bytes": each["bytes"],
                "p50_us": each["time_us"]["p50"],
                "p99_us": each["time_us"]["p99"],
                "min_us": each["time_us"]["min"],
                "calls": each["calls"],
                "wrong": each["wrong"],
            }
            for each in measured
        ]
        self.rows += rows
        report(rows)
        self.keep()
