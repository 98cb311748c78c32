"""Checkpoints: asynchronous, crash-safe saving; verified loading in any layout and rank count."""

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from tutti import comm
from tutti.train.checkpoint.format import (
    SavedTensor,
    claim_directory,
    new_folder,
    saved_steps,
    step_name,
)
from tutti.train.checkpoint.load import Loaded, load_checkpoint, print_once, this_rank
from tutti.train.checkpoint.save import (
    OTHER_RANK_FAILED,
    Save,
    Snapshot,
    assign_writers,
    describe_shards,
)
from tutti.train.checkpoint.training_state import (
    buffer_names,
    model_tensors,
    optimizer_state,
    rng_state,
)
from tutti.world.errors import RanksDiffer, UsageError

__all__ = ["Checkpoints", "Loaded"]


class Checkpoints:
    """The checkpoints of a run, in a directory that all ranks share.

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
    thread. A save that fails (on a full disk, for example) does not end the training: the next
    `save` or `wait` prints the reason and records it in `failed`; earlier checkpoints stay.

    keep: how many of the newest checkpoints to keep; None keeps all. timeout: how many seconds
    rank 0 waits for the files of the other ranks.
    """

    def __init__(
        self, directory: str | Path, *, keep: int | None = 3, timeout: float = 600.0
    ) -> None:
        if keep is not None and keep < 1:
            raise UsageError(f"keep={keep} would remove every checkpoint: use 1 or more, or None")
        self.directory = Path(directory).absolute()
        self.failed: dict[int, str] = {}
        self._keep = keep
        self._timeout = timeout
        self._token = os.urandom(8).hex()
        self._claimed = False
        self._snapshot = Snapshot()
        self._digests: list[str] = []
        self._tensors: dict[str, SavedTensor] = {}
        self._thread = ThreadPoolExecutor(1, "tutti-checkpoint")
        self._stop = threading.Event()
        # The step that is being saved.
        self._pending: tuple[int, Future[None]] | None = None

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, oldest first, as rank 0 sees them."""
        steps: list[int] = comm.gather_json(saved_steps(self.directory))[0]
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
        """Save the current state of the training; returns when a snapshot is taken.

        state: any JSON values to restore (samples seen, position in the data, scaler, …); rank
        0's are saved. The random number generators of every rank are saved, too.
        aliases: parameters of this rank that are copies of a parameter elsewhere, by the name of
        the original (a tied embedding on the last pipeline stage); saved once, under that name.
        """
        saved_state = json.loads(json.dumps(dict(state or {})))
        tensors = model_tensors(model, aliases or {})
        options = None
        if optimizer is not None:
            slots, options = optimizer_state(model, optimizer, aliases or {})
            tensors |= slots
        rank = this_rank()
        tensors |= {f"rng.{rank}.{name}": value for name, value in rng_state().items()}
        described = describe_shards(tensors, buffer_names(model))
        # The description travels only when it has changed; its digest always does.
        digest = hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()

        failure = self._wait_for_thread()
        folder, problem = self._new_folder(step)
        gathered = comm.gather_json([step, digest, folder, problem, failure])
        self._report([failure for *_, failure in gathered])
        if len({each[0] for each in gathered}) > 1:
            steps = ", ".join(str(each[0]) for each in gathered)
            raise RanksDiffer(f"ranks save different steps: {steps}")
        if gathered[0][3] is not None:
            self._fail(step, gathered[0][3])
            return
        digests = [each[1] for each in gathered]
        if digests != self._digests:
            self._tensors = assign_writers(comm.gather_json(described))
            self._digests = digests
        save = Save(
            directory=self.directory,
            folder=self.directory / gathered[0][2],
            step=step,
            rank=rank,
            keep=self._keep,
            timeout=self._timeout,
            token=self._token,
            ranks=len(gathered),
            tensors=self._tensors,
            optimizer=options,
            state=saved_state,
        )
        self._snapshot.take(rank, self._tensors, tensors)
        self._pending = step, self._thread.submit(save.run, self._snapshot, self._stop)

    def wait(self) -> None:
        """Wait until the last save has ended on all ranks; `failed` says whether it failed."""
        if self._pending is not None:
            self._report(comm.gather_json(self._wait_for_thread()))

    def close(self) -> None:
        """Close without the other ranks: a save that still waits for them is abandoned."""
        self._stop.set()
        self._thread.shutdown()

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int | None = None,
        rng: bool = True,
        aliases: Mapping[str, str] | None = None,
    ) -> Loaded:
        """Load the newest complete checkpoint, or the one of `step`, in place.

        A damaged checkpoint is reported on standard error and the previous one is used. A
        checkpoint of another model or optimizer is a UsageError, and nothing has changed then.
        rng: restore the random number generators, too; a rank without saved ones gets a fresh
        seed and a note.
        """
        return load_checkpoint(self.directory, model, optimizer, step, rng, aliases or {})

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()
        self.close()

    def _new_folder(self, step: int) -> tuple[str | None, str | None]:
        """On rank 0, create the folder of a save; returns its name, or why there is none."""
        if this_rank() != 0:
            return None, None
        try:
            if not self._claimed:
                claim_directory(self.directory, self._token)
                self._claimed = True
            return new_folder(self.directory, step, self._token).name, None
        except OSError as error:
            return None, str(error)

    def _wait_for_thread(self) -> str | None:
        """Wait until this rank has written; returns the reason if that failed."""
        error = self._pending[1].exception() if self._pending else None
        return None if error is None else str(error)

    def _report(self, failures: list[str | None]) -> None:
        reasons = [f"rank {rank}: {why}" for rank, why in enumerate(failures) if why is not None]
        causes = [reason for reason in reasons if not reason.endswith(OTHER_RANK_FAILED)]
        if reasons and self._pending is not None:
            self._fail(self._pending[0], (causes or reasons)[0])
        self._pending = None

    def _fail(self, step: int, reason: str) -> None:
        self.failed[step] = reason
        steps = saved_steps(self.directory)
        newest = f"{step_name(steps[-1])} is the newest" if steps else "there is none yet"
        print_once(f"checkpoint {step_name(step)} was not written: {reason}; {newest}")
