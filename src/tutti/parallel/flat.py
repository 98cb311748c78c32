"""Many small tensors as few large messages: a message has a fixed cost, whatever its size."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist


def batches(tensors: Sequence[torch.Tensor], most_bytes: float) -> Iterator[list[torch.Tensor]]:
    """Cut the tensors, in their order, into lists of one dtype and about `most_bytes` at most.

    A list may hold one tensor that is larger: tensors are not cut.
    """
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        batch: list[torch.Tensor] = []
        total = 0
        for tensor in tensors:
            if tensor.dtype != dtype:
                continue
            if batch and total + tensor.nbytes > most_bytes:
                yield batch
                batch, total = [], 0
            batch.append(tensor)
            total += tensor.nbytes
        yield batch


@torch.no_grad()
def sum_over_ranks(tensors: Sequence[torch.Tensor], most_bytes: float = float("inf")) -> None:
    """Replace every tensor by its sum over the ranks, `most_bytes` in each all-reduce."""
    for batch in batches(tensors, most_bytes):
        flat = _pack(batch)
        dist.all_reduce(flat)
        _unpack(flat, batch)


@torch.no_grad()
def copy_from_first(tensors: Sequence[torch.Tensor]) -> None:
    """Replace every tensor by rank 0's."""
    for batch in batches(tensors, float("inf")):
        flat = _pack(batch)
        dist.broadcast(flat, src=0)
        _unpack(flat, batch)


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
