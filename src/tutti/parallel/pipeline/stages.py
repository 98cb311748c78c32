"""Cuts a model into pipeline stages: the layers, the cost of each layer, and the cuts.

Three kinds of models can be cut:

- `nn.Sequential`: every child is a layer;
- a module with `cuttable = True`: its forward runs its children in definition order, and also works
  if children are None or entries of ModuleDicts are missing. The layers are the children with
  parameters and the entries of ModuleDicts. Every stage keeps the children without parameters;
- any other model with repeated blocks, such as a Hugging Face model (see block_units.py).

A stage is the whole model without the layers of other stages. Therefore layers and parameters have
the same names in a stage, in the whole model and in checkpoints.
"""

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.flop_counter import FlopCounterMode

from tutti.parallel.layout import ParallelOptions, check_stages
from tutti.parallel.materialize import Weights, materialize
from tutti.parallel.mesh import Mesh
from tutti.parallel.pipeline.block_units import (
    MetaConditions,
    find_units,
    keep_units,
    set_units,
    units_of,
)
from tutti.parallel.pipeline.schedules import stages_of
from tutti.parallel.pipeline.tied_weights import Tie, find_ties, untie
from tutti.parallel.sync_batchnorm import JointBatchNorm
from tutti.world.errors import UsageError
from tutti.world.exchange import gather_json

_BACKWARD_FLOPS = 2  # (FLOPs of backward) / (FLOPs of forward): gradients of inputs and of weights
_REPEATS = 5


@dataclass(frozen=True)
class Stages:
    """The stages of this rank, and the layers and tied parameters of all stages."""

    modules: dict[int, nn.Module]
    """The modules of this rank's stages, keyed by stage index. If the rank has one stage, this
    stage is the model itself. If the rank has several stages, each stage is a view of some of the
    model's layers."""
    layers: list[list[str]]
    """The layer names of every stage of the pipeline."""
    ties: list[Tie]
    padding: "Padding"


def cut_model(
    model: nn.Module,
    mesh: Mesh,
    options: ParallelOptions,
    example: Tensor,
    microbatch_size: int,
    weights: Weights | None = None,
) -> Stages:
    """Cut the whole model into stages, and remove the layers of other ranks, in place."""
    pp, per_rank = mesh.layout.pp, options.virtual_stages
    names = plan_stages(model, pp, options, example, weights, mesh.world.device)
    held = stages_of(options.pipeline_schedule, mesh.rank("pp"), pp, per_rank)
    ties = find_ties(model, names)
    untie(model, ties, held)
    keep_layers(model, [name for stage in held for name in names[stage]])
    modules = {held[0]: model}
    if len(held) > 1:
        modules = {stage: layer_view(model, names[stage]) for stage in held}
    return Stages(modules, names, ties, Padding(model, microbatch_size))


def plan_stages(
    model: nn.Module,
    pp: int,
    options: ParallelOptions,
    example: Tensor,
    weights: Weights | None = None,
    device: torch.device | None = None,
) -> list[list[str]]:
    """Return the layer names of every stage, balanced by `options.balance`."""
    if not (_is_sequential(model) or getattr(model, "cuttable", False)):
        set_units(model, find_units(_on_meta(model), example))
    units = layer_units(model)
    check_stages(len(units), pp, options.virtual_stages, "consecutive parts with parameters")
    stages = pp * options.virtual_stages
    if options.balance == "even":
        cuts = cut_evenly(len(units), stages)
    elif options.balance == "counted":
        cuts = cut_by_cost(counted_flops(model, units, example), stages)
    else:
        cuts = cut_by_cost(measured_seconds(model, units, example, weights, device), stages)
    return [[name for unit in units[cut.start : cut.stop] for name in unit] for cut in cuts]


def layer_names(model: nn.Module) -> list[str]:
    """Return the names of a model's layers, in the order in which forward runs them."""
    if _is_sequential(model):
        return list(model._modules)
    if units := units_of(model):
        return [name for unit in units.names for name in unit]
    for name, _ in model.named_parameters(recurse=False):
        raise UsageError(
            f"{type(model).__name__} cannot be cut into pipeline stages, because its parameter "
            f"{name} belongs to no layer: put the parameter into a child module"
        )
    names = []
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict):
            names += [f"{name}.{key}" for key in child]
        elif _has_parameters(child):
            names.append(name)
    return names


def layer_units(model: nn.Module) -> list[list[str]]:
    """Return units of consecutive layers. Each unit has parameters and is never cut."""
    if found := units_of(model):
        return found.names
    units: list[list[str]] = [[]]
    complete = False  # whether the last unit has parameters
    for name in layer_names(model):
        has_parameters = _has_parameters(model.get_submodule(name))
        if has_parameters and complete:
            units.append([])
        units[-1].append(name)
        complete = complete or has_parameters
    return units


def keep_layers(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Remove all layers except `names` from the model, in place. Kept layers keep their names."""
    if units := units_of(model):
        keep_units(model, units, set(names))
        return model
    for name in set(layer_names(model)).difference(names):
        parent, _, key = name.rpartition(".")
        if parent or _is_sequential(model):
            # `del sequential[0]` would renumber the other layers.
            model.get_submodule(parent)._modules.pop(key)
        else:
            setattr(model, name, None)
    return model


def layer_view(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Return a second module with some of the model's layers. Both modules share these layers."""
    view = _shallow_copy(model)
    copied = {"": view}
    # The modules that contain layers are copied, because they have fewer layers in the view.
    for layer in layer_names(model):
        path, _, _ = layer.rpartition(".")
        for name in accumulate(path.split("."), "{}.{}".format) if path else ():
            parent, _, key = name.rpartition(".")
            if name not in copied:
                copied[name] = _shallow_copy(model.get_submodule(name))
                copied[parent]._modules[key] = copied[name]
    return keep_layers(view, names)


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Return a copy that shares children and parameters, but has its own dicts and hooks."""
    result = copy.copy(module)
    for key, value in vars(result).items():
        if isinstance(value, dict | set):
            vars(result)[key] = value.copy()
    return result


def _is_sequential(model: nn.Module) -> bool:
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def cut_by_cost(costs: Sequence[float], stages: int) -> list[range]:
    """Cut layers into contiguous, non-empty parts. Minimize the cost of the most expensive part.

    The slowest stage determines the speed of a pipeline, because the other stages wait for it.
    Among equally good cuts, the cut with the smallest sum of squared costs is chosen.
    """
    check_stages(len(costs), stages, 1)
    sums = list(accumulate(costs, initial=0.0))
    largest, _ = _best_cut(sums, stages, max)

    def squares(best: float, part: float) -> float:
        return best + part * part if part <= largest else float("inf")

    _, ends = _best_cut(sums, stages, squares)
    return [range(start, end) for start, end in pairwise([0, *ends])]


def _best_cut(
    sums: Sequence[float], stages: int, join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return (value, ends) of the cut with the smallest value, by dynamic programming.

    The layers from `start` to `end` - 1 cost sums[end] - sums[start]. `join` combines the value of
    a cut with the cost of one more part. `ends` contains the end of each part.
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # key: number of layers in the cut
    for stage in range(1, stages + 1):
        longer: dict[int, tuple[float, list[int]]] = {}
        for end in range(stage, len(sums) - (stages - stage)):
            candidates = [
                (join(value, sums[end] - sums[start]), [*ends, end])
                for start, (value, ends) in best.items()
                if start < end
            ]
            longer[end] = min(candidates, key=lambda candidate: candidate[0])
        best = longer
    return best[len(sums) - 1]


def cut_evenly(count: int, stages: int) -> list[range]:
    """Cut layers into parts whose sizes differ by at most one. No part is larger than the first."""
    check_stages(count, stages, 1)
    ends = [-(-count * (stage + 1) // stages) for stage in range(stages)]
    return [range(start, end) for start, end in pairwise([0, *ends])]


@torch.no_grad()
def counted_flops(model: nn.Module, units: list[list[str]], example: Tensor) -> list[float]:
    """Return the forward and backward FLOPs of each unit, for inputs like the example.

    The model runs on the meta device, and only matrix products are counted. Operations that are
    limited by memory bandwidth (norms, activation functions, embedding look-ups) count as 0.
    """
    meta_model = _on_meta(model)
    for norm in meta_model.modules():
        if isinstance(norm, _NormBase):
            norm.eval()  # in training mode, a norm may need several samples or a collective
    x = example.to("meta")
    counted: dict[object, tuple[float, Tensor]] = {}
    costs = []
    for names in units:
        # The blocks of a transformer are equal, so only one block runs.
        layers = dict(meta_model.named_modules())
        modules = [layers[name] for name in names if name in layers]
        shapes = [[parameter.shape for parameter in module.parameters()] for module in modules]
        kind = (repr(modules), repr(shapes), x.shape, x.dtype)
        if kind not in counted:
            try:
                with (
                    MetaConditions(),  # type: ignore[no-untyped-call]
                    FlopCounterMode(display=False) as counter,
                ):
                    output = layer_view(meta_model, names)(x)
            except (RuntimeError, NotImplementedError) as error:
                raise UsageError(
                    f"--balance counted cannot count the FLOPs of {names[0]} on the meta device "
                    f"({error}): use --balance measured or --balance even"
                ) from error
            counted[kind] = float((1 + _BACKWARD_FLOPS) * counter.get_total_flops()), output
        cost, x = counted[kind]
        costs.append(cost)
    return costs


def measured_seconds(
    model: nn.Module,
    units: list[list[str]],
    example: Tensor,
    weights: Weights | None = None,
    device: torch.device | None = None,
) -> list[float]:
    """Return the forward and backward seconds of each unit.

    Memory is allocated for one unit at a time. All ranks use the times of rank 0, because all ranks
    must make the same cuts.
    """
    # Batch norms in training need at least two samples.
    x = torch.cat([example, example]) if len(example) == 1 else example
    costs = []
    for names in units:
        stage = _on_meta(layer_view(model, names), buffers=False)
        materialize(stage, device or x.device)
        if weights is not None:
            weights.fill(stage)
        seconds = []
        for _ in range(1 + _REPEATS):
            leaf = x.detach().requires_grad_(x.is_floating_point())
            start = now(x.device)
            output = stage(leaf)
            trained = [tensor for tensor in (leaf, *stage.parameters()) if tensor.requires_grad]
            if trained and output.requires_grad:  # false for a frozen embedding
                torch.autograd.grad(output, trained, torch.ones_like(output), allow_unused=True)
            seconds.append(now(x.device) - start)
        costs.append(statistics.median(seconds[1:]))  # the first run is warm-up
        x = output.detach()
    of_rank_0: list[float] = gather_json(costs)[0]
    return of_rank_0


def _on_meta(model: nn.Module, buffers: bool = True) -> nn.Module:
    """Return a copy of the model with its parameters (and buffers) on the meta device."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta") if buffers else buffer.clone()
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, dist.ProcessGroup):  # deepcopy would fail
                memo[id(value)] = value
    result: nn.Module = copy.deepcopy(model, memo)
    if buffers and hasattr(result, "set_experts_implementation"):
        # The default implementation of experts (a grouped matrix product) works on meta only in
        # bfloat16.
        result.set_experts_implementation("batched_mm")  # type: ignore[operator]
    return result


def now(device: torch.device) -> float:
    """Return the time in seconds, after the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Padding:
    """Excludes padded samples from the statistics of this rank's norms.

    All microbatches of a schedule must have the same size, so the last microbatches of an epoch are
    padded with copies of a sample. In most layers, the copies do not affect the real samples. A
    norm that computes statistics over samples gets only the real samples, and its output is padded
    with zeros.
    """

    def __init__(self, model: nn.Module, size: int) -> None:
        """`size` is the number of samples in every microbatch, including padded samples."""
        self.size = size
        # The number of real samples of this rank in each microbatch. None: no rank has real
        # samples.
        self._real: list[int | None] = []
        self._current: int | None = size  # the entry of `_real` for the current microbatch
        for name, norm in model.named_modules():
            if isinstance(norm, _NormBase):
                norm.forward = partial(self._forward, norm, name, norm.forward)

    def begin_step(self, real: Sequence[int], microbatches: int) -> None:
        """Set the number of real samples of this rank in each microbatch of the next step.

        If `real` has fewer than `microbatches` entries, no rank has real samples in the remaining
        microbatches.
        """
        self._real = [*real, *[None] * (microbatches - len(real))]

    @contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """Context of a microbatch's forward and backward, which may recompute forward."""
        previous, self._current = self._current, self._real[number]
        try:
            yield
        finally:
            self._current = previous

    def _forward(self, norm: _NormBase, name: str, forward: Any, input: Tensor) -> Any:
        if self._current == self.size or not norm.training:
            return forward(input)
        if self._current:
            rows_per_sample, rest = divmod(len(input), self.size)
            if rest:
                raise UsageError(
                    f"layer {name} gets {len(input)} rows for {self.size} samples "
                    f"({self._current} real samples and padding). The number of rows must be a "
                    "multiple of the number of samples. Change the layer, or use --drop-last."
                )
            y: Tensor = forward(input[: self._current * rows_per_sample])
            return torch.cat([y, y.new_zeros(len(input) - len(y), *y.shape[1:])])
        # This rank has no real samples, so running statistics must not change. If other ranks have
        # samples, a JointBatchNorm still takes part in their collectives.
        joint = isinstance(norm, JointBatchNorm) and self._current == 0
        attribute, value = ("without_samples", True) if joint else ("training", False)
        setattr(norm, attribute, value)
        try:
            return forward(input)
        finally:
            setattr(norm, attribute, not value)
