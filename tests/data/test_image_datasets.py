"""Image datasets: digits, Fashion-MNIST from IDX files, CIFAR-100 from pickles."""

import gzip
import io
import os
import pickle
import random
import struct
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

from tutti.data import (
    DataError,
    TensorSamples,
    cifar100_dataset,
    digits_dataset,
    fashion_mnist_dataset,
)
from tutti.data.image_datasets import FASHION_MNIST_FILES, load_plain


def test_digits_train_and_test_together_are_all_digits() -> None:
    dataset = digits_dataset(size=8)
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (1437, 360, 10)
    both = [dataset.test.batch(range(360)), dataset.train.batch(range(1437))]
    images = torch.cat([images for images, _ in both]).flatten(1)
    targets = torch.cat([targets for _, targets in both])
    # Standardising is linear, so the original values follow from minimum and maximum.
    images = (images - images.min()) / (images.max() - images.min()) * 16
    pixels, labels = load_digits(return_X_y=True)
    actual = sorted(
        (int(t), i.round().int().tolist()) for i, t in zip(images, targets, strict=True)
    )
    expected = sorted((int(t), p.astype(int).tolist()) for p, t in zip(pixels, labels, strict=True))
    assert actual == expected


def test_digits_are_standardised_and_have_the_size_of_lenet() -> None:
    dataset = digits_dataset()
    assert dataset.input_shape == (1, 28, 28)
    assert isinstance(dataset.train, TensorSamples)
    inputs = dataset.train.inputs
    assert inputs.dtype == torch.float32
    assert inputs.mean().item() == pytest.approx(0, abs=1e-5)
    assert inputs.std().item() == pytest.approx(1, abs=1e-5)
    # Every class is in the test set.
    assert torch.bincount(dataset.test.batch(range(360))[1]).min() > 20


def test_the_test_set_of_digits_is_fixed() -> None:
    first, second = digits_dataset(), digits_dataset()
    assert torch.equal(first.test.batch(range(360))[0], second.test.batch(range(360))[0])
    assert digits_dataset(8).test.batch(range(10))[1].tolist() == [3, 9, 2, 5, 8, 6, 5, 9, 3, 9]


def test_digits_without_scikit_learn_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match=r"pip install 'tutti-torch\[demo\]'"):
        digits_dataset()


def test_digits_are_not_scaled_below_8_pixels() -> None:
    with pytest.raises(DataError, match="8 × 8"):
        digits_dataset(size=4)


MNIST_COUNTS = {"train": 7, "t10k": 3}


def mnist_images(split: str) -> bytes:
    return random.Random(split).randbytes(MNIST_COUNTS[split] * 28 * 28)


def mnist_labels(split: str) -> bytes:
    return bytes(i % 10 for i in range(MNIST_COUNTS[split]))


def idx(magic: int, dims: tuple[int, ...], values: bytes) -> bytes:
    return struct.pack(f">I{len(dims)}I", magic, *dims) + values


@pytest.fixture
def mnist_directory(tmp_path: Path) -> Path:
    for split, count in MNIST_COUNTS.items():
        # 2051 and 2049 are the magic numbers as the publishers write them, in decimal.
        images, labels = mnist_images(split), mnist_labels(split)
        (tmp_path / f"{split}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(idx(2051, (count, 28, 28), images))
        )
        (tmp_path / f"{split}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(idx(2049, (count,), labels))
        )
    return tmp_path


def test_fashion_mnist_has_the_images_and_labels_of_its_files(mnist_directory: Path) -> None:
    dataset = fashion_mnist_dataset(mnist_directory)
    assert (dataset.name, dataset.classes, dataset.input_shape) == (
        "fashion-mnist",
        10,
        (1, 28, 28),
    )
    for samples, split in ((dataset.train, "train"), (dataset.test, "t10k")):
        assert len(samples) == MNIST_COUNTS[split]
        inputs, targets = samples.fetch(torch.arange(len(samples)))
        assert bytes(inputs.flatten().tolist()) == mnist_images(split)
        assert bytes(targets.tolist()) == mnist_labels(split)
        assert targets.dtype == torch.int64


def test_idx_values_are_row_major(mnist_directory: Path) -> None:
    dataset = fashion_mnist_dataset(mnist_directory)
    pixel = mnist_images("train")[5 * 784 + 3 * 28 + 17]  # image 5, row 3, column 17
    inputs, _ = dataset.train.batch([5])
    expected = (pixel / 255 - 0.2860) / 0.3530
    assert inputs[0, 0, 3, 17].item() == pytest.approx(expected, abs=1e-6)


def test_unzipped_idx_files_are_read(mnist_directory: Path) -> None:
    zipped = fashion_mnist_dataset(mnist_directory)
    for path in list(mnist_directory.glob("*.gz")):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    raw = fashion_mnist_dataset(mnist_directory)
    indices = torch.arange(7)
    assert torch.equal(raw.train.fetch(indices)[0], zipped.train.fetch(indices)[0])


def broken(mnist_directory: Path, name: str, content: bytes) -> str:
    """Return the error message if one file has this content."""
    (mnist_directory / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        fashion_mnist_dataset(mnist_directory)
    message = str(error.value)
    assert name in message
    assert "\n" not in message
    return message


def test_a_wrong_idx_magic_is_reported_with_the_expected_one(mnist_directory: Path) -> None:
    labels = idx(2049, (7,), mnist_labels("train"))
    message = broken(mnist_directory, "train-images-idx3-ubyte.gz", gzip.compress(labels))
    assert "0x00000801" in message
    assert "0x00000803" in message
    assert "0x89504e47" in broken(
        mnist_directory, "train-images-idx3-ubyte.gz", b"\x89PNG and so on"
    )
    assert "0x-" in broken(mnist_directory, "train-images-idx3-ubyte.gz", b"")


def test_a_truncated_idx_file_is_reported_with_its_sizes(mnist_directory: Path) -> None:
    whole = idx(2051, (7, 28, 28), mnist_images("train"))
    name = "train-images-idx3-ubyte.gz"
    message = broken(mnist_directory, name, whole[:-1])
    assert "truncated" in message
    assert "5487 bytes after the header, expected 7 × 28 × 28 = 5488" in message
    assert "too long" in broken(mnist_directory, name, whole + b"x")
    assert "header of 16 bytes" in broken(mnist_directory, name, whole[:15])
    assert "damaged gzip" in broken(mnist_directory, name, gzip.compress(whole)[:-20])
    assert "damaged gzip" in broken(mnist_directory, name, gzip.compress(whole)[:12] + b"\0" * 99)


def test_mismatched_idx_files_are_refused(mnist_directory: Path) -> None:
    labels = mnist_directory / "train-labels-idx1-ubyte.gz"
    before = labels.read_bytes()
    assert "7 images" in broken(mnist_directory, labels.name, idx(2049, (6,), bytes(6)))
    assert "label 10, expected 0 to 9" in broken(
        mnist_directory, labels.name, idx(2049, (7,), bytes([10] * 7))
    )
    labels.write_bytes(before)
    small = idx(2051, (7, 14, 14), bytes(7 * 196))
    assert "14 × 14, expected 28 × 28" in broken(
        mnist_directory, "train-images-idx3-ubyte.gz", small
    )


def test_a_missing_directory_or_file_names_the_files_to_put_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist; put the files train-images"):
        fashion_mnist_dataset(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has no train-images-idx3-ubyte\.gz.*--dataset digits"):
        fashion_mnist_dataset(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_published_checksums_are_complete() -> None:
    assert len(FASHION_MNIST_FILES) == 4
    assert all(
        file.checksum.startswith("md5:") and len(file.checksum) == 36
        for file in FASHION_MNIST_FILES
    )


CIFAR_COUNTS = {"train": 6, "test": 2}


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


def cifar_pixels(split: str) -> bytes:
    return random.Random(split).randbytes(CIFAR_COUNTS[split] * 3072)


def cifar_labels(split: str) -> list[int]:
    return [99 - 7 * i for i in range(CIFAR_COUNTS[split])]


def published(split: str) -> bytes:
    return python2_pickle(cifar_pixels(split), (CIFAR_COUNTS[split], 3072), cifar_labels(split))


def write_archive(directory: Path, **members: bytes) -> Path:
    path = directory / "cifar-100-python.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in {"meta": b"not looked at", **members}.items():
            member = tarfile.TarInfo(f"cifar-100-python/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_cifar100_has_the_images_and_labels_of_its_archive(tmp_path: Path) -> None:
    write_archive(tmp_path, train=published("train"), test=published("test"))
    dataset = cifar100_dataset(tmp_path)
    assert (dataset.name, dataset.classes, dataset.input_shape) == ("cifar-100", 100, (3, 32, 32))
    for samples, split in ((dataset.train, "train"), (dataset.test, "test")):
        inputs, targets = samples.fetch(torch.arange(len(samples)))
        assert bytes(inputs.flatten().tolist()) == cifar_pixels(split)
        assert targets.tolist() == cifar_labels(split)
    # Image 4, green, row 2, column 9: the colours lie one after the other, 1024 bytes each.
    pixel = cifar_pixels("train")[4 * 3072 + 1024 + 2 * 32 + 9]
    inputs, _ = dataset.train.batch([4])
    assert inputs[0, 1, 2, 9].item() == pytest.approx((pixel / 255 - 0.4865) / 0.2564, abs=1e-6)


def test_an_unpacked_archive_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for split in CIFAR_COUNTS:
        (folder / split).write_bytes(published(split))
    for directory in (tmp_path, folder):
        assert len(cifar100_dataset(directory).train) == 6


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol_are_read(protocol: int) -> None:
    data = np.arange(12, dtype=np.uint8).reshape(3, 4)
    content = pickle.dumps({b"data": data, "fine_labels": [1, 2]}, protocol=protocol)
    loaded: Any = load_plain(content, Path("x"))
    assert np.array_equal(loaded[b"data"], data)
    assert loaded["fine_labels"] == [1, 2]


class Malicious:
    """An object whose pickle runs code when it is loaded."""

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
            with pytest.raises(DataError, match="Do not trust this file") as error:
                cifar100_dataset(tmp_path)
            assert "\n" not in str(error.value)
            assert not trace.exists()


def test_names_similar_to_an_allowed_name_are_refused() -> None:
    for module, name in (
        ("numpy", "ndarray.tofile"),
        ("numpy", "load"),
        ("numpy.core.multiarray", "scalar"),
        ("builtins", "getattr"),
        ("_codecs", "decode"),
    ):
        content = b"\x80\x04" + pickle.SHORT_BINUNICODE + bytes([len(module)]) + module.encode()
        content += pickle.SHORT_BINUNICODE + bytes([len(name)]) + name.encode() + b"\x93."
        with pytest.raises(DataError, match="which plain data does not need"):
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
        (python2_pickle(bytes(3072), (1, 3072), [1, 2]), "1 images but 2 labels"),
        (python2_pickle(bytes(3072), (1, 3072), [100]), "`fine_labels` with values of 0 to 99"),
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
