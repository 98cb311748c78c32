"""A world of local ranks: what to start on this host, checked and prepared."""

import ctypes
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Literal, TextIO

from tutti.machine.cpu_numa import allowed_cpus, cpu_quota
from tutti.machine.gpus import visible_gpu_count
from tutti.world.addresses import free_port
from tutti.world.errors import START_TIMEOUT, TIMEOUT, UsageError, checked_seconds
from tutti.world.gpu_sharing import MpsDaemon, shared_gpu_variables
from tutti.world.launchers import without_launcher_variables
from tutti.world.placement import refuse_more_ranks_than_gpus

_TAIL_LINES = 40
_LONGEST_LINE = 1 << 20


class Stream:
    """One pipe from a rank: passes whole lines on, so that ranks do not cut each other's."""

    def __init__(self, prefix: str, shown_on: TextIO | None, log: IO[bytes] | None) -> None:
        self.fd, self.child = os.pipe2(os.O_CLOEXEC)
        self.tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._prefix = prefix.encode()
        self._shown_on = shown_on
        self._log = log
        self._rest = b""

    def read(self) -> bool:
        """Read what there is and pass it on; False at the end of the stream."""
        data = os.read(self.fd, 1 << 16)
        # A progress bar ends its lines with \r: each is passed on as it comes.
        *lines, self._rest = re.split(rb"(?<=[\n\r])", self._rest + data)
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
            lines, self._rest = [*lines, self._rest + b"\n"], b""
        for line in lines:
            self._pass_on(line)
        return bool(data)

    def _pass_on(self, line: bytes) -> None:
        self.tail.append(line)
        try:
            if self._log is not None:
                self._log.write(line)
                self._log.flush()
        except OSError as error:
            print(f"tutti run: a log file fails: {error.strerror}", file=sys.stderr)
            self._log = None
        if self._shown_on is None:
            return
        try:
            # As bytes: a rank may print what our own terminal's encoding cannot.
            self._shown_on.buffer.write(self._prefix + line)
            self._shown_on.flush()
        except (
            OSError
        ):  # the reader (`| head`) has seen enough, or the disk is full: the run goes on
            self._shown_on = None

    def close(self) -> None:
        """Let go of the pipe."""
        os.close(self.fd)


class RankOutput:
    """Where the output of all ranks goes."""

    def __init__(self, ranks: int, show: str, log_dir: Path | None) -> None:
        self._show = show
        self._ranks = ranks
        self._logs: list[IO[bytes]] = []
        self._open: list[Stream] = []
        self._errors: dict[int, Stream] = {}
        self._log_dir = log_dir
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
                for rank in range(ranks):
                    self._logs.append((log_dir / f"rank{rank}.log").open("wb"))
            except OSError as error:
                raise UsageError(f"--log-dir {log_dir}: {error.strerror}: choose another") from None

    def shows(self, rank: int) -> bool:
        """Whether what this rank prints goes to the terminal."""
        return self._show == "all" or (self._show == "first" and rank == 0)

    def targets(self, rank: int) -> tuple[int | None, int | None]:
        """What to give a rank as standard output and error; None lets it have ours directly."""
        log = self._logs[rank] if self._logs else None
        if log is None and self.shows(rank) and (self._show == "first" or self._ranks == 1):
            return None, None  # a terminal stays a terminal, for progress bars and colours
        prefix = f"[rank {rank}] " if self._show == "all" and self._ranks > 1 else ""
        shown = self.shows(rank)
        out = Stream(prefix, sys.stdout if shown else None, log)
        err = Stream(prefix, sys.stderr if shown else None, log)
        self._open += [out, err]
        self._errors[rank] = err
        return out.child, err.child

    def streams(self) -> list[Stream]:
        """The streams that have not ended yet."""
        return self._open

    def started(self) -> None:
        """Every rank has its own copy of the writing ends: let go of ours."""
        for stream in self._open:
            os.close(stream.child)

    def end(self, stream: Stream) -> None:
        """A stream has come to its end."""
        self._open.remove(stream)
        stream.close()

    def tail(self, rank: int) -> str:
        """The last lines a rank wrote to standard error."""
        lines = self._errors[rank].tail if rank in self._errors else ()
        return b"".join(lines).decode(errors="replace")

    def __enter__(self) -> "RankOutput":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for stream in self._open:
            stream.close()
        for log in self._logs:
            log.close()


# How long the others may report their own end after the first failure, before they are stopped.
_SETTLE_SECONDS = 0.5
# And how long when one of them has ended with an answer: the others are about to as well.
_ANSWER_SECONDS = 5.0
_FAILED_GRACE_SECONDS = 5.0
# How long the helpers of ranks that have ended may hold our pipes open.
_DRAIN_SECONDS = 0.5
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class _Rank:
    """One started rank: a process, the leader of its own process group."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], output: RankOutput) -> None:
        self.number = int(env["RANK"])
        self.report = Path(env["TUTTI_REPORT"])
        out, err = output.targets(self.number)
        self.process = subprocess.Popen(
            list(command),
            env=dict(env),
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
        try:
            if number in _ENDING or number == signal.SIGKILL:
                os.killpg(self.process.pid, number)  # with its helpers: data workers, shells
            elif self.code is None:
                self.process.send_signal(number)
        except ProcessLookupError:
            pass  # already gone

    def how_it_ended(self) -> str:
        if self.code is None or self.stopped_by_us:
            return "failed"
        if self.code >= 0:
            return f"{'failed' if self.code else 'ended'} with exit code {self.code}"
        numbers = {each.value for each in signal.Signals}
        name = signal.Signals(-self.code).name if -self.code in numbers else f"signal {-self.code}"
        hint = "; the kernel's out-of-memory killer does this, see dmesg" * (name == "SIGKILL")
        return f"was killed by {name} (peak memory {self.peak_bytes / 1e9:.1f} GB{hint})"


class Conductor:
    """Runs one command as several ranks, from their start to the end of the last."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        output: RankOutput,
        grace: float,
        answers: Sequence[int] = (2,),
    ) -> None:
        self._command = command
        # Exit codes that are no failure of a rank but what it has to say: rank 0 says it for all.
        self._answers = answers
        # How long ranks may take to end after SIGTERM or Ctrl-C, before SIGKILL.
        self._grace = grace
        self._environments = environments
        self._output = output
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._first_to_fail: _Rank | None = None
        self._stopped_by: signal.Signals | None = None
        self._to_come: list[tuple[float, int]] = []  # (when, signal) still to be sent to all

    def run(self) -> int:
        """Run to the end; returns 0, or the exit code of the first failure."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(wake_read, selectors.EVENT_READ)
        # What we were started to ignore (nohup, a shell's background job) stays ignored.
        ours = [n for n in _FORWARDED if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, _note_only) for number in ours}
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            for env in self._environments:
                rank = _Rank(self._command, env, self._output)
                self._ranks.append(rank)
                self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)
            self._output.started()
            for stream in self._output.streams():
                self._selector.register(stream.fd, selectors.EVENT_READ, stream)
            self._serve()
        finally:
            for rank in self._ranks:
                rank.signal(signal.SIGKILL)  # and whatever it left running
                if rank.code is None:
                    rank.reap()
                os.close(rank.pidfd)
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            os.close(wake_read)
            os.close(wake_write)
        return self._verdict()

    def _serve(self) -> None:
        drained_by: float | None = None
        while any(rank.code is None for rank in self._ranks) or self._output.streams():
            if drained_by is None and all(rank.code is not None for rank in self._ranks):
                drained_by = time.monotonic() + _DRAIN_SECONDS
            if drained_by is not None and time.monotonic() > drained_by:
                return  # helpers of ranks that have ended hold the pipes open, and say nothing
            for key, _ in self._selector.select(timeout=self._patience(drained_by)):
                if isinstance(key.data, _Rank):
                    self._on_end(key.data)
                elif isinstance(key.data, Stream):
                    if not key.data.read():
                        self._selector.unregister(key.fd)
                        self._output.end(key.data)
                else:
                    for number in os.read(key.fd, 64):
                        self._on_signal(signal.Signals(number))
            while self._to_come and time.monotonic() > self._to_come[0][0]:
                self._send(self._to_come.pop(0)[1])

    def _patience(self, drained_by: float | None) -> float | None:
        times = [when for when, _ in self._to_come[:1]] + [when for when in (drained_by,) if when]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _on_end(self, rank: _Rank) -> None:
        self._selector.unregister(rank.pidfd)
        rank.reap()
        if self._first_to_fail is not None or self._stopped_by is not None:
            return
        if rank.code != 0:
            self._first_to_fail = rank
            # They cannot go on without it: nothing is worth waiting for.
            settle = _ANSWER_SECONDS if rank.code in self._answers else _SETTLE_SECONDS
            self._stop_all(signal.SIGTERM, after=settle, grace=_FAILED_GRACE_SECONDS)

    def _on_signal(self, number: signal.Signals) -> None:
        if number not in _ENDING:
            self._send(number)
        elif self._stopped_by is None:
            self._stopped_by = number
            self._stop_all(number, after=0.0, grace=self._grace)
        else:
            self._send(signal.SIGKILL)  # asked twice: no more patience

    def _stop_all(self, number: int, after: float, grace: float) -> None:
        now = time.monotonic()
        self._to_come = [(now + after, number), (now + after + grace, signal.SIGKILL)]

    def _send(self, number: int) -> None:
        for rank in self._ranks:
            if rank.code is None:
                rank.stopped_by_us = number in _ENDING or number == signal.SIGKILL
                rank.signal(number)

    def _verdict(self) -> int:
        count = len(self._ranks)
        if self._stopped_by is not None:
            _say(f"stopped by {self._stopped_by.name}: all {count} ranks have ended")
            codes = {rank.code for rank in self._ranks}
            agreed = codes.pop() if len(codes) == 1 else None
            # Ranks that ended in good order, all with the same code, meant it.
            return agreed if agreed is not None and agreed >= 0 else 128 + self._stopped_by
        if self._first_to_fail is None:
            return 0
        answer = self._ranks[0].code
        if (
            answer is not None
            and answer in self._answers
            and {rank.code for rank in self._ranks} <= {0, answer}
        ):
            return answer  # a mistake that all ranks found alike, a check that failed: it is told
        guilty, summary, details = self._find_guilty(self._first_to_fail)
        were = "was" if count == 2 else "were"
        others = f"; the other {count - 1} {were} stopped because of it" if count > 1 else ""
        who = f"rank {guilty.number} on {os.uname().nodename}"
        _say(f"{who} {guilty.how_it_ended()}{summary}{others}")
        if not self._output.shows(guilty.number):  # else it has been seen already
            text = details or self._output.tail(guilty.number)
            print(text, end="", file=sys.stderr, flush=True)
        if guilty.code is None or guilty.code == 0 or guilty.stopped_by_us:
            return 1
        return guilty.code if guilty.code > 0 else 128 - guilty.code

    def _find_guilty(self, first: _Rank) -> tuple[_Rank, str, str]:
        """The rank whose failure came first, and what is known of it.

        Ranks that lost a peer may be gone before the one that failed (its interpreter takes a
        while to wind down), but their reports name it. A signal has no report and needs none.
        """
        if first.code is not None and first.code < 0:
            return first, "", ""  # by a signal, before we sent any
        for rank in [first, *self._ranks]:
            if rank.report.exists():
                report = json.loads(rank.report.read_text())
                guilty = self._ranks[report["rank"]]
                return guilty, f": {report['summary']}", report["details"]
        return first, "", ""


def _die_with_parent() -> None:
    """In the child: be killed when the launcher is, so that no orphan trains on."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _note_only(number: int, frame: FrameType | None) -> None:
    """Signals are read from the wake-up pipe; the handler only keeps the default from acting."""


def _say(text: str) -> None:
    print(f"tutti run: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class LocalWorld:
    """What to start on this host, and how. The fields mean what the flags of `tutti run` mean."""

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
    """Exit codes with which ranks answer, in good order, after rank 0 has said why."""

    def check(self) -> None:
        """Refuse what cannot work, before anything is started."""
        if self.ranks < 1:
            raise UsageError(f"--ranks {self.ranks}: a world has at least one rank, use -n 1")
        if self.ranks_per_gpu < 1:
            raise UsageError(f"--ranks-per-gpu {self.ranks_per_gpu}: use 1 or more")
        for name in ("start_timeout", "timeout", "grace"):
            checked_seconds(f"--{name.replace('_', '-')}", getattr(self, name))
        gpus = 0 if self.device == "cpu" else visible_gpu_count()
        if gpus:
            refuse_more_ranks_than_gpus(self.ranks, gpus, self.ranks_per_gpu, os.uname().nodename)
        elif self.device == "cuda" or self.ranks_per_gpu > 1:
            flag = "--device cuda" if self.device == "cuda" else "--ranks-per-gpu"
            raise UsageError(f"{flag}: no GPU is visible on this host: leave the flag out")

    def run(self, env: Mapping[str, str] | None = None) -> int:
        """Run it to its end; returns the exit code of the first failure, or 0."""
        self.check()
        shared = without_launcher_variables(os.environ if env is None else env)
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tutti-run-")))
            if self.ranks_per_gpu > 1:
                note = f"{self.ranks_per_gpu} ranks share one GPU: this shows correctness"
                print(f"tutti run: {note}, not links between GPUs", file=sys.stderr)
                shared |= _start_mps(scratch, stack)
            output = stack.enter_context(RankOutput(self.ranks, self.show, self.log_dir))
            environments = self._environments(shared, scratch)
            return Conductor(
                self.command, environments, output, self.grace, self.reported_codes
            ).run()

    def _environments(self, shared: Mapping[str, str], scratch: Path) -> list[dict[str, str]]:
        """What each rank is told: the names torchrun uses, and ours (docs/world.md lists them)."""
        cores = min(len(allowed_cpus()), cpu_quota() or sys.maxsize)
        common = {
            # Without it every rank would start a thread per core of the machine.
            "OMP_NUM_THREADS": str(max(1, cores // self.ranks)),
            # Output is read from a pipe: a buffered line would come minutes late.
            "PYTHONUNBUFFERED": "1",
            **shared,
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
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
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "TUTTI_REPORT": str(scratch / f"rank{rank}.json"),
            }
            for rank in range(self.ranks)
        ]


def _start_mps(scratch: Path, stack: ExitStack) -> dict[str, str]:
    if not MpsDaemon.available():
        slow = "ranks on one GPU will take turns, which is slow"
        print(f"tutti run: nvidia-cuda-mps-control is not installed: {slow}", file=sys.stderr)
        return {}
    daemon = MpsDaemon(scratch)
    stack.callback(_stop_mps, daemon)
    # No signal may come between the daemon's start and our knowing how to end it.
    with _signals_held():
        try:
            daemon.start()
        except (subprocess.SubprocessError, OSError) as error:
            print(
                f"tutti run: MPS does not start ({error}): ranks will take turns", file=sys.stderr
            )
            return {}
    return daemon.variables


def _stop_mps(daemon: MpsDaemon) -> None:
    with _signals_held():
        daemon.stop()


@contextmanager
def _signals_held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
