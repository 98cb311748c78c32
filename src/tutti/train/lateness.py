"""Who waits for whom while it trains: a share for every rank, and a word about one that is late."""

import math
from collections import deque
from statistics import fmean, median_low

from tutti.train.pulse import Beat

_STEPS = 20  # measured steps that a verdict is about
_SHARE = 0.1  # of the step: what others must wait before it is worth a word
_STEADY = 0.75  # of the steps in which the rank must have been late
_SILENCE = 1000  # steps before the next word


class Lateness:
    """Follows the pulses; all ranks know the same."""

    def __init__(self, first_step: int) -> None:
        self._first = first_step
        self._steps: deque[tuple[int, tuple[float, ...], float]] = deque(maxlen=_STEPS)
        self._silent_until = 0

    def add(self, beat: Beat) -> list[float | None]:
        """For every rank, the share of the step that it waited for others; None: not known.

        The first step is warm-up, to which ranks come as they please.
        """
        ranks = len(beat.rates)
        if ranks == 1:
            return [0.0]
        known = [each for each in beat.own if all(map(math.isfinite, each[1]))]
        if beat.first_step == self._first or not known:
            return [None] * ranks
        seconds = beat.seconds / len(beat.losses)
        self._steps.extend((step, own, seconds) for step, own in known)
        waits = [fmean(max(own) - own[rank] for _, own in known) for rank in range(ranks)]
        return [min(1.0, wait / seconds) for wait in waits]

    def warning(self) -> str | None:
        """The line that names a late rank, once, and then not before many more steps."""
        if len(self._steps) < _STEPS or self._steps[-1][0] < self._silent_until:
            return None
        owns = [own for _, own, _ in self._steps]
        means = [fmean(each) for each in zip(*owns, strict=True)]
        usual, most = median_low(means), max(means)
        # Several may be late together, those of a slow host for one.
        late = [rank for rank, mean in enumerate(means) if mean - usual > (most - usual) / 2]
        if not late:
            return None
        others = fmean(mean for rank, mean in enumerate(means) if rank not in late)
        behind = fmean(means[rank] for rank in late) - others
        share = behind / fmean(seconds for _, _, seconds in self._steps)
        steady = fmean(
            min(own[rank] for rank in late) - median_low(own) > behind / 2 for own in owns
        )
        if share < _SHARE or steady < _STEADY:
            return None
        last = self._steps[-1][0]
        self._silent_until = last + _SILENCE
        who = f"rank {late[0]} is" if len(late) == 1 else f"ranks {', '.join(map(str, late))} are"
        return (
            f"{who} late: the others wait {100 * min(share, 1.0):.0f} % of the step for "
            f"{'it' if len(late) == 1 else 'them'} (last {last - self._steps[0][0] + 1} steps)"
        )
