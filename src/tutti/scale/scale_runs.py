"""Run a recipe or any training program with each number of ranks, and read the traces.

Completed measurements are kept, even if a later run fails or Ctrl-C stops the series of runs.
"""

import contextlib
import ctypes
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean, median
from types import FrameType
from typing import Any

from tutti.machine.cpu_numa import allowed_cpus, busy_seconds, cpu_quota
from tutti.machine.gpus import visible_gpu_count
from tutti.profile.calibration import (
    RecordingCost,
    avoided_page_fault_seconds,
    calibrate,
    recording_cost,
    typical_parts,
    typical_seconds,
)
from tutti.profile.captured_command import captured_environment
from tutti.profile.explain import Explanation, explain
from tutti.profile.step_breakdown import find_period, large_values, parts_with_pauses
from tutti.world.errors import UsageError
from tutti.world.failure import first_error
from tutti.world.launch import LocalWorld

RANKS = "{ranks}"  # placeholder for the number of ranks in a command
PROFILER_WARMUP = 2
_LOG_LINES = 20
_PR_SET_PDEATHSIG = 1  # an option of prctl
# If other programs use more than this share of the CPUs, the output has a note.
_OTHERS_SHARE = 0.1
# Maximum calibration factor. Timed steps may be slower than recorded steps by chance, but not by a
# larger factor.
_MAX_FACTOR = 1.25
_SLOW_STEP = 0.1  # a step is slow if it is longer than a typical step by more than this share
_LATE_KEYS = ("rank", "cost_s", "cost_share", "excess", "steady", "period")
_RANK_FLAGS = {
    **dict.fromkeys(("mpirun", "mpiexec", "srun", "tutti"), "-n"),
    **dict.fromkeys(
        ("torchrun", "torch.distributed.run", "torch.distributed.launch"), "--nproc-per-node"
    ),
    "accelerate": "--num_processes",
    "deepspeed": "--num_gpus",
}


@dataclass(frozen=True)
class Schedule:
    """The numbers of steps of a run: first skipped steps, then timed steps and recorded steps.

    Timed steps run without the profiler, and recorded steps run with the profiler. On CPUs, timed
    steps and recorded steps alternate (see tutti.profile.capture.Capture). On GPUs, all timed steps
    come before the recorded steps.
    """

    settle: int = 5
    timed: int = 20
    recorded: int = 20

    @property
    def steps(self) -> int:
        """The number of optimizer steps that a run needs, with the step that starts the capture."""
        return 1 + self.settle + self.timed + PROFILER_WARMUP + self.recorded


@dataclass(frozen=True)
class Job:
    """A command that can be run with any number of ranks.

    If `starts_ranks` is True, the command starts all ranks, and {ranks} in the command is replaced
    by the number of ranks. If `starts_ranks` is False, the command is for one rank, and `tutti run`
    starts the ranks. `ends` is True if the program ends on its own after the steps of the schedule.
    """

    command: tuple[str, ...]
    starts_ranks: bool = False
    ends: bool = False
    device: str = "auto"
    ranks_per_gpu: int = 1

    def command_for(self, ranks: int, extra: Sequence[str]) -> list[str]:
        """Return the complete command with the `extra` arguments at its end."""
        command = [argument.replace(RANKS, str(ranks)) for argument in (*self.command, *extra)]
        if self.starts_ranks:
            return command
        run = [sys.executable, "-m", "tutti", "run", "-n", str(ranks), "--device", self.device]
        run += ["--ranks-per-gpu", str(min(ranks, self.ranks_per_gpu))]
        return [*run, "--", *command]

    def environment(self, schedule: Schedule, traces: Path, max_ranks: int) -> dict[str, str]:
        """Return the environment variables that make every rank record a trace."""
        settings = {
            "directory": str(traces),
            "wait": schedule.settle + schedule.timed,
            "warmup": PROFILER_WARMUP,
            "active": schedule.recorded,
            "interleave": schedule.timed,
            "stop": not self.ends,
        }
        env = captured_environment(settings, os.environ)
        # Every rank has the same number of threads in every run. Otherwise a single rank would use
        # all cores, and would be compared with ranks that have only a share of the cores.
        env.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // max_ranks)))
        return env

    def check(self, sizes: Sequence[int]) -> None:
        """Raise UsageError if this host cannot start one of these numbers of ranks."""
        for ranks in () if self.starts_ranks else sizes:
            shared = min(ranks, self.ranks_per_gpu)
            LocalWorld(self.command, ranks, self.device, ranks_per_gpu=shared).check()

    def describe(self, sizes: Sequence[int]) -> str:
        """Return a sentence about the number of threads per rank."""
        variable = os.environ.get("OMP_NUM_THREADS")
        threads = variable or str(max(1, _cores() // max(sizes)))
        reason = "OMP_NUM_THREADS" if variable else f"{_cores()} cores / {max(sizes)}"
        return f"every rank has {threads} thread{'s' * (threads != '1')} in every run ({reason})"

    def notes(self, sizes: Sequence[int]) -> list[str]:
        """Return notes about conditions that limit the meaning of the results."""
        notes = []
        if self.ranks_per_gpu > 1:
            notes.append("ranks share a GPU, so the results show software overhead, not GPU links")
        on_cpus = self.device == "cpu" or not visible_gpu_count()
        if on_cpus and max(sizes) > _cores() and not self.starts_ranks:
            notes.append(f"{max(sizes)} ranks share {_cores()} cores and slow each other down")
        return notes


def _cores() -> int:
    return min(len(allowed_cpus()), cpu_quota() or sys.maxsize)


def starts_ranks_itself(command: Sequence[str], sizes: Sequence[int]) -> bool:
    """Return whether the command starts its ranks itself, because it contains {ranks}.

    Raises UsageError if the command is a launcher, but does not contain {ranks}.
    """
    if any(RANKS in argument for argument in command):
        return True
    if re.fullmatch(r"python[\d.]*", Path(command[0]).name) and command[1:2] == ["-m"]:
        command = command[2:] or command
    launcher = re.sub(r"^(mpirun|mpiexec)\..*", r"\1", Path(command[0]).name)  # mpirun.openmpi
    if launcher not in _RANK_FLAGS or (launcher == "tutti" and command[1:2] != ["run"]):
        return False
    program = "tutti run" if launcher == "tutti" else launcher
    raise UsageError(
        f"{launcher} starts ranks itself, but the command does not contain {RANKS}. Write {RANKS} "
        f"for the number of ranks ({program} {_RANK_FLAGS[launcher]} {RANKS} …), or use only the "
        f"script: tutti scale --ranks {','.join(map(str, sizes))} -- train.py"
    )


@dataclass(frozen=True)
class PlannedRun:
    """One run of a series: a number of ranks, the number of the repeat, and flags of a sweep."""

    ranks: int
    repeat: int
    flags: dict[str, str]  # the flags that a sweep sets

    @property
    def folder_name(self) -> str:
        flags = [f"{flag}{value}" for flag, value in self.flags.items()]
        return "-".join([*flags, f"ranks{self.ranks}", f"repeat{self.repeat}"])

    @property
    def title(self) -> str:
        flags = "".join(f"--{flag} {value}, " for flag, value in self.flags.items())
        return f"{flags}{self.ranks} rank{'s' * (self.ranks != 1)}, repeat {self.repeat}"


def plan_runs(
    sizes: Sequence[int], repeats: Sequence[int], sweep: Sequence[dict[str, str]] = ({},)
) -> list[PlannedRun]:
    """Return the runs of all repeats. A repeat has one run per number of ranks and sweep value.

    The repeats run one after another, so slow changes of the machine's speed affect all numbers of
    ranks equally. In every second repeat, the numbers of ranks are in reverse order.
    """
    return [
        PlannedRun(ranks, repeat, flags)
        for repeat, flags in product(repeats, sweep)
        for ranks in (sizes if repeat % 2 == 0 else reversed(sizes))
    ]


@dataclass(frozen=True)
class MeasuredStep:
    """The mean time of a step without the profiler, and the parts whose sum is this time."""

    seconds: float
    parts: Mapping[str, float]

    def total(self, *parts: str) -> float:
        return sum(self.parts[part] for part in parts)


@dataclass(frozen=True)
class MeasuredRun:
    """The measurements of one run."""

    ranks: int
    repeat: int
    folder: Path
    flags: dict[str, str]  # the flags that a sweep sets
    samples: float | None  # number of samples per step, over all ranks
    step: MeasuredStep
    # The parts of a recorded step before the calibration. `host_gap` is the time in gaps below
    # 1 ms, and `pause` is the time in longer gaps.
    recorded: Mapping[str, float]
    hidden: float  # communication hidden behind compute, as a share of the step
    comm: list[dict[str, Any]]
    late: dict[str, Any] | None  # the rank for which the other ranks wait longest, if any
    slow: dict[str, Any] | None  # the slow timed steps, as returned by `slow_steps`
    overhead: float  # recorded step / step without the profiler
    notes: list[str]

    def row(self) -> dict[str, Any]:
        """Return an entry of `runs[]` in the JSON."""
        return {
            "ranks": self.ranks,
            "repeat": self.repeat,
            "flags": self.flags,
            "folder": str(self.folder),
            "step_s": self.step.seconds,
            "samples_per_step": self.samples,
            "parts_s": self.step.parts,
            "recorded_parts_s": self.recorded,
            "recording_overhead": self.overhead,
            "late": self.late,
            "slow_steps": self.slow,
        }


@dataclass
class RunSeries:
    """Executes planned runs one after another."""

    job: Job
    schedule: Schedule
    out: Path
    extra_arguments: Callable[[PlannedRun, Path], Sequence[str]]
    runs: list[MeasuredRun] = field(default_factory=list)
    stopped: bool = False  # whether Ctrl-C stopped the series
    failure: str | None = None  # the reason why a run could not be measured
    crashed: bool = False  # whether the program ended with an exit code other than 0
    other_cpus: list[float] = field(default_factory=list)  # CPUs that other programs used, per run

    def execute(self, plan: Sequence[PlannedRun]) -> None:
        """Execute the planned runs. Stop early after Ctrl-C or after a failed run."""
        max_ranks = max(run.ranks for run in plan)
        with contextlib.ExitStack() as stack:
            signals = _SignalForwarder(stack)
            for number, run in enumerate(plan, 1):
                _progress(f"[{number}/{len(plan)}] {run.title} …", end="")
                began, others = time.monotonic(), _OtherPrograms()
                measured = self._execute_one(run, max_ranks, signals)
                self.stopped = signals.received
                if measured is None:
                    _progress(" stopped" if self.stopped else " failed")
                    return
                self.runs.append(measured)
                self.other_cpus += others.cpus()
                duration = time.monotonic() - began
                _progress(f" {1e3 * measured.step.seconds:.4g} ms per step ({duration:.0f} s)")
                if self.stopped:
                    return

    def notes(self) -> list[str]:
        """Return a note if other programs used a considerable share of the CPUs."""
        cores = len(allowed_cpus())
        used = median(self.other_cpus) if self.other_cpus else 0.0
        if used < _OTHERS_SHARE * cores:
            return []
        return [
            f"other programs used {used:.1f} of {cores} CPUs during the runs and may have caused a "
            "part of the lost efficiency. To measure the efficiency of the job alone, repeat the "
            "command while the machine is idle"
        ]

    def _execute_one(
        self, run: PlannedRun, max_ranks: int, signals: "_SignalForwarder"
    ) -> MeasuredRun | None:
        folder = self.out / run.folder_name
        command = self.job.command_for(run.ranks, self.extra_arguments(run, folder))
        env = self.job.environment(self.schedule, folder / "traces", max_ranks)
        log = self.out / "logs" / f"{run.folder_name}.log"
        code = signals.run(command, env, log)
        # Delete the checkpoints, because these runs are never resumed.
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        try:
            return read_run(folder, run, self.schedule)
        except NotMeasured as error:
            if not signals.received:
                reason = f"the program ended with code {code}" if code else str(error)
                lines = log.read_text(errors="replace").splitlines()
                shown, what = lines, "Its last lines"
                if code and (traceback := first_error(lines)):
                    # Add the last line, which is from the launcher and names the failed rank.
                    shown, what = traceback + lines[-1:] * (lines[-1] not in traceback), "Its error"
                output = "\n".join([f"{what} ({log}):", *shown[-_LOG_LINES:]]) if lines else ""
                self.failure = f"{run.title}: {reason}. {output}".rstrip()
                self.crashed = code != 0
            return None


class _OtherPrograms:
    """Measures how many CPUs are used by processes that do not belong to this command."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float | None, float]:
        """Return (time, busy seconds of all allowed CPUs, CPU seconds of this command).

        The CPU seconds of this command include the ranks of all runs that have ended.
        """
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        used = sum(usage.ru_utime + usage.ru_stime for usage in own)
        return time.monotonic(), busy_seconds(allowed_cpus()), used

    def cpus(self) -> list[float]:
        """Return [mean number of CPUs that other processes used], or [] if it is unknown."""
        (began, busy_before, own_before), (now, busy, own) = self._start, self._now()
        if busy is None or busy_before is None:
            return []
        return [max(0.0, (busy - busy_before - (own - own_before)) / (now - began))]


class NotMeasured(Exception):
    """A run has not written the expected traces. The exception's message is the reason."""


def read_run(folder: Path, run: PlannedRun, schedule: Schedule) -> MeasuredRun:
    """Return the measurements from the traces that a run has written."""
    files = list((folder / "traces").glob("rank*.json.gz"))
    if not files:
        raise NotMeasured(
            f"no rank wrote a trace. Each rank must take {schedule.steps} steps: steps of a torch "
            "optimizer or, if the program has no optimizer, calls of the outermost module. Train "
            "longer, or reduce --steps or --settle"
        )
    if len(files) != run.ranks:
        raise NotMeasured(
            f"{len(files)} of {run.ranks} ranks wrote a trace. The command must start {run.ranks} "
            "ranks, and each rank must train"
        )
    try:
        explanation = explain(files)
    except (UsageError, ValueError, OSError) as error:
        raise NotMeasured(str(error)) from None
    rows = explanation.rows()
    ranks = rows["ranks"]
    if len(ranks) != run.ranks or rows["world_size"] != run.ranks:
        raise NotMeasured(
            f"the traces are from a world of {rows['world_size']} ranks instead of {run.ranks}"
        )
    infos = [trace.capture_info for trace in explanation.traces]
    times = [info.get("step_s", [])[schedule.settle :] for info in infos]
    if not all(times):
        raise NotMeasured("a trace has no step that was timed without the profiler")
    step_times = [fmean(of_ranks) for of_ranks in zip(*times, strict=False)]
    numbers = (infos[0].get("timed_steps") or range(sys.maxsize))[schedule.settle :]
    notes = [note for note in rows["notes"] if "missing" in note or "no optimizer" in note]
    if run.ranks > 1 and not rows["comm"]:
        notes.append(
            f"the {run.ranks} ranks do not communicate, so each rank trains alone. The script must "
            "call init_process_group and wrap its model in DDP or FSDP"
        )
    on_device = any(trace.on_device for trace in explanation.traces)
    shares = [trace.operators_in_input for trace in explanation.traces]
    cost = None if on_device else recording_cost(infos, shares)
    recorded_of_step = recorded_steps(explanation)
    recorded = typical_parts(recorded_of_step)
    late = next((row for row in rows["stragglers"] if row["straggler"]), None)
    return MeasuredRun(
        ranks=run.ranks,
        repeat=run.repeat,
        folder=folder,
        flags=run.flags,
        samples=_samples_per_step(folder, [info.get("batch") for info in infos]),
        step=measured_step(
            recorded,
            step_times,
            on_device,
            cost,
            page_faults=min(map(avoided_page_fault_seconds, infos))
            * min(1.0, infos[0].get("interleaved", 0) / len(step_times)),
        ),
        recorded=recorded,
        hidden=fmean(row["parts_share"]["hidden"] for row in ranks),
        comm=rows["comm"],
        late=late and {key: late[key] for key in _LATE_KEYS},
        slow=slow_steps(step_times, recorded_of_step, numbers),
        overhead=median(info.get("overhead") or 1.0 for info in infos),
        notes=notes,
    )


def recorded_steps(explanation: Explanation) -> list[dict[str, float]]:
    """Return the parts of each recorded step, combined over all ranks by `combine_ranks`."""
    steps: dict[int, list[Mapping[str, float]]] = {}
    for step in explanation.steps:
        steps.setdefault(step.step, []).append(parts_with_pauses(step))
    complete = [parts for parts in steps.values() if len(parts) == len(explanation.traces)]
    return [combine_ranks(parts) for parts in complete or list(steps.values())]


def measured_step(
    recorded: Mapping[str, float],
    step_times: Sequence[float],
    on_device: bool = False,
    recording: RecordingCost | None = None,
    page_faults: float = 0.0,
) -> MeasuredStep:
    """Return the mean timed step, divided into the parts of a typical recorded step.

    `recording` is the time that recording adds to a step, if known. `page_faults` is the time per
    step of page faults that do not occur during the capture, because of memory that the profiler
    has allocated. Without the capture they would occur, so this time is added to compute. The part
    `unexplained` is the time of a typical timed step minus the sum of the calibrated parts. The
    part `slow_steps` is the mean time of all timed steps minus the time of a typical timed step.
    """
    typical, mean = typical_seconds(step_times), fmean(step_times)
    step = calibrate(recorded, typical, on_device, _MAX_FACTOR, recording)
    parts = step.parts | {"slow_steps": mean - typical, "unexplained": step.unexplained}
    parts["compute"] += page_faults
    return MeasuredStep(mean + page_faults, parts)


def slow_steps(
    step_times: Sequence[float],
    recorded: Sequence[Mapping[str, float]] = (),
    numbers: Sequence[int] = range(sys.maxsize),
) -> dict[str, Any] | None:
    """Return the number of slow timed steps, their median excess and their period.

    `numbers` contains the number of each timed step in the program. `excess_s` is the time by which
    a slow step exceeds a typical step. `period` is None if slow steps do not occur at a constant
    distance. `part` is the part that grows most in slow recorded steps, and `part_excess_s` is its
    growth over a typical recorded step.
    """
    excess = _excess(step_times, numbers)
    slow = large_values(excess, _SLOW_STEP * typical_seconds(step_times))
    if not slow:
        return None
    part, part_excess = None, 0.0
    lengths = [sum(parts.values()) for parts in recorded]
    least = _SLOW_STEP * typical_seconds(lengths) if lengths else 0.0
    if slow_recorded := large_values(_excess(lengths, range(len(lengths))), least):
        typical = typical_parts(recorded)
        growth = {
            name: fmean(recorded[number][name] for number in slow_recorded) - typical[name]
            for name in typical
        }
        growth["host_gap"] += growth.pop("pause", 0.0)
        part = max(growth, key=lambda name: growth[name])
        part_excess = growth[part]
    return {
        "steps": len(slow),
        "of_steps": len(step_times),
        "excess_s": median(excess[number] for number in slow),
        "period": find_period(slow, list(excess)),
        "part": part,
        "part_excess_s": part_excess,
    }


def _excess(step_times: Sequence[float], numbers: Sequence[int]) -> dict[int, float]:
    """Return {number of a step: its seconds minus the seconds of a typical step}."""
    typical = typical_seconds(step_times) if step_times else 0.0
    return {number: seconds - typical for number, seconds in zip(numbers, step_times, strict=False)}


def combine_ranks(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the parts of all ranks in one step. The sum of the parts is the mean step time.

    The time of own work is the own work of the fastest rank, and any excess on slower ranks counts
    as waiting. If the mean over ranks were used, a part of the excess would count as compute.

    There is one exception. If the slowest rank waits for its data loader, the time in which the
    other ranks wait for this rank counts as input, not as waiting. The reason is that if all data
    loaders are slow, only the slowest rank shows this as input: the other ranks wait for it in a
    collective, and their data loaders finish in the meantime.

    Compute includes hidden communication. `pause` is the time in gaps that recording does not
    lengthen.
    """
    own_parts = ("compute", "hidden", "input", "host_gap", "pause", "rest")
    by_own_work = sorted(ranks, key=lambda parts: sum(parts[name] for name in own_parts))
    fastest, slowest = by_own_work[0], by_own_work[-1]
    length = fmean(sum(parts.values()) for parts in ranks)
    combined = {
        "compute": fastest["compute"] + fastest["hidden"],
        "exposed": fmean(parts["exposed"] for parts in ranks),
        "bubble": fmean(parts["bubble"] for parts in ranks),
        **{name: fastest[name] for name in ("input", "host_gap", "pause", "rest")},
    }
    wait = length - sum(combined.values())
    late_input = min(max(0.0, slowest["input"] - fastest["input"]), wait)
    combined["input"] += max(0.0, late_input)
    return combined | {"wait": length - sum(combined.values())}


def _samples_per_step(folder: Path, batches: list[Any]) -> float | None:
    """Return the number of samples per step, or None if unknown.

    For `tutti train`, the number is the global batch size. A sum over ranks would be wrong, because
    the ranks of a tensor-parallel group or of a pipeline process the same samples. For other
    programs, the number is the sum of the batch sizes that the data loaders of all ranks returned.
    """
    summary = folder / "summary.json"
    if summary.is_file():
        batch = json.loads(summary.read_text()).get("plan", {}).get("global_batch")
        if batch:
            return float(batch)
    return float(sum(batches)) if all(batches) else None


class _SignalForwarder:
    """Runs programs and forwards Ctrl-C and SIGTERM to them. A signal sets `received`.

    If no program runs, a signal only sets `received`, so the traces of a finished run are read
    completely. The previous signal handlers are restored when `stack` is closed.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.received = False
        self._program: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, self._on_signal))

    def run(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> int:
        """Run a program until it ends, with its output in `log`, and return its exit code.

        The program runs in a separate session, so Ctrl-C in the terminal reaches only this process.
        This process forwards the signal once, because a launcher that receives one signal lets its
        ranks end normally. When the program has ended, its remaining child processes are killed.
        """
        libc = ctypes.CDLL(None)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as output:
            program = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # If this process is killed, the program gets SIGTERM.
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
            )
        self._program = program
        try:
            if self.received:  # the signal came before the program started
                program.send_signal(signal.SIGINT)
            return program.wait()
        finally:
            self._program = None
            _kill_group(program)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_second, self.received = self.received, True
        if self._program is not None and self._program.returncode is None:
            if is_second:  # after a second Ctrl-C, do not wait for the program to end
                _kill_group(self._program)
            else:
                self._program.send_signal(number)


def _kill_group(program: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)


def _progress(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)
