"""Advice on what to try, and the time that it would save. Each kind of finding has one function.

The texts are in advice.toml. Gains are computed from the trace with a formula that each function
states. Gains do not add up: two changes that remove the same wait remove it only once. A gain that
cannot be computed from the trace is None, and the text gives the reason.
"""

import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tutti.measure.units import format_bytes
from tutti.profile.collective_matching import MatchedCollective
from tutti.profile.rank_trace import RankTrace
from tutti.profile.step_breakdown import StepBreakdown, buckets_in, excess_text, late_rank
from tutti.profile.what_if import BucketModel, MessageCost, fit_message_cost

_MIN_GAIN = 0.02  # share of the step. Smaller gains are not listed.
_BUCKET_SIZES = (1, 2, 5, 10, 25, 50, 100, 200)  # MiB
_MIB = 1 << 20  # DDP's bucket_cap_mb counts MiB
_LARGEST_SCALAR = 1024  # bytes. A smaller all-reduce is a loss, not a gradient.
_MEMORY_FULL = 0.9  # share of the device's memory
# Advice that shortens the all-reduces of gradients. The gain of gradient accumulation is computed
# from the time of all-reduces that remains after this advice.
_GRADIENT_ADVICE = ("buckets", "overlap", "grouping")
_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

Advice = dict[str, Any]


@dataclass(frozen=True)
class ProfiledRun:
    """The data from which advice is computed."""

    traces: Sequence[RankTrace]
    steps: Sequence[StepBreakdown]
    matched: Sequence[MatchedCollective]
    stragglers: Sequence[dict[str, Any]]

    @property
    def step_count(self) -> int:
        return len({step.step for step in self.steps})

    @property
    def step_s(self) -> float:
        """Seconds of a step, mean over ranks and steps."""
        return fmean(step.seconds for step in self.steps)

    def part(self, name: str, rank: int | None = None) -> float:
        """Return the seconds of a part per step, of one rank or as the mean over ranks."""
        return fmean(step.parts[name] for step in self.steps if rank in (None, step.rank))

    def exposed(self, axis: str | None, bucket: bool | None = None) -> float:
        """Return the exposed seconds per step on an axis.

        `bucket` selects DDP buckets (True), other collectives (False) or both (None).
        """
        return sum(
            parts["exposed"] / len(self.steps)
            for step in self.steps
            for (on_axis, is_bucket), parts in step.by_kind.items()
            if on_axis == axis and bucket in (None, is_bucket)
        )

    def device_memory(self) -> list[tuple[int, int]]:
        """Return (used bytes, total bytes) of the devices for which both are known."""
        pairs = [(trace.memory_bytes, trace.device_bytes) for trace in self.traces]
        return [(used, device) for used, device in pairs if used and device]

    def collectives(self, operation: str, axis: str) -> list[MatchedCollective]:
        kind = (operation, axis)
        return [call for call in self.matched if (call.first.operation, call.first.axis) == kind]


def advise(run: ProfiledRun) -> list[Advice]:
    """Return all advice worth trying, the largest gain first.

    Gradient accumulation changes the training, so it comes after the advice that shortens the
    all-reduces of gradients.
    """
    kinds = (
        _bucket_size,
        _overlap,
        _grouping,
        _replicate,
        _shard,
        _input,
        _straggler,
        _cpu_binding,
        _microbatches,
        _gpu_gaps,
    )
    found = [advice for kind in kinds for advice in kind(run) if _is_worth_it(advice)]
    found.sort(key=_gain, reverse=True)
    for advice in filter(_is_worth_it, _accumulation(run, found)):
        position = 0
        for number, other in enumerate(found, 1):
            if other["id"] in _GRADIENT_ADVICE or _gain(other) >= _gain(advice):
                position = number
        found.insert(position, advice)
    return found


def _is_worth_it(advice: Advice) -> bool:
    return advice["gain_s"] is None or advice["gain_share"] > _MIN_GAIN


def _gain(advice: Advice) -> float:
    return advice["gain_s"] or 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _advice(
    run: ProfiledRun,
    name: str,
    gain: float | None,
    *,
    remains: float | None = None,
    gained: float = 0.0,
    **values: Any,
) -> Advice:
    """Return one entry of `advice[]`. `values` are the values in the texts of advice.toml.

    `remains` is the time per step of the cause that remains. By default, it is the present time
    minus `gain`. `gained` is the time per step that other advice saves first.
    """
    texts = _TEXTS[name]
    now = run.part(texts["cause"])
    share_left = None
    if gain is not None:
        left = max(0.0, now - gained - gain if remains is None else remains)
        length = run.step_s - gained - gain
        share_left = left / length if length > 0 else 0.0
    text = texts["try"]
    if all(trace.of_tutti_train for trace in run.traces):
        text = texts.get("tutti_train", text)
    values |= {"share": _percent(now / run.step_s), "remains": _percent(share_left or 0.0)}
    return {
        "id": name,
        "finding": texts["finding"].format_map(values),
        "try": text.format_map(values),
        "share": now / run.step_s,
        "gain_s": gain,
        "gain_share": None if gain is None else gain / run.step_s,
        "remains_share": share_left,
        "cause": texts["cause"],
    }


def _message_cost(messages: Sequence[MatchedCollective]) -> tuple[MessageCost | None, str]:
    """Return the fitted cost of a message, and a text that qualifies a gain computed from it."""
    cost = fit_message_cost([(call.first.bytes, call.transfer_seconds) for call in messages])
    if cost is None or cost.separated:
        return cost, ""
    return cost, ", at best (latency unknown: all messages have about the same size)"


def _bucket_size(run: ProfiledRun) -> Iterator[Advice]:
    """Yield advice on the size of DDP buckets. The gain is computed with BucketModel."""
    exposed = run.exposed("dp", bucket=True)
    all_reduces = run.collectives("all_reduce", "dp")
    buckets = [match for match in all_reduces if match.first.bucket_ready is not None]
    # All-reduces that are not buckets run under other conditions, so they are used for the fit only
    # if there is a single bucket per step.
    one_bucket = len({call.first.bytes for call in buckets}) == 1 and len(buckets) <= run.step_count
    cost, bound = _message_cost(all_reduces if one_bucket else buckets)
    if cost is None or exposed <= 0:
        return
    model = BucketModel(run.traces, cost, exposed)
    total = max(map(sum, model.sizes), default=0)
    if model.ratio is None or not total:  # the trace has no sizes
        return
    # The first size that holds all gradients gives one bucket, so larger sizes change nothing.
    enough = next((size for size in _BUCKET_SIZES if size * _MIB >= total), math.ceil(total / _MIB))
    sizes = [size for size in sorted({*_BUCKET_SIZES, enough}) if size <= enough]
    results = {size: model.with_bucket_size(size * _MIB) for size in sizes}
    gains = {size: model.recorded.added - result.added for size, result in results.items()}
    best = max(gains.values())
    # Among equally good sizes choose the smallest, because its transfers start first, and it needs
    # the least memory.
    size = next(size for size in sizes if gains[size] >= best - 0.01 * run.step_s)
    count = round(fmean(map(len, model.sizes)))
    yield _advice(
        run,
        "buckets",
        gains[size],
        remains=run.part("exposed") - exposed + sum(results[size]),
        count=count,
        s="s" * (count != 1),
        largest=format_bytes(max(map(max, model.sizes))),
        size=size,
        one=" (one bucket)" if size * _MIB >= total else "",
        bound=bound,
    )


def _overlap(run: ProfiledRun) -> Iterator[Advice]:
    """Yield advice if gradients are reduced after backward, although compute could hide this."""
    reduced_late, hideable = False, []
    for trace in run.traces:
        for step in trace.steps:
            if step.gradients is None or buckets_in(trace, step):
                return
            first, end = step.gradients
            arrivals = [
                call.arrival
                for call in trace.collectives
                if (call.operation, call.axis) == ("all_reduce", "dp")
                and call.bytes > _LARGEST_SCALAR
                and first <= call.arrival < step.end
            ]
            if any(arrival < end for arrival in arrivals):
                return
            reduced_late |= bool(arrivals)
            hideable.append(trace.compute.between(first, end).seconds)
    exposed = run.exposed("dp")
    if reduced_late and exposed > 0:
        gain = min(exposed, fmean(hideable))
        yield _advice(run, "overlap", gain, hideable_ms=1e3 * fmean(hideable))


def _grouping(run: ProfiledRun) -> Iterator[Advice]:
    """Yield advice if there are many small messages. As one message, they cost one latency α."""
    all_reduces = run.collectives("all_reduce", "dp")
    small = [match for match in all_reduces if match.first.bucket_ready is None]
    count = len(small) / run.step_count
    cost, bound = _message_cost(all_reduces)
    if cost is None or count < 4:
        return
    size = format_bytes(sum(match.first.bytes for match in small) / run.step_count)
    gain = min(run.exposed("dp", bucket=False), cost.alpha * (count - 1))
    yield _advice(run, "grouping", gain, count=count, size=size, bound=bound)


def _replicate(run: ProfiledRun) -> Iterator[Advice]:
    """Yield advice to replicate. Replicas move 2/3 of the bytes that sharding moves."""
    exposed = run.exposed("shard")
    gathered = run.collectives("all_gather", "shard")
    if exposed <= 0 or not gathered or not run.collectives("reduce_scatter", "shard"):
        return
    ranks = gathered[0].first.group_size or len(gathered[0].members)
    # Parameters are gathered for forward and for backward. Replicas hold the parameters, the
    # gradients and Adam's two states in full instead of a shard of each.
    model = sum(match.first.bytes for match in gathered) / run.step_count / 2
    more = 4 * model * (1 - 1 / ranks)
    memory = run.device_memory()
    free = min((device * _MEMORY_FULL - used for used, device in memory), default=0)
    if len(memory) == len(run.traces) and more < free:
        values = {"exposed_ms": 1e3 * exposed, "more_gb": more / 1e9, "ranks": ranks}
        yield _advice(run, "replicas", exposed / 3, **values)


def _shard(run: ProfiledRun) -> Iterator[Advice]:
    """Yield advice to shard if replicas nearly fill the memory. Sharding moves more bytes."""
    full = max((used / device for used, device in run.device_memory()), default=0)
    if full > _MEMORY_FULL and run.collectives("all_reduce", "dp"):
        yield _advice(run, "sharding", None, used=_percent(full))


def _accumulation(run: ProfiledRun, found: Sequence[Advice]) -> Iterator[Advice]:
    """Yield advice to use k microbatches: gradients are reduced once for k times the samples."""
    others = [_gain(advice) for advice in found if advice["id"] in _GRADIENT_ADVICE]
    gained = max(others, default=0.0)
    exposed = run.exposed("dp") - gained
    rest = run.step_s - gained - exposed
    if exposed <= 0:
        return
    # k is the first number with which at most 5 % of the step is exposed.
    k = next((k for k in (2, 4, 8) if exposed / k / (rest + exposed / k) <= 0.05), 8)
    after = " after the other advice" if gained else ""
    gain = exposed * (1 - 1 / k)
    yield _advice(
        run, "accumulation", gain, gained=gained, exposed_ms=1e3 * exposed, after=after, k=k
    )


def _input(run: ProfiledRun) -> Iterator[Advice]:
    """Yield advice to load data during the rest of the step, which needs load / rest workers."""
    loads = {trace.rank: run.part("input", trace.rank) for trace in run.traces}
    rank = max(loads, key=lambda each: loads[each])
    load = loads.pop(rank)
    # The load time of this rank counts, not the mean, because the other ranks wait for it, too.
    rest = run.step_s - load
    waiter = f"rank {rank}" if loads and load >= 2 * fmean(loads.values()) else "a rank"
    workers = math.ceil(load / rest) if rest > 0 else 1
    cure = f"DataLoader(num_workers={workers})"
    if any(trace.has_loader_workers for trace in run.traces):
        cure = "more loader workers (the trace does not contain their number)"
    time = f"{1e3 * load:.1f} ms per step ({_percent(load / run.step_s)})"
    yield _advice(
        run, "input", load, remains=0.0, waiter=waiter, time=time, cure=cure, workers=workers
    )


def _straggler(run: ProfiledRun) -> Iterator[Advice]:
    """Yield the late rank, if it is late in most steps. `straggler_rows` defines the gain."""
    row = late_rank(run.stragglers)
    if row is None or not row["steady"] or row["excess"]["part"] == "input":
        return
    values = {"cost_ms": 1e3 * row["cost_s"]["mean"], "excess": excess_text(row["excess"])}
    cure = _straggler_cure(run, row["rank"], row["excess"]["part"])
    yield _advice(run, "straggler", row["gain_s"], rank=row["rank"], cure=cure, **values)


def _straggler_cure(run: ProfiledRun, rank: int, part: str) -> str:
    if part != "compute":
        return f"Look at the Python code of rank {rank} between operators"
    estimates = {trace.rank: trace.compute_estimate / len(trace.steps) for trace in run.traces}
    estimate = estimates.pop(rank)
    others = fmean(estimates.values())
    if others and estimate > 1.1 * others:
        return f"Split the batch evenly: rank {rank} has {estimate / others:.1f} times the work"
    if others:
        return (
            "It has the same work but is slower: check clock speed, CPU cores and other programs "
            "on its host"
        )
    return f"Compare the batch and the device of rank {rank} with those of the other ranks"


def _cpu_binding(run: ProfiledRun) -> Iterator[Advice]:
    """Yield advice to bind ranks to separate CPUs. Then each rank could take the mean time."""
    for host in sorted({trace.host for trace in run.traces}):
        traces = [trace for trace in run.traces if trace.host == host]
        cpu_lists = [trace.capture_info.get("cpus") or () for trace in traces]
        cpus = {cpu for cpu_list in cpu_lists for cpu in cpu_list}
        separate = sum(map(len, cpu_lists)) == len(cpus)
        if len(traces) < 2 or not cpus or separate or any(trace.on_device for trace in traces):
            continue
        threads = sum(int(trace.capture_info.get("threads") or 0) for trace in traces)
        times = [run.part("compute", t.rank) + run.part("hidden", t.rank) for t in traces]
        work = [trace.compute_estimate / len(trace.steps) for trace in traces]
        gain = max(times) - fmean(times)
        uneven = min(work) > 0 and max(work) < 1.02 * min(work) and gain > _MIN_GAIN * run.step_s
        if not uneven and threads <= len(cpus):
            continue
        cpus_per_rank = len(cpus) // len(traces)
        load = f"{len(traces)} ranks use {threads} threads"
        if uneven:
            load = f"the same operators take {1e3 * min(times):.1f} to {1e3 * max(times):.1f} ms"
        cure = "Bind each rank to its own CPUs with taskset, as tutti run does"
        if not cpus_per_rank:
            cure = f"Start at most {len(cpus)} ranks on this host"
        elif threads > len(cpus):
            cure += f", with {cpus_per_rank} threads (OMP_NUM_THREADS={cpus_per_rank})"
        if not uneven:
            cure += ". The trace does not show the gain, because all ranks are slowed equally"
        known_gain = gain if uneven else None
        yield _advice(
            run, "binding", known_gain, load=load, cpus=len(cpus), host=host or "a host", cure=cure
        )


def _microbatches(run: ProfiledRun) -> Iterator[Advice]:
    """Yield advice on microbatches. The bubble of p stages is (p - 1) / m of the work."""
    bubble = run.part("bubble")
    receives = [
        sum(call.operation in ("recv", "send_recv") for call in trace.collectives_called_in(step))
        for trace in run.traces
        for step in trace.steps
    ]
    if bubble <= 0 or not any(receives):
        return
    # The last stage receives only activations, once for each microbatch.
    count = min(filter(None, receives))
    yield _advice(
        run, "microbatches", bubble / 2, count=count, es="es" * (count != 1), doubled=2 * count
    )


def _gpu_gaps(run: ProfiledRun) -> Iterator[Advice]:
    """Yield advice for an idle GPU. Launching fewer kernels saves at most the idle time."""
    if any(trace.on_device for trace in run.traces):
        yield _advice(run, "gaps", run.part("host_gap"))
