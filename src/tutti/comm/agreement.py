"""Debug mode: before each collective all ranks compare what they are about to call.

Different shapes, dtypes or operations on different ranks end, depending on the backend, in a hang,
an abort or wrong numbers. With comm.debug(True) on every rank each call first goes through the
group's store, as JSON, and a difference is an error that names ranks and source lines, before
anything is sent. It costs some exchanges with the store per call: for finding a fault, not for
training.
"""

import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tutti.comm import place, shm
from tutti.comm.errors import CollectiveTimeout
from tutti.comm.lateness import absence_of
from tutti.world.errors import RanksDiffer

if TYPE_CHECKING:
    from tutti.comm.members import Members
    from tutti.comm.operation import Operation

enabled = False
_timeout = 60.0


def debug(on: bool = True, *, timeout: float = 60.0) -> None:
    """Compare every collective between ranks before it is sent, from now on; on every rank.

    A difference raises RanksDiffer; a rank that does not come within `timeout` seconds raises
    CollectiveTimeout, which says where it is. Sends and receives are not compared. What torch
    itself calls on the shm backend (DDP, say) is always compared there; in debug mode the error
    names source lines as well.
    """
    global enabled, _timeout
    enabled, _timeout = on, timeout
    if shm.available()[0]:
        shm.set_where(_place_of_call if on else None)


def _place_of_call() -> str:
    return place.describe(sys._getframe(1))


def check(operations: Sequence["Operation"]) -> None:
    """Compare these operations, sent as one, with what the other ranks of their groups send."""
    by_group: dict[Members, list[dict[str, Any]]] = {}
    for operation in operations:
        if not operation.is_message:
            by_group.setdefault(operation.members, []).append(_description(operation))
    # All are told before any is waited for, so that the order of groups does not matter.
    for members, mine in by_group.items():
        members.agreements += 1
        members.store.set(_key(members, members.rank), json.dumps(mine))
    for members, mine in by_group.items():
        _compare(members, mine)


def _description(operation: "Operation") -> dict[str, Any]:
    shape = None if operation.tensor is None else list(operation.tensor.shape)
    if operation.splits is not None and shape is not None:
        shape[0] = -1  # rows may differ between ranks
    return {
        "operation": operation.kind,
        "shape": shape,
        "dtype": operation.dtype_name,
        "reduction": operation.op,
        "root": operation.root,
        "splits": operation.splits,
        "where": operation.place,
    }


def _key(members: "Members", rank: int, back: int = 0) -> str:
    return f"tutti/agree/{members.agreements - back}/{rank}"


def _compare(members: "Members", mine: list[dict[str, Any]]) -> None:
    keys = [_key(members, rank) for rank in range(members.size)]
    try:
        members.store.wait(keys, timedelta(seconds=_timeout))
    except RuntimeError:
        late = [rank for rank, key in enumerate(keys) if not members.store.check([key])]
        news = "; ".join(f"rank {rank} {absence_of(members, rank)}" for rank in late)
        raise CollectiveTimeout(
            f"{_shown(mine[0])} of group {members.label}, at {mine[0]['where']}, waits for others "
            f"to compare with, {_timeout:g} s by now: {news}. Is comm.debug(True) set there, too?"
        ) from None
    everyone: list[list[dict[str, Any]]] = [
        json.loads(text) for text in members.store.multi_get(keys)
    ]
    # Who has come to this comparison has read the previous one.
    members.store.delete_key(_key(members, members.rank, back=1))
    for calls in _in_step(everyone):
        _refuse_differences(members, calls)


def _in_step(everyone: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The first calls of all ranks, the second ones, and so on; some ranks may have fewer."""
    nothing = {"operation": "nothing more in this block", "shape": None, "where": ""}
    longest = max(len(calls) for calls in everyone)
    return [
        [calls[step] if step < len(calls) else nothing for calls in everyone]
        for step in range(longest)
    ]


def _refuse_differences(members: "Members", calls: list[dict[str, Any]]) -> None:
    ranks_of: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks_of.setdefault(_shown(call), []).append(rank)
    if len(ranks_of) > 1:
        told = [
            f"{_ranks(ranks)} {what}" + f" at {calls[ranks[0]]['where']}".removesuffix(" at ")
            for what, ranks in ranks_of.items()
        ]
        raise RanksDiffer(
            f"ranks of group {members.label} call different collectives: {'; '.join(told)}: every "
            "rank must make the same call, so look at the condition that leads there"
        )
    for source, sent in enumerate(calls):
        for target, received in enumerate(calls):
            if not sent.get("splits") or not received.get("splits"):
                continue
            out, into = sent["splits"][0][target], received["splits"][1][source]
            if out != into:
                raise RanksDiffer(
                    f"all_to_all of group {members.label}: rank {source} sends {out} elements to "
                    f"rank {target} (in_splits at {sent['where']}), which expects {into} "
                    f"(out_splits at {received['where']})"
                )


def _shown(call: dict[str, Any]) -> str:
    """`all_reduce of [256] float32, sum`."""
    if call["shape"] is None:
        return str(call["operation"])
    shape = str(call["shape"]).replace("-1", "any")
    root = f", root {call['root']}" if call["root"] >= 0 else ""
    reduction = f", {call['reduction']}" if call["reduction"] else ""
    return f"{call['operation']} of {shape} {call['dtype']}{reduction}{root}"


def _ranks(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}:"
