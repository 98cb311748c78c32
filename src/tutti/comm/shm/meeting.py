"""Members of a group find each other through its store and connect where they share memory.

Whether two ranks are on one host is found out by trying: each opens a tiny memfd of the other
through /proc and reads a random number there. Host names, boot ids and variables such as
LOCAL_WORLD_SIZE all have cases in which they are wrong; they only appear in messages here.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tutti.comm.shm import native
from tutti.machine.environment import boot_id
from tutti.world.errors import UsageError

Card = dict[str, Any]
_TOKEN_BYTES = 8
_PROBE = "tutti-probe"


@dataclass(frozen=True)
class Meeting:
    """Who is where, and this rank's group with those on its host."""

    rank: int
    hosts: tuple[tuple[int, ...], ...]  # the ranks of each host, hosts by their lowest rank
    names: tuple[str, ...]  # the host name of each rank
    store: dist.Store  # for nothing but this group, even if another had the same name before
    group: int = 0  # address of the core's group of this host's ranks

    @property
    def host(self) -> int:
        """Which of the hosts is this rank's."""
        return next(i for i, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks on this host, this one included."""
        return self.hosts[self.host]


def shares_memory(card: Card) -> bool:
    """Whether the process that wrote this card runs where its memory can be opened."""
    path = f"/proc/{card['pid']}/fd/{card['fd']}"
    try:
        # In another PID namespace the number may be a stranger's: never open what may block.
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


def meet(
    store: dist.Store,
    rank: int,
    size: int,
    name: str,
    timeout_s: float,
    *,
    staging_bytes: int = 0,
    can_open: Callable[[Card], bool] = shares_memory,
) -> Meeting:
    """Find all members and connect to those on this host; every member calls this.

    `staging_bytes` of 0 leaves the size to the core. `can_open` says whether a peer's memory is
    in reach.
    """
    # A store may outlive a group and serve the next one of the same name.
    turn = (store.add("arrivals", 1) - 1) // size
    store = dist.PrefixStore(f"{turn}/", store)
    table = _Table(store, rank, size, name, timeout_s)
    token = secrets.randbits(8 * _TOKEN_BYTES - 1)
    with _probe(token) as fd:
        host = socket.gethostname()
        mine = {"host": host, "boot": boot_id(), "pid": os.getpid(), "fd": fd, "token": token}
        cards = table.share("card", mine)
        seen = [p for p in range(size) if p == rank or can_open(cards[p])]
        sights = table.share("seen", seen)
    names = tuple(str(card["host"]) for card in cards)
    hosts = _hosts(sights, names)
    meeting = Meeting(rank, hosts, names, store)
    return replace(meeting, group=_connect(meeting, cards, table, name, staging_bytes))


def _hosts(sights: list[list[int]], names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Ranks that all see each other, as a partition; every rank computes the same."""
    mutual = [
        tuple(p for p in seen if rank in sights[p]) for rank, seen in enumerate(map(sorted, sights))
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


def _connect(
    meeting: Meeting, cards: list[Card], table: "_Table", name: str, staging_bytes: int
) -> int:
    core = native.core()
    ranks = meeting.neighbours
    token = int(cards[ranks[0]]["token"])
    own = ranks.index(meeting.rank)
    group = core.tutti_group_create(name.encode(), own, len(ranks), staging_bytes, token)
    where = {"error": core.tutti_error().decode()}
    if group:
        where = {
            "pid": os.getpid(),
            "fd": core.tutti_group_fd(group),
            "bytes": core.tutti_group_bytes(group),
        }
    try:
        places = table.share("group", where)
        for rank, place in enumerate(places):
            if "error" in place:
                raise UsageError(
                    f"rank {rank} on {meeting.names[rank]} could not make group {name}: "
                    f"{place['error']}"
                )
        failure = None
        for peer, rank in enumerate(ranks):
            if rank == meeting.rank:
                continue
            at = places[rank]
            code = core.tutti_group_connect(group, peer, at["pid"], at["fd"], at["bytes"])
            if code != 0:
                failure = (
                    f"rank {meeting.rank} could not connect to rank {rank} on "
                    f"{meeting.names[rank]}: {core.tutti_error().decode()}"
                )
                break
        # Nobody goes on, and perhaps ends, before all have opened its memory.
        for text in table.share("connected", failure):
            if text is not None:
                raise UsageError(text)
    except BaseException:
        if group:
            core.tutti_group_close(group)
        raise
    return int(group)


class _Table:
    """Where every member lays something down and sees what all the others laid down."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, name: str, timeout_s: float
    ) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.name, self.timeout_s = name, timeout_s
        self.deadline = time.monotonic() + timeout_s

    def share(self, topic: str, value: Any) -> list[Any]:
        """Every member's value in rank order. By way of rank 0: n messages rather than n²."""
        self.store.set(f"{topic}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            missing = [rank for rank in range(self.size) if not self._arrives(f"{topic}/{rank}")]
            said = [
                None if rank in missing else json.loads(self.store.get(f"{topic}/{rank}"))
                for rank in range(self.size)
            ]
            self.store.set(f"{topic}/all", json.dumps({"missing": missing, "said": said}))
        elif not self._arrives(f"{topic}/all", extra_s=1.0):  # rank 0 may have news at the deadline
            self._late([0])
        everything = json.loads(self.store.get(f"{topic}/all"))
        if everything["missing"]:
            self._late(everything["missing"])
        return list(everything["said"])

    def _arrives(self, key: str, extra_s: float = 0.0) -> bool:
        left = max(0.001, self.deadline + extra_s - time.monotonic())
        with suppress(dist.DistStoreError, RuntimeError):
            self.store.wait([key], timedelta(seconds=left))
            return True
        return False

    def _late(self, ranks: list[int]) -> None:
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        raise native.ShmTimeout(
            f"group {self.name} of {self.size} ranks: {who} did not come within "
            f"{self.timeout_s:g} s to connect: did all ranks call init_process_group or new_group, "
            "in the same order?"
        )


@contextmanager
def _probe(token: int) -> Iterator[int]:
    fd = os.memfd_create(_PROBE)
    try:
        os.write(fd, token.to_bytes(_TOKEN_BYTES))
        yield fd
    finally:
        os.close(fd)
