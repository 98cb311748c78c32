"""Many small tensors as one message: a message has a fixed cost, whatever its size."""

from collections.abc import Hashable, Sequence

import torch

from tutti.comm.operation import Operation

# Above this a message's fixed cost is lost in its transfer, and copying costs more than it saves.
SMALL_BYTES = 256 << 10
# A flat message grows to about this size; then another one is begun.
_FLAT_BYTES = 8 << 20

# What merely moves is packed as bytes, whatever its dtype.
_MOVES = ("broadcast", "all_gather")
_REDUCES = ("all_reduce", "reduce", "reduce_scatter")


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
