"""`with comm.group():` many operations, sent as few messages when the block ends."""

import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm import agreement, ledger
from tutti.comm.collectives import all_gather
from tutti.comm.errors import CollectiveError
from tutti.comm.handle import Handle
from tutti.comm.lateness import failure
from tutti.comm.members import members_of
from tutti.comm.operation import Operation, current_block, enter, send_off
from tutti.comm.torch_calls import issue
from tutti.world.errors import UsageError

# Above this a message's fixed cost is lost in its transfer, and copying costs more than it saves.
SMALL_BYTES = 256 << 10
# A flat message grows to about this size; then another one is begun.
_FLAT_BYTES = 8 << 20

# What merely moves is packed as bytes, whatever its dtype.
_MOVES = ("broadcast", "all_gather")
_REDUCES = ("all_reduce", "reduce", "reduce_scatter")

# What NCCL takes between the start and the end of a group.
_COALESCED = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "send", "recv")


class BlockAbandoned(CollectiveError):
    """Another rank left the block by an exception, so that no rank sent anything."""


@dataclass
class Summary:
    """What a block did: how many operations became how many messages."""

    operations: int = 0
    messages: int = 0
    bytes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        return (
            f"{self.operations} operations ({kinds}) in {self.messages} messages, "
            f"{self.bytes} bytes"
        )


def group(
    *, agree: bool = False, among: dist.ProcessGroup | None = None, small: int = SMALL_BYTES
) -> "Block":
    """Collect the operations called in a `with` block and send them as few messages at its end.

    Inside the block nothing is sent; results, and handles from `wait=False`, are right after it.
    No operation may use what another one in the block writes. On CPU, operations of up to `small`
    bytes that are alike (same kind, group and reduction) travel in one flat message; on NCCL,
    operations of a kind are one NCCL group. A block within a block belongs to the outer one.

    An exception inside the block means that this rank sends nothing of it; other ranks then wait
    for it until their timeout, or until the world ends. With agree=True the ranks of `among` (all,
    unless given) first tell each other, in one tiny message, whether they came through: if one
    did not, the others raise BlockAbandoned, and nobody sends anything. `summary` tells what was
    done.
    """
    return Block(agree, among, small)


class Block:
    """A block of operations; see `group`."""

    def __init__(self, agree: bool, among: dist.ProcessGroup | None, small: int) -> None:
        self._agree = agree
        self._among = among
        self._small = small
        self._outer: Block | None = None
        self._calls: list[tuple[Operation, Handle]] = []
        self._summary = Summary()

    @property
    def summary(self) -> Summary:
        """What was sent, once the outermost block has ended."""
        return self._summary if self._outer is None else self._outer.summary

    def add(self, operation: Operation, wait: bool) -> Any:
        """Take a call in; returns the tensor that will hold its result, or its handle."""
        handle = Handle(operation, None, 0)
        handle.hold("is sent when its comm.group() block ends: wait for it after the block")
        self._calls.append((operation, handle))
        return operation.result if wait else handle

    def __enter__(self) -> "Block":
        outer = current_block.get()
        if isinstance(outer, Block):
            self._outer = outer
        else:
            self._token = current_block.set(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._outer is not None:
            return
        current_block.reset(self._token)
        site = ledger.caller(sys._getframe(1))
        try:
            if self._agree:
                self._refuse_unless_all_came(error)
            if error is None:
                self._send(site)
        finally:
            for _, handle in self._calls:
                if not handle.is_done():
                    handle.hold("was not sent, or not to its end: its comm.group() block failed")
            self._calls = []

    def _refuse_unless_all_came(self, error: BaseException | None) -> None:
        members = members_of(self._among)
        flag = torch.tensor([error is not None], dtype=torch.uint8, device=members.small_device)
        failed = all_gather(flag, group=self._among).nonzero().view(-1).tolist()
        if failed and error is None:
            ranks = ", ".join(map(str, failed))
            raise BlockAbandoned(
                f"nothing of this comm.group() block was sent: rank {ranks} of group "
                f"{members.label} left it by an exception"
            )

    def _send(self, site: tuple[int, int]) -> None:
        operations = [operation for operation, _ in self._calls]
        _refuse_overlaps(operations)
        if agreement.enabled:
            agreement.check(operations)
        works: dict[int, Any] = {}
        # Everything is under way before anything is waited for.
        sent = [self._begin(batch, site) for batch in _plan(operations, self._small)]
        for handles, batch in sent:
            for handle in handles:
                handle.wait()
            if len(handles) < len(batch):
                unpack(handles[0].operation, batch)
                for operation in batch:
                    if operation.finish is not None:
                        operation.finish()
            works |= {id(each): handles[-1].work for each in batch}
        event = None
        if any(operation.is_on_stream for operation in operations):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        for operation, handle in self._calls:
            handle.settle(works[id(operation)], event if operation.is_on_stream else None)

    def _begin(
        self, batch: list[Operation], site: tuple[int, int]
    ) -> tuple[list[Handle], list[Operation]]:
        """Send a batch off: as one NCCL group, as one flat message, or by itself."""
        self._summary.operations += len(batch)
        self._summary.messages += 1
        self._summary.bytes += sum(operation.bytes for operation in batch)
        self._summary.kinds.update(operation.kind for operation in batch)
        if len(batch) == 1:
            return [send_off(batch[0], wait=False)], batch
        if batch[0].is_on_stream:
            return _coalesced(batch), batch
        message = pack(batch)
        message.site, message.line = site
        return [send_off(message, wait=False)], batch


def _plan(operations: Sequence[Operation], small: int) -> list[list[Operation]]:
    """Which operations go together: the same lists, in the same order, on every rank."""
    streamed: dict[Any, list[Operation]] = {}
    others = []
    for operation in operations:
        tensor = operation.tensor
        if tensor is not None and tensor.is_cuda and operation.kind in _COALESCED:
            is_nccl = operation.members.backend("cuda") == "nccl"
            kind = "messages" if operation.is_message else operation.kind
            if is_nccl:
                key = kind, id(operation.members), tensor.device
                streamed.setdefault(key, []).append(operation)
                continue
        others.append(operation)
    return [*streamed.values(), *batches(others, small)]


def _coalesced(batch: list[Operation]) -> list[Handle]:
    """Several operations of one kind as one NCCL group."""
    process_group: Any = batch[0].members.group
    device = batch[0].tensor.device  # type: ignore[union-attr]
    numbers = [enter(operation, ledger.BEGUN) for operation in batch]
    process_group._start_coalescing(device)
    try:
        for operation in batch:
            issue(operation, asynchronous=True)
    except RuntimeError as error:
        raise failure(batch[0], numbers[0], error) from error
    finally:
        work = process_group._end_coalescing(device)
    return [
        Handle(operation, work, number) for operation, number in zip(batch, numbers, strict=True)
    ]


def _refuse_overlaps(operations: Sequence[Operation]) -> None:
    """Raise UsageError if an operation writes what another one uses: their order is not kept."""
    spans = []
    for number, operation in enumerate(operations):
        used = {id(t): (t, False) for t in (operation.tensor, operation.source) if t is not None}
        used |= {id(t): (t, True) for t in (operation.target, operation.result) if t is not None}
        for tensor, is_written in used.values():
            if tensor.is_contiguous() and tensor.numel():
                start = tensor.data_ptr()
                spans.append((start, start + tensor.nbytes, is_written, number))
    furthest = written = (0, -1)
    for start, end, is_written, number in sorted(spans):
        for reach, other in (written, furthest) if is_written else (written,):
            if start < reach and other != number:
                first, second = sorted((number, other))
                raise UsageError(
                    f"{operations[second].kind} at {operations[second].place} uses the memory of "
                    f"{operations[first].kind} at {operations[first].place}, in the same "
                    "comm.group() block, where no order is kept: end the block between them"
                )
        furthest = max(furthest, (end, number))
        if is_written:
            written = max(written, (end, number))


def batches(operations: Sequence[Operation], small: int) -> list[list[Operation]]:
    """The operations in lists that can travel as one message each, in the order of the first.

    Every rank of a group comes to the same lists, since it calls the same operations.
    """
    open_lists: dict[Hashable, list[Operation]] = {}
    filled: dict[Hashable, int] = {}
    result: list[list[Operation]] = []
    for operation in operations:
        key = _key(operation) if operation.bytes <= small else None
        if key is None:
            result.append([operation])
            continue
        if key not in open_lists or filled[key] + operation.bytes > _FLAT_BYTES:
            open_lists[key] = []
            filled[key] = 0
            result.append(open_lists[key])
        open_lists[key].append(operation)
        filled[key] += operation.bytes
    return result


def _key(operation: Operation) -> Hashable | None:
    """What operations in one message have in common; None for one that travels by itself."""
    target, members = operation.target, operation.members
    if target is None or target.numel() == 0:
        return None
    if operation.kind in _MOVES:
        return operation.kind, id(members), operation.root, target.device
    if operation.kind in _REDUCES:
        together = operation.reduction, operation.root, target.dtype, target.device
        return operation.kind, id(members), together
    return None


@torch.no_grad()
def pack(batch: Sequence[Operation]) -> Operation:
    """One operation that does the work of all; `unpack` ends theirs."""
    first = batch[0]
    size, is_root = first.members.size, first.root == first.members.rank
    source = None
    if first.kind in ("all_reduce", "reduce"):
        target = torch.cat([_target(each).view(-1) for each in batch])
    elif first.kind == "broadcast":
        parts = [_bytes(_target(each)) for each in batch]
        total = sum(part.numel() for part in parts)
        target = torch.cat(parts) if is_root else parts[0].new_empty(total)
    elif first.kind == "all_gather":
        source = torch.cat([_bytes(_source(each)) for each in batch])
        target = source.new_empty(size * source.numel())
    else:  # reduce_scatter: what goes to one rank must lie together
        rows = [_source(each).view(size, -1) for each in batch]
        source = torch.cat(rows, dim=1).view(-1)
        target = source.new_empty(source.numel() // size)
    total = max(target.nbytes, 0 if source is None else source.nbytes)
    message = Operation(
        *(first.kind, first.members, target, source, target, None, total),
        *(first.reduction, first.root, None),
    )
    message.op = first.reduction
    return message


@torch.no_grad()
def unpack(message: Operation, batch: Sequence[Operation]) -> None:
    """Give every operation of the batch its part of what has arrived."""
    members, flat = message.members, _target(message)
    if message.root == members.rank and message.kind == "broadcast":
        return  # the root has it already
    if message.kind == "reduce" and message.root != members.rank:
        return  # only the root gets something
    if message.kind == "all_gather":
        columns = flat.view(members.size, -1)
        sizes = [_source(each).nbytes for each in batch]
        for each, part in zip(batch, torch.split(columns, sizes, dim=1), strict=True):
            _bytes(_target(each)).view(members.size, -1).copy_(part)
        return
    targets = [_target(each).view(-1) for each in batch]
    if message.kind == "broadcast":
        targets = [_bytes(target) for target in targets]
    sizes = [target.numel() for target in targets]
    for target, part in zip(targets, torch.split(flat, sizes), strict=True):
        target.copy_(part)


def _target(operation: Operation) -> torch.Tensor:
    assert operation.target is not None
    return operation.target


def _source(operation: Operation) -> torch.Tensor:
    assert operation.source is not None
    return operation.source


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)
