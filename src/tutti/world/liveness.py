"""Liveness: an idle TCP connection from every rank to rank 0 detects the death of either end.

When a process dies, the kernel closes its connections. The process at the other end detects this at
once. This works with every launcher, and also if the dead process was in a collective or held the
GIL. If a whole host becomes unreachable, TCP keep-alive closes the connection after about 25 s.

Rank 0 is the hub. Every rank tells rank 0 when it fails or ends normally, and rank 0 detects closed
connections. Rank 0 sends each of these events to all other ranks.

Messages are JSON objects, one per line:

- {"hello": rank, "start": start id} is the first message on a connection.
- {"failed": failure} reports a failure. The first failure that reaches rank 0 counts on all ranks.
- {"left": rank} reports a rank that ends normally.
- {"gone": rank} reports a rank whose connection is closed.

This module imports only the standard library, because the startup hook of `tutti profile` loads it
in programs that cannot import tutti.
"""

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# TCP keep-alive: seconds before the first probe, seconds between probes, and number of probes.
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
_LONGEST_MESSAGE = 1 << 20


@dataclass(frozen=True)
class Failure:
    """The failure of a rank: the rank, its host, and a summary of the error."""

    rank: int
    host: str
    summary: str


class Liveness:
    """This rank's end of the liveness connections, served by a thread.

    Rank 0, the hub, accepts connections at `listener`. Other ranks connect to `address`.
    `on_failure` is called once, in a new thread, when the first failure is known.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        start_id: str,
        on_failure: Callable[[Failure], None],
        *,
        listener: socket.socket | None = None,
        address: tuple[str, int] | None = None,
    ) -> None:
        self.rank, self.hosts = rank, hosts
        self.finished_ranks: set[int] = set()  # ranks that have announced a normal end
        self.disconnected_ranks: set[int] = set()  # ranks whose connection is closed
        self.first_failure: Failure | None = None
        self._connected: set[int] = set()  # on rank 0, the ranks that have sent their hello
        self._start_id, self._on_failure = start_id, on_failure
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, int | None] = {}  # the peer's rank, or None before hello
        self._incomplete: dict[socket.socket, bytes] = {}  # the bytes of an incomplete message
        self._closing = False
        self._listener = listener
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        if address is not None:
            connection = socket.create_connection(address, timeout=30)
            connection.sendall(_encode({"hello": rank, "start": start_id}))
            self._add(connection, 0)
        # The main thread sends messages to the serving thread through a socket pair.
        self._to_thread, thread_end = socket.socketpair()
        self._add(thread_end, rank)
        # A forked child process must close its copies of the connections. Otherwise the connections
        # would stay open after the death of this process.
        os.register_at_fork(after_in_child=self._close_all)
        self._thread = threading.Thread(target=self._serve, name="tutti-liveness", daemon=True)
        self._thread.start()

    def wait_until_all_connected(self, timeout: float) -> bool:
        """On rank 0, wait until every other rank has connected. Return False at the timeout."""
        return self.wait(lambda: len(self._connected) == len(self.hosts) - 1, timeout)

    def report_failure(self, failure: Failure, timeout: float = 2.0) -> Failure:
        """Send `failure` to all ranks. Return the first failure, which may be another rank's."""
        self._send_to_thread({"failed": asdict(failure)})
        self.wait(lambda: self.first_failure is not None, timeout)
        return self.first_failure or failure

    def wait(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        """Check `condition` after every message until it is true. Return False at the timeout."""
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def leave(self) -> None:
        """Announce that this rank ends normally, and close the connections.

        Before rank 0 closes them, it waits until all other ranks have ended or one has failed.
        """
        self._send_to_thread({"left": self.rank})
        if self.rank == 0:
            everyone = set(range(len(self.hosts)))
            self.wait(
                lambda: self.finished_ranks >= everyone or self.first_failure is not None, None
            )
        self._closing = True
        with contextlib.suppress(OSError):
            self._to_thread.close()
        self._thread.join(timeout=5)

    def _send_to_thread(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the thread has ended
            self._to_thread.sendall(_encode(message))

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    with contextlib.suppress(OSError):
                        self._add(self._listener.accept()[0], None)
                    continue
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                messages = self._read(connection)
                for message in messages or []:
                    if connection in self._peers:  # False if an earlier message was invalid
                        self._receive(message, connection)
                if messages is None and connection in self._peers:
                    if self._peers[connection] == self.rank:  # leave() closed the socket pair
                        self._close_all()
                        return
                    self._lost(connection)

    def _read(self, connection: socket.socket) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived, or None if the connection is closed or invalid."""
        rest = self._incomplete[connection]
        with contextlib.suppress(OSError, ValueError):
            data = connection.recv(1 << 16)
            if data and len(rest) <= _LONGEST_MESSAGE:
                *lines, self._incomplete[connection] = (rest + data).split(b"\n")
                messages = [json.loads(line) for line in lines]
                if all(isinstance(message, dict) for message in messages):
                    return messages
        return None

    def _receive(self, message: dict[str, Any], connection: socket.socket) -> None:
        peer = self._peers[connection]
        if "hello" in message:
            # Any process can connect to the port. Only ranks with this start id are accepted.
            if message.get("start") == self._start_id and peer is None:
                peer = self._peers[connection] = int(message["hello"])
                self._add_to(self._connected, peer)
                if self.first_failure is not None:
                    self._send({"failed": asdict(self.first_failure)}, {peer})
        elif peer is None:
            self._remove(connection)
        elif "failed" in message and (self.rank == 0 or peer == 0):
            self._failed(Failure(**message["failed"]))
        elif "failed" in message or ("left" in message and self.rank != 0 and peer == self.rank):
            # This rank's main thread sent the message. Forward it to rank 0.
            self._send(message, {0})
        elif "left" in message:
            self._broadcast_from_hub(message)
            self._add_to(self.finished_ranks, message["left"])
        elif "gone" in message:
            self._add_to(self.disconnected_ranks, message["gone"])

    def _lost(self, connection: socket.socket) -> None:
        rank = self._peers[connection]
        self._remove(connection)
        if rank is None or self._closing:
            return
        self._broadcast_from_hub({"gone": rank})
        self._add_to(self.disconnected_ranks, rank)
        if rank not in self.finished_ranks:
            summary = "it died without reporting an error. Was it killed?"
            self._failed(Failure(rank, self.hosts[rank], summary))

    def _add_to(self, ranks: set[int], rank: int) -> None:
        with self._changed:
            ranks.add(rank)
            self._changed.notify_all()

    def _failed(self, failure: Failure) -> None:
        if self.first_failure is not None:
            return
        self._broadcast_from_hub({"failed": asdict(failure)})
        with self._changed:
            self.first_failure = failure
            self._changed.notify_all()
        threading.Thread(target=self._on_failure, args=[failure], daemon=True).start()

    def _broadcast_from_hub(self, message: dict[str, Any]) -> None:
        if self.rank == 0:
            self._send(message, range(1, len(self.hosts)))

    def _send(self, message: dict[str, Any], ranks: Container[int | None]) -> None:
        for connection, peer in list(self._peers.items()):
            if peer in ranks:
                with contextlib.suppress(OSError):  # a closed connection is detected by `_serve`
                    connection.sendall(_encode(message))

    def _add(self, connection: socket.socket, rank: int | None) -> None:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.settimeout(5)  # limits `sendall` to a peer that does not read
        self._peers[connection] = rank
        self._incomplete[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _remove(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._peers[connection], self._incomplete[connection]
        connection.close()

    def _close_all(self) -> None:
        for connection in list(self._peers):
            with contextlib.suppress(OSError, KeyError, ValueError):
                connection.close()
        with contextlib.suppress(OSError):
            self._to_thread.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def open_listener(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at `address` ("" for all interfaces). Port 0 means any port."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(4096)  # every rank of a large world may connect at the same time
    except OSError:
        listener.close()
        raise
    return listener


def local_address_towards(address: str) -> str | None:
    """Return this host's source address for packets to `address`, or None if there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # selects a route, but sends no packet
        except OSError:
            return None
        return str(probe.getsockname()[0])


def wait_for_gloo_threads() -> None:
    """Wait until gloo's threads are idle, but not longer than 5 s.

    A gloo thread releases its last operation, and the Python objects that the operation holds,
    shortly after the operation's result is known. If the interpreter exits before this release,
    torch aborts the process ("terminate called without an active exception"). This can happen even
    after destroy_process_group, because a DDP model keeps the process group and its threads alive.
    """
    # The wait is limited, because a thread of the program may use gloo until the program ends.
    idle, end = 0, time.monotonic() + 5.0
    while idle < 2 and time.monotonic() < end:
        states = []  # the state letter of each gloo thread in /proc/self/task/*/stat (R: running)
        for thread in Path("/proc/self/task").glob("*"):  # no iteration without /proc
            with contextlib.suppress(OSError):  # the thread has ended
                if (thread / "comm").read_text().startswith("pt_gloo"):
                    states.append((thread / "stat").read_text().rpartition(")")[2].strip()[:1])
        if not states:
            return
        idle = 0 if "R" in states else idle + 1
        time.sleep(0.01)  # also releases the GIL, so that the gloo threads can run
