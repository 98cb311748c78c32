"""Send many tensors in few collectives: each collective has a fixed cost, whatever its size."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from tutti.comm.collectives import all_reduce, broadcast


def buckets(tensors: Sequence[torch.Tensor], bucket_bytes: float) -> Iterator[list[torch.Tensor]]:
    """Put the tensors, in their order, into lists of one dtype and about `bucket_bytes` each.

    Tensors are not split: the tensor that reaches `bucket_bytes` ends its bucket, as in DDP.
    """
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[torch.Tensor] = []
        total = 0
        for tensor in tensors:
            if tensor.dtype != dtype:
                continue
            bucket.append(tensor)
            total += tensor.nbytes
            if total >= bucket_bytes:
                yield bucket
                bucket, total = [], 0
        if bucket:
            yield bucket


@torch.no_grad()
def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: str = "sum",
    *,
    bucket_bytes: float = float("inf"),
    group: dist.ProcessGroup | None = None,
) -> None:
    """All-reduce every tensor in place, with about `bucket_bytes` in each collective."""
    for bucket in buckets(tensors, bucket_bytes):
        flat = flatten(bucket)
        all_reduce(flat, op, group=group)
        unflatten_into(flat, bucket)


@torch.no_grad()
def broadcast_coalesced(
    tensors: Sequence[torch.Tensor],
    root: int = 0,
    *,
    bucket_bytes: float = float("inf"),
    group: dist.ProcessGroup | None = None,
) -> None:
    """Copy every tensor from the group's rank `root` to all ranks, one collective per bucket."""
    for bucket in buckets(tensors, bucket_bytes):
        flat = flatten(bucket)
        broadcast(flat, root, group=group)
        unflatten_into(flat, bucket)


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of all tensors in one new one-dimensional tensor."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten_into(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy consecutive sections of `flat` into the tensors; the inverse of `flatten`."""
    sections = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, section in zip(tensors, sections, strict=True):
        tensor.detach().copy_(section.view(tensor.shape))
