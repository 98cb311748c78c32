"""Who made whom wait: how often, how much, and how steadily.

The late rank is the one that arrives last. It has the shortest collectives, because nobody keeps
it waiting; whoever looks for the longest kernel finds its victims.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import mean
from typing import Any

from tutti.measure.spread import summarize
from tutti.profile.collective import SYNCHRONISING
from tutti.profile.matching import Meeting
from tutti.profile.parts import StepParts

# A rank is called a straggler from this share of the step that others lose to it.
NOTABLE = 0.02


def stragglers(
    ranks: Sequence[int], steps: Sequence[StepParts], meetings: Sequence[Meeting]
) -> list[dict[str, Any]]:
    """A row for each rank that others waited for, the costliest first.

    `cost_s` is what a step of the others lost to it: time in which they neither computed nor moved
    data, the mean over all others.
    """
    timed = [each for each in meetings if each.any.operation in SYNCHRONISING]
    last = Counter(each.last_rank for each in timed)
    length = mean(each.seconds for each in steps) if steps else 0.0
    rows = []
    for rank in ranks:
        others = [each for each in steps if each.rank != rank]
        numbers = sorted({each.step for each in others})
        costs = [
            mean(each.waited_for.get(rank, 0.0) for each in others if each.step == number)
            for number in numbers
        ]
        if not costs or not max(costs) > 0:
            continue
        lateness = [each.lateness for each in timed if each.last_rank == rank]
        share = mean(costs) / length
        rows.append(
            {
                "rank": rank,
                "straggler": share >= NOTABLE,
                "steady": sum(cost > NOTABLE * length for cost in costs) > len(costs) / 2,
                "cost_s": summarize(costs),
                "cost_share": share,
                "steps": sum(cost > NOTABLE * length for cost in costs),
                "of_steps": len(costs),
                "last": last[rank],
                "of_collectives": len(timed),
                "late_by_s": summarize(lateness) if lateness else None,
                "instead": _instead(rank, steps),
                "made_wait": {
                    str(each): sum(s.waited_for.get(rank, 0.0) for s in steps if s.rank == each)
                    for each in ranks
                    if each != rank
                },
            }
        )
    return sorted(rows, key=lambda row: -row["cost_s"]["mean"])


def _instead(rank: int, steps: Sequence[StepParts]) -> dict[str, Any]:
    """What the late rank spends more time on than the others do: where to look for the cause."""
    more = {
        name: mean(each.parts[name] for each in steps if each.rank == rank)
        - mean(each.parts[name] for each in steps if each.rank != rank)
        for name in ("compute", "input", "host_gap", "rest")
    }
    part = max(more, key=lambda name: more[name])
    return {"part": part, "seconds": more[part]}
