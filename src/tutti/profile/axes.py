"""Which axis of a layout a communication serves: dp, shard, tp or pp.

A DeviceMesh describes its groups as mesh_<name of the axis>. The group of all ranks serves the one
axis that there is, or the whole world where there are several. Where no mesh tells, the operation
does: replicas all-reduce gradients, sharding gathers parameters and scatters gradients.
"""

from collections.abc import Sequence
from statistics import mean
from typing import Any

from tutti.profile.collective import Collective
from tutti.profile.parts import StepParts
from tutti.profile.rank_trace import RankTrace

# What torchtitan, Megatron, Accelerate, Lightning and we ourselves call the axes.
_NAMES = {
    **dict.fromkeys(("dp", "data", "data_parallel", "ddp", "replicate", "dp_replicate"), "dp"),
    **dict.fromkeys(("shard", "fsdp", "dp_shard", "dp_shard_cp", "dp_cp"), "shard"),
    **dict.fromkeys(("tp", "tensor", "tensor_parallel", "model"), "tp"),
    **dict.fromkeys(("pp", "pipe", "pipeline", "stage"), "pp"),
}
_SHARDING = ("all_gather", "reduce_scatter")


def name_axes(trace: RankTrace) -> None:
    """Give each communication its axis, and the ranks of its group: matching needs those."""
    described = {str(each.get("pg_desc", "")): each for each in trace.groups.values()}
    there = _axes_there(trace)
    for each in trace.collectives:
        if each.group.startswith("tutti "):
            # Its name is the group's description. Several groups have the same, of other ranks.
            name = each.group.removeprefix("tutti ")
            group = described.get("default_pg" if name == "default" else name)
            group = group or trace.groups.get(name.removeprefix("group-"), {})
        else:
            group = trace.groups.get(each.group, {})
        if not each.group_ranks:
            each.group_ranks = tuple(group.get("ranks") or ())
        each.axis = _axis(each, str(group.get("pg_desc", "")), trace.world_size, there)


def _axes_there(trace: RankTrace) -> set[str]:
    """The axes of more than one rank."""
    sizes = {
        axis: int(each.get("pg_size", 0))
        for each in trace.groups.values()
        if (axis := _named(str(each.get("pg_desc", "")))) is not None
    }
    large = {axis for axis, size in sizes.items() if size > 1}
    # An axis of all ranks gets no group of its own, but the default one: it is the one not named.
    unnamed = set(_NAMES.values()) - set(sizes)
    return unnamed if not large and len(unnamed) == 1 else large


def _axis(each: Collective, description: str, world: int, there: set[str]) -> str | None:
    if (named := _named(description)) is not None:
        return named
    if each.is_point_to_point and not each.group:  # NCCL's batches name none; only stages send
        return "pp"
    size = len(each.group_ranks) or each.group_size
    everyone = size == world or (not size and not each.group)
    if not everyone or (description.startswith("mesh_") and there):
        return None
    if len(there) > 1:
        return "world" if size else None
    if there:
        return next(iter(there))
    if each.is_point_to_point:
        return "pp"
    return "shard" if each.operation in _SHARDING else "dp"


def _named(description: str) -> str | None:
    return _NAMES.get(description.removeprefix("mesh_").lower())


def by_axis(steps: Sequence[StepParts]) -> list[dict[str, Any]]:
    """A row for each axis, the costliest first: the mean of a step over ranks."""
    whole = mean(each.seconds for each in steps)
    totals: dict[str | None, dict[str, float]] = {}
    for step in steps:
        for (axis, _), parts in step.talk.items():
            row = totals.setdefault(axis, dict.fromkeys(("hidden", "exposed", "wait"), 0.0))
            for name, seconds in parts.items():
                row[name] += seconds / len(steps)
    rows = [
        {
            "axis": axis,
            **{f"{name}_s": seconds for name, seconds in parts.items()},
            "share": sum(parts.values()) / whole,
        }
        for axis, parts in totals.items()
    ]
    return sorted(rows, key=lambda row: -row["share"])
