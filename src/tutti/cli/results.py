"""How every command writes its JSON: schema, command and environment around the results."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tutti.machine.environment import describe_environment
from tutti.world.errors import UsageError


def check_writable(flag: str, path: Path | None) -> None:
    """Refuse a result file that cannot be written, before anything is measured."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(0, "it is a directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(0, "no permission to write it")
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}: choose another file") from None


def write_json(path: Path, schema: str, results: dict[str, Any]) -> None:
    """Write results atomically."""
    content = {
        "schema": schema,
        "command": ["tutti", *sys.argv[1:]],
        "environment": results.get("environment") or describe_environment(),
        **results,
    }
    write_whole("--json", path, json.dumps(content, indent=2) + "\n")


def write_whole(flag: str, path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old one or the whole new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"{flag} {path}: {error.strerror}: choose another file") from None
