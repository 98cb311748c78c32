"""Training state as named tensors: model, optimizer and random number generators.

    model.<name>               parameters and persistent buffers
    ema.<name>                 the moving average of a parameter
    optimizer.<name>.<slot>    the optimizer's state of a parameter, such as exp_avg
    rng.<rank>.<generator>     random number generators of each rank

<name> is the name in the unwrapped model. The prefixes that DDP, DataParallel, torch.compile and
activation checkpointing add to names are removed, so a checkpoint of one engine loads into another
engine.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tutti.parallel.rng import mixed_seed
from tutti.train.checkpoint.format import DTYPES, SavedTensor
from tutti.world.errors import UsageError

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
# Optimizer options that affect the speed, but not the result. Loading does not change them.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
_SCALARS = (bool, int, float, str, type(None))


def unwrapped_name(model: nn.Module, name: str) -> str:
    """Return a parameter's name without the wrappers on its path."""
    *path, last = name.split(".")
    module, kept = model, []
    for part in path:
        is_parallel = isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel))
        if part not in ({"module"} if is_parallel else _WRAPPERS):
            kept.append(part)
        module = getattr(module, part)
    return ".".join([*kept, last])


@dataclass(frozen=True)
class TrainingState:
    """A model and its optimizer, as tensors with the names of a checkpoint."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    aliases: Mapping[str, str]
    """Maps a tied parameter on a later pipeline stage to the name under which it is saved."""
    ema: Mapping[nn.Parameter, torch.Tensor]
    """Maps each parameter to its moving average."""

    def model_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return parameters and persistent buffers with their names, without cloning.

        A tensor that several modules share appears once. A copy of a tied parameter on a later
        pipeline stage has the name of the first copy.
        """
        tensors: dict[int, tuple[str, torch.Tensor]] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                raise UsageError(
                    f"checkpoints hold only tensors, but {name} is {type(value).__name__}"
                )
            tensors.setdefault(id(value), (f"model.{self._saved_name(name)}", value.detach()))
        return [*tensors.values()]

    def ema_tensors(self) -> list[tuple[str, torch.Tensor, nn.Parameter]]:
        """Return the moving averages with their names and their parameters."""
        names = {value: self._saved_name(name) for name, value in self.model.named_parameters()}
        return [(f"ema.{names[value]}", average, value) for value, average in self.ema.items()]

    def optimizer_tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
        """Return the optimizer's tensors by name, and the rest of its state."""
        if self.optimizer is None:
            return {}, None
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, dict[str, Any]] = {}
        for parameter, name in self._optimizer_parameters().items():
            for slot, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.{name}.{slot}"] = value.detach()
                elif isinstance(value, _SCALARS):
                    values.setdefault(name, {})[slot] = value
                else:
                    kind = type(value).__name__
                    raise UsageError(f"checkpoints cannot hold {slot} of {name}, which is a {kind}")
        groups = [_json_options(group) for group in self.optimizer.param_groups]
        kind = type(self.optimizer).__name__
        return tensors, {"kind": kind, "groups": groups, "values": values}

    def empty_slots(self, saved: Mapping[str, SavedTensor]) -> dict[nn.Parameter, dict[str, Any]]:
        """Allocate the saved `optimizer.…` tensors, sharded as this rank's parameters are.

        Parameters of other pipeline stages have no slots on this rank.
        """
        saved_slots: dict[str, list[str]] = {}
        for full_name in saved:
            path, _, slot = full_name.rpartition(".")
            saved_slots.setdefault(path, []).append(slot)
        slots: dict[nn.Parameter, dict[str, Any]] = {}
        for parameter, name in self._optimizer_parameters().items():
            for slot in saved_slots.get(f"optimizer.{name}", []):
                tensor = saved[f"optimizer.{name}.{slot}"]
                shape, dtype = [*tensor["shape"]], DTYPES[tensor["dtype"]]
                empty = torch.empty(shape, dtype=dtype)
                if [*parameter.shape] == shape:
                    empty = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                slots.setdefault(parameter, {})[f"optimizer.{name}.{slot}"] = empty
        return slots

    def restore_optimizer(
        self, options: Mapping[str, Any] | None, slots: Mapping[nn.Parameter, Mapping[str, Any]]
    ) -> None:
        """Restore the optimizer's state with `Optimizer.load_state_dict`."""
        if self.optimizer is None or options is None:
            return
        state = {}
        for parameter, name in self._optimizer_parameters().items():
            tensors = slots.get(parameter, {}).items()
            values = {full_name.rpartition(".")[2]: tensor for full_name, tensor in tensors}
            if values := values | options["values"].get(name, {}):
                state[id(parameter)] = values
        groups = []
        for group, saved in zip(self.optimizer.param_groups, options["groups"], strict=True):
            restored = {
                key: _as_type_of(group[key], value)
                for key, value in saved.items()
                if key in group and key not in _IMPLEMENTATION
            }
            groups.append({**group, **restored, "params": [id(value) for value in group["params"]]})
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _optimizer_parameters(self) -> dict[nn.Parameter, str]:
        """Map each parameter of the optimizer to its name in a checkpoint."""
        names = {value: self._saved_name(name) for name, value in self.model.named_parameters()}
        parameters = {}
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        for parameter in (value for group in groups for value in group["params"]):
            if parameter not in names:
                raise UsageError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the "
                    "model does not have: create the optimizer from model.parameters()"
                )
            parameters[parameter] = names[parameter]
        return parameters

    def _saved_name(self, name: str) -> str:
        """Return a tensor's name in a checkpoint: without wrappers, and with aliases replaced."""
        unwrapped = unwrapped_name(self.model, name)
        return self.aliases.get(unwrapped, unwrapped)


def _json_options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()  # a learning rate that a CUDA graph reads from the device
        items = value if isinstance(value, (tuple, list)) else [value]
        if key not in ("params", "param_names") and all(isinstance(i, _SCALARS) for i in items):
            options[key] = value
    return options


def _as_type_of(current: Any, saved: Any) -> Any:
    """Convert a value from JSON to the type of the optimizer's current value."""
    if isinstance(current, torch.Tensor):
        return torch.full_like(current, saved)
    return tuple(saved) if isinstance(current, tuple) else saved


# Random number generators. The Mersenne Twister of Python and numpy has 624 words of 32 bits and a
# position in these words. Normal numbers are drawn in pairs, so the saved tensor has two more
# values: whether the second number of a pair is cached, and the bits of the cached number.
_TWISTER_WORDS = 624


def rng_state() -> dict[str, torch.Tensor]:
    """Return the states of the generators `cpu`, `python`, `numpy` and, on a GPU, `cuda`."""
    _, words, cached = random.getstate()
    state = {"cpu": torch.get_rng_state(), "python": _twister([*words], cached)}
    numpy = np.random.get_state(legacy=False)
    if numpy["bit_generator"] == "MT19937":
        words = [*numpy["state"]["key"].tolist(), numpy["state"]["pos"]]
        state["numpy"] = _twister(words, numpy["gauss"] if numpy["has_gauss"] else None)
    if _uses_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    """Restore the states that `rng_state` returned. Generators not in `state` are unchanged."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "python" in state:
        words, cached = _twister_parts(state["python"])
        random.setstate((3, tuple(words), cached))
    if "numpy" in state:
        words, cached = _twister_parts(state["numpy"])
        key = np.array(words[:-1], dtype=np.uint32)
        np.random.set_state(("MT19937", key, words[-1], int(cached is not None), cached or 0.0))
    if "cuda" in state and _uses_cuda():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(*source: object) -> int:
    """Seed all generators from a hash of `source`. Return the seed."""
    seed = mixed_seed(*source) % (1 << 32)  # numpy takes 32 bits
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # also seeds the generators of the GPUs
    return seed


def _uses_cuda() -> bool:
    # A CPU program on a machine with a GPU must not create a CUDA context.
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _twister(words: list[int], cached: float | None) -> torch.Tensor:
    bits = torch.tensor(cached or 0.0, dtype=torch.float64).view(torch.int64).item()
    return torch.tensor([*words, int(cached is not None), bits], dtype=torch.int64)


def _twister_parts(state: torch.Tensor) -> tuple[list[int], float | None]:
    *words, is_cached, bits = state.tolist()
    # numpy does not check the position and would read out of bounds.
    if len(words) != _TWISTER_WORDS + 1 or not 0 <= words[-1] <= _TWISTER_WORDS:
        raise ValueError("the tensor is not the state of a Mersenne Twister")
    cached = torch.tensor(bits, dtype=torch.int64).view(torch.float64).item()
    return words, cached if is_cached else None
