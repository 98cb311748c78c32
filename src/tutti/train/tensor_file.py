"""Tensors in a file: the safetensors format, written and read by hand.

    8 bytes    N, the length of the header, little-endian
    N bytes    JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, …}
    the rest   the tensors' bytes, little-endian, row by row, without gaps

Nothing in it can be executed, any safetensors reader opens it, and a tensor is read by mapping
its bytes into memory. What a header claims is checked against the file before it is believed.
"""

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tutti.train.durable_file import Damaged, Written, open_regular, parse_json, write_new

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

_MAX_HEADER_BYTES = 100_000_000  # as other readers of the format
_ALIGNMENT = 64  # bytes; of the tensors' bytes in the file, by spaces after the header
_MAX_DIMS = 64  # as torch


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: what it is, and where its bytes begin and end after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def arrange(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Entry]:
    """Lay tensors out one after another, largest elements first: then all of them are aligned."""
    entries: dict[str, Entry] = {}
    position = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
        dtype, shape = tensors[name]
        begin, position = position, position + math.prod(shape) * dtype.itemsize
        entries[name] = Entry(dtype, shape, begin, position)
    return entries


def write_tensor_file(path: Path, entries: Mapping[str, Entry], data: torch.Tensor) -> Written:
    """Write a new file. data: the tensors' bytes, as uint8 on the CPU, where `arrange` put them."""
    header = {
        name: {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
        for name, entry in entries.items()
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    size = max((entry.end for entry in entries.values()), default=0)
    content: Any = data[:size].numpy()  # numpy's arrays are buffers, their types do not say so
    return write_new(path, [len(text).to_bytes(8, "little"), text, memoryview(content)])


class TensorFile:
    """A file of tensors, mapped into memory. Opening it checks the whole header."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise Damaged(
                    f"{path.name} is no tensor file: it has {size} bytes and claims a header of "
                    f"{length}"
                )
            self.entries = _entries(parse_json(file.read(length), path.name), path.name)
            self._start = 8 + length
            end = max((entry.end for entry in self.entries.values()), default=0)
            if self._start + end != size:
                raise Damaged(f"{path.name} has {size} bytes, its header says {self._start + end}")
            # A private copy on write: torch wants memory that it could write to.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor that reads from the file when it is used. Do not write to it."""
        entry = self.entries[name]
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        flat = torch.frombuffer(
            self._map,
            dtype=entry.dtype,
            count=math.prod(entry.shape),
            offset=self._start + entry.begin,
        )
        return flat.view(entry.shape)


def is_shape(value: Any) -> bool:
    """Whether a value from JSON is a list of sizes (or of offsets)."""
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMS
        and all(type(size) is int and 0 <= size < 1 << 63 for size in value)
    )


def _entries(header: Any, file: str) -> dict[str, Entry]:
    if not isinstance(header, dict):
        raise Damaged(f"{file} is no tensor file: its header is no JSON object")
    entries = {}
    for name, value in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
            known = dtype in DTYPES and is_shape(shape) and is_shape([begin, end])
        except (KeyError, TypeError, ValueError):
            known = False
        if not known:
            raise Damaged(f"{file}: the header's entry for {name!r} makes no sense")
        if math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
            raise Damaged(
                f"{file}: {name!r} is {dtype} of shape {shape}, but {end - begin} bytes are "
                "claimed for it"
            )
        entries[name] = Entry(DTYPES[dtype], tuple(shape), begin, end)
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            what = "overlap" if entry.begin < position else "leave a gap"
            raise Damaged(f"{file}: the bytes of {name!r} and of the tensor before it {what}")
        position = entry.end
    return entries
