"""Stages of a pipeline: the layers of a model, the cost of each layer, and the cuts between stages.

Two kinds of models can be cut:

- `nn.Sequential`: every child is a layer;
- a module with `cuttable = True`: its forward runs its children in the order of their definition,
  and skips children that are None or missing from their ModuleDict. Every child with parameters is
  a layer, and so is every entry of a ModuleDict. Children without parameters (rotary tables) are
  kept on every stage.

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
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.flop_counter import FlopCounterMode

from tutti.parallel.layout import ParallelOptions
from tutti.parallel.materialize import Weights, materialize
from tutti.parallel.mesh import Mesh
from tutti.parallel.pipeline.schedules import stages_of
from tutti.parallel.pipeline.tied_weights import Tie, find_ties, untie
from tutti.parallel.sync_batchnorm import JointBatchNorm
from tutti.world.errors import UsageError
from tutti.world.exchange import gather_json

_BACKWARD_FLOPS = 2  # times the FLOPs of forward: gradients of the input and of the weights
_REPEATS = 5


@dataclass(frozen=True)
class Stages:
    """The stages of this rank, and the layers and tied parameters of all stages."""

    modules: dict[int, nn.Module]
    """The module of each stage, keyed by stage index. If this rank has one stage, the module is the
    model itself; otherwise each module is a view of some of the model's layers."""
    layers: list[list[str]]
    """The layer names of every stage of the pipeline."""
    ties: list[Tie]
    padding: "Padding"


def cut_model(
    model: nn.Module,
    mesh: Mesh,
    options: ParallelOptions,
    example: torch.Tensor,
    microbatch_size: int,
    weights: Weights | None = None,
) -> Stages:
    """Cut the whole model into stages and remove the layers of other ranks, in place.

    The model may be on the meta device.
    """
    names = plan_stages(model, mesh.layout.pp, options, example, weights, mesh.world.device)
    held = stages_of(
        options.pipeline_schedule, mesh.rank("pp"), mesh.layout.pp, options.virtual_stages
    )
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
    example: torch.Tensor,
    weights: Weights | None = None,
    device: torch.device | None = None,
) -> list[list[str]]:
    """The layer names of every stage, balanced by `options.balance`."""
    units = layer_units(model)
    check_stages(len(units), pp, options.virtual_stages)
    stages = pp * options.virtual_stages
    if options.balance == "even":
        cuts = cut_evenly(len(units), stages)
    elif options.balance == "counted":
        cuts = cut_by_cost(counted_flops(model, units, example), stages)
    else:
        cuts = cut_by_cost(measured_seconds(model, units, example, weights, device), stages)
    return [[name for unit in units[cut.start : cut.stop] for name in unit] for cut in cuts]


# --- layers ---------------------------------------------------------------------------------------


def layer_names(model: nn.Module) -> list[str]:
    """The names of a model's layers, in the order in which forward runs them."""
    if _is_sequential(model):
        return list(model._modules)
    if not getattr(model, "cuttable", False):
        raise UsageError(
            f"{type(model).__name__} cannot be cut into pipeline stages: it needs to be an "
            "nn.Sequential, or to set `cuttable = True` on its class and skip, in forward, "
            "children that are None and entries that its ModuleDicts lack; or use a layout "
            "without pp"
        )
    own = [name for name, _ in model.named_parameters(recurse=False)]
    if own:
        raise UsageError(
            f"{type(model).__name__} cannot be cut into pipeline stages: its parameter {own[0]} "
            "belongs to no layer: put it into a module of its own"
        )
    names = []
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict):
            names += [f"{name}.{key}" for key in child]
        elif _has_parameters(child):
            names.append(name)
    return names


def layer_units(model: nn.Module) -> list[list[str]]:
    """Groups of consecutive layers that are not separated.

    Every group has parameters, because a stage without parameters is not possible.
    """
    units: list[list[str]] = []
    complete = True  # whether the last unit has parameters
    for name in layer_names(model):
        trained = _has_parameters(model.get_submodule(name))
        if not units or (trained and complete):
            units.append([])
            complete = False
        units[-1].append(name)
        complete = complete or trained
    return units


def keep_layers(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Remove all layers except `names` from the model, in place. Kept layers keep their names."""
    kept = set(names)
    for name in layer_names(model):
        if name in kept:
            continue
        parent, _, key = name.rpartition(".")
        if parent or _is_sequential(model):
            # `del sequential[0]` would renumber the other layers.
            model.get_submodule(parent)._modules.pop(key)
        else:
            setattr(model, name, None)
    return model


def layer_view(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """A second module with some of the model's layers; both modules share these layers."""
    view = _shallow_copy(model)
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict):
            view._modules[name] = _shallow_copy(child)
    return keep_layers(view, names)


def _shallow_copy(module: nn.Module) -> nn.Module:
    """A module with the same children, parameters and buffers.

    The dicts that contain them are new, so that hooks added later are not shared.
    """
    twin = copy.copy(module)
    for key, value in vars(twin).items():
        if isinstance(value, dict | set):
            vars(twin)[key] = value.copy()
    return twin


def _is_sequential(model: nn.Module) -> bool:
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


# --- cuts between stages --------------------------------------------------------------------------


def cut_by_cost(costs: Sequence[float], stages: int) -> list[range]:
    """Cut layers into contiguous, non-empty parts so that the most expensive part costs least.

    A pipeline is as fast as its slowest stage, because the other stages wait for the slowest stage
    at every microbatch. If several cuts are equally good, the cut with the smallest sum of squared
    costs is chosen.
    """
    check_stages(len(costs), stages, 1)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(start: int, end: int) -> float:
        return sums[end] - sums[start]

    largest = _best_cut(len(costs), stages, max, cost_of)[0]

    def squares(best: float, part: float) -> float:
        return best + part * part if part <= largest else float("inf")

    ends = _best_cut(len(costs), stages, squares, cost_of)[1]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def cut_evenly(count: int, stages: int) -> list[range]:
    """Cut layers into parts whose numbers of layers differ by at most one.

    If the numbers differ, later parts have fewer layers.
    """
    check_stages(count, stages, 1)
    ends = [-(-count * (stage + 1) // stages) for stage in range(stages)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def check_stages(layers: int, ranks: int, stages_per_rank: int) -> None:
    """Raise UsageError if there are more stages than layers. The message suggests layouts."""
    stages = ranks * stages_per_rank
    if stages <= layers:
        return
    if stages_per_rank == 1:
        needs = f"pp{ranks} needs {stages} layers"
    else:
        needs = f"pp{ranks} with {stages_per_rank} stages per rank needs "
        needs += f"{ranks} × {stages_per_rank} = {stages} layers"
    fitting = layers // stages_per_rank
    cures = [f"pp{fitting}"] if fitting > 1 else []
    if stages_per_rank > 1 and layers >= 2:
        cures.append(f"pp{min(ranks, layers)} with --pipeline-schedule 1f1b")
    cures.append("a model with more layers")
    raise UsageError(f"layout {needs}, the model has {layers}: use {' or '.join(cures)}")


def _best_cut(
    count: int,
    stages: int,
    join: Callable[[float, float], float],
    cost_of: Callable[[int, int], float],
) -> tuple[float, list[int]]:
    """The value and the part ends of the best cut, by dynamic programming over layers and stages.

    `join` combines the value of a cut with the cost of one more part.
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(1, stages + 1):
        longer: dict[int, tuple[float, list[int]]] = {}
        for end in range(stage, count - (stages - stage) + 1):
            options = [
                (join(value, cost_of(start, end)), [*ends, end])
                for start, (value, ends) in best.items()
                if start < end
            ]
            longer[end] = min(options, key=lambda option: option[0])
        best = longer
    return best[count]


# --- cost of layers -----------------------------------------------------------------------------


@torch.no_grad()
def counted_flops(model: nn.Module, units: list[list[str]], example: torch.Tensor) -> list[float]:
    """FLOPs of forward and backward of each unit of layers, on inputs like the example.

    Only matrix products are counted, on the meta device. Operations that are limited by memory
    bandwidth (norms, activation functions, the look-up of an embedding) count as 0.
    """
    twin = _on_meta(model)
    for norm in twin.modules():
        if isinstance(norm, _NormBase):
            norm.eval()  # in training, one sample may be too few, and a collective may run
    x = example.to("meta")
    known: dict[object, tuple[float, torch.Tensor]] = {}
    costs = []
    for names in units:
        # The blocks of a transformer are equal, so the FLOPs of only one block are counted.
        modules = [twin.get_submodule(name) for name in names]
        shapes = [[parameter.shape for parameter in module.parameters()] for module in modules]
        kind = (repr(modules), repr(shapes), x.shape, x.dtype)
        if kind not in known:
            known[kind] = _count(layer_view(twin, names), names, x)
        cost, x = known[kind]
        costs.append(cost)
    return costs


def _count(stage: nn.Module, names: list[str], x: torch.Tensor) -> tuple[float, torch.Tensor]:
    try:
        with FlopCounterMode(display=False) as counter:
            output = stage(x)
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(
            f"--balance counted: the FLOPs of {names[0]} cannot be counted without running it "
            f"({error}): use --balance measured or --balance even"
        ) from error
    return float((1 + _BACKWARD_FLOPS) * counter.get_total_flops()), output


def measured_seconds(
    model: nn.Module,
    units: list[list[str]],
    example: torch.Tensor,
    weights: Weights | None = None,
    device: torch.device | None = None,
) -> list[float]:
    """Seconds of forward and backward of each unit of layers, as measured by rank 0.

    Memory is allocated for one unit at a time. All ranks use the numbers of rank 0, because all
    ranks must cut at the same places.
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
            began = now(x.device)
            output = stage(leaf)
            trained = [each for each in (leaf, *stage.parameters()) if each.requires_grad]
            if trained and output.requires_grad:  # false for a frozen embedding
                torch.autograd.grad(output, trained, torch.ones_like(output), allow_unused=True)
            seconds.append(now(x.device) - began)
        costs.append(statistics.median(seconds[1:]))  # the first run is warm-up
        x = output.detach()
    first: list[float] = gather_json(costs)[0]
    return first


def _on_meta(model: nn.Module, buffers: bool = True) -> nn.Module:
    """A copy of the model with its parameters (and buffers) on the meta device."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta") if buffers else buffer.clone()
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, dist.ProcessGroup):  # of a JointBatchNorm; deepcopy would fail
                memo[id(value)] = value
    return copy.deepcopy(model, memo)


def now(device: torch.device) -> float:
    """The time in seconds, after the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# --- padded samples -------------------------------------------------------------------------------


class Padding:
    """Excludes padded samples from the statistics of this rank's norms.

    All microbatches of a schedule must have the same size, so the last microbatches of an epoch are
    padded with copies of a sample. The copies have no effect in most layers. A norm that computes
    statistics over samples gets only the real samples, and its output is padded with zeros.
    """

    def __init__(self, model: nn.Module, size: int) -> None:
        """`size` is the number of samples in every microbatch, including padded samples."""
        self.size = size
        self._real: list[int | None] = []
        self._current: int | None = size
        for name, norm in model.named_modules():
            if isinstance(norm, _NormBase):
                norm.forward = partial(self._forward, norm, name, norm.forward)

    def begin_step(self, real: Sequence[int], microbatches: int) -> None:
        """Set the number of this rank's real samples in each microbatch of the step.

        Microbatches beyond `real` have no samples on any rank.
        """
        self._real = [*real, *[None] * (microbatches - len(real))]

    @contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """Context for forward and backward of a microbatch; backward may recompute forward."""
        before, self._current = self._current, self._real[number]
        try:
            yield
        finally:
            self._current = before

    def _forward(
        self, norm: _NormBase, name: str, forward: Any, input: torch.Tensor
    ) -> torch.Tensor:
        if self._current == self.size or not norm.training:
            return forward(input)  # type: ignore[no-any-return]
        if not self._current:
            return self._without_samples(norm, forward, input)
        rows_per_sample, rest = divmod(len(input), self.size)
        if rest:
            raise UsageError(
                f"layer {name} is given {len(input)} rows for {self.size} samples, of which "
                f"{self._current} are real: the rows must be a multiple of the samples, or use "
                "--drop-last"
            )
        y: torch.Tensor = forward(input[: self._current * rows_per_sample])
        return torch.cat([y, y.new_zeros(len(input) - len(y), *y.shape[1:])])

    def _without_samples(self, norm: _NormBase, forward: Any, input: torch.Tensor) -> torch.Tensor:
        """Forward that does not change the running statistics.

        If other ranks have samples, a JointBatchNorm still takes part in their collectives, but
        contributes no samples.
        """
        if self._current == 0 and isinstance(norm, JointBatchNorm):
            norm.without_samples = True
        else:
            norm.training = False
        try:
            return forward(input)  # type: ignore[no-any-return]
        finally:
            norm.training = True
            if isinstance(norm, JointBatchNorm):
                norm.without_samples = False
