"""The python archive of CIFAR-100: pickles as Python 2 wrote them, read without running them."""

import io
import os
import pickle
import random
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tutti.data import DataError, cifar100_dataset
from tutti.data.pickles import load_plain

COUNTS = {"train": 6, "test": 2}


def python2_pickle(data: bytes, shape: tuple[int, int], labels: list[int]) -> bytes:
    """The published layout, opcode by opcode: protocol 2, byte strings, numpy 1's names."""

    def string(text: bytes) -> bytes:  # SHORT_BINSTRING or BINSTRING: Python 2's str
        if len(text) < 256:
            return b"U" + bytes([len(text)]) + text
        return b"T" + struct.pack("<i", len(text)) + text

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + b"(" + string(b"u1") + number(0) + number(1) + b"tR"
    dtype += b"(" + number(3) + string(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n"
    array += b"(cnumpy\nndarray\n" + b"(" + number(0) + b"t" + string(b"b") + b"tR"
    array += b"(" + number(1) + b"(" + number(shape[0]) + number(shape[1]) + b"t"
    array += dtype + b"\x89" + string(data) + b"tb"
    numbers = b"](" + b"".join(number(label) for label in labels) + b"e"
    fields = string(b"batch_label") + string(b"training batch 1 of 1")
    fields += string(b"fine_labels") + numbers + string(b"coarse_labels") + numbers
    fields += string(b"data") + array
    return b"\x80\x02}(" + fields + b"u."


def pixels_of(split: str) -> bytes:
    return random.Random(split).randbytes(COUNTS[split] * 3072)


def labels_of(split: str) -> list[int]:
    return [99 - 7 * i for i in range(COUNTS[split])]


def published(split: str) -> bytes:
    return python2_pickle(pixels_of(split), (COUNTS[split], 3072), labels_of(split))


def write_archive(directory: Path, **members: bytes) -> Path:
    path = directory / "cifar-100-python.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in {"meta": b"not looked at", **members}.items():
            member = tarfile.TarInfo(f"cifar-100-python/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_images_and_labels_are_those_of_the_archive(tmp_path: Path) -> None:
    write_archive(tmp_path, train=published("train"), test=published("test"))
    dataset = cifar100_dataset(tmp_path)
    assert (dataset.name, dataset.classes, dataset.input_shape) == ("cifar-100", 100, (3, 32, 32))
    for samples, split in ((dataset.train, "train"), (dataset.test, "test")):
        inputs, targets = samples.fetch(torch.arange(len(samples)))
        assert bytes(inputs.flatten().tolist()) == pixels_of(split)
        assert targets.tolist() == labels_of(split)
    # Image 4, green, row 2, column 9: the colours lie one after the other, 1024 bytes each.
    pixel = pixels_of("train")[4 * 3072 + 1024 + 2 * 32 + 9]
    inputs, _ = dataset.train.batch([4])
    assert inputs[0, 1, 2, 9].item() == pytest.approx((pixel / 255 - 0.4865) / 0.2564, abs=1e-6)


def test_an_unpacked_archive_is_read_as_well(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for split in COUNTS:
        (folder / split).write_bytes(published(split))
    for directory in (tmp_path, folder):
        assert len(cifar100_dataset(directory).train) == 6


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_copies_written_by_todays_python_are_read_as_well(protocol: int) -> None:
    data = np.arange(12, dtype=np.uint8).reshape(3, 4)
    content = pickle.dumps({b"data": data, "fine_labels": [1, 2]}, protocol=protocol)
    loaded: Any = load_plain(content, Path("x"))
    assert np.array_equal(loaded[b"data"], data)
    assert loaded["fine_labels"] == [1, 2]


class Malicious:
    """What an attacker would put into the archive: code that runs when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_malicious_pickle_is_refused_and_does_not_run(tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "it-ran"
    attacks = [
        Malicious(os.system, f"touch {trace}"),
        Malicious(eval, f"open({str(trace)!r}, 'w')"),
        Malicious(open, str(trace), "w"),
        Malicious(getattr, "text", "format"),
        Malicious(np.fromfile, str(trace)),
    ]
    for attack in attacks:
        for content in (attack, {b"data": attack, b"fine_labels": [1]}, [[attack]]):
            write_archive(
                tmp_path, train=pickle.dumps(content, protocol=protocol), test=published("test")
            )
            with pytest.raises(DataError, match="do not trust this file") as error:
                cifar100_dataset(tmp_path)
            assert "\n" not in str(error.value)
            assert not trace.exists()


def test_dotted_names_and_what_is_like_an_admitted_name_are_refused() -> None:
    for module, name in (
        ("numpy", "ndarray.tofile"),
        ("numpy", "load"),
        ("numpy.core.multiarray", "scalar"),
        ("builtins", "getattr"),
        ("_codecs", "decode"),
    ):
        content = b"\x80\x04" + pickle.SHORT_BINUNICODE + bytes([len(module)]) + module.encode()
        content += pickle.SHORT_BINUNICODE + bytes([len(name)]) + name.encode() + b"\x93."
        with pytest.raises(DataError, match="which plain data has no need of"):
            load_plain(content, Path("x"))


def test_arrays_of_other_types_or_sizes_are_refused() -> None:
    for array in (np.zeros(3), np.array([None]), np.zeros(2, dtype="u1,u1"), np.array(["x"])):
        for protocol in (2, 4, 5):
            with pytest.raises(DataError):
                load_plain(pickle.dumps({"data": array}, protocol=protocol), Path("x"))
    with pytest.raises(DataError, match=r"an array of \(1000000, 3072\) with 3072 bytes"):
        load_plain(python2_pickle(bytes(3072), (1_000_000, 3072), [1]), Path("x"))
    with pytest.raises(DataError, match=r"an array of \(-1, -3072\)"):
        load_plain(python2_pickle(bytes(3072), (-1, -3072), [1]), Path("x"))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (python2_pickle(bytes(100), (1, 100), [1]), r"found \(1, 100\)"),
        (python2_pickle(bytes(3072), (1, 3072), [1, 2]), "1 images and 2 labels"),
        (python2_pickle(bytes(3072), (1, 3072), [100]), "`fine_labels` of 0 to 99"),
        (pickle.dumps([1, 2]), "holds a list"),
        (pickle.dumps({b"data": 1}), "found None"),
        (published("train")[:-200], "damaged pickle"),
        (b"", "damaged pickle"),
        (b"\x89PNG", "damaged pickle"),
    ],
)
def test_wrong_content_is_refused_in_one_line(tmp_path: Path, train: bytes, message: str) -> None:
    write_archive(tmp_path, train=train, test=published("test"))
    with pytest.raises(DataError, match=message) as error:
        cifar100_dataset(tmp_path)
    assert "\n" not in str(error.value)


def test_damaged_and_incomplete_archives_are_named(tmp_path: Path) -> None:
    path = write_archive(tmp_path, train=published("train"))
    with pytest.raises(DataError, match="has no cifar-100-python/test"):
        cifar100_dataset(tmp_path)
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(DataError, match="damaged archive"):
        cifar100_dataset(tmp_path)
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError, match="damaged archive"):
        cifar100_dataset(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"put the files cifar-100-python\.tar\.gz into"):
        cifar100_dataset(tmp_path)
    with pytest.raises(DataError, match="nowhere does not exist"):
        cifar100_dataset(tmp_path / "nowhere")
