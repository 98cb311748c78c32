"""The run directory: everything needed to repeat a run, its results and its metrics."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.machine.environment import describe_environment
from tutti.measure.files import write_atomically
from tutti.models.pretrained import copy_side_files, split_source
from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.world.world import World


class RunDirectory:
    """The files of one run. Rank 0 writes the common files; each rank writes its metrics."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics"
        self.model = path / "model"  # files of --model hf:FOLDER, without weights

    def check(self, resume: bool) -> None:
        """Raise UsageError if the run exists (or, with `resume`, does not exist), or if the
        directory cannot be written. Nothing is changed on the disk.
        """
        try:
            self._check(resume)
        except OSError as error:  # a name that is too long, a directory that cannot be read
            reason = f"{error.strerror}: choose another directory"
            raise UsageError(f"--out {self.path}: {reason}") from None

    def _check(self, resume: bool) -> None:
        if resume and not (self.path / "recipe.toml").is_file():
            problem = " (it has no recipe.toml)" if self.path.is_dir() else ""
            raise UsageError(
                f"--resume: there is no run in {self.path}{problem}. Check --out, or leave out "
                "--resume to begin a run."
            )
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"--out {self.path} is a file: choose another directory")
        existing = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            problem = "cannot be written" if existing.is_dir() else "is a file"
            raise UsageError(f"--out {self.path}: {existing} {problem}: choose another directory")
        if not resume and self.path.exists() and any(self.path.iterdir()):
            raise UsageError(
                f"--out {self.path} exists and is not empty: add --resume to continue that run, or "
                "choose another directory"
            )

    def create(self) -> None:
        try:
            self.metrics.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"cannot be created ({error.strerror})"
            raise UsageError(f"--out {self.path} {reason}: choose another directory") from None

    def copy_model_files(self, model: str) -> None:
        """Copy the configuration and tokenizer of --model hf:FOLDER, so that exports have them."""
        source = split_source(model)
        if source and source[0] == "hf" and Path(source[1]).resolve() != self.model.resolve():
            try:
                copy_side_files(Path(source[1]), self.model)
            except OSError as error:
                raise UsageError(
                    f"{self.model} was not written: {error.strerror}: free space for --out, or "
                    "choose another directory"
                ) from None

    def write(self, name: str, content: str) -> None:
        try:
            write_atomically(self.path / name, content)
        except OSError as error:
            raise UsageError(
                f"{self.path / name} was not written: {error.strerror}. Free space for --out, or "
                "choose another directory."
            ) from None

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        self.write(name, json.dumps(content, indent=2) + "\n")

    def write_environment(self, world: "World", command: list[str]) -> None:
        """Write environment.json: command, machine, versions, world, and commit of the code."""
        self.write_json(
            "environment.json",
            {
                "schema": "tutti.environment/1",
                "command": command,
                "environment": describe_environment(),
                "world": {"size": world.size, "nodes": world.nodes, **world.row()},
                "git": _git_state(),
            },
        )


def _git_state() -> dict[str, Any] | None:
    """Return the git commit of the current directory, and whether files differ from it."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", *arguments], capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changes)}


class Metrics:
    """Writes one JSON line per step and rank to the run directory, and TensorBoard on request.

    A full disk does not end the training: lines that could not be written are written later.
    `failed` has the reasons why lines, or TensorBoard files, are missing.
    """

    def __init__(self, directory: Path, rank: int, tensorboard: Path | None = None) -> None:
        self.path = directory / f"rank{rank}.jsonl"
        self.failed: dict[str, str] = {}
        self._lines: list[str] = []
        self._board: Any = None
        if tensorboard is not None:
            try:  # all ranks import it, so that all ranks raise the same error
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UsageError(
                    "--tensorboard needs a package: pip install 'tutti-torch[tensorboard]'"
                ) from None
            if rank == 0:
                with self._tensorboard_errors():
                    self._board = SummaryWriter(str(tensorboard))

    def rewind(self, step: int) -> None:
        """Drop the lines of `step` and of later steps, which a resumed run writes again."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text().splitlines(keepends=True):
            # The last line may be cut off, because the process was killed.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if int(json.loads(line)["step"]) < step:
                    kept.append(line)
        try:
            write_atomically(self.path, "".join(kept))
        except OSError as error:
            reason = f"{error.strerror}. Free space for --out."
            raise UsageError(f"{self.path} was not written: {reason}") from None

    def add(self, step: int, **values: float | int | str | None) -> None:
        """Add a line. None means that a value is unknown."""
        line = {"step": step, "time": round(time.time(), 3), **values}
        self._lines.append(json.dumps(line) + "\n")
        if self._board is not None:
            with self._tensorboard_errors():
                for name, value in values.items():
                    if isinstance(value, (int, float)):
                        self._board.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write the added lines to the file; if that fails, keep them for the next call."""
        if not self._lines:
            return
        rest = "".join(self._lines).encode()
        try:
            with self.path.open("ab", buffering=0) as file:
                end = file.tell()
                try:
                    while rest:
                        rest = rest[file.write(rest) :]
                except OSError:
                    file.truncate(end)  # the next line must not follow a part of a line
                    raise
        except OSError as error:
            self.failed[str(self.path)] = error.strerror or str(error)
            return
        self._lines.clear()
        self.failed.pop(str(self.path), None)

    def close(self) -> None:
        self.flush()
        if self._board is not None:
            with self._tensorboard_errors():
                self._board.close()

    @contextlib.contextmanager
    def _tensorboard_errors(self) -> Iterator[None]:
        """If TensorBoard files cannot be written, record the reason and stop writing them."""
        try:
            yield
        except OSError as error:
            self.failed["TensorBoard files"] = error.strerror or str(error)
            self._board = None
