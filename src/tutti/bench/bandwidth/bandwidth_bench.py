"""Run the parts of `tutti bench bandwidth` in order, collect their rows, and format the output."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tutti.bench.bandwidth import PARTS, link_verdicts, point_to_point
from tutti.bench.bandwidth.point_to_point import Flow, Traffic, TrafficMeter, disjoint_rounds
from tutti.bench.collectives.backends import process_group, torch_backend
from tutti.bench.collectives.cases import Buffers, case_groups
from tutti.bench.collectives.interleaved_sweep import Sweep
from tutti.bench.compare_results import value_of
from tutti.bench.rank_control import RankControl
from tutti.machine.hardware_catalogue import Figure, figure
from tutti.measure.spread import relative_mad, round_significant
from tutti.measure.units import format_size, three_digits
from tutti.world.exchange import gather_json
from tutti.world.rank_cases import Cases
from tutti.world.world import World

Row = dict[str, Any]
_SMALLEST_ALL_REDUCE = 1 << 10
_RETRIES, _PASSES_PER_RETRY = 2, 2


@dataclass
class BandwidthBench:
    """Settings and results of the benchmark. All ranks have the same values."""

    world: World
    control: RankControl
    locations: Sequence[link_verdicts.RankLocation]  # one per rank
    backend: str
    sizes: Sequence[int]
    budget: float  # seconds per traffic pattern, and per backend and size of a collective
    parts: Sequence[str]  # the names in PARTS to measure
    progress: Callable[[str], None]  # prints a line
    concurrent: bool = False  # whether to measure disjoint pairs at the same time
    pairs: list[Row] = field(default_factory=list)
    one_to_all: list[Row] = field(default_factory=list)
    all_to_all: list[Row] = field(default_factory=list)
    ring_vs_tree: list[Row] = field(default_factory=list)
    copies: list[Row] = field(default_factory=list)
    findings: list[link_verdicts.Finding] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    stopped: bool = False
    complete: bool = False  # whether every part was measured
    cases: Cases = field(default_factory=lambda: Cases(None))
    save: Callable[[], None] = lambda: None
    """Called after each pass, each message size of a collective and each turn of copies."""

    def run(self) -> None:
        """Measure the parts. All ranks must call this method."""
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
        """The median speeds and their spread, in one row per class of pairs and message size."""
        classes: list[Row] = []
        for (name, size), pairs in link_verdicts.rows_by_class(self.pairs).items():
            row: Row = {"class": name, "bytes": size, "pairs": len(pairs)}
            for metric in ("gbs_uni", "gbs_bi"):
                speeds = [pair[metric] for pair in pairs if pair[metric] is not None]
                row[metric] = median(speeds) if speeds else None
                if metric == "gbs_uni":
                    row["scatter"] = round(relative_mad(speeds), 4) if speeds else None
            classes.append(row)
        return classes

    @property
    def wrong(self) -> int:
        """The number of wrong elements in all parts."""
        return sum(row["wrong"] for part in PARTS for row in getattr(self, part))

    def _skip(self, part: str, reason: str) -> None:
        if part in self.parts:
            self.skipped.append({"name": part, "reason": reason})

    # ---- Pairs and one to all ----

    def _measure_traffic(self, group: dist.ProcessGroup) -> None:
        ranks = range(self.world.size)
        single = [[pair] for pair in combinations(ranks, 2)]
        rounds = disjoint_rounds(self.world.size) if self.concurrent else single
        traffic: list[Traffic] = []
        for size in self.sizes:
            for pairs in rounds if "pairs" in self.parts else ():
                there, back = tuple(pairs), tuple((b, a) for a, b in pairs)
                traffic += [Traffic("one way", flows, size) for flows in (there, back)]
                traffic.append(Traffic("both ways", there + back, size))
            if "one_to_all" in self.parts:
                for root in ranks:
                    flows = tuple((root, rank) for rank in ranks if rank != root)
                    traffic.append(Traffic("one to all", flows, size))
        traffic = [entry for entry in traffic if entry.name not in self.cases.crashed]
        if not traffic:
            return
        seconds = len(traffic) * self.budget
        if seconds > 60:
            self.progress(
                f"{len(traffic)} traffic patterns take about {self.budget:g} s each, "
                f"{seconds / 60:.0f} minutes in total; --together or a smaller --budget takes less"
            )
        meter = TrafficMeter(group, self.control, self.world.device, self.budget)

        def after_pass() -> None:
            self._update_rows(traffic)
            self.save()

        try:
            self.stopped = not meter.run(traffic, self.progress, after_pass, cases=self.cases)
        finally:
            self._update_rows(traffic)
        # Measure slow pairs again. A pair that was slow because of a temporary disturbance is fast
        # in a later pass, but a slow link is slow in every pass.
        for _ in range(_RETRIES):
            slow = {(r["src"], r["dst"]) for r in self.pairs if r["verdict"] in ("degraded", "bad")}
            pair_traffic = [entry for entry in traffic if entry.kind != "one to all"]
            again = [entry for entry in pair_traffic if slow & {*entry.flows}]
            if self.stopped or not again:
                return
            self.progress(f"measuring {len(slow)} slow pairs of {len(self.pairs)} again")
            passes = _PASSES_PER_RETRY
            self.stopped = not meter.run(again, self.progress, after_pass, passes, cases=self.cases)
            self._update_rows(traffic)

    def _update_rows(self, traffic: Sequence[Traffic]) -> None:
        rows: dict[tuple[int, Flow], Row] = {}
        self.one_to_all = []
        for entry in (entry for entry in traffic if entry.seconds):
            if entry.kind == "one to all":
                self.one_to_all.append(_one_to_all_row(entry))
                continue
            for flow in entry.flows:
                row = rows.setdefault((entry.bytes, flow), self._empty_row(flow, entry.bytes))
                both = entry.kind == "both ways"
                speeds = entry.total_speeds([flow, flow[::-1]]) if both else entry.speeds(flow)
                metric = "gbs_bi" if both else "gbs_uni"
                row[metric] = round_significant(median(speeds))
                row[f"{metric}_best"] = round_significant(max(speeds))
                row["spread"] = max(row["spread"], round(relative_mad(speeds), 4))
                row["wrong"] += entry.wrong[flow]
        self.pairs = [rows[key] for key in sorted(rows)]
        self.findings = link_verdicts.judge_pairs(self.pairs, self.locations, self._published)

    def _empty_row(self, flow: Flow, size: int) -> Row:
        return {
            "src": flow[0],
            "dst": flow[1],
            "backend": self.backend,
            "bytes": size,
            "class": link_verdicts.pair_class(*(self.locations[rank] for rank in flow)),
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
        return figure(self.locations[row["src"]]["gpu"]["name"], "pair", row["bytes"])

    # ---- Collectives ----

    def _measure_collectives(self, group: dist.ProcessGroup) -> None:
        world, buffers = self.world, Buffers(self.world.device)
        native = torch_backend(self.backend, group, "", buffers)
        ring, tree = (
            point_to_point.point_to_point_all_reduce(self.backend, algorithm, group, buffers)
            for algorithm in ("ring", "tree")
        )
        all_reduce_sizes = [max(self.sizes)]
        while all_reduce_sizes[0] // 16 >= _SMALLEST_ALL_REDUCE:
            all_reduce_sizes.insert(0, all_reduce_sizes[0] // 16)
        for part, op, backends, sizes in (
            ("all_to_all", "all_to_all", [native], self.sizes),
            ("ring_vs_tree", "all_reduce", [ring, tree, native], all_reduce_sizes),
        ):
            if part not in self.parts or self.stopped:
                continue
            self.progress(f"{op} with {', '.join(backend.name for backend in backends)}")
            sweep = Sweep(backends, self.control, world, self.budget, rows=getattr(self, part))
            groups = case_groups(op, sizes, torch.float32, world)
            sweep.run(groups, lambda rows: self.save(), self.cases)
            self.stopped = sweep.stopped
            for skip in sweep.skipped:
                self.skipped.append({"name": f"{op}, {skip['backend']}", "reason": skip["reason"]})

    # ---- Copies ----

    def _measure_copies(self) -> None:
        """Measure the copies of one rank after another, because ranks may share a link.

        With `concurrent`, all ranks measure their copies at the same time.
        """
        world = self.world
        for turn in range(1 if self.concurrent else world.size):
            if self.control.check_stop():
                self.stopped = True
                break
            rows: list[Row] = []
            if self.concurrent or turn == world.rank:
                for size in self.sizes:
                    copies = point_to_point.host_copies(world.device, size)
                    # One rank per host measures the copies between all GPUs that it sees.
                    copies += point_to_point.peer_copies(size) if world.local_rank == 0 else []
                    done = point_to_point.run_copies(copies, lambda: self.control.stop_requested)
                    rows += [
                        point_to_point.copy_row(copy, world.rank) for copy in copies if copy.speeds
                    ]
                    if not done:
                        break
            self.copies += [row for rank_rows in gather_json(rows) for row in rank_rows]
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

_CELL = 9  # width: up to two exclamation marks, a number such as 0.0246, and a space


def format_bandwidth(bench: BandwidthBench, width: int) -> Iterator[str]:
    """Yield the lines to print: matrices of pairs, tables of the other parts, and findings."""
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
    for skipped in bench.skipped:
        yield f"# {skipped['name']} is skipped: {skipped['reason']}"
    yield from _verdicts(bench)


def _table(
    title: str, label: str, columns: Mapping[str, str], rows: Sequence[Row]
) -> Iterator[str]:
    """Yield the lines of a table. `label` is a format string for the first cell of each row."""
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
    if value is None or isinstance(value, str):
        return value or "-"
    if field in ("spread", "scatter"):
        return f"{100 * value:.1f} %"
    return format_size(value) if field == "bytes" else three_digits(value)


def _matrices(bench: BandwidthBench, size: int, width: int) -> Iterator[str]:
    ranks = range(bench.world.size)
    how = "disjoint pairs at the same time" if bench.concurrent else "one pair at a time"
    if 6 + _CELL * len(ranks) > width:
        yield f"# a matrix of {len(ranks)} × {len(ranks)} pairs is too wide here: use --json FILE"
        return
    marks = {"degraded": "!", "bad": "!!"}
    for metric, direction in (("gbs_uni", "one way"), ("gbs_bi", "both ways, the sum")):
        about = f"messages of {format_size(size)}, {how}"
        yield f"# {direction}, GB/s, {about} (rows send, columns receive)"
        yield f"#{'':5}" + "".join(f"{rank:>{_CELL}}" for rank in ranks)
        cells = {
            (row["src"], row["dst"]): marks.get(row["verdict"], "") + three_digits(row[metric])
            for row in bench.pairs
            if row["bytes"] == size and row[metric] is not None
        }
        for src in ranks:
            line = "".join(f"{cells.get((src, dst), '-'):>{_CELL}}" for dst in ranks)
            yield f"{src:>6}{line}"


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
        reference = f"{three_digits(finding.against_gbs)} ({finding.against})"
        speeds = f"{three_digits(finding.gbs)} GB/s compared with {reference}"
        yield f"# {finding.verdict}: {finding.what}: {speeds}"
        for cause in finding.causes:
            yield f"#   {cause if cause.startswith('observed') else 'possible cause: ' + cause}"
    if bench.pairs and not bench.findings:
        unknown = sum(row["verdict"] == "unknown" for row in bench.pairs)
        good = len(bench.pairs) - unknown
        reason = "their class has no other pair and no published figure"
        verdicts = [f"{good} pairs are as fast as the other pairs of their class"] if good else []
        verdicts += [f"{unknown} pairs cannot be judged ({reason})"] if unknown else []
        yield f"# verdict: {'; '.join(verdicts)}"
