"""The paths that a group has, which one an operation takes, and how it is sent there."""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tutti.comm import ledger
from tutti.comm.members import Members, members_of
from tutti.comm.paths import OPS, Choice, Table, choose, load, parse
from tutti.comm.shm.registration import hosts
from tutti.comm.torch_calls import issue
from tutti.world.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from tutti.comm.operation import Operation

Carrier = Callable[["Operation", bool], Any]

# What torch's one-shot kernels reduce, and how large the staging buffer is.
_ONE_SHOT_DTYPES = (torch.float32, torch.bfloat16)
_STAGED_BYTES = 1 << 20


@dataclass(frozen=True)
class Explanation:
    """Which path an operation takes, and why. As text, a sentence."""

    op: str
    bytes: int
    group: str
    device: str
    path: str
    reason: str
    others: tuple[str, ...]

    def __str__(self) -> str:
        instead = f" (there are also {', '.join(self.others)})" if self.others else ""
        return (
            f"{self.op} of {self.bytes} bytes on {self.device} in group {self.group} goes by "
            f"{self.path}: {self.reason}{instead}"
        )


def explain(
    op: str, bytes: int, *, group: dist.ProcessGroup | None = None, device: str | None = None
) -> Explanation:
    """Which path serves an operation of so many bytes in this group, and why.

    device is cpu or cuda; unless given, cuda where the group serves it. Not a collective.
    """
    members = members_of(group)
    if op not in OPS:
        raise UsageError(f"op={op!r} is no operation: {did_you_mean(op, OPS)}")
    if bytes < 0:
        raise UsageError(f"bytes={bytes}: give 0 or more")
    served = members.device_types
    if device is None:
        device = "cuda" if "cuda" in served and torch.cuda.is_available() else "cpu"
    if device not in served:
        raise UsageError(
            f"device={device!r}: group {members.label} serves {' and '.join(sorted(served))} only"
        )
    paths = available_paths(members, device)
    note = ""
    try:
        table = members.tables.get(device) or load(members.size)
    except UsageError as error:
        table, note = None, f"; {error}"
    choice = choose(op, bytes, device, paths, table)
    others = tuple(path for path in paths if path != choice.path)
    reason = choice.reason + note
    return Explanation(op, bytes, members.label, device, choice.path, reason, others)


def available_paths(members: Members, device: str) -> tuple[str, ...]:
    """The paths of a group for tensors on such a device, its own backend's first."""
    own = members.backend(device)
    if own == "shm" and hosts(members.group) > 1:
        return ("hierarchical",)
    if device == "cuda" and own == "nccl" and _has_symmetric_memory(members):
        return own, "symmetric one-shot"
    return (own,)


def carrier(operation: "Operation") -> Carrier:
    """What sends an operation on a GPU: torch, or symmetric memory where that is faster."""
    members = operation.members
    if operation.kind != "all_reduce" or operation.bytes > _STAGED_BYTES:
        return issue
    if operation.reduction != "sum" or operation.dtype not in _ONE_SHOT_DTYPES:
        return issue
    chosen = _CARRIERS.get(_choice(members, operation.kind, operation.bytes).path, issue)
    if chosen is _by_one_shot and not _is_on_its_stream(members):
        return issue
    return chosen


def _is_on_its_stream(members: Members) -> bool:
    """Whether this is the stream on which the group uses symmetric memory: the first that did.

    Its kernels wait for those of the other ranks, and from two streams at once they may wait for
    each other for ever.
    """
    stream = torch.cuda.current_stream().cuda_stream
    if members.symmetric_stream is None:
        members.symmetric_stream = stream
    return members.symmetric_stream == stream


def _choice(members: Members, op: str, size: int) -> Choice:
    paths = available_paths(members, "cuda")
    if len(paths) > 1 and "cuda" not in members.tables:
        members.tables["cuda"] = _agreed_table(members)
    return choose(op, size, "cuda", paths, members.tables.get("cuda"))


def _agreed_table(members: Members) -> Table | None:
    """Rank 0's table, on every rank: ranks that chose differently would wait for ever."""
    key = "tutti/paths"
    if members.rank != 0:
        text = members.store.get(key).decode()  # waits for rank 0, which makes the same call
        return parse(text) if text else None
    try:
        table = load(members.size)
    except UsageError as error:
        warnings.warn(f"{error}. Until then the defaults are used.", stacklevel=2)
        table = None
    members.store.set(key, "" if table is None else table.to_json())
    return table


def _has_symmetric_memory(members: Members) -> bool:
    """Whether torch's symmetric memory can serve the group: there at all, and on one host."""
    if members.has_symmetric is None:
        members.has_symmetric = _look_for_symmetric_memory(members)
    return members.has_symmetric


def _look_for_symmetric_memory(members: Members) -> bool:
    if members.size == 1:
        return False
    from tutti.comm.symmetric import available

    if not available("cuda")["cuda"][0]:
        return False
    # Every rank has announced itself before it can come here, or is about to.
    return all(ledger.is_near(json.loads(address)) for address in members.addresses())


def _by_one_shot(operation: "Operation", asynchronous: bool) -> None:
    """All-reduce through a buffer in symmetric memory, on the current stream."""
    from tutti.comm.symmetric import all_reduce_staged

    assert operation.target is not None
    all_reduce_staged(operation.target, "sum", operation.members.group)


_CARRIERS: dict[str, Carrier] = {"symmetric one-shot": _by_one_shot}
