"""Given ranks that differ in a condition, when they decide together, then all go the same way."""

import itertools
from typing import Any

import pytest
import torch

from tutti import comm
from tutti.world.errors import UsageError
from tutti.world.world import World
from worlds import default_group, in_world


def _conditions(world: World) -> str:
    size, rank = world.size, world.rank
    one = rank == 1
    assert comm.any_rank(one) and not comm.all_ranks(one)
    assert not comm.any_rank(False) and comm.all_ranks(True)

    def total() -> float:
        return float(comm.all_reduce(torch.tensor([float(rank)])).item())

    everybody = sum(range(size))
    assert comm.when_any(one, total) == everybody
    assert comm.when_any(False, total) is None
    assert comm.when_all(True, total) == everybody
    assert comm.when_all(not one, total) is None
    with pytest.raises(UsageError, match="call it before the block"), comm.group():
        comm.any_rank(True)
    return "agreed"


def _chains(world: World) -> str:
    size, rank = world.size, world.rank
    mine = torch.tensor([[rank, 10 - rank]] * 3)

    def order(everything: torch.Tensor) -> torch.Tensor:
        assert everything.shape == (size, 3, 2) and rank == 1
        return everything.flip(0)[:, 0]

    part = comm.gather_compute_scatter(mine, order, root=1)
    assert part.tolist() == [size - 1 - rank, 10 - (size - 1 - rank)]

    def distances(everything: torch.Tensor) -> torch.Tensor:
        return (everything - everything[rank]).abs().sum().view(1)

    spread = comm.gather_compute_reduce(torch.tensor([float(rank)]), distances)
    assert spread.item() == sum(abs(a - b) for a in range(size) for b in range(size))

    # A failure at the root is everybody's, and nobody hangs.
    def broken(everything: torch.Tensor) -> torch.Tensor:
        raise KeyError("broken")

    expected: Any = KeyError if rank == 0 else comm.CollectiveError
    with pytest.raises(expected):
        comm.gather_compute_scatter(mine, broken)
    expected = ValueError if rank == 0 else comm.CollectiveError
    with pytest.raises(expected):
        comm.gather_compute_scatter(mine, lambda everything: everything[:1].expand(size + 1, 3, 2))

    # In the other chain every rank computes; one that fails is named to the others.
    def broken_on_1(everything: torch.Tensor) -> torch.Tensor:
        return broken(everything) if rank == 1 else everything[rank]

    with pytest.raises(KeyError if rank == 1 else comm.CollectiveError) as caught:
        comm.gather_compute_reduce(mine, broken_on_1)
    assert rank == 1 or "compute failed on rank 1 of group default" in str(caught.value)
    assert comm.all_reduce(torch.tensor([1])).item() == size  # and nothing is left under way
    return "right"


def _pipelined(world: World) -> list[str]:
    events: list[str] = []

    def begin(number: int) -> comm.Handle:
        events.append(f"begin {number}")
        handle: comm.Handle = comm.all_reduce(torch.tensor([float(number)]), wait=False)
        return handle

    def compute(tensor: torch.Tensor) -> float:
        number = tensor.item() / world.size
        events.append(f"compute {number:g}")
        return number

    assert list(comm.overlapped(range(3), begin, compute)) == [0, 1, 2]
    assert list(comm.overlapped([], begin, compute)) == []
    assert list(comm.overlapped(range(2), begin, compute, ahead=5)) == [0, 1]
    return events


def _all(world: World) -> list[Any]:
    told = []
    for backend in ("shm", "gloo"):
        with default_group(backend):
            told.append([_conditions(world), _chains(world), _pipelined(world)])
    return told


def test_conditions_chains_and_sequences() -> None:
    for agreed, right, events in itertools.chain.from_iterable(in_world(_all, 3)):
        assert (agreed, right) == ("agreed", "right")
        assert events == [
            *("begin 0", "begin 1", "compute 0", "begin 2", "compute 1", "compute 2"),
            *("begin 0", "begin 1", "compute 0", "compute 1"),
        ]
