"""A step in parts that add up to it, for each rank.

Every moment of a step belongs to exactly one part:

    compute        something computes, and nothing communicates
    hidden         something computes while something communicates
    wait           nothing computes; a collective waits for a rank that has not arrived
    bubble         nothing computes; a send or receive waits for its other side (a pipeline's)
    exposed        nothing computes; data moves
    input          none of these; the program waits for its data loader
    rest           none of these; on a GPU copies, on a CPU what surrounds the operators
    host_gap       nothing at all is seen: Python, a sleep, a GPU that was given nothing to do
"""

from bisect import bisect_right
from dataclasses import dataclass

from tutti.profile.collective import Collective
from tutti.profile.intervals import NEVER, Times
from tutti.profile.rank_trace import RankTrace, Step

PARTS = ("compute", "hidden", "exposed", "wait", "bubble", "input", "host_gap", "rest")
# What people read.
PART_TITLES = {"host_gap": "gaps"}


Kind = tuple[str | None, bool]  # the axis, and whether it is a bucket of DDP's


@dataclass(frozen=True)
class StepParts:
    """One step of one rank; seconds."""

    rank: int
    step: int
    seconds: float
    times: dict[str, Times]  # of each part
    parts: dict[str, float]  # how long those are together
    communication: float  # hidden and exposed, without waiting
    waited_for: dict[int, float]  # what others' lateness cost this rank, by who was late
    # hidden, exposed and wait (a bubble included) by what communicated: they add up to the parts.
    talk: dict["Kind", dict[str, float]]
    # The first gradient and the end of backward, from the step's start.
    gradients: tuple[float, float] | None

    @property
    def overlap(self) -> float | None:
        """|communication ∩ compute| / |communication|, waiting included, as HTA defines it."""
        total = sum(self.parts[name] for name in ("hidden", "exposed", "wait", "bubble"))
        return self.parts["hidden"] / total if total else None


def split_step(trace: RankTrace, step: Step) -> StepParts:
    """Take a step apart. Ranks must have been aligned and matched before."""
    whole = Times.of([(step.start, step.end)])
    compute = trace.compute.between(step.start, step.end)
    talking = trace.communication.between(step.start, step.end)
    idle = whole - compute
    waits: dict[int, list[tuple[float, float]]] = {}
    bubbles: list[tuple[float, float]] = []
    moving: list[tuple[float, float]] = []
    lasting: dict[Kind, list[tuple[float, float]]] = {}
    for each in _within(trace.collectives, step):
        moving.append((_moving_from(each), each.end))
        lasting.setdefault((each.axis, each.ready is not None), []).append((each.arrival, each.end))
        if each.is_point_to_point:
            bubbles.append((each.arrival, _moving_from(each)))
        elif each.last_rank is not None and each.last_rank != trace.rank:
            waits.setdefault(each.last_rank, []).append((each.arrival, _moving_from(each)))
    # Of several communications one may move data while another waits: then data moves.
    stalled = idle - Times.of(moving)
    waited_for: dict[int, float] = {}
    waiting = NEVER
    for late, pairs in sorted(waits.items()):
        stretch = stalled & Times.of(pairs)
        waited_for[late] = stretch.seconds
        stalled -= stretch
        talking |= stretch
        waiting |= stretch
    bubble = stalled & talking & Times.of(bubbles)
    exposed = (idle & talking) - waiting - bubble
    quiet = idle - talking
    loading = quiet & trace.input.between(step.start, step.end)
    quiet -= loading
    other = quiet & trace.other.between(step.start, step.end)
    hidden = compute & talking
    times = {
        "compute": compute - hidden,
        "hidden": hidden,
        "exposed": exposed,
        "wait": waiting,
        "bubble": bubble,
        "input": loading,
        "host_gap": quiet - other,
        "rest": other,
    }
    parts = {name: each.seconds for name, each in times.items()}
    return StepParts(
        rank=trace.rank,
        step=step.number,
        seconds=whole.seconds,
        times=times,
        parts=parts,
        communication=parts["hidden"] + parts["exposed"],
        waited_for=waited_for,
        talk=_by_kind({"hidden": hidden, "exposed": exposed, "wait": waiting | bubble}, lasting),
        gradients=step.gradients
        and (step.gradients[0] - step.start, step.gradients[1] - step.start),
    )


def _by_kind(
    regions: dict[str, Times], lasting: dict[Kind, list[tuple[float, float]]]
) -> dict[Kind, dict[str, float]]:
    """Which communication each region belongs to; of several at once, the first that is seen."""
    talk: dict[Kind, dict[str, float]] = {}
    for kind, pairs in lasting.items():
        stretch = Times.of(pairs)
        talk[kind] = {name: (region & stretch).seconds for name, region in regions.items()}
        regions = {name: region - stretch for name, region in regions.items()}
    # The way in and out of a call, and waking up after it, belong to what came before.
    called = [(pair[0], kind) for kind, pairs in lasting.items() for pair in pairs]
    called.sort(key=lambda each: each[0])
    for name, region in regions.items():
        for start, end in zip(region.starts, region.ends, strict=True):
            before = bisect_right(called, end, key=lambda each: each[0])
            kind = called[max(0, before - 1)][1] if called else (None, False)
            talk.setdefault(kind, dict.fromkeys(regions, 0.0))[name] += float(end - start)
    return talk


def _within(collectives: list[Collective], step: Step) -> list[Collective]:
    return [each for each in collectives if each.arrival < step.end and each.end > step.start]


def _moving_from(each: Collective) -> float:
    """When data began to move: all had arrived, and it was its turn."""
    # A receive whose sender is unknown is mostly waiting; so is what NCCL makes of a batch of
    # sends and receives, one kernel that does not say whom it meets.
    if each.last_arrival is None and each.operation in ("recv", "send_recv"):
        return each.end
    return each.waited_until
