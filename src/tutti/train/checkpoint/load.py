"""Loads checkpoints: verifies the newest one, compares it with the model, reads this rank's shards.

A checkpoint saved by any number of ranks in any layout loads into any other layout: each rank reads
the parts of the saved shards that intersect its own shards. No rank reads or holds the whole model.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tutti import comm
from tutti.parallel.materialize import FileChunk, read_shards
from tutti.parallel.mesh import local_shard
from tutti.train.checkpoint import format as checkpoint_format
from tutti.train.checkpoint.format import DTYPES, Damaged, Index, SavedTensor, box_of, step_name
from tutti.train.checkpoint.training_state import (
    TrainingState,
    rng_state,
    seed_all,
    set_rng_state,
)
from tutti.world.errors import UsageError

_MAX_NAMES = 3  # maximum number of tensors, or of problems, in a message


@dataclass(frozen=True)
class Loaded:
    """A loaded checkpoint: its step, its state, and notes for the user."""

    step: int
    path: Path
    ranks: int
    state: dict[str, Any]
    notes: tuple[str, ...]


def this_rank() -> int:
    """Return the rank of this process, or 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def print_on_rank_0(text: str) -> None:
    if this_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def load_checkpoint(
    directory: Path, state: TrainingState, step: int | None, rng: bool, use_ema: bool | None
) -> Loaded:
    """Load a checkpoint in place. This function implements `Checkpoints.load`."""
    path, index = _newest_complete(directory, step)
    # In a pipeline V-schedule, a rank with tied parameters has two tensors with the same name.
    # Therefore `tensors_to_read` is a list of pairs.
    saved, tensors_to_read = index["tensors"], state.model_tensors()
    targets = dict(tensors_to_read)
    _refuse_mismatch(path, index, targets, state.optimizer)
    notes = []
    if converted := [n for n, value in targets.items() if DTYPES[saved[n]["dtype"]] != value.dtype]:
        old, new = DTYPES[saved[converted[0]]["dtype"]], targets[converted[0]].dtype
        notes.append(f"converted {_join_names(converted)} from {old} to {new}")
    slots = state.empty_slots(saved)
    if use_ema is not False:
        tensors_to_read, note = _averages(path, saved, tensors_to_read, required=bool(use_ema))
        notes += note
    _read_tensors(path, index, tensors_to_read)
    averages = state.ema_tensors()
    _read_tensors(path, index, [(name, value) for name, value, _ in averages if name in saved])
    missing = [(average, weight) for name, average, weight in averages if name not in saved]
    for average, weight in missing:
        local_shard(average).copy_(local_shard(weight))
    if missing:
        notes.append("the checkpoint has no moving average: --ema starts from the loaded weights")
    for tensors in slots.values():
        _read_tensors(path, index, tensors.items())
    state.restore_optimizer(index["optimizer"], slots)
    if rng:
        notes += _restore_rng(path, index)
    return Loaded(index["step"], path, index["ranks"], index["state"], tuple(notes))


def _averages(
    path: Path,
    saved: Mapping[str, SavedTensor],
    tensors: Sequence[tuple[str, torch.Tensor]],
    required: bool,
) -> tuple[list[tuple[str, torch.Tensor]], list[str]]:
    """Replace the names of parameters by the names of their moving averages, and return a note."""
    if not any(name.startswith("ema.") for name in saved):
        if required:
            raise UsageError(f"{path} has no moving average: the run was trained without --ema")
        return [*tensors], []
    names = [(f"ema.{name.removeprefix('model.')}", name) for name, _ in tensors]
    chosen = [average if average in saved else name for average, name in names]
    values = [value for _, value in tensors]
    return [*zip(chosen, values, strict=True)], ["weights: the moving average of --ema"]


def _newest_complete(directory: Path, step: int | None) -> tuple[Path, Index]:
    steps, *other_ranks = comm.gather_json(checkpoint_format.saved_steps(directory))
    if not steps or step not in (None, *steps):
        missing = "no checkpoint" if step is None else f"no {step_name(step)}"
        existing = f" (it has {', '.join(map(step_name, steps))})" if steps else ""
        raise UsageError(f"there is {missing} in {directory}{existing}. Start without resuming.")
    reason = ""
    for candidate in reversed(steps) if step is None else [step]:
        path = directory / step_name(candidate)
        index = verify(path, this_rank(), 1 + len(other_ranks))
        problems = [p for p in comm.gather_json(index if isinstance(index, str) else None) if p]
        if not problems and not isinstance(index, str):
            return path, index
        reason = f"{path.name} is damaged: {problems[0]}"
        if step is None:
            print_on_rank_0(f"checkpoint {reason}; trying the previous checkpoint")
    raise UsageError(f"there is no complete checkpoint in {directory}. {reason}")


def verify(path: Path, rank: int, ranks: int) -> Index | str:
    """Verify the index and this rank's share of the files. Return the index or the problem."""
    try:
        index = checkpoint_format.read_index(path)
        largest_first = sorted(index["files"], key=lambda name: -index["files"][name]["bytes"])
        checkpoint_format.check_tensor_files(path, index, largest_first[rank::ranks])
        return index
    except (Damaged, OSError) as error:
        return str(error)


def _refuse_mismatch(
    path: Path,
    index: Index,
    targets: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Raise UsageError on all ranks if the checkpoint belongs to another model or optimizer."""
    saved, options = index["tensors"], index["optimizer"]
    missing = [name for name in targets if name not in saved]
    problems = [f"the checkpoint has no {_join_names(missing)}"] if missing else []
    for name, tensor in targets.items():
        if name in missing:
            continue
        dtype, shape = DTYPES[saved[name]["dtype"]], tuple(saved[name]["shape"])
        convertible = dtype.is_floating_point and tensor.dtype.is_floating_point
        if shape != tuple(tensor.shape) or (dtype != tensor.dtype and not convertible):
            problems.append(
                f"{_join_names([name])} is {dtype} {shape} in the checkpoint, but "
                f"{tensor.dtype} {tuple(tensor.shape)} in the model"
            )
    if optimizer is not None:
        current = f"{type(optimizer).__name__} with {len(optimizer.param_groups)} parameter groups"
        before = "no optimizer"
        if options is not None:
            before = f"{options['kind']} with {len(options['groups'])} parameter groups"
        if before != current:
            problems.append(f"the checkpoint has {before}, but the run has {current}")
    gathered = comm.gather_json([[*targets], problems[:_MAX_NAMES]])
    expected = {name for names, _ in gathered for name in names}
    extra = [name for name in saved if name.startswith("model.") and name not in expected]
    problems = [problem for _, rank_problems in gathered for problem in rank_problems]
    if extra:
        problems.append(f"the checkpoint has {_join_names(extra)}, but the model does not")
    if problems:
        raise UsageError(
            f"{path} does not fit this model or optimizer: "
            f"{'; '.join([*dict.fromkeys(problems)][:_MAX_NAMES])}. Use the recipe of the saved "
            "run, or another directory."
        )


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(name.removeprefix("model.") for name in names[:_MAX_NAMES]) + more


def _read_tensors(path: Path, index: Index, targets: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill tensors, or this rank's shards of them, from the saved chunks that intersect them."""
    saved = index["tensors"]
    chunks = ((tensor, chunks_of(path, saved[name])) for name, tensor in targets)
    read_shards(chunks, checkpoint_format.open_tensors)


def chunks_of(path: Path, saved: SavedTensor) -> list[FileChunk]:
    """Return the chunks of a tensor of the checkpoint in the directory `path`."""
    chunks = saved["chunks"]
    return [FileChunk(path / chunk["file"], chunk["key"], box_of(chunk)) for chunk in chunks]


def _restore_rng(path: Path, index: Index) -> list[str]:
    """Restore this rank's random number generators. Seed generators without a saved state."""
    rank, tensors = this_rank(), index["tensors"]
    current = {f"rng.{rank}.{name}": value for name, value in rng_state().items()}
    state = {
        name: value
        for name, value in current.items()
        if name in tensors
        and (DTYPES[tensors[name]["dtype"]], tensors[name]["shape"])
        == (value.dtype, [*value.shape])
    }
    _read_tensors(path, index, state.items())
    notes = []
    if absent := [name.rpartition(".")[2] for name in current if name not in state]:
        seed = seed_all("tutti.checkpoint", index["step"], rank)
        notes = [
            f"rank {rank}: the random number generators {', '.join(absent)} have no saved state; "
            f"they were seeded with {seed}"
        ]
    set_rng_state({name.rpartition(".")[2]: value for name, value in state.items()})
    return notes
