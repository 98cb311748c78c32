"""Text datasets: an index is always the same window; each token is a target once per epoch."""

import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.data import (
    DataError,
    TokenSamples,
    byte_dataset,
    stdlib_dataset,
    token_dataset,
)


@given(st.integers(2, 300), st.integers(1, 40))
def test_windows_predict_each_token_once_and_in_order(count: int, seq_len: int) -> None:
    tokens = np.arange(count, dtype=np.uint16)
    if count < seq_len + 1:
        with pytest.raises(DataError, match=f"{count} tokens.*needs {seq_len + 1}"):
            TokenSamples(tokens, seq_len, count, "t")
        return
    samples = TokenSamples(tokens, seq_len, count, "t")
    inputs, targets = samples.fetch(torch.arange(len(samples)))
    assert inputs.shape == targets.shape == (len(samples), seq_len)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)
    # Every token but the first is a target, up to the last whole window.
    assert targets.flatten().tolist() == list(range(1, len(samples) * seq_len + 1))
    assert count - 1 - len(samples) * seq_len < seq_len


def save_tokens(directory: Path, train: Any, test: Any, vocabulary: int, dtype: str) -> None:
    counts = {"train.bin": len(train), "test.bin": len(test)}
    metadata = {"dtype": dtype, "vocabulary": vocabulary, "tokens": counts}
    (directory / "tokens.json").write_text(json.dumps(metadata))
    train.astype(dtype).tofile(directory / "train.bin")
    test.astype(dtype).tofile(directory / "test.bin")


@pytest.mark.parametrize(
    ("dtype", "largest"), [("uint8", 255), ("uint16", 65535), ("uint32", 2**32 - 1)]
)
def test_the_largest_token_of_each_dtype_is_read(tmp_path: Path, dtype: str, largest: int) -> None:
    tokens = np.array([0, 1, largest, largest - 1, 0])
    save_tokens(tmp_path, tokens, tokens[:3], vocabulary=largest + 1, dtype=dtype)
    dataset = token_dataset(tmp_path, seq_len=2)
    inputs, targets = dataset.train.batch([1, 0])
    assert inputs.tolist() == [[largest, largest - 1], [0, 1]]
    assert targets.tolist() == [[largest - 1, 0], [1, largest]]
    assert dataset.vocabulary == largest + 1
    assert len(dataset.test) == 1


def test_raw_uint16_files_need_only_a_tokens_json(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(bytes([1, 0, 2, 1, 3, 0]))  # 1, 258, 3
    (tmp_path / "val.bin").write_bytes(bytes([4, 0, 5, 0]))
    (tmp_path / "tokens.json").write_text('{"dtype": "uint16", "vocabulary": 300}')
    dataset = token_dataset(tmp_path, seq_len=1)
    assert dataset.train.batch([0, 1])[1].tolist() == [[258], [3]]
    assert dataset.test.batch([0])[0].tolist() == [[4]]


def test_token_files_are_mapped_and_never_changed(tmp_path: Path) -> None:
    save_tokens(tmp_path, np.arange(100), np.arange(10), vocabulary=100, dtype="uint16")
    before = (tmp_path / "train.bin").read_bytes()
    train = token_dataset(tmp_path, seq_len=4).train
    assert isinstance(train, TokenSamples)
    train.tokens[0] = 7
    assert (tmp_path / "train.bin").read_bytes() == before


def test_tokens_on_the_device_keep_their_type_and_give_the_same_windows() -> None:
    samples = TokenSamples(np.arange(60_000, 60_101, dtype=np.uint16), 10, 65536, "t")
    resident = samples.to(torch.device("cpu"))
    assert resident.tokens.element_size() == 2
    indices = torch.tensor([9, 0, 4])
    for actual, expected in zip(samples.batch(indices), resident.batch(indices), strict=True):
        assert torch.equal(actual, expected)
    assert samples.batch([])[0].shape == (0, 10)


def write_three(directory: Path, **about: object) -> None:
    (directory / "train.bin").write_bytes(bytes(100))
    (directory / "test.bin").write_bytes(bytes(20))
    (directory / "tokens.json").write_text(
        json.dumps({"dtype": "uint16", "vocabulary": 10} | about)
    )


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"dtype": "float32"}, "dtype 'float32'.*uint8, uint16 or uint32"),
        ({"vocabulary": 0}, "vocabulary 0"),
        ({"vocabulary": "many"}, "vocabulary 'many'"),
        ({"tokens": {"train.bin": 51}}, "100 bytes, but 51 tokens of 2 bytes"),
    ],
)
def test_a_wrong_tokens_json_is_reported(
    tmp_path: Path, about: dict[str, object], message: str
) -> None:
    write_three(tmp_path, **about)
    with pytest.raises(DataError, match=message):
        token_dataset(tmp_path, seq_len=4)


def test_missing_and_truncated_token_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        token_dataset(tmp_path / "nowhere", 4)
    with pytest.raises(DataError, match=r"tokens\.json does not exist. Create it"):
        token_dataset(tmp_path, 4)
    write_three(tmp_path)
    (tmp_path / "train.bin").write_bytes(bytes(99))
    with pytest.raises(DataError, match=r"train\.bin is truncated .*: it has 99 bytes"):
        token_dataset(tmp_path, 4)
    (tmp_path / "train.bin").unlink()
    with pytest.raises(DataError, match=r"train\.bin cannot be read: No such file"):
        token_dataset(tmp_path, 4)
    (tmp_path / "tokens.json").write_text("{")
    with pytest.raises(DataError, match="does not parse"):
        token_dataset(tmp_path, 4)


def test_a_token_outside_the_vocabulary_is_reported() -> None:
    samples = TokenSamples(np.array([1, 2, 300], dtype=np.uint16), 2, 256, "mine.bin")
    with pytest.raises(DataError, match=r"mine\.bin has token 300, but a vocabulary of 256"):
        samples.batch([0])


def test_a_file_is_read_as_bytes_and_its_end_is_the_test_set(tmp_path: Path) -> None:
    text = bytes(i % 251 for i in range(1000))
    (tmp_path / "a.txt").write_bytes(text)
    dataset = byte_dataset(tmp_path / "a.txt", seq_len=9)
    assert dataset.vocabulary == 256
    assert bytes(dataset.train.batch([0])[0][0].tolist()) == text[:9]
    assert len(dataset.train) == (950 - 1) // 9
    assert bytes(dataset.test.batch([0])[0][0].tolist()) == text[950:959]


def test_a_directory_is_its_files_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name, text in (("b/2", "two"), ("b/1", "one"), ("a", "zero"), (".hidden", "secret")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    dataset = byte_dataset(tmp_path, seq_len=3)
    whole = b"zero\0one\0two\0"
    assert bytes(dataset.train.batch([0])[0][0].tolist()) == whole[:3]
    assert bytes(dataset.test.batch([0])[0][0].tolist()) == whole[9:12]


def test_too_little_text_is_reported_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("short")
    (tmp_path / "empty").write_text("")
    with pytest.raises(DataError, match=r"short has 5 tokens.*2 × 4"):
        byte_dataset(tmp_path / "short", seq_len=3)
    with pytest.raises(DataError, match="empty is empty"):
        byte_dataset(tmp_path / "empty", seq_len=3)
    with pytest.raises(DataError, match="nowhere does not exist"):
        byte_dataset(tmp_path / "nowhere", seq_len=3)


def test_stdlib_dataset_reads_the_installed_library() -> None:
    dataset = stdlib_dataset(seq_len=256)
    train, test = dataset.train, dataset.test
    assert isinstance(train, TokenSamples)
    assert isinstance(test, TokenSamples)
    assert dataset.vocabulary == 256
    assert len(train.tokens) > 4_000_000
    assert 0.02 < len(test.tokens) / len(train.tokens) < 0.1
    # It is what is installed, each module in one of the two, and read the same way each time.
    text, held_out = (bytes(s.tokens.numpy()) for s in (train, test))
    for module in ("argparse.py", "json/decoder.py", "typing.py", "zipfile.py"):
        path = Path(sysconfig.get_path("stdlib"), module)
        if path.exists():
            assert (path.read_bytes() in text) != (path.read_bytes() in held_out)
    again = stdlib_dataset(seq_len=256).train
    assert isinstance(again, TokenSamples)
    assert torch.equal(again.tokens, train.tokens)


def test_stdlib_dataset_has_a_limit() -> None:
    dataset = stdlib_dataset(seq_len=16, limit=100_000)
    assert isinstance(dataset.train, TokenSamples)
    assert isinstance(dataset.test, TokenSamples)
    assert len(dataset.train.tokens) == 95_000
    assert len(dataset.test.tokens) == 5_000
