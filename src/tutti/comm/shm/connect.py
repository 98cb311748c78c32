"""How the ranks of a group find each other through its store and connect through shared memory.

Two ranks share a host if one can open the other's memory: each opens a tiny memfd of the other
through /proc and reads a random number from it. Host names, boot ids and variables such as
LOCAL_WORLD_SIZE are not used, because in some cases they are wrong.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from tutti.comm.shm import native
from tutti.world.errors import UsageError
from tutti.world.exchange import RanksMissing, gather_json_from_store, name_ranks

Card = dict[str, Any]  # what a rank publishes about itself
_TOKEN_BYTES = 8
_PROBE = "tutti-probe"


@dataclass(frozen=True)
class Connection:
    """The hosts of a group's ranks, and the core's group that connects the ranks of this host."""

    rank: int
    hosts: tuple[tuple[int, ...], ...]  # the ranks of each host; hosts are sorted by lowest rank
    names: tuple[str, ...]  # the host name of each rank
    store: dist.Store  # for this group only, even if an earlier group had the same name
    group: int = 0  # address of the core's group of this host's ranks
    unavailable: str = ""  # the reason if a rank cannot use shm: then no rank has made a group

    @property
    def host(self) -> int:
        """The index of this rank's host."""
        return next(i for i, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks on this host, including this rank."""
        return self.hosts[self.host]


def shares_memory(card: Card) -> bool:
    """Whether this process can open the memory of the process that wrote this card."""
    path = f"/proc/{card['pid']}/fd/{card['fd']}"
    try:
        # If the writer is in another PID namespace, its pid may be that of another process here.
        # Check the name first: opening an unknown file may block.
        if not os.readlink(path).startswith(f"/memfd:{_PROBE}"):
            return False
        probe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.read(probe, _TOKEN_BYTES) == int(card["token"]).to_bytes(_TOKEN_BYTES)
    except OSError:
        return False
    finally:
        os.close(probe)


def connect(
    store: dist.Store,
    rank: int,
    size: int,
    name: str,
    timeout_s: float,
    *,
    staging_bytes: int = 0,
    can_open: Callable[[Card], bool] = shares_memory,
    unavailable: str = "",
) -> Connection:
    """Find all ranks of a group and connect to those on this host; every rank calls this.

    With staging_bytes=0 the core chooses the size. `can_open` returns whether a peer's memory can
    be opened. A rank that cannot use shm passes the reason as `unavailable`; all ranks receive the
    reason.
    """
    # A store may outlive a group and be used again by the next group of the same name.
    turn = (store.add("arrivals", 1) - 1) // size
    store = dist.PrefixStore(f"{turn}/", store)
    exchange = _Exchange(store, rank, size, name, timeout_s)
    token = secrets.randbits(8 * _TOKEN_BYTES - 1)
    with _probe(token) as fd:
        card = {"host": socket.gethostname(), "pid": os.getpid(), "fd": fd, "token": token}
        cards = exchange.gather("card", card | {"unavailable": unavailable})
        names = tuple(str(each["host"]) for each in cards)
        for other, each in enumerate(cards):
            if each["unavailable"]:
                reason = f"rank {other} on {each['host']}: {each['unavailable']}"
                return Connection(rank, (), names, store, unavailable=reason)
        reachable = [p for p in range(size) if p == rank or can_open(cards[p])]
        all_reachable = exchange.gather("reachable", reachable)
    connection = Connection(rank, _hosts(all_reachable, names), names, store)
    return replace(connection, group=_make_group(connection, cards, exchange, name, staging_bytes))


def _hosts(reachable: list[list[int]], names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Partition the ranks into sets that can open each other's memory; the same on every rank."""
    mutual = [
        tuple(p for p in peers if rank in reachable[p])
        for rank, peers in enumerate(map(sorted, reachable))
    ]
    for rank, ranks in enumerate(mutual):
        for peer in ranks:
            if mutual[peer] != ranks:
                odd = next(iter(set(mutual[peer]) ^ set(ranks)))
                raise UsageError(
                    f"ranks {rank} on {names[rank]} and {peer} on {names[peer]} share memory, but "
                    f"only one of them does with rank {odd} on {names[odd]}: run all ranks of a "
                    "host as one user and in one PID namespace (container), or use backend='gloo'"
                )
    return tuple(sorted(set(mutual)))


def _make_group(
    connection: Connection, cards: list[Card], exchange: "_Exchange", name: str, staging_bytes: int
) -> int:
    core = native.core()
    ranks = connection.neighbours
    token = int(cards[ranks[0]]["token"])
    own = ranks.index(connection.rank)
    group = core.tutti_group_create(name.encode(), own, len(ranks), staging_bytes, token)
    segment = {"error": core.tutti_error().decode()}
    if group:
        place = {"fd": core.tutti_group_fd(group), "bytes": core.tutti_group_bytes(group)}
        segment = {"pid": os.getpid(), **place}
    try:
        segments = exchange.gather("group", segment)
        for rank, each in enumerate(segments):
            if "error" in each:
                raise UsageError(
                    f"rank {rank} on {connection.names[rank]} could not make group {name}: "
                    f"{each['error']}"
                )
        failure = None
        for peer, rank in enumerate(ranks):
            if rank == connection.rank:
                continue
            at = segments[rank]
            if core.tutti_group_connect(group, peer, at["pid"], at["fd"], at["bytes"]) != 0:
                failure = (
                    f"rank {connection.rank} could not connect to rank {rank} on "
                    f"{connection.names[rank]}: {core.tutti_error().decode()}"
                )
                break
        # No rank continues before all peers have opened its memory, because it may end soon after.
        for text in exchange.gather("connected", failure):
            if text is not None:
                raise UsageError(text)
    except BaseException:
        if group:
            core.tutti_group_close(group)
        raise
    return int(group)


class _Exchange:
    """Exchanges values between all ranks of a group through the store, all within one deadline."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, name: str, timeout_s: float
    ) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.name, self.timeout_s = name, timeout_s
        self.deadline = time.monotonic() + timeout_s

    def gather(self, topic: str, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        left = max(0.001, self.deadline - time.monotonic())
        try:
            return gather_json_from_store(self.store, topic, value, self.rank, self.size, left)
        except RanksMissing as missing:
            raise native.ShmTimeout(
                f"group {self.name} of {self.size} ranks: {name_ranks(missing.ranks)} did not "
                f"connect within {self.timeout_s:g} s: did all ranks call init_process_group or "
                "new_group, in the same order?"
            ) from None


@contextmanager
def _probe(token: int) -> Iterator[int]:
    fd = os.memfd_create(_PROBE)
    try:
        os.write(fd, token.to_bytes(_TOKEN_BYTES))
        yield fd
    finally:
        os.close(fd)
