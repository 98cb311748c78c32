"""Control of benchmark ranks: barriers, errors, Ctrl-C, CPU pinning, host memory, core latency."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from tutti.bench import Unsupported, check_free_memory
from tutti.machine.cpu_numa import allowed_cpus, format_cpu_list, parse_cpu_list, read_memory
from tutti.machine.sysfs import SysFiles
from tutti.world.errors import TIMEOUT, UsageError
from tutti.world.exchange import RanksMissing, gather_json, gather_json_from_store
from tutti.world.launchers import identify
from tutti.world.rendezvous import shm_unavailable
from tutti.world.world import World

Result = TypeVar("Result")
# Seconds for which a failed rank waits for the other ranks. They may be blocked in a collective and
# never answer.
_FAILED_TIMEOUT = 5.0
_attempts = 0  # number of try_on_all_ranks calls so far, which is equal on all ranks
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# ---- Barriers, errors and Ctrl-C ----


class RankControl:
    """Coordinates the ranks between measurements, with collectives on a separate gloo group.

    gloo sleeps while it waits, so waiting ranks take no CPU time from ranks that measure.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo")
        self.stop_requested = False  # whether this rank has received a stop signal

    def check_stop(self) -> bool:
        """Wait for all ranks. Return True on all ranks if any rank received a stop signal."""
        return self.max_over_ranks([float(self.stop_requested)])[0] > 0

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise maximum of `values` over all ranks."""
        return list(self.max_of_tensor(torch.tensor(values, dtype=torch.float64)).tolist())

    def max_of_tensor(self, values: Tensor) -> Tensor:
        """Replace `values` by their element-wise maximum over all ranks, and return the tensor."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return values

    def sum_over_ranks(self, count: int) -> int:
        """Return the sum of `count` over all ranks."""
        total = torch.tensor([count])
        dist.all_reduce(total, group=self._group)
        return int(total)

    @contextlib.contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """Set `stop_requested` on SIGINT, SIGTERM and SIGUSR1, instead of ending the process.

        This holds inside the `with` block, which all ranks must enter. mpirun forwards SIGUSR1 to
        the ranks. A barrier at the start of the block ensures that all ranks have installed their
        signal handlers. If a signal kills a rank without handlers, the barrier fails on the others.
        """

        def request_stop(number: int, frame: FrameType | None) -> None:
            self.stop_requested = True

        if self.rank == 0 and identify(os.environ).launcher == "slurm":
            step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ['SLURM_STEP_ID']}"
            note = "note: Ctrl-C at srun kills all ranks. To stop and keep the results so far, run "
            print(f"{note}scancel --signal=INT {step}", file=sys.stderr, flush=True)
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
    """Run `action` on every rank. Return (result, ""), or (None, reason) if any rank failed.

    All ranks must call this function. Only exceptions that a backend raises for an unsupported call
    are caught. The ranks exchange the reasons through the store, not with a collective, because
    ranks without an exception may still be blocked in a collective of `action`. If they do not
    answer in time, the failed rank raises its own exception again.
    """
    global _attempts
    _attempts += 1
    result, reason = None, None
    raised: Exception | None = None
    try:
        result = action()
    except (Unsupported, UsageError) as error:
        reason, raised = str(error), error
    # torch raises these exceptions if a backend lacks an operation, or if a peer fails while this
    # rank waits for it.
    except (RuntimeError, TypeError, ValueError, TimeoutError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raised = error
    store, timeout = _get_default_store(), TIMEOUT if raised is None else _FAILED_TIMEOUT
    key, rank, size = f"tutti/attempt{_attempts}", dist.get_rank(), dist.get_world_size()
    try:
        found = gather_json_from_store(store, key, reason, rank, size, timeout)
    except RanksMissing:
        if raised is None:
            raise
        store.set(f"{key}/given-up", "")
        raise raised from None
    if raised is not None and store.check([f"{key}/given-up"]):
        # Another rank failed first and has stopped waiting. Its failure caused this exception.
        raise raised
    reasons = [message for message in found if message is not None]
    return (None, reasons[0]) if reasons else (result, "")


# ---- CPU pinning: measured times must not include migration between CPUs or waiting for a CPU ----


def pin_rank(world: World, pin: bool | str = True) -> str:
    """Pin this rank to CPUs, and return the list of CPUs. All ranks must call this function.

    If `pin` is True or "own", the ranks of a host that have the same set of allowed CPUs divide the
    set among themselves. If there are more ranks than CPUs, each rank gets one CPU, round-robin. If
    `pin` is False or "none", the rank is not pinned. Otherwise `pin` has one CPU list per local
    rank, such as "0/1/2-3".
    """
    if pin in (False, "none"):
        return world.cpus
    if pin in (True, "own"):
        cpu_set = [world.host, format_cpu_list(allowed_cpus())]
        sharers = [rank for rank, other in enumerate(gather_json(cpu_set)) if other == cpu_set]
        cpus = share_of_cpus(allowed_cpus(), sharers.index(world.rank), len(sharers))
    else:
        lists = str(pin).split("/")
        cpus = parse_cpu_list(lists[world.local_rank % len(lists)])
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, OverflowError) as error:
        chosen, allowed = format_cpu_list(cpus), format_cpu_list(allowed_cpus())
        reason = f"this rank cannot run on CPU {chosen} ({error})"
        raise UsageError(f"--pin: {reason}. Its allowed CPUs are {allowed}") from None
    for thread in Path("/proc/self/task").iterdir():  # also pin running threads, such as gloo's
        with contextlib.suppress(OSError):  # the thread may have ended in the meantime
            os.sched_setaffinity(int(thread.name), cpus)
    return format_cpu_list(cpus)


def share_of_cpus(cpus: tuple[int, ...], position: int, sharers: int) -> tuple[int, ...]:
    """Divide `cpus` among `sharers` ranks, and return the CPUs of the rank at `position`."""
    if sharers > len(cpus):
        return (cpus[position % len(cpus)],)
    return cpus[position * len(cpus) // sharers : (position + 1) * len(cpus) // sharers]


def check_host_memory(size: int, world: World) -> None:
    """Raise UsageError if a host has too little memory for messages of `size` bytes.

    Without this check, the kernel would kill ranks in the middle of the run. All ranks must call
    this function.
    """
    available = read_memory(SysFiles()).available_bytes
    for ranks, free in gather_json((world.local_size, available)):
        check_free_memory(size, ranks, free)


# ---- Latency between cores ----


class CoreLatency:
    """Round-trip time of a cache line between the cores of neighbouring ranks of one host.

    The latency is tens of nanoseconds between cores that share a cache, and hundreds of nanoseconds
    between other cores. Message times depend on this latency. A hypervisor may move the cores of a
    virtual machine to other physical cores during a run, so the latency is measured before and
    after the benchmark. If two ranks share a CPU, nothing is measured. All ranks must make the same
    calls.
    """

    _ROUNDS, _TURNS, _TIMEOUT = 5, 2000, 2.0  # the timeout is in seconds
    _MAX_PAIRS = 7
    _MOVED_RATIO = 2.0  # changes by a smaller factor count as noise

    def __init__(self, world: World, cpus: Sequence[str]) -> None:
        sets = [set(parse_cpu_list(text)) for text in cpus]
        disjoint = len(sets) > 1 and sum(map(len, sets)) == len(set().union(*sets))
        on_one_cpu_host = world.device.type == "cpu" and world.nodes == 1
        measurable = on_one_cpu_host and disjoint and not shm_unavailable()
        pairs = list(pairwise(range(world.size)))[: self._MAX_PAIRS] if measurable else []
        self._rank = world.rank
        # Rows for JSON: the latency before and after the benchmark, or null if a rank timed out.
        self.rows: list[dict[str, Any]] = [
            {"ranks": pair, "before_ns": None, "after_ns": None} for pair in pairs
        ]
        self.measure("before_ns")

    def __str__(self) -> str:
        measured = [(*row["ranks"], row["before_ns"]) for row in self.rows if row["before_ns"]]
        times = ", ".join(f"{a} and {b}: {time:.0f} ns" for a, b, time in measured)
        return f"cache-line round trip between ranks {times}" if times else ""

    def change(self) -> str:
        """Return a note if the latency of a pair changed by more than a factor of 2, else ""."""
        for row in self.rows:
            (a, b), before, after = row["ranks"], row["before_ns"], row["after_ns"]
            if before and after and max(before / after, after / before) >= self._MOVED_RATIO:
                return (
                    f"the cache-line round trip between ranks {a} and {b} was {before:.0f} ns "
                    f"before and {after:.0f} ns after the measurement. The hypervisor probably "
                    "moved the virtual cores of these ranks to other physical cores during the "
                    "measurement, so the times before and after the move are not comparable"
                )
        return ""

    def measure(self, field: str) -> None:
        """Measure the latency of every pair of ranks, and store it in `field` of the pair's row."""
        if not self.rows:
            return
        from tutti.comm.shm.native import core
        from tutti.comm.symmetric import Heap

        medians: list[float | None] = [None] * len(self.rows)  # None for pairs without this rank
        with Heap(bytes=1 << 16, device="cpu") as heap:
            lines = heap.counters(self._ROUNDS * len(self.rows))
            for number, row in enumerate(self.rows):
                heap.barrier()  # measure one pair at a time
                first, _ = row["ranks"]
                if self._rank not in row["ranks"]:
                    continue
                round_trip_ns, starts = core().tutti_round_trip_ns, self._rank == first
                samples = [
                    round_trip_ns(lines.address(index, first), starts, self._TURNS, self._TIMEOUT)
                    for index in range(self._ROUNDS * number, self._ROUNDS * (number + 1))
                ]
                medians[number] = median(samples) if min(samples) > 0 else None
            heap.barrier()
        medians_of_ranks = gather_json(medians)
        for number, row in enumerate(self.rows):
            row[field] = medians_of_ranks[row["ranks"][0]][number]
