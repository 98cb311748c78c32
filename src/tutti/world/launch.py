"""Start and supervise local ranks, for `tutti run` and for `--ranks N` of other commands.

LocalWorld checks the settings and prepares each rank's environment variables. Supervisor starts the
rank processes, forwards signals to them, and stops all ranks when one rank fails. RankOutput and
Stream copy each rank's output to the terminal and to log files.
"""

import ctypes
import json
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TextIO

from tutti.machine.cpu_numa import allowed_cpus, cpu_quota, read_limits
from tutti.machine.gpus import visible_gpu_count
from tutti.machine.sysfs import SysFiles
from tutti.world.errors import START_TIMEOUT, TIMEOUT, UsageError, checked_seconds
from tutti.world.gpu_sharing import mps_daemon, shared_gpu_variables
from tutti.world.launchers import free_port, without_launcher_variables
from tutti.world.placement import refuse_more_ranks_than_gpus

# The minimum memory of one rank, which limits --ranks. An idle Python interpreter needs about
# 10 MB, and a rank that imports torch needs over 100 MB.
_BYTES_PER_RANK = 16 << 20
# File descriptors per rank: a pidfd, both ends of two pipes, and a log file.
_FILES_PER_RANK = 6
_OWN_FILES = 64  # file descriptors for everything else in this process


class Observer(Protocol):
    """Follows the ranks of a LocalWorld while they run, for example to explain a hang."""

    def begin(self, job: str) -> dict[str, str]:
        """Called before the ranks start. Returns environment variables for the ranks."""

    def tick(self) -> None:
        """Called about once a second while the ranks run."""

    def failed(self) -> None:
        """Called when the first rank has failed, before the other ranks are stopped."""

    def end(self, code: int) -> None:
        """Called when all ranks have ended and their failure was reported."""


@dataclass(frozen=True)
class LocalWorld:
    """A command to run as local ranks. The help of `tutti run` explains the fields."""

    command: Sequence[str]
    ranks: int
    device: str = "auto"
    ranks_per_gpu: int = 1
    show: Literal["all", "first", "none"] = "all"
    log_dir: Path | None = None
    start_timeout: float = START_TIMEOUT
    timeout: float = TIMEOUT
    grace: float = 5.0
    reported_codes: Sequence[int] = (2,)
    """Exit codes after which rank 0 has printed the reason, and all ranks end without a signal."""

    observer: Observer | None = None

    def check(self) -> None:
        """Raise UsageError for settings that cannot work, before any process is started."""
        if self.ranks < 1:
            raise UsageError(f"--ranks must be at least 1, got {self.ranks}")
        if self.ranks_per_gpu < 1:
            raise UsageError(f"--ranks-per-gpu must be at least 1, got {self.ranks_per_gpu}")
        for name in ("start_timeout", "timeout", "grace"):
            checked_seconds(f"--{name.replace('_', '-')}", getattr(self, name))
        limit, reason = _max_ranks()
        if self.ranks > limit:
            raise UsageError(f"--ranks must be at most {limit} here ({reason}), got {self.ranks}")
        gpus = 0 if self.device == "cpu" else visible_gpu_count()
        if gpus:
            refuse_more_ranks_than_gpus(self.ranks, gpus, self.ranks_per_gpu, os.uname().nodename)
        elif self.device == "cuda" or self.ranks_per_gpu > 1:
            flag = "--device cuda" if self.device == "cuda" else "--ranks-per-gpu"
            raise UsageError(f"{flag} needs a GPU, but no GPU is visible. Omit the flag.")

    def run(self, env: Mapping[str, str] | None = None) -> int:
        """Run until all ranks have ended. Return 0 or the exit code of the first failed rank."""
        code = self.supervise(env).exit_code()
        if self.observer is not None:
            self.observer.end(code)
        return code

    def supervise(self, env: Mapping[str, str] | None = None) -> "Supervisor":
        """Run until all ranks have ended. Return the supervisor, which has the exit codes."""
        self.check()
        shared = without_launcher_variables(os.environ if env is None else env)
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tutti-run-")))
            if self.ranks_per_gpu > 1:
                _report(
                    f"{self.ranks_per_gpu} ranks share one GPU, so results show correctness, not "
                    "the speed of links between GPUs"
                )
                shared |= stack.enter_context(mps_daemon(scratch))
            if self.observer is not None:
                shared |= self.observer.begin(scratch.name)
            output = RankOutput(self.ranks, self.show, self.log_dir)
            stack.callback(output.close)
            supervisor = Supervisor(self, self._environments(shared, scratch), output)
            supervisor.run()
            return supervisor

    def _environments(self, shared: Mapping[str, str], scratch: Path) -> list[dict[str, str]]:
        """Return each rank's environment, with torchrun's and tutti's variables."""
        cores = min(len(allowed_cpus()), cpu_quota() or sys.maxsize)
        common = {
            # Without this variable, every rank would start one thread per core of the machine.
            "OMP_NUM_THREADS": str(max(1, cores // self.ranks)),
            # Ranks write to pipes. Without this variable, Python would buffer their output, and
            # the terminal could show it minutes later.
            "PYTHONUNBUFFERED": "1",
            **shared,
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.ranks)),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TUTTI_RUN_ID": scratch.name,
            "TUTTI_RANKS_PER_GPU": str(self.ranks_per_gpu),
            "TUTTI_START_TIMEOUT": str(self.start_timeout),
            "TUTTI_TIMEOUT": str(self.timeout),
        }
        if self.device == "cpu":
            common["CUDA_VISIBLE_DEVICES"] = ""
        return [
            {
                **common,
                **(shared_gpu_variables(rank, one_machine=True) if self.ranks_per_gpu > 1 else {}),
                **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                "TUTTI_REPORT": str(scratch / f"rank{rank}.json"),
            }
            for rank in range(self.ranks)
        ]


def _max_ranks() -> tuple[int, str]:
    """Return the largest number of ranks that this machine can run, and the limit behind it."""
    limits = read_limits(SysFiles())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if isinstance(limits.cgroup_memory_bytes, int):
        memory = min(memory, limits.cgroup_memory_bytes)
    bounds = [(memory // _BYTES_PER_RANK, f"{memory / 1e9:.0f} GB of memory, 16 MB per process")]
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY:
        bounds.append(((files - _OWN_FILES) // _FILES_PER_RANK, f"{files} open files, ulimit -Hn"))
    if isinstance(limits.processes, int):
        bounds.append((limits.processes, f"{limits.processes} processes, ulimit -u"))
    return min(bounds)


def _report(text: str) -> None:
    print(f"tutti run: {text}", file=sys.stderr, flush=True)


# -- supervision -----------------------------------------------------------------------------------

# Time between the first failure of a rank and SIGTERM to the other ranks. In this time, the other
# ranks can write their failure reports and end.
_SETTLE_SECONDS = 0.5
# Time before SIGTERM if the first rank ended with an exit code in `reported_codes`. This time is
# longer, because all other ranks are expected to end without a signal.
_REPORTED_SECONDS = 5.0
# Time between SIGTERM and SIGKILL after a failure.
_FAILED_GRACE_SECONDS = 5.0
# Time to read the output pipes after all ranks have ended. Child processes of the ranks may keep
# the pipes open for longer.
_DRAIN_SECONDS = 0.5
_TICK_SECONDS = 1.0  # between two calls of the observer
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class _Rank:
    """A process that runs one rank and leads its own process group."""

    def __init__(self, command: Sequence[str], env: dict[str, str], output: "RankOutput") -> None:
        self.number = int(env["RANK"])
        self.report = Path(env["TUTTI_REPORT"])
        out, err = output.targets(self.number)
        self.process = subprocess.Popen(
            list(command),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            process_group=0,
            preexec_fn=_die_with_parent,
        )
        self.pidfd = os.pidfd_open(self.process.pid)
        self.code: int | None = None
        self.stopped_by_us = False
        self.peak_bytes = 0

    def reap(self) -> None:
        _, status, usage = os.wait4(self.process.pid, 0)
        self.code = self.process.returncode = os.waitstatus_to_exitcode(status)
        self.peak_bytes = usage.ru_maxrss * 1024

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # already ended
            if number in _ENDING or number == signal.SIGKILL:
                # The process group includes the rank's child processes: DataLoader workers, shells.
                os.killpg(self.process.pid, number)
            elif self.code is None:
                self.process.send_signal(number)

    def how_it_ended(self) -> str:
        if self.code is None or self.stopped_by_us:
            return "failed"
        if self.code >= 0:
            return f"{'failed' if self.code else 'ended'} with exit code {self.code}"
        name = f"signal {-self.code}"
        with suppress(ValueError):  # a signal without a name
            name = signal.Signals(-self.code).name
        hint = "; the kernel's out-of-memory killer sends SIGKILL, see dmesg" * (name == "SIGKILL")
        return f"was killed by {name} (peak memory {self.peak_bytes / 1e9:.1f} GB{hint})"


def _die_with_parent() -> None:
    """Make the kernel kill this child process when the launcher dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Supervisor:
    """Starts one command as several ranks and supervises the ranks until all have ended.

    One selector loop in one thread handles the output of the ranks, the end of each rank (through a
    pidfd) and signals, so the supervisor reacts at once when a rank ends.
    """

    def __init__(
        self, world: LocalWorld, environments: Sequence[dict[str, str]], output: "RankOutput"
    ) -> None:
        self._world, self._environments, self._output = world, environments, output
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._first_to_fail: _Rank | None = None
        self._ended_before: list[int] = []  # ranks with exit code 0 before the first failure
        self._reports: dict[int, dict[str, Any]] = {}  # the failure report of each rank with one
        self.stopped_by: signal.Signals | None = None
        # Signals to send to all ranks at a later time: (value of time.monotonic(), signal).
        self._scheduled: list[tuple[float, int]] = []
        self._next_tick = float("inf") if world.observer is None else 0.0

    def run(self) -> None:
        """Run until all ranks have ended."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = _OWN_FILES + _FILES_PER_RANK * len(self._environments)
        if soft < needed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(wake_read, selectors.EVENT_READ)
        # Signals that were ignored when this process started (nohup, background job) stay ignored.
        handled = [n for n in _FORWARDED if signal.getsignal(n) is not signal.SIG_IGN]
        # `_serve` reads the signals from the wake-up pipe. The handler does nothing, but it
        # replaces the signal's default action, which would end this process.
        before = {number: signal.signal(number, lambda *_: None) for number in handled}
        # A program that calls tutti.spawn may have set its own wake-up pipe, as asyncio and Jupyter
        # do. This pipe is restored below.
        wakeup_before = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            for env in self._environments:
                rank = _Rank(self._world.command, env, self._output)
                self._ranks.append(rank)
                self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)
            for stream in self._output.streams:
                os.close(stream.child)  # the rank has inherited this end of the pipe
                self._selector.register(stream.fd, selectors.EVENT_READ, stream)
            self._serve()
        finally:
            for rank in self._ranks:
                rank.signal(signal.SIGKILL)  # the child processes of ended ranks, too
                if rank.code is None:
                    rank.reap()
                os.close(rank.pidfd)
            signal.set_wakeup_fd(wakeup_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            os.close(wake_read)
            os.close(wake_write)
        self._reports = {
            rank.number: json.loads(rank.report.read_text())
            for rank in self._ranks
            if rank.report.exists()
        }

    def _serve(self) -> None:
        drain_until = float("inf")
        while any(rank.code is None for rank in self._ranks) or self._output.streams:
            now = time.monotonic()
            if drain_until == float("inf") and all(rank.code is not None for rank in self._ranks):
                drain_until = now + _DRAIN_SECONDS
            if now > drain_until:
                return  # child processes of ended ranks still keep the pipes open
            if self._world.observer is not None and now >= self._next_tick:
                self._next_tick = now + _TICK_SECONDS
                self._world.observer.tick()
            wake = min([drain_until, self._next_tick, *(when for when, _ in self._scheduled[:1])])
            timeout = None if wake == float("inf") else max(0.0, wake - now)
            for key, _ in self._selector.select(timeout):
                if isinstance(key.data, _Rank):
                    self._on_end(key.data)
                elif isinstance(key.data, Stream):
                    if not key.data.read():
                        self._selector.unregister(key.fd)
                        self._output.streams.remove(key.data)
                        key.data.close()
                else:
                    for number in os.read(key.fd, 64):
                        self._on_signal(signal.Signals(number))
            while self._scheduled and time.monotonic() > self._scheduled[0][0]:
                self._send(self._scheduled.pop(0)[1])

    def _on_end(self, rank: _Rank) -> None:
        self._selector.unregister(rank.pidfd)
        rank.reap()
        if rank.code == 0 and self._first_to_fail is None:
            self._ended_before.append(rank.number)
        if rank.code != 0 and self._first_to_fail is None and self.stopped_by is None:
            self._first_to_fail = rank
            if self._world.observer is not None:
                self._world.observer.failed()
            reported = rank.code in self._world.reported_codes
            settle = _REPORTED_SECONDS if reported else _SETTLE_SECONDS
            self._stop_all(signal.SIGTERM, after=settle, grace=_FAILED_GRACE_SECONDS)

    def _on_signal(self, number: signal.Signals) -> None:
        if number not in _ENDING:
            self._send(number)
        elif self.stopped_by is None:
            self.stopped_by = number
            for stream in self._output.errors.values():
                # After Ctrl-C, do not print the KeyboardInterrupt tracebacks of the ranks.
                stream.hide_interrupts = number == signal.SIGINT
            self._stop_all(number, after=0.0, grace=self._world.grace)
        else:
            self._send(signal.SIGKILL)  # a second signal ends the ranks at once

    def _stop_all(self, number: int, after: float, grace: float) -> None:
        now = time.monotonic()
        self._scheduled = [(now + after, number), (now + after + grace, signal.SIGKILL)]

    def _send(self, number: int) -> None:
        for rank in self._ranks:
            if rank.code is None:
                rank.stopped_by_us = number in _ENDING or number == signal.SIGKILL
                rank.signal(number)

    def exit_code(self) -> int:
        """Print how the first failed rank failed, and return its exit code, or 0 for success."""
        count = len(self._ranks)
        codes = {rank.code for rank in self._ranks}
        if self.stopped_by is not None:
            _report(f"stopped by {self.stopped_by.name}: all {count} ranks have ended")
            common = codes.pop() if len(codes) == 1 else None
            # If no rank was killed by a signal and all exit codes are equal, return this exit code.
            return common if common is not None and common >= 0 else 128 + self.stopped_by
        if self._first_to_fail is None:
            return 0
        code = self._ranks[0].code
        failed, summary, details = self._find_failed(self._first_to_fail)
        is_shown = self._output.shows(failed.number)
        if code is not None and code in self._world.reported_codes and codes <= {0, code}:
            # The ranks have printed the reason: a usage error or a failed check. If the output of
            # the failed rank is hidden, its message is printed here.
            if summary and not is_shown:
                _report(f"rank {failed.number} on {os.uname().nodename} failed: {summary}")
                print(details, end="", file=sys.stderr, flush=True)
            elif not summary:
                self._print_hidden_traceback()
            return code
        text, details = self.failure() or ("", "")
        stopped = count - 1 - len(self._ended_before)
        were = "was" if stopped == 1 else "were"
        others = f"; the other {stopped} {were} stopped because of it" if stopped else ""
        _report(text + others)
        if not is_shown:
            print(details, end="", file=sys.stderr, flush=True)
        if failed.code is None or failed.code == 0 or failed.stopped_by_us:
            # The supervisor stopped this rank before it had ended. The rank's failure report may
            # have the exit code that the rank was about to return.
            return self._reports.get(failed.number, {}).get("code") or 1
        return failed.code if failed.code > 0 else 128 - failed.code

    def failure(self) -> tuple[str, str] | None:
        """Return (text, details) about the rank that failed first, or None if no rank failed.

        `text` says which rank failed and how. `details` is the traceback of this rank, or its last
        lines of standard error.
        """
        if self._first_to_fail is None:
            return None
        failed, summary, details = self._find_failed(self._first_to_fail)
        if not details and failed.number in self._output.errors:
            last_lines = b"".join(self._output.errors[failed.number].tail)
            details = last_lines.decode(errors="replace")
        name = f"rank {failed.number} on {os.uname().nodename}"
        text = f"{name} {failed.how_it_ended()}{f': {summary}' if summary else ''}"
        # If a rank ends early, other ranks lose their connection to it and fail. So name the ranks
        # that ended before the failure.
        if early := [number for number in self._ended_before if number != failed.number]:
            shown = ", ".join(map(str, early[:8])) + " …" * (len(early) > 8)
            text += f" (rank{'s' * (len(early) > 1)} {shown} had ended before, with exit code 0)"
        return text, details

    def usage_error(self) -> str | None:
        """Return the message of the UsageError that ended the ranks, or None if none did."""
        if self._first_to_fail is None or self._first_to_fail.code != 2:
            return None
        return self._find_failed(self._first_to_fail)[1] or None

    def _print_hidden_traceback(self) -> None:
        """Print the traceback of the first rank that printed one, if its output is hidden.

        This is needed for a rank that failed outside of a world, because it wrote no report.
        """
        for rank, stream in sorted(self._output.errors.items()):
            if stream.has_traceback and not self._output.shows(rank):
                _report(f"rank {rank} failed:")
                text = b"".join(stream.tail).decode(errors="replace")
                print(text, end="", file=sys.stderr, flush=True)
                return

    def _find_failed(self, first: _Rank) -> tuple[_Rank, str, str]:
        """Return the rank that failed first, with the summary and details of its failure.

        `first` is the rank whose process ended first with an error. Another rank may have failed
        earlier: while its interpreter shuts down, `first` may lose the connection to it and end.
        The failure report of `first` then names the other rank. A rank that was killed by a signal
        writes no report.
        """
        if first.code is not None and first.code < 0:
            return first, "", ""  # killed by a signal that the supervisor did not send
        if not self._reports:
            return first, "", ""
        report = self._reports.get(first.number) or next(iter(self._reports.values()))
        failed = report["rank"]
        # Only the failed rank's own report has the traceback in "details".
        return self._ranks[failed], report["summary"], self._reports.get(failed, report)["details"]


# -- output ----------------------------------------------------------------------------------------

_TAIL_LINES = 40
_LONGEST_LINE = 1 << 20
_TRACEBACK_STARTS = (b"Traceback (most", b"Exception ignored in", b"Fatal Python error")


class RankOutput:
    """Forwards the output of all ranks to log files and to the terminal, with a prefix per rank."""

    def __init__(self, ranks: int, show: str, log_dir: Path | None) -> None:
        self._show, self._ranks = show, ranks
        # A notebook or a test replaces sys.stdout and sys.stderr by objects that are not files.
        # Ranks cannot inherit such objects.
        self._inherits = sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
        self._logs: list[IO[bytes]] = []
        self.streams: list[Stream] = []  # streams that have not ended yet
        self.errors: dict[int, Stream] = {}  # the standard error of each rank
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
                for rank in range(ranks):
                    self._logs.append((log_dir / f"rank{rank}.log").open("wb", buffering=0))
            except OSError as error:
                raise UsageError(
                    f"--log-dir {log_dir} cannot be used ({error.strerror}). Use another directory."
                ) from None

    def shows(self, rank: int) -> bool:
        """Return whether the output of this rank goes to the terminal."""
        return self._show == "all" or (self._show == "first" and rank == 0)

    def targets(self, rank: int) -> tuple[int | None, int | None]:
        """Return file descriptors for a rank's standard output and standard error.

        Return (None, None) if the rank inherits both from this process.
        """
        log = self._logs[rank] if self._logs else None
        shown = self.shows(rank)
        only_one = self._show == "first" or self._ranks == 1
        if log is None and shown and only_one and self._inherits:
            return None, None  # the rank writes to the terminal: progress bars and colours work
        prefix = f"[rank {rank}] " if self._show == "all" and self._ranks > 1 else ""
        out = Stream(prefix, sys.stdout if shown else None, log)
        err = Stream(prefix, sys.stderr if shown else None, log)
        self.streams += [out, err]
        self.errors[rank] = err
        return out.child, err.child

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        for log in self._logs:
            log.close()


class Stream:
    """A pipe from a rank. It forwards whole lines, so that lines of two ranks do not mix."""

    def __init__(self, prefix: str, shown_on: TextIO | None, log: IO[bytes] | None) -> None:
        self.fd, self.child = os.pipe2(os.O_CLOEXEC)
        self.tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self.hide_interrupts = False
        self.has_traceback = False
        self._prefix, self._shown_on, self._log = prefix.encode(), shown_on, log
        self._rest = b""
        self._held: list[bytes] = []  # a traceback after Ctrl-C; `close` may print it

    def read(self) -> bool:
        """Read and forward the output that has arrived. Return False at the end of the stream."""
        data = os.read(self.fd, 1 << 16)
        # Progress bars end their lines with \r instead of \n.
        *lines, self._rest = re.split(rb"(?<=[\n\r])", self._rest + data)
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
            lines, self._rest = [*lines, self._rest + b"\n"], b""
        for line in lines:
            self._forward(line)
        return bool(data)

    def _forward(self, line: bytes) -> None:
        self.tail.append(line)
        self.has_traceback |= line.startswith(_TRACEBACK_STARTS)
        try:
            if self._log is not None:
                self._log.write(line)
        except OSError as error:
            _report(f"a log file in --log-dir cannot be written ({error.strerror})")
            self._log = None
        if self.hide_interrupts and (self._held or line.startswith(_TRACEBACK_STARTS)):
            self._held.append(line)
        else:
            self._print(line)

    def _print(self, line: bytes) -> None:
        if self._shown_on is None:
            return
        try:
            # Write bytes, because the terminal's encoding may lack characters that a rank prints.
            if hasattr(self._shown_on, "buffer"):
                self._shown_on.buffer.write(self._prefix + line)
            else:  # the standard output of a notebook accepts text only
                self._shown_on.write((self._prefix + line).decode(errors="replace"))
            self._shown_on.flush()
        except OSError:  # a closed pipe (`| head`) or a full disk does not stop the run
            self._shown_on = None

    def close(self) -> None:
        """Close the pipe, and print the held traceback unless it is a KeyboardInterrupt."""
        os.close(self.fd)
        if not any(b"KeyboardInterrupt" in line for line in self._held):
            for line in self._held:
                self._print(line)
