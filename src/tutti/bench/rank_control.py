"""Coordinate the ranks of a benchmark: barriers, maxima over ranks, errors, and Ctrl-C."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.bench import Unsupported
from tutti.world.errors import UsageError
from tutti.world.exchange import gather_json
from tutti.world.launchers import identify

Result = TypeVar("Result")
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class RankControl:
    """Collectives between measurements, over a separate gloo group.

    Measured groups are not used for coordination. gloo sleeps while it waits, so ranks that wait
    take no CPU time from ranks that measure.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo")
        self.stop_requested = False  # on this rank; check_stop informs the others

    def check_stop(self) -> bool:
        """Wait for all ranks. Returns True on all ranks if any rank received a stop signal."""
        return self.max_over_ranks([float(self.stop_requested)])[0] > 0

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Return the maximum over all ranks of each value."""
        return list(self.max_of_tensor(torch.tensor(values, dtype=torch.float64)).tolist())

    def max_of_tensor(self, values: Tensor) -> Tensor:
        """Replace each element by its maximum over all ranks, and return the tensor."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return values

    def sum_over_ranks(self, count: int) -> int:
        """Return the sum of `count` over all ranks."""
        total = torch.tensor([count])
        dist.all_reduce(total, group=self._group)
        return int(total)

    @contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """Let SIGINT, SIGTERM and SIGUSR1 (forwarded by mpirun) only set `stop_requested`.

        The handlers are installed for the duration of the `with` block. Collective: there is a
        barrier at entry, so as soon as any rank runs the block, all ranks have their handlers. If a
        signal kills a rank that has not installed its handlers yet, the barrier fails.
        """

        def request_stop(number: int, frame: FrameType | None) -> None:
            self.stop_requested = True

        if self.rank == 0 and identify(os.environ).launcher == "slurm":
            step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ['SLURM_STEP_ID']}"
            print(
                "note: Ctrl-C at srun kills all ranks; to stop and keep what was measured: "
                f"scancel --signal=INT {step}",
                file=sys.stderr,
                flush=True,
            )
        before = {number: signal.signal(number, request_stop) for number in _STOP_SIGNALS}
        try:
            try:
                self.check_stop()
            except RuntimeError:
                if self.stop_requested:
                    raise KeyboardInterrupt from None
                raise
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def try_on_all_ranks(action: Callable[[], Result]) -> tuple[Result | None, str]:
    """Run `action` on every rank; returns (result, ""), or (None, reason) if any rank failed.

    Collective. Only exceptions that a backend raises for an unsupported call are caught.
    """
    result, reason = None, None
    try:
        result = action()
    except (Unsupported, UsageError) as error:
        reason = str(error)
    # torch raises these errors if a backend lacks an operation; waits raise them if a peer failed.
    except (RuntimeError, TypeError, ValueError, TimeoutError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    reasons = [each for each in gather_json(reason) if each is not None]
    return (None, reasons[0]) if reasons else (result, "")
