"""Text datasets: bytes of files (vocabulary 256), or a directory of token files, memory-mapped.

A sample is a fixed window: sample i is tokens[i·L .. i·L + L] with L = seq_len; the input is the
window without its last token, the target the window without its first. Neighbouring windows share
one token, so each token is predicted exactly once per epoch.

A directory of tokens:

    train.bin     the tokens, raw and little-endian, without a header
    test.bin      the same (or val.bin)
    tokens.json   {"dtype": "uint16", "vocabulary": 50257, "tokens": {"train.bin": 900, …}}

dtype is uint8, uint16 or uint32. The counts in `tokens` are optional and detect truncation. Raw
uint16 files from other tools need only a tokens.json beside them.
"""

import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tutti.data import DataError
from tutti.data.dataset import Dataset, Pair, Samples

DTYPES = ("uint8", "uint16", "uint32")
BYTES = 256
TEST_FRACTION = 0.05
STDLIB_LIMIT = 16 << 20  # bytes; Python 3.11 has 10.7 million

Tokens = npt.NDArray[Any]


class TokenSamples(Samples):
    """Windows of `seq_len` tokens from a 1-D array; targets are shifted by one token."""

    def __init__(self, tokens: Tokens | Tensor, seq_len: int, vocabulary: int, name: str) -> None:
        if seq_len < 1:
            raise DataError(f"a sequence length of {seq_len}: use 1 or more")
        if len(tokens) < seq_len + 1:
            raise DataError(
                f"{name} has {len(tokens)} tokens, one window of sequence length {seq_len} needs "
                f"{seq_len + 1}: use a shorter sequence or more text"
            )
        self.seq_len, self.vocabulary, self.name = seq_len, vocabulary, name
        if isinstance(tokens, np.ndarray):
            # torch supports few operations on uint16 and uint32: the bits are stored as signed
            # integers, and the sign extension is masked off when they are widened.
            signed = {1: np.uint8, 2: np.int16, 4: np.int32}[tokens.dtype.itemsize]
            tokens = torch.from_numpy(tokens.view(signed))
        self.tokens: Tensor = tokens

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def fetch(self, indices: Tensor) -> Pair:
        # A view of all windows takes no memory; indexing copies the selected ones.
        windows = self.tokens.unfold(0, self.seq_len + 1, self.seq_len)[indices]
        wide = windows.long() & ((1 << 8 * windows.element_size()) - 1)
        # On a GPU the check would synchronise at each step; on() has checked all tokens once.
        if wide.device.type == "cpu" and wide.numel():
            self._check(wide)
        return wide[:, :-1].contiguous(), wide[:, 1:].contiguous()

    def on(self, device: torch.device) -> "TokenSamples":
        """The tokens on `device`, in the stored integer type."""
        if device.type != "cpu":
            for chunk in torch.split(self.tokens, 1 << 24):
                self._check(chunk.long() & ((1 << 8 * chunk.element_size()) - 1))
        try:
            tokens = self.tokens.to(device)
        except torch.OutOfMemoryError as error:
            raise DataError(
                f"--data-on-device: {self.tokens.nbytes} bytes of tokens do not fit into {device}: "
                "leave out the flag"
            ) from error
        return TokenSamples(tokens, self.seq_len, self.vocabulary, self.name)

    def _check(self, wide: Tensor) -> None:
        # The embedding's own error, a CUDA assertion on a GPU, names neither file nor token.
        if (largest := int(wide.max())) >= self.vocabulary:
            raise DataError(
                f"{self.name} has token {largest}, but a vocabulary of {self.vocabulary}: "
                "correct the vocabulary or the dtype in tokens.json"
            )


def token_dataset(directory: Path | str, seq_len: int) -> Dataset:
    """Tokens from a directory in the format above, memory-mapped: may be larger than memory."""
    directory = Path(directory)
    if not directory.is_dir():
        problem = "is a file" if directory.is_file() else "does not exist"
        raise DataError(
            f"token directory {directory} {problem}: give a directory with train.bin, test.bin and "
            "tokens.json"
        )
    metadata = _read_metadata(directory / "tokens.json")
    test = directory / "test.bin"
    test = test if test.is_file() else directory / "val.bin"
    train, held_out = (
        TokenSamples(_map(path, metadata), seq_len, metadata["vocabulary"], str(path))
        for path in (directory / "train.bin", test)
    )
    return Dataset(directory.name, train, held_out, vocabulary=metadata["vocabulary"])


def save_tokens(
    directory: Path | str, train: Tokens, test: Tokens, vocabulary: int, dtype: str = "uint16"
) -> None:
    """Write a directory that token_dataset reads."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    files = {"train.bin": np.asarray(train), "test.bin": np.asarray(test)}
    for name, tokens in files.items():
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise DataError(
                f"{name} would have tokens {tokens.min()} to {tokens.max()}: outside a vocabulary "
                f"of {vocabulary}"
            )
        if vocabulary - 1 > np.iinfo(dtype).max:
            raise DataError(f"a vocabulary of {vocabulary} does not fit {dtype}: use uint32")
        (directory / name).write_bytes(tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    counts = {name: len(tokens) for name, tokens in files.items()}
    metadata = {"dtype": dtype, "vocabulary": vocabulary, "tokens": counts}
    (directory / "tokens.json").write_text(json.dumps(metadata) + "\n")


def _read_metadata(path: Path) -> dict[str, Any]:
    example = '{"dtype": "uint16", "vocabulary": 50257}'
    try:
        metadata = json.loads(path.read_bytes())
        dtype, vocabulary = metadata["dtype"], metadata["vocabulary"]
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist: write it, such as {example}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} does not parse ({error!r}): write it as in {example}") from error
    if dtype not in DTYPES or type(vocabulary) is not int or vocabulary < 1:
        raise DataError(
            f"{path} has dtype {dtype!r} and vocabulary {vocabulary!r}, expected one of "
            f"{', '.join(DTYPES)} and a number above 0"
        )
    return dict(metadata)


def _map(path: Path, metadata: Mapping[str, Any]) -> Tokens:
    dtype = np.dtype(metadata["dtype"]).newbyteorder("<")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    count, rest = divmod(size, dtype.itemsize)
    expected = dict(metadata.get("tokens") or {}).get(path.name, count)
    if rest or count != expected or not count:
        raise DataError(
            f"{path} is truncated or of another dtype: {size} bytes, expected {expected} tokens of "
            f"{dtype.itemsize} bytes: write it again"
        )
    # Copy-on-write: torch needs writable memory, and the file must not change.
    return np.memmap(path, dtype=dtype, mode="c").view(dtype.newbyteorder("="))


def byte_dataset(
    path: Path | str, seq_len: int, *, test_fraction: float = TEST_FRACTION
) -> Dataset:
    """The bytes of a file, or of all files below a directory in the order of their paths.

    The test set is the end of the text. Names that begin with a dot are skipped.
    """
    path = Path(path)
    if path.is_file():
        if not path.stat().st_size:
            raise DataError(f"{path} is empty: give a file with text")
        text: Tokens = np.memmap(path, dtype=np.uint8, mode="c")
    elif path.is_dir():
        text = _concatenate(_files(path))
    else:
        raise DataError(f"text {path} does not exist: give a file or a directory")
    if not 0 < test_fraction < 1:
        raise DataError(f"a test fraction of {test_fraction}: it must be in (0, 1)")
    window = seq_len + 1
    if len(text) < 2 * window:
        raise DataError(
            f"{path} has {len(text)} bytes, one window for training and one for test need "
            f"2 × {window}: use a shorter sequence or more text"
        )
    # At least one window in each set, even for a short text.
    end = len(text) - min(max(round(len(text) * test_fraction), window), len(text) - window)
    return _splits(path.name, text[:end], text[end:], seq_len)


def stdlib_dataset(seq_len: int, *, limit: int = STDLIB_LIMIT) -> Dataset:
    """The source code of Python's standard library: real text that needs no download.

    The same bytes on all machines with the same Python version, at most `limit`. Every twentieth
    module is in the test set: the last modules in path order would differ in kind from the rest.
    """
    root = Path(sysconfig.get_path("stdlib"))
    # Leave out installed packages, tests and tables of code points, and also build files, which
    # differ between machines.
    outside = ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings")
    files = _files(root, outside, prefixes=("config-", "_sysconfigdata", "."))
    modules = [path for path in files if path.suffix == ".py"]
    every = round(1 / TEST_FRACTION)
    held_out = set(modules[every - 1 :: every])
    test_limit = round(limit * TEST_FRACTION)
    train = _concatenate((p for p in modules if p not in held_out), limit - test_limit)
    return _splits("stdlib", train, _concatenate(sorted(held_out), test_limit), seq_len)


def _files(
    root: Path, skipped: Sequence[str] = (), prefixes: tuple[str, ...] = (".",)
) -> Iterator[Path]:
    """All files below `root`, sorted, so that the order does not depend on the file system."""

    def kept(names: list[str]) -> list[str]:
        return sorted(n for n in names if n not in skipped and not n.startswith(prefixes))

    for folder, folders, names in os.walk(root):
        folders[:] = kept(folders)
        yield from (path for name in kept(names) if (path := Path(folder, name)).is_file())


def _concatenate(paths: Iterable[Path], limit: int | None = None) -> Tokens:
    text = bytearray()
    for path in paths:
        text += path.read_bytes()
        if limit is not None and len(text) >= limit:
            break
    return np.frombuffer(text[:limit], dtype=np.uint8)


def _splits(name: str, train: Tokens, test: Tokens, seq_len: int) -> Dataset:
    train_samples = TokenSamples(train, seq_len, BYTES, f"training text of {name}")
    test_samples = TokenSamples(test, seq_len, BYTES, f"test text of {name}")
    return Dataset(name, train_samples, test_samples, vocabulary=BYTES)
