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
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, NoReturn

# Modules that ranks use. Creating an optimizer imports torch._dynamo, which takes a second, and
# building a Hugging Face model imports transformers.modeling_utils, which takes two.
_IMPORTS = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("torch.distributed.checkpoint", "hypothesis", "pytest", "runpy"),
    *("transformers.modeling_utils", "peft"),
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
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__, str(theirs.fileno())],
            env={**env, "OPENBLAS_NUM_THREADS": "1"},  # otherwise importing numpy starts a thread
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.pid = self._process.pid
        atexit.register(self.end)

    def start(
        self, command: Sequence[str], env: Mapping[str, str], cwd: Path, stdout: int, stderr: int
    ) -> "WarmProcess":
        """Start `SCRIPT ARGUMENTS…` in a fork that leads its own session."""
        status, theirs = os.pipe()
        words = json.dumps([[*command], dict(env), str(cwd)]).encode()
        socket.send_fds(self._line, [words], [stdout, stderr, theirs])
        os.close(theirs)
        return WarmProcess(command, status)

    def run(
        self, command: Sequence[str], timeout: float, env: Mapping[str, str], cwd: Path
    ) -> subprocess.CompletedProcess[str]:
        """Run `SCRIPT ARGUMENTS…` in a fork. Kill its process group at the timeout."""
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            process = self.start(command, env, cwd, stdout.fileno(), stderr.fileno())
            in_time = process.ends_within(timeout)
            if not in_time:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            for file in (stdout, stderr):
                file.seek(0)
            out, err = stdout.read(), stderr.read()
        if not in_time:
            raise AssertionError(f"{' '.join(command)}\nran past {timeout} s\n{out}\n{err}")
        return subprocess.CompletedProcess(command, code, out, err)

    def end(self) -> None:
        """End the warm process."""
        self._line.close()
        self._process.wait()


class WarmProcess:
    """A process that `Warm.start` started, with the methods of subprocess.Popen."""

    returncode: int | None = None

    def __init__(self, command: Sequence[str], status: int) -> None:
        self.args = command
        self._status = os.fdopen(status, "rb", buffering=0)
        self.pid = int.from_bytes(self._status.read(4), "little", signed=True)
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None

    def ends_within(self, timeout: float | None) -> bool:
        return bool(select.select([self._status], [], [], timeout)[0])

    def poll(self) -> int | None:
        return self.wait() if self.returncode is not None or self.ends_within(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self.ends_within(timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int.from_bytes(self._status.read(4), "little", signed=True)
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read the rest of both pipes, and wait for the process."""
        assert self.stdout and self.stderr
        with ThreadPoolExecutor(2) as pool:
            parts = [pool.submit(pipe.read) for pipe in (self.stdout, self.stderr)]
            in_time = not wait(parts, timeout).not_done
            if not in_time:
                os.killpg(self.pid, signal.SIGKILL)
        if not in_time:
            raise subprocess.TimeoutExpired(self.args, timeout or 0, *(p.result() for p in parts))
        self.wait()
        return parts[0].result(), parts[1].result()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "WarmProcess":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdout, self.stderr):
            if pipe:
                pipe.close()
        self.wait()


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
    """In the warm process: fork for every request."""
    while True:
        request, files, _, _ = socket.recv_fds(line, 1 << 20, 3)
        if not request:
            return
        if os.fork() == 0:
            line.close()
            _keep(*json.loads(request), *files)
        for file in files:
            os.close(file)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _keep(
    command: Sequence[str],
    env: Mapping[str, str],
    folder: str,
    stdout: int,
    stderr: int,
    status: int,
) -> NoReturn:
    """In a fork: start the process, write its pid, wait for its end, write its exit status."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(folder)
        replaced = SimpleNamespace(Popen=ForkedRank, DEVNULL=subprocess.DEVNULL)
        import_module("tutti.world.launch").subprocess = replaced  # type: ignore[attr-defined]
        _become(command, env, stdout, stderr)
    os.closerange(0, status)
    os.closerange(status + 1, os.sysconf("SC_OPEN_MAX"))
    with contextlib.suppress(BrokenPipeError):
        os.write(status, child.to_bytes(4, "little", signed=True))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(status, code.to_bytes(4, "little", signed=True))
    os._exit(0)


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
        import_module("tutti.observe.recorder").autoload()  # as `import torch` would do
        status = _run(command)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(status)


def _run(command: Sequence[str]) -> int:
    """Run `SCRIPT …` or `-m MODULE …` as Python would. Return the exit code or minus a signal."""
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
        except BaseException as error:
            sys.last_value = error  # as Python does
            sys.excepthook(*sys.exc_info())  # the hook may end the process with its own exit code
            return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
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
