"""What ranks agree on between measurements: when to begin, when to stop, how long it took."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.world.launchers import identify

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Control:
    """A quiet group beside those that are measured; always gloo, so that it sleeps while idle."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo")
        self._asked_to_stop = False

    @property
    def asked_to_stop(self) -> bool:
        """Whether this rank was; others may not know yet."""
        return self._asked_to_stop

    def meet(self) -> bool:
        """Wait for all ranks; True once any of them was asked to stop: all know at once."""
        return self.largest([float(self._asked_to_stop)])[0] > 0

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest over all ranks, of each value."""
        found: list[float] = self.largest_of(torch.tensor(values, dtype=torch.float64)).tolist()
        return found

    def largest_of(self, values: Tensor) -> Tensor:
        """The same for a tensor, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return values

    def total(self, count: int) -> int:
        """The sum over all ranks."""
        counted = torch.tensor([count])
        dist.all_reduce(counted, group=self._group)
        return int(counted)

    @contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and SIGUSR1 (which mpirun passes on) end the measuring in good order.

        Collective: once any rank is inside, a signal ends none of them. One that came earlier may
        have ended a rank that was late; the others must not wait for it then.
        """

        def ask(number: int, frame: FrameType | None) -> None:
            self._asked_to_stop = True

        if self.rank == 0 and identify(os.environ).launcher == "slurm":
            step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ['SLURM_STEP_ID']}"
            how = f"scancel --signal=INT {step} stops and leaves what was measured"
            print(f"note: Ctrl-C at srun kills all ranks; {how}", file=sys.stderr, flush=True)
        before = {each: signal.signal(each, ask) for each in _STOPPING}
        try:
            try:
                self.meet()
            except RuntimeError:
                if self._asked_to_stop:
                    raise KeyboardInterrupt from None
                raise
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
