"""Matches collectives between ranks, finds their mesh axes, and aligns the clocks of all ranks."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tutti.profile.rank_trace import SYNCHRONIZING, Collective, RankTrace

# Names of mesh axes in torchtitan, Megatron, Accelerate, Lightning and tutti.
_AXES = {
    **dict.fromkeys(("dp", "data", "data_parallel", "ddp", "replicate", "dp_replicate"), "dp"),
    **dict.fromkeys(("shard", "fsdp", "dp_shard", "dp_shard_cp", "dp_cp"), "shard"),
    **dict.fromkeys(("tp", "tensor", "tensor_parallel", "model"), "tp"),
    **dict.fromkeys(("pp", "pipe", "pipeline", "stage"), "pp"),
}
# Ranks share a clock if their operating system kernels have the same boot id. Traces of other tools
# have no boot id. In such traces, ranks with the same host name are assumed to share a clock. But
# containers on several hosts may have the same host name, so the end times of the same collectives
# are compared. The ranks have different clocks if the median difference of the end times exceeds
# this constant and three times the spread of the differences.
_SAME_CLOCK_SECONDS = 1e-3


@dataclass
class MatchedCollective:
    """One collective, as recorded by all ranks whose traces contain it."""

    members: dict[int, Collective]

    @property
    def first(self) -> Collective:
        """The record of one rank. Operation, size and group are the same on all ranks."""
        return next(iter(self.members.values()))

    @property
    def last_rank(self) -> int:
        """The rank that arrived last. The other ranks waited for this rank."""
        return max(self.members, key=lambda rank: self.members[rank].arrival)

    @property
    def lateness(self) -> float:
        """Seconds between the second last arrival and the last arrival."""
        *_, second_last, last = sorted(member.arrival for member in self.members.values())
        return last - second_last

    @property
    def transfer_seconds(self) -> float:
        """Seconds from the last arrival to the end. This is the time without waiting."""
        return max(0.0, max(member.end - member.transfer_start for member in self.members.values()))


def match_collectives(traces: Sequence[RankTrace]) -> list[MatchedCollective]:
    """Return the collectives that at least two traces contain.

    The function also sets `last_rank` (the rank that arrived last) and `last_arrival` (its arrival
    time) of each collective. These values are correct only if the clocks are aligned.
    """
    found: dict[tuple[Any, ...], dict[int, Collective]] = defaultdict(dict)
    ambiguous = {id(collective) for collective in collectives_without_group(traces)}
    for trace in traces:
        starts = [step.start for step in trace.steps]
        occurrences: dict[tuple[Any, ...], int] = defaultdict(int)
        for collective in sorted(trace.collectives, key=lambda call: call.arrival):
            key = _matching_key(collective, trace)
            if key is None or id(collective) in ambiguous:
                continue
            if collective.sequence is None or collective.is_point_to_point:
                # There is no usable sequence number. So the n-th collective with this key in a step
                # matches the n-th collective with the same key in this step on the other ranks.
                position = bisect_right(starts, collective.arrival) - 1
                step = trace.steps[position].number if position >= 0 else -1
                occurrences[(*key, step)] += 1
                key = (*key, step, occurrences[(*key, step)])
            found[key].setdefault(trace.rank, collective)
    matched = [MatchedCollective(members) for members in found.values() if len(members) > 1]
    for match in matched:
        last = match.last_rank
        arrival = match.members[last].arrival
        for member in match.members.values():
            member.last_arrival, member.last_rank = arrival, last
    return matched


def collectives_without_group(traces: Sequence[RankTrace]) -> list[Collective]:
    """Return the collectives that cannot be matched, because their group is unknown.

    If the program has several groups, a collective whose trace event has no group name may belong
    to any of the groups.
    """
    groups = [group for trace in traces for group in trace.groups.values()]
    sizes = {int(group.get("pg_size") or len(group.get("ranks") or ())) for group in groups}
    world_size = max(trace.world_size for trace in traces)
    if not any(1 < size < world_size for size in sizes):
        return []
    calls = [call for trace in traces for call in trace.collectives]
    return [call for call in calls if not call.group and not call.group_ranks]


def _matching_key(collective: Collective, trace: RankTrace) -> tuple[Any, ...] | None:
    group_ranks = trace.groups.get(collective.group, {}).get("ranks", ())
    ranks = collective.group_ranks or tuple(group_ranks)
    # Groups with different ranks may have the same name, so the ranks are part of the key.
    group = (collective.group, ranks)
    if not collective.is_point_to_point:
        if collective.sequence is not None:
            return (group, collective.sequence)
        return (group, collective.operation, collective.bytes)
    peer = collective.peer
    if peer is None:
        return None
    if trace.rank in ranks and peer < len(ranks):
        peer = ranks[peer]
    elif trace.world_size == 1 or ranks:
        return None
    pair = (trace.rank, peer) if collective.operation == "send" else (peer, trace.rank)
    return (group, *pair, collective.bytes)


def name_axes(trace: RankTrace) -> None:
    """Set the mesh axis (`axis`) and `group_ranks` of each collective.

    A DeviceMesh describes its groups as `mesh_<axis>`. If there is only one mesh axis, a collective
    of the default group belongs to this axis. If there are several mesh axes, its axis is `world`.
    In a program without a mesh, the operation determines the axis. An all-reduce belongs to dp,
    because replicas all-reduce gradients. An all-gather or a reduce-scatter belongs to shard. There
    is one exception: a program that uses all-reduce but never reduce-scatter has replicated
    parameters, so its all-gathers collect metrics and belong to dp.
    """
    by_description = {str(group.get("pg_desc", "")): group for group in trace.groups.values()}
    present = _axes_present(trace)
    operations = {collective.operation for collective in trace.collectives}
    shards = "reduce_scatter" in operations or "all_reduce" not in operations
    for collective in trace.collectives:
        group = trace.groups.get(collective.group, {})
        if collective.group.startswith("tutti "):
            # The trace names a tutti.comm group by its description. Several groups may have the
            # same description, but a rank belongs to only one of them. So the rank's own list of
            # groups contains the right group.
            name = collective.group.removeprefix("tutti ")
            described = by_description.get("default_pg" if name == "default" else name)
            group = described or trace.groups.get(name.removeprefix("group-"), {})
        if not collective.group_ranks:
            collective.group_ranks = tuple(group.get("ranks") or ())
        description = str(group.get("pg_desc", ""))
        collective.axis = _axis(collective, description, trace.world_size, present, shards)


def _axes_present(trace: RankTrace) -> set[str]:
    """Return the mesh axes with more than one rank."""
    sizes = {
        axis: int(group.get("pg_size", 0))
        for group in trace.groups.values()
        if (axis := _named_axis(str(group.get("pg_desc", "")))) is not None
    }
    large = {axis for axis, size in sizes.items() if size > 1}
    # If one axis contains all ranks, DeviceMesh uses the default group for this axis, and the named
    # groups of all other axes have one rank. So the only axis without a named group contains all
    # ranks.
    unnamed = set(_AXES.values()) - set(sizes)
    return unnamed if not large and len(unnamed) == 1 else large


def _axis(
    collective: Collective, description: str, world_size: int, present: set[str], shards: bool
) -> str | None:
    if (named := _named_axis(description)) is not None:
        return named
    point_to_point = collective.is_point_to_point
    if point_to_point and not collective.group:  # NCCL's batch_isend_irecv, which pipelines use
        return "pp"
    size = len(collective.group_ranks) or collective.group_size
    has_all_ranks = size == world_size or (not size and not collective.group)
    if not has_all_ranks or (description.startswith("mesh_") and present):
        return None
    if len(present) > 1:
        return "world" if size else None
    if present:
        return next(iter(present))
    if point_to_point:
        return "pp"
    shard = shards and collective.operation in ("all_gather", "reduce_scatter")
    return "shard" if shard else "dp"


def _named_axis(description: str) -> str | None:
    return _AXES.get(description.removeprefix("mesh_").lower())


@dataclass
class Clock:
    """The measured clock offset of a rank, and the seconds that were added to its trace."""

    rank: int
    # Seconds by which this clock was ahead of the first rank's clock. None: the ranks are not
    # connected by collectives, neither directly nor through other hosts.
    measured_s: float | None
    spread_s: float
    applied_s: float


def align_clocks(traces: Sequence[RankTrace]) -> list[Clock]:
    """Measure the clock offsets between hosts, and shift all traces to the first rank's clock.

    No rank leaves a synchronizing collective before all ranks have arrived, so all ranks leave it
    at about the same time. The difference between the recorded end times is the clock offset.
    Ranks of one host share a clock. Two hosts that take part in the same collective are compared
    directly. Other hosts are compared through a chain of such hosts.
    """
    for trace in traces:
        trace.shift((trace.base_ns - traces[0].base_ns) / 1e9)
    matched = [call for call in match_collectives(traces) if call.first.operation in SYNCHRONIZING]
    owner = _clock_owners(traces, matched)
    offsets = _offsets(traces[0].rank, owner, matched)
    clocks = []
    for trace in traces:
        offset, spread = offsets.get(owner[trace.rank], (None, 0.0))
        if offset:
            trace.shift(-offset)
        clocks.append(Clock(trace.rank, offset, spread, 0.0 - (offset or 0.0)))
    return clocks


def _clock_owners(
    traces: Sequence[RankTrace], matched: Sequence[MatchedCollective]
) -> dict[int, int]:
    """Return {rank: owner of its clock}. The owner is the first rank with the same clock."""
    first: dict[str, int] = {}
    kernels = {trace.rank: str(trace.capture_info.get("kernel") or "") for trace in traces}
    owner = {
        trace.rank: first.setdefault(kernels[trace.rank] or trace.host, trace.rank)
        for trace in traces
    }
    differences: dict[int, list[float]] = defaultdict(list)
    for collective in matched:
        for rank, member in collective.members.items():
            if not kernels[rank] and owner[rank] != rank and owner[rank] in collective.members:
                differences[rank].append(member.end - collective.members[owner[rank]].end)
    for rank, values in differences.items():
        offset, spread = _median_and_deviation(values)
        if abs(offset) > max(_SAME_CLOCK_SECONDS, 3 * spread):
            owner[rank] = rank
    return owner


def _offsets(
    first: int, owner: dict[int, int], matched: Sequence[MatchedCollective]
) -> dict[int, tuple[float, float]]:
    """Return the offset of each clock from the first rank's clock, and its spread, in seconds.

    In each collective, every clock is compared with the clock of the lowest participating rank. If
    several ranks share a clock, the median of their end times is used. A breadth-first search from
    the first rank's clock adds up the offsets along each path.
    """
    ahead: dict[tuple[int, int], list[float]] = defaultdict(list)
    for collective in matched:
        ends: dict[int, list[float]] = defaultdict(list)
        for rank, member in collective.members.items():
            ends[owner[rank]].append(member.end)
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
    """Return the median and the median absolute deviation."""
    offset = median(values)
    return offset, median(abs(value - offset) for value in values)
