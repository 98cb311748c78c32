"""The rows of a sweep as CSV: a column for each figure."""

import csv
from pathlib import Path
from typing import Any

from tutti.world.errors import UsageError


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows to a file; the parts of time_us are columns of their own."""
    flat = [
        {key: value for key, value in row.items() if key != "time_us"}
        | {f"time_us_{name}": value for name, value in row["time_us"].items()}
        for row in rows
    ]
    try:
        with path.open("w", newline="") as file:
            if flat:
                writer = csv.DictWriter(file, list(flat[0]))
                writer.writeheader()
                writer.writerows(flat)
    except OSError as error:
        raise UsageError(f"--csv {path}: {error.strerror}: choose another file") from None
