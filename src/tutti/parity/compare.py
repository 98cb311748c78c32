"""Training under a layout, compared step by step with the single device.

The tested code is that of `tutti train`: build_engine, the loader's division of the batch, Step and
build_optimizer. Every rank compares the full tensors of the parameters that it holds, so ranks
that should agree and do not are detected, and pipeline stages need not exchange tensors.
"""

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tutti import comm
from tutti.data import Loader
from tutti.parallel.apply import build_engine
from tutti.parallel.engine import Engine
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import local_shard
from tutti.parallel.sync_batchnorm import JointBatchNorm
from tutti.parity.single_device import (
    BETAS,
    MOMENTUM,
    WEIGHT_DECAY,
    OptimizerName,
    Scales,
    StepRecord,
)
from tutti.parity.tolerances import TOLERANCES
from tutti.parity.workload import Workload
from tutti.train.init import build_optimizer
from tutti.train.recipe import Compute, Optimization
from tutti.train.step import Step, Task
from tutti.world.world import World

# full_tensor() warns that gathering over two mesh axes takes two steps. The parity check need not
# be fast, so the warning is disabled.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class Difference(NamedTuple):
    """A tensor a (a gradient, an update or a buffer) compared with the reference's tensor b."""

    name: str
    error: float
    """max |a − b| / max |b|, the largest over all ranks that hold the tensor."""
    factor: float = 1.0
    """The least-squares factor f between a and b: f·b is nearest to a."""
    residual: float = 0.0
    """max |a − f·b| / max |b|: the error that the factor does not explain."""
    spread: float = 0.0
    """Largest minus smallest factor (or residual) of the ranks that should hold the same values."""


class Scalar(NamedTuple):
    """A number a (the loss or the norm) compared with the reference's number b."""

    error: float
    factor: float

    @classmethod
    def between(cls, a: float, b: float) -> "Scalar":
        """Return |a − b| / |b| and a / b; the error of a number that is not finite is infinite."""
        if not (math.isfinite(a) and math.isfinite(b)):
            return cls(math.inf, math.nan)
        if b == 0:
            return cls(0.0, 1.0) if a == 0 else cls(math.inf, math.inf)
        return cls(abs(a - b) / abs(b), a / b)


@dataclass(frozen=True)
class StepDifference:
    """The differences of one step, in the order in which the values are computed."""

    loss: Scalar
    gradients: Sequence[Difference]
    """Of gradients after the reduction over ranks and before clipping."""
    norm: Scalar
    """The global norm that the gradients were clipped by."""
    updates: Sequence[Difference]
    """Parameters after the step minus the initial parameters."""
    buffers: Sequence[Difference] = ()
    """Buffers after the step. Training does not read them, so no value above depends on them."""
    own_buffers: Sequence[str] = ()
    """Buffers that depend on each data rank's own samples and are not compared."""


def wrong(differences: Iterable[Difference], tolerance: float) -> list[Difference]:
    """Return the differences above the tolerance; NaN counts as above."""
    return [each for each in differences if not each.error <= tolerance]


def worst(differences: Iterable[Difference]) -> Difference:
    return max(differences, key=lambda each: each.error if each.error == each.error else math.inf)


def merge_ranks(by_rank: Iterable[Iterable[Difference]]) -> list[Difference]:
    """Return one difference per name: the worst of the ranks that hold the tensor, and the spread
    between these ranks."""
    found: dict[str, list[Difference]] = {}
    for differences in by_rank:
        for each in differences:
            found.setdefault(each.name, []).append(each)
    merged = []
    for name, ranks in found.items():
        factors = [each.factor for each in ranks]
        residuals = [each.residual for each in ranks]
        spread = max(max(factors) - min(factors), max(residuals) - min(residuals))
        merged.append(worst(ranks)._replace(name=name, spread=spread))
    return merged


def buffers_of_own_samples(
    by_rank: Sequence[tuple[int, Sequence[Difference]]], tolerance: float
) -> list[str]:
    """Return the buffers that differ between data ranks and agree within each data rank.

    by_rank: the data rank and the differences of every rank.
    """
    differ_within = {
        each.name
        for one in {data_rank for data_rank, _ in by_rank}
        for each in merge_ranks(found for data_rank, found in by_rank if data_rank == one)
        if each.spread > tolerance
    }
    everywhere = merge_ranks(found for _, found in by_rank)
    return [e.name for e in everywhere if e.spread > tolerance and e.name not in differ_within]


def make_engine(workload: Workload, layout: Layout, world: World) -> Engine:
    """Build the workload's model under a layout, as `tutti train` does."""
    options = workload.options
    dtype = torch.float64 if options.precision == "float64" else torch.float32
    example = workload.samples.inputs[:1].to(world.device)
    microbatches = workload.microbatches(layout)
    return build_engine(
        workload.make_model().to(world.device, dtype).train(),
        world,
        replace(options.engine, sync_batchnorm=workload.batch_norms),
        replace(options.parallel, layout=str(layout)),
        example=example.to(dtype) if example.is_floating_point() else example,
        microbatches=microbatches,
        microbatch_size=workload.batch // layout.data_ranks // microbatches,
        recompute=workload.recompute,
    )


def train_under_layout(
    engine: Engine,
    workload: Workload,
    name: OptimizerName,
    scales: Scales,
    reference: Sequence[StepRecord],
) -> Iterator[StepDifference]:
    """Train with an engine; yields the differences of each step, the same on every rank."""
    options, mesh, device = workload.options, engine.mesh, engine.world.device
    parameters = {  # a tied parameter is listed under the first of its names
        workload.aliases[name]: parameter
        for name, parameter in engine.model.named_parameters()
        if parameter.requires_grad
    }
    start = {n: _full(p) for n, p in parameters.items()}
    optimizer = build_optimizer(
        engine.model,
        Optimization(optimizer=name, momentum=MOMENTUM, betas=BETAS, weight_decay=WEIGHT_DECAY),
        scales.sgd_lr if name == "sgd" else scales.adamw_lr,
    )
    if name == "adamw":
        for group in optimizer.param_groups:
            group["eps"] = scales.eps
    recorder = _GradientRecorder(engine, optimizer, parameters)
    step = Step(
        engine,
        optimizer,
        Task(padded=workload.padded),
        Compute(precision=options.precision),
        workload.samples.inputs[:1].to(device),
        workload.microbatches(mesh.layout),
        scales.clip,
    )
    loader = Loader(
        workload.samples,
        workload.batch,
        rank=mesh.data_rank,
        ranks=mesh.layout.data_ranks,
        shuffle=False,
        drop_last=False,
        device=device,
    )
    tolerance = TOLERANCES[options.precision]
    # AdamW moves every parameter about equally far. A much smaller update has a gradient near zero,
    # so the error of every update is relative to the largest update of all parameters.
    update_floor = tolerance.floor if name == "sgd" else 1.0
    for record, batch in zip(reference, loader.stream(), strict=False):
        loss = comm.all_reduce(step(batch).detach().double())
        updates = {n: _full(p) - start[n] for n, p in parameters.items()}
        named = engine.model.named_buffers(remove_duplicate=False)
        buffers = {n: b for n, b in named if n in record.buffers}
        full_buffers = {n: _full(b) for n, b in buffers.items()}
        floating = [n for n, b in buffers.items() if b.is_floating_point()]
        factor = min(1.0, scales.clip / (record.norm + 1e-6))  # as clip_grad_norm_ defines it
        compared = {
            "gradients": _compare_all(recorder.gradients, record.gradients, tolerance.floor),
            "updates": _compare_all(updates, record.updates, update_floor),
            "buffers": _compare_all(full_buffers, record.buffers, tolerance.floor, floating),
            "clip_factor": recorder.clip_factor,
            "data_rank": mesh.data_rank,
        }
        ranks = comm.gather_json(compared)
        own = _own_buffers(engine, ranks, tolerance.buffer)
        # Gradients scaled down x times too much were divided by a norm that is x times too large.
        clipped = [each for rank in ranks if (each := rank["clip_factor"]) is not None]
        norms = [Scalar.between(factor / each if each else math.inf, 1.0) for each in clipped]
        yield StepDifference(
            loss=Scalar.between(float(loss), record.loss),
            gradients=_all_ranks(ranks, "gradients", record.gradients),
            norm=max(norms, key=lambda norm: norm.error, default=Scalar(0.0, 1.0)),
            updates=_all_ranks(ranks, "updates", record.updates),
            buffers=[e for e in _all_ranks(ranks, "buffers", record.buffers) if e.name not in own],
            own_buffers=own,
        )
    loader.close()


class _GradientRecorder:
    """Records a step's gradients before clipping, and the factor by which they were clipped."""

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        self.parameters = parameters
        self.gradients: dict[str, Tensor] = {}
        self.clip_factor: float | None = None
        """The factor of this rank's shards; None if all of their gradients are zero."""
        self._before: dict[str, Tensor] = {}
        self._run = engine.run
        engine.run = self._run_and_record  # type: ignore[method-assign]
        optimizer.register_step_pre_hook(self._record_clipping)

    def _run_and_record(self, *arguments: Any, **options: Any) -> Tensor:
        loss = self._run(*arguments, **options)
        self._before = {n: local_shard(_gradient(p)).clone() for n, p in self.parameters.items()}
        self.gradients = {n: _full(_gradient(p)) for n, p in self.parameters.items()}
        return loss

    def _record_clipping(self, *_: Any) -> None:
        """Compute the least-squares factor between the gradients before and after clipping."""
        products = squares = 0.0
        for name, parameter in self.parameters.items():
            before = self._before[name].double()
            products += float((before * local_shard(_gradient(parameter)).double()).sum())
            squares += float(before.square().sum())
        self.clip_factor = products / squares if squares else None


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _full(tensor: Tensor) -> Tensor:
    """Gather the full tensor on every rank that holds a shard. Collective over these ranks."""
    tensor = tensor.detach()
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.double().clone()


def compare_tensors(name: str, a: Tensor, b: Tensor, least: float) -> Difference:
    """Compare two tensors; errors are relative to max |b|, or to `least` if that is larger.

    Values of b that are not finite (a causal mask's -inf) must be equal in a.
    """
    finite = b.isfinite()
    if not finite.all():
        if not torch.allclose(a[~finite], b[~finite], rtol=0, atol=0, equal_nan=True):
            return Difference(name, math.inf)
        a, b = a[finite], b[finite]
    if not b.numel():
        return Difference(name, 0.0)
    scale = max(float(b.abs().max()), least) or 1.0
    squares = float((b * b).sum())
    factor = float((a * b).sum()) / squares if squares else 1.0
    error, residual = (float((a - f * b).abs().max()) / scale for f in (1.0, factor))
    return Difference(name, error, factor, residual)


def _compare_all(
    tensors: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    floor: float,
    floored: Collection[str] | None = None,
) -> list[Difference]:
    """Compare tensors by name.

    floored: names to which the floor applies (not those of integer counters); None: all names.
    """
    floored = reference.keys() if floored is None else floored
    values = (reference[name].nan_to_num(0.0, 0.0, 0.0) for name in floored)
    least = floor * max((float(each.abs().max()) for each in values), default=0.0)
    return [
        compare_tensors(name, tensor, reference[name], least if name in floored else 0.0)
        for name, tensor in tensors.items()
    ]


def _own_buffers(engine: Engine, ranks: Sequence[Mapping[str, Any]], tolerance: float) -> list[str]:
    """Return the buffers that depend on each data rank's own samples.

    The parity check synchronises batch norms, so their buffers do not depend on one rank's samples.
    """
    if engine.mesh.layout.data_ranks == 1:
        return []
    modules = engine.model.named_modules()
    synchronised = [name for name, module in modules if isinstance(module, JointBatchNorm)]
    batch_norms = {name for names in comm.gather_json(synchronised) for name in names}
    found = [(each["data_rank"], [Difference(*b) for b in each["buffers"]]) for each in ranks]
    own = buffers_of_own_samples(found, tolerance)
    return [each for each in own if each.rpartition(".")[0] not in batch_norms]


def _all_ranks(
    ranks: Sequence[Mapping[str, Any]], kind: str, reference: Mapping[str, Tensor]
) -> list[Difference]:
    """Return one difference per tensor; a tensor that no rank holds has an infinite error."""
    found = merge_ranks([Difference(*each) for each in rank[kind]] for rank in ranks)
    missing = reference.keys() - {each.name for each in found}
    return found + [Difference(name, math.inf) for name in sorted(missing)]
