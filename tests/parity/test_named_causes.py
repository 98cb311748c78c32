"""Models that no layout can repeat: parity fails and names the cause."""

import os
import time
from typing import Any

import torch
from torch import Tensor, nn

import tutti
from tutti.parallel.layout import Layout
from tutti.parity.compare import Reference, check_layout
from tutti.parity.parity_options import ParityOptions
from tutti.parity.single_device import make_workload
from worlds import in_world

RANK = int(os.environ.get("RANK", "0"))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(torch.tanh(self.fc1(x)))
        return out


class Coupled(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Random(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + torch.rand(1, dtype=x.dtype))


class Clock(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + time.perf_counter() % 1)


class Counter(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class RankScale(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.1 * RANK)


class RankWeights(Plain):
    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.fc1.bias, RANK)


class NotANumber(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.nan


# Model and layout → words of the diagnosis; None: no difference.
CAUSES: dict[tuple[type[nn.Module], str], str | None] = {
    (Plain, "dp2"): None,
    (Plain, "tp2"): None,
    (Coupled, "dp2"): "samples of a batch are coupled",
    (Random, "dp2"): "draws random numbers",
    (Clock, "dp2"): "depends on the time",
    (Counter, "dp2"): "forward changes the model",
    (RankScale, "dp2"): "forward depends on the rank",
    (RankWeights, "dp2"): "the parameters of rank 1",
    (RankWeights, "tp2"): "the parameters of rank 1",
}


def _check_all(world: tutti.World) -> Any:
    rows = []
    for kind, layout in CAUSES:
        reference = _reference(kind, layout, world)
        rows.append(check_layout(reference.workload, Layout.parse(layout), world, reference))
    try:
        _reference(NotANumber, "dp2", world)
        refusal = ""
    except tutti.UsageError as error:
        refusal = str(error)
    return [{key: row[key] for key in ("layout", "diagnosis", "ok")} for row in rows], refusal


def _reference(kind: type[nn.Module], layout: str, world: tutti.World) -> Reference:
    options = ParityOptions(model=f"{__name__}:{kind.__name__}", steps=2)
    return Reference(make_workload("gpt", options, [Layout.parse(layout)]), world)


def test_each_cause_is_named_on_all_ranks() -> None:
    (first, refusal), second = in_world(_check_all, 2)
    assert second == [first, refusal]
    assert "NotANumber" in refusal and "not finite" in refusal
    for ((kind, layout), expected), row in zip(CAUSES.items(), first, strict=True):
        case = f"{kind.__name__} {layout}: {row}"
        assert row["ok"] is (expected is None), case
        assert row["diagnosis"] is None if expected is None else expected in row["diagnosis"], case
        assert ".;" not in (row["diagnosis"] or ""), case
        assert "samples or the weights differ" not in (row["diagnosis"] or ""), case
