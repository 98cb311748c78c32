"""Loading a checkpoint on all ranks: the newest that is whole, into the model that it is of."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tutti.train.checkpoint_directory import saved_steps, step_name
from tutti.train.checkpoint_index import Index
from tutti.train.checkpoint_reader import (
    Reader,
    conversions,
    mismatch,
    restore_rng,
    unexpected,
    verify_share,
)
from tutti.train.company import gather, rank, ranks, say
from tutti.train.training_state import (
    fill_copies,
    model_tensors,
    optimizer_problem,
    optimizer_slots,
    restore_optimizer,
)
from tutti.world.errors import UsageError

_PROBLEMS = 3  # how many differences from a model a message tells


@dataclass(frozen=True)
class Loaded:
    """What was loaded: the step, the state saved with it, and what a person should know."""

    step: int
    path: Path
    ranks: int
    state: dict[str, Any]
    notes: tuple[str, ...]


def load(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    rng: bool = True,
    aliases: Mapping[str, str] | None = None,
) -> Loaded:
    """What `Checkpoints.load` does; it needs no more than the directory."""
    path, index = _newest_whole(directory, step)
    wanted = model_tensors(model, aliases)
    problems = mismatch(index.tensors, wanted)
    options = None
    if optimizer is not None:
        options = index.optimizer
        if options is None:
            problems.append("it was saved without an optimizer")
        elif problem := optimizer_problem(optimizer, options):
            problems.append(problem)
    names = {name for one in gather([*wanted]) for name in one}
    problems += unexpected((n for n in index.tensors if n.startswith("model.")), names)
    problems = [problem for one in gather(problems) for problem in one]
    if problems:
        raise UsageError(
            f"{path.name} in {directory} is of another model: "
            f"{'; '.join([*dict.fromkeys(problems)][:_PROBLEMS])}: give the recipe that it was "
            "trained with, or another directory"
        )
    notes = conversions(index.tensors, wanted)
    if optimizer is not None:
        saved = {n: t for n, t in index.tensors.items() if n.startswith("optimizer.")}
        kinds = {n: (t.dtype, t.shape) for n, t in saved.items()}
        slots = optimizer_slots(model, optimizer, kinds, aliases)
        wanted |= slots
    reader = Reader(path, index)
    for name, tensor in wanted.items():
        reader.read_into(name, tensor)
    fill_copies(model, aliases or {})
    if optimizer is not None and options is not None:
        restore_optimizer(model, optimizer, options, slots, aliases)
    if rng:
        notes += restore_rng(reader, index, rank())
    return Loaded(index.step, path, index.ranks, index.state, tuple(notes))


def _newest_whole(directory: Path, step: int | None) -> tuple[Path, Index]:
    steps = gather(saved_steps(directory))[0]
    if (step is not None and step not in steps) or not steps:
        which = "no checkpoint" if step is None else f"no {step_name(step)}"
        there = f" (there is {', '.join(map(step_name, steps))})" if steps else ""
        raise UsageError(f"{which} in {directory}{there}: start without resuming")
    reason = ""
    for candidate in reversed(steps) if step is None else [step]:
        path = directory / step_name(candidate)
        index = verify_share(path, rank(), ranks())
        verdicts = gather(index if isinstance(index, str) else None)
        bad = [verdict for verdict in verdicts if verdict is not None]
        if not bad and not isinstance(index, str):
            return path, index
        reason = f"{path.name} is damaged: {bad[0]}"
        say(f"checkpoint {reason}; {'trying the one before it' if step is None else 'stop'}")
    raise UsageError(f"no checkpoint in {directory} is whole: {reason}")
