"""Put all ranks on one clock: measure the clock offsets between hosts and shift the traces.

No rank leaves a synchronizing collective before all ranks have arrived, so all ranks leave it at
about the same time: the difference of its end times is the difference of the clocks. Ranks of one
host share a clock. Two hosts that take part in the same collective are compared directly, other
hosts through a chain of such comparisons.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tutti.profile.collective_matching import MatchedCollective, match_collectives
from tutti.profile.rank_trace import SYNCHRONIZING, RankTrace

# Ranks with the same host name normally share a clock, but containers on several hosts may have the
# same name. Such ranks have separate clocks if their end times differ by more than this constant
# and by more than three times the spread.
_SAME_CLOCK_SECONDS = 1e-3


@dataclass
class Clock:
    """How far the clock of a rank was ahead of the first rank's clock, and the correction."""

    rank: int
    measured_s: float | None  # None: no chain of synchronizing collectives to the first rank
    spread_s: float
    applied_s: float


def align_clocks(traces: Sequence[RankTrace]) -> list[Clock]:
    """Shift all traces to the first rank's clock."""
    if not traces:
        return []
    for trace in traces:
        trace.shift((trace.base_ns - traces[0].base_ns) / 1e9)
    matched = [each for each in match_collectives(traces) if each.first.operation in SYNCHRONIZING]
    owner = _clock_owners(traces, matched)
    offsets = _offsets(traces[0].rank, owner, matched)
    clocks = []
    for trace in traces:
        if (found := offsets.get(owner[trace.rank])) is None:
            clocks.append(Clock(trace.rank, None, 0.0, 0.0))
            continue
        offset, spread = found
        if offset:
            trace.shift(-offset)
        clocks.append(Clock(trace.rank, offset, spread, 0.0 - offset))
    return clocks


def _clock_owners(
    traces: Sequence[RankTrace], matched: Sequence[MatchedCollective]
) -> dict[int, int]:
    """The owner of each rank's clock: the first rank of its host, unless the clocks differ."""
    first: dict[str, int] = {}
    owner = {trace.rank: first.setdefault(trace.host, trace.rank) for trace in traces}
    differences: dict[int, list[float]] = defaultdict(list)
    for collective in matched:
        for rank, each in collective.members.items():
            if owner[rank] != rank and owner[rank] in collective.members:
                differences[rank].append(each.end - collective.members[owner[rank]].end)
    for rank, values in differences.items():
        offset, spread = _median_and_deviation(values)
        if abs(offset) > max(_SAME_CLOCK_SECONDS, 3 * spread):
            owner[rank] = rank
    return owner


def _offsets(
    first: int, owner: dict[int, int], matched: Sequence[MatchedCollective]
) -> dict[int, tuple[float, float]]:
    """Seconds by which each clock is ahead of the first rank's clock, and the spread.

    In each collective every clock is compared with the clock of the lowest rank that takes part. If
    several ranks share a clock, the median of their end times is used. A breadth-first search adds
    the offsets along a path to the first rank's clock.
    """
    ahead: dict[tuple[int, int], list[float]] = defaultdict(list)
    for collective in matched:
        ends: dict[int, list[float]] = defaultdict(list)
        for rank, each in collective.members.items():
            ends[owner[rank]].append(each.end)
        reference = min(ends)
        for clock in ends:
            if clock != reference:
                ahead[reference, clock].append(median(ends[clock]) - median(ends[reference]))
    neighbours: dict[int, list[tuple[int, float, float]]] = defaultdict(list)
    for (reference, clock), values in sorted(ahead.items()):
        offset, spread = _median_and_deviation(values)
        neighbours[reference].append((clock, offset, spread))
        neighbours[clock].append((reference, -offset, spread))
    found = {owner[first]: (0.0, 0.0)}
    reached = [owner[first]]
    for clock in reached:
        for neighbour, offset, spread in neighbours[clock]:
            if neighbour not in found:
                found[neighbour] = found[clock][0] + offset, max(found[clock][1], spread)
                reached.append(neighbour)
    return found


def _median_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the median absolute deviation from it."""
    offset = median(values)
    return offset, median(abs(each - offset) for each in values)
