"""The sweep: for every case all contenders take turns, in one run, and what they did is checked."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.bench.attempt import try_on_all
from tutti.bench.case import Case, Contender, Prepared
from tutti.bench.control import Control
from tutti.bench.payload import Payload, payload
from tutti.measure.bus_bandwidth import bandwidth
from tutti.measure.spread import summarize_us
from tutti.measure.timing import time_back_to_back, time_isolated

# Where a call takes longer than this, fewer rounds are enough, and time is short.
_LONG_CALL_SECONDS = 0.02
_ROUNDS_OF_LONG_CALLS = 4
_MOST_CALLS_PER_ROUND = 1000

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """How much to measure. `iterations` is a number of calls, or None: what the budget allows."""

    timings: Sequence[str] = ("back-to-back",)
    iterations: int | None = None
    warmup: int = 20
    budget: float = 0.5  # seconds for each contender, case and timing
    rounds: int = 8  # how often every contender has its turn


@dataclass
class _Entry:
    """One contender in one case."""

    contender: Contender
    prepared: Prepared
    seconds: float = 0.0  # of one call, roughly
    calls: int = 0  # in each round
    wrong: int = 0


class Sweep:
    """Measures cases one after the other and remembers the rows and what could not be done."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        plan: Plan,
        control: Control,
        device: torch.device,
        one_host: bool = True,
    ) -> None:
        self.rows: list[Row] = []
        self.skipped: list[dict[str, str]] = []
        self.stopped = False
        self.complete = False  # nothing is missing
        self.about = {each.name: each.about for each in contenders}
        self._contenders = contenders
        self._plan = plan
        self._control = control
        self._device = device
        self._one_host = one_host

    def run(self, lines: Iterable[Sequence[Case]], report: Callable[[list[Row]], None]) -> None:
        """Measure all cases; `report` gets the rows of each line as soon as they are known."""
        for line in lines:
            rows: list[Row] = []
            for case in line:
                if not self.stopped:
                    rows += self._measure(case)
            self.rows += rows
            report(rows)
            if self.stopped:
                return
        self.complete = True

    def planned(self, lines: Iterable[Sequence[Case]]) -> list[Row]:
        """What identifies the rows to come, with figures that nothing could find too slow."""
        times = {"p50": 1e-9, "p95": 1e-9, "min": 1e-9, "cv": 0.0}
        fastest = {"time_us": times, "busbw_gbs": math.inf, "group": 1, "wrong": 0}
        return [
            {**_identity(case, contender.name, timing), **fastest}
            for line in lines
            for case in line
            for contender in self._contenders
            for timing in self._plan.timings
        ]

    def _measure(self, case: Case) -> list[Row]:
        exchanged = payload(case.operation, case.count, case.dtype, case.rank, case.ranks)
        entries = list(self._ready(case, exchanged))
        rows: list[Row] = []
        try:
            for timing in self._plan.timings:
                samples = self._take_turns(case, exchanged, entries, timing)
                if self.stopped:
                    return []
                for entry in entries:
                    rows.append(_row(case, entry, timing, samples[entry.contender.name]))
        finally:
            for entry in entries:
                entry.prepared.close()
        return rows

    def _ready(self, case: Case, exchanged: Payload) -> Iterator[_Entry]:
        """The contenders that can do the case, warmed up, their first call checked."""
        for contender in self._contenders:
            name = contender.name
            prepared, reason = try_on_all(lambda c=contender: c.prepare(case))  # type: ignore[misc]
            if prepared is None:
                self._skip(name, case, reason)
                continue
            entry = _Entry(contender, prepared)
            wrong, reason = try_on_all(lambda e=entry: self._checked_call(e, exchanged))  # type: ignore[misc]
            if wrong is None:
                prepared.close()
                self._skip(name, case, reason)
                continue
            entry.wrong = self._control.total(wrong)
            self._warm_up(entry)
            yield entry

    def _skip(self, name: str, case: Case, reason: str) -> None:
        what = {"backend": name, "op": case.operation.name, "placement": case.placement}
        if not any(what.items() <= each.items() for each in self.skipped):
            self.skipped.append({**what, "dtype": _name(case.dtype), "reason": reason})

    def _warm_up(self, entry: _Entry) -> None:
        once = self._time(entry, 1)
        times = max(1, min(self._plan.warmup, int(self._plan.budget / 4 / once)))
        entry.seconds = self._time(entry, times)

    def _time(self, entry: _Entry, times: int) -> float:
        """Seconds of one call, as the slowest rank saw it: all ranks agree on it."""
        self._control.meet()
        seconds = time_back_to_back(entry.prepared.call, times, self._device)
        return max(1e-7, self._control.largest([float(seconds.mean())])[0])

    def _take_turns(
        self, case: Case, exchanged: Payload, entries: list[_Entry], timing: str
    ) -> dict[str, Tensor]:
        """Rounds of a few calls each; every contender is in every round, in a turning order."""
        long = any(entry.seconds > _LONG_CALL_SECONDS for entry in entries)
        rounds = min(_ROUNDS_OF_LONG_CALLS, self._plan.rounds) if long else self._plan.rounds
        for entry in entries:
            wanted = self._plan.iterations or self._plan.budget / entry.seconds
            entry.calls = min(_MOST_CALLS_PER_ROUND, max(2, math.ceil(wanted / rounds)))
        kept: dict[str, list[Tensor]] = {entry.contender.name: [] for entry in entries}
        for number in range(rounds):
            first = number % max(1, len(entries))
            last_round = number == rounds - 1
            for entry in entries[first:] + entries[:first]:
                if last_round:
                    _refresh(entry.prepared, exchanged)
                if self._control.meet():
                    self.stopped = True
                    return {}
                kept[entry.contender.name].append(self._round(entry, timing))
                if last_round:
                    entry.wrong += self._check_after(case, entry, exchanged)
        return {
            entry.contender.name: torch.cat(kept[entry.contender.name]) / entry.prepared.operations
            for entry in entries
        }

    def _round(self, entry: _Entry, timing: str) -> Tensor:
        """Seconds of each call of one round, those of the slowest rank."""
        call = entry.prepared.call
        # Other contenders were here meanwhile, and ranks leave the meeting one by one.
        for _ in range(1 if entry.seconds > 1e-3 else 3):
            call()
        if timing == "back-to-back":
            return self._control.largest_of(time_back_to_back(call, entry.calls, self._device))
        began, ended = time_isolated(call, entry.calls, self._device, self._control.meet)
        if not self._one_host:  # no clock in common
            return self._control.largest_of(ended - began)
        return self._control.largest_of(ended) - self._control.largest_of(began)

    def _checked_call(self, entry: _Entry, exchanged: Payload) -> int:
        _refresh(entry.prepared, exchanged)
        entry.prepared.call()
        return self._wrong(entry, exchanged)

    def _check_after(self, case: Case, entry: _Entry, exchanged: Payload) -> int:
        """What the timed calls left must be right; where calls build on each other, one more."""
        if case.repeats_itself:
            return self._control.total(self._wrong(entry, exchanged))
        return self._control.total(self._checked_call(entry, exchanged))

    def _wrong(self, entry: _Entry, exchanged: Payload) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return exchanged.wrong_in(entry.prepared.received)


def _refresh(prepared: Prepared, exchanged: Payload) -> None:
    """New inputs, and nothing right in the output: in place, the two overlap."""
    prepared.received.zero_()
    prepared.sent.copy_(exchanged.sent)


def _row(case: Case, entry: _Entry, timing: str, seconds: Tensor) -> Row:
    spread = summarize_us(seconds.tolist())
    algorithm, bus = bandwidth(case.operation, case.bytes, case.ranks, spread["p50"] / 1e6)
    return {
        **_identity(case, entry.contender.name, timing),
        "group": entry.prepared.operations,
        "calls": len(seconds),
        "time_us": spread,
        "algbw_gbs": round(algorithm, 4),
        "busbw_gbs": round(bus, 4),
        "wrong": entry.wrong,
    }


def _identity(case: Case, backend: str, timing: str) -> Row:
    return {
        "op": case.operation.name,
        "backend": backend,
        "ranks": case.ranks,
        "bytes": case.bytes,
        "count": case.count,
        "dtype": _name(case.dtype),
        "redop": "sum" if case.operation.reduces else "none",
        "root": 0 if case.operation.rooted else -1,
        "placement": case.placement,
        "timing": timing,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
