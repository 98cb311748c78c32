"""LoRA: the options of --lora, its layers in a model (through peft), and adapter folders.

LoRA freezes a model and trains two small matrices for each target layer. With the input x:

    y = W x + scale · B (A x)        A: rank × inputs, B: outputs × rank, scale = alpha / rank

peft replaces a target layer by a layer with these children, which other modules here rely on:

    q_proj.base_layer.weight         the frozen W
    q_proj.lora_A.default.weight     A, initially random
    q_proj.lora_B.default.weight     B, initially 0: the first outputs are those of the base

An adapter folder has the format of peft, which PeftModel.from_pretrained reads:

    adapter_config.json              rank, alpha, target layers
    adapter_model.safetensors        base_model.model.<layer>.lora_A.weight and …lora_B.weight

Options and folders are checked without torch and peft, before ranks are started.
"""

import difflib
import importlib.util
import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.models.config import ModelError

if TYPE_CHECKING:
    from torch import nn

    from tutti.models.pretrained import HuggingFaceFolder, SavedTensor

ALL_LINEAR = "all-linear"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MATRICES = ("lora_A", "lora_B")
_ADAPTER = "default"  # the name that peft gives to the only adapter of a model
_PREFIX = "base_model.model."  # begins the name of every tensor in an adapter folder
_EXAMPLE = "rank=16,alpha=32,targets=q_proj+v_proj"
# Options of peft that change the layers. An adapter with other values than these is refused.
_UNSUPPORTED: dict[str, Any] = {
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "bias": "none",
    "lora_bias": False,
    "target_parameters": None,
    "layer_replication": None,
}
_MAX_NAMES = 8


@dataclass(frozen=True)
class LoraOptions:
    """The options of --lora."""

    rank: int = 16
    alpha: float = 32.0  # default: 2 × rank
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)

    @classmethod
    def parse(cls, text: str) -> "LoraOptions":
        """Return the options of a text such as rank=16,alpha=32,targets=q_proj+v_proj."""
        values: dict[str, Any] = {}
        for part in text.split(","):
            key, equals, value = (each.strip() for each in part.partition("="))
            if not equals or key not in cls.__dataclass_fields__ or key in values:
                known = ", ".join(cls.__dataclass_fields__)
                problem = "is given twice" if key in values else f"is not one of {known}"
                raise ModelError(f"--lora {text}: {key!r} {problem}: write {_EXAMPLE}")
            try:
                number = {"rank": int, "alpha": float, "dropout": float}.get(key)
                values[key] = tuple(value.split("+")) if number is None else number(value)
            except ValueError:
                raise ModelError(f"--lora {text}: {key} {value!r} is not a number") from None
        options = cls(**{"alpha": 2.0 * values.get("rank", cls.rank), **values})
        if options.rank < 1:
            raise ModelError(f"--lora {text}: rank must be at least 1, got {options.rank}")
        if not 0 < options.alpha < math.inf:
            raise ModelError(f"--lora {text}: alpha must be above 0, got {options.alpha:g}")
        if not 0 <= options.dropout < 1:
            raise ModelError(f"--lora {text}: dropout must be from 0 to below 1")
        if not all(options.targets) or (len(options.targets) > 1 and ALL_LINEAR in options.targets):
            raise ModelError(
                f"--lora {text}: targets must be {ALL_LINEAR}, or names of layers joined by +: "
                f"write {_EXAMPLE}"
            )
        return options


def check_peft(flag: str) -> None:
    """Raise ModelError if the package peft is not installed. Imports nothing."""
    if importlib.util.find_spec("peft") is None:
        raise ModelError(f"{flag} needs the package peft: pip install 'tutti-torch[hf]'")


def check_target_names(targets: Sequence[str], layers: Sequence[str]) -> None:
    """Raise ModelError if a target is not the end of any name in `layers`."""
    for target in targets:
        if not any(_matches(name, target) for name in layers):
            raise _unknown_target(target, layers)


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _unknown_target(target: str, layers: Sequence[str]) -> ModelError:
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    near = difflib.get_close_matches(target.rpartition(".")[2], known, n=3, cutoff=0.5)
    more = f" and {len(known) - _MAX_NAMES} more" if len(known) > _MAX_NAMES else ""
    names = " or ".join(near) or ", ".join(known[:_MAX_NAMES]) + more
    cure = f"did you mean {names}?" if near else f"choose from {names}"
    return ModelError(f"--lora: the model has no linear layer {target!r}: {cure}")


# -- adapter folders -------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdapterFolder:
    """The content of an adapter folder, without the values of its tensors."""

    path: Path
    rank: int
    alpha: float
    scale: float
    tensors: "dict[str, SavedTensor]"
    """The matrices by their names in the model, such as layers.0.q_proj.lora_A."""

    @property
    def layers(self) -> list[str]:
        """The names of the adapted layers."""
        return [name.rpartition(".")[0] for name in self.tensors if name.endswith(".lora_A")]

    def sizes(self, layer: str) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of an adapted layer."""
        a, b = (self.tensors[f"{layer}.{matrix}"] for matrix in MATRICES)
        return b.shape[0], a.shape[1]


def is_adapter_folder(path: Path) -> bool:
    """Return whether a folder has the configuration of an adapter."""
    return os.path.isfile(path / ADAPTER_CONFIG)


def read_adapter(path: Path, flag: str = "--adapter") -> AdapterFolder:
    """Read the configuration and the names and shapes of the tensors in an adapter folder."""
    from tutti.models.pretrained import read_header

    if not os.path.isdir(path):
        problem = "is a file" if os.path.isfile(path) else "does not exist"
        raise ModelError(f"{flag} {path} {problem}: give a folder with {ADAPTER_CONFIG}")
    config = _read_config(path / ADAPTER_CONFIG, flag)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if config.get("peft_type") != "LORA" or not isinstance(rank, int) or rank < 1:
        raise ModelError(
            f"{path / ADAPTER_CONFIG} is not the configuration of a LoRA adapter (peft_type "
            f"{config.get('peft_type')!r}, r {rank!r}): use another adapter"
        )
    if not isinstance(alpha, int | float):
        raise ModelError(f"{path / ADAPTER_CONFIG}: lora_alpha must be a number, got {alpha!r}")
    for name, only in _UNSUPPORTED.items():
        if config.get(name) and config[name] != only:
            raise ModelError(
                f"{path / ADAPTER_CONFIG}: {name} is {config[name]!r}, which is not supported: "
                "train the adapter without it, or merge the adapter with peft"
            )
    if not os.path.isfile(path / ADAPTER_WEIGHTS):
        raise ModelError(
            f"{path / ADAPTER_WEIGHTS} is missing: save the adapter with save_pretrained of peft"
        )
    tensors: dict[str, SavedTensor] = {}
    for key, tensor in read_header(path / ADAPTER_WEIGHTS).items():
        name = key.removeprefix(_PREFIX).removesuffix(".weight")
        if ".base_layer." in key:
            continue  # for an output layer, peft also saves a copy of the frozen weight
        if not name.endswith(MATRICES) or len(tensor.shape) != 2:
            raise ModelError(
                f"{path / ADAPTER_WEIGHTS}: {key} is not a matrix of a linear layer, which is not "
                "supported: use an adapter of linear layers"
            )
        tensors[name] = tensor
    for name, tensor in tensors.items():
        layer, _, matrix = name.rpartition(".")
        other = f"{layer}.{MATRICES[1 - MATRICES.index(matrix)]}"
        size = tensor.shape[MATRICES.index(matrix)]
        if other not in tensors or size != rank:
            problem = f"has rank {size}, not {rank}" if other in tensors else f"has no {other}"
            raise ModelError(f"{path / ADAPTER_WEIGHTS}: {name} {problem}: copy both files again")
    if not tensors:
        raise ModelError(f"{path / ADAPTER_WEIGHTS} has no tensors: copy the file again")
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return AdapterFolder(path, rank, float(alpha), scale, tensors)


def _read_config(file: Path, flag: str) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{flag} {file.parent} has no {file.name}: give an adapter") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{file} is not JSON ({error}): copy the file again") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file} is not a JSON object: copy the file again")
    return config


def check_adapter_files(adapter: AdapterFolder, base: "HuggingFaceFolder") -> None:
    """Raise ModelError if a layer has another size in the files of the base model.

    Files may use other names than the model, so a layer that is not found is not an error here.
    """
    for layer in adapter.layers:
        saved = base.tensors.get(f"{layer}.weight")
        if saved is not None and sorted(saved.shape) != sorted(adapter.sizes(layer)):
            raise _other_model(adapter, layer, f"{saved.file} has the shape {saved.shape}")


def _other_model(adapter: AdapterFolder, layer: str, found: str) -> ModelError:
    outputs, inputs = adapter.sizes(layer)
    return ModelError(
        f"{adapter.path / ADAPTER_WEIGHTS} is for another model: it adapts {layer} with {inputs} "
        f"inputs and {outputs} outputs, but {found}: use the base model of this adapter"
    )


def check_adapter_fits(adapter: AdapterFolder, model: "nn.Module") -> None:
    """Raise ModelError if an adapted layer is missing in the model, or has another size.

    `model` is the base model, with or without adapters.
    """
    modules = dict(model.named_modules())
    for layer in adapter.layers:
        module = modules.get(layer)
        base = None if module is None else base_layer_of(module)
        found = linear_sizes(base) if base is not None and is_linear(base) else None
        if found != adapter.sizes(layer):
            has = "no such linear layer"
            if found is not None:
                has = f"{found[1]} inputs and {found[0]} outputs"
            raise _other_model(adapter, layer, f"{type(model).__name__} has {has}")


# -- layers ----------------------------------------------------------------------------------------


def is_linear(module: "nn.Module") -> bool:
    """Return whether a module is a linear layer: nn.Linear, or Conv1D of transformers."""
    from torch import nn

    return isinstance(module, nn.Linear) or is_transposed_linear(module)


def is_transposed_linear(module: "nn.Module") -> bool:
    """Return whether a module is the Conv1D of transformers, whose weight is (inputs, outputs)."""
    from torch import Tensor

    weight = getattr(module, "weight", None)
    return type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.dim() == 2


def linear_sizes(module: "nn.Module") -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a linear layer."""
    first, second = module.weight.shape  # type: ignore[misc]
    return (second, first) if is_transposed_linear(module) else (first, second)


def is_adapted(module: "nn.Module") -> bool:
    """Return whether a module is a layer with a LoRA adapter."""
    return "base_layer" in module._modules and "lora_A" in module._modules


def base_layer_of(module: "nn.Module") -> "nn.Module":
    """Return the frozen layer of a layer with an adapter. Another module is returned itself."""
    base = module._modules["base_layer"] if is_adapted(module) else module
    assert base is not None
    return base


def adapter_layer(module: "nn.Module", matrix: str) -> "nn.Linear":
    """Return the linear layer of lora_A or lora_B of an adapted layer."""
    layer: nn.Linear = getattr(module, matrix)[_ADAPTER]
    return layer


def adapted_layers(model: "nn.Module") -> list[tuple[str, "nn.Module"]]:
    """Return the names and modules of all layers with an adapter."""
    return [(name, module) for name, module in model.named_modules() if is_adapted(module)]


@contextmanager
def without_adapters(model: "nn.Module") -> Iterator[None]:
    """Context in which adapted layers are replaced by their base layers.

    In this context, the modules and parameters have their names in the base model.
    """
    replaced = [
        (parent, key, child)
        for parent in model.modules()
        for key, child in parent._modules.items()
        if child is not None and is_adapted(child)
    ]
    for parent, key, child in replaced:
        parent._modules[key] = base_layer_of(child)
    try:
        yield
    finally:
        for parent, key, child in replaced:
            parent._modules[key] = child


def find_targets(model: "nn.Module", targets: Sequence[str]) -> list[str]:
    """Return the names of the linear layers that the targets of --lora select.

    all-linear selects every linear layer except the output layer of a language model.
    """
    from torch import nn

    modules = dict(model.named_modules())
    # MultiheadAttention reads the weight of its output layer and does not call the layer.
    uncalled = {
        name
        for parent, module in modules.items()
        if isinstance(module, nn.MultiheadAttention)
        for name in modules
        if name.startswith(f"{parent}." if parent else "")
    }
    linear = [name for name, module in modules.items() if name and is_linear(module)]
    usable = [name for name in linear if name not in uncalled]
    if not usable:
        raise ModelError(f"--lora needs linear layers, but {type(model).__name__} has none")
    if targets == (ALL_LINEAR,):
        find_output = getattr(model, "get_output_embeddings", lambda: getattr(model, "head", None))
        output = find_output()
        return [name for name in usable if modules[name] is not output] or usable
    found: list[str] = []
    for target in targets:
        matches = [name for name in modules if name and _matches(name, target)]
        chosen = [name for name in matches if name in usable]
        if not matches:
            raise _unknown_target(target, usable)
        if not chosen:
            kind = type(modules[matches[0]]).__name__
            reason = f"has the type {kind}, but LoRA needs a Linear"
            if matches[0] in uncalled:
                reason = "is in a MultiheadAttention, which reads its weight without calling it"
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in usable))
            raise ModelError(f"--lora targets={target}: {matches[0]} {reason}: choose from {known}")
        found += [name for name in chosen if name not in found]
    return found


def add_adapters(model: "nn.Module", options: LoraOptions) -> None:
    """Freeze the model and add an adapter to each target layer, in place, through peft.

    Adapters are on the device of their layers. They have the dtype of their layer, or float32 if
    this dtype has 16 bits: small updates would be lost in 16 bits. Call it on the whole model.
    """
    import torch
    from torch import nn

    check_peft("--lora")
    targets = find_targets(model, options.targets)
    if any(is_adapted(module) for module in model.modules()):
        raise ModelError("--lora: the model already has adapters: leave out --lora")
    from peft import inject_adapter_in_model

    places = Counter(id(child) for parent in model.modules() for child in parent._modules.values())
    for name in targets:
        if places[id(model.get_submodule(name))] > 1:  # peft would adapt only one of the places
            raise ModelError(
                f"--lora: layer {name} is used in several places of {type(model).__name__}: leave "
                "it out of the targets"
            )
    config = peft_config(
        options,
        targets,
        [name for name, _ in model.named_modules() if name and name not in targets],
        transposed=any(is_transposed_linear(model.get_submodule(name)) for name in targets),
        causal_lm=hasattr(model, "prepare_inputs_for_generation"),
    )
    device = model.get_parameter(f"{targets[0]}.weight").device
    with warnings.catch_warnings(), torch.device(device):
        warnings.simplefilter("ignore")  # peft warns about tied weights, which export handles
        inject_adapter_in_model(config, model)
    for _, layer in adapted_layers(model):
        dtype = base_layer_of(layer).weight.dtype
        for matrix in MATRICES:
            adapter_layer(layer, matrix).to(torch.promote_types(dtype, torch.float32))  # type: ignore[arg-type]
    if any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()):
        # In evaluation, TransformerEncoderLayer may use a fused kernel, which reads the base
        # weights and does not call the adapted layers. So the fused kernel is disabled.
        torch.backends.mha.set_fastpath_enabled(False)


def peft_config(
    options: LoraOptions,
    targets: Sequence[str],
    others: Sequence[str],
    *,
    transposed: bool,
    causal_lm: bool,
) -> Any:
    """Return peft's LoraConfig for the layers `targets`; `others` are the other modules' names.

    `transposed` is whether a target is a Conv1D.
    """
    from peft import LoraConfig

    # If all layers with a short name, such as q_proj, are targets, the short name is used for them.
    short = {name.rpartition(".")[2] for name in targets}
    short -= {name.rpartition(".")[2] for name in others}
    names = short | {name for name in targets if name.rpartition(".")[2] not in short}
    selected: list[str] | str = sorted(names)
    if any(_matches(other, name) for other in others for name in names):
        selected = "|".join(map(re.escape, targets))  # peft compares a string with whole names
    alpha: Any = int(options.alpha) if options.alpha == int(options.alpha) else options.alpha
    return LoraConfig(
        r=options.rank,
        lora_alpha=alpha,
        lora_dropout=options.dropout,
        target_modules=selected,
        fan_in_fan_out=transposed,
        task_type="CAUSAL_LM" if causal_lm else None,
    )


def saved_name(layer: str, matrix: str) -> str:
    """Return the name of a matrix in adapter_model.safetensors."""
    return f"{_PREFIX}{layer}.{matrix}.weight"
