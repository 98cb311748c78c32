"""Reading a checkpoint: verify it, compare it with the model, then copy what this rank needs.

What was saved by any number of ranks loads into any other: where a saved box and a local one
meet is worked out by torch's distributed checkpoint, the bytes come from memory-mapped files.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tutti.train.checkpoint_index import Index, SavedTensor, check_tensor_files, read_index
from tutti.train.checkpoint_plan import Box, local_part
from tutti.train.durable_file import Damaged
from tutti.train.rng import rng_state, seed_all, set_rng_state
from tutti.train.tensor_file import TensorFile

_NAMED = 3  # how many tensors a message names before it counts the rest


def verify_share(directory: Path, rank: int, ranks: int) -> Index | str:
    """Check the index and this rank's share of the files; the index, or what is wrong."""
    try:
        index = read_index(directory)
        largest_first = sorted(index.files, key=lambda file: (-index.files[file].bytes, file))
        check_tensor_files(directory, index, largest_first[rank::ranks])
        return index
    except (Damaged, OSError) as error:
        return str(error)


def mismatch(saved: Mapping[str, SavedTensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """What this rank's tensors lack in a checkpoint, or find there in another form."""
    missing = [name for name in wanted if name not in saved]
    problems = [f"it does not have {_some(missing)}"] if missing else []
    for name, tensor in wanted.items():
        if name not in saved or (shape := saved[name].shape) == tuple(tensor.shape):
            continue
        problems.append(f"its {_bare(name)} has shape {shape}, this model's {tuple(tensor.shape)}")
        break
    for name, tensor in wanted.items():
        if name in saved and not _convertible(saved[name].dtype, tensor.dtype):
            kinds = f"{saved[name].dtype}, this model's {tensor.dtype}"
            problems.append(f"its {_bare(name)} is {kinds}")
            break
    return problems


def unexpected(saved: Iterable[str], wanted: set[str]) -> list[str]:
    """What a checkpoint has and no rank wants."""
    extra = [name for name in saved if name not in wanted]
    return [f"it has {_some(extra)}, which this model does not"] if extra else []


def conversions(saved: Mapping[str, SavedTensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """A note when numbers change their precision on the way in."""
    changed = [name for name, tensor in wanted.items() if saved[name].dtype != tensor.dtype]
    if not changed:
        return []
    first = changed[0]
    kinds = f"{saved[first].dtype} to {wanted[first].dtype}"
    return [f"{_some(changed)} converted from {kinds}"]


class Reader:
    """Copies tensors out of a verified checkpoint."""

    def __init__(self, directory: Path, index: Index) -> None:
        self._directory = directory
        self._index = index
        self._files: dict[str, TensorFile] = {}

    @torch.no_grad()
    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Fill a tensor, or this rank's part of a DTensor."""
        saved = self._index.tensors[name]
        local, box = local_part(tensor)
        if not local.numel():
            return
        chunks = [_chunk(chunk.box) for chunk in saved.chunks]
        properties = TensorProperties(dtype=saved.dtype)
        metadata = TensorStorageMetadata(properties, torch.Size(saved.shape), chunks)
        filled = 0
        for item in create_read_items_for_chunk_list(name, metadata, [_chunk(box)]):
            position = item.storage_index.index
            assert position is not None  # that function always gives it
            chunk = saved.chunks[position]
            source = self._file(chunk.file).tensor(chunk.key)
            target = _window(local, item.dest_offsets, item.lengths)
            target.copy_(_window(source, item.storage_offsets, item.lengths))
            filled += math.prod(item.lengths)
        assert filled == local.numel(), f"{name}: {filled} of {local.numel()} elements were read"

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self._directory / name)
        return self._files[name]


def restore_rng(reader: Reader, index: Index, rank: int) -> list[str]:
    """Put this rank's random generators back; seed those anew that were not saved, and say so."""
    state, absent = {}, []
    for name, now in rng_state().items():
        saved = index.tensors.get(f"rng.{rank}.{name}")
        if saved is None or (saved.dtype, saved.shape) != (now.dtype, tuple(now.shape)):
            absent.append(name)
        else:
            reader.read_into(f"rng.{rank}.{name}", now)
            state[name] = now
    notes = []
    if absent:
        seed = seed_all("tutti.checkpoint", index.step, rank)
        notes = [
            f"rank {rank}: no saved state of the random generators {', '.join(absent)}: "
            f"seeded with {seed}"
        ]
    set_rng_state(state)
    return notes


def _window(tensor: torch.Tensor, offsets: torch.Size, lengths: torch.Size) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _convertible(saved: torch.dtype, wanted: torch.dtype) -> bool:
    return saved == wanted or (saved.is_floating_point and wanted.is_floating_point)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(_bare, names[:_NAMED])) + more


def _bare(name: str) -> str:
    return name.removeprefix("model.")
