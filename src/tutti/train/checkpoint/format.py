"""Checkpoints on disk: the index, and tensor files with checksums.

    step-00000120/            a complete checkpoint
      rank0.safetensors, …    shards of tensors, written with the safetensors library
      index.json              dtype, shape and shards of every tensor; file sizes; training state
      SHA256SUMS              checksums of all other files, in the format of `sha256sum -c`

Files may come from an untrusted source: file names are restricted to the names above, links and
pipes are refused, and the shards of a tensor must cover every element exactly once. So nothing
outside the directory is read, and no tensor is larger than the data in the files.
"""

import errno
import hashlib
import io
import json
import math
import os
import re
import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open

from tutti.parallel.mesh import Box
from tutti.train.run_directory import best_step as best_step
from tutti.train.run_directory import saved_steps as saved_steps
from tutti.train.run_directory import step_name as step_name

SCHEMA = "tutti.checkpoint/1"
INDEX = "index.json"
SUMS = "SHA256SUMS"

# fmt: off
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}
# fmt: on
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_SUM_LINE = re.compile(r"([0-9a-f]{64})  (index\.json|rank[0-9]{1,9}\.safetensors)", re.ASCII)
_MAX_TEXT_BYTES = 1 << 30


class Damaged(Exception):
    """A file is missing, changed or malformed; the message names the file and the problem."""


class Chunk(TypedDict):
    """A box (rectangular part) of a tensor, and the file and key under which it is stored."""

    offsets: Sequence[int]
    sizes: Sequence[int]
    file: str
    key: str


def box_of(chunk: Chunk) -> Box:
    return Box(tuple(chunk["offsets"]), tuple(chunk["sizes"]))


class SavedTensor(TypedDict):
    """A tensor in a checkpoint. Its chunks hold every element exactly once."""

    dtype: str
    shape: Sequence[int]
    chunks: list[Chunk]


class Index(TypedDict):
    """The content of index.json: everything in a checkpoint except the bytes of the tensors."""

    schema: str
    step: int
    ranks: int
    versions: dict[str, str]
    state: dict[str, Any]
    score: dict[str, Any] | None  # "name", "value", "larger_is_better"; see `best_step`
    # "kind": class name of the optimizer. "groups": options of each parameter group. "values": maps
    # parameter name and slot to the numbers and strings in the optimizer's state.
    optimizer: dict[str, Any] | None
    files: dict[str, dict[str, Any]]  # bytes and sha256 of each tensor file
    tensors: dict[str, SavedTensor]


def tensor_file_name(rank: int) -> str:
    return f"rank{rank}.safetensors"


def write_index(folder: Path, index: Index) -> None:
    """Write index.json and SHA256SUMS, and sync them to the disk."""
    (folder / INDEX).write_text(json.dumps(index))
    records = {**index["files"], INDEX: record_of(folder / INDEX)}
    lines = [f"{record['sha256']}  {name}\n" for name, record in sorted(records.items())]
    (folder / SUMS).write_text("".join(lines))
    for path in (folder / INDEX, folder / SUMS, folder):
        sync_path(path)


def read_index(directory: Path) -> Index:
    """Read the index of a checkpoint. Raise Damaged if its checksum or its content is wrong."""
    lines = _read_text(directory / SUMS).decode(errors="replace").split("\n")
    matches = [_SUM_LINE.fullmatch(line) for line in lines[:-1]]
    sums = {match[2]: match[1] for match in matches if match}
    if lines[-1] != "" or len(sums) != len(matches) or INDEX not in sums:
        raise Damaged(f"{SUMS} is not a list of checksums that includes {INDEX}")
    text = _read_text(directory / INDEX)
    if hashlib.sha256(text).hexdigest() != sums.pop(INDEX):
        raise Damaged(f"{INDEX} does not have the recorded checksum")
    try:
        index: Index = json.loads(text)
        _check_index(index, sums)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Damaged(f"{INDEX} is malformed ({type(error).__name__}: {error})") from None
    for name, record in index["files"].items():
        record["sha256"] = sums[name]
    return index


def _check_index(index: Index, files: Collection[str]) -> None:
    """Raise an exception if a value is not of the kind that `write_index` writes."""
    if index["schema"] != SCHEMA:
        raise ValueError(f"the schema is not {SCHEMA}")
    if set(index["files"]) != set(files):
        raise ValueError(f"{SUMS} does not list the same files")
    _check_counts([index["step"], index["ranks"]])
    _check_counts([record["bytes"] for record in index["files"].values()])
    options = [index["state"]]
    if (optimizer := index["optimizer"]) is not None:
        options += [optimizer["values"], *optimizer["groups"], *optimizer["values"].values()]
    if not all(isinstance(values, dict) for values in options):
        raise ValueError("the training state or the optimizer is not a dictionary")
    for name, tensor in index["tensors"].items():
        _check_counts(tensor["shape"])
        boxes = []
        for chunk in tensor["chunks"]:
            _check_counts([*chunk["offsets"], *chunk["sizes"]])
            boxes.append(box_of(chunk))
            if chunk["file"] not in files or not isinstance(chunk["key"], str):
                raise ValueError(f"{name} is in {chunk['file']!r}, which is not listed in files")
        problem = coverage_error(tuple(tensor["shape"]), boxes)
        if problem or tensor["dtype"] not in DTYPES:
            raise ValueError(f"{name}: {problem or 'unknown dtype'}")


def _check_counts(values: Sequence[Any]) -> None:
    if bad := [value for value in values if type(value) is not int or not 0 <= value < 1 << 63]:
        raise ValueError(f"{bad[0]!r} is not a count")


def coverage_error(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Return why boxes are not a grid that covers a shape exactly once, or None if they are.

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
            return f"the shards do not cover dim {dim} of size {size} exactly once"
        cells *= len(spans)
    if not len(boxes) == len(set(boxes)) == cells:
        return f"there are {len(boxes)} shards instead of {cells}"
    return None


def check_tensor_files(directory: Path, index: Index, files: Collection[str]) -> None:
    """Raise Damaged unless these files are unchanged and hold the tensors of the index."""
    stored = {}
    for name in files:
        found, expected = record_of(directory / name), index["files"][name]
        if found["bytes"] != expected["bytes"]:
            raise Damaged(f"{name} has {found['bytes']} bytes instead of {expected['bytes']}")
        if found != expected:
            raise Damaged(f"{name} does not have the recorded checksum")
        file = open_tensors(directory / name)
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        stored[name] = {k: (part.get_dtype(), part.get_shape()) for k, part in slices.items()}
    for name, tensor in index["tensors"].items():
        for chunk in tensor["chunks"]:
            kind = (tensor["dtype"], chunk["sizes"])
            if chunk["file"] in stored and stored[chunk["file"]].get(chunk["key"]) != kind:
                raise Damaged(f"{chunk['file']} does not hold {name} as {INDEX} describes it")


def open_tensors(path: Path) -> Any:
    """Open a tensor file with safetensors, which maps it into memory and checks its header."""
    open_regular(path).close()
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{path.name} is not a tensor file: {error}") from None


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading. Refuse links and pipes (reading a pipe may block)."""
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


def record_of(path: Path) -> dict[str, Any]:
    """Return the size and the checksum of a file, to detect later changes."""
    with open_regular(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": sha256}


def _read_text(path: Path) -> bytes:
    with open_regular(path) as file:
        content = file.read(_MAX_TEXT_BYTES + 1)
    if len(content) > _MAX_TEXT_BYTES:
        raise Damaged(f"{path.name} has more than {_MAX_TEXT_BYTES} bytes")
    return content


def sync_path(path: Path) -> None:
    """Sync a file's content, or a directory's names (new files, renames), to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
