"""Run: a directory with all that is needed to repeat a run, and all that it gave."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tutti.machine.environment import describe_environment
from tutti.world.errors import UsageError
from tutti.world.world import World


class RunDirectory:
    """The files of one run. Rank 0 writes what is common, each rank its own metrics."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics"

    def check(self, resume: bool) -> None:
        """Refuse what would overwrite, or a run to resume that is not there. Changes nothing."""
        if resume and not self.path.is_dir():
            raise UsageError(f"--resume: there is no run in {self.path}: check --out")
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"--out {self.path} is a file: choose another")
        if not resume and self.path.exists() and any(self.path.iterdir()):
            raise UsageError(
                f"--out {self.path} exists and is not empty: add --resume to go on with it, or "
                "choose another"
            )

    def create(self) -> None:
        """Make the directory."""
        try:
            self.metrics.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {self.path}: {error.strerror}: choose another") from None

    def write(self, name: str, content: str) -> None:
        """Write a file whole or not at all."""
        beside = self.path / f".{name}.{os.getpid()}"
        beside.write_text(content)
        beside.replace(self.path / name)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file whole or not at all."""
        self.write(name, json.dumps(content, indent=2) + "\n")

    def write_environment(self, world: World, command: list[str]) -> None:
        """What the run was made on: machine, versions, world, and the state of the code."""
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
    """The commit of the code in the current directory, and whether it was changed since."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(_git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
