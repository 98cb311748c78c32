"""Split each step of each rank into parts that add up to the step.

Every moment of a step belongs to exactly one part:

    compute        the rank computes and does not communicate
    hidden         the rank computes and communicates at the same time
    wait           nothing computes; a collective waits for a rank that has not arrived
    bubble         nothing computes; a send or receive waits for its peer (pipelines)
    exposed        nothing computes; data moves
    input          none of the above; the program waits for its data loader
    rest           none of the above; on a GPU copies, on a CPU the code around operators
    host_gap       nothing is recorded: Python, a sleep, a GPU without work
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tutti.profile.rank_trace import EMPTY, Intervals, RankTrace, Step

PARTS = ("compute", "hidden", "exposed", "wait", "bubble", "input", "host_gap", "rest")

Kind = tuple[str | None, bool]  # mesh axis, whether the collective is a DDP bucket
_Pair = tuple[float, float]  # start, end


@dataclass(frozen=True)
class StepBreakdown:
    """One step of one rank, in seconds."""

    rank: int
    step: int
    seconds: float
    intervals: dict[str, Intervals]  # of each part
    parts: dict[str, float]  # total length of each part
    waited_for: dict[int, float]  # time lost waiting, by the rank that was late
    # hidden, exposed and wait (which includes bubble) by kind of communication. The sum over kinds
    # is the part.
    by_kind: dict[Kind, dict[str, float]]
    gradients: tuple[float, float] | None  # first gradient, end of backward, from the step's start


def overlap(parts: Mapping[str, float]) -> float | None:
    """|communication ∩ compute| / |communication + waiting|, as in Holistic Trace Analysis."""
    total = sum(parts[name] for name in ("hidden", "exposed", "wait", "bubble"))
    return parts["hidden"] / total if total else None


def split_step(trace: RankTrace, step: Step) -> StepBreakdown:
    """Split one step; clocks must be aligned and collectives matched before."""
    whole = Intervals.of([(step.start, step.end)])
    compute = trace.compute.between(step.start, step.end)
    communicating = trace.communication.between(step.start, step.end)
    idle = whole - compute
    waits: dict[int, list[_Pair]] = defaultdict(list)  # by the rank that was late
    bubbles: list[_Pair] = []
    transfers: list[_Pair] = []
    extents: dict[Kind, list[_Pair]] = defaultdict(list)
    for each in trace.collectives:
        if each.arrival >= step.end or each.end <= step.start:
            continue
        transfers.append((each.transfer_start, each.end))
        extents[each.axis, each.bucket_ready is not None].append((each.arrival, each.end))
        if each.is_point_to_point:
            bubbles.append((each.arrival, each.transfer_start))
        elif each.last_rank is not None and each.last_rank != trace.rank:
            waits[each.last_rank].append((each.arrival, each.transfer_start))
    # If one collective moves data while another collective waits, the time counts as moving data.
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
    hidden = compute & communicating
    intervals = {
        "compute": compute - hidden,
        "hidden": hidden,
        "exposed": exposed,
        "wait": waiting,
        "bubble": bubble,
        "input": loading,
        "host_gap": quiet - other,
        "rest": other,
    }
    gradients = step.gradients
    return StepBreakdown(
        rank=trace.rank,
        step=step.number,
        seconds=whole.seconds,
        intervals=intervals,
        parts={name: each.seconds for name, each in intervals.items()},
        waited_for=waited_for,
        by_kind=_split_by_kind(
            {"hidden": hidden, "exposed": exposed, "wait": waiting | bubble}, extents
        ),
        gradients=gradients and (gradients[0] - step.start, gradients[1] - step.start),
    )


def _split_by_kind(
    regions: dict[str, Intervals], extents: dict[Kind, list[_Pair]]
) -> dict[Kind, dict[str, float]]:
    """Attribute each region to the kind of communication in it; to the first if kinds overlap."""
    by_kind: dict[Kind, dict[str, float]] = {}
    for kind, pairs in extents.items():
        extent = Intervals.of(pairs)
        by_kind[kind] = {name: (region & extent).seconds for name, region in regions.items()}
        regions = {name: region - extent for name, region in regions.items()}
    # The remaining time is spent entering or leaving a call or waking up after a call: attribute
    # the time to the kind of the last call before.
    arrivals = [(pair[0], kind) for kind, pairs in extents.items() for pair in pairs]
    arrivals.sort(key=lambda each: each[0])
    for name, region in regions.items():
        for start, end in zip(region.starts, region.ends, strict=True):
            position = bisect_right(arrivals, end, key=lambda each: each[0])
            kind = arrivals[max(0, position - 1)][1] if arrivals else (None, False)
            by_kind.setdefault(kind, dict.fromkeys(regions, 0.0))[name] += float(end - start)
    return by_kind
