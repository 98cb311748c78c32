"""Conducts local ranks: starts them, passes on what they say, ends all of them when one fails.

One loop over a selector serves everything: what ranks print, ranks that end (a pidfd each), and
signals. No threads, and no delay between a rank's death and our notice of it.
"""

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from tutti.world.output import RankOutput, Stream

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
