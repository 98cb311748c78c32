"""Runs a program without changing it and captures every rank, also under a launcher such as srun.

`tutti profile -- srun -n 2 train.py` works if the launcher passes environment variables to the
ranks. `srun -n 2 tutti profile -- train.py` works with every launcher, because every task runs
tutti profile. All tasks write traces and exit codes to one folder. The first task waits for all
exit codes and explains the traces.
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

# How long the first task waits for the exit codes of the other tasks. In cluster file systems, new
# files of other hosts appear late.
_TASK_TIMEOUT_SECONDS = 60.0
# The timeout after a failure is shorter, because the launcher may have killed the other tasks.
_FAILED_TIMEOUT_SECONDS = 5.0
# Time between SIGTERM and SIGKILL for a command that has exceeded its time limit.
_GRACE_SECONDS = 10.0


def captured_environment(settings: dict[str, Any], before: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which every Python process that trains records a trace.

    All processes that the command starts, for example torchrun's workers, inherit these variables.
    """
    path = filter(None, [str(Path(__file__).parent / "startup"), before.get("PYTHONPATH")])
    env = {**before, "PYTHONPATH": os.pathsep.join(path), "TUTTI_PROFILE": json.dumps(settings)}
    enlarge_flight_recorder(env)
    return env


def enlarge_flight_recorder(env: MutableMapping[str, str]) -> None:
    """Enlarge torch's flight recorder. capture.py reads gloo's collectives from it."""
    env.setdefault("TORCH_FR_BUFFER_SIZE", "20000")


def resolve_command(arguments: Sequence[str], tutti_commands: Sequence[str]) -> list[str]:
    """Return the full command for a script, a tutti command (`train …`) or any other program."""
    first, *rest = arguments
    if first == "tutti" or (first in tutti_commands and not Path(first).is_file()):
        return [sys.executable, "-m", "tutti", *(rest if first == "tutti" else arguments)]
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise UsageError(f"script {first!r} does not exist. Check the path.")
        return [sys.executable, *arguments]
    # Search the folder of this interpreter first, to find the torchrun of a virtual environment
    # that is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if (found := shutil.which(first, path=path)) is None:
        raise UsageError(
            f"{first!r} is not a program. For example, use tutti profile -- torchrun … train.py."
        )
    script = next((word for word in rest if word.endswith(".py")), None)
    is_local = re.fullmatch(r"torchrun|accelerate|python[\d.]*", Path(first).name) is not None
    if script is not None and is_local and not Path(script).is_file():
        before = rest[rest.index(script) - 1] if rest[0] != script else ""
        if not before.startswith("-"):  # otherwise `script` is the value of a flag
            raise UsageError(f"script {script!r} does not exist. Check the path.")
    return [found, *rest]


def run_captured(
    command: Sequence[str],
    settings: dict[str, Any],
    output: IO[str] | None = None,
    limit_s: float | None = None,
) -> int:
    """Run a command, forward SIGTERM to it, and return the exit code as a shell reports it.

    If `output` is given, the command writes to this file instead of standard output and standard
    error. After `limit_s` seconds, the command and all its child processes are ended, and the exit
    code is 124.
    """
    env = captured_environment(settings, os.environ)
    # close_fds=False keeps inherited file descriptors open, because MPICH's ranks communicate with
    # mpirun through one of them.
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
                    # The program has also received Ctrl-C. Wait until it ends, and keep its traces.
                    continue
                except subprocess.TimeoutExpired:
                    _end_with_children(process)
                    return 124
        finally:
            signal.signal(signal.SIGTERM, before)


def _end_with_children(process: "subprocess.Popen[bytes]") -> None:
    """End a command and all its child processes.

    SIGTERM lets a launcher end its ranks and remove its files. Processes that still run after
    _GRACE_SECONDS are killed.
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
    """One of the `tutti profile` processes of a launcher. All tasks have the same `job`."""

    number: int
    count: int
    launcher: str
    job: str

    @staticmethod
    def from_environment(env: Mapping[str, str]) -> "LauncherTask":
        try:
            identity = identify(env)
        except UsageError:  # variables are incomplete, but the program may not need them
            return LauncherTask(0, 1, "", "")
        has_job = identity.launcher in ("slurm", "openmpi", "mpich", "tutti")
        job = re.sub(r"[^A-Za-z0-9._-]", "-", identity.job) if has_job else ""
        return LauncherTask(identity.rank, identity.size, identity.launcher, job)

    @property
    def missing_rank_hint(self) -> str:
        """A hint about variables that only torchrun sets, for an error message."""
        starter = {"slurm": "srun", "openmpi": "mpirun", "mpich": "mpirun"}.get(self.launcher)
        if starter is None or self.count == 1:
            return ""
        return (
            f" torchrun sets RANK and MASTER_ADDR, but {starter} does not. Start torchrun with "
            f"{starter}, or call tutti.init() in the script."
        )

    def default_folder(self, now: str) -> Path:
        """Return the output folder if --out is not given.

        If there are several tasks, the folder name contains the job id instead of the time, because
        the clocks of the hosts may differ.
        """
        if self.count == 1:
            return Path("runs") / f"profile-{now}"
        if not self.job:
            raise UsageError(
                f"--out is required, because {self.launcher} started {self.count} tasks of tutti "
                f"profile, and all tasks must write to the same folder. Use --out FOLDER, or start "
                f"one task: tutti profile -- {self.launcher} …"
            )
        return Path("runs") / f"profile-{self.job}"

    def write_exit_code(self, out: Path, code: int) -> None:
        """Write the exit code of this task's program. The first task waits for this file."""
        path = self._exit_code_file(out, self.number)
        with contextlib.suppress(OSError):  # the first task reports a missing exit code
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, str(code))

    def wait_for_exit_codes(self, out: Path, failed: bool) -> tuple[dict[int, int], list[int]]:
        """Return the exit codes of the ended tasks, and the numbers of the other tasks."""
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
        with contextlib.suppress(OSError):  # a late task may have written its exit code there
            self._exit_code_file(out, 0).parent.rmdir()
        return codes, missing

    def _exit_code_file(self, out: Path, number: int) -> Path:
        return out / ".ended" / f"{self.job or self.launcher}-{number}"
