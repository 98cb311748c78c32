"""Run the parts of `tutti bench bandwidth` in order, collect rows, and print them as text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tutti.bench.bandwidth import PARTS
from tutti.bench.bandwidth.device_copies import copy_row, host_copies, peer_copies, run_copies
from tutti.bench.bandwidth.link_verdicts import Finding, RankLocation, judge_pairs, pair_class
from tutti.bench.bandwidth.point_to_point import (
    Flow,
    Traffic,
    TrafficMeter,
    disjoint_rounds,
    point_to_point_all_reduce,
)
from tutti.bench.collectives.backends import process_group, torch_backend
from tutti.bench.collectives.cases import Backend, Buffers, case_groups
from tutti.bench.collectives.interleaved_sweep import Sweep, SweepSettings
from tutti.bench.compare_results import value_of
from tutti.bench.rank_control import RankControl
from tutti.machine.hardware_catalogue import Figure, figure
from tutti.measure.spread import relative_mad, round_significant
from tutti.measure.units import format_size
from tutti.world.exchange import gather_json
from tutti.world.world import World

Row = dict[str, Any]
_SMALLEST_ALL_REDUCE = 1 << 10
_RETRIES, _PASSES_PER_RETRY = 2, 2


@dataclass
class BandwidthBench:
    """Settings and the results so far; the same on all ranks."""

    world: World
    control: RankControl
    locations: Sequence[RankLocation]  # one per rank
    backend: str
    sizes: Sequence[int]
    budget: float  # seconds for each kind of traffic, operation and size
    parts: Sequence[str]  # the names in PARTS to measure
    progress: Callable[[str], None]  # prints a line
    concurrent: bool = False  # measure disjoint pairs at the same time
    pairs: list[Row] = field(default_factory=list)
    one_to_all: list[Row] = field(default_factory=list)
    all_to_all: list[Row] = field(default_factory=list)
    ring_vs_tree: list[Row] = field(default_factory=list)
    copies: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    stopped: bool = False
    complete: bool = False  # every part was measured
    save: Callable[[], None] = lambda: None
    """Called after each pass, operation and copy, on the rank that writes files."""

    def run(self) -> None:
        """Measure the parts. Collective."""
        if self.world.size < 2:
            for part in PARTS[:-1]:
                self._skip(part, "one rank has no pairs: use --ranks 2")
        else:
            group, _ = process_group(self.backend)
            self._measure_traffic(group)
            self._measure_collectives(group)
        if self.world.device.type == "cpu":
            self._skip("copies", "ranks are on the CPU: use --device cuda")
        elif "copies" in self.parts and not self.stopped:
            self.progress("copies between hosts and devices")
            self._measure_copies()
        self.complete = not self.stopped

    @property
    def classes(self) -> list[Row]:
        """One row per class of pairs and message size: median speeds and their spread."""
        keys = dict.fromkeys((row["class"], row["bytes"]) for row in self.pairs)
        rows = []
        for name, size in keys:
            members = [r for r in self.pairs if (r["class"], r["bytes"]) == (name, size)]
            row: Row = {"class": name, "bytes": size, "pairs": len(members)}
            for metric in ("gbs_uni", "gbs_bi"):
                speeds = [r[metric] for r in members if r[metric] is not None]
                row[metric] = median(speeds) if speeds else None
            one_way = [r["gbs_uni"] for r in members if r["gbs_uni"] is not None]
            rows.append({**row, "scatter": round(relative_mad(one_way), 4) if one_way else None})
        return rows

    @property
    def wrong(self) -> int:
        """The number of wrong elements in all parts."""
        return sum(row["wrong"] for part in PARTS for row in getattr(self, part))

    def _skip(self, part: str, reason: str) -> None:
        if part in self.parts:
            self.skipped.append({"name": part, "reason": reason})

    # ---- Pairs and one to all ----

    def _measure_traffic(self, group: dist.ProcessGroup) -> None:
        traffic: list[Traffic] = []
        for size in self.sizes:
            if "pairs" in self.parts:
                traffic += self._pair_traffic(size)
            if "one_to_all" in self.parts:
                for root in range(self.world.size):
                    flows = tuple((root, r) for r in range(self.world.size) if r != root)
                    traffic.append(Traffic("one to all", flows, size))
        if not traffic:
            return
        seconds = len(traffic) * self.budget
        if seconds > 60:
            self.progress(
                f"{len(traffic)} kinds of traffic of about {self.budget:g} s each: "
                f"{seconds / 60:.0f} minutes; --together or a smaller --budget takes less"
            )
        meter = TrafficMeter(group, self.control, self.world.device, self.budget)

        def after_pass() -> None:
            self._update_rows(traffic)
            self.save()

        self.stopped = not meter.run(traffic, self.progress, after_pass=after_pass)
        self._update_rows(traffic)
        # Measure slow pairs again. A pair that was slow only because of a temporary disturbance is
        # fast in a later pass; a slow link is slow in every pass.
        for _ in range(_RETRIES):
            slow = {(r["src"], r["dst"]) for r in self.pairs if r["verdict"] in ("degraded", "bad")}
            again = [each for each in traffic if each.kind != "one to all" and slow & {*each.flows}]
            if self.stopped or not again:
                return
            self.progress(f"measuring {len(slow)} slow pairs of {len(self.pairs)} again")
            self.stopped = not meter.run(again, self.progress, _PASSES_PER_RETRY, after_pass)
            self._update_rows(traffic)

    def _pair_traffic(self, size: int) -> Iterator[Traffic]:
        ranks = self.world.size
        single = [[pair] for pair in combinations(range(ranks), 2)]
        for pairs in disjoint_rounds(ranks) if self.concurrent else single:
            there, back = tuple(pairs), tuple((b, a) for a, b in pairs)
            yield Traffic("one way", there, size)
            yield Traffic("one way", back, size)
            yield Traffic("both ways", there + back, size)

    def _update_rows(self, traffic: Sequence[Traffic]) -> None:
        rows: dict[tuple[Flow, int], Row] = {}
        self.one_to_all = []
        for each in (each for each in traffic if each.seconds):
            if each.kind == "one to all":
                self.one_to_all.append(_one_to_all_row(each))
                continue
            for flow in each.flows:
                row = rows.setdefault(
                    (flow, each.bytes),
                    {
                        **{"src": flow[0], "dst": flow[1], "backend": self.backend},
                        "bytes": each.bytes,
                        "class": pair_class(*(self.locations[rank] for rank in flow)),
                        **dict.fromkeys(("gbs_uni", "gbs_uni_best", "gbs_bi", "gbs_bi_best")),
                        **{"spread": 0.0, "wrong": 0, "verdict": "unknown", "causes": []},
                    },
                )
                both = each.kind == "both ways"
                speeds = each.total_speeds([flow, flow[::-1]]) if both else each.speeds(flow)
                metric = "gbs_bi" if both else "gbs_uni"
                row[metric] = round_significant(median(speeds))
                row[f"{metric}_best"] = round_significant(max(speeds))
                row["spread"] = max(row["spread"], round(relative_mad(speeds), 4))
                row["wrong"] += each.wrong[flow]
        self.pairs = [rows[key] for key in sorted(rows, key=lambda key: (key[1], key[0]))]
        self.findings = judge_pairs(self.pairs, self.locations, self._published)

    def _published(self, row: Row) -> Figure | None:
        on_nvlink = row["class"] in ("NVLink", "NVSwitch")
        gpu = self.locations[row["src"]]["gpu"]
        return figure(gpu["name"], "pair", row["bytes"]) if on_nvlink else None

    # ---- Collectives ----

    def _measure_collectives(self, group: dist.ProcessGroup) -> None:
        buffers = Buffers(self.world.device)
        own = torch_backend(self.backend, group, "", buffers)
        if "all_to_all" in self.parts and not self.stopped:
            self.progress("all to all")
            self._sweep([own], "all_to_all", self.sizes, self.all_to_all)
        if "ring_vs_tree" in self.parts and not self.stopped:
            self.progress("all_reduce as a ring, as a tree, and by the backend")
            baselines = [
                point_to_point_all_reduce(self.backend, name, group, buffers)
                for name in ("ring", "tree")
            ]
            sizes = {max(self.sizes)}
            while min(sizes) // 16 >= _SMALLEST_ALL_REDUCE:
                sizes.add(min(sizes) // 16)
            self._sweep([*baselines, own], "all_reduce", sorted(sizes), self.ring_vs_tree)

    def _sweep(
        self, backends: Sequence[Backend], op: str, sizes: Sequence[int], into: list[Row]
    ) -> None:
        world = self.world
        groups = case_groups(op, sizes, torch.float32, world)
        settings = SweepSettings(budget=self.budget)
        sweep = Sweep(backends, settings, self.control, world)

        def report(rows: list[Row]) -> None:
            into.extend(rows)
            self.save()

        sweep.run(groups, report)
        self.stopped = sweep.stopped
        for each in sweep.skipped:
            self.skipped.append({"name": f"{op}, {each['backend']}", "reason": each["reason"]})

    # ---- Copies ----

    def _measure_copies(self) -> None:
        """Measure the copies of one rank after the other, because ranks may share a link.

        With `concurrent`, all ranks measure at the same time.
        """
        world = self.world
        for turn in range(1 if self.concurrent else world.size):
            if self.control.check_stop():
                self.stopped = True
                break
            mine: list[Row] = []
            if self.concurrent or turn == world.rank:
                for size in self.sizes:
                    copies = host_copies(world.device, size)
                    # One process per host measures the copies between all GPUs visible to it.
                    copies += peer_copies(size) if world.local_rank == 0 else []
                    done = run_copies(copies, lambda: self.control.stop_requested)
                    mine += [copy_row(copy, world.rank) for copy in copies if copy.speeds]
                    if not done:
                        break
            self.copies += [row for rows in gather_json(mine) for row in rows]
            self.save()
        self.stopped = self.control.check_stop() or self.stopped


def _one_to_all_row(traffic: Traffic) -> Row:
    speeds = traffic.total_speeds()
    slowest = min(traffic.flows, key=lambda flow: median(traffic.speeds(flow)))
    return {
        "root": traffic.flows[0][0],
        "bytes": traffic.bytes,
        "gbs": round_significant(median(speeds)),
        "spread": round(relative_mad(speeds), 4),
        "slowest": slowest[1],
        "wrong": sum(traffic.wrong.values()),
    }


# ---- Text ----

_CELL = 9  # two marks, a number such as 0.0246, and a space


def format_bandwidth(bench: BandwidthBench, width: int) -> Iterator[str]:
    """Yield the lines to print: matrices of pairs, classes, the other parts, and findings."""
    for size in dict.fromkeys(row["bytes"] for row in bench.pairs):
        yield from _matrices(bench, size, width)
    columns = {"size": "bytes", "pairs": "pairs", "one way": "gbs_uni", "both": "gbs_bi"}
    yield from _table("class", "{class}", columns | {"spread": "scatter"}, bench.classes)
    columns = {"size": "bytes", "in total": "gbs", "spread": "spread", "slowest rank": "slowest"}
    yield from _table("one to all, GB/s", "from rank {root}", columns, bench.one_to_all)
    columns = {"size": "bytes", "time us": "time_us.p50", "busbw": "busbw_gbs"}
    yield from _table("all to all", "{backend}", columns, bench.all_to_all)
    yield from _ring_vs_tree(bench.ring_vs_tree)
    columns = {"size": "bytes", "measured": "gbs", "spread": "spread", "published": "expected_gbs"}
    columns |= {"verdict": "verdict"}
    yield from _table("copies, GB/s", "rank {rank}, {kind}", columns, bench.copies)
    for each in bench.skipped:
        yield f"# {each['name']} is skipped: {each['reason']}"
    yield from _verdicts(bench)


def _table(
    title: str, label: str, columns: Mapping[str, str], rows: Sequence[Row]
) -> Iterator[str]:
    """Yield the lines of a table.

    `label` is the template of the first column. `columns` maps column titles to fields of rows.
    """
    if not rows:
        return
    lines = [[title, *columns]]
    for row in rows:
        cells = (_text(field, value_of(row, field)) for field in columns.values())
        lines.append([label.format_map(row), *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for number, (first, *others) in enumerate(lines):
        cells = (f"  {cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        yield f"{' ' if number else '#'} {first:<{widths[0]}}{''.join(cells)}"


def _text(field: str, value: Any) -> str:
    if field == "bytes":
        return format_size(value)
    if field in ("spread", "scatter") and value is not None:
        return f"{100 * value:.1f} %"
    return value if isinstance(value, str) else _number(value)


def _matrices(bench: BandwidthBench, size: int, width: int) -> Iterator[str]:
    ranks = bench.world.size
    how = "disjoint pairs at the same time" if bench.concurrent else "one pair at a time"
    if 6 + _CELL * ranks > width:
        yield f"# a matrix of {ranks} × {ranks} pairs is too wide here: use --json FILE"
        return
    by_flow = {(row["src"], row["dst"]): row for row in bench.pairs if row["bytes"] == size}
    for metric, what in (("gbs_uni", "one way"), ("gbs_bi", "both ways, the sum")):
        yield f"# {what}, GB/s, messages of {format_size(size)}, {how}: rows send, columns receive"
        yield f"#{'':5}" + "".join(f"{rank:>{_CELL}}" for rank in range(ranks))
        for src in range(ranks):
            cells = (_cell(by_flow.get((src, dst), {}), metric) for dst in range(ranks))
            yield f"{src:>6}" + "".join(f"{cell:>{_CELL}}" for cell in cells)


def _cell(row: Row, metric: str) -> str:
    mark = {"degraded": "!", "bad": "!!"}.get(row.get("verdict", ""), "")
    value = row.get(metric)
    return _number(value) if value is None else mark + _number(value)


def _number(value: float | None) -> str:
    """Format a number with three significant digits: 396, 3.21, 0.0246."""
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _ring_vs_tree(rows: Sequence[Row]) -> Iterator[str]:
    names = list(dict.fromkeys(row["backend"] for row in rows))
    lines = []
    for size in dict.fromkeys(row["bytes"] for row in rows):
        times = {row["backend"]: row["time_us"]["p50"] for row in rows if row["bytes"] == size}
        baselines = {name: times[name] for name in times if name.endswith((" ring", " tree"))}
        faster = min(baselines, key=baselines.__getitem__).split()[-1] if baselines else ""
        lines.append({"bytes": size, **times, "faster": faster})
    columns = {"size": "bytes", **dict(zip(names, names, strict=True)), "faster": "faster"}
    yield from _table("all_reduce, us", "", columns, lines)


def _verdicts(bench: BandwidthBench) -> Iterator[str]:
    for finding in bench.findings:
        reference = f"{_number(finding.against_gbs)} ({finding.against})"
        what = f"{finding.what}: {_number(finding.gbs)} GB/s against {reference}"
        yield f"# {finding.verdict}: {what}"
        for cause in finding.causes:
            yield f"#   {cause if cause.startswith('seen') else 'possible cause: ' + cause}"
    unknown = sum(row["verdict"] == "unknown" for row in bench.pairs)
    if not bench.pairs or bench.findings:
        return
    if unknown == len(bench.pairs):
        yield (
            "# verdict: unknown: the only pair of a class has no other to compare with, and the "
            "catalogue has no figure"
        )
    else:
        good, also = len(bench.pairs) - unknown, f", {unknown} unknown" if unknown else ""
        yield f"# verdict: good: {good} pairs are as fast as their class{also}"
