"""Predict a step with other DDP bucket sizes, with a small model that is fitted to the trace.

A message of s bytes takes α + β·s seconds. Gradients become ready during backward at the same times
as in the trace. A bucket is sent when it is full and a lane is free (NCCL has one lane, gloo has
two). Transfers after backward are exposed, and so are transfers while backward is idle. The model
is also evaluated for the recorded buckets, and its results are scaled to the recorded time.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from tutti.measure.message_cost import fit_alpha_beta
from tutti.profile.communication_summary import buckets_in
from tutti.profile.intervals import Intervals
from tutti.profile.rank_trace import Collective, RankTrace, Step

# Message sizes must differ by this factor to separate latency from bandwidth.
_SEPARABLE = 4.0
_TOUCH = 1e-6  # seconds: messages that follow each other directly are not concurrent
_MOST_STEPS = 48  # over all ranks, evenly spaced; more steps hardly change the mean


@dataclass(frozen=True)
class MessageCost:
    """Seconds of a message: α + β·bytes."""

    alpha: float
    beta: float
    separated: bool  # False: with one message size all time is attributed to α (best case)

    def seconds(self, size: float) -> float:
        return self.alpha + self.beta * size


def fit_message_cost(points: Sequence[tuple[int, float]]) -> MessageCost | None:
    """Fit α and β to (bytes, seconds) points: least squares of the medians' relative errors."""
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


@dataclass(frozen=True)
class ExposedTime:
    """Seconds per step in which gradients move and nothing computes."""

    within_backward: float  # between operators of backward, when the rank is idle anyway
    added: float  # time that lengthens the step: calls during backward, transfers after it


@dataclass(frozen=True)
class _BackwardPass:
    """One backward pass of one rank, with the cost of the all-reduce calls removed."""

    ready: list[tuple[float, float]]  # (time, bytes ready until then), from 0 bytes
    end: float
    idle_share: float  # share of the pass in which nothing computes
    call_seconds: float  # time that the call for a bucket takes on the calling thread


class BucketModel:
    """Predicts the exposed time if the gradients of a traced run were sent in other buckets."""

    def __init__(self, traces: Sequence[RankTrace], cost: MessageCost, measured: float) -> None:
        """`measured`: exposed seconds per step of the recorded buckets, for calibration."""
        all_steps = [(trace, step) for trace in traces for step in trace.steps]
        chosen = all_steps[:: 1 + len(all_steps) // _MOST_STEPS]
        found = [(trace, step, buckets_in(trace, step)) for trace, step in chosen]
        found = [each for each in found if each[2] and each[1].gradients]
        self.cost = cost
        self.lanes = max((_most_concurrent(buckets) for *_, buckets in found), default=1)
        self._passes = [_observe(*each) for each in found]
        self.sizes = [[each.bytes for each in buckets] for *_, buckets in found]
        model = self._predict(self.sizes) if found else ExposedTime(0.0, 0.0)
        # Only the added time is scaled: the time within backward cannot exceed backward.
        rest = measured - model.within_backward
        self.ratio = rest / model.added if model.added > 0 and rest > 0 else None
        self.recorded = self._scaled(model)

    def with_bucket_size(self, size: float) -> ExposedTime:
        """Exposed seconds per step with buckets of `size` bytes."""
        sizes = []
        for one in self._passes:
            total = one.ready[-1][1]
            count = max(1, int(-(-total // size)))
            sizes.append([size] * (count - 1) + [total - size * (count - 1)])
        return self._scaled(self._predict(sizes))

    def _scaled(self, model: ExposedTime) -> ExposedTime:
        return ExposedTime(model.within_backward, model.added * (self.ratio or 0.0))

    def _predict(self, sizes: Sequence[Sequence[float]]) -> ExposedTime:
        results = [self._send(*each) for each in zip(self._passes, sizes, strict=True)]
        return ExposedTime(
            fmean(each.within_backward for each in results), fmean(each.added for each in results)
        )

    def _send(self, one: _BackwardPass, sizes: Sequence[float]) -> ExposedTime:
        lanes = [float("-inf")] * self.lanes  # when each lane becomes free
        moments, bytes_ready = zip(*one.ready, strict=True)
        transfers = []
        for number, moment in enumerate(np.interp(np.cumsum(sizes), bytes_ready, moments)):
            start = max(float(moment) + number * one.call_seconds, lanes[0])
            transfers.append((start, start + self.cost.seconds(sizes[number])))
            heapq.heapreplace(lanes, transfers[-1][1])
        end = one.end + len(sizes) * one.call_seconds
        within = Intervals.of(transfers).between(one.ready[0][0], end).seconds
        tail = max(0.0, max(lanes) - end)
        return ExposedTime(one.idle_share * within, len(sizes) * one.call_seconds + tail)


def _observe(trace: RankTrace, step: Step, buckets: list[Collective]) -> _BackwardPass:
    assert step.gradients is not None
    first, end = step.gradients
    called = [each.bucket_ready or each.arrival for each in buckets]
    # On a GPU the calls run ahead of the device; on a CPU a call blocks the backward pass.
    call = 0.0 if trace.on_device else median(e.call_returned - e.arrival for e in buckets)
    moments = [moment - number * call for number, moment in enumerate(called)]
    # With gradient accumulation only the last pass has buckets. Assume that gradients became ready
    # at the same rate before the first bucket was full as afterwards.
    rest = sum(each.bytes for each in buckets[1:])
    if rest and moments[-1] > moments[0]:
        first = max(first, moments[0] - (moments[-1] - moments[0]) * buckets[0].bytes / rest)
    ready, total = [(min(first, moments[0]), 0.0)], 0.0
    for moment, each in zip(moments, buckets, strict=True):
        total += each.bytes
        ready.append((max(moment, ready[-1][0]), total))
    begin = ready[0][0]
    end = max(end - len(buckets) * call, ready[-1][0])
    length = end - begin
    computing = trace.compute.between(begin, begin + length + len(buckets) * call).seconds
    idle_share = max(0.0, 1 - computing / length) if length > 0 else 0.0
    return _BackwardPass(ready, end, idle_share, call)


def _most_concurrent(buckets: Sequence[Collective]) -> int:
    """The largest number of messages that moved data at the same time."""
    edges = [(each.transfer_start + _TOUCH, 1) for each in buckets]
    edges += [(each.end, -1) for each in buckets]
    most = current = 0
    for _, change in sorted(edges):
        current += change
        most = max(most, current)
    return max(1, most)
