"""Many small tensors as few large messages: a message has a fixed cost, whatever its size."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist


def buckets(tensors: Sequence[torch.Tensor], bucket_bytes: float) -> Iterator[list[torch.Tensor]]:
    """Put the tensors, in their order, into lists of one dtype and about `bucket_bytes`.

    The tensor that fills a list ends it, as in DDP's buckets: tensors are not cut.
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
def sum_over_ranks(tensors: Sequence[torch.Tensor], bucket_bytes: float = float("inf")) -> None:
    """Replace every tensor by its sum over the ranks, about `bucket_bytes` in each all-reduce."""
    for bucket in buckets(tensors, bucket_bytes):
        flat = _pack(bucket)
        dist.all_reduce(flat)
        _unpack(flat, bucket)


@torch.no_grad()
def copy_from_first(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Replace every tensor by that of the group's first rank."""
    for bucket in buckets(tensors, float("inf")):
        flat = _pack(bucket)
        dist.broadcast(flat, group=group, group_src=0)
        _unpack(flat, bucket)


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
