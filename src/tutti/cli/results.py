"""How every command writes its JSON: schema, command and environment around the results."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tutti.hardware.environment import describe_environment
from tutti.world.errors import UsageError


def write_json(path: Path, schema: str, results: dict[str, Any]) -> None:
    """Write results atomically: a reader sees the old file or the whole new one."""
    content = {
        "schema": schema,
        "command": ["tutti", *sys.argv[1:]],
        "environment": describe_environment(),
        **results,
    }
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(content, indent=2) + "\n")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"--json {path}: {error.strerror}: choose another file") from None
