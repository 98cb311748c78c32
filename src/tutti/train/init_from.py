"""Initial weights from files: a run, a Hugging Face folder or an adapter folder (--init-from).

The functions return where each tensor is stored. Every rank then reads only its own shards.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tutti.models.lora_layers import (
    MATRICES,
    adapted_layers,
    adapter_layer,
    check_adapter_fits,
    is_adapter_folder,
    read_adapter,
)
from tutti.models.pretrained import SavedTensor, saved_tensors, tensor_sources, tied_names
from tutti.parallel.materialize import FileChunk, TensorSources
from tutti.parallel.mesh import Box
from tutti.train.checkpoint.format import saved_steps, step_name
from tutti.train.checkpoint.load import chunks_of, this_rank, verify
from tutti.world.errors import UsageError


def saved_weights_of(model: nn.Module, source: Path) -> tuple[TensorSources, list[str]]:
    """Return where each weight is stored in `source` (a run or a folder), and notes."""
    if not (source / "recipe.toml").is_file():
        sources, notes = tensor_sources(model, saved_tensors(source), str(source))
        return {name: _chunks(each) for name, each in sources.items()}, notes
    path, saved = _saved_run(source)
    chunks = {
        name: chunks_of(path, saved[first])
        for first, names in tied_names(model).items()
        for name in names
        if first in saved
    }
    for name, tensor in model.named_parameters():
        shape = tuple(saved[name]["shape"]) if name in chunks else None
        if shape != tuple(tensor.shape):
            found = f"has no {name}" if shape is None else f"has {name} of shape {shape}"
            raise UsageError(
                f"--init-from {source} {found}, but the model has {name} of shape "
                f"{tuple(tensor.shape)}: use a run of the same model"
            )
    buffers = [name for name, _ in model.named_buffers() if name in saved]
    chunks |= {name: chunks_of(path, saved[name]) for name in buffers}
    return chunks, []


def _saved_run(source: Path) -> tuple[Path, dict[str, Any]]:
    """Return the newest checkpoint of a run, and its tensors by their names in the base model."""
    steps = saved_steps(source / "checkpoints")
    path = source / "checkpoints" / step_name(max(steps, default=0))
    # Every rank verifies a part of the files. `agree` raises the error of one rank on all ranks.
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    index = verify(path, this_rank(), ranks)
    if isinstance(index, str):
        raise UsageError(f"--init-from {source}: {path.name} is damaged: {index}")
    return path, {
        name.removeprefix("model.").replace(".base_layer.", "."): each
        for name, each in index["tensors"].items()
        if name.startswith("model.")  # not the state of the optimizer, and not moving averages
    }


def saved_adapters_of(model: nn.Module, source: Path) -> TensorSources:
    """Return the chunks of each LoRA matrix in `source`: an adapter folder, or a run with --lora.

    `model` has adapters. The result is empty if `source` has no adapters.
    """
    names = {
        f"{name}.{matrix}": adapter_layer(layer, matrix).weight
        for name, layer in adapted_layers(model)
        for matrix in MATRICES
    }
    chunks: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    if is_adapter_folder(source):
        adapter = read_adapter(source, "--init-from")
        check_adapter_fits(adapter, model)
        chunks = {name: _chunks(tensor) for name, tensor in adapter.tensors.items()}
        shapes = {name: tensor.shape for name, tensor in adapter.tensors.items()}
    elif (source / "recipe.toml").is_file():
        path, saved = _saved_run(source)
        for key, each in saved.items():
            name = key.removesuffix(".default.weight")
            if name.endswith(MATRICES):
                chunks[name], shapes[name] = chunks_of(path, each), tuple(each["shape"])
    for name in sorted({*names, *shapes}) if shapes else ():
        expected = tuple(names[name].shape) if name in names else None
        if shapes.get(name) != expected:
            has, needed = (
                "no such matrix" if shape is None else f"shape {shape}"
                for shape in (shapes.get(name), expected)
            )
            raise UsageError(
                f"--init-from {source} has {has} for {name}, but --lora gives it {needed}: use the "
                "rank and the targets of the saved adapter"
            )
    return chunks


def _chunks(source: SavedTensor | Callable[[], Tensor]) -> list[FileChunk] | Callable[[], Tensor]:
    if not isinstance(source, SavedTensor):
        return source
    whole = Box((0,) * len(source.shape), source.shape)
    return [FileChunk(source.file, source.key, whole)]
