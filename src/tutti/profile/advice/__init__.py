"""What to try, and what it would gain: one function for each kind of finding.

Gains are computed from the trace, by arithmetic that each function states, and never add up: two
ways to shorten the same wait shorten it once. A gain that the trace cannot tell is None, and the
text says why.
"""

from tutti.profile.advice import balance, communication
from tutti.profile.advice.case import Advice, Case, is_worth

__all__ = ["Advice", "Case", "advise"]

_KINDS = (
    *(communication.buckets, communication.overlap, communication.grouping),
    *(communication.replicas, communication.sharding),
    *(balance.input_, balance.stragglers, balance.binding, balance.microbatches, balance.gaps),
)


def advise(case: Case) -> list[Advice]:
    """All that is worth trying, the largest gain first.

    Accumulation changes what is trained: it comes after the cures whose remainder it is for.
    """
    found = [each for kind in _KINDS for each in kind(case) if is_worth(each)]
    found.sort(key=_gain, reverse=True)
    for each in filter(is_worth, communication.accumulation(case, found)):
        before = [place for place, other in enumerate(found, 1) if _precedes(other, each)]
        found.insert(max(before, default=0), each)
    return found


def _precedes(other: Advice, accumulation: Advice) -> bool:
    return other["id"] in communication.OF_SUMS or _gain(other) >= _gain(accumulation)


def _gain(each: Advice) -> float:
    return each["gain_s"] or 0.0
