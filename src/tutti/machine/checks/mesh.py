"""A small service on every rank, and calls to it: are ports open, what time is it, how fast.

Every rank listens on a port that the kernel picks, as gloo and NCCL do. A call is one line of JSON
with the token that only ranks of this world know; what follows depends on its kind. Every wait
has an end, so that a host that swallows packets cannot hang the doctor.
"""

import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CALL_SECONDS = 3.0
_TALK_SECONDS = 10.0
_LINE = 512
_BLOCK = 1 << 20
_LARGEST = 1 << 30
_TIMES = struct.Struct("!dd")
_PINGS = 32
# A probe to learn the order of magnitude, then as much as takes about this long.
_PROBE_BYTES = 1 << 18
_ABOUT_SECONDS = 0.04
_MOST_BYTES = 1 << 26

Clock = Callable[[], float]


@dataclass(frozen=True)
class Place:
    """Where a rank's service is, and how it knows its own."""

    address: str
    port: int
    token: str


class Service:
    """Answers calls in threads of its own until it is closed."""

    def __init__(self, address: str, clock: Clock = time.time) -> None:
        self._clock = clock
        self._listener = socket.create_server(("", 0))
        port = self._listener.getsockname()[1]
        self.place = Place(address, port, secrets.token_hex(16))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Hear nobody any more."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_TALK_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                while said := _read_line(connection):
                    if said.get("token") != self.place.token:
                        return
                    self._serve(connection, said)
            except (OSError, ValueError):  # the caller went away, or is none of ours
                return

    def _serve(self, connection: socket.socket, said: dict[str, Any]) -> None:
        size = min(int(said.get("bytes", 0)), _LARGEST)
        if said["kind"] == "hello":
            connection.sendall(b"y")
        elif said["kind"] == "time":
            received = self._clock()
            connection.sendall(_TIMES.pack(received, self._clock()))
        elif said["kind"] == "take":
            _take(connection, size)
            connection.sendall(b"y")
        elif said["kind"] == "give":
            _give(connection, size)


class Caller:
    """One connection to another rank's service."""

    def __init__(self, place: Place, timeout: float = CALL_SECONDS) -> None:
        self._token = place.token
        self._socket = socket.create_connection((place.address, place.port), timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def hello(self) -> None:
        """Return if the right process answers; else an OSError."""
        self._say("hello")
        if self._socket.recv(1) != b"y":
            raise OSError("somebody else listens there")
        self._socket.settimeout(_TALK_SECONDS)

    def offset(self, clock: Clock = time.time) -> tuple[float, float]:
        """How far the other clock is ahead of ours, and the round trip, both in seconds.

        Cristian's estimate: at the quickest of many messages there and back, the answer was
        written about half-way.
        """
        best = (0.0, float("inf"))
        for _ in range(_PINGS):
            sent = clock()
            self._say("time")
            received, answered = _TIMES.unpack(_read(self._socket, _TIMES.size))
            back = clock()
            round_trip = (back - sent) - (answered - received)
            if round_trip < best[1]:
                best = (((received - sent) + (answered - back)) / 2, round_trip)
        return best

    def send_rate(self) -> float:
        """Bytes per second from here to there."""
        return self._rate(self._send)

    def receive_rate(self) -> float:
        """Bytes per second from there to here."""
        return self._rate(self._receive)

    def _rate(self, transfer: Callable[[int], None]) -> float:
        began = time.perf_counter()
        transfer(_PROBE_BYTES)
        took = max(time.perf_counter() - began, 1e-6)
        size = int(min(max(_PROBE_BYTES, _PROBE_BYTES * _ABOUT_SECONDS / took), _MOST_BYTES))
        began = time.perf_counter()
        transfer(size)
        return size / max(time.perf_counter() - began, 1e-9)

    def _send(self, size: int) -> None:
        self._say("take", size)
        _give(self._socket, size)
        _read(self._socket, 1)  # counts from the first byte sent to the last received

    def _receive(self, size: int) -> None:
        self._say("give", size)
        _take(self._socket, size)

    def _say(self, kind: str, size: int = 0) -> None:
        line = json.dumps({"token": self._token, "kind": kind, "bytes": size})
        self._socket.sendall(line.encode() + b"\n")


def _read_line(connection: socket.socket) -> dict[str, Any]:
    """A line of JSON; {} at the end. Byte by byte: what follows the line is data."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) > _LINE:
            return {}
        line += byte
    said = json.loads(line)
    return said if isinstance(said, dict) and isinstance(said.get("kind"), str) else {}


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise OSError("the other side went away")
        data += part
    return data


def _give(connection: socket.socket, size: int) -> None:
    block = memoryview(bytes(min(size, _BLOCK)))
    while size > 0:
        part = block[: min(size, _BLOCK)]
        connection.sendall(part)
        size -= len(part)


def _take(connection: socket.socket, size: int) -> None:
    block = memoryview(bytearray(min(max(size, 1), _BLOCK)))
    while size > 0:
        count = connection.recv_into(block[: min(size, _BLOCK)])
        if count == 0:
            raise OSError("the other side went away")
        size -= count
