"""Given sparse gradients, when DDP runs on shm, then it trains as on gloo."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shm_cases import group_of
from worlds import in_world


def groups() -> dict[str, Any]:
    return {"gloo": dist.new_group(backend="gloo"), "shm": group_of()}


def inputs(rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    def sparse(at: list[list[int]], values: Tensor, shape: tuple[int, ...]) -> Tensor:
        indices = torch.tensor(at, dtype=torch.int64).reshape(len(at), -1)
        return torch.sparse_coo_tensor(indices, values.to(dtype), shape, check_invariants=True)

    rows = [1, 4, 4][: 3 - rank] if rank == 0 else [4, 0]
    few = sparse([rows], torch.arange(2 * len(rows)).view(-1, 2) + rank, (6, 2))
    nothing = sparse([[]], torch.empty(0, 2), (6, 2))
    return {
        "not coalesced": few,
        "coalesced": few.coalesce(),
        "nothing on one rank": nothing if rank == 0 else few,
        "nothing at all": nothing,
        "two sparse dimensions": sparse([[rank, 2], [1, 3]], torch.tensor([1.0, 2.0]), (3, 4)),
    }


def sums(rank: int, group: Any) -> dict[str, Any]:
    reports = {}
    for dtype in (torch.float32, torch.int64):
        for name, tensor in inputs(rank, dtype).items():
            for asynchronous in (False, True):
                given = tensor.clone()
                work = dist.all_reduce(given, group=group, async_op=asynchronous)
                if work is not None:
                    work.wait()
                    assert work.get_future().wait()[0] is not None
                reports[f"{name}, {dtype}, {asynchronous}"] = given.to_dense().tolist()
    return reports


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens).mean(0))  # type: ignore[no-any-return]


def trained(rank: int, group: Any) -> list[Any]:
    model = DistributedDataParallel(Words(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    reports = []
    for step in range(4):
        tokens = torch.tensor([rank, 3, 3, 7 + step][: 4 - 2 * rank])
        loss = model(tokens).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reports.append(loss.item())
    return [*reports, *(p.tolist() for p in model.parameters())]


def everything(world: Any) -> dict[str, Any]:
    made = groups()
    reports: dict[str, Any] = {
        name: {"sums": sums(world.rank, group), "trained": trained(world.rank, group)}
        for name, group in made.items()
    }
    tensor = inputs(world.rank, torch.float32)["coalesced"]
    mean = tensor.clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=made["shm"])
    want = tensor.clone()
    dist.all_reduce(want, group=made["gloo"])
    reports["shm"]["mean"] = torch.equal(mean.to_dense(), want.to_dense() / 2)
    with pytest.raises(ValueError, match="summed or averaged"):
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=made["shm"])
    shape = (6, 2 + world.rank)
    uneven = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, shape[1]), shape)
    with pytest.raises(ValueError, match="different shape"):
        dist.all_reduce(uneven, group=made["shm"])
    return reports


def test_sparse_tensors_are_summed_as_on_gloo() -> None:
    for reports in in_world(everything, 2):
        assert reports["shm"]["sums"] == reports["gloo"]["sums"]
        assert reports["shm"]["trained"] == reports["gloo"]["trained"]
        assert reports["shm"]["mean"]


def left_by_an_exception(world: Any) -> int:
    """Return the number of tensors that are still alive after their operations."""
    import weakref

    group = group_of()
    with (
        pytest.raises(ZeroDivisionError),
        dist._coalescing_manager(group, device=torch.device("cpu")),
    ):
        dist.broadcast(torch.ones(3), 0, group=group)
        raise ZeroDivisionError
    tensors = []
    for _ in range(50):
        tensor = torch.ones(1000)
        dist.broadcast(tensor, 0, group=group)
        tensors.append(weakref.ref(tensor))
    del tensor
    alive = sum(each() is not None for each in tensors)
    # The next block waits for what is still under way, and works.
    numbers = [torch.full((4,), 1.0 + world.rank + i) for i in range(80)]
    with dist._coalescing_manager(group, device=torch.device("cpu")):
        for number in numbers:
            dist.broadcast(number, 1, group=group)
    assert all(torch.equal(each, torch.full((4,), 2.0 + i)) for i, each in enumerate(numbers))
    return alive


def test_a_coalescing_block_that_was_left_by_an_exception_keeps_nothing_alive() -> None:
    assert max(in_world(left_by_an_exception, 2)) <= 2
