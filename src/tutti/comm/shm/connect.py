"""How the ranks of a group find each other through its store and connect through shared memory.

Two ranks share a host if each can open a tiny memfd of the other through /proc and read a random
number from it. Host names, boot ids and variables such as LOCAL_WORLD_SIZE are not used, because in
some cases they are wrong.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from tutti.comm.shm import native
from tutti.world.errors import UsageError
from tutti.world.exchange import RanksMissing, gather_json_from_store, name_ranks

Card = dict[str, Any]  # host, pid, fd and token of a rank, published in the store
Gather = Callable[[str, Any], list[Any]]  # (topic, value) to the values of all ranks
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
        with open(path, "rb", buffering=0) as probe:
            return probe.read(_TOKEN_BYTES) == int(card["token"]).to_bytes(_TOKEN_BYTES)
    except OSError:
        return False


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
    """Find all ranks of a group and connect to the ranks on this host; every rank calls this.

    With staging_bytes=0 the core chooses the size. `can_open` returns whether a peer's memory can
    be opened. A rank that cannot use shm passes the reason as `unavailable`; all ranks receive the
    reason.
    """
    # A store may outlive a group and be used again by the next group of the same name.
    generation = (store.add("arrivals", 1) - 1) // size
    store = dist.PrefixStore(f"{generation}/", store)
    deadline = time.monotonic() + timeout_s

    def gather(topic: str, value: Any) -> list[Any]:
        left = max(0.001, deadline - time.monotonic())
        try:
            return gather_json_from_store(store, topic, value, rank, size, left)
        except RanksMissing as missing:
            raise native.ShmTimeout(
                f"group {name} of {size} ranks: {name_ranks(missing.ranks)} did not connect within "
                f"{timeout_s:g} s: did all ranks call init_process_group or new_group, in the same "
                "order?"
            ) from None

    token = secrets.randbits(8 * _TOKEN_BYTES - 1)
    fd = os.memfd_create(_PROBE)
    try:
        os.write(fd, token.to_bytes(_TOKEN_BYTES))
        card = {"host": socket.gethostname(), "pid": os.getpid(), "fd": fd, "token": token}
        cards = gather("card", card | {"unavailable": unavailable})
        names = tuple(str(card["host"]) for card in cards)
        for peer, card in enumerate(cards):
            if card["unavailable"]:
                reason = f"rank {peer} on {card['host']}: {card['unavailable']}"
                return Connection(rank, (), names, store, unavailable=reason)
        reachable = [p for p in range(size) if p == rank or can_open(cards[p])]
        all_reachable = gather("reachable", reachable)
    finally:
        os.close(fd)
    connection = Connection(rank, _hosts(all_reachable, names), names, store)
    token = int(cards[connection.neighbours[0]]["token"])
    return replace(connection, group=_make_group(connection, name, staging_bytes, token, gather))


def _hosts(reachable: list[list[int]], names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Partition the ranks into sets that can open each other's memory; the same on every rank."""
    mutual = [
        tuple(p for p in peers if rank in reachable[p])
        for rank, peers in enumerate(map(sorted, reachable))
    ]
    for rank, ranks in enumerate(mutual):
        for peer in ranks:
            if mutual[peer] != ranks:
                third = next(iter(set(mutual[peer]) ^ set(ranks)))
                raise UsageError(
                    f"ranks {rank} on {names[rank]} and {peer} on {names[peer]} share memory, but "
                    f"only one of them shares memory with rank {third} on {names[third]}: run all "
                    "ranks of a host as one user and in one PID namespace (container), or use "
                    "backend='gloo'"
                )
    return tuple(sorted(set(mutual)))


def _make_group(
    connection: Connection, name: str, staging_bytes: int, token: int, gather: Gather
) -> int:
    core = native.core()
    ranks, rank, names = connection.neighbours, connection.rank, connection.names
    local_rank = ranks.index(rank)
    group = core.tutti_group_create(name.encode(), local_rank, len(ranks), staging_bytes, token)
    segment = {"error": core.tutti_error().decode()}
    if group:
        segment = {"pid": os.getpid(), "fd": core.tutti_group_fd(group)}
        segment["bytes"] = core.tutti_group_bytes(group)
    try:
        segments = gather("group", segment)
        for peer, segment in enumerate(segments):
            if "error" in segment:
                reason = f"could not make group {name}: {segment['error']}"
                raise UsageError(f"rank {peer} on {names[peer]} {reason}")
        failure = None
        for local_peer, peer in enumerate(ranks):
            at = segments[peer]
            if peer == rank or failure is not None:
                continue
            if core.tutti_group_connect(group, local_peer, at["pid"], at["fd"], at["bytes"]) != 0:
                reason = core.tutti_error().decode()
                failure = f"rank {rank} could not connect to rank {peer} on {names[peer]}: {reason}"
        # No rank continues before all peers have opened its memory, because it may end soon after.
        for text in gather("connected", failure):
            if text is not None:
                raise UsageError(text)
    except BaseException:
        if group:
            core.tutti_group_close(group)
        raise
    return int(group)
