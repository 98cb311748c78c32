"""If one rank fails, all ranks end within seconds, and the output names the rank that failed.

liveness.py detects which rank failed, died or ended normally. The rank that failed first prints its
error. Each other rank prints one line that names the failed rank. A rank that waits in a collective
that will never complete cannot end normally, so its process is ended after a few seconds.
"""

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from tutti.measure.files import write_atomically
from tutti.world.errors import EXPLAINED_ERRORS
from tutti.world.liveness import Failure, Liveness

# After a rank has failed, the time for the main threads of the other ranks to end.
_GRACE_SECONDS = 3.0
# After a connection was lost, the time to wait until liveness reports the failed rank.
_REPORT_SECONDS = 2.0

# Error messages of torch's backends after the peer of a connection has ended.
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|pair closure|remote process"
    r"|communicator was aborted|recvvalue failed|failed to recv|connection was likely closed"
    r"|closed the group|of group .* has died",
    re.IGNORECASE,
)
_RANK_PREFIX = re.compile(r"(\[rank ?\d+\]:? ?)+")
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class FailureHandler:
    """Ends this rank when a rank fails. Does nothing in a world of one rank."""

    def __init__(self, rank: int, host: str, report: Path | None) -> None:
        self.failed = False
        self.liveness: Liveness | None = None  # set if the world has more than one rank
        self._rank, self._host, self._name = rank, host, f"rank {rank} on {host}"
        self._report = report  # the file of this rank's failure report, which `tutti run` reads
        self._handled: BaseException | None = None
        self._closed = False
        self._previous_hook: _Hook = sys.excepthook

    def install_hook(self, previous: _Hook) -> None:
        """Install a sys.excepthook that handles uncaught exceptions. `stop` restores `previous`.

        Call this method after init_process_group, which also installs a hook. In the opposite
        order, the hook of init_process_group would suppress the output of this hook.
        """
        self._previous_hook = previous
        sys.excepthook = self._uncaught if self.liveness else print_usage_errors(previous)

    def stop(self) -> None:
        """Announce that this rank ends. Rank 0 also waits until all other ranks have ended."""
        liveness = self.liveness
        if self._closed or liveness is None:
            return
        self._closed = True
        if not self.failed and sys.excepthook == self._uncaught:
            sys.excepthook = self._previous_hook
        first = liveness.first_failure
        if first is not None and first.rank != self._rank:
            # Wait until the failed rank has ended, because launchers report the process that ends
            # first as the failed one.
            liveness.wait(lambda: first.rank in liveness.disconnected_ranks, _REPORT_SECONDS)
        liveness.leave()

    def handle(self, error: BaseException) -> None:
        """Report an exception that ends this rank.

        Only the rank that failed first prints its exception.
        """
        if error is self._handled or self.liveness is None or self._closed:
            return
        self._handled, self.failed = error, True
        if isinstance(error, KeyboardInterrupt):  # Ctrl-C reaches all ranks, and no rank has failed
            print(f"{self._name}: interrupted", file=sys.stderr, flush=True)
            return
        details, code = "", None
        if isinstance(error, EXPLAINED_ERRORS):
            summary, _, details = str(error).partition("\n")
            details, error.printed = f"{details}\n" if details else "", True
        elif isinstance(error, SystemExit):
            summary = f"it ended with exit code {error.code}"
            code = error.code if isinstance(error.code, int) else 1
        else:
            summary = _one_line(error)
            details = "".join(traceback.format_exception(error))
        failure = Failure(self._rank, self._host, summary)
        first = self._cause(error, self.liveness) or self.liveness.report_failure(failure)
        if first == failure:
            print(f"{self._name} failed: {summary}", file=sys.stderr)
        else:
            self._print_stopped(first, summary)
            details = ""
        print(details, end="", file=sys.stderr, flush=True)
        self._write_report(first, details, code)

    def on_failure(self, first: Failure) -> None:
        """End this process a few seconds after the first failure, unless it ends before.

        Called in a new thread, in which os._exit works even if the main thread is blocked.
        """
        # In most cases the main thread fails during this sleep, with a more precise message.
        time.sleep(_GRACE_SECONDS)
        if self._closed:
            return
        if not self.failed:
            self._print_stopped(first)
            self._write_report(first, "")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, where: TracebackType | None
    ) -> None:
        self.handle(error.with_traceback(where))
        if isinstance(error, EXPLAINED_ERRORS):
            raise SystemExit(2)

    def _cause(self, error: BaseException, liveness: Liveness) -> Failure | None:
        """Return the failure that caused this rank's error, or None if this rank failed first."""
        if not _LOST_PEER.search(str(error)):
            return liveness.first_failure
        # A connection was lost, so wait until liveness reports which rank failed.
        liveness.wait(lambda: liveness.first_failure is not None, _REPORT_SECONDS)
        early = sorted(liveness.finished_ranks - {self._rank})
        if liveness.first_failure is None and early:
            summary = "it ended without an error while other ranks still communicated with it"
            return liveness.report_failure(Failure(early[0], liveness.hosts[early[0]], summary))
        return liveness.first_failure

    def _print_stopped(self, first: Failure, error: str = "") -> None:
        other = f"rank {first.rank} on {first.host}"
        text = f" with the same error as {other}"
        if error != first.summary:
            reason = "" if not error or _LOST_PEER.search(error) else f" ({error.splitlines()[0]})"
            text = f"{reason}: {other} failed first: {first.summary}"
        print(f"{self._name} stopped{text}", file=sys.stderr, flush=True)

    def _write_report(self, first: Failure, details: str, code: int | None = None) -> None:
        """Write the failure report for `tutti run`. `code` is the argument of sys.exit, if any."""
        if self._report is not None:
            report = {**asdict(first), "details": details, "code": code}
            with contextlib.suppress(OSError):  # the launcher may have removed the directory
                write_atomically(self._report, json.dumps(report))


def _one_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    if isinstance(error, SyntaxError):  # its message follows lines that show the source position
        return lines[-1]
    return lines[0] + " …" * (len(lines) > 1)


def print_usage_errors(hook: _Hook) -> _Hook:
    """Return an excepthook that handles EXPLAINED_ERRORS: it prints the message and exits with 2.

    `hook` handles all other errors.
    """

    def excepthook(
        kind: type[BaseException], error: BaseException, where: TracebackType | None
    ) -> None:
        if not issubclass(kind, EXPLAINED_ERRORS):
            hook(kind, error, where)
            return
        print(f"tutti: {error}", file=sys.stderr, flush=True)
        if not hasattr(sys, "ps1"):  # an interactive interpreter has sys.ps1 and continues
            raise SystemExit(2)

    return excepthook


def first_error(lines: Sequence[str]) -> list[str]:
    """Return the lines of the first traceback in the output of ranks, or [] if there is none.

    A traceback about a lost connection is a consequence of another rank's error, so it is returned
    only if there is no other traceback. Lines of different ranks may alternate. The line prefixes
    of `tutti run` and torch, for example `[rank 1] [rank1]: `, identify the rank of each line.
    """
    found: list[list[str]] = []
    last: dict[str, list[str]] = {}  # the last traceback of each prefix
    for line in lines:
        match = _RANK_PREFIX.match(line)
        prefix = match[0] if match is not None else ""
        if line[len(prefix) :].startswith("Traceback (most recent call last)"):
            last[prefix] = []
            found.append(last[prefix])
        if prefix in last:
            last[prefix].append(line)
    causes = [each for each in found if not _LOST_PEER.search(" ".join(each))]
    return next(iter(causes or found), [])
