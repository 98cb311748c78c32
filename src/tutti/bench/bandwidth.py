"""The parts of `tutti bench bandwidth`, one after the other, and the rows of each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tutti.bench.bandwidth_parts import PARTS
from tutti.bench.bandwidth_places import Place, pair_class
from tutti.bench.bandwidth_traffic import Flow, Meter, Traffic, rounds_of_pairs
from tutti.bench.case import Buffers, Case, Contender
from tutti.bench.contenders import process_group
from tutti.bench.control import Control
from tutti.bench.copies import copy_row, host_copies, peer_copies, run_copies
from tutti.bench.point_to_point import PointToPoint
from tutti.bench.sweep import Plan, Sweep
from tutti.bench.torch_calls import TorchBackend
from tutti.bench.verdict import Finding, judge
from tutti.machine.hardware_catalogue import Figure, figure
from tutti.measure.bus_bandwidth import OPERATIONS
from tutti.measure.spread import relative_mad, round_significant
from tutti.world.exchange import gather_json
from tutti.world.world import World

Row = dict[str, Any]
_SMALLEST_ALL_REDUCE = 1 << 10
_SECOND_LOOKS, _PASSES_OF_A_LOOK = 2, 2
_DTYPE = torch.float32


@dataclass
class Bandwidth:
    """What is measured, and what was measured so far; the same on all ranks."""

    world: World
    control: Control
    places: Sequence[Place]  # of all ranks
    backend: str
    sizes: Sequence[int]
    budget: float  # seconds for each kind of traffic, operation and size
    together: bool = False
    pairs: list[Row] = field(default_factory=list)
    one_to_all: list[Row] = field(default_factory=list)
    all_to_all: list[Row] = field(default_factory=list)
    ring_vs_tree: list[Row] = field(default_factory=list)
    copies: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    stopped: bool = False
    complete: bool = False  # nothing is missing
    keep: Callable[[], None] | None = None
    """Called on a rank that has it whenever there is more: after a pass, an operation, copies."""

    def run(self, parts: Sequence[str], tell: Callable[[str], None]) -> None:
        """Measure these parts; `tell` gets progress. Collective."""
        if self.world.size < 2:
            for part in PARTS[:-1]:
                self._skip(part, parts, "a world of one rank has no pairs: use --ranks 2")
        else:
            group, _ = process_group(self.backend)
            self._measure_traffic(group, parts, tell)
            self._measure_operations(group, parts, tell)
        if self.world.device.type == "cpu":
            self._skip("copies", parts, "there is no device beside the host: use --device cuda")
        elif "copies" in parts and not self.stopped:
            tell("copies between hosts and devices")
            self._measure_copies()
        self.complete = not self.stopped

    @property
    def classes(self) -> list[Row]:
        """What each class of pairs reaches: locality at a glance."""
        keys = dict.fromkeys((row["class"], row["bytes"]) for row in self.pairs)
        rows = []
        for name, size in keys:
            members = [r for r in self.pairs if (r["class"], r["bytes"]) == (name, size)]
            one_way = [r["gbs_uni"] for r in members if r["gbs_uni"] is not None]
            both = [r["gbs_bi"] for r in members if r["gbs_bi"] is not None]
            rows.append(
                {
                    "class": name,
                    "bytes": size,
                    "pairs": len(members),
                    "gbs_uni": median(one_way) if one_way else None,
                    "gbs_bi": median(both) if both else None,
                    "scatter": round(relative_mad(one_way), 4) if one_way else None,
                }
            )
        return rows

    @property
    def wrong(self) -> int:
        """Elements that were not what they had to be, over everything."""
        parts = (self.pairs, self.one_to_all, self.all_to_all, self.ring_vs_tree, self.copies)
        return sum(row["wrong"] for part in parts for row in part)

    def _skip(self, part: str, parts: Sequence[str], reason: str) -> None:
        if part in parts:
            self.skipped.append({"name": part, "reason": reason})

    # ---- Messages ----

    def _measure_traffic(
        self, group: dist.ProcessGroup, parts: Sequence[str], tell: Callable[[str], None]
    ) -> None:
        traffic: list[Traffic] = []
        for size in self.sizes:
            if "pairs" in parts:
                traffic += self._pair_traffic(size)
            if "one_to_all" in parts:
                for root in range(self.world.size):
                    flows = tuple((root, r) for r in range(self.world.size) if r != root)
                    traffic.append(Traffic("one to all", flows, size))
        if not traffic:
            return
        seconds = len(traffic) * self.budget
        if seconds > 60:
            tell(
                f"{len(traffic)} kinds of traffic of about {self.budget:g} s: {seconds / 60:.0f} "
                "minutes; --together or a smaller --budget is shorter"
            )
        meter = Meter(group, self.control, self.world.device, self.budget)

        def after_pass() -> None:
            if self.keep is not None:
                self._take(traffic)
                self.keep()

        self.stopped = not meter.run(traffic, tell, after_pass=after_pass)
        self._take(traffic)
        # What disturbed the machine will have gone by; a slow link stays slow.
        for _ in range(_SECOND_LOOKS):
            slow = {(r["src"], r["dst"]) for r in self.pairs if r["verdict"] in ("degraded", "bad")}
            again = [each for each in traffic if each.kind != "one to all" and slow & {*each.flows}]
            if self.stopped or not again:
                return
            tell(f"another look at {len(slow)} of {len(self.pairs)} pairs, which were slow")
            self.stopped = not meter.run(again, tell, _PASSES_OF_A_LOOK, after_pass)
            self._take(traffic)

    def _pair_traffic(self, size: int) -> Iterator[Traffic]:
        ranks = self.world.size
        alone = [[pair] for pair in combinations(range(ranks), 2)]
        for pairs in rounds_of_pairs(ranks) if self.together else alone:
            there, back = tuple(pairs), tuple((b, a) for a, b in pairs)
            yield Traffic("one way", there, size)
            yield Traffic("one way", back, size)
            yield Traffic("both ways", there + back, size)

    def _take(self, traffic: Sequence[Traffic]) -> None:
        rows: dict[tuple[Flow, int], Row] = {}
        self.one_to_all = []
        for each in (each for each in traffic if each.seconds):
            if each.kind == "one to all":
                self.one_to_all.append(_one_to_all_row(each))
                continue
            for flow in each.flows:
                row = rows.setdefault((flow, each.bytes), self._empty_row(flow, each.bytes))
                both = each.kind == "both ways"
                speeds = each.together([flow, flow[::-1]]) if both else each.speeds(flow)
                _fill(row, "gbs_bi" if both else "gbs_uni", speeds)
                row["wrong"] += each.wrong[flow]
        self.pairs = [rows[key] for key in sorted(rows, key=lambda key: (key[1], key[0]))]
        self.findings = judge(self.pairs, self.places, self._published)

    def _empty_row(self, flow: Flow, size: int) -> Row:
        a, b = (self.places[rank] for rank in flow)
        return {
            "src": flow[0],
            "dst": flow[1],
            "backend": self.backend,
            "bytes": size,
            "class": pair_class(a, b),
            "gbs_uni": None,
            "gbs_uni_best": None,
            "gbs_bi": None,
            "gbs_bi_best": None,
            "spread": 0.0,
            "wrong": 0,
            "verdict": "unknown",
            "causes": [],
        }

    def _published(self, row: Row) -> Figure | None:
        if row["class"] not in ("NVLink", "NVSwitch"):
            return None
        return figure(self.places[row["src"]]["gpu"]["name"], "pair", row["bytes"])

    # ---- Operations of all ranks ----

    def _measure_operations(
        self, group: dist.ProcessGroup, parts: Sequence[str], tell: Callable[[str], None]
    ) -> None:
        buffers = Buffers(self.world.device)
        own = TorchBackend(self.backend, group, "", buffers)
        if "all_to_all" in parts and not self.stopped:
            tell("all to all")
            self._sweep([own], "all_to_all", self.sizes, self.all_to_all)
        if "ring_vs_tree" in parts and not self.stopped:
            tell("all_reduce as a ring, as a tree, and the backend's own")
            written = [
                PointToPoint(f"{self.backend} {name}", group, name, buffers)
                for name in ("ring", "tree")
            ]
            sizes = {max(self.sizes)}
            while min(sizes) // 16 >= _SMALLEST_ALL_REDUCE:
                sizes.add(min(sizes) // 16)
            self._sweep([*written, own], "all_reduce", sorted(sizes), self.ring_vs_tree)

    def _sweep(
        self, contenders: Sequence[Contender], op: str, sizes: Sequence[int], into: list[Row]
    ) -> None:
        world, operation = self.world, OPERATIONS[op]
        counts = [operation.count(size, _DTYPE.itemsize, world.size) for size in sizes]
        lines = [
            [Case(operation, count, _DTYPE, operation.native, world.rank, world.size)]
            for count in dict.fromkeys(counts)
        ]
        plan = Plan(budget=self.budget)
        sweep = Sweep(contenders, plan, self.control, world.device, world.nodes == 1)

        def report(rows: list[Row]) -> None:
            into.extend(rows)
            if self.keep is not None:
                self.keep()

        sweep.run(lines, report)
        self.stopped = sweep.stopped
        for each in sweep.skipped:
            self.skipped.append({"name": f"{op}, {each['backend']}", "reason": each["reason"]})

    # ---- Copies ----

    def _measure_copies(self) -> None:
        """Ranks one after the other, unless asked for all at once: they may share a link."""
        world = self.world
        for turn in range(1 if self.together else world.size):
            if self.control.meet():
                self.stopped = True
                break
            mine: list[Row] = []
            if self.together or turn == world.rank:
                for size in self.sizes:
                    copies = host_copies(world.device, size)
                    # One process of a host is enough to try all the GPUs that it sees.
                    copies += peer_copies(size) if world.local_rank == 0 else []
                    done = run_copies(copies, lambda: self.control.asked_to_stop)
                    mine += [copy_row(copy, world.rank) for copy in copies if copy.speeds]
                    if not done:
                        break
            self.copies += [row for rows in gather_json(mine) for row in rows]
            if self.keep is not None:
                self.keep()
        self.stopped = self.control.meet() or self.stopped


def _one_to_all_row(traffic: Traffic) -> Row:
    speeds = traffic.together()
    slowest = min(traffic.flows, key=lambda flow: median(traffic.speeds(flow)))
    return {
        "root": traffic.flows[0][0],
        "bytes": traffic.bytes,
        "gbs": round_significant(median(speeds)),
        "spread": round(relative_mad(speeds), 4),
        "slowest": slowest[1],
        "wrong": sum(traffic.wrong.values()),
    }


def _fill(row: Row, metric: str, speeds: Sequence[float]) -> None:
    row[metric] = round_significant(median(speeds))
    row[f"{metric}_best"] = round_significant(max(speeds))
    row["spread"] = max(row["spread"], round(relative_mad(speeds), 4))
