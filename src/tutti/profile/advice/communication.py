"""Advice on communication that is exposed: other buckets, overlap, fewer messages, fewer bytes."""

import math
from collections.abc import Iterator, Sequence
from statistics import mean

from tutti.measure.units import format_bytes
from tutti.profile.advice.case import Advice, Case, advice
from tutti.profile.buckets import in_step
from tutti.profile.what_if import Cost, WhatIf, fit

_BUCKET_MB = (1, 2, 5, 10, 25, 50, 100, 200)
_MB = 1 << 20  # as DDP's bucket_cap_mb counts
_SOME = 1024  # bytes: a loss that is summed to be printed is no gradient
_FULL = 0.9  # of a device's memory
OF_SUMS = ("buckets", "overlap", "grouping")  # advice that shortens sums of gradients


def buckets(case: Case) -> Iterator[Advice]:
    """DDP's buckets in other sizes: see WhatIf."""
    seen = case.exposed("dp", bucket=True)
    sums = case.meetings_of("all_reduce", "dp")
    alike = [each for each in sums if each.any.ready is not None]
    # Other messages run under other conditions; they count where one bucket is all there is.
    alone = len({each.any.bytes for each in alike}) == 1 and len(alike) <= case.count
    cost = fit([(each.any.bytes, each.transfer) for each in (sums if alone else alike)])
    if cost is None or seen <= 0:
        return
    what_if = WhatIf(case.traces, cost, seen)
    if what_if.ratio is None:
        return
    sizes = what_if.sizes
    total = max(sum(each) for each in sizes)
    if not total:  # sizes are not in the trace
        return
    # From the first size that holds everything, all are the same: one bucket.
    enough = next((size for size in _BUCKET_MB if size * _MB >= total), None)
    tried = [size for size in _BUCKET_MB if enough is None or size <= enough]
    if enough is None:
        tried.append(math.ceil(total / _MB))
    gains = {size: what_if.now.added - what_if.with_buckets_of(size * _MB).added for size in tried}
    best = max(gains.values())
    # Among equals the smallest: it starts first, and needs the least memory.
    size = next(size for size in tried if gains[size] >= best - 0.01 * case.step_s)
    after = what_if.with_buckets_of(size * _MB)
    seconds = case.part("exposed") - seen + after.during + after.added
    count, largest = round(mean(map(len, sizes))), format_bytes(max(map(max, sizes)))
    one = " (one bucket)" if size * _MB >= total else ""
    yield advice(
        case,
        "buckets",
        "exposed",
        f"{_exposed_is(case)}, with {count} bucket{'s' * (count != 1)} of up to {largest}",
        f"with buckets of {size} MB{one} {{remains}} would remain{_bound(cost)}: "
        f"DDP(bucket_cap_mb={size}), tutti train --bucket-mb {size}",
        gains[size],
        seconds,
    )


def overlap(case: Case) -> Iterator[Advice]:
    """Gradients summed after backward: backward, from its first gradient on, could hide them."""
    late, room = [], []
    for trace in case.traces:
        for step in trace.steps:
            if step.gradients is None or in_step(trace, step):
                return
            first, end = step.gradients
            sums = [
                each
                for each in trace.collectives
                if (each.operation, each.axis) == ("all_reduce", "dp")
                and each.bytes > _SOME
                and first <= each.arrival < step.end
            ]
            if any(each.arrival < end for each in sums):
                return
            late += sums
            room.append(trace.compute.between(first, end).seconds)
    exposed = case.exposed("dp")
    if late and exposed > 0:
        yield advice(
            case,
            "overlap",
            "exposed",
            f"{_exposed_is(case)}; gradients are summed after backward, which could hide "
            f"{1e3 * mean(room):.1f} ms",
            "summed while backward runs, {remains} would remain: DistributedDataParallel does it",
            min(exposed, mean(room)),
        )


def grouping(case: Case) -> Iterator[Advice]:
    """Many small messages: all but one of their latencies α go away when they are sent as one."""
    small = [each for each in case.meetings_of("all_reduce", "dp") if each.any.ready is None]
    count = len(small) / case.count
    cost = fit([(each.any.bytes, each.transfer) for each in case.meetings_of("all_reduce", "dp")])
    if cost is None or count < 4:
        return
    sent = sum(each.any.bytes for each in small) / case.count
    yield advice(
        case,
        "grouping",
        "exposed",
        f"{_exposed_is(case)}; {count:.0f} all-reduces carry {format_bytes(sent)} of a step",
        f"sent as one, {{remains}} would remain{_bound(cost)}: flatten the tensors, or use DDP",
        min(case.exposed("dp", bucket=False), cost.alpha * (count - 1)),
    )


def replicas(case: Case) -> Iterator[Advice]:
    """Sharding gathers twice and scatters once where replicas all-reduce: 3 parts against 2."""
    exposed = case.exposed("shard")
    gathered = case.meetings_of("all_gather", "shard")
    if exposed <= 0 or not gathered or not case.meetings_of("reduce_scatter", "shard"):
        return
    ranks = gathered[0].any.group_size or len(gathered[0].members)
    # Parameters are gathered for forward and for backward. Whole copies of them, of gradients and
    # of Adam's two states take the place of parts.
    model = sum(each.any.bytes for each in gathered) / case.count / 2
    more = 4 * model * (1 - 1 / ranks)
    room = [
        trace.device_bytes * _FULL - trace.memory_bytes
        for trace in case.traces
        if trace.device_bytes and trace.memory_bytes
    ]
    if room and len(room) == len(case.traces) and more < min(room):
        yield advice(
            case,
            "replicas",
            "exposed",
            f"{_exposed_is(case)}, {1e3 * exposed:.1f} ms of it sharding, and memory is free",
            f"replicas move 2/3 of the bytes: {{remains}} would remain, and each device would hold "
            f"about {more / 1e9:.1f} GB more",
            exposed / 3,
        )


def sharding(case: Case) -> Iterator[Advice]:
    """Memory nearly full with replicas: sharding makes room, at the price of more bytes."""
    full = [
        trace.memory_bytes / trace.device_bytes
        for trace in case.traces
        if trace.device_bytes and trace.memory_bytes
    ]
    if full and max(full) > _FULL and case.meetings_of("all_reduce", "dp"):
        yield advice(
            case,
            "sharding",
            "exposed",
            f"memory is {100 * max(full):.0f} % full, and every rank holds the whole model",
            "shard parameters (FSDP, --layout shardN) to make room for a larger batch; it moves "
            "1.5 times the bytes, so time is not gained but memory, and how much the trace "
            "does not tell",
            None,
        )


def accumulation(case: Case, found: Sequence[Advice]) -> Iterator[Advice]:
    """k microbatches to a step: gradients are summed once for k times the samples.

    It changes what is trained, so it is for what the other cures of such sums leave.
    """
    gained = max((each["gain_s"] or 0.0 for each in found if each["id"] in OF_SUMS), default=0)
    exposed = case.exposed("dp") - gained
    others = case.step_s - gained - exposed
    if exposed <= 0:
        return
    # The first k that leaves 5 % of the step.
    k = next((k for k in (2, 4, 8) if exposed / k / (others + exposed / k) <= 0.05), 8)
    yield advice(
        case,
        "accumulation",
        "exposed",
        f"{_exposed_is(case)}; sums of gradients are {1e3 * exposed:.1f} ms of it"
        + (", after the other cures" if gained else ""),
        f"accumulated over {k} batches, or with {k} times the batch on each rank, {{remains}} "
        f"would remain; {k} times the global batch asks for another learning rate",
        exposed * (1 - 1 / k),
        gained=gained,
    )


def _bound(cost: Cost) -> str:
    return "" if cost.apart else ", at best (messages seen do not tell what larger ones would take)"


def _exposed_is(case: Case) -> str:
    return f"exposed communication is {100 * case.share('exposed'):.0f} % of the step"
