"""How far the cores of two ranks are apart: the time in which a cache line goes there and back.

Between cores that share a cache a line takes tens of nanoseconds, between others hundreds; bytes
that are handed over, and what memory gives to both at once, follow. The host of a virtual machine
may move its cores from one to the other while it runs, so they are measured before and after.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from tutti.machine.cpu_numa import parse_cpu_list
from tutti.world.exchange import gather_json
from tutti.world.rendezvous import has_shm
from tutti.world.world import World

_ROUNDS, _TURNS = 5, 2000
_MOST_PAIRS = 7
_PATIENCE_SECONDS = 2.0
_MOVED = 2.0  # times: less is the spread of an undisturbed machine


class RoundTrips:
    """Of neighbouring ranks on one host, which have CPUs of their own; of others nothing is known.

    Making one, and `again`, are collective.
    """

    def __init__(self, world: World, cpus: Sequence[str]) -> None:
        sets = [set(parse_cpu_list(each)) for each in cpus]
        alone = len(sets) > 1 and sum(map(len, sets)) == len(set().union(*sets))
        known = world.device.type == "cpu" and world.nodes == 1 and alone and has_shm()
        self._pairs = list(pairwise(range(world.size)))[:_MOST_PAIRS] if known else []
        self._world = world
        self.before = self._measure()
        self.after: list[float | None] = []

    def again(self) -> None:
        """When all has been measured: have the cores moved meanwhile?"""
        self.after = self._measure()

    def rows(self) -> list[dict[str, Any]]:
        """For JSON: nanoseconds before and after, null where a rank did not come in time."""
        after = self.after or [None] * len(self._pairs)
        return [
            {"ranks": list(pair), "before_ns": one, "after_ns": other}
            for pair, one, other in zip(self._pairs, self.before, after, strict=True)
        ]

    def __str__(self) -> str:
        known = [each for each in self.before if each]
        if not known:
            return ""
        low, high = f"{min(known):.0f}", f"{max(known):.0f}"
        between = "ranks 0 and 1" if len(self._pairs) == 1 else "neighbouring ranks"
        time = low if low == high else f"{low} to {high}"
        return f"{between} are {time} ns apart"

    def moved(self) -> str:
        """What to say if the cores are not as far apart as they were; else nothing."""
        for pair, one, other in zip(self._pairs, self.before, self.after, strict=True):
            if one and other and not 1 / _MOVED < other / one < _MOVED:
                return (
                    f"ranks {pair[0]} and {pair[1]} were {one:.0f} ns apart, now {other:.0f}: "
                    "the host moved their cores"
                )
        return ""

    def _measure(self) -> list[float | None]:
        if not self._pairs:
            return []
        from tutti.comm.shm.native import core
        from tutti.comm.symmetric import Heap

        rank, found = self._world.rank, {}
        with Heap(bytes=1 << 16, device="cpu") as heap:
            lines = heap.counters(_ROUNDS * len(self._pairs))
            for number, pair in enumerate(self._pairs):
                heap.barrier()  # one pair at a time
                if rank not in pair:
                    continue
                taken = []
                for index in range(_ROUNDS * number, _ROUNDS * (number + 1)):
                    line = lines.address(index, pair[0])
                    first = rank == pair[0]
                    ns = core().tutti_round_trip_ns(line, first, _TURNS, _PATIENCE_SECONDS)
                    taken.append(ns)
                found[number] = median(taken) if min(taken) > 0 else None
            heap.barrier()
        told = gather_json([found.get(number) for number in range(len(self._pairs))])
        return [told[first][number] for number, (first, _) in enumerate(self._pairs)]
