"""Each collective with its counterparts on other ranks."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tutti.profile.collective import Collective
from tutti.profile.rank_trace import RankTrace


@dataclass
class Meeting:
    """One collective on all ranks whose traces show it."""

    members: dict[int, Collective]

    @property
    def any(self) -> Collective:
        return next(iter(self.members.values()))

    @property
    def last_rank(self) -> int:
        """Who arrived last: the rank that the others waited for."""
        return max(self.members, key=lambda rank: self.members[rank].arrival)

    @property
    def lateness(self) -> float:
        """How much later the last one came than the one before it."""
        arrivals = sorted(each.arrival for each in self.members.values())
        return arrivals[-1] - arrivals[-2]

    @property
    def transfer(self) -> float:
        """Seconds from the last arrival to the end: what was not waiting."""
        return max(0.0, max(each.end - each.waited_until for each in self.members.values()))


def match(traces: Sequence[RankTrace]) -> list[Meeting]:
    """As `meet`, on one clock; tells each who came last, and when."""
    meetings = meet(traces)
    for meeting in meetings:
        late = meeting.last_rank
        arrival = meeting.members[late].arrival
        for each in meeting.members.values():
            each.last_arrival, each.last_rank = arrival, late
    return meetings


def meet(traces: Sequence[RankTrace]) -> list[Meeting]:
    """The collectives that several ranks' traces show."""
    found: dict[tuple[Any, ...], dict[int, Collective]] = defaultdict(dict)
    unclear = {id(each) for each in without_group(traces)}
    for trace in traces:
        starts = [step.start for step in trace.steps]
        seen: dict[tuple[Any, ...], int] = defaultdict(int)
        for each in sorted(trace.collectives, key=lambda one: one.arrival):
            if id(each) in unclear or (key := _key(each, trace)) is None:
                continue
            if each.sequence is None or each.is_point_to_point:
                # The how-many-th of its kind in the step.
                position = bisect_right(starts, each.arrival) - 1
                step = trace.steps[position].number if position >= 0 else -1
                seen[(*key, step)] += 1
                key = (*key, step, seen[(*key, step)])
            found[key].setdefault(trace.rank, each)
    return [Meeting(members) for members in found.values() if len(members) > 1]


def without_group(traces: Sequence[RankTrace]) -> list[Collective]:
    """Communications of a world with subgroups that do not say which of them they are of: who met
    whom is unknown.
    """
    sizes = {
        int(group.get("pg_size") or len(group.get("ranks") or ()))
        for trace in traces
        for group in trace.groups.values()
    }
    world = max(trace.world_size for trace in traces)
    if not any(1 < size < world for size in sizes):
        return []
    return [
        each
        for trace in traces
        for each in trace.collectives
        if not each.group and not each.group_ranks
    ]


def _key(each: Collective, trace: RankTrace) -> tuple[Any, ...] | None:
    ranks = each.group_ranks or tuple(trace.groups.get(each.group, {}).get("ranks", ()))
    # A group is its name and its ranks: two groups of one name may exist on different ranks.
    group = (each.group, ranks)
    if each.is_point_to_point:
        if each.peer is None or not ranks or trace.rank not in ranks or each.peer >= len(ranks):
            everyone = trace.world_size > 1 and not ranks
            if each.peer is None or not everyone:
                return None
            peer = each.peer
        else:
            peer = ranks[each.peer]
        pair = (trace.rank, peer) if each.operation == "send" else (peer, trace.rank)
        return (group, *pair, each.bytes)
    if each.sequence is not None:
        return (group, each.sequence)
    return (group, each.operation, each.bytes)
