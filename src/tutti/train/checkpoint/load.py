"""Loading: verify the newest checkpoint on all ranks, compare it with the model, read local shards.

A checkpoint saved by any number of ranks in any layout loads into any other layout: each rank reads
the parts of the saved shards that intersect its own shards. No rank reads or holds the whole model.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutti import comm
from tutti.train.checkpoint.format import (
    Box,
    Damaged,
    Index,
    check_tensor_files,
    open_tensors,
    read_index,
    saved_steps,
    step_name,
)
from tutti.train.checkpoint.training_state import (
    empty_optimizer_slots,
    fill_copies,
    local_shard,
    model_tensors,
    optimizer_mismatch,
    restore_optimizer,
    rng_state,
    seed_all,
    set_rng_state,
)
from tutti.world.errors import UsageError

_MAX_NAMES = 3  # tensors, or problems, that a message names
# After reading this many bytes the files are closed, which releases their mapped pages.
_MAX_MAPPED_BYTES = 256 << 20


@dataclass(frozen=True)
class Loaded:
    """A loaded checkpoint: its step, its state, and notes for the user."""

    step: int
    path: Path
    ranks: int
    state: dict[str, Any]
    notes: tuple[str, ...]


def this_rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def print_once(text: str) -> None:
    """Print a line on standard error, on rank 0 only."""
    if this_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def load_checkpoint(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int | None,
    rng: bool,
    aliases: Mapping[str, str],
) -> Loaded:
    """Load a checkpoint in place: the implementation of `Checkpoints.load`. Collective."""
    path, index = _newest_complete(directory, step)
    targets = model_tensors(model, aliases)
    _refuse_mismatch(path, index, targets, optimizer)
    notes = []
    saved = index.tensors
    if converted := [name for name, each in targets.items() if saved[name].dtype != each.dtype]:
        dtypes = f"{saved[converted[0]].dtype} to {targets[converted[0]].dtype}"
        notes.append(f"{_names(converted)} converted from {dtypes}")
    slots: dict[str, torch.Tensor] = {}
    if optimizer is not None:
        slots = empty_optimizer_slots(model, optimizer, saved, aliases)
    reader = _Reader(path, index)
    for name, tensor in (targets | slots).items():
        reader.read_into(name, tensor)
    fill_copies(model, aliases)
    if optimizer is not None and index.optimizer is not None:
        restore_optimizer(model, optimizer, index.optimizer, slots, aliases)
    if rng:
        notes += _restore_rng(reader, index)
    return Loaded(index.step, path, index.ranks, index.state, tuple(notes))


def verify(path: Path, rank: int, ranks: int) -> Index | str:
    """Verify the index and this rank's share of the files; returns the index, or the problem."""
    try:
        index = read_index(path)
        largest_first = sorted(index.files, key=lambda file: (-index.files[file].bytes, file))
        check_tensor_files(path, index, largest_first[rank::ranks])
        return index
    except (Damaged, OSError) as error:
        return str(error)


def _newest_complete(directory: Path, step: int | None) -> tuple[Path, Index]:
    steps = comm.gather_json(saved_steps(directory))[0]
    if (step is not None and step not in steps) or not steps:
        which = "no checkpoint" if step is None else f"no {step_name(step)}"
        existing = f" (there is {', '.join(map(step_name, steps))})" if steps else ""
        raise UsageError(f"{which} in {directory}{existing}: start without resuming")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    reason = ""
    for candidate in reversed(steps) if step is None else [step]:
        path = directory / step_name(candidate)
        index = verify(path, this_rank(), ranks)
        problems = [p for p in comm.gather_json(index if isinstance(index, str) else None) if p]
        if not problems and isinstance(index, Index):
            return path, index
        reason = f"{path.name} is damaged: {problems[0]}"
        if step is None:
            print_once(f"checkpoint {reason}; trying the previous one")
    raise UsageError(f"no complete checkpoint in {directory}: {reason}")


def _refuse_mismatch(
    path: Path,
    index: Index,
    targets: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Raise UsageError on all ranks if the checkpoint is of another model or optimizer."""
    saved = index.tensors
    missing = [name for name in targets if name not in saved]
    problems = [f"it does not have {_names(missing)}"] if missing else []
    different = []
    for name, tensor in targets.items():
        dtype, shape, _ = saved.get(name, (tensor.dtype, tensor.shape, ()))
        convertible = dtype.is_floating_point and tensor.dtype.is_floating_point
        if shape != tuple(tensor.shape):
            different.append(
                f"its {_names([name])} has shape {shape}, this model's {tuple(tensor.shape)}"
            )
        elif dtype != tensor.dtype and not convertible:
            different.append(f"its {_names([name])} is {dtype}, this model's {tensor.dtype}")
    problems += different[:1]
    if optimizer is not None and (problem := optimizer_mismatch(optimizer, index.optimizer)):
        problems.append(problem)
    gathered = comm.gather_json([[*targets], problems])
    expected = {name for names, _ in gathered for name in names}
    extra = [name for name in saved if name.startswith("model.") and name not in expected]
    problems = [problem for _, each in gathered for problem in each]
    if extra:
        problems.append(f"it has {_names(extra)}, which this model does not")
    if problems:
        raise UsageError(
            f"{path.name} in {path.parent} is of another model: "
            f"{'; '.join([*dict.fromkeys(problems)][:_MAX_NAMES])}: use the recipe that it was "
            "trained with, or another directory"
        )


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(name.removeprefix("model.") for name in names[:_MAX_NAMES]) + more


class _Reader:
    """Copies parts of tensors from a verified checkpoint."""

    def __init__(self, path: Path, index: Index) -> None:
        self._path, self._index = path, index
        self._files: dict[str, Any] = {}
        self._mapped_bytes = 0

    @torch.no_grad()
    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Fill a tensor, or this rank's shard of it, from the chunks that intersect it."""
        local, box = local_shard(tensor)
        for chunk in self._index.tensors[name].chunks if local.numel() else ():
            spans = [
                (max(a, b), min(a + m, b + n)) for a, m, b, n in zip(*chunk.box, *box, strict=True)
            ]
            if all(start < end for start, end in spans):
                source = self._file(chunk.file).get_slice(chunk.key)[_slices(spans, chunk.box)]
                local[_slices(spans, box)].copy_(source)
                self._mapped_bytes += source.nbytes

    def _file(self, name: str) -> Any:
        if self._mapped_bytes > _MAX_MAPPED_BYTES:
            self._files, self._mapped_bytes = {}, 0
        if name not in self._files:
            self._files[name] = open_tensors(self._path / name)
        return self._files[name]


def _slices(spans: list[tuple[int, int]], box: Box) -> tuple[slice, ...]:
    """Return spans of the full tensor as slices of one of its boxes."""
    pairs = zip(spans, box.offsets, strict=True)
    return tuple(slice(start - offset, end - offset) for (start, end), offset in pairs)


def _restore_rng(reader: _Reader, index: Index) -> list[str]:
    """Restore this rank's random number generators; seed generators without a saved state."""
    rank = this_rank()
    state, absent = {}, []
    for name, current in rng_state().items():
        saved = index.tensors.get(f"rng.{rank}.{name}")
        if saved is None or (saved.dtype, saved.shape) != (current.dtype, tuple(current.shape)):
            absent.append(name)
        else:
            reader.read_into(f"rng.{rank}.{name}", current)
            state[name] = current
    notes = []
    if absent:
        seed = seed_all("tutti.checkpoint", index.step, rank)
        notes = [
            f"rank {rank}: no saved state of the random number generators {', '.join(absent)}: "
            f"seeded with {seed}"
        ]
    set_rng_state(state)
    return notes
