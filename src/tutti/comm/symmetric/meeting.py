"""Ranks of a group tell each other a few values through its store, before memory is shared."""

import os
import socket
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tutti.comm.symmetric.errors import Timeout
from tutti.machine.environment import boot_id
from tutti.world.errors import RanksDiffer, UsageError
from tutti.world.exchange import RanksMissing, gather_json_from_store


class Meeting:
    """One meeting of all ranks of a group. Made on every rank, in the same order."""

    def __init__(self, group: dist.ProcessGroup, purpose: str, timeout: float) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.timeout = timeout
        self._purpose = purpose
        store = distributed_c10d._get_process_group_store(group)
        # Each rank counts its own meetings, so that the next one uses other keys on all ranks.
        self.number = store.add(f"tutti/{purpose}/meetings/{self.rank}", 1)
        self._store = dist.PrefixStore(f"tutti/{purpose}/{self.number}", store)
        self._rounds = 0

    def tell(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Values travel as JSON."""
        self._rounds += 1
        try:
            values = gather_json_from_store(
                self._store, str(self._rounds), value, self.rank, self.size, self.timeout
            )
        except RanksMissing as missing:
            raise Timeout(
                f"{self._purpose}: rank {self.rank} waited {self.timeout} s for "
                f"{_ranks(missing.ranks)}: call it on every rank of the group"
            ) from None
        if self._rounds > 1:  # all have come to this round, so nobody reads the one before
            self._store.delete_key(f"{self._rounds - 1}/{self.rank}")
        return values

    def introduce(
        self, heap: list[int], failure: str | None, more: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Every rank's card: who and where it is, the heap it asks for, and what went wrong."""
        card = {
            "heap": heap,
            "failure": failure,
            "host": socket.gethostname(),
            "boot": boot_id(),
            "pid": os.getpid(),
        }
        return self.tell(card | more)

    def end(self) -> None:
        """Take this rank's last value out of the store; call it when all ranks have read it."""
        self._store.delete_key(f"{self._rounds}/{self.rank}")


def refuse_different_heaps(cards: list[dict[str, Any]]) -> None:
    """Raise, the same on all ranks, if one failed or asks for another heap."""
    for rank, card in enumerate(cards):
        (bytes, signals), (first_bytes, first_signals) = card["heap"], cards[0]["heap"]
        if card["heap"] != cards[0]["heap"]:
            raise RanksDiffer(
                f"rank 0 makes a heap of {first_bytes} bytes and {first_signals} signals, rank "
                f"{rank} one of {bytes} bytes and {signals} signals: give all ranks the same"
            )
    for rank, card in enumerate(cards):
        if card["failure"] is not None:
            raise UsageError(f"no heap for rank {rank} on {card['host']}: {card['failure']}")


def refuse_different_calls(calls: list[str]) -> None:
    """Raise, the same on all ranks, unless all make the same call."""
    for rank, call in enumerate(calls):
        if call != calls[0]:
            raise RanksDiffer(
                f"rank 0 calls {calls[0]}, rank {rank} calls {call}: make, fill and free the "
                "tensors of a heap in the same order and with the same sizes on every rank"
            )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
