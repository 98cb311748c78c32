"""How the ranks of a group set up a heap through the group's store, and errors for lost peers."""

import os
import socket
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tutti.comm.shm.native import PeerDied, PeerLeft
from tutti.machine.environment import boot_id
from tutti.world.errors import RanksDiffer, UsageError
from tutti.world.exchange import RanksMissing, gather_json_from_store, name_ranks


class Timeout(TimeoutError):
    """A wait took longer than its timeout; the message names the rank and the seconds."""


def lost_peer(kind: type[PeerDied | PeerLeft], rank: int, waiting_for: str) -> PeerDied | PeerLeft:
    """The error for a peer that died, or that closed the heap, while this rank waited for it."""
    died = kind is PeerDied
    error = kind(
        f"rank {rank} {'died' if died else 'closed the heap'} while this rank waited for "
        f"{waiting_for}" + ("" if died else ": close it on all ranks together")
    )
    error.rank = rank
    return error


class HeapRendezvous:
    """Exchanges values between all ranks of a group through its store.

    All ranks create their objects in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, purpose: str, timeout: float) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.timeout = timeout
        self._purpose = purpose
        store = distributed_c10d._get_process_group_store(group)
        # Each rank counts its own heaps. The count is part of the keys, so every heap has its own
        # keys, which are the same on all ranks.
        self.number = store.add(f"tutti/{purpose}/count/{self.rank}", 1)
        self._store = dist.PrefixStore(f"tutti/{purpose}/{self.number}", store)
        self._rounds = 0

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, as JSON."""
        self._rounds += 1
        try:
            values = gather_json_from_store(
                self._store, str(self._rounds), value, self.rank, self.size, self.timeout
            )
        except RanksMissing as missing:
            raise Timeout(
                f"{self._purpose}: rank {self.rank} waited {self.timeout} s for "
                f"{name_ranks(missing.ranks)}: call it on every rank of the group"
            ) from None
        if self._rounds > 1:  # all ranks are in this round, so none still reads the previous one
            self._store.delete_key(f"{self._rounds - 1}/{self.rank}")
        return values

    def introduce(
        self, heap: list[int], failure: str | None, more: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Exchange every rank's process, host, heap parameters and failure (None: no failure)."""
        mine = {
            "heap": heap,
            "failure": failure,
            "host": socket.gethostname(),
            "boot": boot_id(),
            "pid": os.getpid(),
        }
        return self.exchange(mine | more)

    def end(self) -> None:
        """Delete this rank's last value from the store; call it when all ranks have read it."""
        self._store.delete_key(f"{self._rounds}/{self.rank}")


def refuse_different_heaps(ranks: list[dict[str, Any]]) -> None:
    """Raise the same error on all ranks if one failed or has other heap parameters."""
    first = ranks[0]["heap"]
    for rank, each in enumerate(ranks):
        if each["heap"] != first:
            raise RanksDiffer(
                "rank 0 makes a heap of {} bytes and {} signals, rank {} one of {} bytes and {} "
                "signals: give all ranks the same".format(*first, rank, *each["heap"])
            )
    for rank, each in enumerate(ranks):
        if each["failure"] is not None:
            raise UsageError(f"no heap for rank {rank} on {each['host']}: {each['failure']}")


def refuse_different_calls(calls: list[str]) -> None:
    """Raise the same error on all ranks unless all make the same call."""
    for rank, call in enumerate(calls):
        if call != calls[0]:
            raise RanksDiffer(
                f"rank 0 calls {calls[0]}, rank {rank} calls {call}: make, fill and free the "
                "tensors of a heap in the same order and with the same sizes on every rank"
            )
