"""The file of predictions: the text of all ranks in order, complete under its name or absent."""

import os
from pathlib import Path
from types import TracebackType

import torch

from tutti import comm
from tutti.world.errors import UsageError


class PredictionFile:
    """A file that gets its name when it is complete: `with PredictionFile(path) as f: f.write(…)`.

    Until then its name is `.NAME.PID.partial`; an exception removes it. Only a process that is
    killed leaves it behind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("wb")
        except OSError as error:
            raise self._usage_error(error) from None

    def write(self, text: bytes) -> None:
        """Append text."""
        try:
            self._file.write(text)
        except OSError as error:
            raise self._usage_error(error) from None

    def __enter__(self) -> "PredictionFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._partial.replace(self.path)
        except OSError as problem:
            raise self._usage_error(problem) from None
        finally:
            self._partial.unlink(missing_ok=True)
            self._file.close()

    def _usage_error(self, error: OSError) -> UsageError:
        return UsageError(f"--out {self.path}: {error.strerror or error}: choose another file")


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
