"""Who is late, at which operation, and where: what an error of a backend does not say."""

import json
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d as c10d

from tutti.comm import ledger
from tutti.comm.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout
from tutti.comm.ledger_reader import Account, Record, read_ledger
from tutti.world.errors import RanksDiffer

if TYPE_CHECKING:
    from tutti.comm.members import Members
    from tutti.comm.operation import Operation

_TIMEOUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
# The shm backend knows its peers: it says itself who is late, and who called something else.
_DIFFERENCE = re.compile(r"differs between ranks: rank \d")
_NAMES_RANKS = re.compile(r"waiting for rank \d")


def failure(operation: "Operation", number: int, error: Exception) -> CollectiveError:
    """The error to raise for a backend's error: the operation, its place, and who is late."""
    waited = ledger.seconds_since_begin(number)
    ledger.mark(number, ledger.FAILED)
    said = str(error).strip()
    what = f"{operation} at {operation.place}"
    if isinstance(error, RanksDiffer) or _DIFFERENCE.search(said):
        return CollectiveMismatch(f"{what} failed: {said}")
    if not _TIMEOUT.search(said):
        return CollectiveError(f"{what} failed: {said}")
    if _NAMES_RANKS.search(said):
        return CollectiveTimeout(f"{what} timed out: {said}")
    rank = operation.members.rank
    return CollectiveTimeout(
        f"{what} timed out after {waited:.1f} s on rank {rank}: {whereabouts(operation)} "
        f"(the backend said: {said.splitlines()[0]})"
    )


def whereabouts(operation: "Operation") -> str:
    """What the other ranks of an operation are doing, those that have not arrived first."""
    members = operation.members
    others = [rank for rank in range(members.size) if rank != members.rank]
    if operation.is_message and operation.root >= 0:
        others = [operation.root]
    arrived, absent = [], []
    for rank in others:
        news = _absence(operation, rank)
        arrived.append(rank) if news is None else absent.append(f"{_named(members, rank)} {news}")
    if arrived:
        ranks = f"rank {arrived[0]} has" if len(arrived) == 1 else f"ranks {_listed(arrived)} have"
        absent.append(f"{ranks} arrived")
    return "; ".join(absent)


def absence_of(members: "Members", rank: int) -> str:
    """What a rank that has not come is doing, as far as it can be seen from here."""
    account = _account(members, rank)
    return account if isinstance(account, str) else f"has not come ({_state(account, members)})"


def _absence(operation: "Operation", rank: int) -> str | None:
    """Why a rank is missing from the operation; None if it is there."""
    members = operation.members
    account = _account(members, rank)
    if isinstance(account, str):
        return account
    if operation.is_message:  # each side counts its own messages: only the picture helps
        return f"has not met it ({_state(account, members)})"
    circle = account.circle(members.name)
    if circle is None or circle.collectives < operation.sequence:
        return f"has not arrived ({_state(account, members)})"
    there = _record(account, members, operation.sequence)
    if there is not None and there.operation != operation.kind:
        return f"called {there} at {there.where} instead: comm.debug(True) finds such differences"
    return None


def _account(members: "Members", rank: int) -> Account | str:
    """The ledger of a rank of the group, or what is to be said of a rank without one."""
    world_rank = members.ranks[rank]
    key = f"tutti/ledger/{world_rank}"
    try:
        store = c10d._get_default_store()
        if not store.check([key]):
            return "has not called tutti.comm yet, so that nothing is known of it"
        address = json.loads(store.get(key))
    except (RuntimeError, ValueError) as error:
        return f"cannot be asked for: the store is gone, and rank 0 with it? ({error})"
    if not ledger.is_near(address):
        return f"is on host {address['host']}: `tutti world --ledger` there shows where"
    if not Path(f"/proc/{address['pid']}").exists():
        return f"has ended (pid {address['pid']} on {socket.gethostname()})"
    account = read_ledger(address["pid"], address["fd"], time.monotonic_ns())
    return account or f"(pid {address['pid']}) keeps its ledger from us: is it another user's?"


def _state(account: Account, members: "Members") -> str:
    """`pid 123: last all_gather 56, done 29.8 s ago; now at train.py:88 in step`."""
    said = f"pid {account.pid}: "
    mine = [record for record in account.records if record.group_name == members.name]
    if not mine:
        said += f"nothing yet in group {members.label}"
    elif mine[-1].ended is None:
        last = mine[-1]
        said += f"in {last.operation} {last.sequence} at {last.where} for {last.age:.1f} s"
    else:
        last = mine[-1]
        said += f"last {last.operation} {last.sequence}, {last.state} {last.ended:.1f} s ago"
    if account.place:
        said += f"; at {account.place}, seen {account.place_age:.1f} s ago"
    return said


def _record(account: Account, members: "Members", sequence: int) -> Record | None:
    for record in account.records:
        is_message = record.operation in ("send", "recv")
        if record.group_name == members.name and not is_message and record.sequence == sequence:
            return record
    return None


def _named(members: "Members", rank: int) -> str:
    world_rank = members.ranks[rank]
    return f"rank {rank}" if world_rank == rank else f"rank {rank} (rank {world_rank} of the world)"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
