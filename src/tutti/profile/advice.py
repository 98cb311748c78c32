"""What to try, and what it would gain: one function for each kind of finding, in reading order.

Gains are computed from the trace, by arithmetic that each function states, and never add up: two
ways to shorten the same wait shorten it once. A gain that the trace cannot tell is None, and the
text says why.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from tutti.profile.buckets import format_bytes, in_step
from tutti.profile.matching import Meeting
from tutti.profile.parts import StepParts
from tutti.profile.rank_trace import RankTrace
from tutti.profile.what_if import WhatIf, fit

# A gain below this share of the step is not worth a reader's time.
WORTH = 0.02
_BUCKET_MB = (1, 2, 5, 10, 25, 50, 100, 200)
_MB = 1 << 20  # as DDP's bucket_cap_mb counts
_FULL = 0.9  # of a device's memory

Advice = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A traced run, and the mean of its step over ranks."""

    traces: Sequence[RankTrace]
    steps: Sequence[StepParts]
    meetings: Sequence[Meeting]
    stragglers: Sequence[dict[str, Any]]

    @property
    def count(self) -> int:
        """How many steps were traced."""
        return len({each.step for each in self.steps})

    @property
    def step_s(self) -> float:
        return mean(each.seconds for each in self.steps)

    def part(self, name: str, rank: int | None = None) -> float:
        """Seconds of a part in a step, of one rank or of all in the mean."""
        return mean(each.parts[name] for each in self.steps if rank in (None, each.rank))

    def share(self, name: str) -> float:
        return self.part(name) / self.step_s

    def exposed(self, axis: str | None, bucket: bool | None = None) -> float:
        """Exposed seconds of a step on an axis; only of DDP's buckets, or only of the others."""
        return sum(
            parts["exposed"] / len(self.steps)
            for each in self.steps
            for (on, is_bucket), parts in each.talk.items()
            if on == axis and bucket in (None, is_bucket)
        )

    def per_step(self, operation: str, axis: str) -> list[Meeting]:
        return [
            each
            for each in self.meetings
            if each.any.operation == operation and each.any.axis == axis
        ]


def advise(case: Case) -> list[Advice]:
    """All that is worth trying, the largest gain first."""
    kinds = (
        *(_buckets, _overlap, _grouping, _replicas, _sharding),
        *(_input, _stragglers, _binding, _microbatches, _gaps),
    )
    found = [each for kind in kinds for each in kind(case) if _is_worth(each)]
    found += [each for each in _accumulation(case, found) if _is_worth(each)]
    return sorted(found, key=lambda each: -(each["gain_s"] or 0.0))


def _is_worth(each: Advice) -> bool:
    return each["gain_s"] is None or each["gain_share"] > WORTH


def _advice(
    case: Case,
    name: str,
    cause: str,
    finding: str,
    try_: str,
    gain: float | None,
    remains: float | None = None,
) -> Advice:
    """`remains`: seconds of the cause that stay; unless given, what the gain leaves of it."""
    now = case.part(cause)
    share = None
    if gain is not None:
        left = max(0.0, now - gain if remains is None else remains)
        share = left / (case.step_s - gain)
    return {
        "id": name,
        "finding": finding,
        "try": try_.replace("{remains}", "?" if share is None else f"{100 * share:.0f} %"),
        "share": now / case.step_s,
        "gain_s": gain,
        "gain_share": None if gain is None else gain / case.step_s,
        "remains_share": share,
        "cause": cause,
    }


def _exposed_is(case: Case) -> str:
    return f"exposed communication is {100 * case.share('exposed'):.0f} % of the step"


def _buckets(case: Case) -> Iterator[Advice]:
    """DDP's buckets in other sizes: see WhatIf."""
    seen = case.exposed("dp", bucket=True)
    sums = case.per_step("all_reduce", "dp")
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
    bound = (
        ""
        if cost.apart
        else ", at best: messages of one size do not tell what larger ones would take"
    )
    yield _advice(
        case,
        "buckets",
        "exposed",
        f"{_exposed_is(case)}, with {count} bucket{'s' * (count != 1)} of up to {largest}",
        f"with buckets of {size} MB{one} {{remains}} would remain{bound}: "
        f"DDP(bucket_cap_mb={size}), tutti train --bucket-mb {size}",
        gains[size],
        seconds,
    )


def _overlap(case: Case) -> Iterator[Advice]:
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
                and first <= each.arrival < step.end
            ]
            if any(each.arrival < end for each in sums):
                return
            late += sums
            room.append(trace.compute.between(first, end).seconds)
    exposed = case.exposed("dp")
    if late and exposed > 0:
        yield _advice(
            case,
            "overlap",
            "exposed",
            f"{_exposed_is(case)}; gradients are summed after backward, which could hide "
            f"{1e3 * mean(room):.1f} ms",
            "summed while backward runs, {remains} would remain: DistributedDataParallel does it",
            min(exposed, mean(room)),
        )


def _grouping(case: Case) -> Iterator[Advice]:
    """Many small messages: all but one of their latencies α go away when they are sent as one."""
    small = [each for each in case.per_step("all_reduce", "dp") if each.any.ready is None]
    count = len(small) / case.count
    cost = fit([(each.any.bytes, each.transfer) for each in case.per_step("all_reduce", "dp")])
    if cost is None or count < 4:
        return
    sent = sum(each.any.bytes for each in small) / case.count
    bound = "" if cost.apart else ", at best: messages of one size do not tell what one would take"
    yield _advice(
        case,
        "grouping",
        "exposed",
        f"{_exposed_is(case)}; {count:.0f} all-reduces carry {format_bytes(sent)} of a step",
        f"sent as one, {{remains}} would remain{bound}: flatten the tensors, or use DDP",
        min(case.exposed("dp", bucket=False), cost.alpha * (count - 1)),
    )


def _accumulation(case: Case, found: Sequence[Advice]) -> Iterator[Advice]:
    """k microbatches to a step: gradients are summed once for k times the samples.

    It changes what is trained, so it is for what the other cures leave.
    """
    gained = max((each["gain_s"] or 0.0 for each in found if each["cause"] == "exposed"), default=0)
    exposed = case.exposed("dp") - gained
    others = case.step_s - gained - exposed
    if exposed <= 0:
        return
    # The first k that leaves 5 % of the step.
    k = next((k for k in (2, 4, 8) if exposed / k / (others + exposed / k) <= 0.05), 8)
    yield _advice(
        case,
        "accumulation",
        "exposed",
        f"{_exposed_is(case)}; sums of gradients are {1e3 * exposed:.1f} ms of it"
        + (", after what is said of them above" if gained else ""),
        f"accumulated over {k} batches, or with {k} times the batch on each rank, {{remains}} "
        f"would remain; {k} times the global batch asks for another learning rate",
        exposed * (1 - 1 / k),
        case.part("exposed") - gained - exposed * (1 - 1 / k),
    )


def _replicas(case: Case) -> Iterator[Advice]:
    """Sharding gathers twice and scatters once where replicas all-reduce: 3 parts against 2."""
    exposed = case.exposed("shard")
    gathered = case.per_step("all_gather", "shard")
    if exposed <= 0 or not gathered or not case.per_step("reduce_scatter", "shard"):
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
        yield _advice(
            case,
            "replicas",
            "exposed",
            f"{_exposed_is(case)}, {1e3 * exposed:.1f} ms of it sharding, and memory is free",
            f"replicas move 2/3 of the bytes: {{remains}} would remain, and each device would hold "
            f"about {more / 1e9:.1f} GB more",
            exposed / 3,
        )


def _sharding(case: Case) -> Iterator[Advice]:
    """Memory nearly full with replicas: sharding makes room, at the price of more bytes."""
    full = [
        trace.memory_bytes / trace.device_bytes
        for trace in case.traces
        if trace.device_bytes and trace.memory_bytes
    ]
    if full and max(full) > _FULL and case.per_step("all_reduce", "dp"):
        yield _advice(
            case,
            "sharding",
            "exposed",
            f"memory is {100 * max(full):.0f} % full, and every rank holds the whole model",
            "shard parameters (FSDP, --layout shardN) to make room for a larger batch; it moves "
            "1.5 times the bytes, so time is not gained but memory, and how much the trace "
            "does not tell",
            None,
        )


def _input(case: Case) -> Iterator[Advice]:
    """Loading that hides behind the rest of the step: load / rest workers, at least one."""
    loads = {trace.rank: case.part("input", trace.rank) for trace in case.traces}
    rank = max(loads, key=lambda each: loads[each])
    load = loads[rank]
    # Its own time without waiting for others: they wait for its data, too.
    rest = case.step_s - load
    others = mean(seconds for each, seconds in loads.items() if each != rank or len(loads) == 1)
    whom = "a rank" if load < 2 * others or len(loads) == 1 else f"rank {rank}"
    workers = math.ceil(load / rest) if rest > 0 else 1
    many = f"{workers} worker{'s' * (workers != 1)}"
    yield _advice(
        case,
        "input",
        "input",
        f"{whom} waits {1e3 * load:.1f} ms of a step ({100 * load / case.step_s:.0f} %) for its "
        "data",
        "with enough workers (it has some: the trace does not tell how many) none would remain"
        if any(trace.has_loader_workers for trace in case.traces)
        else f"with {many} loading while the rest runs none would remain: "
        f"DataLoader(num_workers={workers})",
        load,
        0.0,
    )


def _stragglers(case: Case) -> Iterator[Advice]:
    """A late rank: what others wait for it, at most what it is later than the second latest, and
    what it has more of than they have. Waiting that nothing explains is chance, not a straggler.
    """
    for row in case.stragglers:
        part = row["instead"]["part"]
        if not (row["straggler"] and row["steady"]) or part == "input":
            continue
        late = (row["late_by_s"] or {"mean": 0.0})["mean"] * row["last"] / case.count
        more = f"{1e3 * row['instead']['seconds']:.1f} ms more of {part.replace('_', ' ')}"
        yield _advice(
            case,
            "straggler",
            "wait",
            f"others wait {1e3 * row['cost_s']['mean']:.1f} ms of a step for rank {row['rank']}, "
            f"which has {more}",
            f"{_cure(case, row['rank'], part)}; as fast as the others, {{remains}} of waiting "
            "would remain",
            min(row["cost_s"]["mean"], late, row["instead"]["seconds"]),
        )


def _cure(case: Case, rank: int, part: str) -> str:
    if part != "compute":
        return "look at what its Python does between operators"
    work = {trace.rank: trace.work / len(trace.steps) for trace in case.traces}
    others = mean(value for each, value in work.items() if each != rank)
    if others and work[rank] > 1.1 * others:
        return f"split the batch evenly: it has {work[rank] / others:.1f} times the work"
    if others:
        return "it has no more work: look at its clock, its cores, who else runs there"
    return "compare its batch and its device with the others'"


def _binding(case: Case) -> Iterator[Advice]:
    """Equal work that takes longer on some ranks of a host: all could take the mean."""
    for host in sorted({trace.host for trace in case.traces}):
        here = [trace for trace in case.traces if trace.host == host]
        cpus = {cpu for trace in here for cpu in trace.about.get("cpus") or ()}
        if len(here) < 2 or not cpus or any(trace.on_device for trace in here):
            continue
        threads = sum(int(trace.about.get("threads") or 0) for trace in here)
        takes = [case.part("compute", t.rank) + case.part("hidden", t.rank) for t in here]
        work = [trace.work / len(trace.steps) for trace in here]
        gain = max(takes) - mean(takes)
        known = min(work) > 0 and max(work) < 1.02 * min(work) and gain > WORTH * case.step_s
        if not known and threads <= len(cpus):
            continue
        finding = (
            f"the same operators take {1e3 * min(takes):.1f} to {1e3 * max(takes):.1f} ms"
            if known
            else f"{len(here)} ranks have {threads} threads"
        )
        each = len(cpus) // len(here)
        cure = "bind each rank to CPUs of its own (taskset; tutti run does it)"
        if threads > len(cpus):
            cure += f", with {each} threads (OMP_NUM_THREADS={each})" if each else ""
        yield _advice(
            case,
            "binding",
            "wait",
            f"{finding} on the {len(cpus)} CPUs of {host or 'a host'}",
            (cure if each else f"start at most {len(cpus)} ranks there")
            + (
                "" if known else ": what is gained the trace does not tell, as all are slowed alike"
            ),
            gain if known else None,
        )


def _microbatches(case: Case) -> Iterator[Advice]:
    """A pipeline of p stages idles for (p - 1) / m of its work: half as long with 2 m."""
    bubble = case.part("bubble")
    received = [
        sum(
            1
            for each in trace.collectives
            if each.operation in ("recv", "send_recv") and step.start <= each.arrival < step.end
        )
        for trace in case.traces
        for step in trace.steps
    ]
    if bubble <= 0 or not any(received):
        return
    # The last stage receives activations only: one for each microbatch.
    count = min(each for each in received if each)
    yield _advice(
        case,
        "microbatches",
        "bubble",
        f"the pipeline's bubble is {100 * case.share('bubble'):.0f} % of the step, with {count} "
        f"microbatch{'es' * (count != 1)}",
        f"with {2 * count} of half the size {{remains}} would remain "
        f"(--accumulation {2 * count}), if those compute as well as larger ones",
        bubble / 2,
    )


def _gaps(case: Case) -> Iterator[Advice]:
    """A GPU without work: at most all of it goes when the host launches less."""
    if any(trace.on_device for trace in case.traces):
        yield _advice(
            case,
            "gaps",
            "host_gap",
            f"the GPU has nothing to do for {100 * case.share('host_gap'):.0f} % of the step",
            "launch less: torch.compile, CUDA graphs, fewer .item() and print; {remains} would "
            "remain at best",
            case.part("host_gap"),
        )
