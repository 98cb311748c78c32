"""What was communicated: a row for each operation, size and group, with its bandwidth."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from tutti.measure.bus_bandwidth import OPERATIONS, bandwidth
from tutti.measure.spread import summarize
from tutti.profile.matching import Meeting
from tutti.profile.rank_trace import RankTrace


def traffic(traces: Sequence[RankTrace], meetings: Sequence[Meeting]) -> list[dict[str, Any]]:
    """Rows by total time. Times are of data moving: from the last arrival to the end.

    A communication that only one rank's trace shows counts its whole time, waiting included, and
    its row says so: `matched` is less than `count`.
    """
    rows: dict[tuple[str, str, str | None, int, str], list[tuple[float, float, bool, int]]] = (
        defaultdict(list)
    )
    together = {id(each) for meeting in meetings for each in meeting.members.values()}
    for meeting in meetings:
        one = meeting.any
        waits = sum(each.waited_until - each.start for each in meeting.members.values())
        size = one.group_size or len(one.group_ranks) or len(meeting.members)
        kind = "send_recv" if one.is_point_to_point else one.operation
        rows[kind, one.group, one.axis, one.bytes, one.dtype].append(
            (meeting.transfer, waits / len(meeting.members), True, size)
        )
    for trace in traces:
        for each in trace.collectives:
            if id(each) not in together and not each.is_point_to_point:
                size = each.group_size or trace.world_size
                rows[each.operation, each.group, each.axis, each.bytes, each.dtype].append(
                    (each.end - each.start, 0.0, False, size)
                )
    result = [_row(traces, *key, seen) for key, seen in rows.items()]
    return sorted(result, key=lambda row: -row["transfer_s"]["total"])


def _row(
    traces: Sequence[RankTrace],
    operation: str,
    group: str,
    axis: str | None,
    size: int,
    dtype: str,
    seen: list[tuple[float, float, bool, int]],
) -> dict[str, Any]:
    times = [time for time, *_ in seen]
    middle, ranks = median(times), seen[0][3]
    counted = OPERATIONS.get(operation)
    algorithm, bus = None, None
    if counted is not None and size and middle > 0:
        algorithm, bus = bandwidth(counted, size, ranks, middle)
    about = next((t.groups[group] for t in traces if group in t.groups), {})
    described = group.removeprefix("tutti ") if group.startswith("tutti ") else ""
    return {
        "op": operation,
        "group": group,
        "description": about.get("pg_desc", described),
        "axis": axis,
        "ranks": ranks,
        "bytes": size or None,
        "dtype": dtype,
        "count": len(seen),
        "matched": sum(matched for _, _, matched, _ in seen),
        "transfer_s": {"total": sum(times), **summarize(times)},
        "wait_s": {"mean": sum(wait for _, wait, *_ in seen) / len(seen)},
        "algbw_gbs": algorithm,
        "busbw_gbs": bus,
    }
