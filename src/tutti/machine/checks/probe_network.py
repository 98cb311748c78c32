"""Probes between ranks over TCP sockets: open ports, clock offsets and the rate of every link.

The probes do not use gloo or NCCL, which would hang if the network has a fault. Every rank runs a
small server. The kernel assigns the port of the server, as it does for gloo and NCCL. A request is
one line of JSON with a secret token that only the ranks of this world know. Every wait has a
timeout.
"""

import contextlib
import json
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import BufferedIOBase
from itertools import combinations, pairwise
from typing import Any, Literal, TypeVar

from tutti.machine.checks.cluster import ClockOffset, Connection, MeasuredRate
from tutti.machine.checks.outliers import slow_links

_CONNECT_SECONDS = 3.0
_REPLY_SECONDS = 10.0
_MAX_LINE = 512
_BLOCK = 1 << 20
_MAX_REQUEST_BYTES = 1 << 30
_TIMESTAMPS = struct.Struct("!dd")
_ROUND_TRIPS = 32
# A first small transfer gives an estimate of the rate. The size of the measured transfer is chosen
# so that the transfer takes about 40 ms.
_FIRST_BYTES, _MAX_BYTES, _TRANSFER_SECONDS = 1 << 18, 1 << 26, 0.04
# In a world with more ranks than this, only one rank per host measures links to other hosts.
_MAX_RANKS_ALL_PAIRS = 8
_ROUNDS, _REPEATS_OF_SLOW = 3, 3

Row = TypeVar("Row")
Pairs = list[tuple[int, int]]


@dataclass(frozen=True)
class Peers:
    """This rank, the host of every rank, and a function that exchanges values between all ranks."""

    rank: int
    hosts: Sequence[int]
    """The host index of each rank. Hosts are numbered in the order of their lowest rank."""
    gather: Callable[[Any], list[Any]]
    """A function that all-gathers JSON values, in rank order. A call is also a barrier."""
    address: str = "127.0.0.1"
    """The address at which other ranks can reach this rank."""

    @property
    def host(self) -> int:
        """The host of this rank."""
        return self.hosts[self.rank]

    @property
    def first_ranks(self) -> list[int]:
        """The lowest rank of each host."""
        return [self.hosts.index(host) for host in range(max(self.hosts) + 1)]

    def gather_rows(self, kind: Callable[..., Row], rows: Iterable[Row]) -> tuple[Row, ...]:
        """All-gather dataclass instances of type `kind`. Return them in rank order."""
        gathered = self.gather([asdict(row) for row in rows])  # type: ignore[call-overload]
        return tuple(kind(**values) for rows_of_rank in gathered for values in rows_of_rank)


@dataclass(frozen=True)
class Endpoint:
    """Address, port and token of a rank's probe server."""

    address: str
    port: int
    token: str


# --- server and client ---------------------------------------------------------------------------


class ProbeServer(socketserver.ThreadingTCPServer):
    """A server that answers probe requests until close() is called, in one thread per client."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: str, clock: Callable[[], float] = time.time) -> None:
        super().__init__(("", 0), _RequestHandler)
        self.clock = clock
        self.endpoint = Endpoint(address, self.server_address[1], secrets.token_hex(16))
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors caused by clients that disconnect or are not ranks of this world."""

    def close(self) -> None:
        """Stop accepting connections."""
        self.shutdown()
        self.server_close()


class _RequestHandler(socketserver.StreamRequestHandler):
    timeout = _REPLY_SECONDS
    disable_nagle_algorithm = True
    server: ProbeServer

    def handle(self) -> None:
        while line := self.rfile.readline(_MAX_LINE):
            request = json.loads(line)
            if request["token"] != self.server.endpoint.token:
                return
            size = min(request["bytes"], _MAX_REQUEST_BYTES)
            if request["kind"] == "hello":
                self.connection.sendall(b"y")
            elif request["kind"] == "time":
                received = self.server.clock()
                self.connection.sendall(_TIMESTAMPS.pack(received, self.server.clock()))
            elif request["kind"] == "receive":
                _receive_bytes(self.rfile, size)
                self.connection.sendall(b"y")
            elif request["kind"] == "send":
                _send_bytes(self.connection, size)


class ProbeClient(contextlib.ExitStack):
    """A connection to the probe server of a rank. A `with` statement closes the connection."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__()
        self._token = endpoint.token
        address = (endpoint.address, endpoint.port)
        self._socket = self.enter_context(socket.create_connection(address, _CONNECT_SECONDS))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.enter_context(self._socket.makefile("rb"))

    def hello(self) -> None:
        """Raise OSError if the probe server of the expected rank does not answer."""
        self._request("hello")
        if self._file.read(1) != b"y":
            raise OSError("another program listens there")
        self._socket.settimeout(_REPLY_SECONDS)

    def clock_offset(self) -> tuple[float, float]:
        """Return (offset of the server's clock from this host's clock, round-trip time).

        Both values are in seconds. The offset is positive if the server's clock is ahead. The
        method is Cristian's algorithm: it takes the fastest of 32 round trips, and assumes that the
        server reads its clock in the middle of the round trip. The error of the offset is at most
        half of the round-trip time.
        """
        best = (0.0, float("inf"))
        for _ in range(_ROUND_TRIPS):
            sent = time.time()
            self._request("time")
            received, answered = _TIMESTAMPS.unpack(_read_exactly(self._file, _TIMESTAMPS.size))
            returned = time.time()
            round_trip = (returned - sent) - (answered - received)
            if round_trip < best[1]:
                best = (((received - sent) + (answered - returned)) / 2, round_trip)
        return best

    def rate(self, server_action: Literal["send", "receive"]) -> float:
        """Return the rate from the server ("send") or to the server ("receive") in bytes/s."""
        seconds = self._transfer(server_action, _FIRST_BYTES)
        size = int(_FIRST_BYTES * _TRANSFER_SECONDS / max(seconds, 1e-6))
        size = min(max(_FIRST_BYTES, size), _MAX_BYTES)
        return size / max(self._transfer(server_action, size), 1e-9)

    def _transfer(self, server_action: str, size: int) -> float:
        """Transfer `size` bytes and return the time in seconds."""
        start = time.perf_counter()
        self._request(server_action, size)
        if server_action == "send":
            _receive_bytes(self._file, size)
        else:
            _send_bytes(self._socket, size)
            _read_exactly(self._file, 1)  # wait until the server has received the last byte
        return time.perf_counter() - start

    def _request(self, kind: str, size: int = 0) -> None:
        line = json.dumps({"token": self._token, "kind": kind, "bytes": size})
        self._socket.sendall(line.encode() + b"\n")


def _read_exactly(stream: BufferedIOBase, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise OSError("the peer closed the connection")
    return data


def _send_bytes(connection: socket.socket, size: int) -> None:
    block = memoryview(bytes(min(size, _BLOCK)))
    for start in range(0, size, _BLOCK):
        connection.sendall(block[: size - start])


def _receive_bytes(stream: BufferedIOBase, size: int) -> None:
    for start in range(0, size, _BLOCK):
        _read_exactly(stream, min(size - start, _BLOCK))


# --- probes --------------------------------------------------------------------------------------


def connect_hosts(peers: Peers, endpoints: Sequence[Endpoint]) -> tuple[Connection, ...]:
    """Connect every host to every other host, and return the results.

    All connections are made at the same time.
    """

    def connect(rank: int) -> Connection:
        return Connection(peers.host, peers.hosts[rank], connection_error(endpoints[rank]))

    found: list[Connection] = []
    if peers.rank in peers.first_ranks:
        with ThreadPoolExecutor(16) as pool:
            found += pool.map(connect, [rank for rank in peers.first_ranks if rank != peers.rank])
    return peers.gather_rows(Connection, found)


def connection_error(endpoint: Endpoint) -> str | None:
    """Return the reason why an endpoint cannot be reached, or None if its probe server answers."""
    try:
        with ProbeClient(endpoint) as client:
            client.hello()
    except TimeoutError:
        return f"no answer at {endpoint.address} port {endpoint.port}"
    except OSError as error:
        return f"{error.strerror or error} at {endpoint.address} port {endpoint.port}"
    return None


def measure_clock_offsets(peers: Peers, endpoints: Sequence[Endpoint]) -> tuple[ClockOffset, ...]:
    """Return the clock offset of each host from host 0.

    Hosts are measured one after another, because concurrent traffic would slow the round trips.
    """
    found: list[ClockOffset] = []
    for rank in peers.first_ranks[1:]:
        if peers.rank == rank:
            # Errors are ignored, because the check network.calls reports hosts that cannot connect.
            with contextlib.suppress(OSError), ProbeClient(endpoints[0]) as client:
                client.hello()
                ahead, round_trip = client.clock_offset()
                found.append(ClockOffset(peers.host, -ahead, round_trip))
        peers.gather(None)
    return peers.gather_rows(ClockOffset, found)


def measure_links(
    peers: Peers, endpoints: Sequence[Endpoint], connections: Sequence[Connection] = ()
) -> tuple[MeasuredRate, ...]:
    """Return the rates of the links between ranks, in both directions.

    The rate of a link is the best rate of several rounds. Slow links are measured again, because
    other traffic rarely slows the same link twice, whereas a faulty link is slow every time. Pairs
    of hosts that cannot connect are left out, because the check network.calls reports them.
    """
    hosts = peers.hosts
    disconnected = {frozenset((c.src, c.dst)) for c in connections if c.error is not None}
    pairs = [
        (low, high)
        for low, high in link_pairs(hosts)
        if frozenset((hosts[low], hosts[high])) not in disconnected
    ]
    host_of_rank = {str(rank): host for rank, host in enumerate(hosts)}
    best: dict[str, float] = {}
    for _ in range(_ROUNDS):
        _measure_pairs(peers, endpoints, pairs, best)
    for _ in range(_REPEATS_OF_SLOW):
        slow_hosts, slow = slow_links(_link_rates(best, hosts), host_of_rank)
        again = [
            (low, high)
            for low, high in pairs
            if {f"{low}-{high}", f"{high}-{low}"} & set(slow)
            or {hosts[low], hosts[high]} & set(slow_hosts)
        ]
        if not again:
            break
        _measure_pairs(peers, endpoints, again, best)
    return _link_rates(best, hosts)


def link_pairs(hosts: Sequence[int]) -> Pairs:
    """Return the pairs of ranks to measure.

    In a world of at most 8 ranks, these are all pairs. In a larger world, these are all pairs of
    the first ranks of hosts, and all pairs of adjacent ranks on each host.
    """
    all_pairs = list(combinations(range(len(hosts)), 2))
    if len(hosts) <= _MAX_RANKS_ALL_PAIRS:
        return all_pairs
    first_ranks = {hosts.index(host) for host in hosts}
    ranks_of = [[rank for rank, h in enumerate(hosts) if h == host] for host in set(hosts)]
    adjacent = {pair for ranks in ranks_of for pair in pairwise(ranks)}
    return [pair for pair in all_pairs if set(pair) <= first_ranks or pair in adjacent]


def _measure_pairs(
    peers: Peers, endpoints: Sequence[Endpoint], pairs: Pairs, best: dict[str, float]
) -> None:
    """Measure pairs of ranks, and keep the best rate of each direction in `best`."""
    for concurrent in concurrent_pairs(pairs, peers.hosts):
        found: dict[str, float] = {}
        for low, high in concurrent:
            if peers.rank == low:
                found = {f"{low}-{high}": 0.0, f"{high}-{low}": 0.0}
                with contextlib.suppress(OSError), ProbeClient(endpoints[high]) as client:
                    client.hello()
                    found[f"{low}-{high}"] = client.rate("receive")
                    found[f"{high}-{low}"] = client.rate("send")
        for rates in peers.gather(found):
            for name, value in rates.items():
                best[name] = max(best.get(name, 0.0), value)


def concurrent_pairs(pairs: Pairs, hosts: Sequence[int]) -> list[Pairs]:
    """Divide pairs into groups that are measured at the same time.

    A group contains each host at most once.
    """
    rest, groups = list(pairs), []
    while rest:
        busy: set[int] = set()
        group = []
        for pair in rest:
            needed = {hosts[rank] for rank in pair}
            if not needed & busy:
                busy |= needed
                group.append(pair)
        rest = [pair for pair in rest if pair not in group]
        groups.append(group)
    return groups


def _link_rates(best: dict[str, float], hosts: Sequence[int]) -> tuple[MeasuredRate, ...]:
    rates = []
    for name, value in best.items():
        src, dst = (hosts[int(rank)] for rank in name.split("-"))
        rates.append(MeasuredRate(name, src, "loopback" if src == dst else "network", value))
    return tuple(rates)
