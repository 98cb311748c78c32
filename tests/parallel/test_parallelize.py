"""tutti.parallelize(): a model for one's own loop."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tutti
from worlds import in_world


def _own_loop(world: tutti.World) -> dict[str, Any]:
    torch.manual_seed(world.rank)  # rank 0's model wins
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    replica = tutti.parallelize(model, "dp2", world=world, sync_batchnorm=True, bucket_mb=1.0)
    tutti.check_same(world, model=replica)

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    x = torch.randn(10, 4)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, replica)]
    for _ in range(5):
        for each, optimizer, data in zip(
            (plain, replica), optimizers, (x, x.view(2, 5, 4)[world.rank]), strict=True
        ):
            optimizer.zero_grad()
            each(data).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(plain.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-6)

    try:
        tutti.parallelize(nn.Linear(2, 2), tutti.Layout(dp=3), world=world)
    except tutti.UsageError as error:
        return {"ddp": isinstance(replica, DistributedDataParallel), "error": str(error)}
    return {}


def test_ones_own_loop_on_two_ranks_equals_one_on_the_whole_batch() -> None:
    for result in in_world(_own_loop, 2):
        assert result == {
            "ddp": True,
            "error": "layout dp3 needs 3 ranks, this world has 2: use --ranks 3 or dp2",
        }


def test_in_a_world_of_one_it_is_the_model_itself() -> None:
    with tutti.init(device="cpu") as world:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        assert tutti.parallelize(model, world=world, sync_batchnorm=True) is model
        assert type(model[1]) is nn.BatchNorm1d
        with pytest.raises(tutti.UsageError, match="layout dp2 needs 2 ranks, this world has 1"):
            tutti.parallelize(model, "dp2", world=world)
