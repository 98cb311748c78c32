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
    """All that is worth trying, the largest gain first."""
    found = [each for kind in _KINDS for each in kind(case) if is_worth(each)]
    found += [each for each in communication.accumulation(case, found) if is_worth(each)]
    return sorted(found, key=lambda each: -(each["gain_s"] or 0.0))
