"""The sweep of `tutti bench collectives`: for each case, all backends are measured in turn."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tutti.bench.collectives.cases import Backend, CollectiveCase, Payload, PreparedCase, payload
from tutti.bench.rank_control import RankControl, try_on_all_ranks
from tutti.comm.path_selection import Measured
from tutti.measure.collective_bandwidth import bandwidth
from tutti.measure.spread import summarize_us
from tutti.measure.timing import time_back_to_back, time_isolated
from tutti.measure.units import format_size
from tutti.world.rank_cases import Cases
from tutti.world.world import World

_LONG_CALL_SECONDS = 0.02  # if a call is longer, fewer rounds are measured
_ROUNDS_OF_LONG_CALLS = 4
_MAX_CALLS_PER_ROUND = 1000

Row = dict[str, Any]


@dataclass
class _Entry:
    """One backend in one case."""

    backend: Backend
    prepared: PreparedCase
    data: Payload
    seconds: float = 0.0  # time of one call, estimated in the warm-up
    calls: int = 0  # number of calls per round
    wrong: int = 0

    def reset(self) -> None:
        """Clear the receive tensor, then write the input.

        This order is required, because an in-place case receives into the tensor of its input.
        """
        self.prepared.received.zero_()
        self.prepared.sent.copy_(self.data.sent)


@dataclass
class Sweep:
    """Measures cases one after the other, and collects rows and skipped operations."""

    backends: Sequence[Backend]
    control: RankControl
    world: World
    budget: float  # seconds per backend, case and timing
    timings: Sequence[str] = ("back-to-back",)
    iterations: int | None = None  # number of timed calls, or None to use the whole budget
    max_warmup: int = 20  # maximum number of untimed calls
    max_rounds: int = 8  # maximum number of rounds; every backend has one turn per round
    rows: list[Row] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    stopped: bool = False
    complete: bool = False  # whether every case was measured

    def run(
        self,
        groups: Iterable[Sequence[CollectiveCase]],
        report: Callable[[list[Row]], None],
        cases: Cases | None = None,
    ) -> None:
        """Measure all cases. After each group, call `report` with the rows of the group.

        `cases` contains the rows of groups that were measured before the ranks were restarted, and
        the names of groups that crashed. Groups of both kinds are not measured again.
        """
        cases = cases or Cases(None)
        for group in groups:
            name = f"{group[0].operation.name} of {format_size(group[0].bytes)}"
            if name in cases.rows:
                self.rows += cases.rows[name]["rows"]
            elif name not in cases.crashed:
                with cases.running(name, self.world.rank):
                    rows = [row for case in group for row in self._measure(case)]
                self.rows += rows
                report(rows)
                if self.stopped:
                    return
                if self.world.is_first:
                    cases.add_row(name, {"rows": rows})
        self.complete = True

    def planned_rows(self, groups: Iterable[Sequence[CollectiveCase]]) -> list[Row]:
        """Return the rows that the run will measure, with ideal values instead of measured ones.

        Before the run, the caller uses these rows to check that --expect applies to any row.
        """
        times = {"p50": 1e-9, "p95": 1e-9, "min": 1e-9, "cv": 0.0}
        ideal = {"time_us": times, "busbw_gbs": math.inf, "group": 1, "wrong": 0}
        return [
            {**_row_key(case, backend.name, timing), **ideal}
            for group in groups
            for case in group
            for backend in self.backends
            for timing in self.timings
        ]

    def _measure(self, case: CollectiveCase) -> list[Row]:
        if self.stopped:
            return []
        entries = list(self._prepare(case))
        rows: list[Row] = []
        try:
            for timing in self.timings:
                samples = self._interleave(case, entries, timing)
                # The list of samples is empty if the sweep was stopped.
                pairs = zip(entries, samples, strict=False)
                rows += [_row(case, entry, seconds, timing) for entry, seconds in pairs]
        finally:
            for entry in entries:
                entry.prepared.close()
        return [] if self.stopped else rows

    def _prepare(self, case: CollectiveCase) -> Iterator[_Entry]:
        """Yield an entry per backend that supports the case, after a checked call and a warm-up."""
        data = payload(case)
        for backend in self.backends:
            prepared, reason = try_on_all_ranks(partial(backend.prepare, case))
            if prepared is None:
                self._skip(backend.name, case, reason)
                continue
            entry = _Entry(backend, prepared, data)
            wrong, reason = try_on_all_ranks(partial(self._count_wrong, entry, call_again=True))
            if wrong is None:
                prepared.close()
                self._skip(backend.name, case, reason)
                continue
            entry.wrong = self.control.sum_over_ranks(wrong)
            warmup = int(self.budget / 4 / self._time(entry, 1))
            entry.seconds = self._time(entry, max(1, min(self.max_warmup, warmup)))
            yield entry

    def _skip(self, backend: str, case: CollectiveCase, reason: str) -> None:
        key = {"backend": backend, "op": case.operation.name, "placement": case.placement}
        if not any(key.items() <= skipped.items() for skipped in self.skipped):
            self.skipped.append({**key, "dtype": _dtype_name(case.dtype), "reason": reason})

    def _time(self, entry: _Entry, times: int) -> float:
        """Return the mean seconds per call on the slowest rank. All ranks return the same value."""
        self.control.check_stop()
        seconds = time_back_to_back(entry.prepared.call, times, self.world.device)
        return max(1e-7, self.control.max_over_ranks([float(seconds.mean())])[0])

    def _interleave(self, case: CollectiveCase, entries: list[_Entry], timing: str) -> list[Tensor]:
        """Return one tensor per entry with the seconds of its calls.

        Each round measures all entries. The entry that starts a round changes from round to round.
        """
        rounds = self.max_rounds
        if any(entry.seconds > _LONG_CALL_SECONDS for entry in entries):
            rounds = min(_ROUNDS_OF_LONG_CALLS, rounds)
        for entry in entries:
            calls = self.iterations or self.budget / entry.seconds
            entry.calls = min(_MAX_CALLS_PER_ROUND, max(2, math.ceil(calls / rounds)))
        samples: list[list[Tensor]] = [[] for _ in entries]
        for number in range(rounds):
            last_round = number == rounds - 1
            for offset in range(len(entries)):
                position = (number + offset) % len(entries)
                entry = entries[position]
                if last_round:
                    entry.reset()
                if self.control.check_stop():
                    self.stopped = True
                    return []
                samples[position].append(self._round(entry, timing))
                if last_round:
                    # A timed in-place reduction has the result of the previous call as input. To
                    # check the result, make one more call with the original input.
                    call_again = case.in_place and case.operation.reduces
                    wrong = self._count_wrong(entry, call_again)
                    entry.wrong += self.control.sum_over_ranks(wrong)
        return [
            torch.cat(seconds) / entry.prepared.operations
            for entry, seconds in zip(entries, samples, strict=True)
        ]

    def _round(self, entry: _Entry, timing: str) -> Tensor:
        """Return the seconds of each call in one round, on the slowest rank of the call."""
        call = entry.prepared.call
        # The untimed calls refill the caches, which other backends have used in the meantime. They
        # also align the ranks, which leave the barrier at different times.
        for _ in range(1 if entry.seconds > 1e-3 else 3):
            call()
        if timing == "back-to-back":
            seconds = time_back_to_back(call, entry.calls, self.world.device)
            return self.control.max_of_tensor(seconds)
        starts, ends = time_isolated(call, entry.calls, self.world.device, self.control.check_stop)
        if self.world.nodes > 1:  # the clocks of hosts differ, so compare durations
            return self.control.max_of_tensor(ends - starts)
        return self.control.max_of_tensor(ends) - self.control.max_of_tensor(starts)

    def _count_wrong(self, entry: _Entry, call_again: bool) -> int:
        """Return the number of wrong elements on this rank.

        With `call_again`, write the original input and call the operation before the check.
        """
        if call_again:
            entry.reset()
            entry.prepared.call()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return entry.data.count_wrong(entry.prepared.received)


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


# ---- `tutti bench tune`: the table from which tutti.comm chooses a path by message size ----

# {backend in a row: path in the table}. Backends for symmetric tensors are missing, because the
# table is for ordinary tensors.
PATH_OF = {"gloo": "gloo", "shm": "shm", "nccl": "nccl", "staged": "symmetric one-shot"}
# The cost of a change of path from one size to the next, as a fraction of the time of one call.
_MIN_GAIN = 0.05


def path_measurements(rows: Iterable[dict[str, Any]], device: str) -> list[Measured]:
    """Return one measurement per row with a correct result."""
    return [
        Measured(row["op"], device, PATH_OF[row["backend"]], row["bytes"], row["time_us"]["p50"])
        for row in rows
        if row["wrong"] == 0
    ]


def smooth_choice(measured: Sequence[Measured]) -> list[Measured]:
    """Choose a path for each message size of one operation, and return the chosen measurements.

    If two paths are about equally fast, the fastest path alternates between sizes because of noise.
    Therefore each change of path has a cost. The chosen paths minimize the sum of
    ln(time / fastest time) over all sizes, plus ln 1.05 per change of path. The minimum is found by
    dynamic programming over ascending sizes (Viterbi algorithm).
    """
    by_size: dict[int, dict[str, Measured]] = {}
    for sample in sorted(measured, key=lambda sample: sample.bytes):
        by_size.setdefault(sample.bytes, {})[sample.path] = sample
    change_cost = math.log(1 + _MIN_GAIN)
    best: dict[str, tuple[float, list[Measured]]] = {}  # {last path: (cost, choices)}
    for candidates in by_size.values():
        fastest_us = min(sample.time_us for sample in candidates.values())
        extended = {}
        for path, sample in candidates.items():
            previous = [
                (cost + change_cost * (last != path), chosen)
                for last, (cost, chosen) in best.items()
            ] or [(0.0, [])]
            cost, chosen = min(previous, key=lambda choice: choice[0])
            extended[path] = cost + math.log(sample.time_us / fastest_us), [*chosen, sample]
        best = extended
    return min(best.values(), key=lambda choice: choice[0])[1] if best else []
