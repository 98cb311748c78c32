"""What a checkpoint holds of a model and its optimizer: tensors by name.

    model.<name>               parameters and persistent buffers
    optimizer.<name>.<slot>    what the optimizer keeps for a parameter, such as exp_avg

Names are those of the bare model, whatever DDP, DataParallel, torch.compile or activation
checkpointing have wrapped around it: a checkpoint of one engine loads into another.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tutti.world.errors import UsageError

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
# How an optimizer computes, not what: these stay as the running program has set them.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}


@dataclass(frozen=True)
class OptimizerOptions:
    """What is saved of an optimizer beside its tensors: all of it is JSON."""

    kind: str
    groups: list[dict[str, Any]]
    # State that is no tensor, by parameter and slot.
    values: dict[str, dict[str, Any]] = field(default_factory=dict)


def bare_name(model: nn.Module, name: str) -> str:
    """A parameter's name without the wrappers on the way to it."""
    *path, last = name.split(".")
    module, kept = model, []
    for part in path:
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            wrapped = part == "module"
        else:
            wrapped = part in _WRAPPERS
        if not wrapped:
            kept.append(part)
        module = getattr(module, part)
    return ".".join([*kept, last])


def model_tensors(
    model: nn.Module, aliases: Mapping[str, str] | None = None
) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers themselves, no copies; one that is shared comes once.

    aliases: names of parameters whose original has another name, on another rank.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"checkpoints hold tensors: {name} is {type(value).__name__}")
        if id(value) not in seen:
            seen.add(id(value))
            bare = bare_name(model, name)
            # Where a rank has the original as well, it stands for its copy.
            tensors.setdefault(f"model.{(aliases or {}).get(bare, bare)}", value.detach())
    return tensors


@torch.no_grad()
def fill_copies(model: nn.Module, aliases: Mapping[str, str]) -> None:
    """Give copies whose original is on the same rank, and was loaded, the same values."""
    parameters = {bare_name(model, name): each for name, each in model.named_parameters()}
    for name, original in aliases.items():
        if name in parameters and original in parameters:
            parameters[name].copy_(parameters[original])


def buffers(model: nn.Module) -> frozenset[str]:
    """The names, among those of `model_tensors`, of buffers: each rank may have other values."""
    return frozenset(f"model.{bare_name(model, name)}" for name, _ in model.named_buffers())


def optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    aliases: Mapping[str, str] | None = None,
) -> tuple[dict[str, torch.Tensor], OptimizerOptions]:
    """The optimizer's tensors by name, and what it has beside them."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in _parameters(model, optimizer, aliases).items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{name}.{slot}"] = value.detach()
            elif value is None or isinstance(value, (bool, int, float, str)):
                values.setdefault(name, {})[slot] = value
            else:
                kind = type(value).__name__
                raise UsageError(f"checkpoints cannot hold {slot} of {name}: it is a {kind}")
    return tensors, OptimizerOptions(
        type(optimizer).__name__, [_options(group) for group in optimizer.param_groups], values
    )


def optimizer_slots(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    aliases: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """Memory to load the saved `optimizer.…` tensors into, placed as the parameters are.

    Parameters that live on other ranks (of a pipeline) have no slots here.
    """
    parameters = _parameters(model, optimizer, aliases)
    slots = {}
    for full_name, (dtype, shape) in saved.items():
        name = full_name.removeprefix("optimizer.").rpartition(".")[0]
        if name not in parameters:
            continue
        if tuple(parameters[name].shape) == shape:
            slots[full_name] = torch.empty_like(
                parameters[name], dtype=dtype, requires_grad=False
            ).detach()
        else:
            slots[full_name] = torch.empty(shape, dtype=dtype)
    return slots


def restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: OptimizerOptions,
    slots: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Give the optimizer its saved state, through its own `load_state_dict`."""
    names = _names(model, aliases)
    state: dict[str, dict[str, Any]] = {}
    for full_name, tensor in slots.items():
        name, _, slot = full_name.removeprefix("optimizer.").rpartition(".")
        state.setdefault(name, {})[slot] = tensor
    for name, values in options.values.items():
        if name in names.values():
            state.setdefault(name, {}).update(values)
    groups = []
    for group, saved in zip(optimizer.param_groups, options.groups, strict=True):
        changed = {
            key: _like(group[key], value)
            for key, value in saved.items()
            if key in group and key not in _IMPLEMENTATION
        }
        groups.append({**group, **changed, "params": [id(each) for each in group["params"]]})
    # By parameter, not by name: a copy beside its original has the same state, in its own memory.
    own = {
        key: {slot: _own(value) for slot, value in state[name].items()}
        for key, name in names.items()
        if name in state
    }
    optimizer.load_state_dict({"state": own, "param_groups": groups})


def optimizer_problem(optimizer: torch.optim.Optimizer, saved: OptimizerOptions) -> str | None:
    """Why a saved optimizer is not this one; None if it may be."""
    if saved.kind != type(optimizer).__name__:
        return f"its optimizer is {saved.kind}, this one {type(optimizer).__name__}"
    if len(saved.groups) != len(optimizer.param_groups):
        return (
            f"its optimizer has {len(saved.groups)} groups of parameters, this one "
            f"{len(optimizer.param_groups)}"
        )
    return None


def _parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer, aliases: Mapping[str, str] | None
) -> dict[str, torch.nn.Parameter]:
    names = _names(model, aliases)
    parameters: dict[str, torch.nn.Parameter] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise UsageError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the "
                    "model does not have: make it from the model's own parameters"
                )
            parameters.setdefault(names[id(parameter)], parameter)
    return parameters


def _names(model: nn.Module, aliases: Mapping[str, str] | None) -> dict[int, str]:
    """What each parameter is called in a checkpoint, by its id."""
    bare = {id(value): bare_name(model, name) for name, value in model.named_parameters()}
    return {key: (aliases or {}).get(name, name) for key, name in bare.items()}


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()  # a learning rate that a captured graph reads
        if isinstance(value, (bool, int, float, str, type(None))) or (
            isinstance(value, (tuple, list))
            and all(isinstance(item, (bool, int, float, str, type(None))) for item in value)
        ):
            options[key] = value
    return options


def _like(current: Any, saved: Any) -> Any:
    """A value from JSON as the kind of thing that the optimizer has in its place."""
    if isinstance(current, torch.Tensor):
        return torch.full_like(current, saved)
    return tuple(saved) if isinstance(current, tuple) else saved
