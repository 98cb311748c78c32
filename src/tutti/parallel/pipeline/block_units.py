"""Finds the units of a model with repeated blocks, and runs only the units of one stage.

The forward of most transformers and image models runs a list of blocks, with other code before and
after the list:

    embedding ─ (positions, mask) ─ block 0 ─ block 1 ─ … ─ block n ─ (pooling) ─ norm ─ head
    └────── unit 0 ──────────────┘ └ unit 1 ┘ └ unit 2 ┘               └──── last unit ────┘

A stage runs the model's own forward, so that positions, masks and other arguments of a block are
computed as in the whole model. Modules of other stages are replaced with modules without
parameters:

- A replaced module of an earlier stage returns zeros, or its input. When forward reaches the first
  module of this stage, the input of this module is replaced with the tensor that the previous stage
  has sent.
- When forward reaches the first module of the next stage, forward ends. The input of this module is
  the output of this stage.

The result is correct if each unit depends on earlier units only through its input. `find_units`
checks this condition: it detaches the input of every unit, runs forward and backward on the meta
device, and refuses a model in which a parameter affects a unit to which it does not belong.
"""

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

from tutti.models.lora_layers import is_adapted
from tutti.parallel.recompute import repeated_blocks
from tutti.world.errors import UsageError

_ATTRIBUTE = "_pipeline_units"


@dataclass(frozen=True)
class Units:
    """The units of a model, in the order in which its forward runs them."""

    names: list[list[str]]
    """For each unit, the names of its modules and of its parameters outside of these modules. The
    first name of a unit is the module that forward runs first."""
    outputs: dict[str, tuple[list[int], torch.dtype] | None]
    """The output shape and dtype of each module in the first unit. The value is None if the output
    has the same shape as the module's input."""
    example: Tensor
    """One input of the model, on the meta device."""


def units_of(model: nn.Module) -> Units | None:
    """Return the units that `set_units` has stored, or None."""
    units: Units | None = vars(model).get(_ATTRIBUTE)
    return units


def set_units(model: nn.Module, units: Units) -> None:
    """Store the units on the model, so that copies and parts of the model have the same units."""
    vars(model)[_ATTRIBUTE] = units


def find_units(model: nn.Module, example: Tensor) -> Units:
    """Return the units of a model on meta. Raise UsageError if the model cannot be cut."""
    blocks = {name for name, each in model.named_modules() if each in repeated_blocks(model)}
    if not blocks:
        raise _refusal(model, "it has no repeated blocks in a ModuleList or Sequential")
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    for module in model.modules():
        if isinstance(module, _NormBase):
            module.eval()  # in training mode, a norm may need several samples or a collective
    example = example.to("meta")
    try:
        with MetaConditions():  # type: ignore[no-untyped-call]
            names, outputs = _record_order(model, example, blocks)
            ends = _run_detached(model, example, [unit[0] for unit in names[1:]])
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise _refusal(model, f"its forward does not run on the meta device ({reason})") from error
    _assign_parameters(model, names, ends)
    return Units(names, outputs, example)


class MetaConditions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which every condition on a meta tensor is true.

    Hugging Face models read such conditions, for example whether no sample is padded and no sample
    is packed. Stages later run with real tensors, where the conditions have their real values.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_condition = func is torch.ops.aten._local_scalar_dense.default
        if is_condition and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        return func(*args, **(kwargs or {}))


def _refusal(model: nn.Module, reason: str) -> UsageError:
    return UsageError(
        f"{type(model).__name__} cannot be cut into pipeline stages: {reason}. Make it an "
        "nn.Sequential, or use a layout without pp"
    )


def _record_order(
    model: nn.Module, example: Tensor, blocks: Collection[str]
) -> tuple[list[list[str]], dict[str, tuple[list[int], torch.dtype] | None]]:
    """Return the modules of each unit in call order, and the outputs of the first unit."""
    calls: list[str] = []
    outputs: dict[str, tuple[list[int], torch.dtype] | None] = {}

    def record(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        source = first_argument(module, args, kwargs)
        if isinstance(output, Tensor) and isinstance(source, Tensor):
            same = output.shape == source.shape
            outputs[name] = None if same else (list(output.shape), output.dtype)

    hooks = []
    for name in _recorded_modules(model, blocks):
        module = model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: calls.append(name)))
        hooks.append(
            module.register_forward_hook(
                lambda module, args, kwargs, output, name=name: record(
                    name, module, args, kwargs, output
                ),
                with_kwargs=True,
            )
        )
    with torch.no_grad():
        model(example)
    for hook in hooks:
        hook.remove()
    for name in blocks:
        if calls.count(name) != 1:
            raise _refusal(model, f"forward runs block {name} {calls.count(name)} times")
    units: list[list[str]] = []
    others: list[str] = []
    for name in dict.fromkeys(calls):
        if name not in blocks:
            others.append(name)
            continue
        if others and not units:
            units, others = [others], []
        units.append([*others, name])  # a module between two blocks belongs to the next block
        others = []
    if others:
        units.append(others)
    return units, {name: shape for name, shape in outputs.items() if name in units[0]}


def _recorded_modules(model: nn.Module, blocks: Collection[str]) -> list[str]:
    """Return the blocks, and all other modules that directly own parameters.

    Modules that contain a block are left out, and so are modules inside another returned module.
    """
    above = {outer for name in blocks for outer in accumulate(name.split(".")[:-1], _joined)}
    recorded: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in recorded)
        own = next(module.parameters(recurse=False), None) is not None or is_adapted(module)
        if name in blocks or (name and name not in above and own and not inside):
            recorded.append(name)
    return recorded


def _joined(path: str, part: str) -> str:
    return f"{path}.{part}"


def _run_detached(model: nn.Module, example: Tensor, firsts: list[str]) -> list[Tensor]:
    """Detach the input of every unit, run forward, and return the output of every unit."""
    ends: list[Tensor] = []

    def detach(module: nn.Module, args: Any, kwargs: Any) -> Any:
        value = first_argument(module, args, kwargs)
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            raise _refusal(
                model, f"the input of a {type(module).__name__} is not one floating-point tensor"
            )
        ends.append(value)
        return replace_first(module, args, kwargs, value.detach().requires_grad_())

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(detach, with_kwargs=True)
        for name in firsts
    ]
    output = model(example)
    for hook in hooks:
        hook.remove()
    if not isinstance(output, Tensor):
        raise _refusal(model, f"it returns a {type(output).__name__}, not a tensor")
    return [*ends, output]


def _assign_parameters(model: nn.Module, names: list[list[str]], ends: list[Tensor]) -> None:
    """Assign each parameter outside of the units' modules to the first unit that uses it.

    A parameter that no unit uses belongs to the first unit. Raises UsageError if a parameter
    affects a unit to which it does not belong.
    """
    parameters = list(model.parameters())
    all_names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        all_names.setdefault(id(parameter), []).append(name)
    users: dict[int, list[int]] = {}
    for number, end in enumerate(ends):
        if not end.requires_grad:
            continue
        used = torch.autograd.grad(end.sum(), parameters, allow_unused=True, retain_graph=True)
        for parameter, gradient in zip(parameters, used, strict=True):
            if gradient is not None:
                users.setdefault(id(parameter), []).append(number)
    owners: dict[str, int] = {}  # name of a parameter → its unit
    for number, unit in enumerate(names):
        prefixes = tuple(f"{name}." for name in unit)
        for name, _ in model.named_parameters(remove_duplicate=False):
            if name.startswith(prefixes):
                owners[name] = number
    for parameter in parameters:
        tied = all_names[id(parameter)]
        units = users.get(id(parameter), [0])
        for name in tied:
            if name not in owners:
                owners[name] = units[0]
                names[units[0]].append(name)
        for number in units:
            if number not in [owners[name] for name in tied]:
                raise _refusal(
                    model,
                    f"{tied[0]} has an effect on {names[number][0]} that does not pass through "
                    "the preceding blocks",
                )


def first_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument of a forward call, even if it was passed by keyword."""
    return args[0] if args else kwargs.get(_first_parameter(module))


def replace_first(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward call with a new first argument."""
    if args:
        return (value, *args[1:]), kwargs
    return args, {**kwargs, _first_parameter(module): value}


def _first_parameter(module: nn.Module) -> str:
    if isinstance(module, _Skipped):
        return module.first
    parameters = list(inspect.signature(type(module).forward).parameters)
    return parameters[1] if len(parameters) > 1 else ""


# -- stages ----------------------------------------------------------------------------------------


class _EndOfStage(Exception):
    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class _Skipped(nn.Module):
    """Replaces a module of another stage."""

    def __init__(
        self, original: nn.Module, output: tuple[list[int], torch.dtype] | None, ends_stage: bool
    ) -> None:
        super().__init__()
        # The original module is on meta. The list hides it from nn.Module, so it is not registered
        # as a submodule.
        self._original = [original]
        self.first = _first_parameter(original)
        self.is_embedding = getattr(original, "is_embedding", isinstance(original, nn.Embedding))
        self._output = output
        self._ends_stage = ends_stage

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the original module, such as the attention type of a block."""
        if name.startswith("_"):
            return super().__getattr__(name)
        return getattr(self._original[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if args else kwargs[self.first]
        if self._ends_stage:
            raise _EndOfStage(value)
        if self._output is None:
            return value
        shape, dtype = self._output
        shape = [*value.shape, shape[-1]] if self.is_embedding else [len(value), *shape[1:]]
        return _zeros(shape, dtype, value.device)


class _StageForward:
    """The forward of a stage: the model's own forward, with the input from the previous stage."""

    def __init__(
        self, model: nn.Module, units: Units, first: bool, removed: list[tuple[str, Tensor]]
    ) -> None:
        self._model, self._units, self._first = model, units, first
        self._removed = removed
        self._received: Tensor | None = None

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook of the first module of the stage."""
        if self._received is None:
            return None  # the caller is not the forward of this stage
        received, self._received = self._received, None
        return replace_first(module, args, kwargs, received)

    def __call__(self, x: Tensor) -> Any:
        if not self._first:
            self._received = x
            # The code before the first module of the stage runs on zeros.
            example = self._units.example
            shape = [len(x), *example.shape[1:]]
            if not example.is_floating_point() and example.dim() == 2 and x.dim() == 3:
                shape[1] = x.shape[1]  # tokens: a sequence may be shorter than the example
            x = _zeros(shape, example.dtype, x.device)
        for name, parameter in self._removed:  # forward may read parameters of other stages
            owner, _, key = name.rpartition(".")
            values = _zeros(parameter.shape, parameter.dtype, x.device)
            vars(self._model.get_submodule(owner))[key] = values
        try:
            return type(self._model).forward(self._model, x)
        except _EndOfStage as end:
            return end.output


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    # `expand` is not used: every element needs its own memory, because the next module may write in
    # place.
    return torch.zeros(*shape, dtype=dtype, device=device)


def keep_units(model: nn.Module, units: Units, names: Collection[str]) -> None:
    """Remove all modules and parameters except `names`, in place, and set the stage's forward.

    If the kept units are not consecutive, they belong to several stages. In this case the model is
    only a container of the stages, and its forward is not set.
    """
    kept = [number for number, unit in enumerate(units.names) if set(unit) <= set(names)]
    after = kept[-1] + 1
    removed: list[tuple[str, Tensor]] = []
    for number, unit in enumerate(units.names):
        for name in unit if number not in kept else ():
            parent, _, key = name.rpartition(".")
            owner = model.get_submodule(parent)
            if (original := owner._modules.get(key)) is not None:
                ends_stage = number == after and name == unit[0]
                owner._modules[key] = _Skipped(original, units.outputs.get(name), ends_stage)
            else:
                value = owner._parameters.pop(key, None)
                shape = vars(owner)[key] if value is None else value.detach().to("meta")
                removed.append((name, shape))
                vars(owner)[key] = shape
    if kept == list(range(kept[0], after)):
        forward = _StageForward(model, units, kept[0] == 0, removed)
        model.forward = forward
        if kept[0] > 0:
            module = model.get_submodule(units.names[kept[0]][0])
            module.register_forward_pre_hook(forward.enter, with_kwargs=True)
