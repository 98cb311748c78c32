"""Saving: which rank writes which shard, the snapshot, and the background thread that writes it.

Every rank describes the shards that it holds; all ranks derive the same assignment of shards to
writers from these descriptions, so every shard is written once. A snapshot in host memory takes
milliseconds; a thread on each rank then writes its tensor file into a folder whose name ends in
`.tmp`, and a note when the file is on the disk. Rank 0's thread waits for all notes, adds the
index and renames the folder. The rename is atomic: a checkpoint is complete or does not exist, and
a rank that is killed during a save leaves the previous checkpoint as it was.

The threads communicate through the file system only: a collective in a thread would interleave
with those of the training. A rank that fails removes the folder, which the other ranks notice.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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
    cover_problem,
    discard,
    is_writer,
    prune,
    record_of,
    step_name,
    supersede,
    sync_path,
    tensor_file_name,
    write_index,
)
from tutti.train.checkpoint.training_state import local_shard
from tutti.world.errors import RanksDiffer, UsageError

OTHER_RANK_FAILED = "another rank failed"

_POLL_SECONDS = 0.02


def describe_shards(
    tensors: Mapping[str, torch.Tensor], buffers: frozenset[str]
) -> dict[str, dict[str, Any]]:
    """Describe this rank's shards as JSON. A shard without elements has no box.

    buffers: tensors whose values may differ between ranks (statistics of a batch norm): the first
    rank's values are saved, as DDP broadcasts the first rank's.
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

    ranks: the `describe_shards` of every rank. Returns the tensors of the index.
    """
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    buffers: set[str] = set()
    for rank, described in enumerate(ranks):
        for name, each in described.items():
            dtype, shape = DTYPES[each["dtype"]], tuple(each["shape"])
            first = tensors.setdefault(name, (dtype, shape))
            if first != (dtype, shape):
                raise RanksDiffer(
                    f"{name} is {dtype} {shape} on rank {rank}, {first[0]} {first[1]} on others"
                )
            if each["buffer"]:
                buffers.add(name)
            if each["box"] is not None:
                offsets, sizes = map(tuple, each["box"])
                holders.setdefault((name, Box(offsets, sizes)), []).append(rank)
    # Largest shard first, each to its holder with the fewest bytes so far.
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    assigned_bytes = [0] * len(ranks)
    sizes_of = {(n, box): box.elements * tensors[n][0].itemsize for n, box in holders}
    for name, box in sorted(holders, key=lambda each: (-sizes_of[each], each[0], each[1].offsets)):
        candidates = holders[name, box][:1] if name in buffers else holders[name, box]
        writer = min(candidates, key=lambda rank: (assigned_bytes[rank], rank))
        assigned_bytes[writer] += sizes_of[name, box]
        key = _key(name, tensors[name][1], box)
        chunks[name].append(Chunk(box, tensor_file_name(writer), key))
    for name, (_, shape) in tensors.items():
        if problem := cover_problem(shape, [chunk.box for chunk in chunks[name]]):
            raise RanksDiffer(f"the ranks' shards of {name} do not form one tensor: {problem}")
    return {name: SavedTensor(*kind, tuple(chunks[name])) for name, kind in tensors.items()}


def _key(name: str, shape: tuple[int, ...], box: Box) -> str:
    """Return a shard's name in its file: the tensor's, with slices unless it is the whole."""
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
        """Copy the shards. On CUDA the copies are queued on the current stream, ahead of whatever
        the training queues next; this function does not wait for them."""
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
        """Wait until the copies have arrived."""
        if self._copied is not None:
            self._copied.synchronize()


class SaveError(Exception):
    """A checkpoint could not be written; the message says why."""


@dataclass(frozen=True)
class Save:
    """One save, as the thread of a rank runs it."""

    directory: Path
    folder: Path
    step: int
    rank: int
    keep: int | None
    timeout: float
    token: str
    ranks: int
    tensors: dict[str, SavedTensor]
    optimizer: OptimizerOptions | None
    state: dict[str, Any]

    def run(self, snapshot: Snapshot, stop: threading.Event) -> None:
        """Write this rank's tensor file and, on rank 0, complete the checkpoint."""
        try:
            self._write_tensors(snapshot)
            if self.rank == 0:
                self._complete(self._wait_for_notes(stop))
        except Exception as error:
            removed_by_other = not self.folder.is_dir()
            discard(self.folder)
            reason = str(error) or type(error).__name__
            raise SaveError(OTHER_RANK_FAILED if removed_by_other else reason) from error

    def _write_tensors(self, snapshot: Snapshot) -> None:
        snapshot.wait()
        path = self.folder / tensor_file_name(self.rank)
        save_file(snapshot.tensors, path)
        record = record_of(path)
        sync_path(path)
        sync_path(self.folder)
        values = self.optimizer.values if self.optimizer else {}
        # The note must not be visible before the tensor file is on the disk.
        write_atomically(self._note(self.rank), json.dumps({**asdict(record), "values": values}))

    def _note(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.done.json"

    def _wait_for_notes(self, stop: threading.Event) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self.timeout
        missing = list(range(self.ranks))
        while True:
            names = set(os.listdir(self.folder))  # raises if another rank has removed the folder
            missing = [rank for rank in missing if self._note(rank).name not in names]
            if not missing:
                return [json.loads(self._note(rank).read_bytes()) for rank in range(self.ranks)]
            if stop.is_set():
                raise SaveError("the program ended before all ranks had written")
            if time.monotonic() > deadline:
                few = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
                raise SaveError(
                    f"rank {few} had not written its file after {self.timeout:.0f} s: is "
                    f"{self.directory} the same directory on all nodes?"
                )
            time.sleep(_POLL_SECONDS)

    def _complete(self, notes: Sequence[dict[str, Any]]) -> None:
        files = {
            tensor_file_name(rank): FileRecord(note["bytes"], note["sha256"])
            for rank, note in enumerate(notes)
        }
        optimizer = None
        if self.optimizer is not None:
            values = {name: slots for note in notes for name, slots in note["values"].items()}
            optimizer = replace(self.optimizer, values=values)
        index = Index(self.step, self.ranks, self.tensors, files, optimizer, self.state)
        write_index(self.folder, index, versions())
        for rank in range(len(notes)):
            self._note(rank).unlink()
        sync_path(self.folder)
        if not is_writer(self.directory, self.token):
            raise SaveError(f"another run has begun to write to {self.directory}")
        final = self.directory / step_name(self.step)
        if final.exists():
            supersede(final)
        os.rename(self.folder, final)
        sync_path(self.directory)
        with contextlib.suppress(OSError):  # the checkpoint is complete; the next save prunes again
            prune(self.directory, self.step, self.keep)
