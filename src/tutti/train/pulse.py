"""The pulse: about once a second, all ranks agree on what has happened since the last one.

One small exchange serves everything that needs agreement: the losses of the steps since, a loss
that is not finite and on which rank, a signal to stop, how fast each rank was, and how long it
took by itself in some of the steps. Between two pulses no rank waits for its device or for another
rank but in the step itself.

How many steps lie between two pulses is computed from exchanged numbers alone, so that all ranks
meet at the same step without asking.
"""

import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.train.arrivals import Arrivals

_SECONDS = 1.0
_MOST_STEPS = 1000
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Beat:
    """What all ranks know after a pulse."""

    first_step: int
    losses: tuple[float, ...]
    # The first step whose loss was not finite, and the rank it was on.
    broken: tuple[int, int] | None
    stop: bool
    # Samples per second of each rank's own work, waiting for others left out; 0: not measured.
    rates: tuple[float, ...]
    seconds: float
    # Of the steps that were measured: number, and each rank's own seconds of it; see Arrivals.
    own: tuple[tuple[int, tuple[float, ...]], ...] = ()

    @property
    def last_step(self) -> int:
        return self.first_step + len(self.losses) - 1


class Pulse:
    """Collects losses on the device and exchanges them when the time has come."""

    def __init__(self, rank: int, size: int, first_step: int, arrivals: Arrivals) -> None:
        self.rank = rank
        self.size = size
        self.next_at = first_step + 1
        self.arrivals = arrivals
        self._first = first_step
        self._losses: list[Tensor] = []
        self._busy = 0.0
        self._since = time.perf_counter()
        self._stop = False
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        self.resume()

    def add(self, losses: Tensor, busy: float = 0.0) -> None:
        """Remember steps' losses (this rank's parts of the means) without waiting for them."""
        self._losses.append(losses)
        self._busy += busy

    def resume(self) -> None:
        """Start the clock anew, after something that is no step: evaluation, a checkpoint."""
        self._since = time.perf_counter()
        self.arrivals.begin(self.next_at - self._first)

    def beat(self, rank_samples: int = 0) -> Beat:
        """Exchange. Waits for the device: the only place in the loop that does."""
        mine = torch.cat(self._losses).double().tolist() if self._losses else []
        now = time.perf_counter()
        own = self.arrivals.take()
        steps = len(mine)
        broken = next((n for n, loss in enumerate(mine) if not math.isfinite(loss)), None)
        # One vector, summed over ranks: each rank's own slots are zero on the others.
        common = [loss if math.isfinite(loss) else 0.0 for loss in mine] + [float(self._stop)]
        told = [
            0.0 if broken is None else broken + 1.0,
            rank_samples / self._busy if self._busy else 0.0,
            now - self._since,
            *(seconds for _, seconds in own),
        ]
        before, after = self.rank * len(told), (self.size - self.rank - 1) * len(told)
        slots = [0.0] * before + told + [0.0] * after
        total = torch.tensor(common + slots, dtype=torch.float64)
        dist.all_reduce(total)
        values: list[float] = total.tolist()
        beat = self._read(values, steps, [step for step, _ in own])
        self._first += steps
        # At most doubled: the first steps (compilation, warm-up) say little about the next.
        pace = int(_SECONDS * steps / max(beat.seconds, 1e-9))
        self.next_at = self._first + max(1, min(_MOST_STEPS, 2 * steps, pace))
        self._losses, self._busy, self._since = [], 0.0, time.perf_counter()
        return beat

    def close(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _read(self, values: Sequence[float], steps: int, measured: Sequence[int]) -> Beat:
        width = 3 + len(measured)
        # By what was told; each a value for every rank.
        slots = [tuple(values[steps + 1 + place :: width]) for place in range(width)]
        broken = [
            (self._first + int(found) - 1, rank) for rank, found in enumerate(slots[0]) if found
        ]
        return Beat(
            first_step=self._first,
            losses=tuple(values[:steps]),
            broken=min(broken, default=None),
            stop=values[steps] > 0,
            rates=slots[1],
            seconds=max(slots[2]),
            own=tuple(
                (self._first + step, slots[3 + place]) for place, step in enumerate(measured)
            ),
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = True
