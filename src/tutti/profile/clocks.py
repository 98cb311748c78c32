"""One clock for all ranks: what the hosts' clocks differ by, and shifting the traces by it.

No rank leaves a synchronising collective before all have arrived, so all leave it at about the
same time: what their ends differ by is what their clocks differ by. Ranks of one host read one
clock. Hosts that share such a collective are compared; the others are reached through those.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tutti.profile.collective import SYNCHRONISING
from tutti.profile.matching import Meeting, meet
from tutti.profile.rank_trace import RankTrace

# What ends differ by on one host is noise, unless it is more than this and more than three times
# its own spread: containers of one name may run on several hosts.
_NOISE_SECONDS = 1e-3


@dataclass
class Clock:
    """How far a rank's clock was ahead of the first rank's, and what was done about it."""

    rank: int
    measured_s: float | None  # None: no synchronising collectives lead from the first rank to it
    spread_s: float
    applied_s: float


def align(traces: Sequence[RankTrace]) -> list[Clock]:
    """Put all ranks on the first one's clock; shifts the traces."""
    if not traces:
        return []
    for trace in traces:
        trace.shift((trace.base_ns - traces[0].base_ns) / 1e9)
    meetings = [each for each in meet(traces) if each.any.operation in SYNCHRONISING]
    owner = _owners(traces, meetings)
    offsets = _offsets(traces[0].rank, owner, meetings)
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


def _owners(traces: Sequence[RankTrace], meetings: Sequence[Meeting]) -> dict[int, int]:
    """Whose clock each rank reads: that of the first rank of its host, unless it surely differs."""
    first: dict[str, int] = {}
    owner = {trace.rank: first.setdefault(trace.host, trace.rank) for trace in traces}
    ends: dict[int, list[float]] = defaultdict(list)
    for meeting in meetings:
        for rank, each in meeting.members.items():
            if owner[rank] != rank and owner[rank] in meeting.members:
                ends[rank].append(each.end - meeting.members[owner[rank]].end)
    for rank, seen in ends.items():
        offset, spread = _middle(seen)
        if abs(offset) > max(_NOISE_SECONDS, 3 * spread):
            owner[rank] = rank
    return owner


def _offsets(
    first: int, owner: dict[int, int], meetings: Sequence[Meeting]
) -> dict[int, tuple[float, float]]:
    """How far each clock is ahead of the first, and the spread: a walk from neighbour to neighbour.

    In a meeting, each clock is compared with the first that is there; a clock of several ranks
    ends at their median.
    """
    ahead: dict[tuple[int, int], list[float]] = defaultdict(list)
    for meeting in meetings:
        ends: dict[int, list[float]] = defaultdict(list)
        for rank, each in meeting.members.items():
            ends[owner[rank]].append(each.end)
        here = min(ends)
        for there in ends:
            if there != here:
                ahead[here, there].append(median(ends[there]) - median(ends[here]))
    neighbours: dict[int, list[tuple[int, float, float]]] = defaultdict(list)
    for (here, there), seen in sorted(ahead.items()):
        offset, spread = _middle(seen)
        neighbours[here].append((there, offset, spread))
        neighbours[there].append((here, -offset, spread))
    found = {owner[first]: (0.0, 0.0)}
    reached = [owner[first]]
    for here in reached:
        for there, offset, spread in neighbours[here]:
            if there not in found:
                found[there] = found[here][0] + offset, max(found[here][1], spread)
                reached.append(there)
    return found


def _middle(seen: Sequence[float]) -> tuple[float, float]:
    """The median, and the median of what differs from it."""
    offset = median(seen)
    return offset, median(abs(each - offset) for each in seen)
