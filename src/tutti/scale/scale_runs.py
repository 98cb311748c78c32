"""Run the job with each number of ranks in turn, and read the traces of each run.

Measured runs are kept, even if a later run fails or Ctrl-C stops the series.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

from tutti.profile.explain import explain
from tutti.scale.efficiency import MeasuredRun, MeasuredStep, combine_ranks
from tutti.scale.scale_job import Job, Schedule
from tutti.world.errors import UsageError

_LOG_LINES = 20
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class NotMeasured(Exception):
    """A run ended without the traces that it should have written; the message has the reason."""


@dataclass(frozen=True)
class PlannedRun:
    ranks: int
    repeat: int
    flags: dict[str, str] = field(default_factory=dict)  # set by a sweep

    @property
    def folder_name(self) -> str:
        flags = "".join(f"{flag}{value}-" for flag, value in self.flags.items())
        return f"{flags}ranks{self.ranks}-repeat{self.repeat}"

    @property
    def title(self) -> str:
        flags = "".join(f"--{flag} {value}, " for flag, value in self.flags.items())
        return f"{flags}{self.ranks} rank{'s' * (self.ranks != 1)}, repeat {self.repeat}"


def plan_runs(
    sizes: Sequence[int], repeats: int, sweep: Sequence[dict[str, str]] = ({},)
) -> list[PlannedRun]:
    """Every repeat runs every number of ranks: drift of machine speed affects all the same."""
    return [
        PlannedRun(ranks, repeat, flags)
        for repeat in range(repeats)
        for flags in sweep
        for ranks in sizes
    ]


class RunSeries:
    """Executes planned runs one after another.

    `runs`: the measured runs. `stopped`: whether Ctrl-C stopped the series. `failure`: why a run
    could not be measured.
    """

    def __init__(
        self,
        job: Job,
        schedule: Schedule,
        out: Path,
        extra_words: Callable[[PlannedRun, Path], Sequence[str]] = lambda run, folder: (),
    ) -> None:
        self.runs: list[MeasuredRun] = []
        self.stopped = False
        self.failure: str | None = None
        self._job, self._schedule, self._out = job, schedule, out
        self._extra_words = extra_words

    def execute(self, plan: Sequence[PlannedRun]) -> None:
        """Execute the plan until its end, until Ctrl-C, or until a run fails."""
        most_ranks = max(run.ranks for run in plan)
        with _SignalForwarder() as signals:
            for number, run in enumerate(plan, 1):
                _progress(f"[{number}/{len(plan)}] {run.title} …", end="")
                began = time.monotonic()
                measured = self._execute_one(run, most_ranks, signals)
                self.stopped = signals.received
                if measured is None:
                    _progress(" stopped" if self.stopped else " failed")
                    return
                self.runs.append(measured)
                duration = time.monotonic() - began
                _progress(f" {1e3 * measured.step.seconds:.4g} ms per step ({duration:.0f} s)")
                if self.stopped:
                    return

    def _execute_one(
        self, run: PlannedRun, most_ranks: int, signals: "_SignalForwarder"
    ) -> MeasuredRun | None:
        folder = self._out / run.folder_name
        command = self._job.command_for(run.ranks, self._extra_words(run, folder))
        env = self._job.environment(self._schedule, folder / "traces", most_ranks)
        log = self._out / "logs" / f"{run.folder_name}.log"
        code = _run_program(command, env, log, signals)
        # These runs are never resumed.
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        try:
            return read_run(folder, run, self._schedule)
        except NotMeasured as reason:
            if not signals.received:
                why = f"the program ended with code {code}" if code else str(reason)
                with open(log, errors="replace") as file:
                    tail = "".join(deque(file, maxlen=_LOG_LINES))
                output = f"Its last lines ({log}):\n{tail}" if tail else ""
                self.failure = f"{run.title}: {why}. {output}".rstrip()
            return None


def read_run(folder: Path, run: PlannedRun, schedule: Schedule) -> MeasuredRun:
    """Read the traces that a run has written."""
    files = list((folder / "traces").glob("rank*.json.gz"))
    if not files:
        raise NotMeasured(
            f"no rank wrote a trace: each must take {schedule.steps} steps of a torch optimizer: "
            "train longer, or reduce --steps or --settle"
        )
    if len(files) != run.ranks:
        raise NotMeasured(
            f"{len(files)} of {run.ranks} ranks wrote a trace: does the command start {run.ranks} "
            "ranks, and does each train?"
        )
    try:
        explanation = explain(files)
    except (UsageError, ValueError, OSError) as error:
        raise NotMeasured(str(error)) from None
    rows = explanation.rows()
    if len(rows["ranks"]) != run.ranks or rows["world_size"] != run.ranks:
        raise NotMeasured(
            f"the traces are of a world of {rows['world_size']} ranks, not of {run.ranks}"
        )
    infos = [trace.capture_info for trace in explanation.traces]
    times = [info.get("step_s", [])[schedule.settle :] for info in infos]
    if not all(times):
        raise NotMeasured("a trace has no step that was timed without the profiler")
    seconds = fmean(fmean(each) for each in times)
    parts = [each["parts_s"] for each in rows["ranks"]]
    recorded = fmean(each["step_s"]["mean"] for each in rows["ranks"])
    notes = [note for note in rows["notes"] if "missing" in note]
    if run.ranks > 1 and not rows["comm"]:
        notes.append(
            f"the {run.ranks} ranks do not communicate: each trains alone, which is not scaling "
            "(does the script call init_process_group and wrap its model?)"
        )
    late = next((each for each in rows["stragglers"] if each["straggler"]), None)
    return MeasuredRun(
        ranks=run.ranks,
        repeat=run.repeat,
        folder=folder,
        flags=run.flags,
        samples=_samples_per_step(folder, [info.get("batch") for info in infos]),
        step=MeasuredStep(seconds, combine_ranks(parts)),
        hidden=fmean(each["hidden"] for each in parts) / recorded,
        comm=rows["comm"],
        late=late and {key: late[key] for key in ("rank", "cost_s", "cost_share", "instead")},
        overhead=recorded / seconds,
        notes=notes,
    )


def _samples_per_step(folder: Path, batches: list[Any]) -> float | None:
    """The global batch of a tutti run, otherwise the sum over the ranks' data loaders.

    Ranks of a tensor-parallel group or a pipeline have the same samples, which a sum over the ranks
    would count several times.
    """
    summary = folder / "summary.json"
    if summary.is_file():
        batch = json.loads(summary.read_text()).get("plan", {}).get("global_batch")
        if batch:
            return float(batch)
    return float(sum(batches)) if all(batches) else None


class _SignalForwarder:
    """Forwards Ctrl-C and SIGTERM to the running program; `received` is then true.

    A signal between two programs interrupts nothing: the traces of a finished run are read
    completely.
    """

    def __init__(self) -> None:
        self.received = False
        self._program: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_SignalForwarder":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait_for(self, program: "subprocess.Popen[bytes]") -> int:
        """Wait for the program, kill the rest of its process group, and return its exit code."""
        self._program = program
        try:
            if self.received:  # the signal came before the program started
                program.send_signal(signal.SIGINT)
            return program.wait()
        finally:
            self._program = None
            _kill_group(program)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self.received = self.received, True
        if self._program is not None and self._program.returncode is None:
            if again:  # the user does not want to wait
                _kill_group(self._program)
            else:
                self._program.send_signal(number)


def _run_program(
    command: Sequence[str], env: Mapping[str, str], log: Path, signals: _SignalForwarder
) -> int:
    """Run a program to its end, with its output in `log`; returns its exit code.

    The program has its own session, so that Ctrl-C in the terminal reaches only this process, which
    forwards the signal once: a launcher that receives one signal lets its ranks end normally.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        program = subprocess.Popen(
            list(command),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # If this process is killed, the program gets SIGTERM, and a launcher ends its ranks.
            preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        return signals.wait_for(program)


def _kill_group(program: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)


def _progress(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)
