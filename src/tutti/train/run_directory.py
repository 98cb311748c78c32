"""The run directory: everything needed to repeat a run, and all results of the run."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tutti.machine.environment import describe_environment
from tutti.measure.files import write_atomically
from tutti.world.errors import UsageError
from tutti.world.world import World


class RunDirectory:
    """The files of one run. Rank 0 writes the common files, each rank its own metrics."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics"

    def check(self, resume: bool) -> None:
        """Refuse to overwrite a run, or to resume one that does not exist. Changes nothing."""
        if resume and not self.path.is_dir():
            raise UsageError(f"--resume: there is no run in {self.path}: check --out")
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"--out {self.path} is a file: choose another")
        if not resume and self.path.exists() and any(self.path.iterdir()):
            raise UsageError(
                f"--out {self.path} exists and is not empty: add --resume to continue that run, or "
                "choose another directory"
            )

    def create(self) -> None:
        try:
            self.metrics.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {self.path}: {error.strerror}: choose another") from None

    def write(self, name: str, content: str) -> None:
        write_atomically(self.path / name, content)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        self.write(name, json.dumps(content, indent=2) + "\n")

    def write_environment(self, world: World, command: list[str]) -> None:
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
                ["git", *words], capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changes)}
