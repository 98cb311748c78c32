"""Which links are slow: every pair against its class and the catalogue, and what slow pairs share.

A pair is held against the best that the ends of its class reach, the median over ends (a host or a
rank, sending or receiving): half of all pairs may be slow because of one end, the median of pairs
would then be the slow ones' own. Its best pass counts: a link that was fast once can be fast, and
what else ran on the machine is no fault of it. Where all pairs of an end are slow, that end is
named, not its pairs.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median, median_high, median_low
from typing import Any

from tutti.bench.bandwidth_places import Place
from tutti.bench.verdict_causes import likely_causes
from tutti.machine.hardware_catalogue import Figure
from tutti.measure.spread import round_significant

Row = dict[str, Any]
Flow = tuple[int, int]
VERDICTS = ("unknown", "good", "degraded", "bad")  # in rising order of alarm
# Below these parts of what it is held against, a figure is degraded or bad.
DEGRADED, BAD = 0.8, 0.5
_SLOW = ("degraded", "bad")
# So many σ (1.4826 × MAD) of the scatter between ends and between passes are no difference yet.
_SIGMAS = 3


@dataclass(frozen=True)
class Finding:
    """A link, a rank or a whole class that is slow, and why that may be."""

    what: str
    verdict: str
    gbs: float  # the median of its pairs
    against_gbs: float
    against: str
    pairs: tuple[Flow, ...]
    causes: tuple[str, ...]

    def row(self) -> Row:
        """For JSON."""
        return asdict(self)


def judge(
    rows: Sequence[Row], places: Sequence[Place], published: Callable[[Row], Figure | None]
) -> list[Finding]:
    """Give each pair's row its `verdict` and `causes`; returns what is to blame.

    Rows have src, dst, class, bytes, gbs_uni and gbs_bi with their best passes. `published` is what
    the catalogue has for a row.
    """
    findings = []
    for key in dict.fromkeys((row["class"], row["bytes"]) for row in rows):
        of_class = [row for row in rows if (row["class"], row["bytes"]) == key]
        findings += _judge_class(of_class, places, published)
    return findings


def worst(verdicts: Iterable[str]) -> str:
    """The most alarming one."""
    return max(verdicts, key=VERDICTS.index, default="unknown")


def part_verdict(value: float, whole: float) -> str:
    """What a figure is, held against what it should be."""
    return "good" if value >= DEGRADED * whole else "degraded" if value >= BAD * whole else "bad"


def _judge_class(
    rows: list[Row], places: Sequence[Place], published: Callable[[Row], Figure | None]
) -> list[Finding]:
    name = rows[0]["class"]
    by_host = name == "other host"
    unit: Callable[[int], Any] = (lambda rank: places[rank]["machine"]) if by_host else _itself
    reference, least = _usual(rows, "gbs_uni_best", unit)
    below_catalogue = []
    for row in rows:
        row["verdict"], row["causes"] = _against(row["gbs_uni_best"], reference, least), []
        if (figure := published(row)) is not None and row["gbs_uni_best"] is not None:
            row["verdict"] = worst([row["verdict"], part_verdict(row["gbs_uni_best"], figure.gbs)])
            if row["gbs_uni_best"] < DEGRADED * figure.gbs:
                below_catalogue.append(row)
    _judge_both_ways(rows, *_usual(rows, "gbs_bi_best", unit))
    slow = [row for row in rows if row["verdict"] in _SLOW]
    if not slow and len({frozenset((row["src"], row["dst"])) for row in rows}) < 2:
        for row in rows:  # alone in its class, a pair is as fast as itself: that says nothing
            row["verdict"] = "unknown" if published(row) is None else row["verdict"]
    if slow and len(below_catalogue) == len(rows) and (figure := published(rows[0])) is not None:
        what = f"all pairs of the class {name}"
        against = f"the catalogue: {figure.source}"
        causes = likely_causes(name, [], places)
        return [_finding(what, slow, causes, figure.gbs, against)]
    findings = []
    for what, ends, flows in _suspects(rows, slow, places, by_host):
        members = [row for row in slow if (row["src"], row["dst"]) in flows]
        causes = likely_causes(name, ends, places)
        against = f"its class, {name}"
        findings.append(_finding(what, members, causes, reference, against))
    return findings


def _against(best: float | None, reference: float, least: float) -> str:
    if best is None:
        return "unknown"
    return "good" if best >= least else part_verdict(best, reference)


def _judge_both_ways(rows: list[Row], reference: float, least: float) -> None:
    """Of pairs that are well one way and the other, those that are slow both ways at once."""
    well = {(row["src"], row["dst"]) for row in rows if row["verdict"] not in _SLOW}
    for row in rows:
        if {(row["src"], row["dst"]), (row["dst"], row["src"])} <= well:
            row["verdict"] = worst([row["verdict"], _against(row["gbs_bi_best"], reference, least)])


def _usual(rows: list[Row], metric: str, unit: Callable[[int], Hashable]) -> tuple[float, float]:
    """What the ends of this class reach, and the least that is no difference from it.

    In logarithms, since what disturbs a machine makes a link half as fast, not 1 GB/s slower.
    """
    best: dict[Hashable, float] = {}
    for row in rows:
        if row[metric] is not None:
            for end in (("out", unit(row["src"])), ("in", unit(row["dst"]))):
                best[end] = max(best.get(end, 0.0), row[metric])
    if not best:
        return 0.0, 0.0
    reference = median_high(best.values())
    among_ends = 1.4826 * median_low(abs(math.log(each / reference)) for each in best.values())
    healthy = [row["spread"] for row in rows if (row[metric] or 0.0) >= DEGRADED * reference]
    # The best of five passes scatters about half as much as a pass.
    sigma = max(among_ends, math.log1p(median(healthy)) / 2)
    return reference, reference * min(DEGRADED, math.exp(-_SIGMAS * sigma))


def _suspects(
    rows: list[Row], slow: list[Row], places: Sequence[Place], by_host: bool
) -> list[tuple[str, list[int], set[Flow]]]:
    """Names, ranks at the slow ends, and flows: the largest ends that explain the slow pairs."""
    all_flows = {(row["src"], row["dst"]) for row in rows}
    slow_flows = {(row["src"], row["dst"]) for row in slow}
    found: list[tuple[str, list[int], set[Flow]]] = []
    left = set(slow_flows)
    if by_host:
        hosts = {place["rank"]: place["machine"] for place in places}
        named = {place["machine"]: place["host"] for place in places}
        for ends, how, flows in _guilty(all_flows, slow_flows, left, hosts.__getitem__):
            names = [named[end] for end in ends]
            what = f"the link of host {names[0]}, {how}" if len(ends) == 1 else how.join(names)
            ranks = [place["rank"] for place in places if place["machine"] == ends[0]]
            found.append((what, ranks if len(ends) == 1 else [], flows))
    for ends, how, flows in _guilty(all_flows, slow_flows, left, _itself):
        names = [f"rank {end} ({places[end]['host']}, {places[end]['device']})" for end in ends]
        what = f"{names[0]}, {how}" if len(ends) == 1 else how.join(names)
        found.append((what, list(ends), flows))
    return found


def _guilty(
    all_flows: set[Flow], slow: set[Flow], left: set[Flow], unit: Callable[[int], Any]
) -> list[tuple[tuple[Any, ...], str, set[Flow]]]:
    """Ends all of whose flows to two or more others are slow; then two ends, all between them.

    What is explained is taken out of `left`.
    """
    found: list[tuple[tuple[Any, ...], str, set[Flow]]] = []
    ends = sorted({unit(rank) for flow in all_flows for rank in flow})
    for end in ends:
        ways = {
            "sending": {f for f in all_flows if unit(f[0]) == end != unit(f[1])},
            "receiving": {f for f in all_flows if unit(f[1]) == end != unit(f[0])},
        }
        guilty = {
            way: flows
            for way, flows in ways.items()
            if flows <= slow and len({unit(r) for f in flows for r in f} - {end}) > 1
        }
        flows = set().union(*guilty.values())
        if flows & left:
            found.append(((end,), " and ".join(guilty), flows))
            left -= flows
    for end in ends:
        for other in ends:
            there = {f for f in all_flows if (unit(f[0]), unit(f[1])) == (end, other)}
            back = {f for f in all_flows if (unit(f[0]), unit(f[1])) == (other, end)}
            if there <= slow and there & left:
                both = back <= slow and bool(back & left)
                flows = there | back if both else there
                found.append(((end, other), " ↔ " if both else " → ", flows))
                left -= flows
    return found


def _finding(
    what: str, rows: list[Row], causes: list[str], reference: float, against: str
) -> Finding:
    for row in rows:
        row["causes"] = [what, *causes]
    return Finding(
        what=what,
        verdict=worst(row["verdict"] for row in rows),
        gbs=round_significant(median(row["gbs_uni"] for row in rows)),
        against_gbs=round_significant(reference),
        against=against,
        pairs=tuple(sorted((row["src"], row["dst"]) for row in rows)),
        causes=tuple(causes),
    )


def _itself(rank: int) -> int:
    return rank
