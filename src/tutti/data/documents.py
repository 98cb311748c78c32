"""Your own documents: text files, JSON Lines and Parquet, tokenized once into a cache on disk.

A record has the field `text`, or the fields `prompt` and `completion`. Texts are packed: all tokens
of all documents form one sequence, with an end token after each document, and a sample is a window
of this sequence. A prompt and its completion are one sample, padded to the sequence length; only
the tokens of the completion have a loss.

The cache is a directory of memory-mapped arrays below ~/.cache/tutti/tokens (or $XDG_CACHE_HOME).
The name of the directory is a hash of the tokenizer and of the path, size and modification time of
every file, so changed files are tokenized again.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from tutti.data import DataError
from tutti.data.dataset import Dataset, Pair, Samples
from tutti.data.dataset_files import BYTE_VOCABULARY_SIZE, TOKENIZER_FILES, parts_of
from tutti.data.download import once_per_directory
from tutti.data.text_datasets import (
    TEST_FRACTION,
    Tokens,
    byte_dataset,
    packed_dataset,
    text_files,
)

IGNORED = -100  # the target of a token without loss
_CACHE_VERSION = 1
_DOCUMENTS_PER_CALL = 256  # a tokenizer encodes many texts in parallel
_ARRAYS = ("tokens", "offsets", "prompts", "lines")


# -- tokenizers ------------------------------------------------------------------------------------


class ByteTokenizer:
    """Bytes as tokens. Byte 0, which no text contains, ends a document."""

    name = "bytes"
    size, end, dtype = BYTE_VOCABULARY_SIZE, 0, np.dtype("uint8")
    fingerprint = "bytes"

    def encode(self, texts: Sequence[str], start: bool = True) -> list[Any]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


class ModelTokenizer:
    """The tokenizer in the folder of a Hugging Face model."""

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise DataError(
                "a tokenizer needs transformers: pip install 'tutti-torch[hf]'"
            ) from None
        files = sorted(path for path in folder.iterdir() if path.name.startswith(TOKENIZER_FILES))
        if not files:
            raise DataError(
                f"{folder} has no tokenizer files (tokenizer.json or others): save the tokenizer "
                "there with tokenizer.save_pretrained"
            )
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # a damaged file causes many kinds of errors
            reason = str(error).strip().splitlines()[0]
            raise DataError(f"the tokenizer in {folder} cannot be read ({reason})") from None
        self._tokenizer.model_max_length = sys.maxsize  # no warning: documents are cut into windows
        end = self._tokenizer.eos_token_id
        if end is None:
            raise DataError(
                f"the tokenizer in {folder} has no end token, which separates documents: set "
                "eos_token in its tokenizer_config.json"
            )
        self.name, self.end, self.size = str(folder), int(end), len(self._tokenizer)
        self.dtype = np.dtype("uint16" if self.size <= 1 << 16 else "uint32")
        digest = hashlib.sha256()
        for path in files:
            digest.update(path.name.encode() + path.read_bytes())
        self.fingerprint = digest.hexdigest()

    def encode(self, texts: Sequence[str], start: bool = True) -> list[Any]:
        """Return the tokens of each text, after the tokenizer's start token if `start`."""
        encoded = self._tokenizer(
            list(texts), add_special_tokens=start, return_attention_mask=False
        )["input_ids"]
        # _append adds the end token, so an end token from the tokenizer is removed here.
        return [ids[:-1] if ids and ids[-1] == self.end else ids for ids in encoded]


Tokenizer = ByteTokenizer | ModelTokenizer


# -- records ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Record:
    """A text, or a prompt with its completion, and where it comes from."""

    source: str  # FILE:LINE
    line: int
    text: str
    completion: str | None = None


def _text_records(path: Path) -> Iterator[_Record]:
    for file in [path] if path.is_file() else text_files(path):
        try:
            yield _Record(str(file), 1, file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            before = file.read_bytes()[: error.start]
            raise DataError(
                f"{file}:{before.count(10) + 1}: byte 0x{error.object[error.start]:02x} is not "
                "UTF-8: convert the file to UTF-8"
            ) from None
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}") from None


def _json_records(path: Path) -> Iterator[_Record]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                reason = getattr(error, "msg", None) or "not UTF-8"
                raise DataError(
                    f"{path}:{number}: not JSON ({reason}): correct this line"
                ) from None
            yield _record(row, f"{path}:{number}", number)


def _parquet_records(path: Path) -> Iterator[_Record]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError("Parquet files need pyarrow: pip install pyarrow") from None
    try:
        file = parquet.ParquetFile(path)
        names = [n for n in ("text", "prompt", "completion") if n in file.schema_arrow.names]
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=names):
            for row in batch.to_pylist():
                number += 1
                yield _record(row, f"{path}: row {number}", number)
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of ValueError
        if isinstance(error, DataError):
            raise
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is not a readable Parquet file ({reason})") from None


def _record(row: object, source: str, line: int) -> _Record:
    fields = row if isinstance(row, dict) else {}
    names = ("prompt", "completion") if "completion" in fields else ("text",)
    values = [fields.get(name) for name in names]
    if not all(isinstance(value, str) for value in values):
        wrong = next(n for n, v in zip(names, values, strict=True) if not isinstance(v, str))
        found = type(fields[wrong]).__name__ if wrong in fields else "missing"
        if not isinstance(row, dict):
            found = f"missing, because the record is a {type(row).__name__}, not an object"
        raise DataError(
            f"{source}: the field {wrong} is {found}: every record needs the text field `text`, or "
            "the text fields `prompt` and `completion`"
        )
    if names == ("text",):
        return _Record(source, line, str(values[0]))
    if not values[1]:
        raise DataError(f"{source}: the completion is empty, so it has no loss: remove the record")
    return _Record(source, line, str(values[0]), str(values[1]))


_READERS = {"text": _text_records, "jsonl": _json_records, "parquet": _parquet_records}


# -- the cache -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Documents:
    """The tokens of all documents, memory-mapped.

    The tokens of record i are tokens[offsets[i] : offsets[i + 1]]. The first prompts[i] of these
    tokens are the prompt; `prompts` is empty if the records are texts. lines[i] is the line of
    the record in its file, or its row in a Parquet file.
    """

    tokens: Tokens
    offsets: Tokens
    prompts: Tokens
    lines: Tokens


def tokenize(kind: str, path: Path, tokenizer: Tokenizer) -> Documents:
    """Return the documents of a file or folder, from the cache if they are in it.

    One process tokenizes the documents; the other ranks wait, and then read the cache.
    """
    files = [path] if path.is_file() else list(text_files(path))
    states = [(str(file.resolve()), (s := file.stat()).st_size, s.st_mtime_ns) for file in files]
    key = json.dumps([_CACHE_VERSION, kind, states, tokenizer.fingerprint])
    directory = _cache_root() / hashlib.sha256(key.encode()).hexdigest()[:32]

    def build() -> None:
        print(f"tokenizing {path} into {directory}", file=sys.stderr, flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        with _replaced_directory(directory) as temporary:
            _write_arrays(_READERS[kind](path), tokenizer, temporary)

    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = directory.with_suffix(".lock")
        once_per_directory(lock, lambda: _read_arrays(directory) is None, build)
    except OSError as error:
        raise DataError(
            f"the token cache {directory} cannot be written: {error.strerror}. Free some space, or "
            "set XDG_CACHE_HOME to another folder."
        ) from None
    documents = _read_arrays(directory)
    if documents is None:
        raise DataError(f"the token cache {directory} is damaged: delete it")
    return documents


def _cache_root() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "tutti" / "tokens"


@contextmanager
def _replaced_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes `directory` if the block succeeds."""
    temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    try:
        yield temporary
        os.replace(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_arrays(records: Iterator[_Record], tokenizer: Tokenizer, directory: Path) -> None:
    offsets, prompts, lines = [0], [], []
    first: _Record | None = None
    with (directory / "tokens.raw").open("wb") as file:
        while group := list(islice(records, _DOCUMENTS_PER_CALL)):
            first = first or group[0]
            for record in group:
                if (record.completion is None) != (first.completion is None):
                    raise DataError(
                        f"{record.source} has other fields than {first.source}: use `text` in all "
                        "records, or `prompt` and `completion` in all"
                    )
            texts = tokenizer.encode([record.text for record in group])
            completions = [record.completion or "" for record in group]
            answers = tokenizer.encode(completions, start=False)
            for record, text, answer in zip(group, texts, answers, strict=True):
                offsets.append(offsets[-1] + _append(file, tokenizer, text, answer))
                lines.append(record.line)
                if record.completion is not None:
                    prompts.append(len(text))
    dtypes = {
        "tokens": tokenizer.dtype,
        "offsets": np.int64,
        "prompts": np.int64,
        "lines": np.int64,
    }
    for name, values in (("offsets", offsets), ("prompts", prompts), ("lines", lines)):
        np.asarray(values, np.int64).tofile(directory / f"{name}.raw")
    (directory / "arrays.json").write_text(
        json.dumps(
            {
                name: {
                    "dtype": np.dtype(dtypes[name]).name,
                    "bytes": (directory / f"{name}.raw").stat().st_size,
                }
                for name in _ARRAYS
            }
        )
    )


def _append(file: IO[bytes], tokenizer: Tokenizer, *parts: Iterable[int]) -> int:
    tokens = np.fromiter(chain(*parts, [tokenizer.end]), dtype=tokenizer.dtype)
    file.write(tokens.tobytes())
    return len(tokens)


def _read_arrays(directory: Path) -> Documents | None:
    """Return the cached arrays, or None if they are missing or incomplete."""
    try:
        described = json.loads((directory / "arrays.json").read_text())
        arrays = {}
        for name in _ARRAYS:
            path, dtype = directory / f"{name}.raw", np.dtype(described[name]["dtype"])
            if path.stat().st_size != described[name]["bytes"]:
                return None
            # An empty file cannot be mapped. Mode c (copy-on-write) gives torch writable memory.
            mapped = described[name]["bytes"] > 0
            arrays[name] = np.memmap(path, dtype, mode="c") if mapped else np.empty(0, dtype)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Documents(**arrays)


# -- samples ---------------------------------------------------------------------------------------


class CompletionSamples(Samples):
    """Prompts with completions, padded to `seq_len`; only completions have targets."""

    def __init__(
        self, documents: Documents, rows: Tokens, seq_len: int, end: int, path: Path
    ) -> None:
        self._documents, self._rows, self._end = documents, rows, end
        self.seq_len = seq_len
        lengths = np.diff(documents.offsets)[rows] - 1  # the last token is only a target
        if len(rows) and lengths.max() > seq_len:
            row = rows[int(lengths.argmax())]
            raise DataError(
                f"{path}:{documents.lines[row]}: prompt and completion have {lengths.max()} "
                f"tokens, but --seq-len is {seq_len}: use --seq-len {lengths.max()} or shorten the "
                "record"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, indices: Tensor) -> Pair:
        documents = self._documents
        inputs = torch.full((len(indices), self.seq_len), self._end)
        targets = torch.full((len(indices), self.seq_len), IGNORED)
        for row, record in enumerate(self._rows[indices.numpy()]):
            begin, finish = documents.offsets[record], documents.offsets[record + 1]
            tokens = torch.from_numpy(documents.tokens[begin:finish].astype(np.int64))
            prompt, count = int(documents.prompts[record]), len(tokens) - 1
            inputs[row, :count] = tokens[:-1]
            # The target at position t is token t + 1. The first target is the completion's first
            # token, which follows the last token of the prompt.
            first = max(prompt - 1, 0)
            targets[row, first:count] = tokens[first + 1 :]
        return inputs, targets


def document_dataset(kind: str, path: Path, seq_len: int, tokenizer: Path | None) -> Dataset:
    """Return the dataset of your own documents; `kind` is text, jsonl or parquet.

    `tokenizer` is the folder of a Hugging Face tokenizer; None selects bytes. A folder with train
    and test (or val) parts has its own test set. Otherwise the test set is the last 5 %.
    """
    if kind == "text" and tokenizer is None:
        return byte_dataset(path, seq_len)  # any bytes, not only UTF-8
    encoder: Tokenizer = ByteTokenizer() if tokenizer is None else ModelTokenizer(tokenizer)
    parts = [part for part in parts_of(path, "" if kind == "text" else f".{kind}") if part]
    documents = [tokenize(kind, part, encoder) for part in parts]
    for part, read in zip(parts, documents, strict=True):
        if not len(read.lines):
            raise DataError(f"{part} has no records")
        if bool(len(read.prompts)) != bool(len(documents[0].prompts)):
            raise DataError(f"{part} has other fields than {parts[0]}: use the same fields in both")
    if not len(documents[0].prompts):
        return packed_dataset(str(path), [d.tokens for d in documents], seq_len, encoder.size)
    rows = [np.arange(len(read.lines)) for read in documents]
    if len(parts) == 1:
        held_out = max(1, round(len(rows[0]) * TEST_FRACTION))
        rows = [rows[0][:-held_out], rows[0][-held_out:]]
        parts, documents = parts * 2, documents * 2
    train, test = (
        CompletionSamples(read, chosen, seq_len, encoder.end, part)
        for read, chosen, part in zip(documents, rows, parts, strict=True)
    )
    return Dataset(path.name, train, test, vocabulary=encoder.size, padded=True)
