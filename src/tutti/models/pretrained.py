"""Models of other libraries: Hugging Face folders (hf:FOLDER) and timm models (timm:NAME).

A Hugging Face folder has config.json, weights as safetensors files, and the files of a tokenizer:

    config.json                        the architecture and its sizes
    model.safetensors                  the weights, or
    model.safetensors.index.json       the file of each tensor, if there are several files
    tokenizer.json, vocab.json, …      copied with the model, not checked here

The checks of a folder read config.json and the headers of the weights. They import neither torch
nor transformers, so a damaged folder is refused before ranks are started.
"""

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.models.config import ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn

_INDEX = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
# The dtypes of weights that can be trained, by their names in safetensors and in torch.
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
_MAX_SIDE_FILE_BYTES = 256 << 20
_MAX_NAMES = 3


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a safetensors file."""

    file: Path
    key: str
    dtype: str
    """The name of the dtype in safetensors, such as BF16."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class HuggingFaceFolder:
    """The content of a folder, without the values of its tensors."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, SavedTensor]

    @property
    def vocabulary(self) -> int | None:
        """The size of the vocabulary, or None if it is not in config.json."""
        return _integer(self.config, "vocab_size")

    @property
    def max_seq_len(self) -> int | None:
        """The largest number of tokens in a sample, or None if there is no limit."""
        return _integer(self.config, "max_position_embeddings", "n_positions")


def check_source(source: str, name: str, *, weights: bool = True) -> None:
    """Raise ModelError if a package is missing or a folder is damaged. Imports no package.

    `weights` is False for the folder in a run directory, whose weights are in the checkpoints.
    """
    package, extra = ("transformers", "hf") if source == "hf" else ("timm", "timm")
    if importlib.util.find_spec(package) is None:
        raise ModelError(
            f"--model {source}:{name} needs the package {package}: pip install "
            f"'tutti-torch[{extra}]'"
        )
    if source == "hf":
        read_folder(name, weights=weights)


def read_folder(name: str | Path, *, weights: bool = True) -> HuggingFaceFolder:
    """Read config.json and the headers of all weight files of a folder.

    Without `weights`, the folder needs only config.json.
    """
    path = Path(name)
    if not os.path.isdir(path):
        problem = "is a file" if os.path.isfile(path) else "does not exist"
        raise ModelError(
            f"--model hf:{name} {problem}: give a local folder with config.json (download a model "
            "with: hf download NAME --local-dir FOLDER)"
        )
    config = _read_json(path / "config.json")
    if "model_type" not in config:
        raise ModelError(
            f"{path / 'config.json'} has no model_type: use the config.json that save_pretrained "
            "writes"
        )
    if "quantization_config" in config:
        raise ModelError(
            f"{path / 'config.json'}: the weights are quantised, which cannot be trained: use the "
            "model's folder with 16-bit or 32-bit weights"
        )
    return HuggingFaceFolder(path, config, saved_tensors(path) if weights else {})


def saved_tensors(path: Path) -> dict[str, SavedTensor]:
    """Read the headers of the weight files of a folder, and check that all files are complete."""
    if (path / _INDEX).is_file():
        weight_map = _read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{path / _INDEX} has no weight_map: copy the file again")
        tensors: dict[str, SavedTensor] = {}
        for file in sorted({str(file) for file in weight_map.values()}):
            if Path(file).name != file:
                raise ModelError(
                    f"{path / _INDEX} names the file {file}, which is outside of the folder: copy "
                    f"{_INDEX} again"
                )
            if not (path / file).is_file():
                raise ModelError(
                    f"{path / file} is missing, but {_INDEX} names it: copy the file again"
                )
            tensors |= read_header(path / file)
        missing = [key for key in weight_map if key not in tensors]
        if missing:
            raise ModelError(
                f"{path / weight_map[missing[0]]} has no tensor {missing[0]}, but {_INDEX} names "
                "it: copy both files again"
            )
        return {key: tensors[key] for key in weight_map}
    if (path / _SINGLE_FILE).is_file():
        return read_header(path / _SINGLE_FILE)
    cure = f"copy {_SINGLE_FILE}, or {_INDEX} and the files that it names, into the folder"
    if (path / "pytorch_model.bin").exists() or (path / "pytorch_model.bin.index.json").exists():
        cure = "convert pytorch_model.bin with from_pretrained(FOLDER).save_pretrained(FOLDER)"
    raise ModelError(f"{path} has no safetensors weights: {cure}")


def read_header(file: Path) -> dict[str, SavedTensor]:
    """Read the names, dtypes and shapes in a safetensors file, and check the file's size."""
    damaged = f"{file} is truncated or not a safetensors file"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{damaged} ({size} bytes): copy the file again")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {
            key: SavedTensor(file, key, value["dtype"], tuple(value["shape"]))
            for key, value in header.items()
        }
        end = 8 + length + max((value["data_offsets"][1] for value in header.values()), default=0)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{damaged} (its header does not parse): copy the file again") from None
    if end != size:
        raise ModelError(
            f"{file} is truncated: its header describes {end} bytes, but it has {size}: copy the "
            "file again"
        )
    for tensor in tensors.values():
        if tensor.dtype.startswith(("F4", "F6", "F8")):
            raise ModelError(
                f"{file}: {tensor.key} has dtype {tensor.dtype}, which cannot be trained: use the "
                "model's folder with 16-bit or 32-bit weights"
            )
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: give a folder that save_pretrained wrote") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}): copy the file again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object: copy the file again")
    return content


def _integer(config: Mapping[str, Any], *names: str) -> int | None:
    values = [config.get(name) for name in names]
    return next((value for value in values if isinstance(value, int)), None)


def copy_side_files(source: Path, target: Path) -> None:
    """Copy the configuration, the tokenizer and other small files of a folder, without weights."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if not file.is_file() or file.name.startswith("."):
            continue
        is_weight = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if not is_weight and file.stat().st_size <= _MAX_SIDE_FILE_BYTES:
            shutil.copyfile(file, target / file.name)


# -- building --------------------------------------------------------------------------------------


def build_timm(name: str) -> "nn.Module":
    """Return a timm model with random weights."""
    try:
        import timm
    except Exception as error:  # timm needs torchvision, which may not fit the installed torch
        raise ModelError(f"--model timm:{name}: timm cannot be imported ({error})") from None
    try:
        model: nn.Module = timm.create_model(name)
    except RuntimeError as error:
        raise ModelError(f"--model timm:{name}: {_first_line(error)}") from None
    return model


def build_causal_lm(folder: HuggingFaceFolder) -> "nn.Module":
    """Return the model that config.json describes, in the dtype of its saved weights.

    The model is on torch's default device, which may be meta. Its weights are not loaded.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    place = f"{folder.path / 'config.json'}"
    try:
        config = AutoConfig.from_pretrained(
            folder.path, local_files_only=True, trust_remote_code=False
        )
        config.use_cache = False  # keys and values are cached in generation only
        dtype = getattr(torch, saved_dtype(folder))
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False
        )
    except Exception as error:
        kind = folder.config["model_type"]
        if "Unrecognized configuration class" in str(error):
            problem = f"{kind} has no causal language model in transformers"
        else:
            problem = f"transformers cannot build a {kind} ({_first_line(error)})"
        raise ModelError(
            f"{place}: {problem}: update transformers, or return the model from a function of "
            "yours (--model package.module:function)"
        ) from None
    model.train()
    return model


def saved_dtype(folder: HuggingFaceFolder) -> str:
    """Return the dtype of the weights, such as bfloat16.

    It is the dtype in config.json, or the most frequent dtype in the files if config.json has none.
    """
    named = folder.config.get("dtype") or folder.config.get("torch_dtype")
    if named in _DTYPES.values():
        return str(named)
    saved = [tensor.dtype for tensor in folder.tensors.values() if tensor.dtype in _DTYPES]
    return _DTYPES[max(set(saved), key=saved.count)] if saved else "float32"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def load_tokenizer(folder: HuggingFaceFolder) -> Any:
    """Return the tokenizer of a folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            folder.path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ModelError(
            f"{folder.path} has no tokenizer that can be loaded ({_first_line(error)}): copy "
            "tokenizer.json or the files of its tokenizer into the folder"
        ) from None


def end_tokens(folder: HuggingFaceFolder) -> list[int]:
    """Return the tokens that end a text, from generation_config.json or else from config.json."""
    file = folder.path / "generation_config.json"
    config = _read_json(file) if file.is_file() else {}
    end = config.get("eos_token_id", folder.config.get("eos_token_id"))
    return end if isinstance(end, list) else [] if end is None else [end]


# -- weights ---------------------------------------------------------------------------------------


def tensor_sources(
    model: "nn.Module", tensors: Mapping[str, SavedTensor], folder: str
) -> tuple[dict[str, "SavedTensor | Callable[[], Tensor]"], list[str]]:
    """Return the saved tensor of each parameter and buffer, and notes for the user.

    The files may use older names than the model, or names without the prefix of the base model;
    transformers defines the renaming. Some models fuse several saved tensors into one (the experts
    of a layer). The source of such a tensor is a function, which reads and fuses these tensors.
    """
    wanted = model.state_dict()
    sources: dict[str, SavedTensor | Callable[[], Tensor]] = {}
    fused: dict[str, _FusedTensors] = {}
    if hasattr(model, "base_model_prefix"):
        ignored = _match_names(model, tensors, wanted, sources, fused)
    else:
        sources |= {name: tensors[name] for name in wanted if name in tensors}
        ignored = [name for name in tensors if name not in wanted]
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        name: (str(source.file), source.shape)
        for name, source in sources.items()
        if isinstance(source, SavedTensor)
    }
    for parts in fused.values():
        for name, shape in parts.shapes().items():
            shapes[name] = (str(parts.saved[0][1].file), shape)
            sources[name] = _one_of(parts, name)
    for tied in tied_names(model).values():  # the files contain a tied tensor under one name only
        source = next((sources[name] for name in tied if name in sources), None)
        if source is not None:
            sources |= {name: source for name in tied if name not in sources}
    missing = [name for name, _ in model.named_parameters() if name not in sources]
    if missing:
        raise ModelError(
            f"{folder} has no weights for {_join(missing)} of {type(model).__name__}: use the "
            "folder of the whole model"
        )
    for name, (file, shape) in shapes.items():
        if name in wanted and shape != tuple(wanted[name].shape):
            raise ModelError(
                f"{file}: {name} has shape {shape}, but config.json gives it the shape "
                f"{tuple(wanted[name].shape)}: copy both files from the same model"
            )
    for name, source in sources.items():
        whole = isinstance(source, SavedTensor) and source.dtype not in _DTYPES
        if whole and name in wanted and wanted[name].is_floating_point():
            assert isinstance(source, SavedTensor)
            raise ModelError(
                f"{source.file}: {name} has dtype {source.dtype}, but the model needs floating "
                "point numbers: use the model's folder with 16-bit or 32-bit weights"
            )
    notes = []
    if ignored:
        notes.append(f"{folder}: not used, since the model has no such tensor: {_join(ignored)}")
    return sources, notes


def saved_form(
    model: "nn.Module", shapes: Mapping[str, tuple[int, ...]]
) -> "Callable[[str, Tensor], Mapping[str, Tensor]] | None":
    """Return a function that converts a tensor of the model to the tensors that transformers saves.

    None means that tensors are saved as they are in the model. This is the case if transformers
    does the same, or if its conversion needs several tensors at once. In the second case,
    from_pretrained can also read the tensors as they are in the model.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    def convert(name: str, tensor: "Tensor") -> "Mapping[str, Tensor]":
        converted: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
        return converted

    whole = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        expected = revert_weight_conversion(model, dict(whole))
        single = [convert(name, tensor) for name, tensor in whole.items()]
    except Exception:
        return None
    found = {name: tensor.shape for each in single for name, tensor in each.items()}
    same = found == {name: tensor.shape for name, tensor in expected.items()}
    return convert if same and found != dict(shapes) else None


def _match_names(
    model: Any,
    tensors: Mapping[str, SavedTensor],
    wanted: Mapping[str, "Tensor"],
    sources: dict[str, Any],
    fused: "dict[str, _FusedTensors]",
) -> list[str]:
    """Add the saved tensors of a model of transformers to `sources` and `fused`.

    Returns the names of the saved tensors that the model does not use.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix = model.base_model_prefix
    ignored = []
    for key, tensor in sorted(tensors.items(), key=lambda pair: dot_natural_key(pair[0])):
        name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted:
            name, pattern = rename_source_key(key, [], [], prefix, wanted)
        if name not in wanted:
            ignored.append(key)
        elif pattern is None:
            sources[name] = tensor
        else:
            parts = fused.setdefault(name, _FusedTensors(model, name, by_pattern[pattern], []))
            parts.saved.append((pattern, tensor))
    return ignored


class _FusedTensors:
    """Saved tensors, and their conversion to tensors of the model, such as fused experts."""

    def __init__(
        self, model: "nn.Module", name: str, converter: Any, saved: list[tuple[str, SavedTensor]]
    ) -> None:
        self.saved = saved
        self._model, self._name, self._converter = model, name, converter

    def shapes(self) -> dict[str, tuple[int, ...]]:
        import torch

        converted = self._convert(lambda saved: torch.empty(saved.shape, device="meta"))
        return {name: tuple(tensor.shape) for name, tensor in converted.items()}

    def read(self, name: str) -> "Tensor":
        from safetensors import safe_open

        def read(saved: SavedTensor) -> "Tensor":
            with safe_open(saved.file, framework="pt") as file:
                tensor: Tensor = file.get_tensor(saved.key)
                return tensor

        return self._convert(read)[name]

    def _convert(self, read: Callable[[SavedTensor], "Tensor"]) -> dict[str, "Tensor"]:
        converter = deepcopy(self._converter)
        for pattern, saved in self.saved:
            converter.add_tensor(self._name, saved.key, pattern, read(saved))
        results = converter.convert(self._name, model=self._model, config=self._model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in results.items()
        }


def _one_of(parts: _FusedTensors, name: str) -> Callable[[], "Tensor"]:
    return lambda: parts.read(name)


def tied_names(model: "nn.Module") -> dict[str, list[str]]:
    """Return all names of each parameter, keyed by its first name.

    A tied parameter has several names.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {each[0]: each for each in names.values()}


def _join(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
