"""Why a step takes longer than it should: causes that add up to the loss of efficiency.

A step at N ranks takes T(N) seconds, and at best f × T(base): f is 1 where every rank keeps its
batch, base / N where they share one. So efficiency is E = f × T(base) / T(N). A recorded step is
the sum of its parts, and so its loss is the sum of what each part has more than f times what it
had, as a share of the step:

    1 − E(recorded) = Σ (part(N) − f × part(base)) / T(N)

What is asked for is the loss of steps that were not recorded. The difference of the two
efficiencies is what recording, or noise, has distorted: it is a cause of its own, `unexplained`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

NAMED = {"exposed_comm": "exposed", "wait": "wait", "bubble": "bubble", "input": "input"}
LOSS = (*NAMED, "other")
OTHER = ("compute", "gaps", "rest", "unexplained")
_OWN = ("compute", "hidden", "input", "host_gap", "rest")


@dataclass(frozen=True)
class Step:
    """Seconds of a step that was not recorded; parts of one that was."""

    seconds: float
    parts: Mapping[str, float]

    @property
    def recorded(self) -> float:
        """Seconds of a recorded step."""
        return sum(self.parts.values())

    def timed(self, part: str) -> float:
        """Seconds of a part in a step that was not recorded, if all parts shrink alike."""
        return self.parts[part] / self.recorded * self.seconds


def seen_from_the_fastest(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One step's parts for all ranks, with the sum of their mean.

    What a rank does by itself is that of the rank which needs least for it. What the others need
    more is why it waits: so a rank that is slower than the others counts as waiting, in full, and
    not partly as compute of an average rank. Compute includes what communication hides behind.
    """
    fastest = min(ranks, key=lambda parts: sum(parts[name] for name in _OWN))
    whole = mean(sum(parts.values()) for parts in ranks)
    seen = {
        "compute": fastest["compute"] + fastest["hidden"],
        "exposed": mean(parts["exposed"] for parts in ranks),
        "bubble": mean(parts["bubble"] for parts in ranks),
        **{name: fastest[name] for name in ("input", "host_gap", "rest")},
    }
    return seen | {"wait": whole - sum(seen.values())}


def efficiency(step: Step, base: Step, ideal: float) -> float:
    """`ideal` is f: the step's length as a part of the base's, if nothing were lost."""
    return ideal * base.seconds / step.seconds


def causes(step: Step, base: Step, ideal: float) -> tuple[dict[str, float], dict[str, float]]:
    """The loss by cause, as parts of the step, and what `other` consists of.

    A cause below 0 is something that got better.
    """

    def more(part: str) -> float:
        return (step.parts[part] - ideal * base.parts[part]) / step.recorded

    loss = {cause: more(part) for cause, part in NAMED.items()}
    other = {"compute": more("compute"), "gaps": more("host_gap"), "rest": more("rest")}
    recorded = ideal * base.recorded / step.recorded
    other["unexplained"] = recorded - efficiency(step, base, ideal)
    return loss | {"other": sum(other.values())}, other
