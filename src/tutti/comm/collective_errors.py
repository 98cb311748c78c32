"""Collective errors that name the late ranks and their source lines, and debug mode.

A backend's error does not name the operation or its call site, and gloo's error does not name the
missing rank. `collective_error` adds this information from the ledgers of the ranks on this host.
In debug mode (comm.debug(True)), the ranks compare their calls before data is sent.
"""

import itertools
import json
import re
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d as c10d

from tutti.comm import ledger, operation, shm
from tutti.comm.ledger import ProcessLedger
from tutti.comm.operation import CommGroup, Operation
from tutti.world.errors import RanksDiffer, name_ranks

_TIMEOUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
# Errors of the shm backend already name late ranks and mismatched calls. These patterns recognize
# such errors.
_DIFFERENCE = re.compile(r"differs between ranks: rank \d")
_NAMES_RANKS = re.compile(r"waiting for rank \d")


def collective_error(
    call: Operation, seconds: float, error: Exception
) -> operation.CollectiveError:
    """Return the exception that replaces a backend's error.

    `seconds` is the time between the start of the operation and the backend's error.
    """
    message = str(error).strip()
    name = f"{call} at {call.where}"
    if isinstance(error, RanksDiffer) or _DIFFERENCE.search(message):
        return operation.CollectiveMismatch(f"{name} failed: {message}")
    if not _TIMEOUT.search(message):
        return operation.CollectiveError(f"{name} failed: {message}")
    if _NAMES_RANKS.search(message):
        return operation.CollectiveTimeout(f"{name} timed out: {message}")
    return operation.CollectiveTimeout(
        f"{name} timed out after {seconds:.1f} s on rank {call.comm_group.rank}: "
        f"{_other_ranks(call)} (error of the backend: {message.splitlines()[0]})"
    )


def _other_ranks(call: Operation) -> str:
    """Return the state of each other rank as text. Ranks that have not arrived come first."""
    comm_group = call.comm_group
    peers = [rank for rank in range(comm_group.size) if rank != comm_group.rank]
    if call.is_p2p and call.root >= 0:
        peers = [call.root]
    arrived, reports = [], []
    for rank in peers:
        report = _missing(call, rank)
        if report is None:
            arrived.append(rank)
            continue
        world_rank = comm_group.ranks[rank]
        in_world = "" if world_rank == rank else f" (rank {world_rank} of the world)"
        reports.append(f"rank {rank}{in_world} {report}")
    if arrived:
        have = "have" if len(arrived) > 1 else "has"
        reports.append(f"{name_ranks(arrived)} {have} arrived")
    return "; ".join(reports)


def _missing(call: Operation, rank: int) -> str | None:
    """Return why a rank has not arrived in the operation, or None if the rank has arrived."""
    comm_group = call.comm_group
    process = _process_of(comm_group, rank)
    if isinstance(process, str):
        return process
    if call.is_p2p:  # each rank counts its own sends and receives, so counts cannot be compared
        return f"has not called the matching send or recv ({_state(process, comm_group)})"
    in_group = [record for record in process.records if record.group_name == comm_group.name]
    collectives = [record for record in in_group if record.operation not in ("send", "recv")]
    if not collectives or collectives[-1].sequence < call.sequence:
        return f"has not arrived ({_state(process, comm_group)})"
    for other in collectives:
        if other.sequence == call.sequence and other.operation != call.kind:
            return f"called {other} at {other.where} instead (comm.debug(True) compares the calls)"
    return None


def _process_of(comm_group: CommGroup, rank: int) -> ProcessLedger | str:
    """Return the ledger of a rank of the group, or the reason why there is none."""
    key = f"tutti/ledger/{comm_group.ranks[rank]}"
    try:
        store = c10d._get_default_store()
        if not store.check([key]):
            return "has not called tutti.comm yet, so its state is unknown"
        address = json.loads(store.get(key))
    except (RuntimeError, ValueError) as error:
        return f"has an unknown state, because rank 0's store has ended ({error})"
    if not ledger.is_on_this_machine(address):
        return f"is on host {address['host']} (run `tutti world --ledger` on that host)"
    if not Path(f"/proc/{address['pid']}").exists():
        return f"has ended (pid {address['pid']} on {socket.gethostname()})"
    process = ledger.read_process(address["pid"])
    return process or f"(pid {address['pid']}) has no ledger that this user may read"


def _state(process: ProcessLedger, comm_group: CommGroup) -> str:
    """Return the last operation of a process in a group, and the location of its main thread.

    Example: `pid 123: last all_gather 56, done 29.8 s ago; at train.py:88 in step, seen 0.4 s ago`
    """
    state = f"no operation yet in group {comm_group.label}"
    for last in process.records:  # oldest first
        if last.group_name == comm_group.name and last.ended_ago is None:
            state = f"in {last.operation} {last.sequence} at {last.where} for {last.age:.1f} s"
        elif last.group_name == comm_group.name:
            state = (
                f"last {last.operation} {last.sequence}, {last.state} {last.ended_ago:.1f} s ago"
            )
    if process.location:
        state += f"; at {process.location}, seen {process.location_age:.1f} s ago"
    return f"pid {process.pid}: {state}"


# ---- Debug mode ----

_compare_timeout = 60.0


def debug(on: bool = True, *, timeout: float = 60.0) -> None:
    """Turn on debug mode: compare each collective between ranks before it is sent.

    All ranks must call this function. Without debug mode, if the operation, the shape or the dtype
    of a collective differs between ranks, the collective hangs, aborts or gives wrong numbers,
    depending on the backend. In debug mode, a difference raises RanksDiffer. The ranks compare
    calls through the group's store, which is too slow for training. If a rank does not arrive
    within `timeout` seconds, the other ranks raise CollectiveTimeout, and the message names the
    source line of the late rank. Sends and receives are not compared. The shm backend always
    compares calls, including calls that torch makes (for example in DDP). In debug mode, its errors
    also name source lines.
    """
    global _compare_timeout
    _compare_timeout = timeout
    operation.compare_calls = _compare_calls if on else None
    if shm.available()[0]:
        shm.set_where(_call_site if on else None)


def _call_site() -> str:
    return ledger.call_site(sys._getframe(1)).decode(errors="replace")


def _compare_calls(calls: Sequence[Operation]) -> None:
    """Compare the operations that this rank will send with the operations of the other ranks."""
    by_group: dict[CommGroup, list[dict[str, Any]]] = {}
    for call in calls:
        if call.is_p2p:
            continue
        shape = None if call.tensor is None else list(call.tensor.shape)
        if call.splits is not None and shape is not None:
            shape[0] = -1  # the number of rows may differ between ranks
        description = {
            "operation": call.kind,
            "shape": shape,
            "dtype": call.dtype_name,
            "reduction": call.op,
            "root": call.root,
            "splits": call.splits,
            "where": call.where,
        }
        by_group.setdefault(call.comm_group, []).append(description)
    # Publish the calls of all groups before waiting for any group, because the order of the groups
    # may differ between ranks.
    for comm_group, own_calls in by_group.items():
        comm_group.comparisons += 1
        comm_group.store.set(_key(comm_group, comm_group.rank), json.dumps(own_calls))
    for comm_group, own_calls in by_group.items():
        _compare_in_group(comm_group, own_calls)


def _key(comm_group: CommGroup, rank: int, back: int = 0) -> str:
    return f"tutti/compare/{comm_group.comparisons - back}/{rank}"


def _compare_in_group(comm_group: CommGroup, own_calls: list[dict[str, Any]]) -> None:
    keys = [_key(comm_group, rank) for rank in range(comm_group.size)]
    try:
        comm_group.store.wait(keys, timedelta(seconds=_compare_timeout))
    except RuntimeError:
        late = []
        for rank, key in enumerate(keys):
            if not comm_group.store.check([key]):
                process = _process_of(comm_group, rank)
                if not isinstance(process, str):
                    process = f"has not arrived ({_state(process, comm_group)})"
                late.append(f"rank {rank} {process}")
        raise operation.CollectiveTimeout(
            f"{_shown(own_calls[0])} of group {comm_group.label}, at {own_calls[0]['where']}, has "
            f"waited {_compare_timeout:g} s to compare its call with the other ranks: "
            f"{'; '.join(late)}. comm.debug(True) must be called on every rank."
        ) from None
    calls_of_ranks = [json.loads(text) for text in comm_group.store.multi_get(keys)]
    # All ranks have published their calls for this comparison, so all ranks have finished the
    # previous comparison. Its key can be deleted.
    comm_group.store.delete_key(_key(comm_group, comm_group.rank, back=1))
    no_call = {"operation": "no further call in this block", "shape": None, "where": ""}
    for compared in itertools.zip_longest(*calls_of_ranks, fillvalue=no_call):
        _refuse_differences(comm_group, compared)


def _refuse_differences(comm_group: CommGroup, calls: Sequence[dict[str, Any]]) -> None:
    ranks_of: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks_of.setdefault(_shown(call), []).append(rank)
    if len(ranks_of) > 1:
        listed = [
            f"{name_ranks(ranks)}: {call}" + f" at {calls[ranks[0]]['where']}".removesuffix(" at ")
            for call, ranks in ranks_of.items()
        ]
        raise RanksDiffer(
            f"ranks of group {comm_group.label} call different collectives: {'; '.join(listed)}. "
            "Every rank must make the same calls in the same order. Check the conditions before "
            "these lines."
        )
    for source, sent in enumerate(calls):
        for target, received in enumerate(calls):
            if not sent.get("splits") or not received.get("splits"):
                continue
            count, expected = sent["splits"][0][target], received["splits"][1][source]
            if count != expected:
                raise RanksDiffer(
                    f"all_to_all of group {comm_group.label}: rank {source} sends {count} elements "
                    f"to rank {target} (in_splits at {sent['where']}), but rank {target} "
                    f"expects {expected} (out_splits at {received['where']})"
                )


def _shown(call: dict[str, Any]) -> str:
    """Return a call as text, such as `all_reduce of [256] float32, sum`."""
    if call["shape"] is None:
        return str(call["operation"])
    shape = str(call["shape"]).replace("-1", "any")
    root = f", root {call['root']}" if call["root"] >= 0 else ""
    reduction = f", {call['reduction']}" if call["reduction"] else ""
    return f"{call['operation']} of {shape} {call['dtype']}{reduction}{root}"
