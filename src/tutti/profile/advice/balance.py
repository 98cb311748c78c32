"""Advice on time that is lost beside communication: input, late ranks, bubbles, a host too slow."""

import math
from collections.abc import Iterator
from statistics import mean

from tutti.profile.advice.case import WORTH, Advice, Case, advice
from tutti.profile.parts import PART_TITLES


def input_(case: Case) -> Iterator[Advice]:
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
    yield advice(
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


def stragglers(case: Case) -> Iterator[Advice]:
    """A late rank: what others wait for it, at most what it is later than the second latest, and
    what it has more of than they have. Waiting that nothing explains is chance, not a straggler.
    """
    for row in case.stragglers:
        part = row["instead"]["part"]
        if not (row["straggler"] and row["steady"]) or part == "input":
            continue
        late = (row["late_by_s"] or {"mean": 0.0})["mean"] * row["last"] / case.count
        more = f"{1e3 * row['instead']['seconds']:.1f} ms more of {PART_TITLES.get(part, part)}"
        yield advice(
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


def binding(case: Case) -> Iterator[Advice]:
    """Equal work that takes longer on some ranks that share CPUs: all could take the mean."""
    for host in sorted({trace.host for trace in case.traces}):
        here = [trace for trace in case.traces if trace.host == host]
        cpus = {cpu for trace in here for cpu in trace.about.get("cpus") or ()}
        alone = sum(len(trace.about.get("cpus") or ()) for trace in here) == len(cpus)
        if len(here) < 2 or not cpus or alone or any(trace.on_device for trace in here):
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
        yield advice(
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


def microbatches(case: Case) -> Iterator[Advice]:
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
    yield advice(
        case,
        "microbatches",
        "bubble",
        f"the pipeline's bubble is {100 * case.share('bubble'):.0f} % of the step, with {count} "
        f"microbatch{'es' * (count != 1)}",
        f"with {2 * count} of half the size {{remains}} would remain "
        f"(--accumulation {2 * count}), if those compute as well as larger ones",
        bubble / 2,
    )


def gaps(case: Case) -> Iterator[Advice]:
    """A GPU without work: at most all of it goes when the host launches less."""
    if any(trace.on_device for trace in case.traces):
        yield advice(
            case,
            "gaps",
            "host_gap",
            f"the GPU has nothing to do for {100 * case.share('host_gap'):.0f} % of the step",
            "launch less: torch.compile, CUDA graphs, fewer .item() and print; {remains} would "
            "remain at best",
            case.part("host_gap"),
        )
