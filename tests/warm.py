"""Processes forked from a process that has imported torch: they start in 20 ms instead of 2 s.

The tests keep one warm process, which has only imported modules and has no other thread, so a fork
behaves like a new interpreter. Each fork gets its own session, environment, directory, files,
signal handlers and random seeds.

Two things differ from new interpreters: all forks share the seed of str hashes, and they end
without finalising the interpreter. Tests of how processes start, stop and die use new interpreters.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

# Modules that ranks use. Creating an optimizer imports torch._dynamo, which takes a second.
_IMPORTS = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("torch.distributed.checkpoint", "hypothesis", "pytest", "runpy"),
    *(
        "tutti.bench.collectives.interleaved_sweep",
        "tutti.parallel.apply",
        "tutti.train.loop",
        "tutti.world.launch",
    ),
)


class Warm:
    """The warm process."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._line, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__, str(theirs.fileno())],
            env={**env, "OPENBLAS_NUM_THREADS": "1"},  # otherwise importing numpy starts a thread
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._answers = self._line.makefile()
        self.pid = self._process.pid
        atexit.register(self.end)

    def run(
        self, command: Sequence[str], timeout: float, env: Mapping[str, str], cwd: Path
    ) -> subprocess.CompletedProcess[str]:
        """Run `SCRIPT ARGUMENTS…` in a fork. Kill its process group at the timeout."""
        with tempfile.TemporaryDirectory(prefix="tutti-test-") as folder:
            stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
            words = [*command], dict(env), str(cwd), str(stdout), str(stderr)
            self._line.sendall(json.dumps(words).encode() + b"\n")
            child = int(self._answers.readline())
            # A socket's file object is unusable after a timeout, so a timer kills the process.
            timer = threading.Timer(timeout, os.killpg, (child, signal.SIGKILL))
            timer.start()
            code = int(self._answers.readline())
            in_time = timer.is_alive()
            timer.cancel()
            out, err = stdout.read_text(), stderr.read_text()
        if not in_time:
            raise AssertionError(f"{' '.join(command)}\nran past {timeout} s\n{out}\n{err}")
        return subprocess.CompletedProcess(command, code, out, err)

    def end(self) -> None:
        """End the warm process."""
        self._answers.close()
        self._line.close()
        self._process.wait()


class ForkedRank:
    """Replaces subprocess.Popen in the launcher: runs a Python command in a fork."""

    returncode: int | None = None

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        stdin: int,
        stdout: int | None,
        stderr: int | None,
        process_group: int,
        preexec_fn: Callable[[], None],
    ) -> None:
        assert command[0] == sys.executable and stdin == subprocess.DEVNULL and process_group == 0
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            preexec_fn()
            _become(command[1:], env, stdout, stderr)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(self.pid, self.pid)  # called by parent and child: either may run first

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _serve(line: socket.socket) -> None:
    """In the warm process: fork for every request. Reply with the pid and the exit status."""
    for request in line.makefile():
        command, env, folder, stdout, stderr = json.loads(request)
        child = os.fork()
        if child == 0:
            line.detach()
            os.setsid()
            os.chdir(folder)
            files = [os.open(name, os.O_WRONLY | os.O_CREAT) for name in (stdout, stderr)]
            replaced = SimpleNamespace(Popen=ForkedRank, DEVNULL=subprocess.DEVNULL)
            import_module("tutti.world.launch").subprocess = replaced  # type: ignore[attr-defined]
            _become(command, env, *files)
        line.sendall(b"%d\n" % child)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        line.sendall(b"%d\n" % code)


def _become(
    command: Sequence[str], env: Mapping[str, str], stdout: int | None, stderr: int | None
) -> NoReturn:
    """In a fork: set up the process as a new interpreter, run the script, and exit."""
    status = 1
    try:
        for fd, target in enumerate((os.open(os.devnull, os.O_RDONLY), stdout, stderr)):
            if target is not None:
                os.dup2(target, fd)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the launcher's temporary folders
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None
        import numpy
        import torch

        torch.seed()  # new processes have different seeds
        numpy.random.seed()
        if "OMP_NUM_THREADS" in env:  # torch has used the value of the warm process
            torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
        status = _run(command)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(command: Sequence[str]) -> int:
    """Run `SCRIPT …` or `-m MODULE …` as Python would and return the exit code."""
    try:
        try:
            if command[0] == "-m":
                sys.argv, sys.path[0] = list(command[1:]), os.getcwd()
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv, sys.path[0] = list(command), str(Path(command[0]).parent)
                runpy.run_path(command[0], run_name="__main__")
        except SystemExit:
            raise
        except BaseException:
            sys.excepthook(*sys.exc_info())  # the hook may end the process with its own exit code
            return 1
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    for name in _IMPORTS:
        import_module(name)
    gc.freeze()  # garbage collection in the forks would copy the pages of all imported objects
    _serve(socket.socket(fileno=int(sys.argv[1])))
