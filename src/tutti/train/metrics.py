"""Metrics: one JSON line per step and rank in the run directory, and TensorBoard on request."""

import json
import time
from pathlib import Path
from typing import IO, Any

from tutti.world.errors import UsageError


class Metrics:
    """Writes what is measured; a run that is resumed first drops what was after its checkpoint."""

    def __init__(self, directory: Path, rank: int, tensorboard: Path | None = None) -> None:
        self.path = directory / f"rank{rank}.jsonl"
        self._file: IO[str] | None = None
        self._board: Any = None
        if tensorboard is not None:
            try:  # on every rank, so that all of them refuse alike
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UsageError(
                    "--tensorboard: the package is missing: pip install 'tutti-torch[tensorboard]'"
                ) from None
            if rank == 0:
                self._board = SummaryWriter(str(tensorboard))

    def rewind(self, step: int) -> None:
        """Keep the lines of steps before `step` only: the run goes on from there."""
        if not self.path.exists():
            return
        kept = [line for line in self.path.read_text().splitlines() if _step_of(line) < step]
        beside = self.path.with_suffix(".new")
        beside.write_text("".join(f"{line}\n" for line in kept))
        beside.replace(self.path)

    def write(self, step: int, **values: float | int | str | None) -> None:
        """Add a line; None is what is not known."""
        if self._file is None:
            self._file = self.path.open("a")
        line = {"step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(line) + "\n")
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(name, value, step)

    def flush(self) -> None:
        """Make what was written readable to others."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line cut off by a kill
        return 1 << 62
