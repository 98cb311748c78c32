"""Collectives under conditions, in chains and in sequence, without deadlock.

A collective inside `if` hangs as soon as ranks differ in the condition. Here the ranks first agree,
in one tiny message, and then all go the same way.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from tutti.comm.collectives import all_gather, all_reduce, broadcast, gather, refuse_block, scatter
from tutti.comm.errors import CollectiveError
from tutti.comm.handle import Handle
from tutti.comm.members import members_of

Value = TypeVar("Value")
Item = TypeVar("Item")
Group = dist.ProcessGroup | None

_MAX_DIMS = 8


def any_rank(flag: bool, *, group: Group = None) -> bool:
    """Whether the flag is set on any rank; the same answer on every rank."""
    return _agreed(flag, "max", group)


def all_ranks(flag: bool, *, group: Group = None) -> bool:
    """Whether the flag is set on every rank; the same answer on every rank."""
    return _agreed(flag, "min", group)


def when_any(flag: bool, act: Callable[[], Value], *, group: Group = None) -> Value | None:
    """Run `act` on every rank if any rank wants it, else on none; returns its result or None.

    For what all must do once one needs it: rescale after an overflow on some rank, save a
    checkpoint because one host will be shut down, rebuild a cache. Every rank must call it.
    """
    return act() if any_rank(flag, group=group) else None


def when_all(flag: bool, act: Callable[[], Value], *, group: Group = None) -> Value | None:
    """Run `act` on every rank if every rank is ready for it, else on none; its result or None.

    For what makes sense only together: stop early when all have converged, take the fast path
    when all batches have the same shape. Every rank must call it.
    """
    return act() if all_ranks(flag, group=group) else None


def gather_compute_scatter(
    tensor: torch.Tensor,
    compute: Callable[[torch.Tensor], torch.Tensor],
    *,
    root: int = 0,
    group: Group = None,
) -> torch.Tensor:
    """Gather all tensors at the root, compute there, and give each rank its part of the result.

    `compute` gets the tensors of all ranks along a new dim 0, and returns as many rows as there
    are ranks. For what needs the whole picture once: assigning work, sorting, a global top-k. When
    `compute` is cheap or every rank needs everything, `gather_compute_reduce` avoids the detour
    through one rank. If `compute` raises, every rank raises.
    """
    members = members_of(group)
    refuse_block("gather_compute_scatter")
    everything = gather(tensor.unsqueeze(0), root, group=group)
    header = torch.zeros(_MAX_DIMS + 2, dtype=torch.int64, device=members.small_device)
    parts, problem = None, None
    if members.rank == root:
        try:
            parts = _checked_parts(compute(everything), tensor, members.size)
            shape = parts.shape[1:]
            header[0], header[1] = 1, len(shape)
            header[2 : 2 + len(shape)] = torch.tensor(shape)
        except Exception as error:  # the others must learn of it, whatever it is
            problem = error
    broadcast(header, root, group=group)
    if problem is not None:
        raise problem
    went_well, dims, *sizes = header.tolist()
    if not went_well:
        raise CollectiveError(
            f"gather_compute_scatter: compute failed on rank {root} of group {members.label}: "
            "see its output"
        )
    out = tensor.new_empty((1, *sizes[:dims]))
    result: torch.Tensor = scatter(parts, root, out=out, group=group)
    return result[0]


def gather_compute_reduce(
    tensor: torch.Tensor,
    compute: Callable[[torch.Tensor], torch.Tensor],
    op: str = "sum",
    *,
    group: Group = None,
) -> torch.Tensor:
    """Gather all tensors everywhere, compute each rank's share of them, and reduce the shares.

    `compute` gets the tensors of all ranks along a new dim 0 and returns a tensor of the same
    shape on every rank; its own row is the rank in the group. For losses and statistics over pairs
    of samples that live on different ranks (contrastive losses, distances to all others). If
    `compute` raises on any rank, every rank raises.
    """
    members = members_of(group)
    refuse_block("gather_compute_reduce")
    everything = all_gather(tensor.unsqueeze(0), group=group)
    share, problem = everything, None
    try:
        share = compute(everything).detach().clone()  # it may be a view of what was gathered
    except Exception as error:  # the others must learn of it, whatever it is
        problem = error
    failed = torch.zeros(members.size, dtype=torch.uint8, device=members.small_device)
    failed[members.rank] = problem is not None
    all_reduce(failed, "max", group=group)
    if problem is not None:
        raise problem
    if failed.any():
        raise CollectiveError(
            f"gather_compute_reduce: compute failed on rank {int(failed.argmax())} of group "
            f"{members.label}: see its output"
        )
    result: torch.Tensor = all_reduce(share, op, group=group)
    return result


def overlapped(
    items: Iterable[Item],
    begin: Callable[[Item], Handle],
    compute: Callable[[torch.Tensor], Value],
    *,
    ahead: int = 1,
) -> Iterator[Value]:
    """Compute on each result while the collectives of the next items are under way.

        for norm in overlapped(shards, lambda s: comm.all_gather(s, wait=False), torch.norm): …

    `begin` starts the collective of an item and returns its handle; at most `ahead` of them run
    ahead of the one computed on, since each holds the memory of its result. For walking over
    sharded layers or buckets, where transfer and computation take about as long.
    """
    under_way: deque[Handle] = deque()
    for item in items:
        under_way.append(begin(item))
        if len(under_way) > ahead:
            yield compute(_result(under_way.popleft()))
    while under_way:
        yield compute(_result(under_way.popleft()))


def _agreed(flag: bool, op: str, group: Group) -> bool:
    refuse_block("an agreement between ranks")
    device = members_of(group).small_device
    vote = torch.tensor([flag], dtype=torch.uint8, device=device)
    return bool(all_reduce(vote, op, group=group).item())


def _checked_parts(parts: torch.Tensor, tensor: torch.Tensor, size: int) -> torch.Tensor:
    if parts.dim() == 0 or len(parts) != size or parts.dtype != tensor.dtype:
        raise ValueError(
            f"compute returned shape {list(parts.shape)} of {parts.dtype}: it must return {size} "
            f"rows, one for each rank, of {tensor.dtype}"
        )
    if parts.dim() > _MAX_DIMS + 1:
        raise ValueError(f"compute returned {parts.dim()} dims: at most {_MAX_DIMS + 1} are sent")
    return parts.contiguous()


def _result(handle: Handle) -> torch.Tensor:
    result = handle.wait()
    assert result is not None
    return result
