"""Simulates the forward and backward passes of a rank, and the schedule of a pipeline.

`Clock` simulates one pass (the forward or the backward of one microbatch) on one rank.
`run_schedule` simulates all passes of all ranks of a pipeline, in the order of torch's schedules.
`closed_form` approximates the result of `run_schedule` by formulas. `cut_units` cuts a model into
stages.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from tutti.parallel.layout import SPLIT_BACKWARD, ScheduleName, check_stages


@dataclass(frozen=True)
class Span:
    """One activity of one rank in the timeline. Times are seconds since the start of the step."""

    rank: int
    lane: str
    """`compute` or `comm`."""
    name: str
    start: float
    end: float


@dataclass
class Pass:
    """The forward or backward of one microbatch on one rank, in seconds."""

    elapsed: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    comm: float = 0.0
    """Seconds in which the link is busy, including tp collectives."""
    host_limited: float = 0.0
    """Seconds in which the device waits for the host."""
    spans: list[Span] = field(default_factory=list)


class Clock:
    """Simulates the host, the device and the link of one rank during one pass."""

    def __init__(self, slowdown: float, record: bool) -> None:
        self.device = self.link = 0.0
        self._host, self._slowdown, self._record = 0.0, slowdown, record
        self._result = Pass()
        self._deferred: list[tuple[str, float]] = []

    def run(self, name: str, work: float, tp: float, host: float, needed: float = 0.0) -> float:
        """Run a unit on the device, not before the time `needed`. Return the start time.

        `work` is the device time, `tp` is the time of tp collectives, and `host` is the time that
        the host needs to issue the unit, all in seconds.
        """
        result = self._result
        self._host += host
        begin = max(self.device, needed)
        result.exposed += begin - self.device + tp
        # The device is slower while the link is busy: in `busy` seconds it does the work of busy /
        # (1 + slowdown) seconds.
        if self.link > begin:
            busy = min(self.link - begin, work * (1 + self._slowdown))
            work += busy * self._slowdown / (1 + self._slowdown)
        result.compute += work
        result.comm += tp
        end = begin + work
        if self._host > end:
            result.host_limited += self._host - end
            end = self._host
        # The host time and the device time both advance by the tp collective. The host does not
        # issue operators in advance during this time: if the hosts limit the speed, they reach the
        # collective at different times and wait for each other.
        self._host += tp
        self.device = end + tp
        if self._record:
            result.spans.append(Span(0, "compute", name, begin, self.device))
        return begin

    def send(self, name: str, seconds: float, ready: float) -> float:
        """Communicate, not before the time `ready`. Return the end time.

        If `ready` is infinite, the communication starts after the pass, and infinity is returned.
        """
        if ready == math.inf:
            self._deferred.append((name, seconds))
            return ready
        start = max(self.link, ready)
        self.link = start + seconds
        self._result.comm += seconds
        if self._record and seconds:
            self._result.spans.append(Span(0, "comm", name, start, self.link))
        return self.link

    def result(self) -> Pass:
        """Return the pass. It ends when both computation and communication have ended."""
        deferred, self._deferred = self._deferred, []
        for name, seconds in deferred:
            self.send(name, seconds, self.device)
        self._result.exposed += max(0.0, self.link - self.device)
        self._result.elapsed = max(self.device, self.link)
        return self._result


@dataclass(frozen=True)
class Stage:
    """The passes of one pipeline stage: (forward, backward) of each microbatch, and the update.

    The forward of `first` also gathers parameters, and the backward of `last` also communicates
    gradients between replicas. `middle` does neither.
    """

    first: tuple[Pass, Pass]
    middle: tuple[Pass, Pass]
    last: tuple[Pass, Pass]
    update: Pass
    weight: float
    """The part of the backward seconds that computes the gradients of weights."""
    send: float
    """Seconds to send the output to the next stage."""

    @property
    def head(self) -> float:
        """Seconds of parameter all-gathers that delay the first forward."""
        return max(0.0, self.first[0].elapsed - self.middle[0].elapsed)

    @property
    def tail(self) -> float:
        """Seconds of gradient communication after the last backward."""
        return max(0.0, self.last[1].elapsed - self.middle[1].elapsed)

    def seconds(self, kind: str) -> float:
        """Return the seconds of an action: F, B, or the halves I and W of a split backward."""
        if kind == "F":
            return self.middle[0].elapsed
        backward = self.middle[1].elapsed
        weight = min(self.weight, backward / 2)
        return {"B": backward, "I": backward - weight, "W": weight}[kind]

    def comm(self, microbatches: int) -> float:
        """Return the seconds in which the link is busy in a step."""
        middle = self.middle[0].comm + self.middle[1].comm
        outer = self.first[0].comm + self.last[1].comm
        repeated = (microbatches - 1) * middle + outer
        return repeated + self.update.comm + 2 * microbatches * self.send


class PipelineStages:
    """All stages of a pipeline, and the sums of their times for each rank.

    The sums do not depend on the number of microbatches, so many candidates use the same object.
    """

    def __init__(self, schedule: ScheduleName, pp: int, stages: Sequence[Stage]) -> None:
        self.pp, self.stages = pp, stages
        self.per_rank = len(stages) // pp
        self.ranks: list[list[Stage]] = [[] for _ in range(pp)]
        for index, stage in enumerate(stages):
            self.ranks[rank_of_stage(schedule, index, pp)].append(stage)
        self.loads = [0.0] * pp
        self.compute = [0.0] * pp
        self.exposed = [0.0] * pp
        self.host = [0.0] * pp
        for rank, held in enumerate(self.ranks):
            for stage in held:
                for one in stage.middle:
                    self.loads[rank] += one.elapsed
                    self.compute[rank] += one.compute
                    self.exposed[rank] += one.exposed
                    self.host[rank] += one.host_limited
        # The all-gathers before the first forward delay all ranks. The gradients of a stage are
        # communicated during its last backward. If this communication ends after the computation,
        # it delays only the update of this rank.
        self.head = max(sum(stage.head for stage in held) for held in self.ranks)
        self.tails = [max(stage.tail for stage in held) for held in self.ranks]
        self.updates = [sum(stage.update.elapsed for stage in held) for held in self.ranks]
        self.update_compute = sum(stage.update.compute for stage in stages)
        self.update_exposed = sum(stage.update.exposed for stage in stages)
        once, twice = sum(s.comm(1) for s in stages), sum(s.comm(2) for s in stages)
        self._comm = once, twice - once
        self.sends = [2 * sum(stage.send for stage in held) for held in self.ranks]
        self.longest_send = max((stage.send for stage in stages[:-1]), default=0.0)
        self.backwards = [stage.seconds("B") for stage in stages[:pp]]
        halves = [s.seconds("F") + s.seconds("I") - s.seconds("W") for s in stages]
        self.split_waiting = max(0.0, sum(halves) / len(stages) * (pp - 1))

    def comm(self, microbatches: int) -> float:
        """Return the seconds in which a link is busy in a step, as the mean over all ranks."""
        return (self._comm[0] + (microbatches - 1) * self._comm[1]) / self.pp


def run_schedule(
    schedule: ScheduleName, microbatches: int, pipeline: PipelineStages, *, with_sends: bool
) -> tuple[list[float], list[Span]]:
    """Return the time at which each pipeline rank ends its last action, and the timeline.

    The actions of a rank run in the order of torch's schedule. Each action starts as soon as the
    previous action has ended and its inputs have arrived. Sending activations overlaps with
    computation.
    """
    pp, stages = pipeline.pp, pipeline.stages
    orders = _action_orders(schedule, pp, microbatches, pipeline.per_rank)
    durations = [{kind: stage.seconds(kind) for kind in "FBIW"} for stage in stages]
    sends = [stage.send if with_sends else 0.0 for stage in stages]
    last = len(stages) - 1
    # (action, stage, microbatch) → end time. The action is F, B or W. I, the first half of a split
    # backward, is stored as B.
    done: dict[tuple[str, int, int], float] = {}
    clocks, positions = [0.0] * pp, [0] * pp
    spans: list[Span] = []
    remaining = sum(map(len, orders))
    while remaining:
        before = remaining
        for rank in range(pp):
            order = orders[rank]
            while positions[rank] < len(order):
                kind, stage, number = order[positions[rank]]
                ready = 0.0
                if kind == "F" and stage > 0:
                    ready = done.get(("F", stage - 1, number), -1.0)
                    if ready < 0:
                        break
                    if _other_rank(schedule, stage - 1, stage, pp):
                        ready += sends[stage - 1]
                elif kind in "BI" and stage < last:
                    ready = done.get(("B", stage + 1, number), -1.0)
                    if ready < 0:
                        break
                    if _other_rank(schedule, stage, stage + 1, pp):
                        ready += sends[stage]
                if kind in "BI" and ("F", stage, number) not in done:
                    break
                start = max(clocks[rank], ready)
                clocks[rank] = end = start + durations[stage][kind]
                done[("B" if kind in "BI" else kind, stage, number)] = end
                spans.append(Span(rank, "compute", f"{kind}{number} stage {stage}", start, end))
                positions[rank] += 1
                remaining -= 1
        assert remaining < before, "the schedule deadlocks"
    return clocks, spans


@lru_cache(maxsize=64)
def _action_orders(
    schedule: ScheduleName, pp: int, microbatches: int, per_rank: int
) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    from tutti.parallel.pipeline.schedule_timeline import action_orders  # imports torch

    orders = action_orders(schedule, pp, microbatches, per_rank)
    return tuple(tuple((a.kind, a.stage, a.microbatch) for a in order) for order in orders)


def closed_form(
    schedule: ScheduleName, microbatches: int, pipeline: PipelineStages, *, with_sends: bool
) -> list[float]:
    """Return the time at which each pipeline rank ends its last action, computed by formulas.

    The formulas are exact if all stages take the same time. The slowest rank computes all
    microbatches without a pause. Before its first and after its last microbatch, it waits while the
    other ranks compute one microbatch. With a split backward, weight gradients are computed during
    a part of this waiting time. Each stage boundary delays the pipeline by two messages
    (activations and gradients). With 1f1b, every microbatch after the first also waits for two
    messages.
    """
    pp, loads = pipeline.pp, pipeline.loads
    slowest = max(loads)
    waiting = (sum(loads) - slowest) / pipeline.per_rank
    if schedule in SPLIT_BACKWARD:
        waiting = pipeline.split_waiting
    end = microbatches * slowest + waiting
    if with_sends:
        rounds = microbatches - 1 if schedule == "1f1b" else 0
        end += 2 * pipeline.longest_send * (pp - 1 + rounds)
    if schedule not in ("gpipe", "1f1b"):
        return [end] * pp
    # A rank ends earlier than the previous pipeline rank, by one backward of the previous rank.
    ends = [end]
    for backward in pipeline.backwards[:-1]:
        ends.append(ends[-1] - backward)
    return ends


def rank_of_stage(schedule: ScheduleName, stage: int, pp: int) -> int:
    """Return the pipeline rank that holds a stage, as in parallel/pipeline/schedules.py."""
    if schedule == "zbv" and stage >= pp:
        return 2 * pp - 1 - stage
    return stage % pp


def _other_rank(schedule: ScheduleName, first: int, second: int, pp: int) -> bool:
    return rank_of_stage(schedule, first, pp) != rank_of_stage(schedule, second, pp)


def cut_units(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the first unit of every stage.

    This is `cut_by_cost` of parallel/pipeline/stages.py with numpy arrays. The cuts minimize the
    cost of the most expensive stage. Among cuts with this minimum, they minimize the sum of squared
    costs.
    """
    check_stages(len(costs), stages, 1)
    sums = np.concatenate(([0.0], np.cumsum(costs)))
    part = sums[None, :] - sums[:, None]  # part[start, end]
    allowed = np.arange(len(sums))[:, None] < np.arange(len(sums))[None, :]
    part = np.where(allowed, part, math.inf)
    largest = _best_cut(part, stages, np.maximum)[0]
    squares = np.where(part <= largest * (1 + 1e-12), part * part, math.inf)
    return tuple(_best_cut(squares, stages, np.add)[1])


def _best_cut(part: np.ndarray, stages: int, join: Any) -> tuple[float, list[int]]:
    """Return the value of the best cuts and the start of each part, by dynamic programming."""
    count = part.shape[0]
    best = np.full(count, math.inf)
    best[0] = 0.0
    origins = []
    for _ in range(stages):
        table = join(best[:, None], part)
        origins.append(table.argmin(axis=0))
        best = table.min(axis=0)
    starts, end = [], count - 1
    for origin in reversed(origins):
        end = int(origin[end])
        starts.append(end)
    return float(best[-1]), starts[::-1]
