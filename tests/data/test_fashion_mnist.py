"""IDX files, written here byte by byte as published, and read back."""

import gzip
import random
import struct
from pathlib import Path

import pytest
import torch

from tutti.data import DataError, fashion_mnist_dataset
from tutti.data.fashion_mnist import FILES

COUNTS = {"train": 7, "t10k": 3}


def images_of(split: str) -> bytes:
    return random.Random(split).randbytes(COUNTS[split] * 28 * 28)


def labels_of(split: str) -> bytes:
    return bytes(i % 10 for i in range(COUNTS[split]))


def idx(magic: int, dims: tuple[int, ...], values: bytes) -> bytes:
    return struct.pack(f">I{len(dims)}I", magic, *dims) + values


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for split, count in COUNTS.items():
        # 2051 and 2049 are the magic numbers as the publishers write them, in decimal.
        images, labels = images_of(split), labels_of(split)
        (tmp_path / f"{split}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(idx(2051, (count, 28, 28), images))
        )
        (tmp_path / f"{split}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(idx(2049, (count,), labels))
        )
    return tmp_path


def test_images_and_labels_are_those_of_the_files(directory: Path) -> None:
    dataset = fashion_mnist_dataset(directory)
    assert (dataset.name, dataset.classes, dataset.input_shape) == (
        "fashion-mnist",
        10,
        (1, 28, 28),
    )
    for samples, split in ((dataset.train, "train"), (dataset.test, "t10k")):
        assert len(samples) == COUNTS[split]
        inputs, targets = samples.fetch(torch.arange(len(samples)))
        assert bytes(inputs.flatten().tolist()) == images_of(split)
        assert bytes(targets.tolist()) == labels_of(split)
        assert targets.dtype == torch.int64


def test_pixel_row_and_column_are_where_the_format_puts_them(directory: Path) -> None:
    dataset = fashion_mnist_dataset(directory)
    pixel = images_of("train")[5 * 784 + 3 * 28 + 17]  # image 5, row 3, column 17
    inputs, _ = dataset.train.batch([5])
    expected = (pixel / 255 - 0.2860) / 0.3530
    assert inputs[0, 0, 3, 17].item() == pytest.approx(expected, abs=1e-6)


def test_unzipped_files_are_read_as_well(directory: Path) -> None:
    zipped = fashion_mnist_dataset(directory)
    for path in list(directory.glob("*.gz")):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    raw = fashion_mnist_dataset(directory)
    indices = torch.arange(7)
    assert torch.equal(raw.train.fetch(indices)[0], zipped.train.fetch(indices)[0])


def broken(directory: Path, name: str, content: bytes) -> str:
    """The error when one file has another content."""
    (directory / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        fashion_mnist_dataset(directory)
    message = str(error.value)
    assert name in message
    assert "\n" not in message
    return message


def test_a_wrong_magic_is_named_with_the_one_expected(directory: Path) -> None:
    labels = idx(2049, (7,), labels_of("train"))
    message = broken(directory, "train-images-idx3-ubyte.gz", gzip.compress(labels))
    assert "0x00000801" in message
    assert "0x00000803" in message
    assert "0x89504e47" in broken(directory, "train-images-idx3-ubyte.gz", b"\x89PNG and so on")
    assert "0x-" in broken(directory, "train-images-idx3-ubyte.gz", b"")


def test_a_truncated_file_is_named_with_its_numbers(directory: Path) -> None:
    whole = idx(2051, (7, 28, 28), images_of("train"))
    name = "train-images-idx3-ubyte.gz"
    message = broken(directory, name, whole[:-1])
    assert "truncated" in message
    assert "7 × 28 × 28 = 5488 bytes, it holds 5487" in message
    assert "too long" in broken(directory, name, whole + b"x")
    assert "its header alone takes 16" in broken(directory, name, whole[:15])
    assert "damaged gzip" in broken(directory, name, gzip.compress(whole)[:-20])
    assert "damaged gzip" in broken(directory, name, gzip.compress(whole)[:12] + b"\0" * 99)


def test_files_that_do_not_belong_together_are_refused(directory: Path) -> None:
    labels = directory / "train-labels-idx1-ubyte.gz"
    before = labels.read_bytes()
    assert "7 images" in broken(directory, labels.name, idx(2049, (6,), bytes(6)))
    assert "label 10, expected 0 to 9" in broken(
        directory, labels.name, idx(2049, (7,), bytes([10] * 7))
    )
    labels.write_bytes(before)
    small = idx(2051, (7, 14, 14), bytes(7 * 196))
    assert "14 × 14, expected 28 × 28" in broken(directory, "train-images-idx3-ubyte.gz", small)


def test_a_missing_directory_or_file_names_what_belongs_where(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist; put the files train-images"):
        fashion_mnist_dataset(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has no train-images-idx3-ubyte\.gz.*--dataset digits"):
        fashion_mnist_dataset(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_published_checksums_are_complete() -> None:
    assert len(FILES) == 4
    assert all(file.checksum.startswith("md5:") and len(file.checksum) == 36 for file in FILES)
