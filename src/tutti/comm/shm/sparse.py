"""Sums of sparse tensors, as DDP needs them for embeddings with sparse gradients.

Everyone's indices and values are gathered and added, in the order of ranks, on every rank alike.
How much each rank has is known only once all have said so: the call waits for the others, also
where it is asked to be asynchronous. The compiled front does the same in front/sparse.h.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Gather = Callable[[Tensor, list[Tensor]], None]  # an all_gather, over when it returns


def sum_sparse(tensor: Tensor, size: int, mean: bool, gather: Gather) -> None:
    """Replace `tensor` by the sum over all ranks, or by their mean."""
    with torch.no_grad():
        mine = tensor.detach().coalesce()
        # What must be alike, and how many elements there are, which need not be.
        about = [*mine.shape, mine.sparse_dim(), *str(mine.dtype).encode()[-4:], mine._nnz()]
        card = torch.tensor(about)
        cards = [torch.empty_like(card) for _ in range(size)]
        gather(card, cards)
        for rank, theirs in enumerate(cards):
            if not torch.equal(theirs[:-1], card[:-1]):
                raise ValueError(
                    f"shm all_reduce of sparse tensors: rank {rank} has another shape, dtype or "
                    "number of sparse dimensions"
                )
        counts = [int(theirs[-1]) for theirs in cards]
        shape, dtype = mine.values().shape[1:], mine.dtype
        indices = [torch.empty(mine.sparse_dim(), n, dtype=torch.int64) for n in counts]
        values = [torch.empty(n, *shape, dtype=dtype) for n in counts]
        if any(counts):
            gather(mine.indices().contiguous(), indices)
            gather(mine.values().contiguous(), values)
        parts = [
            torch.sparse_coo_tensor(at, what, mine.shape, check_invariants=False)
            for at, what in zip(indices, values, strict=True)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        tensor.copy_((total / size if mean else total).coalesce())
