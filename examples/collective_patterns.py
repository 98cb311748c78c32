"""Patterns on top of collectives: agree before a branch, compute at the root, overlap transfers.

    tutti run -n 2 --device cpu examples/collective_patterns.py

A collective inside an `if` hangs as soon as the condition differs between ranks. Let the ranks
agree first, with an all-reduce of one byte. Then every rank takes the same branch.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch

import tutti
from tutti import comm


def any_rank(flag: bool) -> bool:
    """Return whether the flag is set on any rank. Every rank gets the same answer."""
    return bool(comm.all_reduce(torch.tensor([flag], dtype=torch.uint8), "max").item())


def all_ranks(flag: bool) -> bool:
    """Return whether the flag is set on every rank. Every rank gets the same answer."""
    return bool(comm.all_reduce(torch.tensor([flag], dtype=torch.uint8), "min").item())


def gather_compute_scatter(
    tensor: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor], root: int = 0
) -> torch.Tensor:
    """Gather all tensors at the root, compute there, and give each rank its row of the result.

    This pattern is for work that needs the data of all ranks at one place: sorting, assigning work,
    a global top-k. `compute` gets the tensors stacked along a new dim 0, and returns a tensor of
    the same shape. If `compute` raises an exception, every rank raises an exception. Otherwise the
    other ranks would wait forever in the scatter.
    """
    gathered = comm.gather(tensor.unsqueeze(0), root)
    rows, error = None, None
    if gathered is not None:  # this rank is the root
        try:
            rows = compute(gathered)
        except Exception as problem:  # any_rank below tells the other ranks about the exception
            error = problem
    if any_rank(error is not None):
        raise error or RuntimeError(f"compute failed on rank {root}")
    return comm.scatter(rows, root, out=tensor.new_empty((1, *tensor.shape)))[0]


def overlapped(
    shards: Iterable[torch.Tensor], compute: Callable[[torch.Tensor], float], ahead: int = 1
) -> Iterator[float]:
    """Compute on each gathered shard while the next `ahead` all-gathers run.

    Each running all-gather needs memory for its result. FSDP prefetches layers in the same way.
    """
    under_way: deque[comm.Handle] = deque()
    for shard in shards:
        under_way.append(comm.all_gather(shard, wait=False))
        if len(under_way) > ahead:
            yield compute(under_way.popleft().wait())
    while under_way:
        yield compute(under_way.popleft().wait())


with tutti.init() as world:
    rank, size = world.rank, world.size
    overflow_here = rank == 1  # on one rank only
    assert any_rank(overflow_here) == (size > 1)
    assert not all_ranks(overflow_here)

    mine = torch.tensor([(7 * rank + 3) % 5, rank])
    ordered = gather_compute_scatter(mine, lambda rows: rows[rows[:, 0].argsort()])
    keys = comm.all_gather(ordered[:1])
    assert keys.tolist() == sorted(keys.tolist())

    def broken(rows: torch.Tensor) -> torch.Tensor:
        raise ValueError("no order")

    try:
        gather_compute_scatter(mine, broken)
    except (ValueError, RuntimeError) as error:
        assert isinstance(error, ValueError) == (rank == 0)

    shards = [torch.full((4,), float(rank + layer)) for layer in range(3)]
    sums = list(overlapped(shards, lambda layer: float(layer.sum())))
    assert sums == [4 * sum(range(layer, layer + size)) for layer in range(3)]
    if world.is_first:
        done = f"agreed, sorted {keys.tolist()} at rank 0 and overlapped {len(sums)} all-gathers"
        print(f"{size} ranks {done}")
