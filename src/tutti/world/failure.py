"""When one rank fails, all end within seconds, and everybody knows which one it was.

Each rank watches from a thread. A rank that raises announces it in the store, where the first
announcement stays; a rank that is killed can announce nothing, so its neighbours on the same
machine notice that its process is gone and announce it in its name. Ranks that hang in a
collective with the dead one (NCCL notices nothing by itself) are ended after a short grace.
"""

import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from tutti.world.errors import RanksDiffer, UsageError
from tutti.world.rendezvous import Meeting
from tutti.world.rollcall import Roll, process_start

_LOOK_SECONDS = 0.5
# How long a rank may take to end by itself once the world has failed.
_GRACE_SECONDS = 3.0
# How long the rank that hosts the store stays for the others at a clean end.
_FAREWELL_SECONDS = 30.0
_FAILED_FAREWELL_SECONDS = 2.0

# What torch's backends say when the other side of a connection has gone.
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|pair closure|remote process"
    r"|communicator was aborted|recvvalue failed|failed to recv|connection was likely closed",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """The failure that ended the world: whose it was, and what it was."""

    rank: int
    host: str
    summary: str


class Watch:
    """Watches over the other ranks of this world while it lives."""

    def __init__(self, meeting: Meeting, roll: Roll, rank: int, report: Path | None) -> None:
        self.roll = roll
        self.rank = rank
        self.host = roll.answers[rank].host
        self.failed = False
        self._report = report
        self._meeting = meeting  # keeps the store alive, where this rank hosts it
        # An idle connection beside it: it tells when the store's process is gone. torch's client
        # would tell, too, with a page of C++ frames.
        self._line = socket.create_connection((meeting.host, meeting.port))
        self._line.setblocking(False)
        # A connection of its own: the main thread may sit in a long wait on the other one.
        own = dist.TCPStore(
            meeting.host,
            meeting.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=10),
        )
        self._store = dist.PrefixStore(f"tutti/{roll.start}", own)
        self._neighbours = [
            answer
            for answer in roll.answers
            if answer.rank != rank
            and answer.machine == roll.answers[rank].machine
            and answer.pid_namespace == roll.answers[rank].pid_namespace
        ]
        self._store_host_left = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_around, name="tutti-watch", daemon=True)
        self._handled: BaseException | None = None
        self._previous_hook = sys.excepthook

    def start(self) -> None:
        """Begin to watch, and take over what Python does with an exception nobody caught."""
        sys.excepthook = self._on_uncaught
        self._thread.start()

    def stop(self) -> None:
        """End the watch: say farewell, and stay for the others if they need our store."""
        self._over.set()
        self._thread.join()
        if not self.failed and sys.excepthook == self._on_uncaught:
            sys.excepthook = self._previous_hook
        if not self._store_is_gone():
            say_farewell(self._store, self.rank, len(self.roll.answers), self._meeting.is_host)

    def handle(self, error: BaseException) -> None:
        """Announce an exception that ends this rank, and print it once in all the world."""
        if error is self._handled:
            return
        self._handled, self.failed = error, True
        if isinstance(error, KeyboardInterrupt):  # all ranks were interrupted: nobody failed
            print(f"rank {self.rank} on {self.host}: interrupted", file=sys.stderr, flush=True)
            return
        if isinstance(error, (UsageError, RanksDiffer)):
            summary, details = str(error), ""
        else:
            summary = "".join(traceback.format_exception_only(error)).strip()
            details = "".join(traceback.format_exception(error))
        mine = Failure(self.rank, self.host, summary)
        first = self._explanation(error) or self._announce(mine)
        if first == mine:
            print(f"rank {self.rank} on {self.host} failed: {summary}", file=sys.stderr)
        else:
            self._say_stopped(first, summary)
            details = ""
        print(details, end="", file=sys.stderr, flush=True)
        self._write_report(first, details)

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, where: TracebackType | None
    ) -> None:
        self.handle(error.with_traceback(where))
        if isinstance(error, (UsageError, RanksDiffer)):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2)

    def _explanation(self, error: BaseException) -> Failure | None:
        """The failure of another rank that lies behind this rank's error, if there is one."""
        found = self._announced()
        if found is not None or not _LOST_PEER.search(str(error)):
            return found
        # A lost connection: give whoever died, or who saw it die, a moment to be known.
        deadline = time.monotonic() + 4 * _LOOK_SECONDS
        while found is None and time.monotonic() < deadline:
            time.sleep(0.05)
            found = self._announced() or self._dead_neighbour()
        return found or self._early_leaver()

    def _look_around(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            self._store_host_left = self._store_host_left or self._has_left(0)
            if self._store_host_left and self._store_is_gone():
                return
            first = self._announced() or self._dead_neighbour()
            if first is not None:
                self._end(first)
                return

    def _end(self, first: Failure) -> None:
        # The main thread most likely fails by itself now; what it says is better than this.
        time.sleep(_GRACE_SECONDS)
        if self._over.is_set():
            return
        if not self.failed:
            self._say_stopped(first)
            self._write_report(first, "")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _announce(self, failure: Failure) -> Failure:
        """Announce a failure; returns the one that was announced first."""
        if self._store_is_gone():
            return failure
        text = self._store.compare_set("failure", "", json.dumps(asdict(failure)))
        return Failure(**json.loads(text))

    def _announced(self) -> Failure | None:
        if self._store_is_gone():
            host = self.roll.answers[0]
            return Failure(0, host.host, f"process {host.pid} is gone, or its host is")
        if not self._store.check(["failure"]):
            return None
        return Failure(**json.loads(self._store.get("failure")))

    def _dead_neighbour(self) -> Failure | None:
        for answer in self._neighbours:
            if process_start(answer.pid) == answer.pid_started or self._has_left(answer.rank):
                continue
            what = f"process {answer.pid} died without a word: killed, or out of memory?"
            return self._announce(Failure(answer.rank, answer.host, what))
        return None

    def _early_leaver(self) -> Failure | None:
        for answer in self.roll.answers:
            if answer.rank != self.rank and self._has_left(answer.rank):
                what = "it ended, without an error, while others still worked with it"
                return self._announce(Failure(answer.rank, answer.host, what))
        return None

    def _has_left(self, rank: int) -> bool:
        return not self._store_is_gone() and self._store.check([f"left/{rank}"])

    def _store_is_gone(self) -> bool:
        try:
            return self._line.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

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
        if self._report is not None:
            self._report.write_text(json.dumps({**asdict(first), "details": details}))


def say_farewell(store: dist.Store, rank: int, size: int, hosts_store: bool) -> None:
    """Say that this rank leaves; the store's host waits until the others have left, too."""
    try:
        store.set(f"left/{rank}", "yes")
        if not hosts_store:
            return
        everybody = [f"left/{other}" for other in range(size)]
        began = time.monotonic()
        while not store.check(everybody):
            # Once the world has failed the others only need to read why; the dead never leave.
            patience = _FAILED_FAREWELL_SECONDS if store.check(["failure"]) else _FAREWELL_SECONDS
            if time.monotonic() - began > patience:
                return
            time.sleep(0.02)
    except RuntimeError:  # the store's host has gone already
        return


def one_line_for_mistakes(
    hook: Callable[..., object],
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    """An excepthook that prints a user's mistake as one line and exits with 2."""

    def print_mistake(
        kind: type[BaseException], error: BaseException, where: TracebackType | None
    ) -> None:
        if not issubclass(kind, (UsageError, RanksDiffer)):
            hook(kind, error, where)
            return
        print(f"tutti: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(2)

    return print_mistake
