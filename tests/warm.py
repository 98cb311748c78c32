"""Processes that need not import torch: forked from one that has, in 20 ms instead of 2 s each.

The tests keep one warm process, which has done nothing but imports and has no other thread, so a
fork of it is a fresh interpreter but for the wait. What a fork is given is what a new process would
be: its own session, environment, directory, files, signal handlers and random seeds.

Two things differ from new interpreters: ranks share one seed of str's hash, and they leave without
taking the interpreter down. Tests of how processes start, stop and die start new ones.
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

# What worlds use; making an optimizer imports torch._dynamo, a second's worth.
_IMPORTS = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("torch.distributed.checkpoint", "hypothesis", "pytest", "runpy"),
    *(
        "tutti.bench.collectives.interleaved_sweep",
        "tutti.parallel.build",
        "tutti.train.trainer",
        "tutti.world.launch",
    ),
)


class Warm:
    """The warm process, as the tests see it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._line, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__, str(theirs.fileno())],
            env={**env, "OPENBLAS_NUM_THREADS": "1"},  # else importing numpy starts a thread
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
        """Run `SCRIPT ARGUMENTS…` in a fork, to its end, or kill it all at the timeout."""
        with tempfile.TemporaryDirectory(prefix="tutti-test-") as folder:
            said, complained = Path(folder, "stdout"), Path(folder, "stderr")
            words = [*command], dict(env), str(cwd), str(said), str(complained)
            self._line.sendall(json.dumps(words).encode() + b"\n")
            child = int(self._answers.readline())
            # A file of a socket with a timeout is of no use after one: a timer kills instead.
            timer = threading.Timer(timeout, os.killpg, (child, signal.SIGKILL))
            timer.start()
            code = int(self._answers.readline())
            in_time = timer.is_alive()
            timer.cancel()
            out, err = said.read_text(), complained.read_text()
        if not in_time:
            raise AssertionError(f"{' '.join(command)}\nran past {timeout} s\n{out}\n{err}")
        return subprocess.CompletedProcess(command, code, out, err)

    def end(self) -> None:
        """Let the warm process go."""
        self._answers.close()
        self._line.close()
        self._process.wait()


class ForkedRank:
    """What subprocess.Popen is to the launcher, as a fork of the launcher: for Python only."""

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
            os.setpgid(self.pid, self.pid)  # whoever is first: it may be signalled from here on

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _serve(line: socket.socket) -> None:
    """In the warm process: fork for every request, and answer with the child and how it ended."""
    for request in line.makefile():
        command, env, folder, said, complained = json.loads(request)
        child = os.fork()
        if child == 0:
            line.detach()
            os.setsid()
            os.chdir(folder)
            files = [os.open(name, os.O_WRONLY | os.O_CREAT) for name in (said, complained)]
            starts = SimpleNamespace(Popen=ForkedRank, DEVNULL=subprocess.DEVNULL)
            import_module("tutti.world.launch").subprocess = starts  # type: ignore[attr-defined]
            _become(command, env, *files)
        line.sendall(b"%d\n" % child)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        line.sendall(b"%d\n" % code)


def _become(
    command: Sequence[str], env: Mapping[str, str], stdout: int | None, stderr: int | None
) -> NoReturn:
    """In a fork: be what a new interpreter would be, run the script, and end as one would."""
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
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the launcher's folders
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None
        import numpy
        import torch

        torch.seed()  # new processes throw different dice, and so do forks
        numpy.random.seed()
        if "OMP_NUM_THREADS" in env:  # read when torch was loaded, by the warm process
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
    """Run `SCRIPT …` or `-m MODULE …` as Python would; returns the exit code."""
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
            sys.excepthook(*sys.exc_info())  # which may choose the exit code, too
            return 1
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    for name in _IMPORTS:
        import_module(name)
    gc.freeze()  # collections in the forks would touch, and so copy, all that was imported
    _serve(socket.socket(fileno=int(sys.argv[1])))
