"""The index of a checkpoint: which tensor lies where, and what the training wants to remember.

A checkpoint is a directory:

    rank0.safetensors, …   the tensors, or boxes of them
    index.json             dtype, shape and boxes of every tensor; sizes of the files; the state
    SHA256SUMS             the checksums of all of these; `sha256sum -c` reads it, too

Whoever reads an index may have it from anywhere. So names of files are those that we write and
no paths, and the boxes of a tensor fill it exactly: nothing outside the directory is ever read,
and nothing is allocated that the files do not hold.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tutti.train.checkpoint_plan import Box, cover_problem
from tutti.train.durable_file import Damaged, Written, check_file, parse_json, read_small
from tutti.train.tensor_file import DTYPE_NAMES, DTYPES, TensorFile, is_shape
from tutti.train.training_state import OptimizerOptions

SCHEMA = "tutti.checkpoint/1"
INDEX = "index.json"
SUMS = "SHA256SUMS"

_FILE = re.compile(r"rank(0|[1-9][0-9]{0,8})\.safetensors", re.ASCII)
_SUM = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9.]+)", re.ASCII)
_MAX_INDEX_BYTES = 1 << 30


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its bytes are."""

    box: Box
    file: str
    key: str


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint. Its chunks fill it; it has none if it has no elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index:
    """Everything about a checkpoint but the tensors' bytes."""

    step: int
    ranks: int
    tensors: dict[str, SavedTensor]
    files: dict[str, Written]
    optimizer: OptimizerOptions | None
    state: dict[str, Any]


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank{rank}.safetensors"


def index_text(index: Index, versions: Mapping[str, str]) -> bytes:
    """The index as the JSON that `index.json` holds."""
    tensors = {
        name: {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": tensor.shape,
            "chunks": [{**asdict(c.box), "file": c.file, "key": c.key} for c in tensor.chunks],
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
        "files": {name: {"bytes": written.bytes} for name, written in index.files.items()},
        "tensors": tensors,
    }
    return json.dumps(value).encode()


def sums_text(written: Mapping[str, Written]) -> bytes:
    """The checksums as `sha256sum` prints them."""
    return "".join(f"{one.sha256}  {name}\n" for name, one in sorted(written.items())).encode()


def read_index(directory: Path) -> Index:
    """The index of a checkpoint, checked in itself and against its checksum; raises Damaged."""
    sums = _read_sums(directory)
    unused = set(sums) - {INDEX}
    text = read_small(directory / INDEX, _MAX_INDEX_BYTES)
    check_file(directory / INDEX, Written(len(text), sums[INDEX]))
    value = parse_json(text, INDEX)
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise Damaged(f"{INDEX} is not of the form {SCHEMA}")
    try:
        index = Index(
            step=_whole(value["step"]),
            ranks=_whole(value["ranks"]),
            tensors={name: _tensor(name, one) for name, one in value["tensors"].items()},
            files={
                name: Written(_whole(one["bytes"]), sums.get(name, ""))
                for name, one in value["files"].items()
            },
            optimizer=_optimizer(value["optimizer"]),
            state=dict(value["state"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{INDEX} makes no sense ({type(error).__name__}: {error})") from None
    for name in index.files:
        if not _FILE.fullmatch(name):
            raise Damaged(f"{INDEX} names the file {name!r}, which is none of ours")
    if unused != set(index.files):
        raise Damaged(f"{SUMS} and {INDEX} do not name the same files")
    for name, tensor in index.tensors.items():
        if problem := cover_problem(tensor.shape, [chunk.box for chunk in tensor.chunks]):
            raise Damaged(f"{INDEX}: {name}: {problem}")
        for chunk in tensor.chunks:
            if chunk.file not in index.files:
                raise Damaged(f"{INDEX}: {name} is in {chunk.file!r}, which is no file of it")
    return index


def check_tensor_files(directory: Path, index: Index, files: Collection[str]) -> None:
    """Raise Damaged unless these files are what was written, and hold what the index says."""
    entries = {}
    for file in files:
        check_file(directory / file, index.files[file])
        entries[file] = TensorFile(directory / file).entries
    for name, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            if chunk.file not in entries:
                continue
            entry = entries[chunk.file].get(chunk.key)
            if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, chunk.box.sizes):
                raise Damaged(f"{chunk.file} does not hold {name} as {INDEX} describes it")


def _read_sums(directory: Path) -> dict[str, str]:
    text = read_small(directory / SUMS, _MAX_INDEX_BYTES).decode(errors="replace")
    lines = text.split("\n")
    matches = [_SUM.fullmatch(line) for line in lines[:-1]]
    sums = {match[2]: match[1] for match in matches if match}
    if lines[-1] != "" or len(sums) != len(matches) or INDEX not in sums:
        raise Damaged(f"{SUMS} is not a list of checksums with {INDEX} in it")
    return sums


def _tensor(name: str, value: Any) -> SavedTensor:
    if not is_shape(value["shape"]) or value["dtype"] not in DTYPES:
        raise Damaged(f"{INDEX}: {name} is {value['dtype']} of shape {value['shape']}")
    chunks = []
    for one in value["chunks"]:
        if not (is_shape(one["offsets"]) and is_shape(one["sizes"])):
            raise Damaged(f"{INDEX}: {name} has a part at {one['offsets']} of {one['sizes']}")
        if not (isinstance(one["file"], str) and isinstance(one["key"], str)):
            raise Damaged(f"{INDEX}: {name} has a part without a file or a key")
        box = Box(tuple(one["offsets"]), tuple(one["sizes"]))
        chunks.append(Chunk(box, one["file"], one["key"]))
    return SavedTensor(DTYPES[value["dtype"]], tuple(value["shape"]), tuple(chunks))


def _optimizer(value: Any) -> OptimizerOptions | None:
    if value is None:
        return None
    groups = [dict(group) for group in value["groups"]]
    values = {name: dict(slots) for name, slots in value["values"].items()}
    return OptimizerOptions(str(value["kind"]), groups, values)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
