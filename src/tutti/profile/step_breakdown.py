"""Splits each step of each rank into parts that add up to the step, and summarizes communication.

Every moment of a step belongs to exactly one part:

    compute        the rank computes and does not communicate
    hidden         the rank computes and communicates at the same time
    wait           nothing computes, and a collective waits for a rank that has not arrived
    bubble         nothing computes, and a send or receive waits for its peer (pipelines)
    exposed        nothing computes, and data moves
    input          none of the above: the program waits for its data loader
    rest           none of the above: copies on a GPU. On a CPU, the code around operators, such as
                   autograd's engine, in intervals of less than 1 ms
    host_gap       nothing is recorded, for example Python code, a sleep or an idle GPU
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from tutti.measure.collective_bandwidth import OPERATIONS, bandwidth
from tutti.measure.spread import summarize
from tutti.measure.units import ordinal
from tutti.profile.collective_matching import MatchedCollective
from tutti.profile.rank_trace import EMPTY, SYNCHRONIZING, Collective, Intervals, RankTrace, Step

PARTS = ("compute", "hidden", "exposed", "wait", "bubble", "input", "host_gap", "rest")

Kind = tuple[str | None, bool]  # (mesh axis, whether the collective is a DDP bucket)
_Pair = tuple[float, float]  # (start, end)
_Key = tuple[str, str, str | None, int, str]  # (operation, group, axis, bytes, dtype)
_Sample = tuple[float, float, bool, int]  # (transfer seconds, wait seconds, is matched, ranks)
# On a CPU, the code around operators takes microseconds. A longer interval is a sleep, Python code
# such as a hook, or waiting for a CPU core.
_PAUSE_SECONDS = 1e-3
_NOTABLE_SHARE = 0.02  # a rank is a straggler if others wait for it for this share of a step


@dataclass(frozen=True)
class StepBreakdown:
    """One step of one rank, in seconds."""

    rank: int
    step: int
    seconds: float
    intervals: dict[str, Intervals]  # the intervals of each part
    parts: dict[str, float]  # the total length of each part
    paused: float  # the total length of the host gaps of at least 1 ms
    waited_for: dict[int, float]  # the seconds of waiting for each late rank
    # Seconds of `hidden`, `exposed` and `wait` for each kind of communication. Here `wait` includes
    # `bubble`. The sums over all kinds are the values in `parts`.
    by_kind: dict[Kind, dict[str, float]]
    # (time of the first gradient, end of backward), relative to the start of the step.
    gradients: tuple[float, float] | None


def overlap(parts: Mapping[str, float]) -> float | None:
    """Return hidden / (hidden + exposed + waiting), as defined by Holistic Trace Analysis."""
    total = sum(parts[name] for name in ("hidden", "exposed", "wait", "bubble"))
    return parts["hidden"] / total if total else None


def parts_with_pauses(step: StepBreakdown) -> dict[str, float]:
    """Return the parts, with `host_gap` split into gaps below 1 ms (`host_gap`) and `pause`."""
    gaps = max(0.0, step.parts["host_gap"] - step.paused)
    return step.parts | {"host_gap": gaps, "pause": step.paused}


def split_step(trace: RankTrace, step: Step) -> StepBreakdown:
    """Split one step into its parts. Clocks must be aligned and collectives must be matched."""
    whole = Intervals.of([(step.start, step.end)])
    compute = trace.compute.between(step.start, step.end)
    communicating = trace.communication.between(step.start, step.end)
    idle = whole - compute
    waits: dict[int, list[_Pair]] = defaultdict(list)  # keys are the late ranks
    bubbles: list[_Pair] = []
    transfers: list[_Pair] = []
    extents: dict[Kind, list[_Pair]] = defaultdict(list)
    for call in trace.collectives:
        if call.arrival >= step.end or call.end <= step.start:
            continue
        transfers.append((call.transfer_start, call.end))
        extents[call.axis, call.bucket_ready is not None].append((call.arrival, call.end))
        if call.is_point_to_point:
            bubbles.append((call.arrival, call.transfer_start))
        elif call.last_rank is not None and call.last_rank != trace.rank:
            waits[call.last_rank].append((call.arrival, call.transfer_start))
    # If one collective moves data while another collective waits, the time counts as `exposed`.
    stalled = idle - Intervals.of(transfers)
    waited_for: dict[int, float] = {}
    waiting = EMPTY
    for late, pairs in sorted(waits.items()):
        waited = stalled & Intervals.of(pairs)
        waited_for[late] = waited.seconds
        stalled -= waited
        communicating |= waited
        waiting |= waited
    bubble = stalled & communicating & Intervals.of(bubbles)
    exposed = (idle & communicating) - waiting - bubble
    quiet = idle - communicating
    loading = quiet & trace.input.between(step.start, step.end)
    quiet -= loading
    other = quiet & trace.other.between(step.start, step.end)
    if not trace.on_device:
        other -= other.longer_than(_PAUSE_SECONDS)
    gaps = quiet - other
    hidden = compute & communicating
    intervals = {
        "compute": compute - hidden,
        "hidden": hidden,
        "exposed": exposed,
        "wait": waiting,
        "bubble": bubble,
        "input": loading,
        "host_gap": gaps,
        "rest": other,
    }
    gradients = step.gradients
    return StepBreakdown(
        rank=trace.rank,
        step=step.number,
        seconds=whole.seconds,
        intervals=intervals,
        parts={name: part.seconds for name, part in intervals.items()},
        paused=gaps.longer_than(_PAUSE_SECONDS).seconds,
        waited_for=waited_for,
        by_kind=_split_by_kind(
            {"hidden": hidden, "exposed": exposed, "wait": waiting | bubble}, extents
        ),
        gradients=gradients and (gradients[0] - step.start, gradients[1] - step.start),
    )


def _split_by_kind(
    regions: dict[str, Intervals], extents: dict[Kind, list[_Pair]]
) -> dict[Kind, dict[str, float]]:
    """Return the seconds of each region for each kind of communication.

    If two kinds overlap, the common time counts for the kind that comes first in `extents`.
    """
    by_kind: dict[Kind, dict[str, float]] = {}
    for kind, pairs in extents.items():
        extent = Intervals.of(pairs)
        by_kind[kind] = {name: (region & extent).seconds for name, region in regions.items()}
        regions = {name: region - extent for name, region in regions.items()}
    # In the remaining time, the thread enters or leaves a communication call, or wakes up after
    # one. This time counts for the kind of the preceding call.
    arrivals = [(pair[0], kind) for kind, pairs in extents.items() for pair in pairs]
    arrivals.sort(key=lambda arrival: arrival[0])
    for name, region in regions.items():
        for start, end in zip(region.starts, region.ends, strict=True):
            position = bisect_right(arrivals, end, key=lambda arrival: arrival[0])
            kind = arrivals[max(0, position - 1)][1] if arrivals else (None, False)
            by_kind.setdefault(kind, dict.fromkeys(regions, 0.0))[name] += float(end - start)
    return by_kind


def comm_rows(
    traces: Sequence[RankTrace], matched: Sequence[MatchedCollective]
) -> list[dict[str, Any]]:
    """Return `comm[]`: one row per operation, group and message size, longest total time first.

    `transfer_s` is the time in which data moves, from the last arrival to the end. If only one
    trace contains a collective, the arrivals of the other ranks are unknown, so `transfer_s` also
    includes the wait. In a row with such collectives, `matched` is less than `count`.
    """
    samples: dict[_Key, list[_Sample]] = defaultdict(list)
    in_matched: set[int] = set()
    for collective in matched:
        first, members = collective.first, collective.members.values()
        in_matched.update(map(id, members))
        wait = sum(member.transfer_start - member.start for member in members) / len(members)
        ranks = first.group_size or len(first.group_ranks) or len(members)
        samples[_key(first)].append((collective.transfer_seconds, wait, True, ranks))
    for trace in traces:
        for call in trace.collectives:
            if id(call) not in in_matched and not call.is_point_to_point:
                ranks = call.group_size or trace.world_size
                samples[_key(call)].append((call.end - call.start, 0.0, False, ranks))
    rows = [_comm_row(traces, key, values) for key, values in samples.items()]
    return sorted(rows, key=lambda row: -row["transfer_s"]["total"])


def _key(call: Collective) -> _Key:
    operation = "send_recv" if call.is_point_to_point else call.operation
    return operation, call.group, call.axis, call.bytes, call.dtype


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
    """Return `axes[]`: the mean communication time per step on each axis, longest first."""
    length = fmean(step.seconds for step in steps)
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
    """Return `buckets[]`: the DDP buckets by rank and step, in the order of their all-reduce calls.

    Times are in seconds since the start of the step. At `ready_s`, the last gradient of the bucket
    was computed and all_reduce was called. At `started_s`, every rank had called all_reduce and the
    transfer began. At `done_s`, the all-reduce had ended.
    """
    return [
        {
            "rank": trace.rank,
            "step": step.number,
            "index": index,
            "bytes": bucket.bytes,
            "ready_s": bucket.bucket_ready - step.start,
            "started_s": bucket.transfer_start - step.start,
            "done_s": bucket.end - step.start,
        }
        for trace in traces
        for step in trace.steps
        for index, bucket in enumerate(buckets_in(trace, step))
        if bucket.bucket_ready is not None
    ]


def buckets_in(trace: RankTrace, step: Step) -> list[Collective]:
    """Return the DDP buckets of a step in the order of their calls."""
    buckets = [call for call in trace.collectives_called_in(step) if call.bucket_ready is not None]
    return sorted(buckets, key=lambda bucket: (bucket.bucket_ready, bucket.arrival))


def straggler_rows(
    ranks: Sequence[int], steps: Sequence[StepBreakdown], matched: Sequence[MatchedCollective]
) -> list[dict[str, Any]]:
    """Return `stragglers[]`: one row per rank for which other ranks waited, longest wait first.

    The straggler is the rank that arrives last. Its own collectives are the shortest, because it
    never waits. The rank with the longest collective waits for the straggler and is not the cause.

    `cost_s` is the time per step in which the other ranks waited for this rank and neither computed
    nor moved data, as a mean over the other ranks. `cost_s["typical"]` is the median over the steps
    if the rank is late in most steps, and otherwise the mean. `late_steps` are the steps in which
    the rank was late. `late_cost_s` is the median cost of these steps. `period` is n if exactly
    every n-th step is late, or None.

    `gain_s` is the time per step that the other ranks would save if this rank were as fast as they
    are. It is the smallest of three values: the mean cost; the time between the arrival of the
    second last rank and the arrival of this rank; and the excess, which is the additional time of
    the part that takes longer on this rank than on the other ranks. If no part takes longer, the
    delay is random and the gain is 0.
    """
    synchronizing = [match for match in matched if match.first.operation in SYNCHRONIZING]
    length = fmean(step.seconds for step in steps)
    times_last = Counter(match.last_rank for match in synchronizing)
    rows = []
    for rank in ranks:
        others = [step for step in steps if step.rank != rank]
        cost_of_step = {
            number: fmean(step.waited_for.get(rank, 0.0) for step in others if step.step == number)
            for number in sorted({step.step for step in others})
        }
        costs = list(cost_of_step.values())
        if not any(cost > 0 for cost in costs):
            continue
        lateness = [match.lateness for match in synchronizing if match.last_rank == rank]
        late = [step for step, cost in cost_of_step.items() if cost > _NOTABLE_SHARE * length]
        # If at most half of the steps cause more than two thirds of the cost, the small delays in
        # the other steps are random, and only these steps count as late.
        large = large_values(cost_of_step, _NOTABLE_SHARE * length)
        few = len(large) <= len(costs) / 2
        if few and sum(cost_of_step[step] for step in large) > 2 / 3 * sum(costs):
            late = large
        steady = len(late) > len(costs) / 2
        cost = median(costs) if steady else fmean(costs)
        share = cost / length
        # If only some steps are late, the excess is computed from these steps.
        excess = _largest_excess(
            rank, [step for step in steps if steady or not late or step.step in late]
        )
        late_seconds = sum(lateness) / len(costs)
        waited = dict.fromkeys((str(other) for other in ranks if other != rank), 0.0)
        for step in others:
            waited[str(step.rank)] += step.waited_for.get(rank, 0.0)
        rows.append(
            {
                "rank": rank,
                "straggler": share >= _NOTABLE_SHARE,
                "steady": steady,
                "cost_s": summarize(costs) | {"typical": cost},
                "cost_share": share,
                "steps": len(late),
                "of_steps": len(costs),
                "late_steps": late,
                "late_cost_s": median(cost_of_step[step] for step in late) if late else 0.0,
                "period": None if steady else find_period(late, list(cost_of_step)),
                "last": times_last[rank],
                "of_collectives": len(synchronizing),
                "late_by_s": summarize(lateness) if lateness else None,
                "excess": excess,
                "gain_s": max(0.0, min(fmean(costs), late_seconds, excess["seconds"])),
                "made_wait": waited,
            }
        )
    return sorted(rows, key=lambda row: -row["cost_s"]["mean"])


def late_rank(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the row of `stragglers[]` with the largest gain, or None.

    Ranks that are late in most steps take precedence. A rank that is late in few steps, without a
    period, is considered only if its cost is at least twice the cost of any other rank. Otherwise
    the ranks wait for each other at random. If a row has no `gain_s`, because an older version
    wrote the file, the cost is used instead.
    """
    found = []
    for row in rows:
        cost = row["cost_s"]["mean"]
        gain = row.get("gain_s", cost)
        if gain * row["cost_share"] >= _NOTABLE_SHARE * cost and not is_late_by_chance(row, rows):
            found.append((row["steady"], gain, row))
    return max(found, key=lambda each: each[:2])[2] if found else None


def is_late_by_chance(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a rank is late at random: in few steps, without a period, like other ranks."""
    others = max((each["cost_s"]["mean"] for each in rows if each is not row), default=0.0)
    is_rare = not row["steady"] and row["period"] is None
    return bool(is_rare and row["cost_s"]["mean"] < 2 * others)


def large_values(values: Mapping[int, float], least: float) -> list[int]:
    """Return the steps whose value is more than `least` and more than half of the largest value.

    One or two outliers may be much larger than the values of periodically late steps. Therefore the
    second or the third largest value replaces the largest value if the result then has a period.
    """
    found: list[list[int]] = []
    for largest in sorted(values.values(), reverse=True)[:3]:
        limit = max(least, largest / 2)
        found.append([step for step, value in values.items() if value > limit])
        few = len(found[-1]) <= len(values) / 2
        if few and find_period(found[-1], list(values)) is not None:
            return found[-1]
    return found[0] if found else []


def find_period(late: Sequence[int], steps: Sequence[int]) -> int | None:
    """Return the number of steps between late steps if it is constant, or None.

    Both arguments are sorted lists of step numbers. Step numbers may be missing. A period p means
    that exactly the steps r, r + p, r + 2p, … are late. A period p is accepted only if `steps` has
    at least 2p entries, because two steps that are late at random are often far apart. If every
    step is late, the period is 1. With fewer than two late steps, the result is None.
    """
    if len(late) < 2:
        return None
    found = set(late)
    for period in range(1, len(steps) // 2 + 1):
        if found == {step for step in steps if (step - late[0]) % period == 0}:
            return period
    return None


def _largest_excess(rank: int, steps: Sequence[StepBreakdown]) -> dict[str, Any]:
    """Return the part that takes longer on this rank than on the other ranks, and the excess.

    The excess is relative to the mean of the other ranks. The part with the largest excess is
    probably the cause of the delay.
    """
    excess = {
        name: fmean(step.parts[name] for step in steps if step.rank == rank)
        - fmean(step.parts[name] for step in steps if step.rank != rank)
        for name in ("compute", "input", "host_gap", "rest")
    }
    part = max(excess, key=lambda name: excess[name])
    return {"part": part, "seconds": excess[part]}


def lateness_text(row: Mapping[str, Any]) -> str:
    """Return how often a straggler is late, for example `is late by 80.0 ms in every 5th step`."""
    if row["steady"]:
        return "is late"
    share = f"{100 * row['steps'] / row['of_steps']:.0f} % of the steps"
    delay = f"is late by {1e3 * row['late_cost_s']:.1f} ms"
    if row["period"] is None:
        return f"{delay} in {share}"
    return f"{delay} in every {ordinal(row['period'])} step ({share})"


def excess_text(excess: Mapping[str, Any]) -> str:
    """Return the text of a straggler's `excess`, for example `computes 46.1 ms longer`."""
    longer = f"{1e3 * excess['seconds']:.1f} ms longer"
    return {
        "compute": f"computes {longer}",
        "input": f"waits {longer} for input",
        "host_gap": f"spends {longer} in gaps",
    }.get(excess["part"], f"spends {longer} in the part rest")
