"""The collectives: the same calls and the same results on gloo, shm and NCCL.

Ranks (`root`, `to`, `source`) are ranks in the group, not in the world. All ranks of the group make
every call but send and recv, in the same order. A call returns its result, or with `wait=False` a
Handle at once. Tensors may have gaps (a column of a matrix, say) and any dtype that torch has;
reductions are sum, mean, product, min, max, band, bor and bxor.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.members import Members, members_of
from tutti.comm.operation import Operation, current_block, perform
from tutti.comm.wire import PLAIN, Reducing, check_out, moving, receiving
from tutti.world.errors import UsageError

Group = dist.ProcessGroup | None
Result = Any  # the tensor, or with wait=False its Handle


def all_reduce(
    tensor: torch.Tensor,
    op: str = "sum",
    *,
    out: torch.Tensor | None = None,
    group: Group = None,
    wait: bool = True,
) -> Result:
    """Reduce over all ranks; every rank has the result, in place or in `out`."""
    members = members_of(group)
    result = tensor if out is None else _copied(tensor, out)
    finish = None
    if (result.dtype, op) in PLAIN and result.is_contiguous() and not result.is_neg():
        wire, reduction = result, op
    else:
        form = Reducing(result.dtype, op, members.backend(result.device.type))
        wire, reduction = form.wire(result), form.reduction
        finish = form.finish(wire, result, members.size)
    size = result.nbytes
    call = Operation("all_reduce", members, tensor, None, wire, result, size, reduction, -1, finish)
    call.op = op
    return perform(call, wait)


def reduce(
    tensor: torch.Tensor,
    root: int = 0,
    op: str = "sum",
    *,
    out: torch.Tensor | None = None,
    group: Group = None,
    wait: bool = True,
) -> Result:
    """Reduce over all ranks; the root has the result, in place or in `out`, the others None.

    Tensors of the other ranks keep their values.
    """
    members = members_of(group)
    is_root = members.check_rank("root", root) == members.rank
    result = tensor if out is None or not is_root else _copied(tensor, out)
    backend = members.backend(tensor.device.type)
    form = Reducing(tensor.dtype, op, backend)
    wire = form.wire(result)
    if not is_root and backend == "gloo" and wire.data_ptr() == tensor.data_ptr():
        wire = wire.clone()  # gloo leaves partial sums in it
    finish = form.finish(wire, result, members.size) if is_root else None
    call = Operation(
        *("reduce", members, tensor, None, wire, result if is_root else None, tensor.nbytes),
        *(form.reduction, root, finish),
    )
    call.op = op
    return perform(call, wait)


def broadcast(
    tensor: torch.Tensor,
    root: int = 0,
    *,
    out: torch.Tensor | None = None,
    group: Group = None,
    wait: bool = True,
) -> Result:
    """Give every rank the root's tensor, in place or in `out`."""
    members = members_of(group)
    is_root = members.check_rank("root", root) == members.rank
    result = tensor
    if out is not None:
        result = _copied(tensor, out) if is_root else check_out(out, tensor.shape, tensor)
    target, finish = receiving(result)
    call = Operation(
        *("broadcast", members, tensor, None, target, result, tensor.nbytes),
        *("", root, None if is_root else finish),
    )
    return perform(call, wait)


def all_gather(
    tensor: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    group: Group = None,
    wait: bool = True,
) -> Result:
    """Give every rank the tensors of all, one after the other along dim 0, in rank order."""
    members = members_of(group)
    result = _output(tensor, _stacked(tensor, members.size), out)
    target, finish = receiving(result)
    call = Operation(
        *("all_gather", members, tensor, moving(tensor), target, result, result.nbytes),
        finish=finish,
    )
    return perform(call, wait)


def reduce_scatter(
    tensor: torch.Tensor,
    op: str = "sum",
    *,
    out: torch.Tensor | None = None,
    group: Group = None,
    wait: bool = True,
) -> Result:
    """Reduce over all ranks; each rank has its part of the result, cut along dim 0."""
    members = members_of(group)
    result = _output(tensor, _cut("tensor", tensor, members), out)
    form = Reducing(tensor.dtype, op, members.backend(tensor.device.type))
    target = form.wire(result)
    call = Operation(
        *("reduce_scatter", members, tensor, form.wire(tensor), target, result, tensor.nbytes),
        *(form.reduction, -1, form.finish(target, result, members.size)),
    )
    call.op = op
    return perform(call, wait)


def gather(
    tensor: torch.Tensor,
    root: int = 0,
    *,
    out: torch.Tensor | None = None,
    group: Group = None,
    wait: bool = True,
) -> Result:
    """Give the root the tensors of all, one after the other along dim 0; the others get None."""
    members = members_of(group)
    result = target = finish = None
    if members.check_rank("root", root) == members.rank:
        result = _output(tensor, _stacked(tensor, members.size), out)
        target, finish = receiving(result)
    call = Operation(
        *("gather", members, tensor, moving(tensor), target, result),
        *(tensor.nbytes * members.size, "", root, finish),
    )
    return perform(call, wait)


def scatter(
    tensor: torch.Tensor | None = None,
    root: int = 0,
    *,
    out: torch.Tensor | None = None,
    group: Group = None,
    wait: bool = True,
) -> Result:
    """Cut the root's tensor along dim 0 and give each rank its part.

    The other ranks give `out`, since they cannot know what is coming; the root may.
    """
    members = members_of(group)
    source = None
    if members.check_rank("root", root) == members.rank:
        if tensor is None:
            raise UsageError(f"scatter: rank {root} is the root and must give the tensor")
        result = _output(tensor, _cut("tensor", tensor, members), out)
        source = moving(tensor)
    elif out is None:
        raise UsageError(f"scatter: rank {members.rank} is not the root {root} and must give out")
    else:
        result = out
    target, finish = receiving(result)
    call = Operation(
        *("scatter", members, result, source, target, result),
        *(result.nbytes * members.size, "", root, finish),
    )
    return perform(call, wait)


def all_to_all(
    tensor: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    in_splits: Sequence[int] | None = None,
    out_splits: Sequence[int] | None = None,
    group: Group = None,
    wait: bool = True,
) -> Result:
    """Send each rank its part of the tensor, cut along dim 0, and receive one from each.

    Parts are equal unless `in_splits` says how many rows go to each rank. `out_splits`, how many
    rows come from each, is asked of the ranks in a small exchange of its own if it is left out.
    """
    members = members_of(group)
    if in_splits is None and out_splits is None:
        _cut("tensor", tensor, members)
        splits = None
        shape = tuple(tensor.shape)
    else:
        ins = _checked_splits("in_splits", in_splits, members, len(tensor))
        outs = list(out_splits) if out_splits is not None else _exchanged(ins, members)
        splits = ins, _checked_splits("out_splits", outs, members, sum(outs))
        shape = (sum(outs), *tensor.shape[1:])
    result = _output(tensor, shape, out)
    target, finish = receiving(result)
    source = moving(tensor)
    call = Operation(
        *("all_to_all", members, tensor, source, target, result, tensor.nbytes),
        finish=finish,
    )
    if splits is not None:
        # The wire is flat, and where no backend knows the dtype it is bytes.
        row = math.prod(tensor.shape[1:]) * (tensor.itemsize // source.itemsize)
        call.splits = [part * row for part in splits[0]], [part * row for part in splits[1]]
    return perform(call, wait)


def send(
    tensor: torch.Tensor, to: int, tag: int = 0, *, group: Group = None, wait: bool = True
) -> Result:
    """Send a tensor to one rank, which must receive it."""
    members = members_of(group)
    _refuse_self("to", members.check_rank("to", to), members)
    call = Operation(*("send", members, tensor, moving(tensor), None, None, tensor.nbytes, "", to))
    call.tag = tag
    return perform(call, wait)


def recv(
    out: torch.Tensor,
    source: int | None,
    tag: int = 0,
    *,
    group: Group = None,
    wait: bool = True,
) -> Result:
    """Receive a tensor from one rank into `out`, which is also returned.

    source=None takes what comes first from any rank (not on NCCL); the Handle's `source` says
    who it was.
    """
    members = members_of(group)
    if source is not None:
        _refuse_self("source", members.check_rank("source", source), members)
    target, finish = receiving(out)
    call = Operation(
        *("recv", members, out, None, target, out, out.nbytes, ""),
        *(-1 if source is None else source, finish),
    )
    call.tag = tag
    return perform(call, wait)


def barrier(*, group: Group = None, wait: bool = True) -> Result:
    """Wait until every rank has come here."""
    return perform(Operation("barrier", members_of(group), None, None, None, None, 0), wait)


def all_gather_uneven(tensor: torch.Tensor, *, group: Group = None) -> list[torch.Tensor]:
    """The tensors of all ranks, in rank order, where dim 0 may differ from rank to rank.

    It takes two collectives: the lengths, then rows padded to the longest.
    """
    members = members_of(group)
    if tensor.dim() == 0:
        raise UsageError("all_gather_uneven: a tensor without dims has no rows: use all_gather")
    refuse_block("all_gather_uneven")
    rows = torch.tensor([len(tensor)], device=members.small_device)
    lengths = all_gather(rows, group=group).tolist()
    padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor.detach()
    everything = all_gather(padded, group=group).view(members.size, *padded.shape)
    return [part[:length] for part, length in zip(everything, lengths, strict=True)]


def _stacked(tensor: torch.Tensor, size: int) -> tuple[int, ...]:
    return (size * len(tensor), *tensor.shape[1:]) if tensor.dim() else (size,)


def _cut(name: str, tensor: torch.Tensor, members: Members) -> tuple[int, ...]:
    """The shape of one rank's part."""
    if tensor.dim() == 0 or len(tensor) % members.size:
        raise UsageError(
            f"{name} of shape {list(tensor.shape)} cannot be cut along dim 0 into {members.size} "
            f"equal parts, one for each rank of group {members.label}: pad it"
        )
    return (len(tensor) // members.size, *tensor.shape[1:])


def _output(tensor: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor | None) -> torch.Tensor:
    return tensor.new_empty(shape) if out is None else check_out(out, shape, tensor)


@torch.no_grad()
def _copied(tensor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return check_out(out, tuple(tensor.shape), tensor).copy_(tensor)


def _checked_splits(
    name: str, splits: Sequence[int] | None, members: Members, rows: int
) -> list[int]:
    if splits is None:
        raise UsageError(f"all_to_all: {name} is missing: how many rows go to each rank?")
    if len(splits) != members.size or min(splits) < 0 or sum(splits) != rows:
        raise UsageError(
            f"{name}={list(splits)}: give {members.size} numbers, one for each rank of group "
            f"{members.label}, that add up to the {rows} rows"
        )
    return list(splits)


def _exchanged(ins: list[int], members: Members) -> list[int]:
    """How many rows every rank sends to this one."""
    refuse_block("all_to_all without out_splits")
    counts = torch.tensor(ins, device=members.small_device)
    result: list[int] = all_to_all(counts, group=members.group).tolist()
    return result


def refuse_block(what: str) -> None:
    """Raise UsageError inside comm.group(), for what needs an answer from other ranks now."""
    if current_block.get() is not None:
        raise UsageError(
            f"{what} must know what other ranks have before it can go on, and inside comm.group() "
            "nothing is sent yet: call it before the block"
        )


def _refuse_self(name: str, rank: int, members: Members) -> None:
    if rank == members.rank:
        raise UsageError(f"{name}={rank} is this rank itself: copy the tensor instead")
