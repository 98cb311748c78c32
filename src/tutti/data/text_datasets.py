"""Text datasets: bytes of files (vocabulary 256), or a directory of token files, memory-mapped.

Sample i is the window tokens[i·L .. i·L + L] with L = seq_len. The input is the window without its
last token, the target is the window without its first token. Files in a directory of tokens:

    train.bin     the training tokens, raw and little-endian, without a header
    test.bin      the test tokens in the same format; the file may also be named val.bin
    tokens.json   {"dtype": "uint16", "vocabulary": 50257, "tokens": {"train.bin": 900, …}}

dtype is uint8, uint16 or uint32. The counts in `tokens` are optional and detect truncation.
"""

import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tutti.data import DataError
from tutti.data.dataset import Dataset, Pair, Samples
from tutti.data.dataset_files import (
    BYTE_VOCABULARY_SIZE,
    check_files,
    parts_of,
    token_files,
)

TEST_FRACTION = 0.05
STDLIB_LIMIT = 16 << 20  # bytes; the standard library of Python 3.11 has 10.7 million

Tokens = npt.NDArray[Any]


class TokenSamples(Samples):
    """Windows of `seq_len` tokens from a 1-D array; targets are shifted by one token."""

    def __init__(self, tokens: Tokens | Tensor, seq_len: int, vocabulary: int, name: str) -> None:
        if seq_len < 1:
            raise DataError(f"the sequence length must be at least 1, got {seq_len}")
        if len(tokens) < seq_len + 1:
            raise DataError(
                f"{name} has {len(tokens)} tokens, but sequence length {seq_len} needs "
                f"{seq_len + 1}. Use a shorter sequence or more text."
            )
        self.seq_len, self.vocabulary, self.name = seq_len, vocabulary, name
        if isinstance(tokens, np.ndarray):
            # torch supports few operations on uint16 and uint32: the bits are stored as signed
            # integers, and the sign extension is masked off in the conversion to int64.
            signed = {1: np.uint8, 2: np.int16, 4: np.int32}[tokens.dtype.itemsize]
            tokens = torch.from_numpy(tokens.view(signed))
        self.tokens: Tensor = tokens

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def fetch(self, indices: Tensor) -> Pair:
        # A view of all windows takes no memory; indexing copies the selected windows.
        windows = self.tokens.unfold(0, self.seq_len + 1, self.seq_len)[indices]
        # On a GPU the check would synchronise at each step; to() has checked all tokens once.
        tokens = self._as_int64(windows, check=windows.device.type == "cpu")
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def to(self, device: torch.device) -> "TokenSamples":
        """Return the tokens on `device`, in the stored integer type."""
        if device.type != "cpu":
            for chunk in torch.split(self.tokens, 1 << 24):
                self._as_int64(chunk, check=True)
        try:
            tokens = self.tokens.to(device)
        except torch.OutOfMemoryError as error:
            size = f"{self.tokens.nbytes} bytes of tokens"
            raise DataError(
                f"{size} do not fit into {device}: leave out --data-on-device"
            ) from error
        return TokenSamples(tokens, self.seq_len, self.vocabulary, self.name)

    def _as_int64(self, stored: Tensor, check: bool) -> Tensor:
        tokens = stored.long() & ((1 << 8 * stored.element_size()) - 1)
        # The error of nn.Embedding (a device assertion on CUDA) names neither file nor token.
        if check and tokens.numel() and (largest := int(tokens.max())) >= self.vocabulary:
            raise DataError(
                f"{self.name} has token {largest}, but a vocabulary of {self.vocabulary}: "
                "correct the vocabulary or the dtype in tokens.json"
            )
        return tokens


def token_dataset(directory: Path | str, seq_len: int) -> Dataset:
    """Return the dataset in a directory of token files, which may be larger than memory.

    The files are memory-mapped. Their format is described at the top of this file.
    """
    directory = Path(directory)
    dtype, vocabulary, files = token_files(directory)
    stored = np.dtype(dtype).newbyteorder("<")
    train_samples, test_samples = (
        # Copy-on-write: torch needs writable memory, and the file must not change.
        TokenSamples(
            np.memmap(path, dtype=stored, mode="c").view(stored.newbyteorder("=")),
            seq_len,
            vocabulary,
            str(path),
        )
        for path in files
    )
    return Dataset(directory.name, train_samples, test_samples, vocabulary=vocabulary)


def byte_dataset(path: Path | str, seq_len: int) -> Dataset:
    """Return the bytes of a file, or of all files below a directory in the order of their paths.

    Byte 0 separates files. A directory with the parts `train` and `test` (or `val`) has its own
    test set; otherwise the end of the text is the test set. Names that begin with a dot are
    skipped.
    """
    path = Path(path)
    check_files("text", path)
    parts = [part for part in parts_of(path) if part is not None]
    texts = [_read_bytes(part) for part in parts]
    return packed_dataset(path.name, texts, seq_len, BYTE_VOCABULARY_SIZE)


def _read_bytes(path: Path) -> Tokens:
    if path.is_file():
        return np.memmap(path, dtype=np.uint8, mode="c")
    return _concatenate(text_files(path), separator=b"\0")


def packed_dataset(name: str, texts: Sequence[Tokens], seq_len: int, vocabulary: int) -> Dataset:
    """Return windows of tokens as a dataset.

    `texts` contains a training text and a test text, or one text, whose end is the test set.
    """
    if len(texts) == 1:
        window, (text,) = seq_len + 1, texts
        if len(text) < 2 * window:
            raise DataError(
                f"{name} has {len(text)} tokens, but a training window and a test window need 2 × "
                f"{window}. Use a shorter sequence or more text."
            )
        # Each set has at least one window, even for a short text.
        end = len(text) - min(max(round(len(text) * TEST_FRACTION), window), len(text) - window)
        texts = [text[:end], text[end:]]
    train, test = (
        TokenSamples(text, seq_len, vocabulary, f"{kind} text of {name}")
        for kind, text in zip(("training", "test"), texts, strict=True)
    )
    return Dataset(name, train, test, vocabulary=vocabulary)


def stdlib_dataset(seq_len: int, *, limit: int = STDLIB_LIMIT) -> Dataset:
    """Return the source code of Python's standard library, which needs no download.

    The dataset has at most `limit` bytes and is the same on all machines with the same Python
    version. Every twentieth module is in the test set. (The last twentieth of all modules, in path
    order, would be a poor test set, because it contains only a few packages.)
    """
    root = Path(sysconfig.get_path("stdlib"))
    # Leave out installed packages, tests and tables of code points, and also build files, which
    # differ between machines.
    excluded = ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings")
    files = text_files(root, excluded, prefixes=("config-", "_sysconfigdata", "."))
    modules = [path for path in files if path.suffix == ".py"]
    interval = round(1 / TEST_FRACTION)
    held_out = set(modules[interval - 1 :: interval])
    test_limit = round(limit * TEST_FRACTION)
    train = _concatenate((p for p in modules if p not in held_out), limit - test_limit)
    texts = [train, _concatenate(sorted(held_out), test_limit)]
    return packed_dataset("stdlib", texts, seq_len, BYTE_VOCABULARY_SIZE)


def text_files(
    root: Path, skipped: Sequence[str] = (), prefixes: tuple[str, ...] = (".",)
) -> Iterator[Path]:
    """Yield all files below `root`, in an order that does not depend on the file system."""

    def kept(names: list[str]) -> list[str]:
        return sorted(n for n in names if n not in skipped and not n.startswith(prefixes))

    for folder, folders, names in os.walk(root):
        folders[:] = kept(folders)
        yield from (path for name in kept(names) if (path := Path(folder, name)).is_file())


def _concatenate(paths: Iterable[Path], limit: int | None = None, separator: bytes = b"") -> Tokens:
    text = bytearray()
    for path in paths:
        text += path.read_bytes() + separator
        if limit is not None and len(text) >= limit:
            break
    return np.frombuffer(text[:limit], dtype=np.uint8)
