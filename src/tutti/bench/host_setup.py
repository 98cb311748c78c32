"""CPU pinning, free host memory, and the latency between the cores of ranks."""

import contextlib
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from tutti.machine.cpu_numa import allowed_cpus, format_cpu_list, parse_cpu_list, read_memory
from tutti.machine.sysfs import SysFiles
from tutti.measure.units import format_bytes, format_size
from tutti.world.errors import UsageError
from tutti.world.exchange import gather_json
from tutti.world.rendezvous import shm_unavailable
from tutti.world.world import World

# ---- Pinning, so that times do not include migration between CPUs or waiting for a CPU ----


def pin(world: World) -> str:
    """Pin this rank to its share of its allowed CPUs, and return the CPU list. Collective.

    The CPUs are divided among the ranks of the host that have the same allowed set. If there are
    more ranks than CPUs, each rank gets one CPU, round-robin.
    """
    mine = [world.host, format_cpu_list(allowed_cpus())]
    sharers = [rank for rank, theirs in enumerate(gather_json(mine)) if theirs == mine]
    cpus = share_of_cpus(parse_cpu_list(mine[1]), sharers.index(world.rank), len(sharers))
    return pin_to(cpus)


def share_of_cpus(cpus: tuple[int, ...], position: int, sharers: int) -> tuple[int, ...]:
    """Return the CPUs of the rank at `position` among `sharers` ranks that share `cpus`."""
    if sharers > len(cpus):
        return (cpus[position % len(cpus)],)
    return cpus[position * len(cpus) // sharers : (position + 1) * len(cpus) // sharers]


def pin_to(cpus: tuple[int, ...]) -> str:
    """Pin every thread of this rank to these CPUs. Raises UsageError if they are not allowed."""
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--pin: this rank cannot run on CPU {format_cpu_list(cpus)} ({error}): its allowed "
            f"CPUs are {format_cpu_list(allowed_cpus())}"
        ) from None
    for thread in Path("/proc/self/task").iterdir():  # gloo's threads are already running
        with contextlib.suppress(OSError):  # the thread has ended in the meantime
            os.sched_setaffinity(int(thread.name), cpus)
    return format_cpu_list(cpus)


# ---- Memory ----


def check_host_memory(size: int, world: World) -> None:
    """Raise UsageError if a host lacks memory for messages of `size` bytes. Collective.

    Every rank needs at least a send buffer and the expected result. Without this check the kernel
    would kill ranks in the middle of the run.
    """
    available = read_memory(SysFiles()).available_bytes
    for ranks, free in gather_json((world.local_size, available)):
        needed = 2 * size * ranks
        if free is not None and needed > free:
            raise UsageError(
                f"--sizes {format_size(size)}: {ranks} rank{'s' * (ranks > 1)} on a host need at "
                f"least {format_bytes(needed)} of memory, {format_bytes(free)} are free: use "
                "smaller sizes or fewer ranks"
            )


# ---- Latency between cores ----


class CoreLatency:
    """Round-trip time of a cache line between the cores of neighbouring ranks of one host.

    The latency is tens of nanoseconds between cores that share a cache, and hundreds otherwise; the
    speed of messages depends on the latency. The hypervisor of a virtual machine may move its cores
    to other physical cores during a run, so the latency is measured before and after the benchmark.
    It is measured only if no two ranks share a CPU. Construction and `measure_again` are
    collective.
    """

    _ROUNDS, _TURNS = 5, 2000
    _MAX_PAIRS = 7
    _TIMEOUT_SECONDS = 2.0
    _MOVED_RATIO = 2.0  # smaller changes are noise

    def __init__(self, world: World, cpus: Sequence[str]) -> None:
        sets = [set(parse_cpu_list(each)) for each in cpus]
        disjoint = len(sets) > 1 and sum(map(len, sets)) == len(set().union(*sets))
        on_one_cpu_host = world.device.type == "cpu" and world.nodes == 1
        known = on_one_cpu_host and disjoint and not shm_unavailable()
        pairs = list(pairwise(range(world.size)))[: self._MAX_PAIRS] if known else []
        self._rank = world.rank
        # Rows for JSON: nanoseconds before and after the benchmark, null if a rank timed out.
        self.rows: list[dict[str, Any]] = [
            {"ranks": pair, "before_ns": None, "after_ns": None} for pair in pairs
        ]
        self._measure("before_ns")

    def measure_again(self) -> None:
        """Measure the latency again, after the benchmark."""
        self._measure("after_ns")

    def __str__(self) -> str:
        known = [row["before_ns"] for row in self.rows if row["before_ns"]]
        if not known:
            return ""
        low, high = f"{min(known):.0f}", f"{max(known):.0f}"
        between = "ranks 0 and 1" if len(self.rows) == 1 else "neighbouring ranks"
        time = low if low == high else f"{low} to {high}"
        return f"cache-line round trip between {between}: {time} ns"

    def change(self) -> str:
        """Return a note if the latency of a pair changed by more than a factor of 2, else ""."""
        for row in self.rows:
            one, other = row["before_ns"], row["after_ns"]
            if one and other and not 1 / self._MOVED_RATIO < other / one < self._MOVED_RATIO:
                return (
                    f"the cache-line round trip between ranks {row['ranks'][0]} and "
                    f"{row['ranks'][1]} was {one:.0f} ns before and {other:.0f} ns after: the "
                    "hypervisor probably moved their cores, and the figures mix both placements"
                )
        return ""

    def _measure(self, when: str) -> None:
        if not self.rows:
            return
        from tutti.comm.shm.native import core
        from tutti.comm.symmetric import Heap

        mine: list[float | None] = [None] * len(self.rows)
        with Heap(bytes=1 << 16, device="cpu") as heap:
            lines = heap.counters(self._ROUNDS * len(self.rows))
            for number, row in enumerate(self.rows):
                heap.barrier()  # one pair at a time
                first, _ = row["ranks"]
                if self._rank not in row["ranks"]:
                    continue
                starts, how = self._rank == first, (self._TURNS, self._TIMEOUT_SECONDS)
                samples = [
                    core().tutti_round_trip_ns(lines.address(index, first), starts, *how)
                    for index in range(self._ROUNDS * number, self._ROUNDS * (number + 1))
                ]
                mine[number] = median(samples) if min(samples) > 0 else None
            heap.barrier()
        everyone = gather_json(mine)
        for number, row in enumerate(self.rows):
            row[when] = everyone[row["ranks"][0]][number]
