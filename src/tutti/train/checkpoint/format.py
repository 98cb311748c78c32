"""Checkpoints on disk: directory names, files with checksums, and the index.

A run's checkpoint directory:

    step-00000120             a complete checkpoint
    step-00000120.<hex>.tmp   a checkpoint that is being written or removed; never loaded
    step-00000120.superseded  a later step than the one the run resumed from; never loaded
    .writer                   the token of the run that writes to this directory

A checkpoint:

    rank0.safetensors, …      shards of tensors, written with the safetensors library
    index.json                dtype, shape and shards of every tensor; file sizes; training state
    SHA256SUMS                checksums of all other files, as `sha256sum -c` reads them

Files may come from an untrusted source. File names are restricted to the names above, links and
pipes are refused, and the shards of a tensor must cover every element exactly once. So nothing
outside the directory is read, and no tensor is larger than the data in the files. Every problem
raises `Damaged`, whose message names the file.
"""

import errno
import hashlib
import io
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from tutti.measure.files import write_atomically

SCHEMA = "tutti.checkpoint/1"
INDEX = "index.json"
SUMS = "SHA256SUMS"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_STEP = re.compile(r"step-([0-9]{8,})", re.ASCII)
_LEFTOVER = re.compile(r"step-[0-9]{8,}\.[0-9a-f]+\.tmp|\.\.writer\..+", re.ASCII)
_TENSOR_FILE = re.compile(r"rank(0|[1-9][0-9]{0,8})\.safetensors", re.ASCII)
_SUM_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9.]+)", re.ASCII)
_WRITER = ".writer"
_MAX_TEXT_BYTES = 1 << 30
_MAX_DIMS = 64  # as in torch


class Damaged(Exception):
    """A file is missing, changed or malformed; the message names the file and the problem."""


# The directory of a run's checkpoints.


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def saved_steps(directory: str | Path) -> list[int]:
    """Return the steps with a complete checkpoint, oldest first. Nothing is verified."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)


def claim_directory(directory: Path, token: str) -> None:
    """Make this run the only writer of the directory, and remove unfinished checkpoints.

    An earlier run that is still alive finds its temporary folder gone, or another token in
    `.writer`, and its save fails.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in os.listdir(directory):
        if _LEFTOVER.fullmatch(name):
            discard(directory / name)
    write_atomically(directory / _WRITER, token)


def is_writer(directory: Path, token: str) -> bool:
    """Return whether the run with this token was the last to claim the directory."""
    return (directory / _WRITER).read_text() == token


def discard(path: Path) -> None:
    """Remove a file or folder; errors while removing a folder are ignored."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    # The folder is renamed first: a partly removed one must not have the name of a checkpoint.
    removed = path.with_name(f"{path.name.split('.')[0]}.{os.urandom(4).hex()}.tmp")
    try:
        os.rename(path, removed)
    except OSError:
        removed = path
    shutil.rmtree(removed, ignore_errors=True)


def supersede(path: Path) -> None:
    """Keep a checkpoint under a name that is never loaded."""
    superseded = path.with_name(f"{path.name}.superseded")
    if superseded.exists():
        discard(superseded)
    os.rename(path, superseded)


def prune(directory: Path, step: int, keep: int | None) -> None:
    """After `step` is saved, remove all but the newest `keep` checkpoints up to this step.

    A checkpoint of a later step was damaged, or was written before the run resumed from an earlier
    step. The next start must not load such a checkpoint, so it is renamed by `supersede` and left
    for the user to inspect.
    """
    steps = saved_steps(directory)
    for later in (other for other in steps if other > step):
        supersede(directory / step_name(later))
    discard(directory / f"{step_name(step)}.superseded")
    earlier = [other for other in steps if other <= step]
    for old in earlier[: -keep if keep else 0]:
        discard(directory / step_name(old))


# Files with checksums.


class FileRecord(NamedTuple):
    """Size and checksum of a file, to detect later changes."""

    bytes: int
    sha256: str


def write_synced(path: Path, content: bytes) -> FileRecord:
    """Write a new file and sync it to the disk."""
    path.write_bytes(content)
    sync_path(path)
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def sync_path(path: Path) -> None:
    """Sync a file's content, or a directory's names (new files, renames), to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading; refuse links and pipes (reading a pipe may block)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reasons = {errno.ELOOP: "is a symbolic link", errno.ENOENT: "is missing"}
        reason = reasons.get(error.errno or 0, f"cannot be read: {error.strerror}")
        raise Damaged(f"{path.name} {reason}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged(f"{path.name} is not a regular file")
    return open(descriptor, "rb")


def record_of(path: Path) -> FileRecord:
    with open_regular(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(os.fstat(file.fileno()).st_size, sha256)


def _read_text(path: Path) -> bytes:
    with open_regular(path) as file:
        content = file.read(_MAX_TEXT_BYTES + 1)
    if len(content) > _MAX_TEXT_BYTES:
        raise Damaged(f"{path.name} has more than {_MAX_TEXT_BYTES} bytes")
    return content


# The index.


class Box(NamedTuple):
    """A rectangular part of a tensor: its offset and size in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


class Chunk(NamedTuple):
    """A box of a tensor, and the file and key under which its bytes are stored."""

    box: Box
    file: str
    key: str


class SavedTensor(NamedTuple):
    """A tensor in a checkpoint. Its chunks hold every element exactly once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class OptimizerOptions:
    """The part of an optimizer's state that is not tensors, as JSON values."""

    kind: str
    groups: list[dict[str, Any]]
    # Numbers and strings in the optimizer's state: values[parameter name][slot].
    values: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Index:
    """Everything in a checkpoint except the bytes of the tensors."""

    step: int
    ranks: int
    tensors: dict[str, SavedTensor]
    files: dict[str, FileRecord]
    optimizer: OptimizerOptions | None
    state: dict[str, Any]


def tensor_file_name(rank: int) -> str:
    return f"rank{rank}.safetensors"


def write_index(folder: Path, index: Index, versions: Mapping[str, str]) -> None:
    tensors = {
        name: {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": tensor.shape,
            "chunks": [{**c.box._asdict(), "file": c.file, "key": c.key} for c in tensor.chunks],
        }
        for name, tensor in index.tensors.items()
    }
    value = {
        "schema": SCHEMA,
        "step": index.step,
        "ranks": index.ranks,
        "versions": dict(versions),
        "state": index.state,
        "optimizer": None if index.optimizer is None else asdict(index.optimizer),
        "files": {name: {"bytes": record.bytes} for name, record in index.files.items()},
        "tensors": tensors,
    }
    records = {**index.files, INDEX: write_synced(folder / INDEX, json.dumps(value).encode())}
    lines = [f"{record.sha256}  {name}\n" for name, record in sorted(records.items())]
    write_synced(folder / SUMS, "".join(lines).encode())


def read_index(directory: Path) -> Index:
    """Read the index of a checkpoint and check its checksum and its consistency."""
    sums = _read_sums(directory)
    text = _read_text(directory / INDEX)
    if hashlib.sha256(text).hexdigest() != sums.pop(INDEX):
        raise Damaged(f"{INDEX} does not have the recorded checksum")
    try:
        value = json.loads(text)
        if value["schema"] != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        index = Index(
            step=_count(value["step"]),
            ranks=_count(value["ranks"]),
            tensors={name: _tensor(name, each) for name, each in value["tensors"].items()},
            files={
                name: FileRecord(_count(each["bytes"]), sums.get(name, ""))
                for name, each in value["files"].items()
            },
            optimizer=_optimizer(value["optimizer"]),
            state=dict(value["state"]),
        )
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Damaged(f"{INDEX} is malformed ({type(error).__name__}: {error})") from None
    for file in index.files:
        if not _TENSOR_FILE.fullmatch(file):
            raise Damaged(f"{INDEX} names the file {file!r}, which is not a tensor file")
    if set(sums) != set(index.files):
        raise Damaged(f"{SUMS} and {INDEX} do not name the same files")
    for name, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            if chunk.file not in index.files:
                raise Damaged(f"{INDEX}: {name} is in {chunk.file!r}, which is not in its files")
    return index


def open_tensors(path: Path) -> Any:
    """Open a tensor file with safetensors, which maps it into memory and checks its header."""
    open_regular(path).close()
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{path.name} is not a tensor file: {error}") from None


def check_tensor_files(directory: Path, index: Index, files: Collection[str]) -> None:
    """Raise Damaged unless these files are unchanged and hold the tensors of the index."""
    stored = {}
    for name in files:
        found, expected = record_of(directory / name), index.files[name]
        if found.bytes != expected.bytes:
            raise Damaged(f"{name} has {found.bytes} bytes, {expected.bytes} were written")
        if found.sha256 != expected.sha256:
            raise Damaged(f"{name} does not have the recorded checksum")
        file = open_tensors(directory / name)
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        stored[name] = {k: (each.get_dtype(), each.get_shape()) for k, each in slices.items()}
    for name, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            kind = (DTYPE_NAMES[tensor.dtype], [*chunk.box.sizes])
            if chunk.file in stored and stored[chunk.file].get(chunk.key) != kind:
                raise Damaged(f"{chunk.file} does not hold {name} as {INDEX} describes it")


def _read_sums(directory: Path) -> dict[str, str]:
    lines = _read_text(directory / SUMS).decode(errors="replace").split("\n")
    matches = [_SUM_LINE.fullmatch(line) for line in lines[:-1]]
    sums = {match[2]: match[1] for match in matches if match}
    if lines[-1] != "" or len(sums) != len(matches) or INDEX not in sums:
        raise Damaged(f"{SUMS} is not a list of checksums that includes {INDEX}")
    return sums


def _tensor(name: str, value: Any) -> SavedTensor:
    chunks = []
    for each in value["chunks"]:
        file, key = each["file"], each["key"]
        if not (isinstance(file, str) and isinstance(key, str)):
            raise ValueError(f"{name} has a chunk without a file or a key")
        chunks.append(Chunk(Box(_shape(each["offsets"]), _shape(each["sizes"])), file, key))
    shape = _shape(value["shape"])
    if problem := cover_problem(shape, [chunk.box for chunk in chunks]):
        raise ValueError(f"{name}: {problem}")
    return SavedTensor(DTYPES[value["dtype"]], shape, tuple(chunks))


def _optimizer(value: Any) -> OptimizerOptions | None:
    if value is None:
        return None
    groups = [dict(group) for group in value["groups"]]
    values = {name: dict(slots) for name, slots in value["values"].items()}
    return OptimizerOptions(str(value["kind"]), groups, values)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a count")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if len(value) > _MAX_DIMS:
        raise ValueError(f"a shape of {len(value)} dims")
    return tuple(map(_count, value))


def cover_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Return why boxes are not a grid that covers a shape exactly once; None if they are.

    DTensor divides each dim separately, so its shards always form a grid.
    """
    if math.prod(shape) == 0:
        return "a tensor without elements has shards" if boxes else None
    if any(len(box.offsets) != len(shape) or len(box.sizes) != len(shape) for box in boxes):
        return f"a shard does not have {len(shape)} dims"
    cells = 1
    for dim, size in enumerate(shape):
        spans = sorted({(box.offsets[dim], box.sizes[dim]) for box in boxes})
        starts, ends = [start for start, _ in spans], [start + length for start, length in spans]
        if [*starts, size] != [0, *ends] or any(length < 1 for _, length in spans):
            return f"its shards do not cover dim {dim} of size {size} exactly once"
        cells *= len(spans)
    if not len(boxes) == len(set(boxes)) == cells:
        return f"it has {len(boxes)} shards instead of {cells}"
    return None
