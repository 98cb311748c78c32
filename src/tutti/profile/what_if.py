"""Predicts the time of a backward pass with different DDP buckets, from recorded gradient times.

The prediction simulates DDP. torch's own function assigns the parameters to the new buckets (see
program_settings.py). A bucket is sent when all of its gradients are ready on all ranks, the
all-reduce call of the previous bucket has returned, and a lane of the backend is free. A lane sends
one message at a time (NCCL has one lane, gloo has two). A message of s bytes takes α + β·s seconds.
The all-reduce call of a bucket delays all later gradients. Therefore the delays of the recorded
calls are subtracted from the recorded gradient times, and the delays of the predicted calls are
added.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median
from typing import Any, NamedTuple

from tutti.measure.collective_bandwidth import OPERATIONS, fit_alpha_beta
from tutti.profile.rank_trace import Collective, RankTrace, Step
from tutti.profile.step_breakdown import buckets_in

# Latency and bandwidth can be fitted separately if the largest message is at least this many times
# larger than the smallest message.
_SEPARABLE = 4.0
_TOUCH = 1e-6  # seconds by which messages must overlap to count as concurrent
# Maximum number of simulated backward passes, summed over ranks. More passes hardly change the
# quartiles.
_MAX_STEPS = 48
# If all messages have the same size, the bandwidth is unknown. It is then assumed to be at least
# this many bytes per second: 1 Gbit/s between hosts, and 1 GB/s inside a host, where loopback
# sockets are faster.
_SLOWEST_LINK = 0.125e9
_SLOWEST_LOOPBACK = 1e9


class MessageCost(NamedTuple):
    """The cost of a message: it takes α + β·bytes seconds."""

    alpha: float
    beta: float
    separated: bool  # False if all messages have similar sizes: all time counts as α


def fit_message_cost(points: Sequence[tuple[int, float]]) -> MessageCost | None:
    """Fit α and β to points (bytes, seconds), or return None if there are no points.

    The fit uses the median time of each message size, and minimizes the squared relative errors.
    """
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
    return MessageCost(alpha, beta, separated=separable)


class _Backward(NamedTuple):
    """One backward pass of one rank."""

    # The time at which each parameter's gradient would be ready if all-reduce calls took no time.
    ready: dict[int, float]
    end: float  # the time at which the computation would end if all-reduce calls took no time
    call_seconds: float  # the time that an all-reduce call takes on the calling thread
    finish: float  # the recorded time at which the computation and all all-reduces had ended
    buckets: list[Collective]

    @property
    def hidden_s(self) -> float:
        """Seconds in which buckets moved data during the computation."""
        moving = ((bucket.transfer_start, min(bucket.end, self.end)) for bucket in self.buckets)
        return sum(max(0.0, end - start) for start, end in moving)


class _Result(NamedTuple):
    finish: float  # the time at which computation and transfers have ended, mean over ranks
    hidden: float  # seconds of transfers before the end of the computation, mean over ranks


@dataclass(frozen=True)
class PredictedGain:
    """The seconds that a change would save in each step, as one list per set of assumptions."""

    scenarios: list[list[float]]
    more_hidden: float  # additional seconds of communication during backward, per step


class BucketModel:
    """Predicts the gain of different buckets.

    `passes` has a list of backward passes for each step. Each pass is a dict {rank: _Backward}.
    `passes` is empty if the traces do not contain all gradients and buckets.
    """

    def __init__(self, traces: Sequence[RankTrace], ddp: dict[str, Any]) -> None:
        one_host = len({trace.host for trace in traces}) == 1
        self._slowest_link = _SLOWEST_LOOPBACK if one_host else _SLOWEST_LINK
        self._bytes: list[int] = ddp["bytes"]
        self._present: list[list[int]] = ddp["buckets"]
        by_step: dict[tuple[int, int], dict[int, _Backward]] = defaultdict(dict)
        for trace in traces:
            for step in trace.steps:
                for number, backward in enumerate(_backward_passes(trace, step, ddp)):
                    by_step[step.number, number][trace.rank] = backward
        complete = {key: found for key, found in by_step.items() if len(found) == len(traces)}
        chosen = sorted(complete)[: _MAX_STEPS // max(1, len(traces))]
        self.passes: dict[int, list[dict[int, _Backward]]] = defaultdict(list)
        for key in chosen:
            self.passes[key[0]].append(complete[key])
        everything = [ranks for passes in self.passes.values() for ranks in passes]
        recorded = [backward for ranks in everything for backward in ranks.values()]
        self.lanes = max((_max_concurrent(each.buckets) for each in recorded), default=1)
        self.messages = {
            number: [point for ranks in passes for point in _points(ranks)]
            for number, passes in self.passes.items()
        }
        sizes = [bucket.bytes for backward in recorded for bucket in backward.buckets]
        self.largest = max(sizes, default=0)
        self.bucket_count = len(self._present)
        # (Bytes sent) / (bytes of gradients). The ratio is less than 1 if a communication hook
        # compresses the gradients.
        passes_sent = len(recorded) * sum(self._bytes)
        self._sent_share = sum(sizes) / passes_sent if passes_sent else 1.0

    def passes_per_step(self) -> int:
        """Return the number of backward passes in a step that communicate."""
        return max(map(len, self.passes.values()), default=0)

    def gain(
        self, buckets: Sequence[Sequence[int]], cost: MessageCost, ranks: int, overhead: float
    ) -> PredictedGain:
        """Return the gain of `buckets`. Recording makes a step `overhead` times as long."""
        scenarios: list[list[float]] = []
        more_hidden: list[float] = []
        largest = max(map(self._size, buckets))
        for variant in self._cost_variants(cost, largest, ranks):
            for scale in {1.0, 1 / overhead}:
                modelled, recorded = [], []
                for number, passes in self.passes.items():
                    fitted = variant or fit_message_cost(self.messages[number]) or cost
                    gains, gains_of_recorded = 0.0, 0.0
                    for one_pass in passes:
                        now = self._send(one_pass, self._present, fitted, scale)
                        new = self._send(one_pass, buckets, fitted, scale)
                        gains += now.finish - new.finish
                        finish = fmean(backward.finish for backward in one_pass.values())
                        gains_of_recorded += finish - new.finish
                        more_hidden.append((new.hidden - now.hidden) * len(passes))
                    modelled.append(gains)
                    recorded.append(gains_of_recorded)
                scenarios.append(modelled)
                if scale == 1.0:
                    scenarios.append(recorded)
        return PredictedGain(scenarios, median(more_hidden))

    def _cost_variants(
        self, cost: MessageCost, largest: float, ranks: int
    ) -> Iterator[MessageCost | None]:
        """Yield several message costs that are consistent with the recorded messages.

        None means that the cost is fitted for each step separately.
        """
        yield cost
        if cost.separated:
            yield None
            if largest > _SEPARABLE * self.largest:  # the fit is extrapolated
                yield cost._replace(beta=cost.beta / 2)
                # The measured times hardly depend on β if β·s is at most α / 4 for the largest
                # recorded message of s bytes. So the true β may be as large as α / (4 s).
                unseen = cost.alpha / 4 / max(1, self.largest)
                yield cost._replace(beta=max(2 * cost.beta, unseen))
            return
        size = median(size for points in self.messages.values() for size, _ in points)
        factor = OPERATIONS["all_reduce"].bus_factor(ranks)
        beta = min(cost.alpha / max(1, size), factor / self._slowest_link)
        yield MessageCost(cost.alpha - beta * size, beta, separated=False)

    def _size(self, bucket: Sequence[int]) -> float:
        return self._sent_share * sum(self._bytes[index] for index in bucket)

    def _send(
        self,
        ranks: dict[int, _Backward],
        buckets: Sequence[Sequence[int]],
        cost: MessageCost,
        scale: float,
    ) -> _Result:
        lanes = [float("-inf")] * self.lanes  # the time at which each lane becomes free
        origin = min(min(backward.ready.values()) for backward in ranks.values())

        def scaled(moment: float) -> float:
            return origin + (moment - origin) * scale

        called = dict.fromkeys(ranks, float("-inf"))  # the time of the last call of each rank
        transfers = []
        for number, bucket in enumerate(buckets):
            for rank, backward in ranks.items():
                full = scaled(max(backward.ready[index] for index in bucket))
                full += number * backward.call_seconds
                called[rank] = max(full, called[rank] + backward.call_seconds)
            start = max(*called.values(), lanes[0])
            end = start + cost.alpha + cost.beta * self._size(bucket)
            transfers.append((start, end))
            heapq.heapreplace(lanes, end)
        finishes, hidden = [], []
        for backward in ranks.values():
            end = scaled(backward.end) + len(buckets) * backward.call_seconds
            finishes.append(max(end, *lanes))
            hidden.append(sum(max(0.0, min(done, end) - start) for start, done in transfers))
        return _Result(fmean(finishes), fmean(hidden))


def gradient_buckets(trace: RankTrace, step: Step, parameters: int) -> list[Collective]:
    """Return DDP's gradient all-reduces in a step.

    With find_unused_parameters, DDP also all-reduces a map of the used parameters, with one int32
    per parameter. This all-reduce is left out. `parameters` is the number of parameters, or -1 if
    DDP sends no such map.
    """
    return [bucket for bucket in buckets_in(trace, step) if bucket.bytes != 4 * parameters]


def _backward_passes(trace: RankTrace, step: Step, ddp: dict[str, Any]) -> Iterator[_Backward]:
    """Yield the backward passes of a step in which all buckets were sent."""
    order = ddp["ready_order"]
    count, times = len(order), step.accumulated
    if step.gradients is None or not count or not times or len(times) % count:
        return
    used_map = count if ddp["find_unused_parameters"] else -1
    buckets = gradient_buckets(trace, step, used_map)
    before = step.start
    for first in range(0, len(times), count):
        moments = times[first : first + count]
        is_last = first + count == len(times)
        after = step.end if is_last else moments[-1]
        sent = [each for each in buckets if before < (each.bucket_ready or 0.0) <= after]
        before = moments[-1]
        if len(sent) != len(ddp["buckets"]):
            continue
        # On a GPU, calls run ahead of the device and cost no time. On a CPU, a call blocks the
        # backward pass.
        calls = [0.0 if trace.on_device else b.call_returned - b.arrival for b in sent]
        ready, position, blocked = {}, 0, 0.0
        for moment, parameter in zip(moments, order, strict=True):
            while position < len(sent) and (sent[position].bucket_ready or 0.0) <= moment:
                blocked += calls[position]
                position += 1
            ready[parameter] = moment - blocked
        end = max(step.gradients[1] if is_last else moments[-1], moments[-1])
        yield _Backward(
            ready=ready,
            end=max(end - sum(calls), *ready.values()),
            call_seconds=median(calls),
            finish=max(end, *(bucket.end for bucket in sent)),
            buckets=sent,
        )


def _points(ranks: dict[int, _Backward]) -> list[tuple[int, float]]:
    """Return (bytes, transfer seconds) of each bucket of one backward pass."""
    columns = zip(*(backward.buckets for backward in ranks.values()), strict=True)
    return [
        (members[0].bytes, max(member.end - member.transfer_start for member in members))
        for members in columns
    ]


def _max_concurrent(buckets: Sequence[Collective]) -> int:
    """Return the largest number of messages that moved data at the same time."""
    edges = [(bucket.transfer_start + _TOUCH, 1) for bucket in buckets]
    edges += [(bucket.end, -1) for bucket in buckets]
    return max(1, *accumulate(change for _, change in sorted(edges)))
