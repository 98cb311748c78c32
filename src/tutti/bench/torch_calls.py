"""Every operation through torch.distributed, as a program would call it."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tutti import comm
from tutti.bench.case import Buffers, Case, Prepared
from tutti.measure.bus_bandwidth import uneven_shards

# torch 2.13 renamed these two; the old names warn there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Allocates(Protocol):
    def take(self, role: str, count: int, dtype: torch.dtype) -> Tensor: ...


class TorchBackend:
    """A backend of torch.distributed: one process group over all ranks."""

    def __init__(self, name: str, group: dist.ProcessGroup, about: str, buffers: Buffers) -> None:
        self.name = name
        self.about = about
        self.group = group
        self._buffers = buffers

    def prepare(self, case: Case) -> Prepared:
        """The case on ordinary tensors."""
        return prepare(case, self.group, self._buffers)


def prepare(case: Case, group: dist.ProcessGroup, buffers: _Allocates) -> Prepared:
    """Buffers and call for a case on a process group; roots are rank 0.

    Where torch has the operation in place only, out of place is a copy and the operation: what a
    program has to do.
    """
    count, root = case.count, case.rank == 0
    new = partial(buffers.take, dtype=case.dtype)
    nothing = torch.empty(0, dtype=case.dtype)
    in_place = case.placement == "in"
    match case.operation.name:
        case "all_reduce" | "reduce" | "broadcast" as name:
            work = new("received", count)
            sends, receives = root or name != "broadcast", root or name != "reduce"
            sent = work if in_place else new("sent", count)
            call = _in_place_call(name, work, group)
            if not in_place and sends:
                call = partial(_copy_first, work, sent, call)
            return Prepared(sent if sends else nothing, work if receives else nothing, call)
        case "all_gather":
            received = new("received", case.all_shares)
            sent = _share(received, case) if in_place else new("sent", count)
            return Prepared(sent, received, partial(_all_gather, received, sent, group=group))
        case "reduce_scatter":
            sent = new("sent", case.all_shares)
            received = _share(sent, case) if in_place else new("received", count)
            return Prepared(sent, received, partial(_reduce_scatter, received, sent, group=group))
        case "gather":
            # Allocated on every rank alike: in symmetric memory it must be.
            whole, sent = new("received", case.all_shares), new("sent", count)
            sent = _share(whole, case) if in_place and root else sent
            parts = list(whole.chunk(case.ranks)) if root else None
            call = partial(dist.gather, sent, parts, 0, group=group)
            return Prepared(sent, whole if root else nothing, call)
        case "scatter":
            whole, received = new("sent", case.all_shares), new("received", count)
            received = _share(whole, case) if in_place and root else received
            parts = list(whole.chunk(case.ranks)) if root else None
            call = partial(dist.scatter, received, parts, 0, group=group)
            return Prepared(whole if root else nothing, received, call)
        case "all_to_all":
            sent, received = new("sent", case.all_shares), new("received", case.all_shares)
            call = partial(dist.all_to_all_single, received, sent, group=group)
            return Prepared(sent, received, call)
        case "send_recv":
            sent, received = new("sent", count), new("received", count)
            following, previous = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks
            exchange = _exchange_at_once if sent.is_cuda else _exchange
            call = partial(exchange, sent, received, following, previous, group)
            return Prepared(sent, received, call)
        case "all_gather_uneven":
            shares = uneven_shards(count, case.ranks)
            sent = new("sent", max(shares))[: shares[case.rank]]
            received = new("received", case.all_shares)
            return Prepared(sent, received, partial(_gather_uneven, received, sent, group))
        case "all_to_all_uneven":
            shares = uneven_shards(count, case.ranks)
            # What rank i sends to j is what j sends to i: one list serves both ways.
            splits = [shares[(case.rank + each) % case.ranks] for each in range(case.ranks)]
            sent, received = new("sent", case.all_shares), new("received", case.all_shares)
            call = partial(dist.all_to_all_single, received, sent, splits, splits, group=group)
            return Prepared(sent, received, call)
        case "barrier":
            return Prepared(nothing, nothing, partial(dist.barrier, group=group))
    raise AssertionError(f"no call for {case.operation.name}")


def _in_place_call(name: str, work: Tensor, group: dist.ProcessGroup) -> Callable[[], Any]:
    if name == "all_reduce":
        return partial(dist.all_reduce, work, group=group)
    if name == "reduce":
        return partial(dist.reduce, work, 0, group=group)
    return partial(dist.broadcast, work, 0, group=group)


def _copy_first(work: Tensor, sent: Tensor, call: Callable[[], Any]) -> None:
    work.copy_(sent)
    call()


def _gather_uneven(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    # torch has no such call that every backend knows: tutti.comm's pads, and returns a list.
    torch.cat(comm.all_gather_uneven(sent, group=group), out=received)


def _share(whole: Tensor, case: Case) -> Tensor:
    return whole[case.rank * case.count : (case.rank + 1) * case.count]


def _exchange(
    sent: Tensor, received: Tensor, following: int, previous: int, group: dist.ProcessGroup
) -> None:
    sending = dist.isend(sent, following, group=group)
    dist.recv(received, previous, group=group)
    if sending is not None:
        sending.wait()


def _exchange_at_once(
    sent: Tensor, received: Tensor, following: int, previous: int, group: dist.ProcessGroup
) -> None:
    # NCCL would deadlock on a ring of sends that wait for their receives: both go as one.
    both = [
        dist.P2POp(dist.isend, sent, following, group=group),
        dist.P2POp(dist.irecv, received, previous, group=group),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
