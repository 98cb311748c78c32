"""`with comm.group():` many operations, sent as few messages when the block ends."""

import sys
from collections import Counter
from collections.abc import Sequence
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
from tutti.comm.packing import SMALL_BYTES, batches, pack, unpack
from tutti.comm.torch_calls import issue
from tutti.world.errors import UsageError

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
