"""Writing a checkpoint behind the training's back: a snapshot first, then a thread.

The snapshot is a copy in host memory, laid out as the file will be. The thread of each rank
writes its file into a directory that ends in `.tmp` and leaves a note that it is done. Rank 0's
thread waits for the notes, adds the index, and renames the directory: a checkpoint is whole or
it is not there. Threads talk through the file system alone; a collective in a thread would mix
with those of the training. A rank that fails removes the directory, which the others notice.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tutti.train.checkpoint_directory import discard, retire, set_aside, step_name, writer
from tutti.train.checkpoint_index import (
    INDEX,
    SUMS,
    Chunk,
    Index,
    SavedTensor,
    file_of,
    index_text,
    sums_text,
)
from tutti.train.checkpoint_plan import Piece, local_part
from tutti.train.durable_file import Written, sync_directory, write_new
from tutti.train.tensor_file import DTYPES, Entry, arrange, write_tensor_file
from tutti.train.training_state import OptimizerOptions

ANOTHER_GAVE_UP = "another rank gave up"

_LOOK_SECONDS = 0.02


class SaveError(Exception):
    """A checkpoint could not be written; the message says why."""


@dataclass(frozen=True)
class Snapshot:
    """Tensors as they were, in host memory, laid out as their file will be."""

    entries: dict[str, Entry]
    data: torch.Tensor
    # Set on CUDA: the copies are under way on the stream, this says when they have arrived.
    ready: torch.cuda.Event | None


class Staging:
    """The host memory for snapshots, kept from one to the next; page-locked beside a GPU."""

    def __init__(self) -> None:
        self._data = torch.empty(0, dtype=torch.uint8)

    def snapshot(self, pieces: Sequence[Piece], tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        """Copy what these pieces name. On CUDA the copies run on the current stream, before
        whatever the training puts there next; nobody waits for them here."""
        entries = arrange({piece.key: (piece.dtype, piece.box.sizes) for piece in pieces})
        locals_ = {piece.key: local_part(tensors[piece.name])[0] for piece in pieces}
        cuda = any(local.is_cuda for local in locals_.values())
        size = max((entry.end for entry in entries.values()), default=0)
        if len(self._data) < size or (cuda and not self._data.is_pinned()):
            self._data = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._data = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
        for key, entry in entries.items():
            place = self._data[entry.begin : entry.end].view(entry.dtype).view(entry.shape)
            place.copy_(locals_[key], non_blocking=True)
        ready = None
        if cuda:
            ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            ready.record()
        return Snapshot(entries, self._data, ready)


@dataclass(frozen=True)
class Save:
    """One save, as a rank's thread needs to know it."""

    directory: Path
    folder: Path
    step: int
    rank: int
    keep: int | None
    timeout: float
    token: str
    # dtype and shape of every tensor; every rank's pieces.
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    shares: Sequence[Sequence[Piece]]
    optimizer: OptimizerOptions | None
    state: dict[str, Any]
    versions: Mapping[str, str]

    def run(self, snapshot: Snapshot, stop: threading.Event) -> None:
        """Write this rank's part and, on rank 0, everything that makes it a checkpoint."""
        try:
            self._write(snapshot)
            if self.rank == 0:
                self._complete(self._notes(stop))
        except Exception as error:
            gone = isinstance(error, OSError) and not self.folder.is_dir()
            discard(self.folder)
            reason = str(error) or type(error).__name__
            raise SaveError(ANOTHER_GAVE_UP if gone else reason) from error

    def _write(self, snapshot: Snapshot) -> None:
        if snapshot.ready is not None:
            snapshot.ready.synchronize()
        path = self.folder / file_of(self.rank)
        written = write_tensor_file(path, snapshot.entries, snapshot.data)
        values = self.optimizer.values if self.optimizer else {}
        note = json.dumps({**asdict(written), "values": values}).encode()
        # Under another name first: rank 0 must never read half a note.
        write_new(self._note(self.rank).with_suffix(".part"), [note])
        sync_directory(self.folder)
        os.rename(self._note(self.rank).with_suffix(".part"), self._note(self.rank))

    def _note(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.done.json"

    def _notes(self, stop: threading.Event) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self.timeout
        missing = list(range(len(self.shares)))
        while True:
            names = set(os.listdir(self.folder))  # fails when another rank has given up
            missing = [rank for rank in missing if self._note(rank).name not in names]
            if not missing:
                return [json.loads(self._note(r).read_bytes()) for r in range(len(self.shares))]
            if stop.is_set():
                raise SaveError("the program ended before all ranks had written")
            if time.monotonic() > deadline:
                few = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
                raise SaveError(
                    f"rank {few} had not written its part after {self.timeout:.0f} s: is "
                    f"{self.directory} the same directory on all nodes?"
                )
            time.sleep(_LOOK_SECONDS)

    def _complete(self, notes: Sequence[dict[str, Any]]) -> None:
        files = {
            file_of(rank): Written(note["bytes"], note["sha256"]) for rank, note in enumerate(notes)
        }
        text = index_text(self._index(files, notes), self.versions)
        written = {INDEX: write_new(self.folder / INDEX, [text])}
        write_new(self.folder / SUMS, [sums_text(files | written)])
        for rank in range(len(notes)):
            self._note(rank).unlink()
        sync_directory(self.folder)
        if writer(self.directory) != self.token:
            raise SaveError(f"another run has begun to write to {self.directory}")
        final = self.directory / step_name(self.step)
        if final.exists():
            set_aside(final)
        os.rename(self.folder, final)
        sync_directory(self.directory)
        with contextlib.suppress(OSError):  # the checkpoint is safe; this can wait for the next
            retire(self.directory, self.step, self.keep)

    def _index(self, files: dict[str, Written], notes: Sequence[dict[str, Any]]) -> Index:
        chunks: dict[str, list[Chunk]] = {name: [] for name in self.tensors}
        for rank, share in enumerate(self.shares):
            for piece in share:
                chunks[piece.name].append(Chunk(piece.box, file_of(rank), piece.key))
        optimizer = None
        if self.optimizer is not None:
            values = {name: slots for note in notes for name, slots in note["values"].items()}
            optimizer = OptimizerOptions(self.optimizer.kind, self.optimizer.groups, values)
        return Index(
            step=self.step,
            ranks=len(self.shares),
            tensors={
                name: SavedTensor(DTYPES[dtype], shape, tuple(chunks[name]))
                for name, (dtype, shape) in self.tensors.items()
            },
            files=files,
            optimizer=optimizer,
            state=self.state,
        )
