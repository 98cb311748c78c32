"""A schedule as one can see it: who computes what and when, and how much of the time is waiting.

Counted: every rank runs its actions in order, each as soon as what it needs has been computed.
A forward costs 1, a backward 2, its halves 1 each; messages cost nothing. Of ranks × time, the part
in which nobody computes is the bubble. For gpipe and 1f1b with p ranks and m microbatches

    bubble = (p - 1) / (m + p - 1)

for a rank waits p - 1 times for a forward and as often for a backward, while it works m times on
each. With v stages on a rank it waits for stages a v-th as long: (p - 1) / (v m + p - 1). With the
weights' gradients in the gaps only the first forward is waited for: (p - 1) / (3 v m + p - 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tutti.parallel.options import ScheduleName
from tutti.parallel.pipeline.order import Action

COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
_FILL = {"F": "-", "B": "=", "I": "=", "W": "~"}
_WIDTH = 80
_LABEL = len("rank 0  ")


@dataclass(frozen=True)
class Span:
    """An action, and from when to when it ran."""

    action: Action
    start: float
    end: float


Timeline = list[list[Span]]
"""The spans of every rank, in their order; time starts at 0."""


def simulate(orders: Sequence[Sequence[Action]]) -> Timeline:
    """When everything happens if actions have their counted costs."""
    last = max(action.stage for actions in orders for action in actions)
    done: dict[Action, float] = {}
    timeline: Timeline = [[] for _ in orders]
    while any(len(spans) < len(actions) for spans, actions in zip(timeline, orders, strict=True)):
        moved = False
        for spans, actions in zip(timeline, orders, strict=True):
            while len(spans) < len(actions):
                action = actions[len(spans)]
                needs = [_when(done, need) for need in _needs(action, last)]
                if None in needs:
                    break
                free = spans[-1].end if spans else 0.0
                start = max([free, *(need for need in needs if need is not None)])
                done[action] = start + COSTS[action.kind]
                spans.append(Span(action, start, done[action]))
                moved = True
        assert moved, "the schedule waits for itself"
    return timeline


def bubble(timeline: Timeline) -> float:
    """The share of all ranks' time in which they wait, from the first action to the last."""
    busy = sum(span.end - span.start for spans in timeline for span in spans)
    return 1 - busy / (length(timeline) * len(timeline))


def length(timeline: Timeline) -> float:
    """From the start to the end of the last action."""
    return max(span.end for spans in timeline for span in spans)


def formula(
    name: ScheduleName, ranks: int, microbatches: int, stages_per_rank: int
) -> float | None:
    """The bubble in closed form, where there is one."""
    waits, works = ranks - 1, stages_per_rank * microbatches
    if name in ("gpipe", "1f1b") or (name == "interleaved" and microbatches % ranks == 0):
        return waits / (works + waits)
    # The first forward is all that a rank waits for; each action has three parts of cost 1.
    if name == "zero-bubble" and microbatches % ranks == 0:
        return waits / (3 * works + waits)
    if name == "zbv" and microbatches >= 2 * ranks - 1:
        return waits / (3 * works + waits)
    return None


def draw(timeline: Timeline, unit: float = 1.0, width: int = _WIDTH) -> list[str]:
    """A line of text for each rank; a timeline that is too long goes on below, in further bands.

    `unit` is the time that one forward's label has room for.
    """
    labels = [label(span.action, timeline) for spans in timeline for span in spans]
    scale = (max(map(len, labels)) + 1) / unit  # characters per unit of time
    total = max(1, round(length(timeline) * scale))
    lines = []
    for spans in timeline:
        line = ["."] * total
        for span in spans:
            start, end = round(span.start * scale), round(span.end * scale)
            text = label(span.action, timeline).ljust(end - start, _FILL[span.action.kind])
            line[start:end] = text[: end - start]
        lines.append("".join(line))
    band = width - _LABEL
    drawn: list[str] = []
    for start in range(0, total, band):
        drawn += [""] if start else []
        drawn += [f"rank {rank:<3}{line[start : start + band]}" for rank, line in enumerate(lines)]
    return drawn


def label(action: Action, timeline: Timeline) -> str:
    """F3, or 5F3 where a rank has several stages; stage 5's forward of microbatch 3."""
    several = any(len({span.action.stage for span in spans}) > 1 for spans in timeline)
    return f"{action.stage if several else ''}{action.kind}{action.microbatch}"


def _needs(action: Action, last: int) -> list[Action]:
    """What must have been computed before; None of it for the first stage's forwards."""
    stage, number = action.stage, action.microbatch
    if action.kind == "F":
        return [Action("F", stage - 1, number)] if stage else []
    if action.kind == "W":
        return [Action("I", stage, number)]
    return [Action("F", stage, number)] + ([Action("B", stage + 1, number)] if stage < last else [])


def _when(done: dict[Action, float], need: Action) -> float | None:
    if need.kind == "B" and need not in done:  # the inputs' gradient is enough
        need = Action("I", need.stage, need.microbatch)
    return done.get(need)
