"""Errors of collectives, which name late ranks and the lines at which they are; and debug mode.

A backend's own error names neither the operation nor the line that called it, and on gloo not even
the rank that is missing. `collective_error` adds these from the ledgers of the ranks on this host.

If ranks differ in the shape, the dtype or the operation, the call hangs, aborts or gives wrong
numbers, depending on the backend. With comm.debug(True) on every rank, all ranks compare each call
through the group's store, as JSON, before anything is sent, and a difference raises an error that
names ranks and source lines. This costs several exchanges with the store per call: use debug mode
to find a fault, not for training.
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
from tutti.comm.ledger import ProcessLedger, read_process
from tutti.comm.operation import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    CommGroup,
    Operation,
)
from tutti.world.errors import RanksDiffer
from tutti.world.exchange import name_ranks

_TIMEOUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
# Errors of the shm backend already name late ranks and different calls.
_DIFFERENCE = re.compile(r"differs between ranks: rank \d")
_NAMES_RANKS = re.compile(r"waiting for rank \d")


def collective_error(call: Operation, seconds: float, error: Exception) -> CollectiveError:
    """The error to raise for a backend's error, `seconds` after the operation began."""
    message = str(error).strip()
    what = f"{call} at {call.where}"
    if isinstance(error, RanksDiffer) or _DIFFERENCE.search(message):
        return CollectiveMismatch(f"{what} failed: {message}")
    if not _TIMEOUT.search(message):
        return CollectiveError(f"{what} failed: {message}")
    if _NAMES_RANKS.search(message):
        return CollectiveTimeout(f"{what} timed out: {message}")
    return CollectiveTimeout(
        f"{what} timed out after {seconds:.1f} s on rank {call.comm_group.rank}: "
        f"{_other_ranks(call)} (the backend said: {message.splitlines()[0]})"
    )


def _other_ranks(call: Operation) -> str:
    """Describe what the other ranks of an operation are doing; missing ranks come first."""
    comm_group = call.comm_group
    others = [rank for rank in range(comm_group.size) if rank != comm_group.rank]
    if call.is_message and call.root >= 0:
        others = [call.root]
    arrived, reports = [], []
    for rank in others:
        report = _missing(call, rank)
        if report is None:
            arrived.append(rank)
            continue
        world_rank = comm_group.ranks[rank]
        named = "" if world_rank == rank else f" (rank {world_rank} of the world)"
        reports.append(f"rank {rank}{named} {report}")
    if arrived:
        have = "have" if len(arrived) > 1 else "has"
        reports.append(f"{name_ranks(arrived)} {have} arrived")
    return "; ".join(reports)


def _missing(call: Operation, rank: int) -> str | None:
    """Why a rank is missing from the operation; None if it has arrived."""
    comm_group = call.comm_group
    process = _process_of(comm_group, rank)
    if isinstance(process, str):
        return process
    if call.is_message:  # each rank counts its own messages, so the numbers cannot be compared
        return f"has not matched it ({_state(process, comm_group)})"
    theirs = [
        record
        for record in process.records
        if record.group_name == comm_group.name and record.operation not in ("send", "recv")
    ]
    if not theirs or theirs[-1].sequence < call.sequence:
        return f"has not arrived ({_state(process, comm_group)})"
    for there in theirs:
        if there.sequence == call.sequence and there.operation != call.kind:
            return (
                f"called {there} at {there.where} instead: comm.debug(True) finds such differences"
            )
    return None


def _process_of(comm_group: CommGroup, rank: int) -> ProcessLedger | str:
    """The ledger of a rank of the group, or the reason why there is none."""
    key = f"tutti/ledger/{comm_group.ranks[rank]}"
    try:
        store = c10d._get_default_store()
        if not store.check([key]):
            return "has not called tutti.comm yet, so nothing is known of it"
        address = json.loads(store.get(key))
    except (RuntimeError, ValueError) as error:
        return f"cannot be looked up: the store, which rank 0 holds, is gone ({error})"
    if not ledger.is_on_this_machine(address):
        return f"is on host {address['host']}: run `tutti world --ledger` there"
    if not Path(f"/proc/{address['pid']}").exists():
        return f"has ended (pid {address['pid']} on {socket.gethostname()})"
    process = read_process(address["pid"])
    return process or f"(pid {address['pid']}) has no ledger that this user may read"


def _state(process: ProcessLedger, comm_group: CommGroup) -> str:
    """The last operation of a process in a group, and the location of its main thread.

    `pid 123: last all_gather 56, done 29.8 s ago; at train.py:88 in step, seen 0.4 s ago`
    """
    text = f"pid {process.pid}: "
    records = [record for record in process.records if record.group_name == comm_group.name]
    last = records[-1] if records else None
    if last is None:
        text += f"nothing yet in group {comm_group.label}"
    elif last.ended is None:
        text += f"in {last.operation} {last.sequence} at {last.where} for {last.age:.1f} s"
    else:
        text += f"last {last.operation} {last.sequence}, {last.state} {last.ended:.1f} s ago"
    if process.location:
        text += f"; at {process.location}, seen {process.location_age:.1f} s ago"
    return text


# ---- Debug mode ----

_compare_timeout = 60.0


def debug(on: bool = True, *, timeout: float = 60.0) -> None:
    """From now on, compare every collective between ranks before it is sent; call on every rank.

    A difference raises RanksDiffer. If a rank does not arrive within `timeout` seconds, the others
    raise CollectiveTimeout, which names the line at which that rank is. Sends and receives are not
    compared. The shm backend always compares torch's own calls (for example by DDP); in debug mode
    its error also names source lines.
    """
    global _compare_timeout
    _compare_timeout = timeout
    operation.compare_calls = _compare_calls if on else None
    if shm.available()[0]:
        shm.set_where(_call_site if on else None)


def _call_site() -> str:
    return ledger.call_site(sys._getframe(1)).decode(errors="replace")


def _compare_calls(calls: Sequence[Operation]) -> None:
    """Compare operations that are sent together with the calls of the other ranks."""
    by_group: dict[CommGroup, list[dict[str, Any]]] = {}
    for call in calls:
        if not call.is_message:
            by_group.setdefault(call.comm_group, []).append(_description(call))
    # Publish all before waiting for any, so that the order of groups does not matter.
    for comm_group, mine in by_group.items():
        comm_group.comparisons += 1
        comm_group.store.set(_key(comm_group, comm_group.rank), json.dumps(mine))
    for comm_group, mine in by_group.items():
        _compare_in_group(comm_group, mine)


def _description(call: Operation) -> dict[str, Any]:
    shape = None if call.tensor is None else list(call.tensor.shape)
    if call.splits is not None and shape is not None:
        shape[0] = -1  # the number of rows may differ between ranks
    return {
        "operation": call.kind,
        "shape": shape,
        "dtype": call.dtype_name,
        "reduction": call.op,
        "root": call.root,
        "splits": call.splits,
        "where": call.where,
    }


def _key(comm_group: CommGroup, rank: int, back: int = 0) -> str:
    return f"tutti/compare/{comm_group.comparisons - back}/{rank}"


def _compare_in_group(comm_group: CommGroup, mine: list[dict[str, Any]]) -> None:
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
        raise CollectiveTimeout(
            f"{_shown(mine[0])} of group {comm_group.label}, at {mine[0]['where']}, has waited "
            f"{_compare_timeout:g} s to compare with the other ranks: {'; '.join(late)}. Set "
            "comm.debug(True) on every rank."
        ) from None
    everyone = [json.loads(text) for text in comm_group.store.multi_get(keys)]
    # All ranks have published this comparison, so all have read the previous one.
    comm_group.store.delete_key(_key(comm_group, comm_group.rank, back=1))
    nothing = {"operation": "nothing more in this block", "shape": None, "where": ""}
    for same_step in itertools.zip_longest(*everyone, fillvalue=nothing):
        _refuse_differences(comm_group, same_step)


def _refuse_differences(comm_group: CommGroup, calls: Sequence[dict[str, Any]]) -> None:
    ranks_of: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks_of.setdefault(_shown(call), []).append(rank)
    if len(ranks_of) > 1:
        listed = [
            f"{name_ranks(ranks)}: {what}" + f" at {calls[ranks[0]]['where']}".removesuffix(" at ")
            for what, ranks in ranks_of.items()
        ]
        raise RanksDiffer(
            f"ranks of group {comm_group.label} call different collectives: {'; '.join(listed)}: "
            "every rank must make the same call: check the condition that leads there"
        )
    for source, sent in enumerate(calls):
        for target, received in enumerate(calls):
            if not sent.get("splits") or not received.get("splits"):
                continue
            out, into = sent["splits"][0][target], received["splits"][1][source]
            if out != into:
                raise RanksDiffer(
                    f"all_to_all of group {comm_group.label}: rank {source} sends {out} elements "
                    f"to rank {target} (in_splits at {sent['where']}), which expects {into} "
                    f"(out_splits at {received['where']})"
                )


def _shown(call: dict[str, Any]) -> str:
    """A call as text, such as `all_reduce of [256] float32, sum`."""
    if call["shape"] is None:
        return str(call["operation"])
    shape = str(call["shape"]).replace("-1", "any")
    root = f", root {call['root']}" if call["root"] >= 0 else ""
    reduction = f", {call['reduction']}" if call["reduction"] else ""
    return f"{call['operation']} of {shape} {call['dtype']}{reduction}{root}"
