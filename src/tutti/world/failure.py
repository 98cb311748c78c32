"""When one rank fails, all end within seconds, and everybody knows which one it was.

The lines (lines.py) say who failed, died or left. Here is what a rank does about it: it prints its
own failure if it was the first, one line otherwise, and ends by itself; a rank that cannot, since
it sits in a collective that will never complete, is ended after a short grace.
"""

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from tutti.world.errors import RanksDiffer, UsageError
from tutti.world.liveness import Failure, Liveness

# How long a rank may take to end by itself once the world has failed.
_GRACE_SECONDS = 3.0
# How long to wait for news of who has gone, after a connection was lost.
_NEWS_SECONDS = 2.0

# What torch's backends say when the other side of a connection has gone.
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|pair closure|remote process"
    r"|communicator was aborted|recvvalue failed|failed to recv|connection was likely closed"
    r"|closed the group|of group .* has died",
    re.IGNORECASE,
)
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class Watch:
    """What this rank does when it, or another, fails. In a world of one there is nothing to do."""

    def __init__(self, rank: int, host: str, report: Path | None) -> None:
        self.rank = rank
        self.host = host
        self.failed = False
        self._lines: Liveness | None = None
        self._report = report
        self._handled: BaseException | None = None
        self._over = False
        self._previous_hook: _Hook = sys.excepthook

    def start(self, lines: Liveness) -> None:
        """Begin to watch."""
        self._lines = lines

    def take_uncaught(self, previous: _Hook) -> None:
        """Take over what Python does with an exception nobody caught; `previous` comes back later.

        To be called after torch has set its own hook: what ours prints would vanish inside it.
        """
        self._previous_hook = previous
        sys.excepthook = one_line_for_mistakes(previous) if self._lines is None else self._uncaught

    def stop(self) -> None:
        """Leave the world: say so, and stay for the others if we are the hub of the lines."""
        if self._over or self._lines is None:
            return
        self._over = True
        if not self.failed and sys.excepthook == self._uncaught:
            sys.excepthook = self._previous_hook
        lines, first = self._lines, self._lines.first
        if first is not None and first.rank != self.rank:
            # The guilty rank goes first: launchers take whoever ends first for the cause.
            lines.wait(lambda: first.rank in lines.gone, _NEWS_SECONDS)
        lines.leave()

    def handle(self, error: BaseException) -> None:
        """Announce an exception that ends this rank, and print it once in all the world."""
        if error is self._handled or self._lines is None or self._over:
            return
        self._handled, self.failed = error, True
        if isinstance(error, KeyboardInterrupt):  # all ranks were interrupted: nobody failed
            print(f"rank {self.rank} on {self.host}: interrupted", file=sys.stderr, flush=True)
            return
        details = ""
        if isinstance(error, (UsageError, RanksDiffer)):
            summary, error.told = str(error), True
        elif isinstance(error, SystemExit):
            summary = f"it ended with exit code {error.code}"
        else:
            summary = "".join(traceback.format_exception_only(error)).strip()
            details = "".join(traceback.format_exception(error))
        mine = Failure(self.rank, self.host, summary)
        first = self._explanation(error) or self._lines.fail(mine)
        if first == mine:
            print(f"rank {self.rank} on {self.host} failed: {summary}", file=sys.stderr)
        else:
            self._say_stopped(first, summary)
            details = ""
        print(details, end="", file=sys.stderr, flush=True)
        self._write_report(first, details)

    def on_failure(self, first: Failure) -> None:
        """Called in a thread when the world has failed: end, if the main thread does not."""
        # The main thread most likely fails by itself now; what it says is better than this.
        time.sleep(_GRACE_SECONDS)
        if self._over:
            return
        if not self.failed:
            self._say_stopped(first)
            self._write_report(first, "")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, where: TracebackType | None
    ) -> None:
        self.handle(error.with_traceback(where))
        if isinstance(error, (UsageError, RanksDiffer)):
            raise SystemExit(2)

    def _explanation(self, error: BaseException) -> Failure | None:
        """The failure of another rank that lies behind this rank's error, if there is one."""
        lines = self._lines
        assert lines is not None
        if not _LOST_PEER.search(str(error)):
            return lines.first
        # A lost connection: whoever it was is known in a moment.
        lines.wait(lambda: lines.first is not None, _NEWS_SECONDS)
        early = sorted(lines.left - {self.rank})
        if lines.first is None and early:
            what = "it ended, without an error, while others still worked with it"
            return lines.fail(Failure(early[0], lines.hosts[early[0]], what))
        return lines.first

    def _say_stopped(self, first: Failure, own: str = "") -> None:
        me, other = f"rank {self.rank} on {self.host}", f"rank {first.rank} on {first.host}"
        if own == first.summary:
            text = f"{me} stopped with the same error as {other}"
        elif not own or _LOST_PEER.search(own):
            text = f"{me} stopped: {other} failed first: {first.summary}"
        else:
            text = f"{me} stopped ({own.splitlines()[0]}): {other} failed first: {first.summary}"
        print(text, file=sys.stderr, flush=True)

    def _write_report(self, first: Failure, details: str) -> None:
        if self._report is None:
            return
        beside = self._report.with_suffix(".new")
        with contextlib.suppress(OSError):  # the launcher has gone, and its directory with it
            beside.write_text(json.dumps({**asdict(first), "details": details}))
            beside.replace(self._report)


def one_line_for_mistakes(hook: _Hook) -> _Hook:
    """An excepthook that prints a user's mistake as one line and exits with 2."""

    def print_mistake(
        kind: type[BaseException], error: BaseException, where: TracebackType | None
    ) -> None:
        if not issubclass(kind, (UsageError, RanksDiffer)):
            hook(kind, error, where)
            return
        print(f"tutti: {error}", file=sys.stderr, flush=True)
        if not hasattr(sys, "ps1"):  # not in an interactive session: that one goes on
            raise SystemExit(2)

    return print_mistake
