"""What a step would cost with other buckets: a small model, fitted to the trace it is used on.

A message of s bytes takes α + β·s seconds. Gradients become ready over backward as they did; every
bucket is sent when it is full and a lane is free (NCCL has one, gloo's threads are two). What of it
lies after backward is exposed, and so is what runs while backward itself has nothing to compute.
The model of the buckets as they are is compared with what was seen, and the ratio is applied.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np

from tutti.profile.buckets import in_step
from tutti.profile.collective import Collective
from tutti.profile.cost import alpha_beta
from tutti.profile.intervals import Times
from tutti.profile.rank_trace import RankTrace, Step

# Sizes that differ by less do not tell latency and bandwidth apart.
_APART = 4.0
_TOUCH = 1e-6  # messages that follow each other at once are not under way together
_MOST_STEPS = 48  # of all ranks, spread evenly; more do not change a mean


@dataclass(frozen=True)
class Cost:
    """Seconds that a message takes: α + β·bytes."""

    alpha: float
    beta: float
    apart: bool  # sizes differ enough to tell α from β; else all of it is α, the best case

    def seconds(self, size: float) -> float:
        return self.alpha + self.beta * size


def fit(points: Sequence[tuple[int, float]]) -> Cost | None:
    """α and β, neither below 0, by least squares of the relative error of each size's median."""
    by_size: dict[int, list[float]] = defaultdict(list)
    for size, seconds in points:
        if seconds > 0:
            by_size[size].append(seconds)
    if not by_size:
        return None
    apart = max(by_size) >= _APART * max(1, min(by_size))
    alpha, beta = alpha_beta(
        [
            (len(seen) / median(seen) ** 2, 1.0, size if apart else 0.0, median(seen))
            for size, seen in by_size.items()
        ]
    )
    return Cost(alpha, beta, apart=beta > 0)


@dataclass(frozen=True)
class Exposed:
    """Seconds of a step in which gradients move and nothing computes."""

    during: float  # within backward, between its operators: they would be idle anyway
    added: float  # what the step is longer by: calls in backward, and the end after it


@dataclass(frozen=True)
class _Pass:
    """One backward pass of one rank, as if calls cost nothing."""

    ready: list[tuple[float, float]]  # moment, bytes ready until then; the first has none
    end: float
    idle: float  # the share of it in which nothing computes
    call: float  # seconds that the caller loses to each bucket


class WhatIf:
    """The gradients of a traced run, to be sent in other buckets."""

    def __init__(self, traces: Sequence[RankTrace], cost: Cost, seen: float) -> None:
        """`seen`: seconds of a step that its buckets are exposed, to calibrate by."""
        every = [(trace, step) for trace in traces for step in trace.steps]
        some = every[:: 1 + len(every) // _MOST_STEPS]
        found = [(trace, step, in_step(trace, step)) for trace, step in some]
        found = [each for each in found if each[2] and each[1].gradients]
        self.cost = cost
        self.lanes = max((_at_once(sent) for *_, sent in found), default=1)
        self._passes = [_observed(*each) for each in found]
        self.sizes = [[each.bytes for each in sent] for *_, sent in found]
        model = self._of(self.sizes) if found else Exposed(0.0, 0.0)
        # What lies within backward is bounded by it; the rest is what the model may be wrong about.
        left = seen - model.during
        self.ratio = left / model.added if model.added > 0 and left > 0 else None
        self.now = self._scaled(model)

    def with_buckets_of(self, size: float) -> Exposed:
        """Exposed seconds of a step with buckets of so many bytes."""
        cut = []
        for one in self._passes:
            total = one.ready[-1][1]
            count = max(1, int(-(-total // size)))
            cut.append([size] * (count - 1) + [total - size * (count - 1)])
        return self._scaled(self._of(cut))

    def _scaled(self, model: Exposed) -> Exposed:
        return Exposed(model.during, model.added * (self.ratio or 0.0))

    def _of(self, sizes: Sequence[Sequence[float]]) -> Exposed:
        outcomes = [self._send(*each) for each in zip(self._passes, sizes, strict=True)]
        return Exposed(mean(o.during for o in outcomes), mean(o.added for o in outcomes))

    def _send(self, one: _Pass, sizes: Sequence[float]) -> Exposed:
        lanes = [float("-inf")] * self.lanes  # until when each is taken
        moments, bytes_ready = zip(*one.ready, strict=True)
        moving = []
        for number, moment in enumerate(np.interp(np.cumsum(sizes), bytes_ready, moments)):
            start = max(float(moment) + number * one.call, lanes[0])
            moving.append((start, start + self.cost.seconds(sizes[number])))
            heapq.heapreplace(lanes, moving[-1][1])
        end = one.end + len(sizes) * one.call
        within = Times.of(moving).between(one.ready[0][0], end).seconds
        tail = max(0.0, max(lanes) - end)
        return Exposed(one.idle * within, len(sizes) * one.call + tail)


def _observed(trace: RankTrace, step: Step, sent: list[Collective]) -> _Pass:
    assert step.gradients is not None
    first, end = step.gradients
    called = [each.ready or each.arrival for each in sent]
    # On a GPU the host calls ahead of time; on a CPU a call stops the pass that makes it.
    call = 0.0 if trace.on_device else median(each.returned - each.arrival for each in sent)
    moments = [moment - number * call for number, moment in enumerate(called)]
    # Of several passes (accumulation) only the last has buckets: gradients came as fast before the
    # first bucket was full as they did after it.
    rest = sum(each.bytes for each in sent[1:])
    if rest and moments[-1] > moments[0]:
        first = max(first, moments[0] - (moments[-1] - moments[0]) * sent[0].bytes / rest)
    ready, total = [(min(first, moments[0]), 0.0)], 0.0
    for moment, each in zip(moments, sent, strict=True):
        total += each.bytes
        ready.append((max(moment, ready[-1][0]), total))
    end = max(end - len(sent) * call, ready[-1][0])
    length = end - ready[0][0]
    computing = trace.compute.between(ready[0][0], ready[0][0] + length + len(sent) * call).seconds
    return _Pass(ready, end, max(0.0, 1 - computing / length) if length > 0 else 0.0, call)


def _at_once(sent: Sequence[Collective]) -> int:
    """How many messages were moving at the same time, at most."""
    edges = [(each.waited_until + _TOUCH, 1) for each in sent] + [(each.end, -1) for each in sent]
    most = now = 0
    for _, change in sorted(edges):
        now += change
        most = max(most, now)
    return max(1, most)
