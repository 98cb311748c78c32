"""`with comm.group():` collects operations and sends them in fewer messages at the block's end.

On the CPU, small operations of the same kind, group and reduction are packed into one flat message,
because each message has a fixed cost. On NCCL, operations of one kind become one NCCL group.
"""

import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tutti.comm import ledger, operation
from tutti.comm.backend_calls import issue
from tutti.comm.collectives import all_gather
from tutti.comm.operation import Handle, Operation, current_block, send
from tutti.world.errors import UsageError, name_ranks

# Operations with more bytes are sent separately, because copying their data into a flat message
# costs more time than it saves.
SMALL_BYTES = 256 << 10
# Maximum size of a flat message in bytes. Further operations are packed into another message.
_FLAT_BYTES = 8 << 20

_MOVES = ("broadcast", "all_gather")
_REDUCES = ("all_reduce", "reduce", "reduce_scatter")

# The operations that NCCL allows between the start and the end of a group.
_COALESCED = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "send", "recv")


class BlockAbandoned(operation.CollectiveError):
    """Another rank left the comm.group() block with an exception, so no operations were sent."""


@dataclass
class Summary:
    """The number of operations in a block, and the number of messages that were sent for them."""

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


class group:
    """Collect the operations called in a `with` block, and send them in fewer messages at its end.

    Inside the block nothing is sent. Results, and handles of calls with `wait=False`, are valid
    after the block. No operation may use memory that another operation in the block writes. On the
    CPU, operations of up to `small` bytes that have the same kind, group and reduction are sent in
    one flat message. On NCCL, operations of one kind form one NCCL group. Operations in a nested
    block are sent at the end of the outermost block.

    If the block raises an exception on this rank, this rank sends none of its operations. The other
    ranks then wait until their timeout, or until the job ends. With agree=True, the ranks of the
    world first exchange, in one small all-gather, whether they completed the block. If a rank did
    not complete the block, the other ranks raise BlockAbandoned, and no rank sends its operations.
    After the block, `summary` contains the number of messages.
    """

    def __init__(self, *, agree: bool = False, small: int = SMALL_BYTES) -> None:
        self._agree, self._small = agree, small
        self._outer: group | None = None
        self._calls: list[tuple[Operation, Handle]] = []
        self._summary = Summary()

    @property
    def summary(self) -> Summary:
        """The numbers of operations and messages of the outermost block, valid after this block."""
        return self._summary if self._outer is None else self._outer.summary

    def add(self, call: Operation, wait: bool) -> Any:
        """Collect a call and return its handle, or the tensor that will hold its result."""
        handle = Handle(call, None, 0)
        handle.cannot_wait = (
            "is sent when its comm.group() block ends. Call wait() after the block."
        )
        self._calls.append((call, handle))
        return call.result if wait else handle

    def __enter__(self) -> "group":
        self._outer = current_block.get()
        if self._outer is None:
            self._token = current_block.set(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if self._outer is not None:
            return
        current_block.reset(self._token)
        site = ledger.call_site(sys._getframe(1))
        try:
            if self._agree:
                self._refuse_unless_all_completed(error)
            if error is None:
                self._send(site)
        finally:
            for _, handle in self._calls:
                if not handle.is_done():
                    handle.cannot_wait = "was not completed, because its comm.group() block failed"
            self._calls = []

    def _refuse_unless_all_completed(self, error: BaseException | None) -> None:
        comm_group = operation.comm_group_of(None)
        flag = torch.tensor(
            [error is not None], dtype=torch.uint8, device=comm_group.control_device
        )
        failed_ranks = all_gather(flag).nonzero().view(-1).tolist()
        if failed_ranks and error is None:
            raise BlockAbandoned(
                f"{name_ranks(failed_ranks)} of group {comm_group.label} left this comm.group() "
                "block with an exception, so no rank has sent its operations"
            )

    def _send(self, site: bytes) -> None:
        calls = [call for call, _ in self._calls]
        _refuse_overlaps(calls)
        if operation.compare_calls is not None:
            operation.compare_calls(calls)
        works: dict[int, Any] = {}
        batches = _batches(calls, self._small)
        # Start all messages before waiting for any of them.
        started = [self._begin(batch, site) for batch in batches]
        for handles, batch in zip(started, batches, strict=True):
            for handle in handles:
                handle.wait()
            if len(handles) < len(batch):
                _unpack(handles[0].operation, batch)
                for call in batch:
                    if call.finish is not None:
                        call.finish()
            works |= {id(call): handles[-1].work for call in batch}
        event = None
        if any(call.is_on_stream for call in calls):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        for call, handle in self._calls:
            handle.complete(works[id(call)], event if call.is_on_stream else None)

    def _begin(self, batch: list[Operation], site: bytes) -> list[Handle]:
        """Start a batch as one NCCL group, as one flat message, or as a single operation."""
        self._summary.operations += len(batch)
        self._summary.messages += 1
        self._summary.bytes += sum(call.bytes for call in batch)
        self._summary.kinds.update(call.kind for call in batch)
        if len(batch) > 1 and batch[0].is_on_stream:
            return _nccl_group(batch)
        message = batch[0]
        if len(batch) > 1:
            message = _pack(batch)
            message.site = site
        return [send(message, wait=False)]


def _batches(calls: Sequence[Operation], small: int) -> list[list[Operation]]:
    """Divide the calls into lists that are sent together. All ranks compute the same lists."""
    by_nccl: dict[Any, list[Operation]] = {}
    others = []
    for call in calls:
        on_nccl = call.is_on_stream and call.comm_group.backend("cuda") == "nccl"
        if on_nccl and call.kind in _COALESCED:
            kind = "p2p" if call.is_p2p else call.kind
            key = kind, id(call.comm_group), call.device
            by_nccl.setdefault(key, []).append(call)
        else:
            others.append(call)
    return [*by_nccl.values(), *flat_batches(others, small)]


def _nccl_group(batch: list[Operation]) -> list[Handle]:
    """Start several operations of one kind as one NCCL group."""
    process_group: Any = batch[0].comm_group.process_group
    device = batch[0].device
    numbers = [operation.record(call, ledger.BEGUN) for call in batch]
    process_group._start_coalescing(device)
    try:
        for call in batch:
            issue(call, asynchronous=True)
    except RuntimeError as error:
        raise operation.failed(batch[0], numbers[0], error) from error
    finally:
        work = process_group._end_coalescing(device)
    return [Handle(call, work, number) for call, number in zip(batch, numbers, strict=True)]


def _refuse_overlaps(operations: Sequence[Operation]) -> None:
    """Raise UsageError if an operation writes memory that another operation in the block uses."""
    spans = []  # (first address, end address, is written, operation number)
    for number, call in enumerate(operations):
        used = {id(t): (t, False) for t in (call.tensor, call.source) if t is not None}
        used |= {id(t): (t, True) for t in (call.target, call.result) if t is not None}
        for tensor, is_written in used.values():
            if tensor.is_contiguous() and tensor.numel():
                start = tensor.data_ptr()
                spans.append((start, start + tensor.nbytes, is_written, number))
    # `furthest` is (end address, operation number) of the span with the highest end address so far.
    # `written` is this pair for written spans only.
    furthest = written = (0, -1)
    for start, end, is_written, number in sorted(spans):
        for reach, other in (written, furthest) if is_written else (written,):
            if start < reach and other != number:
                first, second = (operations[n] for n in sorted((number, other)))
                raise UsageError(
                    f"{second.kind} at {second.where} uses the memory of {first.kind} at "
                    f"{first.where}. Operations in one comm.group() block have no order, so put "
                    "these two operations into separate blocks."
                )
        furthest = max(furthest, (end, number))
        if is_written:
            written = max(written, (end, number))


# ---- Flat messages ----


def flat_batches(operations: Sequence[Operation], small: int) -> list[list[Operation]]:
    """Divide the operations into lists. Each list is sent as one message.

    The lists are in the order of their first operations. Every rank of a group computes the same
    lists, because all ranks call the same operations.
    """
    open_lists: dict[Hashable, list[Operation]] = {}
    packed_bytes: dict[Hashable, int] = {}
    result: list[list[Operation]] = []
    for call in operations:
        target = call.target
        is_packed = call.bytes <= small and call.kind in _MOVES + _REDUCES
        if not is_packed or target is None or target.numel() == 0:
            result.append([call])
            continue
        # Operations that only move data are packed as bytes, so their dtypes may differ.
        dtype = None if call.kind in _MOVES else target.dtype
        key = call.kind, id(call.comm_group), call.root, target.device, call.reduction, dtype
        if key not in open_lists or packed_bytes[key] + call.bytes > _FLAT_BYTES:
            open_lists[key] = []
            packed_bytes[key] = 0
            result.append(open_lists[key])
        open_lists[key].append(call)
        packed_bytes[key] += call.bytes
    return result


@torch.no_grad()
def _pack(batch: Sequence[Operation]) -> Operation:
    """Return one operation that replaces the batch. `_unpack` distributes its result."""
    first = batch[0]
    size, is_root = first.comm_group.size, first.root == first.comm_group.rank
    source = None
    if first.kind in ("all_reduce", "reduce"):
        target = torch.cat([_target(call).view(-1) for call in batch])
    elif first.kind == "broadcast":
        parts = [_target(call).view(torch.uint8) for call in batch]
        total = sum(part.numel() for part in parts)
        target = torch.cat(parts) if is_root else parts[0].new_empty(total)
    elif first.kind == "all_gather":
        source = torch.cat([_source(call).view(torch.uint8) for call in batch])
        target = source.new_empty(size * source.numel())
    else:  # reduce_scatter: the parts for one rank must be contiguous
        rows = [_source(call).view(size, -1) for call in batch]
        source = torch.cat(rows, dim=1).view(-1)
        target = source.new_empty(source.numel() // size)
    total = max(target.nbytes, 0 if source is None else source.nbytes)
    tensors, op = (target, source, target, None), first.reduction
    return Operation(first.kind, first.comm_group, *tensors, total, op, first.root, None, op)


@torch.no_grad()
def _unpack(message: Operation, batch: Sequence[Operation]) -> None:
    """Copy each operation's part of the message into the operation's target."""
    comm_group, flat = message.comm_group, _target(message)
    # The root of a broadcast already has the data. Only the root of a reduce gets a result.
    if (message.kind, message.root == comm_group.rank) in (("broadcast", True), ("reduce", False)):
        return
    if message.kind == "all_gather":
        columns = flat.view(comm_group.size, -1)
        sizes = [_source(call).nbytes for call in batch]
        for call, part in zip(batch, torch.split(columns, sizes, dim=1), strict=True):
            _target(call).view(torch.uint8).view(comm_group.size, -1).copy_(part)
        return
    targets = [_target(call).view(-1) for call in batch]
    if message.kind == "broadcast":
        targets = [target.view(torch.uint8) for target in targets]
    sizes = [target.numel() for target in targets]
    for target, part in zip(targets, torch.split(flat, sizes), strict=True):
        target.copy_(part)


def _target(call: Operation) -> torch.Tensor:
    assert call.target is not None
    return call.target


def _source(call: Operation) -> torch.Tensor:
    assert call.source is not None
    return call.source
