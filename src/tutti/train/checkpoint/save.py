"""Saves checkpoints: assigns shards to ranks, takes a snapshot, and writes it in a thread.

All ranks exchange descriptions of their shards and derive the same assignment of shards to writers,
so every shard is written once. A snapshot in host memory takes milliseconds; a thread on each rank
then writes the rank's tensor file into a temporary folder, and a note (a small JSON file) when the
file is on the disk. Rank 0's thread waits for all notes, adds the index and renames the folder. The
rename is atomic: a checkpoint is complete or does not exist.

The threads communicate through the file system only: a collective in a thread would interleave
with the collectives of the training. A rank whose save fails removes the folder; the other ranks
then find no folder, so their saves fail as well. The directory also contains:

    step-00000120.<hex>.tmp   a checkpoint that is being written or removed; never loaded
    step-00000120.superseded  a checkpoint of a later step than the run resumed from; never loaded
    .writer                   the token of the run that writes to this directory
"""

import contextlib
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tutti import comm
from tutti.machine.environment import versions
from tutti.measure.files import write_atomically
from tutti.parallel.mesh import Box, local_shard, shard_and_box
from tutti.train.checkpoint.format import (
    DTYPE_NAMES,
    DTYPES,
    SCHEMA,
    Chunk,
    Index,
    SavedTensor,
    best_step,
    box_of,
    coverage_error,
    record_of,
    saved_steps,
    step_name,
    sync_path,
    tensor_file_name,
    write_index,
)
from tutti.train.checkpoint.load import Loaded, load_checkpoint, print_on_rank_0, this_rank
from tutti.train.checkpoint.training_state import (
    TrainingState,
    rng_state,
    unwrapped_name,
)
from tutti.world.errors import RanksDiffer, UsageError

_LEFTOVER = re.compile(r"step-[0-9]{8,}\.[0-9a-f]+\.tmp|\.\.writer\..+", re.ASCII)
_OTHER_RANK_FAILED = "another rank failed"
_POLL_SECONDS = 0.02


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

    keep: how many of the newest checkpoints to keep; None keeps all. The checkpoint with the best
    score is kept, too (see `save`). timeout: how many seconds rank 0 waits for the files of the
    other ranks.
    """

    def __init__(
        self, directory: str | Path, *, keep: int | None = 3, timeout: float = 600.0
    ) -> None:
        if keep is not None and keep < 1:
            raise UsageError(f"keep={keep} would remove every checkpoint: use 1 or more, or None")
        self.directory = Path(directory).absolute()
        self.failed: dict[int, str] = {}
        self._keep, self._timeout = keep, timeout
        self._token = os.urandom(8).hex()
        self._claimed = False
        # Copies of the shards that this rank writes, in host memory that the next save reuses.
        self._snapshot: dict[str, torch.Tensor] = {}
        self._shards: dict[str, Any] = {}  # descriptions of this rank's shards in the last save
        self._tensors: dict[str, SavedTensor] = {}
        self._thread = ThreadPoolExecutor(1, "tutti-checkpoint")
        self._stop = threading.Event()
        self._pending: tuple[int, Future[None]] | None = None  # the step that is being saved

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, oldest first, as found by rank 0."""
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
        ema: Mapping[nn.Parameter, torch.Tensor] | None = None,
        score: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the current state of the training. Return as soon as a snapshot is taken.

        state: any JSON values to restore (number of samples, position in the data, scaler, …); the
        values of rank 0 are saved. The random number generators of every rank are also saved.
        aliases: maps the name of each parameter that is a copy (a tied embedding on the last stage)
        to the name of the original. The parameter is saved once, under the original name. ema:
        maps each parameter to its moving average, which is sharded as the parameter is. score: a
        dictionary such as {"name": "loss", "value": 0.5, "larger_is_better": False}. The checkpoint
        with the best score is kept in addition to the newest checkpoints.
        """
        saved_state = json.loads(json.dumps(dict(state or {})))
        training_state = TrainingState(model, optimizer, aliases or {}, ema or {})
        slots, options = training_state.optimizer_tensors()
        rank = this_rank()
        generators = {f"rng.{rank}.{name}": value for name, value in rng_state().items()}
        averages = {name: average for name, average, _ in training_state.ema_tensors()}
        tensors = dict(training_state.model_tensors()) | averages | slots | generators
        buffers = {f"model.{unwrapped_name(model, name)}" for name, _ in model.named_buffers()}
        shards = describe_shards(tensors, buffers)

        failure = self._wait_for_thread()
        folder, problem = self._create_folder(step) if rank == 0 else (None, None)
        gathered = comm.gather_json([step, shards != self._shards, folder, problem, failure])
        steps, changed, folders, problems, failures = zip(*gathered, strict=True)
        self._report(failures)
        if len(set(steps)) > 1:
            raise RanksDiffer(f"ranks save different steps: {', '.join(map(str, steps))}")
        if problems[0] is not None:
            self._fail(step, problems[0])
            return
        if any(changed):
            self._tensors = assign_writers(comm.gather_json(shards))
            self._shards = shards
        index: Index = {
            "schema": SCHEMA,
            "step": step,
            "ranks": len(gathered),
            "versions": versions(),
            "state": saved_state,
            "score": None if score is None else dict(score),
            "optimizer": options,
            "files": {},
            "tensors": self._tensors,
        }
        copied = self._take_snapshot(rank, tensors)
        path = self.directory / folders[0]
        self._pending = step, self._thread.submit(self._write, path, rank, index, copied)

    def wait(self) -> None:
        """Wait until the last save has ended on all ranks. On failure, `failed` has the reason."""
        if self._pending is not None:
            self._report(comm.gather_json(self._wait_for_thread()))

    def close(self) -> None:
        """Stop this rank's thread. A save that still waits for other ranks is abandoned."""
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
        ema: Mapping[nn.Parameter, torch.Tensor] | None = None,
        use_ema: bool | None = False,
    ) -> Loaded:
        """Load the newest complete checkpoint, or the checkpoint of `step`, in place.

        A damaged checkpoint is reported on standard error, and the previous checkpoint is used. A
        checkpoint of another model or optimizer raises UsageError before anything is changed.
        rng: also restore the random number generators. Generators without a saved state get a new
        seed, which `Loaded.notes` reports. ema: the moving averages to restore. Without saved
        averages, they are copies of the loaded parameters. use_ema: whether to load the saved
        averages into the model's parameters. None loads them if the checkpoint has averages.
        """
        state = TrainingState(model, optimizer, aliases or {}, ema or {})
        return load_checkpoint(self.directory, state, step, rng, use_ema)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.wait()
        self.close()

    def _create_folder(self, step: int) -> tuple[str | None, str | None]:
        """On rank 0, create the folder of a save. Return (name, None) or (None, error).

        The first save makes this run the only writer of the directory. If an earlier run is still
        saving, its save fails, because this run has removed its folder or replaced its token in
        `.writer`.
        """
        try:
            if not self._claimed:
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                for name in filter(_LEFTOVER.fullmatch, os.listdir(self.directory)):
                    _remove(self.directory / name)
                write_atomically(self.directory / ".writer", self._token)
                self._claimed = True
            folder = self.directory / f"{step_name(step)}.{self._token}.tmp"
            _remove(folder)
            folder.mkdir(mode=0o700)
            return folder.name, None
        except OSError as error:
            return None, str(error)

    def _take_snapshot(
        self, rank: int, source: Mapping[str, torch.Tensor]
    ) -> torch.cuda.Event | None:
        """Copy the shards that this rank writes to host memory.

        On CUDA the memory is page-locked, and the copies are queued on the current stream before
        the next kernels of the training. Returns the event that follows the copies.
        """
        previous, self._snapshot = self._snapshot, {}
        copied: torch.cuda.Event | None = None
        for name, tensor in self._tensors.items():
            for chunk in tensor["chunks"]:
                if chunk["file"] != tensor_file_name(rank):
                    continue
                local = local_shard(source[name])
                host = previous.pop(chunk["key"], None)
                if host is None or (host.dtype, host.shape) != (local.dtype, local.shape):
                    host = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                self._snapshot[chunk["key"]] = host.copy_(local, non_blocking=True)
                if local.is_cuda and copied is None:
                    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        if copied is not None:
            copied.record()
        return copied

    def _wait_for_thread(self) -> str | None:
        """Wait until this rank's save has ended. Return why it failed, or None."""
        error = self._pending[1].exception() if self._pending else None
        return None if error is None else str(error)

    def _report(self, failures: Sequence[str | None]) -> None:
        reasons = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
        causes = [reason for reason in reasons if not reason.endswith(_OTHER_RANK_FAILED)]
        if reasons and self._pending is not None:
            self._fail(self._pending[0], (causes or reasons)[0])
        self._pending = None

    def _fail(self, step: int, reason: str) -> None:
        self.failed[step] = reason
        steps = saved_steps(self.directory)
        newest = "no earlier checkpoint exists"
        if steps:
            newest = f"{step_name(steps[-1])} is the newest checkpoint"
        print_on_rank_0(f"checkpoint {step_name(step)} was not written: {reason}; {newest}")

    # The methods below run in the background thread.

    def _write(self, folder: Path, rank: int, index: Index, copied: Any) -> None:
        """Write this rank's tensor file and, on rank 0, complete the checkpoint."""
        try:
            if copied is not None:
                copied.synchronize()
            self._write_tensors(folder, rank, index["optimizer"])
            if rank == 0:
                self._complete(folder, index)
        except Exception as error:
            removed_by_other = not folder.is_dir()
            _remove(folder)
            reason = str(error) or type(error).__name__
            raise OSError(_OTHER_RANK_FAILED if removed_by_other else reason) from error

    def _write_tensors(self, folder: Path, rank: int, optimizer: dict[str, Any] | None) -> None:
        path = folder / tensor_file_name(rank)
        save_file(self._snapshot, path)
        note = {"file": record_of(path), "values": optimizer["values"] if optimizer else {}}
        sync_path(path)
        sync_path(folder)
        # The note must not be visible before the tensor file is on the disk.
        write_atomically(_note(folder, rank), json.dumps(note))

    def _wait_for_notes(self, folder: Path, ranks: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self._timeout
        while True:
            names = set(os.listdir(folder))  # raises if another rank has removed the folder
            missing = [rank for rank in range(ranks) if _note(folder, rank).name not in names]
            if not missing:
                return [json.loads(_note(folder, rank).read_bytes()) for rank in range(ranks)]
            if self._stop.is_set():
                raise OSError("the program ended before all ranks had written")
            if time.monotonic() > deadline:
                few = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
                raise OSError(
                    f"these ranks had not written their files after {self._timeout:.0f} s: {few}. "
                    f"Is {self.directory} the same directory on all nodes?"
                )
            time.sleep(_POLL_SECONDS)

    def _complete(self, folder: Path, index: Index) -> None:
        for rank, note in enumerate(self._wait_for_notes(folder, index["ranks"])):
            index["files"][tensor_file_name(rank)] = note["file"]
            if index["optimizer"] is not None:
                index["optimizer"]["values"].update(note["values"])
            _note(folder, rank).unlink()
        write_index(folder, index)
        if (self.directory / ".writer").read_text() != self._token:
            raise OSError(f"another run has begun to write to {self.directory}")
        final = self.directory / step_name(index["step"])
        if final.exists():
            _supersede(final)
        os.rename(folder, final)
        sync_path(self.directory)
        with contextlib.suppress(OSError):  # the checkpoint is complete; the next save prunes again
            self._prune(index["step"])

    def _prune(self, step: int) -> None:
        """Remove old checkpoints after `step` was saved. Keep the newest `keep` and the best.

        If a checkpoint of a later step exists, it is damaged, or it was written before the run
        resumed from an earlier step. It is renamed, because the next start must not load it.
        """
        steps = saved_steps(self.directory)
        for later in (other for other in steps if other > step):
            _supersede(self.directory / step_name(later))
        _remove(self.directory / f"{step_name(step)}.superseded")
        earlier = [other for other in steps if other <= step]
        best = best_step(self.directory)
        for old in earlier[: -self._keep if self._keep else 0]:
            if old != best:
                _remove(self.directory / step_name(old))


def _note(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.done.json"


def _remove(path: Path) -> None:
    """Remove a file or folder. Errors while removing a folder are ignored."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    # The folder is renamed first: a partly removed folder must not have the name of a checkpoint.
    with contextlib.suppress(OSError):
        path = path.rename(path.with_name(f"{path.name.split('.')[0]}.{os.urandom(4).hex()}.tmp"))
    shutil.rmtree(path, ignore_errors=True)


def _supersede(path: Path) -> None:
    """Rename a checkpoint, so that it is never loaded but can be inspected."""
    superseded = path.with_name(f"{path.name}.superseded")
    _remove(superseded)
    os.rename(path, superseded)


def describe_shards(
    tensors: Mapping[str, torch.Tensor], buffers: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Describe this rank's shards as JSON. A shard without elements has no box.

    `buffers` may have different values on different ranks, such as the statistics of a batch norm.
    The values of the first rank are saved, because DDP also uses the buffers of the first rank.
    """
    shards = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided:
            kind = f"{tensor.dtype} ({tensor.layout})"
            raise UsageError(f"checkpoints cannot hold {name}: {kind} is not a dense tensor")
        local, box = shard_and_box(tensor)
        shards[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": [*tensor.shape],
            "box": box if local.numel() else None,
            "buffer": name in buffers,
        }
    return shards


def assign_writers(ranks: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, SavedTensor]:
    """Assign every shard to the file of one rank that holds it, with bytes balanced over ranks.

    ranks: the result of `describe_shards` on every rank. Returns the tensors of the index.
    """
    tensors: dict[str, SavedTensor] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, shards in enumerate(ranks):
        for name, shard in shards.items():
            tensor: SavedTensor = {"dtype": shard["dtype"], "shape": shard["shape"], "chunks": []}
            first = tensors.setdefault(name, tensor)
            if first != tensor:
                raise RanksDiffer(
                    f"{name} is {tensor['dtype']} {tensor['shape']} on rank {rank}, but "
                    f"{first['dtype']} {first['shape']} on others"
                )
            if shard["box"] is not None:
                box_holders = holders.setdefault((name, Box(*map(tuple, shard["box"]))), [])
                if not (shard["buffer"] and box_holders):  # only the first rank's buffers are saved
                    box_holders.append(rank)
    # The largest shards are assigned first. Among the ranks that hold a shard, the rank with the
    # fewest bytes so far writes it.
    assigned_bytes = [0] * len(ranks)
    for name, box in sorted(holders, key=lambda item: -math.prod(item[1].sizes)):
        tensor = tensors[name]
        writer = min(holders[name, box], key=lambda rank: assigned_bytes[rank])
        assigned_bytes[writer] += math.prod(box.sizes) * DTYPES[tensor["dtype"]].itemsize
        key = name
        if [*box.sizes] != tensor["shape"]:
            spans = zip(box.offsets, box.sizes, strict=True)
            key += f"[{','.join(f'{start}:{start + size}' for start, size in spans)}]"
        file = tensor_file_name(writer)
        tensor["chunks"].append(Chunk(offsets=box.offsets, sizes=box.sizes, file=file, key=key))
    for name, tensor in tensors.items():
        boxes = [box_of(chunk) for chunk in tensor["chunks"]]
        if problem := coverage_error(tuple(tensor["shape"]), boxes):
            raise RanksDiffer(f"the ranks' shards of {name} do not form one tensor: {problem}")
    return tensors
