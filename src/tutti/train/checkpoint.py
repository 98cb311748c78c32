"""Checkpoints: save while the training goes on, load what is whole, on any number of ranks."""

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from tutti.machine.environment import versions
from tutti.train.checkpoint_directory import (
    latest,
    new_folder,
    saved_steps,
    step_name,
    take_over,
)
from tutti.train.checkpoint_loading import Loaded, load
from tutti.train.checkpoint_plan import Holding, Piece, divide, holding
from tutti.train.checkpoint_writer import ANOTHER_GAVE_UP, Save, SaveError, Staging
from tutti.train.company import gather, rank, say
from tutti.train.rng import rng_state
from tutti.train.training_state import buffers, model_tensors, optimizer_state
from tutti.world.errors import RanksDiffer, UsageError

# How long rank 0 waits for the files of the others, in seconds.
TIMEOUT = 600.0


class Checkpoints:
    """The checkpoints of a run, in a directory that all ranks see.

        with tutti.init() as world, Checkpoints("run/checkpoints", keep=3) as checkpoints:
            step = 0
            if checkpoints.steps():
                loaded = checkpoints.load(model, optimizer)
                step, position = loaded.step, loaded.state["position"]
            while step < steps:
                ...
                step += 1
                if step % 100 == 0:
                    checkpoints.save(step, model, optimizer, {"position": position})

    `steps`, `save`, `load` and `wait` are collective: call them on every rank, in the main
    thread. A save that fails (a full disk, say) does not end the training: it is printed at the
    next `save` or `wait`, stands in `failed`, and the checkpoints before it stay as they were.

    keep: how many of the newest stay; None for all. timeout: how long rank 0 waits for the files
    of the others, in seconds.
    """

    def __init__(
        self, directory: str | Path, *, keep: int | None = 3, timeout: float = TIMEOUT
    ) -> None:
        if keep is not None and keep < 1:
            raise UsageError(f"keep={keep} would remove every checkpoint: use 1 or more, or None")
        self.directory = Path(directory).absolute()
        self.failed: dict[int, str] = {}
        self._keep = keep
        self._timeout = timeout
        self._token = os.urandom(8).hex()
        self._has_taken_over = False
        self._staging = Staging()
        self._digests: list[str] = []
        self._holdings: list[Holding] = []
        self._shares: list[list[Piece]] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._saving: int | None = None
        self._failure: str | None = None

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, oldest first, as rank 0 sees them."""
        steps: list[int] = gather(saved_steps(self.directory))[0]
        return steps

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        state: Mapping[str, Any] | None = None,
        *,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Save the training as it is now; returns once a snapshot is taken.

        state: whatever JSON can hold and the training wants back (samples seen, position in the
        data, scaler, …); rank 0's is kept. The random generators of every rank are saved, too.
        aliases: parameters of this rank that are copies of others', by the name of the original
        (a tied embedding at both ends of a pipeline): saved under that name, once.
        """
        kept_state = json.loads(json.dumps(dict(state or {})))
        tensors = model_tensors(model, aliases)
        options = None
        if optimizer is not None:
            slots, options = optimizer_state(model, optimizer, aliases)
            tensors |= slots
        tensors |= {f"rng.{rank()}.{name}": value for name, value in rng_state().items()}
        mine = holding(tensors, buffers(model))

        self._join()
        folder, problem = self._open_folder(step)
        told = gather([step, mine.digest, str(folder), problem, self._failure])
        self._report([failure for *_, failure in told])
        if len({one[0] for one in told}) > 1:
            raise RanksDiffer(f"ranks save different steps: {', '.join(str(o[0]) for o in told)}")
        if told[0][3] is not None:
            self._fail(step, told[0][3])
            return
        self._divide(mine, [one[1] for one in told])

        save = Save(
            directory=self.directory,
            folder=self.directory / Path(told[0][2]).name,
            step=step,
            rank=rank(),
            keep=self._keep,
            timeout=self._timeout,
            token=self._token,
            tensors={n: what for held in self._holdings for n, what in held.tensors.items()},
            shares=self._shares,
            optimizer=options,
            state=kept_state,
            versions=versions(),
        )
        snapshot = self._staging.snapshot(self._shares[rank()], tensors)

        def write() -> None:
            try:
                save.run(snapshot, self._stop)
            except SaveError as error:
                self._failure = str(error)

        self._saving = step
        self._thread = threading.Thread(target=write, name="tutti-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last save is complete on all ranks; `failed` says if it was not."""
        if self._saving is not None:
            self._join()
            self._report(gather(self._failure))

    def close(self) -> None:
        """End without the other ranks: a save that still waits for them is given up."""
        self._stop.set()
        self._join()

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int | None = None,
        rng: bool = True,
        aliases: Mapping[str, str] | None = None,
    ) -> Loaded:
        """Load the newest checkpoint that is whole, or that of `step`, in place.

        A damaged one is named on standard error, and the one before it is used. A checkpoint of
        another model or optimizer is a UsageError, and nothing has been touched then. rng: put
        the random generators back as well; ranks that had none get a fresh seed, and a note.
        """
        return load(self.directory, model, optimizer, step=step, rng=rng, aliases=aliases)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()
        self.close()

    def _open_folder(self, step: int) -> tuple[Path | None, str | None]:
        if rank() != 0:
            return None, None
        try:
            if not self._has_taken_over:
                take_over(self.directory, self._token)
                self._has_taken_over = True
            return new_folder(self.directory, step, self._token), None
        except OSError as error:
            return None, str(error)

    def _divide(self, mine: Holding, digests: list[str]) -> None:
        if digests != self._digests:
            self._holdings = [Holding.from_json(one) for one in gather(mine.to_json())]
            self._shares = divide(self._holdings)
            self._digests = digests

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _report(self, failures: list[str | None]) -> None:
        reasons = [f"rank {rank}: {why}" for rank, why in enumerate(failures) if why is not None]
        own = [reason for reason in reasons if not reason.endswith(ANOTHER_GAVE_UP)]
        if reasons and self._saving is not None:
            self._fail(self._saving, (own or reasons)[0])
        self._saving, self._failure = None, None

    def _fail(self, step: int, reason: str) -> None:
        self.failed[step] = reason
        newest = latest(self.directory)
        rest = f"{newest.name} is the newest" if newest else "there is none yet"
        say(f"checkpoint {step_name(step)} was not written: {reason}; {rest}")
