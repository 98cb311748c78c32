"""Exchanges values between the ranks that create a heap, through the store of their process group.

Also defines the errors that a wait can raise.
"""

import os
import socket
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tutti.comm.shm.native import PeerDied, PeerLeft
from tutti.machine.environment import boot_id
from tutti.world.errors import RanksDiffer, UsageError, name_ranks
from tutti.world.exchange import RanksMissing, gather_json_from_store


class Timeout(TimeoutError):
    """A wait took longer than its timeout. The message names the rank and the timeout."""


def lost_peer(kind: type[PeerDied | PeerLeft], rank: int, waiting_for: str) -> PeerDied | PeerLeft:
    """Return the error for a peer that died or closed the heap while this rank waited for it."""
    died = kind is PeerDied
    error = kind(
        f"rank {rank} {'died' if died else 'closed the heap'} while this rank waited for "
        f"{waiting_for}" + ("" if died else ". Close the heap on all ranks together")
    )
    error.rank = rank
    return error


class HeapRendezvous:
    """Exchanges values between all ranks of a group.

    All ranks must create their heaps in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._timeout = timeout
        store = distributed_c10d._get_process_group_store(group)
        # Each rank counts its own heaps. The count is part of the keys, so each heap has its own
        # keys. The count of a heap, and so its keys, are the same on all ranks.
        self.number = store.add(f"tutti/symmetric.Heap/count/{self.rank}", 1)
        self._store = dist.PrefixStore(f"tutti/symmetric.Heap/{self.number}", store)
        self._rounds = 0

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. `value` must be JSON-serializable."""
        self._rounds += 1
        try:
            values = gather_json_from_store(
                self._store, str(self._rounds), value, self.rank, self.size, self._timeout
            )
        except RanksMissing as missing:
            raise Timeout(
                f"symmetric.Heap: rank {self.rank} waited {self._timeout} s for "
                f"{name_ranks(missing.ranks)}. Every rank of the group must make this call"
            ) from None
        if self._rounds > 1:  # all ranks have read the values of the previous round
            self._store.delete_key(f"{self._rounds - 1}/{self.rank}")
        return values

    def exchange_rank_info(
        self, bytes: int, signals: int, failure: str | None, **details: Any
    ) -> list[dict[str, Any]]:
        """Return the host, boot id, pid, heap size, failure and details of every rank.

        `failure` is the reason why this rank cannot create the heap, or None. All ranks raise the
        same error if the heap sizes differ or if a rank has failed.
        """
        process = {"host": socket.gethostname(), "boot": boot_id(), "pid": os.getpid()}
        ranks = self.exchange({"heap": [bytes, signals], "failure": failure} | process | details)
        first = ranks[0]["heap"]
        for rank, values in enumerate(ranks):
            if values["heap"] != first:
                raise RanksDiffer(
                    "rank 0 creates a heap of {} bytes and {} signals, but rank {} creates a heap "
                    "of {} bytes and {} signals. Use the same sizes on all ranks".format(
                        *first, rank, *values["heap"]
                    )
                )
        for rank, values in enumerate(ranks):
            if values["failure"] is not None:
                raise UsageError(
                    f"rank {rank} on {values['host']} cannot create a heap: {values['failure']}"
                )
        return ranks

    def end(self) -> None:
        """Delete this rank's last value from the store. Call this when all ranks have read it."""
        self._store.delete_key(f"{self._rounds}/{self.rank}")

    @staticmethod
    def check_same_calls(calls: list[str]) -> None:
        """Raise the same error on all ranks if the ranks make different calls."""
        for rank, call in enumerate(calls):
            if call != calls[0]:
                raise RanksDiffer(
                    f"rank 0 calls {calls[0]}, but rank {rank} calls {call}. Create and free the "
                    "tensors of a heap in the same order and with the same sizes on every rank"
                )
