"""When a rank is ready for the others: its own seconds of a step, with no waiting in them.

Replicas meet once in a step, when gradients are summed. From the moment in which a rank has the
sums of one step to the end of its own backward pass in the next, nobody keeps it waiting: update,
input, forward and backward are its own time. The rank with most of it is the one that the others
wait for:  waitᵣ = max over ranks of own − ownᵣ.

DDP sends during backward, but waits for what it has sent only after it. Where ranks meet inside
forward or backward (sharded parameters, tp, pp, joint batch norms), this time would hold waiting,
and is not known.
"""

import math
import time
from typing import Any

import torch
from torch import Tensor

# Between two pulses at most so many steps are measured: fast steps must not pay for a look at each.
MOST = 20

_engine: Any = torch.autograd.Variable._execution_engine


class Arrivals:
    """Measures steps on one rank, the same ones on all ranks. Nothing in here waits for a device.

    On CUDA the marks are events in the stream of the step, so that a device's time is measured,
    and a host that launches too late is seen as well.
    """

    def __init__(self, device: torch.device, known: bool) -> None:
        self._device = device
        self._known = known
        self._stride = 1
        self._step = 0  # since the last pulse
        self._met: float | torch.cuda.Event | None = None
        self._arrived: float | torch.cuda.Event | None = None
        self._measured: list[tuple[int, Any, Any]] = []

    def begin(self, steps: int) -> None:
        """The next pulse is so many steps away. Call it when this rank is about to go on."""
        self._stride = -(-steps // MOST)
        self._step = 0
        self._met = self._mark() if self._known else None

    def watch(self, loss: Tensor) -> None:
        """Before the last backward of a step: the end of it is where this rank arrives."""
        if self._met is not None:
            # Queued by the first thing that backward does, this comes before DDP's own callback,
            # which waits for the other ranks.
            hooked: Any = loss  # torch gives hooks no types
            hooked.register_hook(lambda _: _engine.queue_callback(self._arrive))

    def met(self) -> None:
        """The gradients' sums are there: the step's meeting is over, the next begins."""
        if self._met is not None:
            self._measured.append((self._step, self._met, self._arrived))
        self._step += 1
        self._met = self._arrived = None
        if self._known and self._step % self._stride == 0:
            self._met = self._mark()

    def take(self) -> list[tuple[int, float]]:
        """Own seconds of the measured steps since `begin`, by number; NaN: not known for this one.

        To be called when the device has been waited for.
        """
        taken, self._measured = self._measured, []
        return [(step, _between(met, arrived)) for step, met, arrived in taken]

    def _arrive(self) -> None:
        self._arrived = self._mark()

    def _mark(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _between(met: Any, arrived: Any) -> float:
    if arrived is None:
        return math.nan
    if isinstance(met, float):
        return float(arrived - met)
    arrived.synchronize()  # it is there: the losses of these steps have been read
    return float(met.elapsed_time(arrived)) / 1e3
