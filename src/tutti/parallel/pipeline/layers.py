"""A model as an ordered list of layers that can be cut into stages.

Two kinds of models can be cut:

- `nn.Sequential`: every child is a layer;
- a module that says `cuttable = True`: its forward runs its children in the order of their
  definition and skips those that are None or missing from their ModuleDict. Every child with
  parameters is a layer, every entry of a ModuleDict is one of its own. Children without parameters
  (rotary tables) are kept on every stage.

A stage is the same module with the other layers taken out. So a layer is called the same on a
stage as in the whole model, and so are its parameters, in checkpoints too.
"""

import copy
from collections.abc import Iterable

from torch import nn

from tutti.world.errors import UsageError


def layers(model: nn.Module) -> list[str]:
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


def units(model: nn.Module) -> list[list[str]]:
    """The layers that stay together: a stage needs parameters, activations like ReLU have none."""
    together: list[list[str]] = []
    for name in layers(model):
        trained = _has_parameters(model.get_submodule(name))
        if not together or (trained and _any_parameters(model, together[-1])):
            together.append([])
        together[-1].append(name)
    return together


def keep(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Take all other layers out of the model, in place; the names of those kept do not change."""
    kept = set(names)
    for name in layers(model):
        if name in kept:
            continue
        parent, _, key = name.rpartition(".")
        if parent or _is_sequential(model):
            # Not `del sequential[0]`, which would number the others anew.
            model.get_submodule(parent)._modules.pop(key)
        else:
            setattr(model, name, None)
    return model


def view(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """A second module over some of the model's layers: the layers themselves are shared."""
    seen = _shallow(model)
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict):
            seen._modules[name] = _shallow(child)
    return keep(seen, names)


def _shallow(module: nn.Module) -> nn.Module:
    """The same children, parameters and buffers, in dicts of its own: hooks are not shared."""
    twin = copy.copy(module)
    for key, value in vars(twin).items():
        if isinstance(value, dict | set):
            vars(twin)[key] = value.copy()
    return twin


def _is_sequential(model: nn.Module) -> bool:
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _any_parameters(model: nn.Module, names: list[str]) -> bool:
    return any(_has_parameters(model.get_submodule(name)) for name in names)
