"""Parity of buffers: running statistics, which only evaluation reads."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from planting import instead
from torch import nn

import tutti
from tutti.parallel.layout import Layout
from tutti.parallel.pipeline.stages import Padding
from tutti.parallel.recompute import _Recomputation
from tutti.parallel.sync_batchnorm import CpuBatchNorm
from tutti.parity.compare import Reference, check_layout
from tutti.parity.diagnosis import Difference, buffers_of_own_samples
from tutti.parity.parity_options import ParityOptions
from tutti.parity.single_device import make_workload
from worlds import in_world


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), norm
        # Buffers with infinite values are compared, too.
        mask = torch.full((4, 4), -torch.inf).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(torch.tanh(self.fc(x)).unflatten(1, (4, 2))).flatten(1)


def batch() -> nn.Module:
    blocks = [Block(nn.BatchNorm1d(4)) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 8), *blocks, nn.Linear(8, 3))


def instance() -> nn.Module:
    """Return a model whose norms normalise single samples and keep running statistics of all."""
    blocks = [Block(nn.InstanceNorm1d(4, track_running_stats=True)) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 8), *blocks, nn.Linear(8, 3))


def _nothing() -> AbstractContextManager[None]:
    return nullcontext()


def _counted_again_when_recomputed() -> AbstractContextManager[None]:
    def planted(init: Any) -> Any:
        def wrong(self: _Recomputation, *arguments: Any) -> None:
            init(self, *arguments)
            self._norms = []

        return wrong

    return instead(_Recomputation, "__init__", planted)


def _biased_variance() -> AbstractContextManager[None]:
    def planted(update: Any) -> Any:
        return lambda self, mean, variance: update(self, mean, variance * 0.9)

    return instead(CpuBatchNorm, "_update", planted)


def _copies_are_samples() -> AbstractContextManager[None]:
    """Batch norms in a pipeline include the padding of microbatches in their statistics."""
    return instead(Padding, "microbatch", lambda _: lambda self, number: nullcontext())


CASES: dict[str, tuple[str, str, Callable[[], AbstractContextManager[None]]]] = {
    "dp2": ("batch", "dp2", _nothing),
    "shard2": ("batch", "shard2", _nothing),
    "pp2": ("batch", "pp2", _nothing),
    "instances pp2": ("instance", "pp2", _nothing),
    "instances dp2": ("instance", "dp2", _nothing),
    "twice dp2": ("batch", "dp2", _counted_again_when_recomputed),
    "twice pp2": ("batch", "pp2", _counted_again_when_recomputed),
    "biased": ("batch", "dp2", _biased_variance),
    "filled": ("batch", "pp2", _copies_are_samples),
    "filled instances": ("instance", "pp2", _copies_are_samples),
}


def _check_all(world: tutti.World) -> dict[str, Any]:
    rows = {}
    layouts = [Layout.parse(layout) for layout in ("dp2", "shard2", "pp2")]
    for model in ("batch", "instance"):
        options = ParityOptions(model=f"test_buffers:{model}", steps=2)
        workload = make_workload("lenet", options, layouts)
        reference = Reference(workload, world)
        for name, (of, layout, fault) in CASES.items():
            if of == model:
                with fault():
                    rows[name] = check_layout(workload, Layout.parse(layout), world, reference)
    return rows


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    first, second = in_world(_check_all, 2, timeout=110)
    assert first == second  # all ranks compute the same rows
    return first  # type: ignore[no-any-return]


def test_buffers_that_differ_within_a_data_rank_do_not_depend_on_its_samples() -> None:
    def found(data_rank: int, a: float, b: float) -> tuple[int, list[Difference]]:
        return data_rank, [Difference("by samples", a, a), Difference("by tp", b, b)]

    ranks = [found(0, 1.0, 1.0), found(0, 1.0, 2.0), found(1, 3.0, 1.0), found(1, 3.0, 2.0)]
    assert buffers_of_own_samples(ranks, 0.1) == ["by samples"]


@pytest.mark.parametrize("name", ["dp2", "shard2", "pp2", "instances pp2"])
def test_statistics_agree_with_one_device(rows: dict[str, Any], name: str) -> None:
    row = rows[name]
    assert row["ok"] is True, row
    assert row["buffer_rel_err"] < 1e-12 and row["worst_buffer"].startswith(("1.", "2."))
    assert row["own_buffers"] == []


def test_statistics_of_a_ranks_own_samples_are_named_and_do_not_fail(
    rows: dict[str, Any],
) -> None:
    row = rows["instances dp2"]
    assert row["ok"] is True, row
    assert row["own_buffers"] == [
        *("1.norm.running_mean", "1.norm.running_var"),
        *("2.norm.running_mean", "2.norm.running_var"),
    ]
    assert row["worst_buffer"].endswith(("mask", "num_batches_tracked"))  # the same on all ranks


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("twice dp2", "gradients and updates agree, but 6 of 8 buffers differ"),
        ("twice dp2", "1.norm.num_batches_tracked is 2.000 × too large"),
        ("twice pp2", "1.norm.num_batches_tracked is 2.000 × too large"),
        ("biased", "but 2 of 8 buffers differ; the worst is"),
        ("biased", "norm.running_var"),
        # Padding in the statistics also changes the outputs of a batch norm.
        ("filled", "only from step 2 on, whose 7 samples are not divisible by 1 data ranks × 2"),
        ("filled instances", "only from step 2 on, whose 3 samples are not divisible"),
        ("filled instances", "gradients and updates agree, but 4 of 8 buffers differ"),
    ],
)
def test_a_planted_fault_fails_and_the_buffer_is_named(
    rows: dict[str, Any], name: str, expected: str
) -> None:
    assert rows[name]["ok"] is False
    assert expected in rows[name]["diagnosis"], rows[name]["diagnosis"]
