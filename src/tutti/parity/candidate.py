"""A layout: the same training as `tutti train` does it, compared with one device as it goes.

The path that is tested is the real one: build_engine, the loader's cut, Step, build_optimizer.
Every rank compares what it holds, gathered to full tensors, with the reference; so ranks that
should agree and do not are seen, and no stage of a pipeline has to be sent anywhere.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tutti.data import Loader
from tutti.parallel.build import build_engine
from tutti.parallel.engine import Engine
from tutti.parallel.layout import Layout
from tutti.parallel.pieces import local
from tutti.parallel.sync_batchnorm import JointBatchNorm
from tutti.parity.case import Case
from tutti.parity.difference import (
    Difference,
    Scalar,
    StepDifference,
    merged,
    of_own_samples,
)
from tutti.parity.reference import (
    BETAS,
    MOMENTUM,
    WEIGHT_DECAY,
    OptimizerName,
    Scales,
    StepRecord,
)
from tutti.parity.tolerance import TOLERANCES
from tutti.train.optimizer import build_optimizer
from tutti.train.recipe import Compute, Optimization
from tutti.train.step import Step
from tutti.train.task import Task
from tutti.world.exchange import gather_json
from tutti.world.world import World

# full_tensor() warns that gathering over two axes takes two steps; for a check that is well.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def make_engine(case: Case, layout: Layout, world: World) -> Engine:
    """The case's model under a layout, as `tutti train` would place it."""
    options = case.options
    dtype = torch.float64 if options.precision == "float64" else torch.float32
    example = case.samples.inputs[:1].to(world.device)
    return build_engine(
        case.make_model().to(world.device, dtype).train(),
        world,
        replace(options.engine, sync_batchnorm=case.batch_norms),
        replace(options.parallel, layout=str(layout)),
        example=example.to(dtype) if example.is_floating_point() else example,
        microbatches=case.microbatches(layout),
        microbatch_size=case.batch // layout.data_ranks // case.microbatches(layout),
        recompute=case.recompute,
    )


def train_under(
    engine: Engine,
    case: Case,
    name: OptimizerName,
    scales: Scales,
    reference: Sequence[StepRecord],
) -> Iterator[StepDifference]:
    """Train under the engine's layout; gives what differs in each step, the same on every rank."""
    options, grid, device = case.options, engine.grid, engine.world.device
    parameters = _by_name(engine, case)
    start = {n: _full(p) for n, p in parameters.items()}
    optimizer = build_optimizer(
        engine.model,
        Optimization(optimizer=name, momentum=MOMENTUM, betas=BETAS, weight_decay=WEIGHT_DECAY),
        scales.sgd_lr if name == "sgd" else scales.adamw_lr,
    )
    for group in optimizer.param_groups:
        if name == "adamw":
            group["eps"] = scales.eps
    watch = _Watch(engine, optimizer, parameters)
    step = Step(
        engine,
        optimizer,
        Task(padded=case.padded),
        Compute(precision=options.precision),
        case.samples.inputs[:1].to(device),
        case.microbatches(grid.layout),
        scales.clip,
    )
    loader = Loader(
        case.samples,
        case.batch,
        rank=grid.data_rank,
        ranks=grid.layout.data_ranks,
        shuffle=False,
        drop_last=False,
        device=device,
    )
    floor = TOLERANCES[options.precision].floor
    # AdamW moves every parameter about equally far: one that moves less has hardly a gradient.
    update_floor = floor if name == "sgd" else 1.0
    for record, batch in zip(reference, loader.stream(), strict=False):
        loss = step(batch).detach().double()
        dist.all_reduce(loss)
        updates = {n: _full(p) - start[n] for n, p in parameters.items()}
        factor = min(1.0, scales.clip / (record.norm + 1e-6))  # as torch defines it
        mine = {
            "gradients": _compared(watch.gradients, record.gradients, floor),
            "updates": _compared(updates, record.updates, update_floor),
            "clipped": watch.clipped,
            "buffers": _compared_buffers(engine.model, record.buffers, floor),
            "data_rank": grid.data_rank,
        }
        ranks = gather_json(mine)
        buffers = _all(ranks, "buffers", record.buffers)
        own = _own_buffers(engine, ranks, TOLERANCES[options.precision].buffer)
        # Gradients that were made x times too small were divided by a norm x times too large.
        clipped = [each for rank in ranks if (each := rank["clipped"]) is not None]
        norms = [Scalar.between(factor / each if each else math.inf, 1.0) for each in clipped]
        yield StepDifference(
            loss=Scalar.between(float(loss), record.loss),
            gradients=_all(ranks, "gradients", record.gradients),
            norm=max(norms, key=lambda norm: norm.error, default=Scalar(0.0, 1.0)),
            updates=_all(ranks, "updates", record.updates),
            buffers=[each for each in buffers if each.name not in own],
            own_buffers=own,
        )
    loader.close()


class _Watch:
    """Looks at a step's gradients twice: before they are clipped, and when they are applied."""

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        self.parameters = parameters
        self.gradients: dict[str, Tensor] = {}
        self.clipped: float | None = None
        """By which factor this rank's part was clipped; None where it holds nothing but zeros."""
        self._before: dict[str, Tensor] = {}
        self._run = engine.run
        engine.run = self._watched  # type: ignore[method-assign,assignment]
        optimizer.register_step_pre_hook(self._applied)

    def _watched(self, *arguments: Any) -> Tensor:
        loss = self._run(*arguments)
        self._before = {n: local(_gradient(p)).clone() for n, p in self.parameters.items()}
        self.gradients = {n: _full(_gradient(p)) for n, p in self.parameters.items()}
        return loss

    def _applied(self, *_: Any) -> None:
        """The least-squares factor between the two, over all that this rank holds."""
        products = squares = 0.0
        for name, parameter in self.parameters.items():
            before = self._before[name].double()
            products += float((before * local(_gradient(parameter)).double()).sum())
            squares += float(before.square().sum())
        self.clipped = products / squares if squares else None


def _by_name(engine: Engine, case: Case) -> dict[str, nn.Parameter]:
    """This rank's parameters, a tied one under the first of its names."""
    return {
        case.aliases[name]: parameter
        for name, parameter in engine.model.named_parameters()
        if parameter.requires_grad
    }


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _full(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank that holds a part of it. All of these must ask."""
    tensor = tensor.detach()
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.double().clone()


def _compared(
    mine: Mapping[str, Tensor], reference: Mapping[str, Tensor], floor: float
) -> list[dict[str, Any]]:
    largest = max(float(each.abs().max()) for each in reference.values())
    return [
        asdict(difference(name, tensor, reference[name], floor * largest))
        for name, tensor in mine.items()
    ]


def _compared_buffers(
    model: nn.Module, reference: Mapping[str, Tensor], floor: float
) -> list[dict[str, Any]]:
    """This rank's buffers; a count is compared with itself alone, not with larger values."""
    mine = {n: b for n, b in model.named_buffers(remove_duplicate=False) if n in reference}
    numbers = {n for n, b in mine.items() if b.is_floating_point()}
    finite = [reference[n][reference[n].isfinite()] for n in numbers]
    largest = max((float(each.abs().max()) for each in finite if each.numel()), default=0.0)
    return [
        asdict(
            _compared_buffer(n, _full(b), reference[n], floor * largest if n in numbers else 0.0)
        )
        for n, b in mine.items()
    ]


def _compared_buffer(name: str, a: Tensor, b: Tensor, least: float) -> Difference:
    """What is not finite, such as a causal mask's -inf, must be the same in both."""
    finite = b.isfinite()
    if not finite.all():
        if not torch.allclose(a[~finite], b[~finite], rtol=0, atol=0, equal_nan=True):
            return Difference(name, math.inf)
        a, b = a[finite], b[finite]
    return difference(name, a, b, least) if b.numel() else Difference(name, 0.0)


def _own_buffers(engine: Engine, ranks: Sequence[Mapping[str, Any]], tolerance: float) -> list[str]:
    """Those that say something of each data rank's own samples, and so differ between them.

    Not those of batch norms, which are joint here, on this rank or on another stage.
    """
    if engine.grid.layout.data_ranks == 1:
        return []
    modules = engine.model.named_modules()
    mine = [name for name, module in modules if isinstance(module, JointBatchNorm)]
    joint = {name for names in gather_json(mine) for name in names}
    seen = [(rank["data_rank"], [Difference(**each) for each in rank["buffers"]]) for rank in ranks]
    return [
        each for each in of_own_samples(seen, tolerance) if each.rpartition(".")[0] not in joint
    ]


def difference(name: str, a: Tensor, b: Tensor, least: float) -> Difference:
    """One tensor against another; `least` is what max |b| counts as where it is smaller."""
    scale = max(float(b.abs().max()), least) or 1.0
    squares = float((b * b).sum())
    factor = float((a * b).sum()) / squares if squares else 1.0
    error, residual = (float((a - f * b).abs().max()) / scale for f in (1.0, factor))
    return Difference(name, error, factor, residual)


def _all(
    ranks: Sequence[Mapping[str, Any]], what: str, reference: Mapping[str, Tensor]
) -> list[Difference]:
    """Every parameter or buffer of the model once; one that no rank holds is infinitely wrong."""
    found = merged([Difference(**each) for each in rank[what]] for rank in ranks)
    missing = reference.keys() - {each.name for each in found}
    return found + [Difference(name, float("inf")) for name in sorted(missing)]
