"""Computes advice: changes of the program that save time, and the gain (time saved) of each change.

Each kind of advice has one function. The texts are in advice.toml. The recording does not show
everything that determines the gain. So the gain is computed for each recorded step with several
sets of assumptions. Each set of assumptions gives quartiles of the gain over the steps. The band of
the gain reaches from the lowest first quartile to the highest third quartile of all sets, widened
by the variation of the step times. Advice is offered only if its whole band is above zero. The
gains of two changes do not add up if both changes remove the same wait. `findings_without_gain`
returns findings whose gain cannot be computed from the recording.

The key `change` of an advice tells `tutti profile --try-advice` how to apply the advice. It
contains program settings that program_settings.py can change, or {"flags": {FLAG: VALUE}} for tutti
train. `change` is None if the advice cannot be applied automatically.
"""

import math
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tutti.measure.spread import quartiles
from tutti.measure.units import format_bytes
from tutti.profile.calibration import recording_cpu_seconds
from tutti.profile.collective_matching import MatchedCollective
from tutti.profile.rank_trace import Collective, Intervals, RankTrace, Step
from tutti.profile.step_breakdown import StepBreakdown, buckets_in, excess_text, late_rank
from tutti.profile.what_if import BucketModel, MessageCost, fit_message_cost

# The step times of two runs of the same program may differ by this share, even if all steps within
# a run take the same time.
_RUN_NOISE = 0.03
_LARGEST_SCALAR = 1024  # bytes: a smaller all-reduce reduces a loss, not gradients
_MEMORY_FULL = 0.9  # share of the device's memory
_MAX_WORKERS = 16
# Receiving a batch from a worker process takes at least _FETCH_S seconds, and at most _MAX_FETCH_S
# + bytes × _MAX_FETCH_S_PER_BYTE seconds.
_FETCH_S, _MAX_FETCH_S, _MAX_FETCH_S_PER_BYTE = 1e-4, 1.5e-3, 1e-9
_PAGE_BYTES = 4096
_EVENT_S = 4e-6  # seconds that the profiler adds to a short operator
# A transfer of t seconds lengthens the computation that runs at the same time by factor × t
# seconds. _CONTENTION is the factor if a GPU or a CPU that is free does the transfer.
# _FULL_CONTENTION is the factor if the transfer and the computation use the same CPUs.
_CONTENTION, _FULL_CONTENTION = 0.2, 1.0
# Ids of the advice that shortens gradient all-reduces. The gain of gradient accumulation is
# computed from the all-reduce time that remains after the user has followed this advice.
_GRADIENT_ADVICE = ("no_sync", "buckets", "overlap", "grouping")
_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

Advice = dict[str, Any]


@dataclass(frozen=True)
class ProfiledRun:
    """The data from which advice is computed."""

    traces: Sequence[RankTrace]
    steps: Sequence[StepBreakdown]
    matched: Sequence[MatchedCollective]
    stragglers: Sequence[dict[str, Any]]

    @cached_property
    def step_numbers(self) -> list[int]:
        """The numbers of the steps that all ranks have recorded.

        If there is no such step, the numbers of all recorded steps.
        """
        per_rank = [{step.number for step in trace.steps} for trace in self.traces]
        return sorted(set.intersection(*per_rank)) or sorted(set.union(*per_rank))

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step: the mean over the ranks, then the median over the steps."""
        return median(self.per_step(lambda step: step.seconds))

    @cached_property
    def noise_s(self) -> float:
        """Seconds by which the median step times of two runs may differ by chance.

        The standard error of the difference of two medians is 1.25 σ √2 / √n. σ is estimated from
        the median absolute deviation of the step times.
        """
        lengths = self.per_step(lambda step: step.seconds)
        middle = median(lengths)
        deviation = 1.4826 * median(abs(length - middle) for length in lengths)
        error = 1.2533 * math.sqrt(2) * deviation / math.sqrt(len(lengths))
        return max(_RUN_NOISE * self.step_s, error)

    @cached_property
    def overhead(self) -> float:
        """(Recorded step time) / (unrecorded step time), limited to 1 to 2. It is 1 if unknown.

        On a CPU, the ratio is computed from the CPU time that recording adds, because step times
        may differ for other reasons.
        """
        known = []
        for trace in self.traces:
            length = median(step.seconds for step in self.steps if step.rank == trace.rank)
            cost = None if trace.on_device else recording_cpu_seconds(trace.capture_info)
            if cost is not None:
                known.append(length / max(length - cost, length / 2))
            else:
                known.append(trace.capture_info.get("overhead") or 1.0)
        return min(2.0, max(1.0, median(known)))

    @cached_property
    def program(self) -> dict[str, Any]:
        """The program settings on the first rank. See program_settings.read_settings."""
        return self.traces[0].capture_info.get("program") or {}

    @cached_property
    def is_tutti(self) -> bool:
        return all(trace.of_tutti_train for trace in self.traces)

    @cached_property
    def ddp(self) -> dict[str, Any] | None:
        """The settings of DDP, or None if the program does not have exactly one DDP module."""
        found = self.program.get("ddp") or []
        return found[0] if len(found) == 1 and found[0]["buckets"] else None

    @cached_property
    def cpus_per_rank(self) -> float | None:
        """CPUs per rank on the host with the fewest CPUs per rank, or None if unknown."""
        result: list[float] = []
        for host in {trace.host for trace in self.traces}:
            lists = [t.capture_info.get("cpus") or [] for t in self.traces if t.host == host]
            if not all(lists):
                return None
            result.append(len({cpu for cpus in lists for cpu in cpus}) / len(lists))
        return min(result)

    @property
    def contention(self) -> float:
        threads = max(int(trace.capture_info.get("threads") or 1) for trace in self.traces)
        on_device = all(trace.on_device for trace in self.traces)
        free = on_device or (self.cpus_per_rank or 0.0) >= threads + 1
        return _CONTENTION if free else _FULL_CONTENTION

    def per_step(self, value: Callable[[StepBreakdown], float]) -> list[float]:
        """Return the mean of `value(step)` over ranks, for each step number."""
        return [
            fmean(value(step) for step in self.steps if step.step == number)
            for number in self.step_numbers
        ]

    def per_trace_step(self, value: Callable[[RankTrace, Step], float]) -> list[float]:
        """Return the mean of `value(trace, step)` over ranks, for each step number."""
        return [
            fmean(
                value(trace, step)
                for trace in self.traces
                for step in trace.steps
                if step.number == number
            )
            for number in self.step_numbers
        ]

    def part(self, name: str, rank: int | None = None) -> float:
        """Return the mean seconds of a part per step, on `rank`, or on all ranks if it is None."""
        return fmean(step.parts[name] for step in self.steps if rank in (None, step.rank))

    def exposed_steps(self, axis: str | None, bucket: bool | None = None) -> list[float]:
        """Return the seconds of exposed communication on an axis in each step.

        `bucket` selects DDP buckets (True), other collectives (False) or both (None).
        """
        return self.per_step(
            lambda step: sum(
                parts["exposed"]
                for (on_axis, is_bucket), parts in step.by_kind.items()
                if on_axis == axis and bucket in (None, is_bucket)
            )
        )

    def exposed(self, axis: str | None, bucket: bool | None = None) -> float:
        return fmean(self.exposed_steps(axis, bucket))

    def device_memory(self) -> list[tuple[int, int]]:
        """Return (used bytes, total bytes) of each device for which both values are known."""
        pairs = [(trace.memory_bytes, trace.device_bytes) for trace in self.traces]
        return [(used, device) for used, device in pairs if used and device]

    def collectives(self, operation: str, axis: str) -> list[MatchedCollective]:
        kind = (operation, axis)
        return [call for call in self.matched if (call.first.operation, call.first.axis) == kind]


def advise(run: ProfiledRun) -> list[Advice]:
    """Return all advice whose gain is above zero, the largest gain first.

    Gradient accumulation changes the global batch, so it comes after the advice that shortens
    gradient all-reduces.
    """
    kinds = (
        *(_no_sync, _bucket_size, _bucket_view, _find_unused, _overlap, _grouping),
        *(_reshard, _forward_prefetch, _replicate, _input, _straggler, _cpu_binding),
        *(_microbatches,),
    )
    found = [advice for kind in kinds for advice in kind(run) if advice is not None]
    found.sort(key=_gain, reverse=True)
    for advice in filter(None, _accumulation(run, found)):
        position = 0
        for number, other in enumerate(found, 1):
            if other["id"] in _GRADIENT_ADVICE or _gain(other) >= _gain(advice):
                position = number
        found.insert(position, advice)
    return found


def findings_without_gain(run: ProfiledRun) -> list[str]:
    """Return findings that may cost time, but whose gain is not visible in the recording."""
    kinds = (_too_many_threads, _memory_full, _gpu_gaps)
    return [text for kind in kinds for text in kind(run)]


def _gain(advice: Advice) -> float:
    return float(advice["gain_s"])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _advice(
    run: ProfiledRun,
    name: str,
    scenarios: Sequence[Sequence[float]],
    *,
    change: dict[str, Any] | None = None,
    gained: float = 0.0,
    **values: Any,
) -> Advice | None:
    """Return one entry of `advice[]`, or None if the band of its gain includes zero.

    `scenarios` has one list for each set of assumptions, with the gain of each step in seconds.
    `values` has the values of the placeholders in advice.toml. `gained` is 0, or the seconds per
    step that other advice saves, which the user should follow before this advice.
    """
    scenarios = [gains for gains in scenarios if gains]
    if not scenarios:
        return None
    low = min(quartiles(gains)[0] for gains in scenarios) - run.noise_s
    high = min(max(quartiles(gains)[1] for gains in scenarios) + run.noise_s, run.step_s)
    gain = min(median(map(median, scenarios)), high)
    if low <= 0:
        return None
    texts = _TEXTS[name]
    text = texts.get("tutti_train", texts["try"]) if run.is_tutti else texts["try"]
    now = median(run.per_step(lambda step: step.parts[texts["cause"]]))
    left, length = max(0.0, now - gained - gain), run.step_s - gained - gain
    share_left = left / length if length > 0 else 0.0
    values |= {"share": _percent(now / run.step_s), "remains": _percent(share_left)}
    return {
        "id": name,
        "finding": texts["finding"].format_map(values),
        "try": text.format_map(values),
        "share": now / run.step_s,
        "gain_s": gain,
        "gain_s_band": [low, high],
        "gain_share": gain / run.step_s,
        "gain_share_band": [low / run.step_s, high / run.step_s],
        "remains_share": share_left,
        "cause": texts["cause"],
        "change": change,
    }


def _scaled(values: Sequence[float], *factors: float) -> list[list[float]]:
    return [[value * factor for value in values] for factor in factors]


def _argument(kind: str, text: str, constructed_at: str | None) -> str:
    """Return the constructor call with the argument to set, and FILE:LINE of the call."""
    return f"{kind}({text})" + (f" in {constructed_at}" if constructed_at else "")


def _ddp_change(
    run: ProfiledRun, ddp: dict[str, Any], argument: str, value: Any, flag: str
) -> tuple[str, dict[str, Any]]:
    """Return a change of one DDP argument, as text and as `change` (see the module docstring)."""
    name, _, given = flag.partition(" ")
    if run.is_tutti:
        return flag, {"flags": {name: given or None}}
    where = ddp.get("constructed_at")
    return _argument("DistributedDataParallel", f"{argument}={value}", where), {
        "ddp": {argument: value}
    }


def _message_cost(messages: Sequence[MatchedCollective]) -> MessageCost | None:
    return fit_message_cost([(call.first.bytes, call.transfer_seconds) for call in messages])


def _bucket_model(run: ProfiledRun) -> BucketModel | None:
    model = BucketModel(run.traces, run.ddp) if run.ddp is not None else None
    return model if model is not None and model.passes else None


def _bucket_size(run: ProfiledRun) -> Iterator[Advice | None]:
    """Yield advice on the DDP bucket size. BucketModel predicts the gain."""
    ddp, model = run.ddp, _bucket_model(run)
    if ddp is None or model is None or run.exposed("dp", bucket=True) <= 0:
        return
    # If all buckets have about the same size, their times do not show latency and bandwidth
    # separately. In this case the fit uses all all-reduces, although the others run under different
    # conditions.
    points = [point for found in model.messages.values() for point in found]
    cost = fit_message_cost(points)
    if cost is None or not cost.separated:
        cost = _message_cost(run.collectives("all_reduce", "dp")) or cost
    if cost is None:
        return
    ranks, best = len(run.traces), None
    for size, buckets in ddp["other_buckets"].items():
        gain = model.gain(buckets, cost, ranks, run.overhead)
        # More communication during backward may make the computation slower, and less communication
        # may make it faster.
        slower = run.contention * gain.more_hidden
        scenarios = [*gain.scenarios, [g - slower for g in gain.scenarios[0]]]
        lowest = min(quartiles(gains)[0] for gains in scenarios)
        if best is None or lowest > best[0] + 0.01 * run.step_s:
            best = lowest, size, buckets, scenarios
    if best is None:
        return
    _, size, buckets, scenarios = best
    cure, change = _ddp_change(run, ddp, "bucket_cap_mb", float(size), f"--bucket-mb {size}")
    present = [sum(ddp["bytes"][index] for index in bucket) for bucket in ddp["buckets"]]
    largest = format_bytes(max(present))
    yield _advice(
        run,
        "buckets",
        scenarios,
        change=change,
        count=len(present),
        s="s" * (len(present) != 1),
        largest=largest,
        new=len(buckets),
        new_s="s" * (len(buckets) != 1),
        cure=cure,
    )


def _no_sync(run: ProfiledRun) -> Iterator[Advice | None]:
    """Yield advice if DDP communicates in several backward passes of a step, not only the last
    one."""
    ddp, model = run.ddp, _bucket_model(run)
    passes = model.passes_per_step() if model is not None else 0
    if ddp is None or model is None or passes < 2 or run.is_tutti:
        return
    gains, hidden = [], []
    for found in model.passes.values():
        saved = [backward for ranks in found[:-1] for backward in ranks.values()]
        gains.append(sum(b.finish - b.end for b in saved) / len(run.traces))
        hidden.append(sum(b.hidden_s for b in saved) / len(run.traces))
    # A backward pass without communication also saves the copies to and from the buckets, and its
    # computation is not slowed by transfers.
    copied = run.per_trace_step(
        lambda trace, step: (
            _reducer_s(trace, step, "copy_bucket_to_grad") + _reducer_s(trace, step, "mul_out")
        )
    )
    copies = (passes - 1) / passes * median(copied)
    more = [g + copies + run.contention * h for g, h in zip(gains, hidden, strict=True)]
    where = ddp.get("constructed_at")
    yield _advice(
        run,
        "no_sync",
        [gains, *_scaled(gains, 0.7 / run.overhead), *_scaled(more, 1.2)],
        change={"no_sync": passes},
        passes=passes,
        where=f" (DistributedDataParallel in {where})" if where else "",
        last=passes - 1,
    )


def _reducer_s(trace: RankTrace, step: Step, name: str) -> float:
    found = trace.reducer.get(name)
    return found.between(step.start, step.end).seconds if found is not None else 0.0


def _bucket_view(run: ProfiledRun) -> Iterator[Advice | None]:
    """Yield advice if DDP copies the reduced gradients from its buckets to `parameter.grad`."""
    ddp = run.ddp
    if ddp is None or ddp["gradient_as_bucket_view"] or any(t.on_device for t in run.traces):
        return
    copied = run.per_trace_step(lambda trace, step: _reducer_s(trace, step, "copy_bucket_to_grad"))
    events = len(ddp["bytes"]) * _EVENT_S
    fewest = [0.6 * max(0.0, seconds - events) / run.overhead for seconds in copied]
    # Without bucket views, all gradients of a step exist until zero_grad frees them. malloc may
    # then return their memory to the system, so the next backward has a page fault for each page.
    # With bucket views, a gradient is freed as soon as it is copied to its bucket, and the next
    # gradient uses the same memory. Recorded steps have no such page faults (see _touch_heap in
    # capture.py), but earlier steps have them.
    gradient_pages = (sum(ddp["bytes"]) - max(ddp["bytes"])) / _PAGE_BYTES
    faults_s = fmean(
        min(_page_faults_per_step(trace), gradient_pages)
        * float(trace.capture_info.get("page_fault_s") or 0.0)
        for trace in run.traces
    )
    cure, change = _ddp_change(
        run, ddp, "gradient_as_bucket_view", True, "--gradient-as-bucket-view"
    )
    yield _advice(
        run,
        "bucket_view",
        [
            [seconds + 0.5 * faults_s for seconds in fewest],
            [seconds + faults_s for seconds in copied],
            [1.3 * (seconds + faults_s) for seconds in copied],
        ],
        change=change,
        cure=cure,
        copied_ms=1e3 * fmean(copied),
        faults=f", and page faults of new gradients take {1e3 * faults_s:.1f} ms" * (faults_s > 0),
    )


def _page_faults_per_step(trace: RankTrace) -> float:
    """Return the median page faults per step before the recording, without the first steps."""
    unrecorded, _ = trace.capture_info.get("page_faults") or ([], [])
    later: list[int] = unrecorded[len(unrecorded) // 2 :]
    return float(median(later)) if later else 0.0


def _find_unused(run: ProfiledRun) -> Iterator[Advice | None]:
    """Yield advice if DDP searches for unused parameters although all parameters are used."""
    ddp = run.ddp
    if ddp is None or not ddp["find_unused_parameters"] or ddp["has_unused"]:
        return
    name = "search_unused_parameters"
    searched = run.per_trace_step(lambda trace, step: _reducer_s(trace, step, name))
    size = 4 * len(ddp["bytes"])  # bytes of the map of used parameters that DDP all-reduces
    maps = run.per_trace_step(
        lambda trace, step: sum(
            b.end - b.transfer_start for b in buckets_in(trace, step) if b.bytes == size
        )
    )
    both = [search + used for search, used in zip(searched, maps, strict=True)]
    cure, change = _ddp_change(run, ddp, "find_unused_parameters", False, "--no-find-unused")
    lowest = _scaled(searched, 0.6 / run.overhead)
    yield _advice(
        run,
        "find_unused",
        [*lowest, searched, both],
        change=change,
        cure=cure,
        searched_ms=1e3 * fmean(both),
    )


def _overlap(run: ProfiledRun) -> Iterator[Advice | None]:
    """Yield advice to reduce gradients during backward, if they are reduced after backward."""
    reduced_late = False
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
    if not reduced_late:
        return
    hideable = run.per_trace_step(
        lambda trace, step: trace.compute.between(*(step.gradients or (0.0, 0.0))).seconds
    )
    gains = list(map(min, run.exposed_steps("dp"), hideable))
    lowest = 1 - 0.5 * run.contention  # transfers may slow the computation
    yield _advice(
        run,
        "overlap",
        _scaled(gains, lowest, 1.0),
        hideable_ms=1e3 * fmean(hideable),
    )


def _grouping(run: ProfiledRun) -> Iterator[Advice | None]:
    """Yield advice to combine many small all-reduces, so that the latency α occurs only once."""
    all_reduces = run.collectives("all_reduce", "dp")
    small = [match for match in all_reduces if match.first.bucket_ready is None]
    count = len(small) / len(run.step_numbers)
    cost = _message_cost(all_reduces)
    if cost is None or not cost.separated or count < 4:
        return
    size = format_bytes(sum(match.first.bytes for match in small) / len(run.step_numbers))
    saved = cost.alpha * (count - 1)
    gains = [min(exposed, saved) for exposed in run.exposed_steps("dp", bucket=False)]
    yield _advice(run, "grouping", _scaled(gains, 0.7, 1.0), count=count, size=size)


def _gathers(backward: bool) -> Callable[[RankTrace, Step], list[Collective]]:
    """Return a function that finds the all-gathers in the backward (or forward) of a step."""

    def gathers(trace: RankTrace, step: Step) -> list[Collective]:
        border = step.backward_start or step.end
        return [
            call
            for call in trace.collectives_called_in(step)
            if (call.operation, call.axis) == ("all_gather", "shard")
            and (call.arrival >= border) == backward
        ]

    return gathers


def _reshard(run: ProfiledRun) -> Iterator[Advice | None]:
    """Yield advice to keep FSDP2's gathered parameters from forward to backward."""
    units = [unit for unit in run.program.get("fsdp") or [] if unit["reshard_after_forward"]]
    gathers = _gathers(backward=True)
    more = sum(unit["bytes"] for unit in units)
    memory = run.device_memory()
    free = min((device * _MEMORY_FULL - used for used, device in memory), default=0)
    if not units or run.is_tutti or (memory and more > free):
        return

    def exposed(trace: RankTrace, step: Step) -> float:
        moving = Intervals.of((call.transfer_start, call.end) for call in gathers(trace, step))
        return (moving - trace.compute).seconds

    gains = run.per_trace_step(exposed)
    # The highest factor is above 1, because the change also saves the copies and waits of these
    # all-gathers.
    yield _advice(
        run,
        "reshard",
        _scaled(gains, 0.6 / run.overhead, 1.0, 1.6),
        change={"fsdp": {"reshard_after_forward": False}},
        units=len(units),
        s="s" * (len(units) != 1),
        more=format_bytes(more),
    )


def _forward_prefetch(run: ProfiledRun) -> Iterator[Advice | None]:
    """Yield advice to gather the next FSDP2 unit while the current FSDP2 unit computes.

    On a CPU, FSDP2 waits for each all-gather before it continues, so prefetching has no effect.
    """
    units = run.program.get("fsdp") or []
    if len(units) < 3 or any(unit["forward_prefetch"] for unit in units):
        return
    if run.is_tutti or not all(trace.on_device for trace in run.traces):
        return
    gathers = _gathers(backward=False)

    def hideable(trace: RankTrace, step: Step) -> float:
        """Return the exposed all-gather seconds that the preceding computation could hide."""
        total, before = 0.0, step.start
        for call in sorted(gathers(trace, step), key=lambda call: call.start):
            exposed = Intervals.of([(call.transfer_start, call.end)]) - trace.compute
            computing = trace.compute.between(before, call.start).seconds
            total += min(exposed.seconds, computing)
            before = call.end
        return total

    gains = run.per_trace_step(hideable)
    yield _advice(
        run,
        "prefetch",
        _scaled(gains, 0.5, 1.0),
        change={"fsdp": {"forward_prefetch": True}},
        exposed_ms=1e3 * fmean(gains),
    )


def _replicate(run: ProfiledRun) -> Iterator[Advice | None]:
    """Yield advice to replicate the model instead of sharding it.

    Replicas move 2/3 of the bytes that sharding moves: an all-reduce moves as many bytes as one
    all-gather and one reduce-scatter, but sharding needs a second all-gather.
    """
    exposed = run.exposed_steps("shard")
    gathered = run.collectives("all_gather", "shard")
    if max(exposed) <= 0 or not gathered or not run.collectives("reduce_scatter", "shard"):
        return
    ranks = gathered[0].first.group_size or len(gathered[0].members)
    # The model size is half of the bytes that a step gathers, because parameters are gathered for
    # forward and again for backward. A replica needs 4 × the model size (parameters, gradients and
    # Adam's two states). With sharding, a rank holds 1 / ranks of this memory.
    model = sum(match.first.bytes for match in gathered) / len(run.step_numbers) / 2
    more = 4 * model * (1 - 1 / ranks)
    memory = run.device_memory()
    free = min((device * _MEMORY_FULL - used for used, device in memory), default=0)
    if len(memory) == len(run.traces) and more < free:
        yield _advice(
            run,
            "replicas",
            _scaled(exposed, 0.2, 1 / 3, 0.5),
            exposed_ms=1e3 * fmean(exposed),
            more_gb=more / 1e9,
            ranks=ranks,
        )


def _accumulation(run: ProfiledRun, found: Sequence[Advice]) -> Iterator[Advice | None]:
    """Yield advice to accumulate the gradients of k batches before they are reduced."""
    others = [_gain(advice) for advice in found if advice["id"] in _GRADIENT_ADVICE]
    gained = max(others, default=0.0)
    steps = [max(0.0, exposed - gained) for exposed in run.exposed_steps("dp")]
    exposed = fmean(steps)
    rest = run.step_s - gained - exposed
    if exposed <= 0:
        return
    # k is the smallest of 2, 4 and 8 for which exposed communication is at most 5 % of the step. If
    # it is above 5 % even with 8, k is 8.
    k = next((k for k in (2, 4, 8) if exposed / k / (rest + exposed / k) <= 0.05), 8)
    after = " after the other advice" if gained else ""
    yield _advice(
        run,
        "accumulation",
        _scaled(steps, 0.7 * (1 - 1 / k), 1 - 1 / k, 1.3 * (1 - 1 / k)),
        gained=gained,
        exposed_ms=1e3 * exposed,
        after=after,
        k=k,
        others=k - 1,
    )


def _input(run: ProfiledRun) -> Iterator[Advice | None]:
    """Yield advice to load data in worker processes while the program computes.

    If loading one batch takes l seconds, and the other parts of the step take r seconds on the
    slowest rank, a step with w workers takes max(r, l / w) seconds. So l / r workers are enough.
    """
    waits = {trace.rank: run.part("input", trace.rank) for trace in run.traces}
    loaders = [(t.capture_info.get("program") or {}).get("loader") or {} for t in run.traces]
    workers = max(int(loader.get("workers", 0)) for loader in loaders)
    has_workers = any(trace.has_loader_workers for trace in run.traces)
    if max(waits.values()) <= 0 or (has_workers and not workers):
        return
    # Without workers, tutti's loader loads data in a thread. The thread counts as one worker.
    producers = max(1, workers) if run.is_tutti else workers
    if workers and not run.is_tutti and max(loader.get("starved", 0) for loader in loaders) < 0.5:
        return  # batches are ready in time, so more workers would not help
    # For each rank: the seconds of its own work and of its input in each step. Both exclude the
    # time in which the rank waits for other ranks, because this time depends on their work and
    # input.
    own: dict[int, list[float]] = {trace.rank: [] for trace in run.traces}
    inputs: dict[int, list[float]] = {trace.rank: [] for trace in run.traces}
    for step in sorted(run.steps, key=lambda step: step.step):
        if step.step in run.step_numbers:
            loading = step.parts["input"]
            own[step.rank].append(step.seconds - step.parts["wait"] - loading)
            inputs[step.rank].append(loading)
    load = producers * run.step_s if producers else max(waits.values())
    longest_own = max(map(median, own.values()))
    needed = math.ceil(1.25 * load / longest_own) if longest_own > 0 else _MAX_WORKERS
    count = min(_MAX_WORKERS, max(needed, workers + 1))
    waited = [seconds for loader in loaders for seconds in loader.get("waited_s", [])]
    on_cpu = sum(seconds for loader in loaders for seconds in loader.get("cpu_s", []))
    cpus = run.cpus_per_rank
    if cpus is not None and on_cpu > 0.5 * sum(waited):
        count = min(count, max(1, int(cpus)))
    if count <= workers:
        return
    process_cpu = max(((loader.get("process_cpu_s") or 0.0) for loader in loaders), default=0.0)
    batch_bytes = max(int(loader.get("batch_bytes", 0)) for loader in loaders)
    scenarios = []
    for at_worst in (False, True):
        fetch = _MAX_FETCH_S + batch_bytes * _MAX_FETCH_S_PER_BYTE if at_worst else _FETCH_S
        slowest = load / count * (1.15 if at_worst else 1.0)
        if at_worst and cpus and not producers:
            # The process and its workers share the CPUs, so a step takes at least (CPU seconds per
            # step) / (number of CPUs).
            slowest = max(slowest, process_cpu / cpus)
        for scale in {1.0, 1 / run.overhead}:
            gains = []
            for number in range(min(map(len, own.values()))):
                rests = [scale * own[rank][number] for rank in own]
                loads = [scale * inputs[rank][number] for rank in own]
                now = max(map(sum, zip(rests, loads, strict=True)))
                gains.append(min(now - max(max(rests) + fetch, slowest), max(loads)))
            scenarios.append(gains)
    late = late_rank(run.stragglers)
    by_input = late is not None and late["excess"]["part"] == "input"
    waiter = f"rank {late['rank']}" if late is not None and by_input else "each rank"
    wait = waits[late["rank"]] if late is not None and by_input else fmean(waits.values())
    time = f"{1e3 * wait:.1f} ms per step ({_percent(wait / run.step_s)})"
    sites = [loader.get("constructed_at") for loader in loaders]
    cure = _argument("DataLoader", f"num_workers={count}", next(filter(None, sites), None))
    change: dict[str, Any] = {"loader": {"num_workers": count, "persistent_workers": True}}
    if run.is_tutti:
        cure, change = f"--workers {count}", {"flags": {"--workers": str(count)}}
    elif not any(loaders):
        change = {}
    elif any(sites):
        change["loader_at"] = next(filter(None, sites))
    yield _advice(
        run, "input", scenarios, change=change or None, waiter=waiter, time=time, cure=cure
    )


def _straggler(run: ProfiledRun) -> Iterator[Advice | None]:
    """Yield advice on a rank that is late in most steps. See `straggler_rows`."""
    row = late_rank(run.stragglers)
    if row is None or not row["steady"] or row["excess"]["part"] == "input":
        return
    rank = row["rank"]
    costs = [
        fmean(
            step.waited_for.get(rank, 0.0)
            for step in run.steps
            if step.step == number and step.rank != rank
        )
        for number in run.step_numbers
    ]
    gains = [min(cost, row["gain_s"]) for cost in costs]
    yield _advice(
        run,
        "straggler",
        _scaled(gains, 0.7, 1.0),
        cost_ms=1e3 * row["cost_s"]["mean"],
        rank=rank,
        excess=excess_text(row["excess"]),
        cure=_straggler_cure(run, rank, row["excess"]["part"]),
    )


def _straggler_cure(run: ProfiledRun, rank: int, part: str) -> str:
    if part != "compute":
        return f"Check the Python code that rank {rank} runs between operators"
    estimates = {trace.rank: trace.compute_estimate / len(trace.steps) for trace in run.traces}
    estimate = estimates.pop(rank)
    others = fmean(estimates.values())
    if others and estimate > 1.1 * others:
        return f"Split the batch evenly: rank {rank} has {estimate / others:.1f} times the work"
    if others:
        return (
            f"Rank {rank} has the same work as the others but is slower. Check the clock speed, "
            "the CPU cores and other programs on its host"
        )
    return f"Compare the batch and the device of rank {rank} with those of the other ranks"


def _shared_cpus(run: ProfiledRun) -> Iterator[tuple[str, list[RankTrace], int, int]]:
    """Yield (host name, traces, CPUs, threads) of each host whose ranks share CPUs.

    `threads` is the sum over the ranks of the host.
    """
    for host in sorted({trace.host for trace in run.traces}):
        traces = [trace for trace in run.traces if trace.host == host]
        cpu_lists = [trace.capture_info.get("cpus") or () for trace in traces]
        cpus = {cpu for cpu_list in cpu_lists for cpu in cpu_list}
        separate = sum(map(len, cpu_lists)) == len(cpus)
        if len(traces) > 1 and cpus and not separate and not any(t.on_device for t in traces):
            threads = sum(int(trace.capture_info.get("threads") or 0) for trace in traces)
            yield host or "a host", traces, len(cpus), threads


def _cpu_binding(run: ProfiledRun) -> Iterator[Advice | None]:
    """Yield advice to bind ranks to separate CPUs.

    The gain is computed with the assumption that the slowest rank would then take the current mean
    time of all ranks.
    """
    for host, traces, cpus, _ in _shared_cpus(run):
        work = [trace.compute_estimate / len(trace.steps) for trace in traces]
        if min(work) <= 0 or max(work) >= 1.02 * min(work) or cpus < len(traces):
            continue
        times = {
            trace.rank: [
                step.parts["compute"] + step.parts["hidden"]
                for step in run.steps
                if step.rank == trace.rank
            ]
            for trace in traces
        }
        medians = {rank: median(values) for rank, values in times.items()}
        slowest = max(medians, key=lambda rank: medians[rank])
        columns = zip(*times.values(), strict=False)
        gains = [
            value - fmean(column) for value, column in zip(times[slowest], columns, strict=False)
        ]
        load = (
            f"the same operators take {1e3 * min(medians.values()):.1f} ms on the fastest rank and "
            f"{1e3 * max(medians.values()):.1f} ms on the slowest rank"
        )
        yield _advice(run, "binding", _scaled(gains, 0.5, 1.0), load=load, cpus=cpus, host=host)


def _too_many_threads(run: ProfiledRun) -> Iterator[str]:
    for host, traces, cpus, threads in _shared_cpus(run):
        if threads > cpus:
            each = max(1, cpus // len(traces))
            yield _TEXTS["threads"]["note"].format(
                ranks=len(traces), threads=threads, cpus=cpus, host=host, each=each
            )


def _memory_full(run: ProfiledRun) -> Iterator[str]:
    """Yield a note if every rank holds the whole model and memory is nearly full.

    The gain of sharding is unknown, because sharding moves more bytes but allows a larger batch.
    """
    full = max((used / device for used, device in run.device_memory()), default=0)
    if full > _MEMORY_FULL and run.collectives("all_reduce", "dp"):
        cure = "--layout shardN" if run.is_tutti else "fully_shard"
        yield _TEXTS["memory"]["note"].format(used=_percent(full), cure=cure)


def _gpu_gaps(run: ProfiledRun) -> Iterator[str]:
    share = run.part("host_gap") / run.step_s
    if any(trace.on_device for trace in run.traces) and share > _RUN_NOISE:
        cure = "--compile, --cuda-graph" if run.is_tutti else "torch.compile, CUDA graphs"
        yield _TEXTS["gaps"]["note"].format(share=_percent(share), cure=cure)


def _microbatches(run: ProfiledRun) -> Iterator[Advice | None]:
    """Yield advice to use more microbatches.

    With p pipeline stages and m microbatches, the bubble takes (p - 1) / m of the computation time.
    """
    bubbles = run.per_step(lambda step: step.parts["bubble"])
    receives = [
        sum(call.operation in ("recv", "send_recv") for call in trace.collectives_called_in(step))
        for trace in run.traces
        for step in trace.steps
    ]
    if max(bubbles) <= 0 or not any(receives):
        return
    # The last stage receives only activations, once for each microbatch.
    count = min(filter(None, receives))
    yield _advice(
        run,
        "microbatches",
        _scaled(bubbles, 0.3, 0.5),
        count=count,
        es="es" * (count != 1),
        doubled=2 * count,
    )
