"""Liveness: an idle connection from every rank to rank 0, by which the death of either is known.

When a process dies, however it dies, the kernel closes its connections: the other end knows at
once, whether or not the dead one had a launcher, was in a collective, or held Python's lock. Rank 0
is the hub. It hears who failed, who left and who is gone, and tells everybody. Where a whole host
goes silent, TCP keep-alive closes the line after about half a minute.

Words on a line, one JSON object each: {"hello": rank, "start": name}, {"failed": failure},
{"left": rank} and {"gone": rank}. The first failure that the hub hears of is what all are told.
"""

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 10,  # seconds of silence before the first probe
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
}


@dataclass(frozen=True)
class Failure:
    """The failure that ended the world: whose it was, and what it was."""

    rank: int
    host: str
    summary: str


class Liveness:
    """This rank's end of the lines, served by a thread; `on_failure` is called there once."""

    def __init__(
        self, rank: int, hosts: Sequence[str], start: str, on_failure: Callable[[Failure], None]
    ) -> None:
        self.rank = rank
        self.left: set[int] = set()
        self.gone: set[int] = set()
        self._called: set[int] = set()
        self.first: Failure | None = None
        self.hosts = hosts
        self._start = start
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, _Peer] = {}
        self._over = False
        # The main thread speaks to the hub's own thread through a line, too.
        self._mine, its_end = socket.socketpair()
        self._add(its_end, rank)
        self._thread = threading.Thread(target=self._serve, name="tutti-lines", daemon=True)
        # A forked helper would hold the line open after its parent's death.
        os.register_at_fork(after_in_child=self._drop_all)

    @classmethod
    def hub(
        cls,
        listener: socket.socket,
        hosts: Sequence[str],
        start: str,
        on_failure: Callable[[Failure], None],
    ) -> "Liveness":
        """Rank 0's end: waits for the others to call."""
        lines = cls(0, hosts, start, on_failure)
        listener.setblocking(False)
        lines._listener = listener
        lines._selector.register(listener, selectors.EVENT_READ)
        lines._thread.start()
        return lines

    @classmethod
    def member(
        cls,
        rank: int,
        address: tuple[str, int],
        hosts: Sequence[str],
        start: str,
        on_failure: Callable[[Failure], None],
    ) -> "Liveness":
        """Another rank's end: calls rank 0."""
        lines = cls(rank, hosts, start, on_failure)
        line = socket.create_connection(address, timeout=30)
        line.sendall(_word({"hello": rank, "start": start}))
        lines._add(line, 0)
        lines._thread.start()
        return lines

    _listener: socket.socket | None = None

    def all_have_called(self, seconds: float) -> bool:
        """Rank 0: whether every other rank has called within this time."""
        members = len(self.hosts) - 1
        return self.wait(lambda: len(self._called) == members, seconds)

    def fail(self, failure: Failure, patience: float = 2.0) -> Failure:
        """Tell everybody; returns the failure that came first, which may be another's."""
        self._say({"failed": asdict(failure)})
        self.wait(lambda: self.first is not None, patience)
        return self.first or failure

    def wait(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        """Wait until something heard on the lines makes the condition true."""
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def leave(self) -> None:
        """Say that this rank leaves on purpose. The hub stays until all others have left."""
        self._say({"left": self.rank})
        if self.rank == 0:
            everybody = set(range(len(self.hosts)))
            self.wait(lambda: self.left >= everybody or self.first is not None, None)
        self._over = True
        with contextlib.suppress(OSError):
            self._mine.close()
        self._thread.join(timeout=5)

    def _say(self, word: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the thread has ended: nobody is left to tell
            self._mine.sendall(_word(word))

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    with contextlib.suppress(OSError):
                        self._add(self._listener.accept()[0], None)
                    continue
                line = key.fileobj
                assert isinstance(line, socket.socket)
                words = self._peers[line].read(line)
                for word in words or []:
                    if line in self._peers:  # unless an earlier word made us hang up
                        self._hear(word, line)
                if words is None and line in self._peers:
                    if self._peers[line].rank == self.rank:  # our own end was closed: leave
                        self._drop_all()
                        return
                    self._lost(line)

    def _hear(self, word: dict[str, Any], line: socket.socket) -> None:
        peer = self._peers[line]
        if "hello" in word:
            # Only ranks of this very start count; anybody may connect to a port.
            if word.get("start") == self._start and peer.rank is None:
                peer.rank = int(word["hello"])
                with self._changed:
                    self._called.add(peer.rank)
                    self._changed.notify_all()
                if self.first is not None:
                    self._tell(line, {"failed": asdict(self.first)})
        elif peer.rank is None:
            self._forget(line)
        elif "failed" in word and (self.rank == 0 or peer.rank == 0):
            self._failed(Failure(**word["failed"]))
        elif "failed" in word or ("left" in word and self.rank != 0 and peer.rank == self.rank):
            self._tell_hub(word)
        elif "left" in word or "gone" in word:
            self._note(**word)

    def _lost(self, line: socket.socket) -> None:
        rank = self._peers[line].rank
        self._forget(line)
        if rank is None or self._over:
            return
        self._note(gone=rank)
        if rank not in self.left:
            self._failed(Failure(rank, self.hosts[rank], "it died without a word: killed?"))

    def _note(self, left: int | None = None, gone: int | None = None) -> None:
        word = {"left": left} if gone is None else {"gone": gone}
        self._tell_others(word)
        with self._changed:
            if left is not None:
                self.left.add(left)
            if gone is not None:
                self.gone.add(gone)
            self._changed.notify_all()

    def _failed(self, failure: Failure) -> None:
        if self.first is not None:
            return
        self._tell_others({"failed": asdict(failure)})
        with self._changed:
            self.first = failure
            self._changed.notify_all()
        threading.Thread(target=self._on_failure, args=[failure], daemon=True).start()

    def _tell_others(self, word: dict[str, Any]) -> None:
        if self.rank == 0:
            for line, peer in list(self._peers.items()):
                if peer.rank not in (None, 0):
                    self._tell(line, word)

    def _tell_hub(self, word: dict[str, Any]) -> None:
        for line, peer in list(self._peers.items()):
            if peer.rank == 0:
                self._tell(line, word)

    def _tell(self, line: socket.socket, word: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has gone: its line will say so
            line.sendall(_word(word))

    def _add(self, line: socket.socket, rank: int | None) -> None:
        if line.family in (socket.AF_INET, socket.AF_INET6):
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE.items():
                line.setsockopt(socket.IPPROTO_TCP, option, value)
        line.settimeout(5)  # words are short: a peer that takes none of them for 5 s is gone
        self._peers[line] = _Peer(rank)
        self._selector.register(line, selectors.EVENT_READ)

    def _forget(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        del self._peers[line]
        line.close()

    def _drop_all(self) -> None:
        for line in list(self._peers):
            with contextlib.suppress(OSError, KeyError, ValueError):
                line.close()
        with contextlib.suppress(OSError):
            self._mine.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()


class _Peer:
    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        self.rest = b""

    def read(self, line: socket.socket) -> list[dict[str, Any]] | None:
        """The words that have come; None at the end of the line."""
        try:
            data = line.recv(1 << 16)
        except OSError:
            return None
        if not data or len(self.rest) > 1 << 20:
            return None
        *whole, self.rest = (self.rest + data).split(b"\n")
        try:
            words = [json.loads(text) for text in whole]
        except ValueError:
            return None
        # Somebody who does not speak our language is hung up on.
        return words if all(isinstance(word, dict) for word in words) else None


def _word(word: dict[str, Any]) -> bytes:
    return json.dumps(word).encode() + b"\n"


def open_listener(address: str) -> socket.socket:
    """A socket for the hub, on a free port of this address ("" for every interface)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.bind((address, 0))
    listener.listen(4096)
    return listener


_PATIENCE_SECONDS = 5.0  # a thread of the program's own may keep them busy to its very end


def wait_for_gloo_threads() -> None:
    """Wait until gloo's threads rest, some seconds at most; returns at once where there are none.

    A gloo thread lets go of its last operation, and of Python objects with it, a moment after the
    operation's result is known. Should the interpreter end just then, torch aborts the process
    ("terminate called without an active exception"), destroy_process_group or not: a DDP model
    keeps the group, and its threads, alive.
    """
    resting, end = 0, time.monotonic() + _PATIENCE_SECONDS
    while resting < 2 and time.monotonic() < end and (states := _states()):
        resting = 0 if "R" in states else resting + 1
        time.sleep(0.01)  # also lets them have Python's lock


def _states() -> list[str]:
    """One letter, as of /proc, for each thread of gloo."""
    threads = Path("/proc/self/task").glob("*")  # none where there is no /proc
    gloo = [thread for thread in threads if _read(thread / "comm").startswith("pt_gloo")]
    return [_read(thread / "stat").rpartition(")")[2].strip()[:1] for thread in gloo]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended meanwhile
        return ""
