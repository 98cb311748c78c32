"""Tensor files: what goes in comes out, and what was tampered with does not come out at all."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tutti.train.durable_file import Damaged
from tutti.train.tensor_file import DTYPES, TensorFile, arrange, write_tensor_file

SHAPES = {"matrix": (3, 5), "number": (), "empty": (0, 4), "row": (1, 7, 1)}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    entries = arrange({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
    data = torch.zeros(max((e.end for e in entries.values()), default=0), dtype=torch.uint8)
    for name, entry in entries.items():
        data[entry.begin : entry.end] = tensors[name].contiguous().view(-1).view(torch.uint8)
    write_tensor_file(path, entries, data)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def some_tensors() -> dict[str, torch.Tensor]:
    """Every dtype in every shape, of random bits: NaNs and infinities are among them."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for kind, dtype in DTYPES.items():
        for form, shape in SHAPES.items():
            count = torch.Size(shape).numel() * dtype.itemsize
            high = 2 if dtype == torch.bool else 256
            raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
            tensors[f"{kind}.{form}"] = raw.view(dtype).view(shape)
    return tensors


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = some_tensors()
    write(tmp_path / "file", tensors)
    file = TensorFile(tmp_path / "file")
    assert file.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        back = file.tensor(name)
        assert back.dtype == tensor.dtype and back.shape == tensor.shape
        assert bits(back) == bits(tensor), name
        assert back.numel() == 0 or back.data_ptr() % back.dtype.itemsize == 0


def test_the_safetensors_package_reads_the_same(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5, dtype=torch.bfloat16)}
    write(tmp_path / "file", tensors)
    back = safetensors.load_file(tmp_path / "file")
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_a_file_without_tensors_is_a_file(tmp_path: Path) -> None:
    write(tmp_path / "file", {})
    assert TensorFile(tmp_path / "file").entries == {}


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(FileExistsError):
        write(tmp_path / "file", {})
    assert (tmp_path / "file").read_text() == "precious"


def test_others_may_not_read_it(tmp_path: Path) -> None:
    write(tmp_path / "file", {})
    assert (tmp_path / "file").stat().st_mode & 0o077 == 0


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "file", {"a": torch.ones(5), "b": torch.ones(2, 2)})
    whole = (tmp_path / "file").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "file").write_bytes(whole[:length])
        with pytest.raises(Damaged, match="file"):
            TensorFile(tmp_path / "file")


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ([], "no JSON object"),
        ({"a": entry(offsets=[0, 4])}, "4 bytes are claimed"),
        ({"a": entry(offsets=[-8, 0])}, "makes no sense"),
        ({"a": entry(shape=[-1, -2])}, "makes no sense"),
        ({"a": entry(shape=[True, 2])}, "makes no sense"),
        ({"a": entry(shape=[1 << 62, 1 << 62])}, "bytes are claimed"),
        ({"a": entry(shape=[1 << 62], offsets=[0, 1 << 64])}, "makes no sense"),
        ({"a": entry(shape=[1 << 40], offsets=[0, 1 << 42])}, "its header says"),
        ({"a": entry(shape=[2] * 65)}, "makes no sense"),
        ({"a": entry(dtype="PICKLE")}, "makes no sense"),
        ({"a": entry(dtype=["F32"])}, "makes no sense"),
        ({"a": {"dtype": "F32"}}, "makes no sense"),
        ({"a": 7}, "makes no sense"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, "overlap"),
        ({"a": entry(), "b": entry()}, "overlap"),
        ({"a": entry(offsets=[8, 16])}, "leave a gap"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, complaint: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(Damaged, match=complaint):
        TensorFile(tmp_path / "file")


@pytest.mark.parametrize(
    "text", [b'{"a":1,"a":2}', b"[" * 100_000, b"\xff\xfe", b"", b"9" * 10_000, b"{" * 50]
)
def test_a_header_that_is_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(Damaged):
        TensorFile(tmp_path / "file")


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


def test_a_pickle_is_refused_and_not_executed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps(Bomb(str(tmp_path / "exploded"))))
    with pytest.raises(Damaged, match="no tensor file"):
        TensorFile(tmp_path / "file")
    assert not (tmp_path / "exploded").exists()


def test_links_pipes_and_directories_are_refused_without_waiting(tmp_path: Path) -> None:
    write(tmp_path / "real", {"a": torch.ones(2)})
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder", "absent"):
        with pytest.raises(Damaged, match=name):
            TensorFile(tmp_path / name)
