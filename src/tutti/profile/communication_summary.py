"""Summaries of communication for the JSON: `comm[]`, `axes[]` and `buckets[]`."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from tutti.measure.message_cost import OPERATIONS, bandwidth
from tutti.measure.spread import summarize
from tutti.profile.collective_matching import MatchedCollective
from tutti.profile.rank_trace import Collective, RankTrace, Step
from tutti.profile.step_breakdown import StepBreakdown

_Key = tuple[str, str, str | None, int, str]  # operation, group, axis, bytes, dtype
_Sample = tuple[float, float, bool, int]  # transfer seconds, wait seconds, matched, ranks


def comm_rows(
    traces: Sequence[RankTrace], matched: Sequence[MatchedCollective]
) -> list[dict[str, Any]]:
    """`comm[]`: a row for each operation, group and message size, largest total time first.

    Times are those of moving data: from the last arrival to the end. A collective that only one
    trace contains counts with its whole time, including waiting; then `matched` is less than
    `count`.
    """
    samples: dict[_Key, list[_Sample]] = defaultdict(list)
    known = {id(each) for collective in matched for each in collective.members.values()}
    for collective in matched:
        one, members = collective.first, collective.members.values()
        wait = sum(each.transfer_start - each.start for each in members) / len(members)
        ranks = one.group_size or len(one.group_ranks) or len(members)
        operation = "send_recv" if one.is_point_to_point else one.operation
        samples[operation, one.group, one.axis, one.bytes, one.dtype].append(
            (collective.transfer_seconds, wait, True, ranks)
        )
    for trace in traces:
        for each in trace.collectives:
            if id(each) not in known and not each.is_point_to_point:
                ranks = each.group_size or trace.world_size
                samples[each.operation, each.group, each.axis, each.bytes, each.dtype].append(
                    (each.end - each.start, 0.0, False, ranks)
                )
    rows = [_comm_row(traces, key, values) for key, values in samples.items()]
    return sorted(rows, key=lambda row: -row["transfer_s"]["total"])


def _comm_row(traces: Sequence[RankTrace], key: _Key, samples: list[_Sample]) -> dict[str, Any]:
    operation, group, axis, size, dtype = key
    times = [seconds for seconds, *_ in samples]
    p50, ranks = median(times), samples[0][3]
    algbw, busbw = None, None
    if operation in OPERATIONS and size and p50 > 0:
        algbw, busbw = bandwidth(OPERATIONS[operation], size, ranks, p50)
    config = next((trace.groups[group] for trace in traces if group in trace.groups), {})
    label = group.removeprefix("tutti ") if group.startswith("tutti ") else ""
    return {
        "op": operation,
        "group": group,
        "description": config.get("pg_desc", label),
        "axis": axis,
        "ranks": ranks,
        "bytes": size or None,
        "dtype": dtype,
        "count": len(samples),
        "matched": sum(matched for _, _, matched, _ in samples),
        "transfer_s": {"total": sum(times), **summarize(times)},
        "wait_s": {"mean": fmean(wait for _, wait, *_ in samples)},
        "algbw_gbs": algbw,
        "busbw_gbs": busbw,
    }


def axis_rows(steps: Sequence[StepBreakdown]) -> list[dict[str, Any]]:
    """`axes[]`: seconds per step of each mesh axis, mean over ranks, the longest first."""
    length = fmean(each.seconds for each in steps)
    totals: dict[str | None, dict[str, float]] = {}
    for step in steps:
        for (axis, _), parts in step.by_kind.items():
            row = totals.setdefault(axis, dict.fromkeys(("hidden", "exposed", "wait"), 0.0))
            for name, seconds in parts.items():
                row[name] += seconds / len(steps)
    rows = [
        {
            "axis": axis,
            **{f"{name}_s": seconds for name, seconds in parts.items()},
            "share": sum(parts.values()) / length,
        }
        for axis, parts in totals.items()
    ]
    return sorted(rows, key=lambda row: -row["share"])


def bucket_rows(traces: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """`buckets[]`: DDP buckets by rank, step and order of their all-reduce calls.

    Times are seconds from the step's start. ready: the last gradient of the bucket was computed and
    all_reduce was called; started: every rank had called all_reduce and data began to move; done:
    the all-reduce had ended.
    """
    return [
        {
            "rank": trace.rank,
            "step": step.number,
            "index": index,
            "bytes": each.bytes,
            "ready_s": each.bucket_ready - step.start,
            "started_s": each.transfer_start - step.start,
            "done_s": each.end - step.start,
        }
        for trace in traces
        for step in trace.steps
        for index, each in enumerate(buckets_in(trace, step))
        if each.bucket_ready is not None
    ]


def buckets_in(trace: RankTrace, step: Step) -> list[Collective]:
    """The DDP buckets of a step in the order of their calls."""
    buckets = [each for each in trace.collectives_called_in(step) if each.bucket_ready is not None]
    return sorted(buckets, key=lambda each: (each.bucket_ready, each.arrival))
