"""Functions for all commands: result files, and errors of all ranks that only rank 0 prints."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.machine.environment import describe_environment
from tutti.measure.files import write_atomically
from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.world.world import World


def check_writable(flag: str, path: Path | None) -> None:
    """Raise UsageError if a result file cannot be written. Called before ranks are started."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(0, "is a directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(0, "no permission to write, or a read-only file system")
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}: choose another file") from None


def write_json(path: Path, schema: str, results: dict[str, Any]) -> None:
    """Write the file of --json: schema, command line, environment and results."""
    content = {
        "schema": schema,
        "command": ["tutti", *sys.argv[1:]],
        "environment": results.get("environment") or describe_environment(),
        **results,
    }
    write_result("--json", path, json.dumps(content, indent=2) + "\n")


def write_result(flag: str, path: Path, text: str) -> None:
    """Write a result file atomically. Raises UsageError, with the name of the flag, on failure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}: choose another file") from None


@contextmanager
def usage_error_on_rank_0(world: "World") -> Iterator[None]:
    """Handle a UsageError that every rank raises.

    All ranks leave the world. Then rank 0 raises the error again, and the others exit with code 2.
    """
    try:
        yield
    except UsageError:
        world.close()
        if world.is_first:
            raise
        raise SystemExit(2) from None


def join_world(options: Any, **more: Any) -> "World":
    """Join the world with --device, --ranks-per-gpu, --start-timeout and --timeout."""
    from tutti.world.world import init

    shared = options.ranks_per_gpu if options.ranks_per_gpu > 1 else None
    timeouts = {"start_timeout": options.start_timeout, "timeout": options.timeout}
    return init(device=options.device, ranks_per_gpu=shared, **timeouts, **more)
