"""A traced run as advice looks at it, and the form of a piece of advice."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from tutti.profile.matching import Meeting
from tutti.profile.parts import StepParts
from tutti.profile.rank_trace import RankTrace

# A gain below this share of the step is not worth a reader's time.
WORTH = 0.02

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

    def meetings_of(self, operation: str, axis: str) -> list[Meeting]:
        return [
            each
            for each in self.meetings
            if each.any.operation == operation and each.any.axis == axis
        ]


def advice(
    case: Case,
    name: str,
    cause: str,
    finding: str,
    try_: str,
    gain: float | None,
    remains: float | None = None,
    gained: float = 0.0,
) -> Advice:
    """`remains`: seconds of the cause that stay; unless given, what the gain leaves of it.
    `gained`: seconds that other cures have taken from the step before.
    """
    now = case.part(cause)
    share = None
    if gain is not None:
        left = max(0.0, now - gained - gain if remains is None else remains)
        whole = case.step_s - gained - gain
        share = left / whole if whole > 0 else 0.0
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


def is_worth(each: Advice) -> bool:
    return each["gain_s"] is None or each["gain_share"] > WORTH
