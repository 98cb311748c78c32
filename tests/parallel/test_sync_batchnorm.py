"""A synchronised batch norm equals a plain batch norm over the samples of all ranks.

Tolerances, against a plain batch norm in float64: the data are 20 ± 3, so that subtracting the mean
costs a digit, and gradients are differences of sums. In float64 1e-12, in float32 1e-5; in bf16
outputs and gradients are rounded to 2⁻⁹, and two roundings may meet.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import tutti
from splits import ENGINES, Batch, batches, cut, plain_training, sgd, shares, step, worst_error
from tutti.parallel import EngineOptions, Layout, build_engine
from tutti.parallel.sync_batchnorm import convert_batchnorms
from worlds import in_world

NORMS: dict[str, tuple[nn.Module, list[int]]] = {
    "1d": (nn.BatchNorm1d(5), [5]),
    "1d sequences": (nn.BatchNorm1d(5, eps=1e-3), [5, 7]),
    "2d": (nn.BatchNorm2d(5), [5, 3, 4]),
    "2d cumulative": (nn.BatchNorm2d(5, momentum=None), [5, 3, 4]),
    "2d no affine": (nn.BatchNorm2d(5, affine=False), [5, 3, 4]),
    "2d no running statistics": (nn.BatchNorm2d(5, track_running_stats=False), [5, 3, 4]),
    "3d": (nn.BatchNorm3d(5, momentum=0.3), [5, 2, 3, 2]),
}
_ON_GPU = pytest.param((3, True), marks=[pytest.mark.gpu, pytest.mark.timeout(300)])
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2**-8}


def _compare(
    world: tutti.World, norm: nn.Module, shape: list[int], split: str, dtype: torch.dtype
) -> float:
    """The largest relative error of any tensor, over four microbatches and an evaluation."""
    norm = (
        copy.deepcopy(norm).to(world.device).double()
    )  # the reference is float64 for every tested dtype
    for number, parameter in enumerate(norm.parameters()):
        parameter.data = torch.linspace(0.5, 1.5 + number, len(parameter)).to(parameter)
    held_in = torch.promote_types(dtype, torch.float32)
    joint = convert_batchnorms(copy.deepcopy(norm).to(held_in), Layout(dp=world.size).mesh(world))
    assert joint is not norm and joint.state_dict().keys() == norm.state_dict().keys()
    errors = []

    def compare(actual: torch.Tensor, expected: torch.Tensor) -> None:
        if expected.numel():
            scale = expected.double().abs().max().clamp(min=1e-3)
            errors.append(((actual.double() - expected.double()).abs().max() / scale).item())

    for data in batches([9, 6, 12, 6], shape, dtype, world.device):
        x = data[0] * 3 + 20  # far from 0: a variance from Σ x² would be inaccurate
        weight = torch.linspace(0, 99, x.numel()).view_as(x).cos().to(x)
        parts = cut((x, weight), shares(split, world.size))
        whole = x.clone().double().requires_grad_()
        local = parts[world.rank][0].clone().requires_grad_()
        expected, actual = norm(whole), joint(local)
        (expected * weight).sum().backward()
        (actual * parts[world.rank][1]).sum().backward()
        assert whole.grad is not None and actual.dtype == dtype
        compare(actual, cut((expected, expected), shares(split, world.size))[world.rank][0])
        if local.grad is None:  # torch's norm on CUDA sets no gradient without samples
            assert len(local) == 0 and world.device.type == "cuda"
            continue
        compare(local.grad, cut((whole.grad, x), shares(split, world.size))[world.rank][0])
    for parameter, expected in zip(joint.parameters(), norm.parameters(), strict=True):
        assert expected.grad is not None
        if parameter.grad is None:  # torch's norm on CUDA, if this rank never had a sample
            assert world.device.type == "cuda"
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)  # as an engine does
        compare(parameter.grad, expected.grad)
    for buffer, expected_buffer in zip(joint.buffers(), norm.buffers(), strict=True):
        compare(buffer, expected_buffer)
    alone = batches([4 + world.rank], shape, dtype, world.device)[0][
        0
    ]  # no exchange: sizes may differ
    compare(joint.eval()(alone), norm.eval()(alone.double()))
    tutti.check_same(world, model=joint)
    return max(errors)


def _compare_all(world: tutti.World) -> dict[str, dict[str, float]]:
    return {
        dtype: {
            f"{name}, {split}": _compare(world, norm, shape, split, getattr(torch, dtype))
            for name, (norm, shape) in NORMS.items()
            for split in ("even", "uneven", "one rank without")
            if dtype == "float64" or (name == "2d" and split != "even")
        }
        for dtype in TOLERANCES
    }


class _Residual(nn.Module):
    """A batch norm on the input, one inside a branch, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(1)
        self.conv1, self.norm1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 25, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(self.first(x))))
        x = x + self.norm2(self.conv2(x))
        result: torch.Tensor = self.head(F.relu(self.norm2(x)))
        return result


def _train(world: tutti.World) -> dict[str, float]:
    steps = batches([24, 7, 24], [1, 5, 5], torch.float64, world.device)
    errors = {}
    for split in ("uneven", "one rank without"):
        for accumulate in (1, 3):
            weights = shares(split, world.size)

            def microbatches(
                batch: Batch, weights: list[int] = weights, accumulate: int = accumulate
            ) -> list[Batch]:
                """The k-th microbatch of the whole is the k-th of every rank."""
                by_rank = [cut(part, [1] * accumulate) for part in cut(batch, weights)]
                return [
                    (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
                    for parts in zip(*by_rank, strict=True)
                ]

            torch.manual_seed(0)
            model = _Residual().to(world.device).double()
            expected = plain_training(copy.deepcopy(model), steps, microbatches)
            for name in ("scratch grouped", "ddp", "ddp no-overlap", "ddp find-unused"):
                options = ENGINES[name]
                options = EngineOptions(**{**vars(options), "sync_batchnorm": True})
                engine = build_engine(copy.deepcopy(model), world, options)
                optimizer = sgd(engine.model)
                for batch in steps:
                    step(engine, optimizer, batch, weights, accumulate)
                tutti.check_same(world, model=engine.model)
                errors[f"{name}, {split}, {accumulate}"] = worst_error(engine.model, expected)
    return errors


def _refuse(world: tutti.World) -> list[str]:
    messages = []
    mesh = Layout(dp=world.size).mesh(world)
    for try_it in (
        lambda: convert_batchnorms(nn.Sequential(_Custom(3)), mesh),
        lambda: convert_batchnorms(nn.BatchNorm1d(3), mesh)(torch.randn(int(world.is_first), 3)),
    ):
        try:
            try_it()
        except (tutti.UsageError, ValueError) as error:
            messages.append(str(error))
    nothing: Any = convert_batchnorms(nn.BatchNorm1d(3), mesh)
    nothing(torch.randn(0, 3)).sum().backward()  # empty on every rank: no error
    messages.append(f"{nothing.running_mean.tolist()} {int(nothing.num_batches_tracked)}")
    return messages


class _Custom(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def _answer_all(world: tutti.World) -> dict[str, Any]:
    results = {"norms": _compare_all(world), "training": _train(world)}
    results["device"] = world.device.type
    # On CUDA, torch's module accepts any number of values.
    return results if world.device.type == "cuda" else results | {"refusals": _refuse(world)}


@pytest.fixture(scope="module", params=[(2, False), (3, False), _ON_GPU])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The results of two and of three ranks."""
    number, gpu = request.param
    return in_world(_answer_all, number, gpu=gpu)


def test_a_joint_norm_equals_a_plain_one_over_all_samples(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for dtype, errors in rank["norms"].items():
            # On CUDA torch's norm also rounds intermediate values to bfloat16.
            once_more = 2 if rank["device"] == "cuda" and dtype == "bfloat16" else 1
            wrong = {n: e for n, e in errors.items() if not e < once_more * TOLERANCES[dtype]}
            assert not wrong, dtype


def test_training_with_joint_norms_and_accumulation_equals_a_plain_loop(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        wrong = {name: e for name, e in rank["training"].items() if not e < 1e-10}
        assert not wrong


def test_other_batch_norms_are_refused_and_empty_inputs_are_accepted(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        if "refusals" not in rank:
            continue
        custom, one_value, nothing = rank["refusals"]
        assert "--sync-batchnorm cannot replace _Custom" in custom
        assert "needs more than 1 value per channel" in one_value
        assert nothing == "[0.0, 0.0, 0.0] 0"


def _compiled(world: tutti.World) -> list[Any]:
    mesh = Layout(dp=world.size).mesh(world)
    model = nn.Sequential(nn.Linear(4, 4), convert_batchnorms(nn.BatchNorm1d(4), mesh), nn.Tanh())
    compiled = torch.compile(model, backend="aot_eager")
    equal: list[Any] = []
    for count in (3, 5, 7):
        x = torch.randn(count + world.rank, 4)
        equal.append(torch.equal(compiled(x), model(x)))
    return [*equal, counters["stats"]["unique_graphs"]]


def test_a_joint_norm_is_left_out_of_compiled_graphs() -> None:
    for *same, graphs in in_world(_compiled, 2):
        assert all(same)
        assert graphs <= 4  # before and after the norm, for the first size and for all other sizes
