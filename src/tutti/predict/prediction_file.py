"""The file of predictions: the text of all ranks in order, complete under its name or absent."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tutti import comm
from tutti.world.errors import UsageError


@contextmanager
def prediction_file(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Open a file that gets its name when it is complete; yields a function that appends to it.

    Until then its name is `.NAME.PID.partial`; an exception removes it. Only a process that is
    killed leaves it behind.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with _errors_of(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = partial.open("wb")

    def write(text: bytes) -> None:
        with _errors_of(path):
            file.write(text)

    try:
        yield write
        with _errors_of(path):
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
        file.close()


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--out {path}: {reason}: choose another file") from None


def gather_text(text: str) -> list[bytes]:
    """Gather every rank's text on rank 0, in rank order; the other ranks get an empty list."""
    content = text.encode()
    lengths: list[int] = comm.gather_json(len(content))
    padded = bytearray(max(1, *lengths))
    padded[: len(content)] = content
    gathered = comm.gather(torch.frombuffer(padded, dtype=torch.uint8))
    if gathered is None:
        return []
    rows = gathered.view(len(lengths), -1).numpy()
    return [bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]
