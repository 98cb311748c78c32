"""Find the ranks for which the others wait: how often, how long, and how regularly.

The straggler is the rank that arrives last. Its own collectives are the shortest, because it never
waits: the rank with the longest collective is a victim, not the cause.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from tutti.measure.spread import summarize
from tutti.profile.collective_matching import MatchedCollective
from tutti.profile.rank_trace import SYNCHRONIZING
from tutti.profile.step_breakdown import StepBreakdown

# A rank is a straggler if the others wait for it for at least this share of the step.
_NOTABLE_SHARE = 0.02


def stragglers(
    ranks: Sequence[int], steps: Sequence[StepBreakdown], matched: Sequence[MatchedCollective]
) -> list[dict[str, Any]]:
    """`stragglers[]`: a row for each rank for which others waited, the longest wait first.

    `cost_s` is the time per step in which the other ranks neither computed nor moved data because
    of this rank, mean over the other ranks.
    """
    synchronizing = [each for each in matched if each.first.operation in SYNCHRONIZING]
    times_last = Counter(each.last_rank for each in synchronizing)
    length = fmean(each.seconds for each in steps) if steps else 0.0
    rows = []
    for rank in ranks:
        others = [each for each in steps if each.rank != rank]
        costs = [
            fmean(each.waited_for.get(rank, 0.0) for each in others if each.step == number)
            for number in sorted({each.step for each in others})
        ]
        if not costs or not max(costs) > 0:
            continue
        lateness = [each.lateness for each in synchronizing if each.last_rank == rank]
        share = fmean(costs) / length
        late_steps = sum(cost > _NOTABLE_SHARE * length for cost in costs)
        rows.append(
            {
                "rank": rank,
                "straggler": share >= _NOTABLE_SHARE,
                "steady": late_steps > len(costs) / 2,
                "cost_s": summarize(costs),
                "cost_share": share,
                "steps": late_steps,
                "of_steps": len(costs),
                "last": times_last[rank],
                "of_collectives": len(synchronizing),
                "late_by_s": summarize(lateness) if lateness else None,
                "instead": _excess(rank, steps),
                "made_wait": {
                    str(each): sum(s.waited_for.get(rank, 0.0) for s in steps if s.rank == each)
                    for each in ranks
                    if each != rank
                },
            }
        )
    return sorted(rows, key=lambda row: -row["cost_s"]["mean"])


def _excess(rank: int, steps: Sequence[StepBreakdown]) -> dict[str, Any]:
    """The part with the largest excess over the other ranks: probably the cause of the delay."""
    excess = {
        name: fmean(each.parts[name] for each in steps if each.rank == rank)
        - fmean(each.parts[name] for each in steps if each.rank != rank)
        for name in ("compute", "input", "host_gap", "rest")
    }
    part = max(excess, key=lambda name: excess[name])
    return {"part": part, "seconds": excess[part]}


def excess_text(instead: Mapping[str, Any]) -> str:
    """The value `instead` of a row as words: `computes 46.1 ms longer`."""
    longer = f"{1e3 * instead['seconds']:.1f} ms longer"
    return {
        "compute": f"computes {longer}",
        "input": f"waits {longer} for input",
        "host_gap": f"spends {longer} in gaps",
    }.get(instead["part"], f"spends {longer} on the rest")
