"""Runs an unchanged program and captures every rank, also if a launcher starts several tasks.

`tutti profile -- srun -n 2 train.py` needs a launcher that passes environment variables to the
ranks. `srun -n 2 tutti profile -- train.py` needs no such launcher, because every task runs tutti
profile. All tasks write traces and exit codes to one folder, and the first task waits for all exit
codes and explains the traces.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tutti.measure.files import write_atomically
from tutti.world.errors import UsageError
from tutti.world.launchers import identify

# How long the first task waits for the other tasks. New files of other hosts appear late in cluster
# file systems.
_TASK_TIMEOUT_SECONDS = 60.0
# The timeout after a failure is shorter, because the launcher may have killed the other tasks.
_FAILED_TIMEOUT_SECONDS = 5.0
# Time between SIGTERM and SIGKILL for a command that has exceeded its time limit.
_GRACE_SECONDS = 10.0


def captured_environment(settings: dict[str, Any], before: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make every Python process of a training record a trace.

    All processes that the command starts inherit PYTHONPATH, for example torchrun's workers.
    """
    path = filter(None, [str(Path(__file__).parent / "startup"), before.get("PYTHONPATH")])
    env = {**before, "PYTHONPATH": os.pathsep.join(path), "TUTTI_PROFILE": json.dumps(settings)}
    enlarge_flight_recorder(env)
    return env


def enlarge_flight_recorder(env: MutableMapping[str, str]) -> None:
    """Enlarge torch's flight recorder, from which capture.py reads the collectives of gloo."""
    env.setdefault("TORCH_FR_BUFFER_SIZE", "20000")


def resolve_command(arguments: Sequence[str], tutti_commands: Sequence[str]) -> list[str]:
    """Return the command to start: a script, a command of tutti (`train …`), or any program."""
    first, *rest = arguments
    if first == "tutti" or (first in tutti_commands and not Path(first).is_file()):
        return [sys.executable, "-m", "tutti", *(rest if first == "tutti" else arguments)]
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise UsageError(f"script {first!r} does not exist. Check the path.")
        return [sys.executable, *arguments]
    # Search next to this interpreter first, to find torchrun in an environment that is not active.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if (found := shutil.which(first, path=path)) is None:
        raise UsageError(
            f"{first!r} is not a program. For example, use tutti profile -- torchrun … train.py."
        )
    script = next((word for word in rest if word.endswith(".py")), None)
    is_local = re.fullmatch(r"torchrun|accelerate|python[\d.]*", Path(first).name) is not None
    if script is not None and is_local and not Path(script).is_file():
        before = rest[rest.index(script) - 1] if rest[0] != script else ""
        if not before.startswith("-"):  # otherwise the path is the value of a flag
            raise UsageError(f"script {script!r} does not exist. Check the path.")
    return [found, *rest]


def run_captured(
    command: Sequence[str],
    settings: dict[str, Any],
    output: IO[str] | None = None,
    limit_s: float | None = None,
) -> int:
    """Run a command, forward SIGTERM, and return the exit code as a shell reports it.

    The command writes to the file `output` instead of standard output and standard error. After
    `limit_s` seconds, the command and all its child processes are ended, and the exit code is 124.
    """
    env = captured_environment(settings, os.environ)
    # Keep inherited file descriptors open, because MPICH's ranks communicate with mpirun through
    # one of these descriptors.
    with subprocess.Popen(
        command, env=env, close_fds=False, stdout=output, stderr=output
    ) as process:
        before = signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
        try:
            while True:
                try:
                    code = process.wait(limit_s)
                    return code if code >= 0 else 128 - code  # ended by signal -code
                except KeyboardInterrupt:
                    # The program has received Ctrl-C, too. Wait for its end and keep its traces.
                    continue
                except subprocess.TimeoutExpired:
                    _end_with_children(process)
                    return 124
        finally:
            signal.signal(signal.SIGTERM, before)


def _end_with_children(process: "subprocess.Popen[bytes]") -> None:
    """End a command and all its child processes.

    SIGTERM lets a launcher end its ranks and remove its files. Processes that are left after the
    grace period are killed.
    """
    import psutil  # type: ignore[import-untyped]

    try:
        processes = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        processes = []
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)
    process.kill()
    for child in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


@dataclass(frozen=True)
class LauncherTask:
    """One of the `tutti profile` processes that a launcher started. All have the same `job`."""

    number: int
    count: int
    launcher: str
    job: str

    @staticmethod
    def from_environment(env: Mapping[str, str]) -> "LauncherTask":
        try:
            identity = identify(env)
        except UsageError:  # the launcher's variables are incomplete. The program may not need them
            return LauncherTask(0, 1, "", "")
        has_job = identity.launcher in ("slurm", "openmpi", "mpich", "tutti")
        job = re.sub(r"[^A-Za-z0-9._-]", "-", identity.job) if has_job else ""
        return LauncherTask(identity.rank, identity.size, identity.launcher, job)

    @property
    def missing_rank_hint(self) -> str:
        """A hint about variables that torchrun sets and other launchers do not set."""
        starter = {"slurm": "srun", "openmpi": "mpirun", "mpich": "mpirun"}.get(self.launcher)
        if starter is None or self.count == 1:
            return ""
        return (
            f" torchrun sets RANK and MASTER_ADDR, but {starter} does not. Start torchrun with "
            f"{starter}, or call tutti.init() in the script."
        )

    def default_folder(self, now: str) -> Path:
        """Return the folder that is used if --out is not given.

        If there are several tasks, the name has the job id instead of the time, because the clocks
        of hosts may differ.
        """
        if self.count == 1:
            return Path("runs") / f"profile-{now}"
        if not self.job:
            raise UsageError(
                f"--out is required, because {self.launcher} started {self.count} tasks of tutti "
                f"profile, which write to one folder. Or start one task: tutti profile -- "
                f"{self.launcher} …"
            )
        return Path("runs") / f"profile-{self.job}"

    def write_exit_code(self, out: Path, code: int) -> None:
        """Write the exit code of this task's program, for which the first task waits."""
        path = self._exit_code_file(out, self.number)
        with contextlib.suppress(OSError):  # the first task reports a missing code
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, str(code))

    def wait_for_exit_codes(self, out: Path, failed: bool) -> tuple[dict[int, int], list[int]]:
        """Return the exit codes of tasks that have ended, and the numbers of all other tasks."""
        codes: dict[int, int] = {}
        timeout = _FAILED_TIMEOUT_SECONDS if failed else _TASK_TIMEOUT_SECONDS
        deadline = time.monotonic() + timeout
        while missing := [number for number in range(self.count) if number not in codes]:
            for number in missing:
                with contextlib.suppress(OSError):
                    codes[number] = int(self._exit_code_file(out, number).read_text())
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        for number in codes:
            self._exit_code_file(out, number).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a late task may still write its exit code there
            self._exit_code_file(out, 0).parent.rmdir()
        return codes, missing

    def _exit_code_file(self, out: Path, number: int) -> Path:
        return out / ".ended" / f"{self.job or self.launcher}-{number}"
