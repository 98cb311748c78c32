"""tutti.parallelize(): a model for your own training loop."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tutti
from worlds import in_world


def _own_loop(world: tutti.World) -> dict[str, Any]:
    torch.manual_seed(world.rank)  # the parameters of rank 0 are broadcast
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    replica = tutti.parallelize(model, "dp2", world=world, sync_batchnorm=True, bucket_mb=1.0)
    tutti.check_same(world, model=replica)

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    x = torch.randn(10, 4)
    optimizers = [torch.optim.SGD(trained.parameters(), lr=0.1) for trained in (plain, replica)]
    for _ in range(5):
        for trained, optimizer, data in zip(
            (plain, replica), optimizers, (x, x.view(2, 5, 4)[world.rank]), strict=True
        ):
            optimizer.zero_grad()
            trained(data).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(plain.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-6)

    try:
        tutti.parallelize(nn.Linear(2, 2), tutti.Layout(dp=3), world=world)
    except tutti.UsageError as error:
        return {"ddp": isinstance(replica, DistributedDataParallel), "error": str(error)}
    return {}


def test_a_training_loop_on_two_ranks_equals_one_on_the_whole_batch() -> None:
    for result in in_world(_own_loop, 2):
        assert result == {
            "ddp": True,
            "error": "layout dp3 needs 3 ranks, but this world has 2: use --ranks 3 or dp2",
        }


def test_in_a_world_of_one_the_result_is_the_model_itself() -> None:
    with tutti.init(device="cpu") as world:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        assert tutti.parallelize(model, world=world, sync_batchnorm=True) is model
        assert type(model[1]) is nn.BatchNorm1d
        with pytest.raises(tutti.UsageError, match="dp2 needs 2 ranks, but this world has 1"):
            tutti.parallelize(model, "dp2", world=world)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grow, self.shrink = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        out: torch.Tensor = self.shrink(input=self.grow(input=hidden_states).tanh())
        return out * scale


class _Feed(nn.Module):
    """Layers that the rules name and one that they do not name, called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(2))
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(scale=0.5, hidden_states=x)
        out: torch.Tensor = self.last(x)
        return out


RULES = {"layers.*": "input", "layers.*.grow": "column", "layers.*.shrink": "row"}


def _own_layouts(world: tutti.World) -> dict[str, Any]:
    results: dict[str, Any] = {}
    torch.manual_seed(1)
    x = torch.randn(8, 6, dtype=torch.float64)
    for text in ("tp2", "shard2"):
        losses: dict[str, list[float]] = {}
        for kind in ("plain", text):
            torch.manual_seed(0)
            model: nn.Module = _Feed().double()
            layout = tutti.Layout.parse(text)
            data = x
            if kind == text:
                model = tutti.parallelize(model, layout, world=world, rules=RULES)  # type: ignore[arg-type]
                data = x.chunk(layout.data_ranks)[layout.mesh(world).data_rank]
            # foreach=False: tp does not split `last`, and torch cannot mix tensors and DTensors.
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
            losses[kind] = []
            for _ in range(4):
                optimizer.zero_grad()
                loss = model(data).square().mean()
                loss.backward()
                optimizer.step()
                losses[kind].append(float(loss))
        results[text] = losses
    for name, rules, layout_text in (
        ("name", {"layers.*.grwo": "column"}, "tp2"),
        ("no plan", None, "tp2"),
        ("pipeline", None, "pp2"),
    ):
        try:
            tutti.parallelize(_Feed(), layout_text, world=world, rules=rules)  # type: ignore[arg-type]
        except tutti.UsageError as error:
            results[name] = str(error)
    return results


def test_a_model_is_split_by_rules_and_sharded() -> None:
    first, second = in_world(_own_layouts, 2)
    assert first["tp2"]["tp2"] == pytest.approx(first["tp2"]["plain"], rel=1e-12)
    # Each shard has the mean loss of its half of the batch.
    halves = zip(first["shard2"]["shard2"], second["shard2"]["shard2"], strict=True)
    means = [sum(pair) / 2 for pair in halves]
    assert means == pytest.approx(first["shard2"]["plain"], rel=1e-12)
    assert "did you mean layers.*.grow?" in first["name"]
    assert "no layer of _Feed" in first["no plan"] and "give rules" in first["no plan"]
    assert "a pipeline, which runs whole steps" in first["pipeline"]
