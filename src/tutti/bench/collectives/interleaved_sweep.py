"""The sweep of `tutti bench collectives`.

In each case all backends are measured in turns, and their results are checked.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tutti.bench.collectives.cases import Backend, CollectiveCase, Payload, PreparedCase, payload
from tutti.bench.rank_control import RankControl, try_on_all_ranks
from tutti.measure.message_cost import bandwidth
from tutti.measure.spread import summarize_us
from tutti.measure.timing import time_back_to_back, time_isolated
from tutti.world.world import World

# If calls are longer than this, fewer rounds are enough.
_LONG_CALL_SECONDS = 0.02
_ROUNDS_OF_LONG_CALLS = 4
_MAX_CALLS_PER_ROUND = 1000

Row = dict[str, Any]


@dataclass(frozen=True)
class SweepSettings:
    """How much to measure.

    `iterations` is the number of calls; None means as many calls as the budget allows.
    """

    timings: Sequence[str] = ("back-to-back",)
    iterations: int | None = None
    warmup: int = 20
    budget: float = 0.5  # seconds per backend, case and timing
    rounds: int = 8  # every backend has one turn per round


@dataclass
class _Entry:
    """One backend in one case."""

    backend: Backend
    prepared: PreparedCase
    seconds: float = 0.0  # time of one call, estimated in the warm-up
    calls: int = 0  # per round
    wrong: int = 0

    def reset(self, data: Payload) -> None:
        """Clear the result, then write the input. The order matters: in place, the two overlap."""
        self.prepared.received.zero_()
        self.prepared.sent.copy_(data.sent)


@dataclass
class Sweep:
    """Measures cases one after the other, and keeps the rows and the skipped combinations."""

    backends: Sequence[Backend]
    settings: SweepSettings
    control: RankControl
    world: World
    rows: list[Row] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    stopped: bool = False
    complete: bool = False  # every case was measured

    def run(
        self, groups: Iterable[Sequence[CollectiveCase]], report: Callable[[list[Row]], None]
    ) -> None:
        """Measure all cases. After each group, `report` is called with the rows of the group."""
        for group in groups:
            rows = [row for case in group for row in self._measure(case)]
            self.rows += rows
            report(rows)
            if self.stopped:
                return
        self.complete = True

    def planned_rows(self, groups: Iterable[Sequence[CollectiveCase]]) -> list[Row]:
        """Return the rows that will be measured, to check that --expect matches any of them.

        The figures of these rows are ideal values: infinite bandwidth, and no wrong elements.
        """
        times = {"p50": 1e-9, "p95": 1e-9, "min": 1e-9, "cv": 0.0}
        ideal = {"time_us": times, "busbw_gbs": math.inf, "group": 1, "wrong": 0}
        return [
            {**_row_key(case, backend.name, timing), **ideal}
            for group in groups
            for case in group
            for backend in self.backends
            for timing in self.settings.timings
        ]

    def _measure(self, case: CollectiveCase) -> list[Row]:
        if self.stopped:
            return []
        data = payload(case)
        entries = list(self._prepare(case, data))
        rows: list[Row] = []
        try:
            for timing in self.settings.timings:
                samples = self._interleave(case, data, entries, timing)
                # The list of samples is empty if the sweep was stopped.
                rows += [_row(case, *each, timing) for each in zip(entries, samples, strict=False)]
        finally:
            for entry in entries:
                entry.prepared.close()
        return [] if self.stopped else rows

    def _prepare(self, case: CollectiveCase, data: Payload) -> Iterator[_Entry]:
        """Yield the backends that support the case, after a checked first call and a warm-up."""
        for backend in self.backends:
            prepared, reason = try_on_all_ranks(partial(backend.prepare, case))
            if prepared is None:
                self._skip(backend.name, case, reason)
                continue
            entry = _Entry(backend, prepared)
            wrong, reason = try_on_all_ranks(partial(self._count_wrong, entry, data, True))
            if wrong is None:
                prepared.close()
                self._skip(backend.name, case, reason)
                continue
            entry.wrong = self.control.sum_over_ranks(wrong)
            once = self._time(entry, 1)
            warmup = min(self.settings.warmup, int(self.settings.budget / 4 / once))
            entry.seconds = self._time(entry, max(1, warmup))
            yield entry

    def _skip(self, backend: str, case: CollectiveCase, reason: str) -> None:
        key = {"backend": backend, "op": case.operation.name, "placement": case.placement}
        if not any(key.items() <= skipped.items() for skipped in self.skipped):
            self.skipped.append({**key, "dtype": _dtype_name(case.dtype), "reason": reason})

    def _time(self, entry: _Entry, times: int) -> float:
        """Return the mean seconds per call of the slowest rank. The same on all ranks."""
        self.control.check_stop()
        seconds = time_back_to_back(entry.prepared.call, times, self.world.device)
        return max(1e-7, self.control.max_over_ranks([float(seconds.mean())])[0])

    def _interleave(
        self, case: CollectiveCase, data: Payload, entries: list[_Entry], timing: str
    ) -> list[Tensor]:
        """Return the seconds of every call of each entry.

        The entries are measured in rounds, and the order of the entries rotates between rounds.
        """
        long = any(entry.seconds > _LONG_CALL_SECONDS for entry in entries)
        rounds = self.settings.rounds
        rounds = min(_ROUNDS_OF_LONG_CALLS, rounds) if long else rounds
        for entry in entries:
            wanted = self.settings.iterations or self.settings.budget / entry.seconds
            entry.calls = min(_MAX_CALLS_PER_ROUND, max(2, math.ceil(wanted / rounds)))
        samples: list[list[Tensor]] = [[] for _ in entries]
        for number in range(rounds):
            last_round = number == rounds - 1
            for offset in range(len(entries)):
                position = (number + offset) % len(entries)
                entry = entries[position]
                if last_round:
                    entry.reset(data)
                if self.control.check_stop():
                    self.stopped = True
                    return []
                samples[position].append(self._round(entry, timing))
                if last_round:
                    # In place, each timed call has added up the sums of the call before, so one
                    # more call with fresh data is checked.
                    wrong = self._count_wrong(entry, data, call_again=not case.idempotent)
                    entry.wrong += self.control.sum_over_ranks(wrong)
        return [
            torch.cat(seconds) / entry.prepared.operations
            for entry, seconds in zip(entries, samples, strict=True)
        ]

    def _round(self, entry: _Entry, timing: str) -> Tensor:
        """Return the seconds of each call of one round; each is the time of the slowest rank."""
        call = entry.prepared.call
        # Untimed calls: other backends have run since the last turn of this backend, and ranks
        # leave the barrier one after the other.
        for _ in range(1 if entry.seconds > 1e-3 else 3):
            call()
        if timing == "back-to-back":
            seconds = time_back_to_back(call, entry.calls, self.world.device)
            return self.control.max_of_tensor(seconds)
        starts, ends = time_isolated(call, entry.calls, self.world.device, self.control.check_stop)
        if self.world.nodes > 1:  # clocks of hosts differ: use the durations of ranks
            return self.control.max_of_tensor(ends - starts)
        return self.control.max_of_tensor(ends) - self.control.max_of_tensor(starts)

    def _count_wrong(self, entry: _Entry, data: Payload, call_again: bool) -> int:
        """Return the number of wrong elements on this rank.

        With `call_again`, the result of one more call is checked.
        """
        if call_again:
            entry.reset(data)
            entry.prepared.call()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return data.count_wrong(entry.prepared.received)


def _row(case: CollectiveCase, entry: _Entry, seconds: Tensor, timing: str) -> Row:
    times = summarize_us(seconds.tolist())
    algorithm, bus = bandwidth(case.operation, case.bytes, case.ranks, times["p50"] / 1e6)
    return {
        **_row_key(case, entry.backend.name, timing),
        "group": entry.prepared.operations,
        "calls": len(seconds),
        "time_us": times,
        "algbw_gbs": round(algorithm, 4),
        "busbw_gbs": round(bus, 4),
        "wrong": entry.wrong,
    }


def _row_key(case: CollectiveCase, backend: str, timing: str) -> Row:
    return {
        "op": case.operation.name,
        "backend": backend,
        "ranks": case.ranks,
        "bytes": case.bytes,
        "count": case.count,
        "dtype": _dtype_name(case.dtype),
        "redop": "sum" if case.operation.reduces else "none",
        "root": 0 if case.operation.rooted else -1,
        "placement": case.placement,
        "timing": timing,
    }


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
