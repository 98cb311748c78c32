"""Match each collective with the same collective on the other ranks, and set its mesh axis."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tutti.profile.rank_trace import Collective, RankTrace

# Names of mesh axes in torchtitan, Megatron, Accelerate, Lightning and tutti.
_AXES = {
    **dict.fromkeys(("dp", "data", "data_parallel", "ddp", "replicate", "dp_replicate"), "dp"),
    **dict.fromkeys(("shard", "fsdp", "dp_shard", "dp_shard_cp", "dp_cp"), "shard"),
    **dict.fromkeys(("tp", "tensor", "tensor_parallel", "model"), "tp"),
    **dict.fromkeys(("pp", "pipe", "pipeline", "stage"), "pp"),
}


@dataclass
class MatchedCollective:
    """One collective on all ranks whose traces contain it."""

    members: dict[int, Collective]

    @property
    def first(self) -> Collective:
        """The collective on any one rank, for its operation, size and group."""
        return next(iter(self.members.values()))

    @property
    def last_rank(self) -> int:
        """The rank that arrived last: the other ranks waited for this rank."""
        return max(self.members, key=lambda rank: self.members[rank].arrival)

    @property
    def lateness(self) -> float:
        """Seconds between the second last arrival and the last arrival."""
        arrivals = sorted(each.arrival for each in self.members.values())
        return arrivals[-1] - arrivals[-2]

    @property
    def transfer_seconds(self) -> float:
        """Seconds from the last arrival to the end: the time without waiting."""
        return max(0.0, max(each.end - each.transfer_start for each in self.members.values()))


def match_collectives(traces: Sequence[RankTrace]) -> list[MatchedCollective]:
    """The collectives that at least two traces contain."""
    found: dict[tuple[Any, ...], dict[int, Collective]] = defaultdict(dict)
    ambiguous = {id(each) for each in collectives_without_group(traces)}
    for trace in traces:
        starts = [step.start for step in trace.steps]
        occurrences: dict[tuple[Any, ...], int] = defaultdict(int)
        for each in sorted(trace.collectives, key=lambda one: one.arrival):
            if id(each) in ambiguous or (key := _matching_key(each, trace)) is None:
                continue
            if each.sequence is None or each.is_point_to_point:
                # There is no usable sequence number: match the n-th of the same kind in the step.
                position = bisect_right(starts, each.arrival) - 1
                step = trace.steps[position].number if position >= 0 else -1
                occurrences[(*key, step)] += 1
                key = (*key, step, occurrences[(*key, step)])
            found[key].setdefault(trace.rank, each)
    return [MatchedCollective(members) for members in found.values() if len(members) > 1]


def record_last_arrivals(matched: Sequence[MatchedCollective]) -> None:
    """Store in each collective which rank arrived last, and when; needs aligned clocks."""
    for each in matched:
        last = each.last_rank
        arrival = each.members[last].arrival
        for member in each.members.values():
            member.last_arrival, member.last_rank = arrival, last


def collectives_without_group(traces: Sequence[RankTrace]) -> list[Collective]:
    """Collectives without a group in a world with subgroups; these cannot be matched."""
    sizes = {
        int(group.get("pg_size") or len(group.get("ranks") or ()))
        for trace in traces
        for group in trace.groups.values()
    }
    world_size = max(trace.world_size for trace in traces)
    if not any(1 < size < world_size for size in sizes):
        return []
    return [
        each
        for trace in traces
        for each in trace.collectives
        if not each.group and not each.group_ranks
    ]


def _matching_key(each: Collective, trace: RankTrace) -> tuple[Any, ...] | None:
    ranks = each.group_ranks or tuple(trace.groups.get(each.group, {}).get("ranks", ()))
    # Two groups of the same name may exist on different ranks, so the ranks are part of the key.
    group = (each.group, ranks)
    if each.is_point_to_point:
        if each.peer is None:
            return None
        if trace.rank in ranks and each.peer < len(ranks):
            peer = ranks[each.peer]
        elif trace.world_size > 1 and not ranks:
            peer = each.peer
        else:
            return None
        pair = (trace.rank, peer) if each.operation == "send" else (peer, trace.rank)
        return (group, *pair, each.bytes)
    if each.sequence is not None:
        return (group, each.sequence)
    return (group, each.operation, each.bytes)


def name_axes(trace: RankTrace) -> None:
    """Set the mesh axis of each collective, and the ranks of its group, which matching needs.

    A DeviceMesh describes its groups as mesh_<axis>. The default group belongs to the only axis, or
    to the axis `world` if there are several. Without a mesh the operation determines the axis:
    replicas all-reduce gradients; sharding gathers parameters and scatters gradients.
    """
    by_description = {str(each.get("pg_desc", "")): each for each in trace.groups.values()}
    present = _axes_present(trace)
    for each in trace.collectives:
        if each.group.startswith("tutti "):
            # The label of a tutti.comm group is its description, which groups on other ranks share.
            name = each.group.removeprefix("tutti ")
            group = by_description.get("default_pg" if name == "default" else name)
            group = group or trace.groups.get(name.removeprefix("group-"), {})
        else:
            group = trace.groups.get(each.group, {})
        if not each.group_ranks:
            each.group_ranks = tuple(group.get("ranks") or ())
        each.axis = _axis(each, str(group.get("pg_desc", "")), trace.world_size, present)


def _axes_present(trace: RankTrace) -> set[str]:
    """The axes with more than one rank."""
    sizes = {
        axis: int(each.get("pg_size", 0))
        for each in trace.groups.values()
        if (axis := _named_axis(str(each.get("pg_desc", "")))) is not None
    }
    large = {axis for axis, size in sizes.items() if size > 1}
    # An axis with all ranks uses the default group: it is the only axis without its own group.
    unnamed = set(_AXES.values()) - set(sizes)
    return unnamed if not large and len(unnamed) == 1 else large


def _axis(each: Collective, description: str, world_size: int, present: set[str]) -> str | None:
    if (named := _named_axis(description)) is not None:
        return named
    if each.is_point_to_point and not each.group:  # NCCL batches have no group; only stages send
        return "pp"
    size = len(each.group_ranks) or each.group_size
    of_all_ranks = size == world_size or (not size and not each.group)
    if not of_all_ranks or (description.startswith("mesh_") and present):
        return None
    if len(present) > 1:
        return "world" if size else None
    if present:
        return next(iter(present))
    if each.is_point_to_point:
        return "pp"
    return "shard" if each.operation in ("all_gather", "reduce_scatter") else "dp"


def _named_axis(description: str) -> str | None:
    return _AXES.get(description.removeprefix("mesh_").lower())
