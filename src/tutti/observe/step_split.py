"""Splits the steps of a running job into parts for each rank, and finds the late ranks.

The input is the operations, phases and steps in the rings. Nothing else is measured in the job.

**Clock.** CLOCK_MONOTONIC is the same in all processes of a host. Times of different hosts are
compared after adding the host's `clock_offset` (seconds since 1970 minus CLOCK_MONOTONIC), so they
are as exact as the clocks of the hosts, which NTP usually keeps within a few milliseconds.

**Blocks.** A rank is blocked in an operation i from its entry e(i) until it continues:

    block(i) = [e(i), min(c, e(i+1), end of the step)]

e(i+1) is the entry of the next operation of the rank. c is the latest completion among i and the
earlier operations that have not completed at e(i). So blocks do not overlap, and waits are never
added twice. Two kinds of operations have no block:
- a send, because the rank does not wait for its receiver
- an asynchronous all-reduce of a 1-D tensor that is followed by another one of the same group.
  These are the gradient buckets of DDP. Backward continues after all of them but the last one.

**Wait and exposed.** An operation cannot begin to move data before the ranks that it needs have
entered it. `needed(i)` is the latest of their entries. These ranks are: all members of the group;
for broadcast and scatter, the root; for a receive, the sender. The root of a broadcast or scatter
and the ranks that are not the root of a reduce or gather do not wait for other ranks.

    wait    = min(needed, end of the block) - e(i), if positive
    exposed = the rest of the block

If an operation was overwritten in the ring of another rank, or that rank's host is not read, the
entry of that rank is unknown, and the other entries are used.

**Parts of a step**, which add up to the step:

    input, optimizer   time of these phases
    collection         garbage collection of the oldest generation
    wait, exposed      sums over the blocks
    compute            the rest: forward, backward, Python code, sleeps and gaps

The own time of a rank is its step minus its wait.

**GPUs.** The CPU does not stop in an operation on a GPU, and the ring does not say when the
operation completed. There c = needed, so wait is counted only as far as the CPU entered no other
operation. It is a lower bound, and exposed is 0.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from tutti.measure.units import ordinal
from tutti.observe.ring_reader import Operation, Process, Step

PARTS = ("compute", "exposed", "wait", "input", "optimizer", "collection")
_OWN = [number for number, name in enumerate(PARTS) if name != "wait"]
_FROM_ROOT = ("broadcast", "scatter")
_TO_ROOT = ("reduce", "gather")

WINDOW_STEPS, WINDOW_SECONDS = 20, 3.0  # the least that a statement about a rank is based on
_MAX_WINDOW = 1000  # steps
_MIN_SHARE = 0.1  # a straggler delays its step by at least this share
_MIN_SECONDS = 2e-3
_MIN_LATE = 0.75  # a steady straggler is late in at least this share of the steps
_MIN_TIMES = 6  # a periodic straggler is late at least this often
_SIGMAS = 3.0


@dataclass(frozen=True)
class RankStep:
    """One step of one rank. Times are in seconds; `began` and `ended` are on the common clock."""

    rank: int
    step: int
    began: float
    ended: float
    parts: dict[str, float]
    waited_for: dict[int, float]
    """{rank: how long this rank waited for it}: the rank that entered an operation last."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def own(self) -> float:
        return self.seconds - self.parts["wait"]


# -- the split -------------------------------------------------------------------------------------


def split_steps(processes: Iterable[Process], first: int = 2) -> list[RankStep]:
    """Return the completed steps from number `first` on, in the order of rank and step.

    Step 1 is left out by default: it begins with the process and includes its start.
    """
    ranks = [process for process in processes if process.worker < 0]
    offsets = _clock_offsets(ranks)
    entries: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for process in ranks:
        for operation in process.operations:
            key = _key(process, operation)
            entries[key][process.rank] = operation.entered + offsets[process.host]
    found = []
    for process in ranks:
        offset = offsets[process.host]
        of_step: dict[int, list[Operation]] = defaultdict(list)
        for operation in process.operations:
            # Operations of other threads, such as an asynchronous checkpoint, are not part of the
            # training loop. GPU operations of backward are entered by threads of autograd.
            if operation.thread == process.pid or operation.device != "cpu":
                of_step[operation.step + 1].append(operation)
        for step in process.step_history:
            if step.number < first or step.ended <= step.began:
                continue
            waited_for, exposed = _walk(process, step, of_step[step.number], entries, offset)
            parts = _parts(step, sum(waited_for.values()), exposed)
            found.append(
                RankStep(
                    process.rank,
                    step.number,
                    step.began + offset,
                    step.ended + offset,
                    parts,
                    waited_for,
                )
            )
    return found


def _clock_offsets(ranks: Sequence[Process]) -> dict[str, float]:
    """Return {host: the median clock offset of its processes, relative to the first host}."""
    by_host: dict[str, list[float]] = defaultdict(list)
    for process in ranks:
        by_host[process.host].append(process.clock_offset)
    # Differences are small numbers, so that no digits of CLOCK_MONOTONIC are lost.
    medians = {host: median(offsets) for host, offsets in by_host.items()}
    base = next(iter(medians.values()), 0.0)
    return {host: offset - base for host, offset in medians.items()}


def _key(process: Process, operation: Operation) -> tuple[Any, ...]:
    """Return the key of an operation, which is the same on all ranks that take part in it."""
    if not operation.point_to_point:
        return (operation.group, operation.sequence)
    peer = _global_rank(process, operation)
    ends = (process.rank, peer) if operation.kind == "send" else (peer, process.rank)
    if operation.kind == "recv_any_source":
        ends = (-1, process.rank)
    return (operation.group, *ends, operation.tag, operation.sequence)


def _global_rank(process: Process, operation: Operation) -> int:
    """Return the global rank of the root or of the other end."""
    group = process.groups.get(operation.group)
    members = group.ranks if group is not None else ()
    return members[operation.peer] if 0 <= operation.peer < len(members) else operation.peer


def _needed(
    process: Process, operation: Operation, entries: dict[tuple[Any, ...], dict[int, float]]
) -> tuple[float, int]:
    """Return when the last rank that the operation needs has entered it, and that rank."""
    entered = entries[_key(process, operation)]
    own = (entered[process.rank], process.rank)
    if operation.kind == "recv_any_source":
        return (operation.completed and float("inf"), process.rank)
    if operation.point_to_point or operation.kind in (*_FROM_ROOT, *_TO_ROOT):
        root = _global_rank(process, operation)
        waits_for_root = operation.point_to_point or operation.kind in _FROM_ROOT
        if waits_for_root:
            return max(own, (entered[root], root)) if root in entered else own
        if process.rank != root:
            return own
    return max((time, rank) for rank, time in entered.items())


def _walk(
    process: Process,
    step: Step,
    operations: list[Operation],
    entries: dict[tuple[Any, ...], dict[int, float]],
    offset: float,
) -> tuple[dict[int, float], float]:
    """Return ({rank: seconds of waiting for it}, seconds of exposed communication) of a step."""
    waited_for: dict[int, float] = defaultdict(float)
    exposed = 0.0
    end_of_step = step.ended + offset
    pending: list[tuple[float, float, int]] = []  # (completed, needed, the rank needed)
    operations = sorted(operations, key=lambda each: each.entered)
    for position, operation in enumerate(operations):
        following = operations[position + 1] if position + 1 < len(operations) else None
        entered = operation.entered + offset
        until = end_of_step if following is None else min(end_of_step, following.entered + offset)
        if operation.kind != "send":
            needed, rank = _needed(process, operation, entries)
            if operation.completed:
                completed = operation.completed + offset
            else:  # unknown, or not yet
                completed = needed if operation.device != "cpu" else end_of_step
            pending.append((completed, needed, rank))
        if not (following is not None and _same_burst(operation, following)):
            end = min(max((each[0] for each in pending), default=entered), until)
            needed, rank = max((each[1:] for each in pending), default=(entered, process.rank))
            wait = max(0.0, min(needed, end) - entered)
            if wait > 0:
                waited_for[rank] += wait
            exposed += max(0.0, end - entered - wait)
        pending = [each for each in pending if each[0] > until]
    return dict(waited_for), exposed


def _same_burst(operation: Operation, following: Operation) -> bool:
    """Return whether both operations are gradient buckets of one backward pass."""
    return operation.group == following.group and all(
        each.asynchronous and each.kind == "all_reduce" and len(each.shape) == 1
        for each in (operation, following)
    )


def _parts(step: Step, wait: float, exposed: float) -> dict[str, float]:
    """Return the parts of a step. They add up to the step, even if measured times overlap."""
    left = step.ended - step.began
    parts = dict.fromkeys(PARTS, 0.0)
    for name, seconds in (
        ("wait", wait),
        ("exposed", exposed),
        ("collection", step.collection),
        ("input", step.phases.get("input", 0.0)),
        ("optimizer", step.phases.get("optimizer", 0.0)),
    ):
        parts[name] = min(max(0.0, seconds), left)
        left -= parts[name]
    return parts | {"compute": left}


# -- late ranks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTable:
    """Steps of all ranks: `parts[step, rank, part]` in seconds, in the order of PARTS.

    A part is NaN if the rank has not made the step, or if the step is not known any more.
    """

    numbers: tuple[int, ...]
    ranks: tuple[int, ...]
    parts: "np.ndarray[Any, np.dtype[np.floating[Any]]]"

    def latest(self) -> "StepTable":
        """Return the steps that statements about ranks are based on, or no steps if too few."""
        whole = ~np.isnan(self.parts).any(axis=(1, 2))
        table = self.parts[whole][-_MAX_WINDOW:]
        numbers = tuple(n for n, known in zip(self.numbers, whole, strict=True) if known)
        # The slowest rank determines how long a step takes.
        ends = np.cumsum(table.sum(axis=2).max(axis=1, initial=0.0)[::-1])
        count = max(WINDOW_STEPS, int(np.searchsorted(ends, WINDOW_SECONDS)) + 1)
        if len(table) < count:
            count = 0
        kept = len(table) - count
        return StepTable(numbers[len(numbers) - count :], self.ranks, table[kept:])


def tabulate(steps: Iterable[RankStep]) -> StepTable:
    """Return a table of steps. Parts of missing steps are NaN."""
    rows: dict[int, dict[int, RankStep]] = defaultdict(dict)
    for each in steps:
        rows[each.step][each.rank] = each
    numbers = tuple(sorted(rows))
    ranks = tuple(sorted({rank for row in rows.values() for rank in row}))
    parts = np.full((len(numbers), len(ranks), len(PARTS)), np.nan)
    for i, number in enumerate(numbers):
        for j, rank in enumerate(ranks):
            if rank in rows[number]:
                parts[i, j] = [rows[number][rank].parts[name] for name in PARTS]
    return StepTable(numbers, ranks, parts)


@dataclass(frozen=True)
class Straggler:
    """A rank that makes the other ranks wait, and the part of the step in which it is longer."""

    rank: int
    cause: str  # a part of the step, without `wait`
    seconds: float  # by which the own time exceeds the median of the other ranks, in a late step
    share: float  # of the time of all steps
    period: int | None  # n if every n-th step is late; None if most steps are
    late: int
    of: int  # steps

    @property
    def text(self) -> str:
        """What the rank does, for example `waits 80.1 ms longer for input in every 5th step`."""
        longer = f"{1e3 * self.seconds:.1f} ms longer"
        doing = {
            "compute": f"computes {longer}",
            "input": f"waits {longer} for input",
            "exposed": f"communicates {longer}",
            "optimizer": f"spends {longer} in the optimizer",
            "collection": f"spends {longer} in garbage collection",
        }[self.cause]
        return doing if self.period is None else f"{doing} in every {ordinal(self.period)} step"


def find_stragglers(table: StepTable) -> list[Straggler]:
    """Return the late ranks in the latest steps, the longest delay first.

    The latest steps are at least 20 steps and at least 3 seconds, because the scheduler of a busy
    host can slow one rank for some tenths of a second.

    The own time of a rank is compared with the median of the own times of the other ranks in the
    same step. The difference is the excess of the rank in this step. A rank is late

    - in most steps: the median m of its excess is at least 10 % of a typical step and above 3 σ,
      where σ is the larger one of 1.4826 × MAD / sqrt(steps) of the excess, and 1.4826 × MAD of
      the medians of the other ranks. The excess is above m / 2 in 75 % of the steps.
    - or in every n-th step, at least 6 times: the median m over these steps is at least 10 % of a
      typical step, the excess is above m / 2 in 90 % of these steps, and in at most 5 % of the
      others. (find_period in the room `profile` needs exactly periodic steps. In a live job, the
      scheduler delays some other steps, too.)

    The cause is the part that exceeds the median of the other ranks most in the late steps.
    """
    table = table.latest()
    if len(table.ranks) < 2 or not table.numbers:
        return []
    own = table.parts[:, :, _OWN].sum(axis=2)
    excess = own - _median_of_others(own)
    length = table.parts.sum(axis=2).max(axis=1)
    least = max(_MIN_SECONDS, _MIN_SHARE * float(np.median(length)))
    middle = np.median(excess, axis=0)
    scatter = 1.4826 * np.median(np.abs(excess - middle), axis=0) / len(excess) ** 0.5
    found = []
    for i, rank in enumerate(table.ranks):
        others = np.delete(middle, i)
        between = 1.4826 * float(np.median(np.abs(others - np.median(others))))
        late, period = excess[:, i] > middle[i] / 2, None
        is_steady = late.mean() >= _MIN_LATE and middle[i] >= least
        if not is_steady or middle[i] <= _SIGMAS * max(scatter[i], between):
            late, period = _periodic(np.array(table.numbers), excess[:, i], least)
            if period is None:
                continue
        longer = [_longer(table.parts[late][:, :, part], i) for part in _OWN]
        seconds = float(np.median(excess[late, i]))
        found.append(
            Straggler(
                rank,
                PARTS[_OWN[int(np.argmax(longer))]],
                seconds,
                min(1.0, seconds * float(late.sum()) / float(length.sum())),
                period,
                int(late.sum()),
                len(late),
            )
        )
    return sorted(found, key=lambda each: -each.share)


def _median_of_others(values: Any) -> Any:
    """Return, for each step and rank, the median of the values of the other ranks."""
    ordered = np.sort(values, axis=1)
    place = values.argsort(axis=1).argsort(axis=1)
    others = values.shape[1] - 1

    def at(index: int) -> Any:  # without the rank itself, later values move one place forward
        return np.take_along_axis(ordered, np.where(place <= index, index + 1, index), axis=1)

    return (at((others - 1) // 2) + at(others // 2)) / 2


def _longer(part: Any, rank: int) -> float:
    """Return the median difference between a part of a rank and the median of the other ranks."""
    return float(np.median((part - _median_of_others(part))[:, rank]))


def _periodic(numbers: Any, excess: Any, least: float) -> tuple[Any, int | None]:
    """Return (which steps are late, period), or the period None."""
    count = len(excess)
    # One of the five longest steps is probably not long by chance.
    longest = np.argsort(excess)[-5:]
    for anchor in longest[excess[longest] >= least]:
        for period in range(2, count // _MIN_TIMES + 1):
            late = numbers % period == numbers[anchor] % period
            half = float(np.median(excess[late])) / 2
            if (
                2 * half >= least
                and (excess[late] > half).mean() >= 0.9
                and (excess[~late] > half).mean() <= 0.05
            ):
                return late, period
    return np.zeros(count, dtype=bool), None
