"""The collectives: the same calls and the same results on gloo, shm and NCCL.

Ranks (`root`, `to`, `source`) are ranks in the group, not in the world. Except for send and recv,
all ranks of the group must make the same calls in the same order. A call returns its result. With
`wait=False`, a call immediately returns a Handle. Tensors may be non-contiguous. Every dtype can be
sent. Reductions do not support some dtypes, for example float8. The reductions are sum, mean,
product, min, max, band, bor and bxor.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.comm.backend_calls import UNCONVERTED, WireReduction, check_out, to_wire, wire_buffer
from tutti.comm.operation import CommGroup, Operation, comm_group_of, current_block, perform
from tutti.world.errors import UsageError

Group = dist.ProcessGroup | None  # None means all ranks
Out = Tensor | None
Tensors = Sequence[Tensor]
Result = Any  # the result tensor, or a Handle if wait=False


def all_reduce(
    tensor: Tensor, op: str = "sum", *, out: Out = None, group: Group = None, wait: bool = True
) -> Result:
    """Reduce over all ranks. Every rank gets the result, in place or in `out`."""
    comm_group = comm_group_of(group)
    result = tensor if out is None else _copy_to_out(tensor, out)
    finish = None
    if (result.dtype, op) in UNCONVERTED and result.is_contiguous() and not result.is_neg():
        wire, reduction = result, op
    else:
        form = WireReduction(result.dtype, op, comm_group.backend(result.device.type))
        wire, reduction = form.wire(result), form.reduction
        finish = form.finish(wire, result, comm_group.size)
    # fmt: off
    call = Operation("all_reduce", comm_group, tensor, None, wire, result, result.nbytes, reduction,
                     -1, finish, op)
    # fmt: on
    return perform(call, wait)


def reduce(
    tensor: Tensor,
    root: int = 0,
    op: str = "sum",
    *,
    out: Out = None,
    group: Group = None,
    wait: bool = True,
) -> Result:
    """Reduce over all ranks. The root gets the result, in place or in `out`.

    On the other ranks, the call returns None and the tensors keep their values.
    """
    comm_group = comm_group_of(group)
    backend = comm_group.backend(tensor.device.type)
    form = WireReduction(tensor.dtype, op, backend)
    result = finish = None
    if comm_group.check_rank("root", root) == comm_group.rank:
        result = tensor if out is None else _copy_to_out(tensor, out)
        wire = form.wire(result)
        finish = form.finish(wire, result, comm_group.size)
    else:
        wire = form.wire(tensor)
        if backend == "gloo" and wire.data_ptr() == tensor.data_ptr():
            wire = wire.clone()  # gloo overwrites its input with partial sums
    tensors, size = (tensor, None, wire, result), tensor.nbytes
    call = Operation("reduce", comm_group, *tensors, size, form.reduction, root, finish, op)
    return perform(call, wait)


def broadcast(
    tensor: Tensor, root: int = 0, *, out: Out = None, group: Group = None, wait: bool = True
) -> Result:
    """Copy the root's tensor to every rank, in place or into `out`."""
    comm_group = comm_group_of(group)
    is_root = comm_group.check_rank("root", root) == comm_group.rank
    result = tensor
    if out is not None:
        result = _copy_to_out(tensor, out) if is_root else check_out(out, tensor.shape, tensor)
    target, finish = wire_buffer(result)
    tensors, finish = (tensor, None, target, result), None if is_root else finish
    call = Operation("broadcast", comm_group, *tensors, tensor.nbytes, "", root, finish)
    return perform(call, wait)


def all_gather(
    tensor: Tensor, *, out: Out = None, group: Group = None, wait: bool = True
) -> Result:
    """Concatenate the tensors of all ranks along dim 0, in rank order, on every rank."""
    comm_group = comm_group_of(group)
    result = _gather_output(tensor, comm_group, out)
    target, finish = wire_buffer(result)
    tensors = tensor, to_wire(tensor), target, result
    call = Operation("all_gather", comm_group, *tensors, result.nbytes, finish=finish)
    return perform(call, wait)


def reduce_scatter(
    tensor: Tensor, op: str = "sum", *, out: Out = None, group: Group = None, wait: bool = True
) -> Result:
    """Reduce over all ranks, and split the result along dim 0. Each rank gets one part."""
    comm_group = comm_group_of(group)
    result = _output(tensor, _part_shape(tensor, comm_group), out)
    form = WireReduction(tensor.dtype, op, comm_group.backend(tensor.device.type))
    target = form.wire(result)
    tensors, size = (tensor, form.wire(tensor), target, result), tensor.nbytes
    finish = form.finish(target, result, comm_group.size)
    call = Operation("reduce_scatter", comm_group, *tensors, size, form.reduction, -1, finish, op)
    return perform(call, wait)


def gather(
    tensor: Tensor, root: int = 0, *, out: Out = None, group: Group = None, wait: bool = True
) -> Result:
    """Concatenate the tensors of all ranks along dim 0 at the root. Other ranks get None."""
    comm_group = comm_group_of(group)
    result = target = finish = None
    if comm_group.check_rank("root", root) == comm_group.rank:
        result = _gather_output(tensor, comm_group, out)
        target, finish = wire_buffer(result)
    tensors, size = (tensor, to_wire(tensor), target, result), tensor.nbytes * comm_group.size
    call = Operation("gather", comm_group, *tensors, size, "", root, finish)
    return perform(call, wait)


def scatter(
    tensor: Out = None, root: int = 0, *, out: Out = None, group: Group = None, wait: bool = True
) -> Result:
    """Split the root's tensor along dim 0 and give each rank its part.

    `out` is optional on the root. On the other ranks, `out` is required and must have the shape of
    one part.
    """
    comm_group = comm_group_of(group)
    source = None
    if comm_group.check_rank("root", root) == comm_group.rank:
        if tensor is None:
            raise UsageError(f"scatter: rank {root} is the root and must pass tensor=")
        result = _output(tensor, _part_shape(tensor, comm_group), out)
        source = to_wire(tensor)
    elif out is not None:
        result = out
    else:
        raise UsageError(f"scatter: rank {comm_group.rank} is not the root {root}, so pass out=")
    target, finish = wire_buffer(result)
    tensors, size = (result, source, target, result), result.nbytes * comm_group.size
    call = Operation("scatter", comm_group, *tensors, size, "", root, finish)
    return perform(call, wait)


def all_to_all(
    tensor: Tensor,
    *,
    out: Out = None,
    in_splits: Sequence[int] | None = None,
    out_splits: Sequence[int] | None = None,
    group: Group = None,
    wait: bool = True,
) -> Result:
    """Send each rank its part of the tensor, split along dim 0, and receive a part from each rank.

    `in_splits[i]` is the number of rows to send to rank i. By default, all parts are equal.
    `out_splits[i]` is the number of rows to receive from rank i. If only `in_splits` is given, the
    ranks first exchange these numbers in a small all-to-all.
    """
    comm_group = comm_group_of(group)
    splits: tuple[list[int], list[int]] | None = None
    shape = tuple(tensor.shape)
    if in_splits is None and out_splits is None:
        _part_shape(tensor, comm_group)  # raises if the parts would not be equal
    else:
        ins = _checked_splits("in_splits", in_splits, comm_group, len(tensor))
        if out_splits is None:
            _require_outside_group("all_to_all without out_splits")
            counts = torch.tensor(ins, device=comm_group.control_device)
            out_splits = all_to_all(counts, group=comm_group.process_group).tolist()
        splits = ins, _checked_splits("out_splits", out_splits, comm_group, sum(out_splits))
        shape = (sum(out_splits), *tensor.shape[1:])
    result = _output(tensor, shape, out)
    target, finish = wire_buffer(result)
    source = to_wire(tensor)
    tensors = tensor, source, target, result
    call = Operation("all_to_all", comm_group, *tensors, tensor.nbytes, finish=finish)
    if splits is not None:
        # The backend needs numbers of elements instead of rows. The elements are those of the wire
        # form, which is flat and may have dtype uint8.
        row = math.prod(tensor.shape[1:]) * (tensor.itemsize // source.itemsize)
        call.splits = [part * row for part in splits[0]], [part * row for part in splits[1]]
    return perform(call, wait)


def send(
    tensor: Tensor, to: int, tag: int = 0, *, group: Group = None, wait: bool = True
) -> Result:
    """Send a tensor to rank `to`, which must call recv."""
    comm_group = comm_group_of(group)
    _check_peer("to", to, comm_group)
    tensors = tensor, to_wire(tensor), None, None
    call = Operation("send", comm_group, *tensors, tensor.nbytes, "", to, tag=tag)
    return perform(call, wait)


def recv(
    out: Tensor, source: int | None, tag: int = 0, *, group: Group = None, wait: bool = True
) -> Result:
    """Receive a tensor from one rank into `out`, which is also returned.

    With source=None, the tensor may come from any rank, and `Handle.source` is the sender's rank.
    NCCL does not support source=None.
    """
    comm_group = comm_group_of(group)
    if source is not None:
        _check_peer("source", source, comm_group)
    target, finish = wire_buffer(out)
    tensors, peer = (out, None, target, out), -1 if source is None else source
    call = Operation("recv", comm_group, *tensors, out.nbytes, "", peer, finish, tag=tag)
    return perform(call, wait)


def barrier(*, group: Group = None, wait: bool = True) -> Result:
    """Wait until every rank of the group has called barrier()."""
    return perform(Operation("barrier", comm_group_of(group), None, None, None, None, 0), wait)


def all_gather_uneven(tensor: Tensor, *, group: Group = None) -> list[Tensor]:
    """Return the tensors of all ranks, in rank order. Their sizes along dim 0 may differ.

    The function uses two collectives. The first collective exchanges the lengths. Then each rank
    pads its tensor to the longest length, and the second collective exchanges the padded tensors.
    """
    comm_group = comm_group_of(group)
    if tensor.dim() == 0:
        raise UsageError("all_gather_uneven: a tensor of 0 dims has no rows. Use all_gather.")
    _require_outside_group("all_gather_uneven")
    rows = torch.tensor([len(tensor)], device=comm_group.control_device)
    lengths = all_gather(rows, group=group).tolist()
    padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor.detach()
    everything = all_gather(padded, group=group).view(comm_group.size, *padded.shape)
    return [part[:length] for part, length in zip(everything, lengths, strict=True)]


# ---- Coalesced collectives: one collective per bucket of tensors, to save latency ----


@torch.no_grad()
def all_reduce_coalesced(
    tensors: Tensors, op: str = "sum", *, bucket_bytes: float = math.inf, group: Group = None
) -> None:
    """All-reduce every tensor in place, with about `bucket_bytes` in each collective."""
    for flat in _flat_buckets(tensors, bucket_bytes):
        all_reduce(flat, op, group=group)


@torch.no_grad()
def broadcast_coalesced(
    tensors: Tensors, root: int = 0, *, bucket_bytes: float = math.inf, group: Group = None
) -> None:
    """Copy every tensor from the group's rank `root` to all ranks, one collective per bucket."""
    for flat in _flat_buckets(tensors, bucket_bytes):
        broadcast(flat, root, group=group)


def _flat_buckets(tensors: Tensors, bucket_bytes: float) -> Iterator[Tensor]:
    """Yield one flat tensor per bucket. The caller may change this flat tensor in place.

    When the caller requests the next bucket, the flat tensor is copied back to the tensors of its
    bucket. A bucket contains tensors of one dtype, in the given order. Tensors are added to a
    bucket until its size is at least `bucket_bytes`, as in DDP. Tensors are not split.
    """
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        buckets: list[list[Tensor]] = [[]]
        total = 0
        for tensor in (tensor.detach() for tensor in tensors if tensor.dtype == dtype):
            if total >= bucket_bytes:
                buckets.append([])
                total = 0
            buckets[-1].append(tensor)
            total += tensor.nbytes
        for bucket in buckets:
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            yield flat
            sections = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, section in zip(bucket, sections, strict=True):
                tensor.copy_(section.view(tensor.shape))


# ---- Shapes and checks ----


def _gather_output(tensor: Tensor, comm_group: CommGroup, out: Out) -> Tensor:
    size = comm_group.size
    shape = (size * len(tensor), *tensor.shape[1:]) if tensor.dim() else (size,)
    return _output(tensor, shape, out)


def _part_shape(tensor: Tensor, comm_group: CommGroup) -> tuple[int, ...]:
    if tensor.dim() == 0 or len(tensor) % comm_group.size:
        raise UsageError(
            f"the tensor of shape {list(tensor.shape)} cannot be split along dim 0 into "
            f"{comm_group.size} equal parts, one for each rank of group {comm_group.label}. Pad it."
        )
    return (len(tensor) // comm_group.size, *tensor.shape[1:])


def _output(tensor: Tensor, shape: tuple[int, ...], out: Out) -> Tensor:
    return tensor.new_empty(shape) if out is None else check_out(out, shape, tensor)


@torch.no_grad()
def _copy_to_out(tensor: Tensor, out: Tensor) -> Tensor:
    return check_out(out, tuple(tensor.shape), tensor).copy_(tensor)


def _checked_splits(
    name: str, splits: Sequence[int] | None, comm_group: CommGroup, rows: int
) -> list[int]:
    if splits is None:
        raise UsageError(f"all_to_all: {name} is missing. Pass the number of rows for each rank.")
    if len(splits) != comm_group.size or min(splits) < 0 or sum(splits) != rows:
        raise UsageError(
            f"{name}={list(splits)} must have {comm_group.size} numbers >= 0, one for each rank of "
            f"group {comm_group.label}, and their sum must be {rows}, the number of rows"
        )
    return list(splits)


def _require_outside_group(call: str) -> None:
    """Raise UsageError inside a comm.group() block, because nothing is sent before its end."""
    if current_block.get() is not None:
        raise UsageError(
            f"{call} needs values from other ranks before it can return, but a comm.group() block "
            "sends nothing before it ends. Make this call before the block."
        )


def _check_peer(name: str, rank: int, comm_group: CommGroup) -> None:
    if comm_group.check_rank(name, rank) == comm_group.rank:
        raise UsageError(f"{name}={rank} is this rank itself. Use tensor.copy_() instead.")
