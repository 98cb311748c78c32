"""Bugs planted in the real engines, on real ranks: parity must detect and name each of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from planting import instead
from torch.distributed.tensor import DTensor, Replicate

import tutti
from tutti.data.loader import Batch
from tutti.models.config import GPTConfig
from tutti.parallel import engine as parallel_engine
from tutti.parallel.ddp import Ddp
from tutti.parallel.engine import Engine
from tutti.parallel.layout import Layout
from tutti.parallel.pipeline import executor
from tutti.parallel.pipeline.tied_weights import TiedWeights
from tutti.parity import compare
from tutti.parity.compare import Reference, check_layout
from tutti.parity.parity_options import ParityOptions
from tutti.parity.single_device import make_workload
from tutti.train import step as train_step
from tutti.train.step import Step
from worlds import in_world

Fault = Callable[[], AbstractContextManager[None]]


def _nothing() -> AbstractContextManager[None]:
    return instead(Engine, "run", lambda run: run)


def _missing_division_by_microbatches() -> AbstractContextManager[None]:
    """Gradients are not divided by the number of microbatches; the reported loss is right."""

    def planted(run: Any) -> Any:
        def wrong(self: Engine, parts: Any, loss_fn: Any, **options: Any) -> Any:
            scale = options.pop("scale")
            return run(self, parts, loss_fn, scale=lambda x: scale(x) * len(parts), **options)

        return wrong

    return instead(Engine, "run", planted)


def _doubled_all_reduce() -> AbstractContextManager[None]:
    def planted(reduce: Any) -> Any:
        def wrong(self: Ddp) -> None:
            reduce(self)
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)

        return wrong

    return instead(Ddp, "reduce", planted)


def _norms_not_reduced_over_tp() -> AbstractContextManager[None]:
    return _not_reduced_over_tp("norm")


def _adapters_not_reduced_over_tp() -> AbstractContextManager[None]:
    return _not_reduced_over_tp("lora_")


def _not_reduced_over_tp(part: str) -> AbstractContextManager[None]:
    def planted(place: Any) -> Any:
        def wrong(model: torch.nn.Module) -> None:
            for name, parameter in model.named_parameters():
                partial = isinstance(parameter.grad, DTensor) and any(
                    placement.is_partial() for placement in parameter.grad.placements
                )
                if part in name and partial and isinstance(parameter.grad, DTensor):
                    mine, mesh = parameter.grad.to_local(), parameter.grad.device_mesh
                    parameter.grad = DTensor.from_local(mine, mesh, [Replicate()], run_check=False)
            place(model)

        return wrong

    return instead(parallel_engine, "place_gradients", planted)


def _dropped_last_sample() -> AbstractContextManager[None]:
    def planted(call: Any) -> Any:
        def wrong(self: Step, batch: Batch) -> Any:
            mesh = self.engine.mesh
            if mesh.data_rank == mesh.layout.data_ranks - 1:
                batch = replace(batch, inputs=batch.inputs[:-1], targets=batch.targets[:-1])
            return call(self, batch)

        return wrong

    return instead(Step, "__call__", planted)


def _half_of_a_tied_gradient() -> AbstractContextManager[None]:
    """The head's part of the tied weight's gradient is lost."""

    def planted(make: Any) -> Any:
        def wrong(*arguments: Any) -> Engine:
            engine: Engine = make(*arguments)
            head = engine.model.head
            head.forward = lambda x: F.linear(x, head.weight.detach())
            return engine

        return wrong

    return instead(compare, "build_engine", lambda make: _keywords(planted, make))


def _keywords(planted: Any, make: Any) -> Any:
    def wrong(*arguments: Any, **options: Any) -> Any:
        return planted(lambda: make(*arguments, **options))()

    return wrong


def _norm_of_one_part() -> AbstractContextManager[None]:
    """Clipping uses a norm of only half of the squares."""
    return instead(
        train_step,
        "clip_by_global_norm",
        lambda clip: lambda engine, max_norm: clip(engine, max_norm * 2**0.5),
    )


def _loss_counted_by_every_tp_rank() -> AbstractContextManager[None]:
    return instead(Engine, "reports_loss", lambda original: property(lambda self: True))


def _copies_that_keep_their_own_part() -> AbstractContextManager[None]:
    """The first and last stage of a pipeline do not sum the gradients of their tied weight."""
    return instead(TiedWeights, "sum_gradients", lambda add: lambda self, model: None)


def _gradients_divided_by_the_schedule() -> AbstractContextManager[None]:
    """The schedule also divides by the number of microbatches, which is torch's default."""

    def planted(build: Any) -> Any:
        def wrong(*arguments: Any) -> Any:
            schedule = build(*arguments)
            schedule.scale_grads = True
            return schedule

        return wrong

    return instead(executor, "build_schedule", planted)


FAULTS: dict[str, tuple[str, bool, Fault]] = {
    "none dp2": ("dp2", True, _nothing),
    "none tp2": ("tp2", False, _nothing),
    "division": ("dp2", False, _missing_division_by_microbatches),
    "all-reduce": ("dp2", False, _doubled_all_reduce),
    "norms": ("tp2", False, _norms_not_reduced_over_tp),
    "sample": ("dp2", False, _dropped_last_sample),
    "tied": ("dp2", True, _half_of_a_tied_gradient),
    "clipping": ("shard2", False, _norm_of_one_part),
    "loss": ("tp2", False, _loss_counted_by_every_tp_rank),
    "none pp2": ("pp2", True, _nothing),
    "copies": ("pp2", True, _copies_that_keep_their_own_part),
    "schedule": ("pp2", False, _gradients_divided_by_the_schedule),
}


# With LoRA adapters on all linear layers of the blocks.
ADAPTER_FAULTS: dict[str, tuple[str, Fault]] = {
    "none with adapters": ("tp2", _nothing),
    "adapters": ("tp2", _adapters_not_reduced_over_tp),
}


def _plant_all(world: tutti.World) -> dict[str, dict[str, Any]]:
    rows = {}
    shape = GPTConfig(vocab_size=16, max_seq_len=8, layers=2, dim=16, heads=2, mlp_dim=32)
    options = ParityOptions(architecture=shape, lora="rank=2", seq_len=8, steps=2)
    workload = make_workload("gpt", options, [Layout.parse("tp2")])
    reference = Reference(workload, world)
    for name, (layout, fault) in ADAPTER_FAULTS.items():
        with fault():
            rows[name] = check_layout(workload, Layout.parse(layout), world, reference)
    for tied in (False, True):
        shape = GPTConfig(
            vocab_size=16, max_seq_len=8, layers=2, dim=16, heads=2, mlp_dim=32, tied=tied
        )
        options = ParityOptions(architecture=shape, seq_len=8, steps=2)
        layouts = [Layout.parse(layout) for layout, _, _ in FAULTS.values()]
        workload = make_workload("gpt", options, layouts)
        reference = Reference(workload, world)
        for name, (layout, of_tied, fault) in FAULTS.items():
            if of_tied == tied:
                with fault():
                    rows[name] = check_layout(workload, Layout.parse(layout), world, reference)
    return rows


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    first, second = in_world(_plant_all, 2, timeout=110)
    assert first == second  # all ranks compute the same rows
    return first  # type: ignore[no-any-return]


def test_without_a_bug_all_layouts_pass(rows: dict[str, dict[str, Any]]) -> None:
    for name in ("none dp2", "none tp2", "none pp2", "none with adapters"):
        assert rows[name]["ok"] and rows[name]["diagnosis"] is None
        assert rows[name]["grad_rel_err"] < 1e-12


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("division", "gradients are 3.000 × too large: not divided by the microbatches = 3"),
        ("all-reduce", "gradients are 2.000 × too large: not divided by dp = 2, or summed"),
        ("norms", "only norm parameters are wrong, 5 of 5"),
        ("norms", "not reduced over tp"),
        ("sample", "1 of the step's 6 samples is missing"),
        ("tied", "only embed.weight, the tied embedding, is wrong (half of its gradient"),
        ("clipping", "the norm for clipping is 1.414 × too small, the root of shard = 2"),
        ("copies", "embed.weight"),
        ("adapters", "lora_"),
        ("schedule", "too small"),
        ("loss", "the loss is 2.000 × too large, but all gradients agree: the factor is tp = 2"),
    ],
)
def test_a_planted_fault_fails_and_is_named(
    rows: dict[str, dict[str, Any]], fault: str, expected: str
) -> None:
    row = rows[fault]
    assert row["ok"] is False
    assert expected in row["diagnosis"], row
    assert row["worst_parameter"] in ("embed.weight", "head.weight", "norm.weight") or row[
        "worst_parameter"
    ].startswith("blocks.")
