"""Watches a running job: history of its steps, use of the machine, late ranks and alerts.

`JobWatch.poll` reads the rings of a job about once a second. The job is not stopped or slowed, and
nothing is written into it. `JobWatch.state` is what the terminal, the page and /metrics show.
"""

import contextlib
import math
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, median_low
from typing import Any

import numpy as np

from tutti.machine.cpu_numa import allowed_cpus, busy_seconds
from tutti.machine.gpus import nvml, read_gpu_load
from tutti.measure.units import format_bytes
from tutti.observe import ring_reader
from tutti.observe.ring_reader import ENDED, FAILED, Process, user_frame
from tutti.observe.step_split import (
    PARTS,
    WINDOW_STEPS,
    RankStep,
    StepTable,
    Straggler,
    find_stragglers,
    split_steps,
    tabulate,
)
from tutti.observe.watch_history import (
    Array,
    History,
    RunMetrics,
    growing_memory,
    loss_spike,
    run_folder,
    slower_than_before,
)
from tutti.observe.why import take_snapshot
from tutti.world.errors import HANG_AFTER, name_ranks

SCHEMA = "tutti.watch/1"
# Columns of the history of steps (for each rank) and of samples (for the job).
STEP_COLUMNS = (*PARTS, "made_wait")
SAMPLE_COLUMNS = (
    *("steps_per_s", "batches_per_s", "samples_per_s", "loss", "memory_bytes", "cpu"),
    *("gpu", "power_w", "network_bytes_per_s"),
)
_HARDWARE_SLOWDOWN = ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake", "sw_power_cap")
_SHOWN_STEPS = 20  # the means of a rank are taken over its last steps
_RATE_SECONDS = 10.0
_STARVED = 0.2  # share of the step in which even the fastest rank waits for input


@dataclass
class Alert:
    """Something that somebody should look at. Each cause is reported once."""

    kind: str  # straggler, loss, throughput, memory, input
    text: str
    time: float  # seconds since 1970
    rank: int | None = None


# -- the job ---------------------------------------------------------------------------------------


class JobWatch:
    """Everything that is known of one job, updated by `poll`."""

    def __init__(
        self,
        folder: Path | None,
        run: Path | None = None,
        *,
        hosts: Sequence[str] = (),
        via: str = "ssh {host}",
        total_steps: int | None = None,
        on_alert: Callable[[Alert], None] = lambda alert: None,
    ) -> None:
        """`folder` has the rings of the job, `run` is its run directory. One may be None."""
        self.folder, self._hosts, self._via = folder, hosts, via
        self._metrics = None if run is None else RunMetrics(run)
        self._total_steps, self._on_alert = total_steps, on_alert
        self.lock = threading.Lock()  # held while other threads may not read `steps` and `samples`
        self.processes: list[Process] = []
        self.steps, self.samples = History(), History()
        self.alerts: list[Alert] = []
        self.events: deque[tuple[float, str]] = deque(maxlen=200)
        self.state: dict[str, Any] = {}
        self._next_step = 2
        self._first_operation: dict[int, int] = {}  # by pid: the first one that is still needed
        self._recent: deque[tuple[int, Array]] = deque(maxlen=1000)
        self._lengths: deque[tuple[float, float]] = deque(maxlen=20_000)  # (end, seconds) of a step
        self._memory: deque[Array] = deque(maxlen=1800)
        self._counters: deque[tuple[float, int, int]] = deque(maxlen=600)  # time, steps, batches
        self._times: dict[int, deque[tuple[float, ...]]] = {}  # by pid, see _load_of
        self._loads: dict[int, dict[str, Any]] = {}
        self._frames: dict[int, deque[str]] = {}
        self._states: dict[int, str] = {}
        self._host: tuple[float, dict[str, float]] | None = None
        self._world = 0
        self._raised: set[tuple[str, object]] = set()
        self._stack = contextlib.ExitStack()
        self._nvml = self._stack.enter_context(nvml())

    def close(self) -> None:
        self._stack.close()

    @property
    def ended(self) -> bool:
        return bool(self.state) and self.state["state"] in ("ended", "failed")

    def poll(self) -> dict[str, Any]:
        """Read the job again, and return its new state."""
        self.add(self._read())
        return self.state

    def add(self, processes: list[Process], now: float | None = None) -> None:
        """Add a snapshot of the job. `poll` does this with the rings."""
        now = time.time() if now is None else now
        with self.lock:
            self._add(processes, now)

    def _add(self, processes: list[Process], now: float) -> None:
        if processes:
            self.processes = processes
        elif self.processes:  # the rings of a job that ended normally are removed
            self.processes = [_ended(process) for process in self.processes]
        ranks = [process for process in self.processes if process.worker < 0]
        self._world = max(
            [self._world, *(p.world_size for p in ranks), *(p.rank + 1 for p in ranks)]
        )
        if self._metrics is None and ranks and (run := run_folder(ranks)) is not None:
            self._metrics = RunMetrics(run)
        rows = [] if self._metrics is None else self._metrics.poll()
        self._add_steps(ranks)
        self._note_exits(ranks, now)
        gpus = read_gpu_load(self._nvml)
        for process in ranks:
            self._loads[process.rank] = self._load_of(process, gpus)
            if process.threads and not any(each.pending for each in process.operations[-16:]):
                frames = self._frames.setdefault(process.rank, deque(maxlen=20))
                frames.append(user_frame(process.threads[0].frames))
        self.state = self._describe(ranks, gpus, now)
        self._add_samples(rows, now)
        self._look_for_alerts(ranks, now)
        self.state["alerts"] = [asdict(alert) for alert in self.alerts]
        self.state["events"] = [{"time": when, "text": text} for when, text in self.events]

    # -- reading -----------------------------------------------------------------------------------

    def _read(self) -> list[Process]:
        if self.folder is None:
            return []
        if self._hosts:
            return take_snapshot(self.folder, self._hosts, self._via).processes
        # Only what has happened since the last poll is decoded, and what happens until it is read.
        counters = ring_reader.read_progress(self.folder)
        steps = 2 * (max((row[1] for row in counters), default=0) - self._next_step) + 64
        operations = 4096
        if self._first_operation and len(counters) == len(self._first_operation):
            entered = max(row[4] for row in counters)
            operations = 2 * (entered - min(self._first_operation.values())) + 256
        return ring_reader.read_job(self.folder, max(256, operations), max(64, steps))

    def _add_steps(self, ranks: list[Process]) -> None:
        """Add the steps that all ranks have completed."""
        counting = [p for p in ranks if p.steps > 0]
        if not counting:
            return
        last = min(p.steps for p in counting)
        found: dict[int, list[RankStep]] = {}
        for each in split_steps(ranks, self._next_step):
            if each.step <= last:
                found.setdefault(each.step, []).append(each)
        offset = counting[0].clock_offset
        for number in sorted(found):
            table = tabulate(found[number])
            values = np.full((self._world, len(STEP_COLUMNS)), np.nan)
            values[list(table.ranks), : len(PARTS)] = table.parts[0]
            others = max(1, len(table.ranks) - 1)
            for rank in table.ranks:
                made_wait = sum(each.waited_for.get(rank, 0.0) for each in found[number])
                values[rank, len(PARTS)] = made_wait / others
            self.steps.add(number, values)
            self._recent.append((number, values))
            length = max(each.seconds for each in found[number])
            self._lengths.append((max(each.ended for each in found[number]) + offset, length))
        self._next_step = max(self._next_step, last + 1)
        self._first_operation = {
            p.pid: next(
                (o.number for o in p.operations if o.step + 1 >= self._next_step), p.entered + 1
            )
            for p in ranks
        }

    def _note_exits(self, ranks: list[Process], now: float) -> None:
        for process in ranks:
            state = _state_of(process)
            before = self._states.get(process.rank)
            self._states[process.rank] = state
            if state == before:
                continue
            if state == "failed":
                message = process.error.partition(" @ ")[0] or "died without an error message"
                self.events.append((now, f"rank {process.rank} failed: {message}"))
            elif state == "ended" or before is not None:
                self.events.append((now, f"rank {process.rank} {state}"))

    def _load_of(self, process: Process, gpus: list[dict[str, Any]]) -> dict[str, Any]:
        """Return CPU use, the wait for a CPU, and throttling of a rank, in the last 5 polls."""
        row: dict[str, Any] = {"cpu": None, "cpu_wait": None, "quota_wait": None, "gpu": None}
        if not process.alive or process.host != os.uname().nodename:
            return row
        row["gpu"] = next((gpu["index"] for gpu in gpus if process.pid in gpu["pids"]), None)
        # The second number is the time in which the main thread could run but had no CPU.
        schedule = _text(f"/proc/{process.pid}/schedstat").split()
        waited = int(schedule[1]) / 1e9 if len(schedule) == 3 else math.nan
        now = (process.time, process.cpu_seconds, waited, _throttled_seconds(process.pid))
        times = self._times.setdefault(process.pid, deque(maxlen=6))
        times.append(now)
        seconds = now[0] - times[0][0]
        if seconds > 0:
            shares = [(new - old) / seconds for new, old in zip(now, times[0], strict=True)]
            known = [None if math.isnan(share) else share for share in shares]
            row |= {"cpu": known[1], "cpu_wait": known[2], "quota_wait": known[3]}
        return row

    # -- the state ---------------------------------------------------------------------------------

    def table(self) -> StepTable:
        """Return the latest steps of all ranks."""
        if not self._recent:
            return StepTable((), (), np.zeros((0, 0, len(PARTS))))
        values = np.stack([row for _, row in self._recent])
        ranks = np.flatnonzero(~np.isnan(values[-1, :, 0]))
        return StepTable(
            tuple(number for number, _ in self._recent),
            tuple(ranks.tolist()),
            values[:, ranks, : len(PARTS)],
        )

    def _describe(
        self, ranks: list[Process], gpus: list[dict[str, Any]], now: float
    ) -> dict[str, Any]:
        states = {_state_of(process) for process in ranks}
        state = next((s for s in ("running", "failed") if s in states), "ended")
        if state == "running" and min(map(_quiet_seconds, ranks)) > self._patience():
            state = "stalled"
        step = min((p.steps for p in ranks if p.steps), default=0)
        metrics = self._metrics.latest.get(0, {}) if self._metrics else {}
        step = max(step, (metrics["step"] + 1) if "step" in metrics and not ranks else 0)
        rates = self._rates(ranks, state, step, metrics, now)
        total = self._total_steps or (self._metrics.total_steps if self._metrics else None)
        eta = None
        if total and rates["steps_per_s"] and state in ("running", "stalled"):
            eta = max(0, total - step) / rates["steps_per_s"]
        first = ranks[0] if ranks else None
        losses = self._metrics.losses if self._metrics else []
        stragglers = [self._straggler(late, gpus) for late in find_stragglers(self.table())]
        return {
            "job": self.folder.name if self.folder else "",
            "run": str(self._metrics.folder) if self._metrics else None,
            "program": first.command if first else "",
            "state": state,
            "time": now,
            "world_size": self._world or len(self._metrics.latest if self._metrics else ()),
            "step": step,
            "total_steps": total,
            **rates,
            "eta_s": eta,
            "loss": losses[-1][2] if losses and math.isfinite(losses[-1][2]) else None,
            "ranks": self._rank_rows(ranks, stragglers),
            "stragglers": stragglers,
            "gpus": gpus,
            "host": self._host_load(),
        }

    def _rates(
        self, ranks: list[Process], state: str, step: int, metrics: dict[str, Any], now: float
    ) -> dict[str, float | None]:
        """Return steps, batches, samples and tokens per second over the last 10 seconds."""
        batches = sum(process.batches for process in ranks)
        self._counters.append((now, step, batches))
        since = next(each for each in self._counters if now - each[0] <= _RATE_SECONDS)
        elapsed = now - since[0]
        tail = [length for _, length in list(self._lengths)[-WINDOW_STEPS:]]
        rates: dict[str, float | None] = {
            "steps_per_s": None,
            "batches_per_s": None,
            "samples_per_s": metrics.get("samples_per_s"),
            "tokens_per_s": metrics.get("tokens_per_s"),
        }
        if state in ("running", "stalled") and elapsed >= 0.5:
            rates["steps_per_s"] = (step - since[1]) / elapsed
            rates["batches_per_s"] = (batches - since[2]) / elapsed if batches else None
        elif tail:  # the job has ended, or this is the first look at it
            rates["steps_per_s"] = len(tail) / sum(tail)
        elif metrics.get("seconds_per_step"):
            rates["steps_per_s"] = 1 / metrics["seconds_per_step"]
        return rates

    def _patience(self) -> float:
        """Return after how many seconds without progress the job is called stalled."""
        lengths = [length for _, length in list(self._lengths)[-WINDOW_STEPS:]]
        return max(HANG_AFTER, 10 * median(lengths or [0.0]))

    def _rank_rows(
        self, ranks: list[Process], stragglers: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        recent = [values for _, values in list(self._recent)[-_SHOWN_STEPS:]]
        texts = {late["rank"]: late["text"] for late in stragglers}
        for process in ranks:
            means = _mean([values[process.rank] for values in recent])
            parts: dict[str, float | None] = dict.fromkeys(PARTS)
            parts |= zip(PARTS, means, strict=False)
            rows.append(
                {
                    "rank": process.rank,
                    "host": process.host,
                    "pid": process.pid,
                    "state": _state_of(process),
                    "step": process.steps,
                    "phase": process.phase,
                    "step_s": sum(means[: len(PARTS)]) if means else None,
                    "parts_s": parts,
                    "made_wait_s": means[-1] if means else None,
                    "late": texts.get(process.rank, ""),
                    "memory_bytes": process.memory_bytes or None,
                    **self._loads.get(process.rank, {}),
                }
            )
        if not ranks and self._metrics is not None:  # a run without rings
            for rank, row in sorted(self._metrics.latest.items()):
                length, share = row.get("seconds_per_step"), row.get("wait_fraction")
                parts = dict.fromkeys(PARTS)
                if length is not None and share is not None:
                    parts |= {"wait": length * share, "compute": length * (1 - share)}
                rows.append(
                    {
                        **{"rank": rank, "host": "", "pid": None, "state": "ended"},
                        **{"step": row["step"] + 1, "phase": "", "step_s": length},
                        **{"parts_s": parts, "made_wait_s": None, "late": ""},
                        "memory_bytes": row.get("peak_memory_bytes"),
                    }
                )
        return rows

    def _host_load(self) -> dict[str, Any]:
        """Return CPU use, memory and network traffic of this host since the last poll."""
        cpus, now = allowed_cpus(), time.monotonic()
        sums = {"cpu": busy_seconds(cpus) or 0.0}
        for line in _text("/proc/net/dev").splitlines()[2:]:
            name, _, values = line.partition(":")
            fields = values.split()  # received bytes first, sent bytes at position 8
            sums[name.strip()] = float(fields[0]) + float(fields[8])
        before, self._host = self._host, (now, sums)
        rates: dict[str, float] = {}
        if before is not None and now > before[0]:
            rates = {n: (v - before[1].get(n, v)) / (now - before[0]) for n, v in sums.items()}
        busy = rates.pop("cpu", None)
        free = re.search(r"MemAvailable:\s+(\d+)", _text("/proc/meminfo"))
        return {
            "name": os.uname().nodename,
            "cpu": None if busy is None else min(1.0, busy / len(cpus)),
            "memory_available_bytes": int(free[1]) * 1024 if free else None,
            "network_bytes_per_s": rates,
        }

    def _straggler(self, late: Straggler, gpus: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the row of a late rank, with the reason behind the part of the step if known."""
        load = self._loads.get(late.rank, {})
        gpu = next((each for each in gpus if each["index"] == load.get("gpu")), None)
        slowed = [] if gpu is None else [r for r in gpu["throttle"] if r in _HARDWARE_SLOWDOWN]
        reason, why = late.cause, ""
        if late.cause == "exposed":
            reason = "network"
            peers = next((p.network for p in self.processes if p.rank == late.rank), ())
            why = f"{', '.join(peers)} has not acknowledged data" if peers else ""
        elif late.cause == "compute" and gpu is not None and slowed:
            reason = "gpu_throttled"
            why = f"GPU {gpu['index']}: {slowed[0]}, {gpu['sm_mhz']} of {gpu['max_sm_mhz']} MHz"
        elif late.cause == "compute" and self._excess("quota_wait", late.rank) > late.share / 2:
            reason, why = "cpu_quota", "its cgroup has no CPU quota left"
        elif late.cause == "compute" and self._excess("cpu_wait", late.rank) > late.share / 2:
            reason, why = "cpu_busy", "other processes use its CPU"
        elif late.cause == "compute":
            frames = Counter(frame for frame in self._frames.get(late.rank, ()) if frame)
            why = f"most often at {frames.most_common(1)[0][0]}" if frames else ""
        text = f"{late.text} ({why})" if why else late.text
        return asdict(late) | {"reason": reason, "text": text}

    def _excess(self, name: str, rank: int) -> float:
        """Return by how much a load of a rank exceeds the median of the other ranks."""
        others = [load.get(name) or 0.0 for r, load in self._loads.items() if r != rank]
        return (self._loads[rank].get(name) or 0.0) - median(others or [0.0])

    def _add_samples(self, rows: list[dict[str, Any]], now: float) -> None:
        """Add the values of the job to the history. The past of metrics is added, too."""
        state = self.state
        for row in rows:
            values = {**row, "memory_bytes": row.get("peak_memory_bytes")}
            if (length := row.get("seconds_per_step")) is not None and length > 0:
                values["steps_per_s"] = 1 / length
            self.samples.add(row["time"], _row(values))
        gpus = [gpu["utilisation"] for gpu in state["gpus"] if gpu["utilisation"] is not None]
        power = [gpu["power_w"] for gpu in state["gpus"] if gpu["power_w"] is not None]
        memory = [row["memory_bytes"] for row in state["ranks"] if row["memory_bytes"]]
        if state["state"] not in ("running", "stalled"):
            return
        self.samples.add(
            now,
            _row(
                {
                    **{name: state[name] for name in ("steps_per_s", "batches_per_s", "loss")},
                    "samples_per_s": state["samples_per_s"],
                    "memory_bytes": max(memory, default=None),
                    "cpu": state["host"]["cpu"],
                    "gpu": sum(gpus) / len(gpus) if gpus else None,
                    "power_w": sum(power) if power else None,
                    "network_bytes_per_s": sum(state["host"]["network_bytes_per_s"].values()),
                }
            ),
        )

    # -- alerts ------------------------------------------------------------------------------------

    def _alert(
        self, kind: str, text: str, now: float, key: object = None, rank: int | None = None
    ) -> None:
        if (kind, key) in self._raised:
            return
        self._raised.add((kind, key))
        alert = Alert(kind, text, now, rank)
        self.alerts.append(alert)
        self.events.append((now, text))
        self._on_alert(alert)

    def _look_for_alerts(self, ranks: list[Process], now: float) -> None:
        for late in self.state["stragglers"]:
            # A CPU that is shared for some seconds is shown, but is no reason for an alert.
            if late["reason"] != "cpu_busy":
                share = f"{100 * late['share']:.0f} % of the time"
                text = f"rank {late['rank']} {late['text']}. The other ranks wait for it {share}."
                self._alert("straggler", text, now, (late["rank"], late["cause"]), late["rank"])
        self._check_loss(ranks, now)
        slower = slower_than_before(list(self._lengths))
        if slower is not None:
            self._alert("throughput", slower, now)
        table = self.table().latest()
        if table.numbers:
            means = table.parts.mean(axis=0)
            share = median_low((means[:, PARTS.index("input")] / means.sum(axis=1)).tolist())
            if share >= _STARVED:
                text = (
                    f"the ranks wait for input {100 * share:.0f} % of the step. Use more loader "
                    "workers, or make loading faster."
                )
                self._alert("input", text, now)
        if ranks and len(ranks) == self._world and min(p.steps for p in ranks) >= WINDOW_STEPS:
            if all(process.memory_bytes for process in ranks):
                self._memory.append(np.array([process.memory_bytes for process in ranks], float))
            for index, low, high in growing_memory(list(self._memory)):
                text = (
                    f"the memory of rank {ranks[index].rank} grows steadily: {format_bytes(low)} "
                    f"to {format_bytes(high)} in {len(self._memory)} samples"
                )
                self._alert("memory", text, now, ranks[index].rank, ranks[index].rank)

    def _check_loss(self, ranks: list[Process], now: float) -> None:
        failed = [p.rank for p in ranks if p.error.startswith("LossNotFinite")]
        losses = self._metrics.losses if self._metrics else []
        wrong = [step for step, _, loss in losses if not math.isfinite(loss)]
        if failed or wrong:
            where = f" in step {wrong[0]}" if wrong else f" ({name_ranks(failed)})"
            self._alert("loss", f"the loss is not finite{where}", now, "not finite")
        elif (spike := loss_spike([(step, loss) for step, _, loss in losses])) is not None:
            step, loss, usual = spike
            text = f"the loss of step {step} is {loss:.4g}, after a median of {usual:.4g}"
            self._alert("loss", text, now, "spike")


# -- helpers ---------------------------------------------------------------------------------------


def _state_of(process: Process) -> str:
    if process.exit_state == FAILED:
        return "failed"
    if process.exit_state == ENDED:
        return "ended"
    return "running" if process.alive else "failed"


def _quiet_seconds(process: Process) -> float:
    """Return for how long a rank has made no step, changed no phase and entered no operation."""
    last = max((max(each.entered, each.completed) for each in process.operations), default=0.0)
    return min(process.step_age, process.phase_age, process.time - last)


def _ended(process: Process) -> Process:
    """Return a rank whose ring was removed: its job has ended normally."""
    if process.exit_state == FAILED:
        return process
    return replace(process, exit_state=ENDED, alive=False)


def _mean(rows: Sequence[Array]) -> list[float]:
    """Return the means of columns over the rows without NaN, or [] if there are none."""
    known = [row for row in rows if not np.isnan(row).any()]
    return np.stack(known).mean(axis=0).tolist() if known else []


def _row(values: dict[str, Any]) -> Array:
    known = [values.get(name) for name in SAMPLE_COLUMNS]
    return np.array([np.nan if value is None else value for value in known], dtype=np.float64)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _throttled_seconds(pid: int) -> float:
    """Return for how long the kernel has stopped the cgroup of a process for its CPU quota."""
    match = re.search(r"^0::(/.*)$", _text(f"/proc/{pid}/cgroup"), re.MULTILINE)
    if match is None:
        return math.nan
    found = re.search(r"throttled_usec (\d+)", _text(f"/sys/fs/cgroup{match[1]}/cpu.stat"))
    return int(found[1]) / 1e6 if found else math.nan
