"""Saving: which rank writes which shard, the snapshot, and the background thread that writes it.

Every rank describes the shards that it holds; all ranks derive the same assignment of shards to
writers from these descriptions, so every shard is written once. A snapshot in host memory takes
milliseconds; a thread on each rank then writes the rank's tensor file into a folder whose name ends
in `.tmp`. When the file is on the disk, the thread writes a note, a small JSON file. Rank 0's
thread waits for all notes, adds the index and renames the folder. The rename is atomic: a
checkpoint is complete or does not exist, and a rank that is killed during a save leaves the
previous checkpoint as it was.

The threads communicate through the file system only: a collective in a thread would interleave
with the collectives of the training. A rank whose save fails removes the folder; the other ranks
then find no folder, and their saves fail, too.
"""

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tutti import comm
from tutti.machine.environment import versions
from tutti.measure.files import write_atomically
from tutti.train.checkpoint.format import (
    DTYPE_NAMES,
    DTYPES,
    Box,
    Chunk,
    FileRecord,
    Index,
    OptimizerOptions,
    SavedTensor,
    claim_directory,
    cover_problem,
    discard,
    is_writer,
    prune,
    record_of,
    saved_steps,
    step_name,
    supersede,
    sync_path,
    tensor_file_name,
    write_index,
)
from tutti.train.checkpoint.load import Loaded, load_checkpoint, print_once, this_rank
from tutti.train.checkpoint.training_state import (
    local_shard,
    model_tensors,
    optimizer_state,
    rng_state,
    unwrapped_name,
)
from tutti.world.errors import RanksDiffer, UsageError

_OTHER_RANK_FAILED = "another rank failed"
_POLL_SECONDS = 0.02


def describe_shards(
    tensors: Mapping[str, torch.Tensor], buffers: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Describe this rank's shards as JSON. A shard without elements has no box.

    buffers: tensors whose values may differ between ranks (statistics of a batch norm): the first
    rank's values are saved, as DDP broadcasts the buffers of the first rank.
    """
    described = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided:
            kind = f"{tensor.dtype} ({tensor.layout})"
            raise UsageError(f"checkpoints cannot hold {name}: {kind} is not a dense tensor")
        local, box = local_shard(tensor)
        described[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": [*tensor.shape],
            "box": [[*box.offsets], [*box.sizes]] if local.numel() else None,
            "buffer": name in buffers,
        }
    return described


def assign_writers(ranks: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, SavedTensor]:
    """Assign every shard to the file of one rank that holds it, with bytes balanced over ranks.

    ranks: the result of `describe_shards` on every rank. Returns the tensors of the index.
    """
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, described in enumerate(ranks):
        for name, each in described.items():
            dtype, shape = DTYPES[each["dtype"]], tuple(each["shape"])
            first = tensors.setdefault(name, (dtype, shape))
            if first != (dtype, shape):
                raise RanksDiffer(
                    f"{name} is {dtype} {shape} on rank {rank}, {first[0]} {first[1]} on others"
                )
            if each["box"] is not None:
                box = Box(*map(tuple, each["box"]))
                others = holders.setdefault((name, box), [])
                if not (each["buffer"] and others):  # only the first rank's buffers are saved
                    others.append(rank)
    # Largest shards first. A shard is assigned to the rank with the fewest bytes that holds it.
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    assigned_bytes = [0] * len(ranks)
    sizes = {(name, box): box.elements * tensors[name][0].itemsize for name, box in holders}
    for name, box in sorted(holders, key=lambda each: (-sizes[each], each[0], each[1].offsets)):
        writer = min(holders[name, box], key=lambda rank: (assigned_bytes[rank], rank))
        assigned_bytes[writer] += sizes[name, box]
        key = _key(name, tensors[name][1], box)
        chunks[name].append(Chunk(box, tensor_file_name(writer), key))
    for name, (_, shape) in tensors.items():
        if problem := cover_problem(shape, [chunk.box for chunk in chunks[name]]):
            raise RanksDiffer(f"the ranks' shards of {name} do not form one tensor: {problem}")
    return {name: SavedTensor(*kind, tuple(chunks[name])) for name, kind in tensors.items()}


def _key(name: str, shape: tuple[int, ...], box: Box) -> str:
    """Return a shard's key in its file: the tensor's name, with slices if the shard is a part."""
    if box.sizes == shape:
        return name
    spans = zip(box.offsets, box.sizes, strict=True)
    return f"{name}[{','.join(f'{start}:{start + size}' for start, size in spans)}]"


class Snapshot:
    """Copies of the shards that this rank writes, in host memory that is reused by the next save.

    The memory is page-locked for CUDA tensors.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(
        self, rank: int, saved: Mapping[str, SavedTensor], source: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy the shards. On CUDA the copies are queued on the current stream, before the next
        kernels of the training; this function does not wait for the copies."""
        previous, self.tensors, self._copied = self.tensors, {}, None
        file = tensor_file_name(rank)
        for name, tensor in saved.items():
            for key in (chunk.key for chunk in tensor.chunks if chunk.file == file):
                local = local_shard(source[name])[0]
                host = previous.pop(key, None)
                if host is None or (host.dtype, host.shape) != (local.dtype, local.shape):
                    host = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                self.tensors[key] = host.copy_(local, non_blocking=True)
                if local.is_cuda and self._copied is None:
                    self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


class SaveError(Exception):
    """A checkpoint could not be written; the message says why."""


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
        self._keep, self._timeout = keep, timeout
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
    ) -> None:
        """Save the current state of the training; returns when a snapshot is taken.

        state: any JSON values to restore (number of samples, position in the data, scaler, …); the
        values of rank 0 are saved. The random number generators of every rank are saved, too.
        aliases: for parameters that are copies (a tied embedding on the last pipeline stage), the
        name of the copy → the name of the original, under which the parameter is saved once.
        """
        saved_state = json.loads(json.dumps(dict(state or {})))
        tensors = model_tensors(model, aliases or {})
        options = None
        if optimizer is not None:
            slots, options = optimizer_state(model, optimizer, aliases or {})
            tensors |= slots
        rank = this_rank()
        tensors |= {f"rng.{rank}.{name}": value for name, value in rng_state().items()}
        buffers = {f"model.{unwrapped_name(model, name)}" for name, _ in model.named_buffers()}
        described = describe_shards(tensors, buffers)
        # The description is exchanged only if it has changed, the digest in every save.
        digest = hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()

        failure = self._wait_for_thread()
        name, problem = self._new_folder(step)
        gathered = comm.gather_json([step, digest, name, problem, failure])
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
        index = Index(step, len(gathered), self._tensors, {}, options, saved_state)
        self._snapshot.take(rank, self._tensors, tensors)
        folder = self.directory / gathered[0][2]
        self._pending = step, self._thread.submit(self._write, folder, rank, index)

    def wait(self) -> None:
        """Wait until the last save has ended on all ranks; `failed` has the reason if it failed."""
        if self._pending is not None:
            self._report(comm.gather_json(self._wait_for_thread()))

    def close(self) -> None:
        """Stop the thread. Not collective: a save that still waits for other ranks is abandoned."""
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

        A damaged checkpoint is reported on standard error, and the previous checkpoint is used. A
        checkpoint of another model or optimizer raises UsageError before anything is changed.
        rng: also restore the random number generators. Generators without a saved state get a new
        seed, which `Loaded.notes` reports.
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
        """On rank 0, create the folder of a save; returns its name, or the error."""
        if this_rank() != 0:
            return None, None
        try:
            if not self._claimed:
                claim_directory(self.directory, self._token)
                self._claimed = True
            folder = self.directory / f"{step_name(step)}.{self._token}.tmp"
            discard(folder)
            folder.mkdir(mode=0o700)
            return folder.name, None
        except OSError as error:
            return None, str(error)

    def _wait_for_thread(self) -> str | None:
        """Wait until this rank's save has ended; returns why it failed, or None."""
        error = self._pending[1].exception() if self._pending else None
        return None if error is None else str(error)

    def _report(self, failures: list[str | None]) -> None:
        reasons = [f"rank {rank}: {why}" for rank, why in enumerate(failures) if why is not None]
        causes = [reason for reason in reasons if not reason.endswith(_OTHER_RANK_FAILED)]
        if reasons and self._pending is not None:
            self._fail(self._pending[0], (causes or reasons)[0])
        self._pending = None

    def _fail(self, step: int, reason: str) -> None:
        self.failed[step] = reason
        steps = saved_steps(self.directory)
        newest = f"{step_name(steps[-1])} is the newest" if steps else "there is none yet"
        print_once(f"checkpoint {step_name(step)} was not written: {reason}; {newest}")

    # The methods below run in the background thread.

    def _write(self, folder: Path, rank: int, index: Index) -> None:
        """Write this rank's tensor file and, on rank 0, complete the checkpoint."""
        try:
            self._write_tensors(folder, rank, index.optimizer)
            if rank == 0:
                self._complete(folder, index)
        except Exception as error:
            removed_by_other = not folder.is_dir()
            discard(folder)
            reason = str(error) or type(error).__name__
            raise SaveError(_OTHER_RANK_FAILED if removed_by_other else reason) from error

    def _write_tensors(self, folder: Path, rank: int, optimizer: OptimizerOptions | None) -> None:
        self._snapshot.wait()
        path = folder / tensor_file_name(rank)
        save_file(self._snapshot.tensors, path)
        note = {**record_of(path)._asdict(), "values": optimizer.values if optimizer else {}}
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
                raise SaveError("the program ended before all ranks had written")
            if time.monotonic() > deadline:
                few = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
                raise SaveError(
                    f"rank {few} had not written its file after {self._timeout:.0f} s: is "
                    f"{self.directory} the same directory on all nodes?"
                )
            time.sleep(_POLL_SECONDS)

    def _complete(self, folder: Path, index: Index) -> None:
        notes = self._wait_for_notes(folder, index.ranks)
        for rank, note in enumerate(notes):
            index.files[tensor_file_name(rank)] = FileRecord(note["bytes"], note["sha256"])
        if index.optimizer is not None:
            values = {name: slots for note in notes for name, slots in note["values"].items()}
            index = replace(index, optimizer=replace(index.optimizer, values=values))
        write_index(folder, index, versions())
        for rank in range(index.ranks):
            _note(folder, rank).unlink()
        sync_path(folder)
        if not is_writer(self.directory, self._token):
            raise SaveError(f"another run has begun to write to {self.directory}")
        final = self.directory / step_name(index.step)
        if final.exists():
            supersede(final)
        os.rename(folder, final)
        sync_path(self.directory)
        with contextlib.suppress(OSError):  # the checkpoint is complete; the next save prunes again
            prune(self.directory, index.step, self._keep)


def _note(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.done.json"
