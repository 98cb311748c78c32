"""The one file of results: text of all ranks, in order, whole under its name or not there."""

import os
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from tutti.world.errors import UsageError


class ResultFile:
    """A file that gets its name when it is complete: `with ResultFile(path) as f: f.write(…)`.

    Until then it lies beside, as `.NAME.PID.partial`, and goes when the writing ends early. Only a
    process that is killed on the spot leaves it there; nothing takes it for a result.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._beside.open("wb")
        except OSError as error:
            raise self._mistake(error) from None

    def write(self, text: bytes) -> None:
        """Add to the end."""
        try:
            self._file.write(text)
        except OSError as error:
            raise self._mistake(error) from None

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._beside.replace(self.path)
        except OSError as problem:
            raise self._mistake(problem) from None
        finally:
            self._beside.unlink(missing_ok=True)
            self._file.close()

    def _mistake(self, error: OSError) -> UsageError:
        return UsageError(f"--out {self.path}: {error.strerror or error}: choose another file")


def gather_text(text: str) -> list[bytes] | None:
    """Every rank's text on rank 0, in the order of ranks; None on the others."""
    content = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)[:-1]
    length = torch.tensor([len(content)])
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    padded = torch.zeros(max(1, *map(int, lengths)), dtype=torch.uint8)
    padded[: len(content)] = content
    if dist.get_rank() != 0:
        dist.gather(padded, dst=0)
        return None
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.gather(padded, parts, dst=0)
    return [bytes(part[: int(n)].numpy()) for part, n in zip(parts, lengths, strict=True)]
