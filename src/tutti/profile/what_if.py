"""Predicts a step with other DDP bucket sizes, with a small model that is fitted to the trace.

A message of s bytes takes α + β·s seconds. Gradients become ready during backward at the same times
as in the trace. A bucket is sent when it is full and a lane is free (NCCL has one lane, gloo has
two). Transfers after backward and transfers while backward is idle are exposed. The model is also
evaluated for the recorded buckets, and its results are scaled to the recorded time.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from tutti.measure.collective_bandwidth import fit_alpha_beta
from tutti.profile.rank_trace import Collective, Intervals, RankTrace, Step
from tutti.profile.step_breakdown import buckets_in

_SEPARABLE = 4.0  # ratio of message sizes that separates latency from bandwidth
_TOUCH = 1e-6  # seconds by which messages must overlap to count as concurrent
_MAX_STEPS = 48  # maximum number of steps of all ranks. More steps hardly change the mean.


class MessageCost(NamedTuple):
    """The cost of a message, which takes α + β·bytes seconds."""

    alpha: float
    beta: float
    separated: bool  # False if there is only one message size, so that all time counts as α


def fit_message_cost(points: Sequence[tuple[int, float]]) -> MessageCost | None:
    """Fit α and β to (bytes, seconds), by least squares of the relative errors of the medians."""
    by_size: dict[int, list[float]] = defaultdict(list)
    for size, seconds in points:
        if seconds > 0:
            by_size[size].append(seconds)
    if not by_size:
        return None
    separable = max(by_size) >= _SEPARABLE * max(1, min(by_size))
    alpha, beta = fit_alpha_beta(
        [
            (len(times) / median(times) ** 2, 1.0, size if separable else 0.0, median(times))
            for size, times in by_size.items()
        ]
    )
    return MessageCost(alpha, beta, separated=beta > 0)


class ExposedTime(NamedTuple):
    """Seconds per step in which gradients move and nothing computes."""

    within_backward: float  # time between operators of backward, when the rank is idle anyway
    added: float  # time of calls during backward and transfers after it, which lengthen the step


class _BackwardPass(NamedTuple):
    """One backward pass of one rank, with the cost of the all-reduce calls removed."""

    ready: list[tuple[float, float]]  # (time, number of bytes ready until then), from 0 bytes
    end: float
    idle_share: float  # share of the pass in which nothing computes
    call_seconds: float  # time that the call for a bucket takes on the calling thread


class BucketModel:
    """Predicts the exposed time if the gradients of a traced run were sent in other buckets."""

    def __init__(self, traces: Sequence[RankTrace], cost: MessageCost, measured: float) -> None:
        """`measured` is the exposed time per step of the recorded buckets, for calibration."""
        all_steps = [(trace, step) for trace in traces for step in trace.steps]
        chosen = all_steps[:: 1 + len(all_steps) // _MAX_STEPS]
        found = [(trace, step, buckets_in(trace, step)) for trace, step in chosen]
        found = [each for each in found if each[2] and each[1].gradients]
        self.cost = cost
        self.lanes = max((_max_concurrent(buckets) for *_, buckets in found), default=1)
        self._passes = [_backward_pass(*each) for each in found]
        self.sizes = [[bucket.bytes for bucket in buckets] for *_, buckets in found]
        # Only the added time is scaled, because the time within backward cannot exceed backward.
        self.ratio: float | None = 1.0
        model = self._predict(self.sizes) if found else ExposedTime(0.0, 0.0)
        rest = measured - model.within_backward
        self.ratio = rest / model.added if model.added > 0 and rest > 0 else None
        self.recorded = ExposedTime(model.within_backward, model.added * (self.ratio or 0.0))

    def with_bucket_size(self, size: float) -> ExposedTime:
        """Return the exposed time per step with buckets of `size` bytes."""
        sizes = []
        for backward in self._passes:
            total = backward.ready[-1][1]
            count = max(1, int(-(-total // size)))
            sizes.append([size] * (count - 1) + [total - size * (count - 1)])
        return self._predict(sizes)

    def _predict(self, sizes: Sequence[Sequence[float]]) -> ExposedTime:
        results = [self._send(*each) for each in zip(self._passes, sizes, strict=True)]
        within, added = map(fmean, zip(*results, strict=True))
        return ExposedTime(within, added * (self.ratio or 0.0))

    def _send(self, backward: _BackwardPass, sizes: Sequence[float]) -> ExposedTime:
        lanes = [float("-inf")] * self.lanes  # the time at which each lane becomes free
        moments, bytes_ready = zip(*backward.ready, strict=True)
        transfers = []
        for number, moment in enumerate(np.interp(np.cumsum(sizes), bytes_ready, moments)):
            start = max(float(moment) + number * backward.call_seconds, lanes[0])
            transfers.append((start, start + self.cost.alpha + self.cost.beta * sizes[number]))
            heapq.heapreplace(lanes, transfers[-1][1])
        calls = len(sizes) * backward.call_seconds
        end = backward.end + calls
        within = Intervals.of(transfers).between(moments[0], end).seconds
        return ExposedTime(backward.idle_share * within, calls + max(0.0, max(lanes) - end))


def _backward_pass(trace: RankTrace, step: Step, buckets: list[Collective]) -> _BackwardPass:
    assert step.gradients is not None
    first, end = step.gradients
    # On a GPU the calls run ahead of the device, but on a CPU a call blocks the backward pass.
    call = 0.0 if trace.on_device else median(b.call_returned - b.arrival for b in buckets)
    called = [bucket.bucket_ready or bucket.arrival for bucket in buckets]
    moments = [moment - number * call for number, moment in enumerate(called)]
    # With gradient accumulation only the last pass has buckets. Assume that gradients became ready
    # at the same rate before the first bucket was full as afterwards.
    rest = sum(bucket.bytes for bucket in buckets[1:])
    if rest and moments[-1] > moments[0]:
        first = max(first, moments[0] - (moments[-1] - moments[0]) * buckets[0].bytes / rest)
    ready, total = [(min(first, moments[0]), 0.0)], 0.0
    for moment, bucket in zip(moments, buckets, strict=True):
        total += bucket.bytes
        ready.append((max(moment, ready[-1][0]), total))
    begin = ready[0][0]
    end = max(end - len(buckets) * call, ready[-1][0])
    computing = trace.compute.between(begin, end + len(buckets) * call).seconds
    idle_share = max(0.0, 1 - computing / (end - begin)) if end > begin else 0.0
    return _BackwardPass(ready, end, idle_share, call)


def _max_concurrent(buckets: Sequence[Collective]) -> int:
    """Return the largest number of messages that moved data at the same time."""
    edges = [(bucket.transfer_start + _TOUCH, 1) for bucket in buckets]
    edges += [(bucket.end, -1) for bucket in buckets]
    return max(1, *accumulate(change for _, change in sorted(edges)))
