"""Training state as named tensors: model, optimizer and random number generators.

    model.<name>               parameters and persistent buffers
    optimizer.<name>.<slot>    the optimizer's state of a parameter, such as exp_avg
    rng.<rank>.<generator>     random number generators of each rank

Names are those of the unwrapped model: DDP, DataParallel, torch.compile and activation
checkpointing do not change them, so a checkpoint of one engine loads into another.
"""

import copy
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from tutti.parallel.rng import mixed_seed
from tutti.train.checkpoint.format import Box, OptimizerOptions, SavedTensor
from tutti.world.errors import UsageError

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
# Options that choose an implementation, not a result: these keep the running program's values.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}


def local_shard(tensor: torch.Tensor) -> tuple[torch.Tensor, Box]:
    """Return this rank's part of a tensor, and the box of the full tensor that it covers."""
    shape = tuple(tensor.shape)
    if not hasattr(tensor, "__create_chunk_list__"):  # torch's protocol for sharded tensors
        return tensor.detach(), Box((0,) * len(shape), shape)
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise UsageError(
            f"a tensor of shape {shape} has {len(chunks)} shards on one rank: checkpoints support "
            "one, as with the placements Shard and Replicate"
        )
    local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local.detach(), Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def unwrapped_name(model: nn.Module, name: str) -> str:
    """Return a parameter's name without the wrappers on its path."""
    *path, last = name.split(".")
    module, kept = model, []
    for part in path:
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            is_wrapper = part == "module"
        else:
            is_wrapper = part in _WRAPPERS
        if not is_wrapper:
            kept.append(part)
        module = getattr(module, part)
    return ".".join([*kept, last])


def model_tensors(model: nn.Module, aliases: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers without cloning; a shared tensor appears once.

    aliases: name of a parameter that is a copy → name of the original parameter.
    """
    tensors: dict[str, torch.Tensor] = {}
    known: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"checkpoints hold tensors: {name} is {type(value).__name__}")
        if id(value) not in known:
            known.add(id(value))
            unwrapped = unwrapped_name(model, name)
            # On a rank that has both an original and its copy, the original is used.
            tensors.setdefault(f"model.{aliases.get(unwrapped, unwrapped)}", value.detach())
    return tensors


@torch.no_grad()
def fill_copies(model: nn.Module, aliases: Mapping[str, str]) -> None:
    """Copy each loaded original parameter to its copies on the same rank."""
    parameters = {unwrapped_name(model, name): each for name, each in model.named_parameters()}
    for name, original in aliases.items():
        if name in parameters and original in parameters:
            parameters[name].copy_(parameters[original])


# The optimizer.


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, aliases: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], OptimizerOptions]:
    """Return the optimizer's tensors by name, and the rest of its state."""
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
    groups = [_json_options(group) for group in optimizer.param_groups]
    return tensors, OptimizerOptions(type(optimizer).__name__, groups, values)


def empty_optimizer_slots(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, SavedTensor],
    aliases: Mapping[str, str],
) -> dict[str, torch.Tensor]:
    """Allocate the saved `optimizer.…` tensors, sharded as this rank's parameters are.

    Parameters of other pipeline stages have no slots on this rank.
    """
    parameters = _parameters(model, optimizer, aliases)
    slots = {}
    for full_name, (dtype, shape, _) in saved.items():
        kind, _, path = full_name.partition(".")
        parameter = parameters.get(path.rpartition(".")[0])
        if kind != "optimizer" or parameter is None:
            continue
        if tuple(parameter.shape) == shape:
            empty = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            slots[full_name] = empty.detach()
        else:
            slots[full_name] = torch.empty(shape, dtype=dtype)
    return slots


def restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: OptimizerOptions,
    slots: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
) -> None:
    """Restore the optimizer's state through its own `load_state_dict`."""
    state = {name: dict(values) for name, values in options.values.items()}
    for full_name, tensor in slots.items():
        name, _, slot = full_name.removeprefix("optimizer.").rpartition(".")
        state.setdefault(name, {})[slot] = tensor
    groups = []
    for group, saved in zip(optimizer.param_groups, options.groups, strict=True):
        changed = {
            key: _like(group[key], value)
            for key, value in saved.items()
            if key in group and key not in _IMPLEMENTATION
        }
        groups.append({**group, **changed, "params": [id(each) for each in group["params"]]})
    # The state is keyed by parameter, not by name: on a rank that has both an original and its
    # copy, the copy gets a clone of the original's state.
    by_parameter: dict[int, dict[str, Any]] = {}
    restored: set[str] = set()
    for key, name in _names(model, aliases).items():
        if name in state:
            by_parameter[key] = copy.deepcopy(state[name]) if name in restored else state[name]
            restored.add(name)
    optimizer.load_state_dict({"state": by_parameter, "param_groups": groups})


def optimizer_mismatch(
    optimizer: torch.optim.Optimizer, saved: OptimizerOptions | None
) -> str | None:
    """Return why the saved optimizer state does not fit this optimizer; None if it does."""
    if saved is None:
        return "it was saved without an optimizer"
    kind, groups = type(optimizer).__name__, len(optimizer.param_groups)
    if saved.kind != kind:
        return f"its optimizer is {saved.kind}, this one {kind}"
    if len(saved.groups) != groups:
        return f"its optimizer has {len(saved.groups)} parameter groups, this one {groups}"
    return None


def _parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer, aliases: Mapping[str, str]
) -> dict[str, nn.Parameter]:
    names = _names(model, aliases)
    parameters: dict[str, nn.Parameter] = {}
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if id(parameter) not in names:
            raise UsageError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the "
                "model does not have: make it from the model's own parameters"
            )
        parameters.setdefault(names[id(parameter)], parameter)
    return parameters


def _names(model: nn.Module, aliases: Mapping[str, str]) -> dict[int, str]:
    """Map the id of each parameter to its name in a checkpoint."""
    unwrapped = {id(value): unwrapped_name(model, name) for name, value in model.named_parameters()}
    return {key: aliases.get(name, name) for key, name in unwrapped.items()}


def _json_options(group: Mapping[str, Any]) -> dict[str, Any]:
    scalars = (bool, int, float, str, type(None))
    options = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()  # a learning rate that a CUDA graph reads from the device
        if isinstance(value, scalars) or (
            isinstance(value, (tuple, list)) and all(isinstance(item, scalars) for item in value)
        ):
            options[key] = value
    return options


def _like(current: Any, saved: Any) -> Any:
    """Convert a value from JSON to the type of the optimizer's current value."""
    if isinstance(current, torch.Tensor):
        return torch.full_like(current, saved)
    return tuple(saved) if isinstance(current, tuple) else saved


# Random number generators. The Mersenne Twister of Python and numpy has 624 words of 32 bits and a
# position in them. The saved tensor has two more values: whether a second normal number is cached,
# and the bits of that number.
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
    """Restore generators to what `rng_state` returned; a generator not in `state` is unchanged."""
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
    """Seed all generators from a hash of `source`; returns the seed."""
    seed = mixed_seed(*source) % (1 << 32)  # numpy takes 32 bits
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # seeds the generators of the GPUs, too
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
        raise ValueError("this is not the state of a Mersenne Twister")
    cached = torch.tensor(bits, dtype=torch.int64).view(torch.float64).item()
    return words, cached if is_cached else None
