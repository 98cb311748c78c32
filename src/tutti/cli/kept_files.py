"""The files of a bench, up to date at any time: whatever ends it leaves what was measured."""

import sys
from pathlib import Path
from typing import Any

from tutti.bench.csv_rows import csv_text
from tutti.cli.results import write_json, write_whole
from tutti.measure.units import parse_sizes
from tutti.world.errors import UsageError


class KeptFiles:
    """What --json and --csv ask for, written again after every row.

    Nothing else is done at Ctrl-C, at kill -9 or when a rank dies. `complete` in the results is
    false until nothing is missing.
    """

    def __init__(self, schema: str, json: Path | None, csv: Path | None = None) -> None:
        self._schema = schema
        self._json = json
        self._csv = csv
        self._told = False

    def keep(self, results: dict[str, Any]) -> None:
        """Write what there is so far. A full disk does not end the measuring: it may have room
        again at the end."""
        try:
            self.write(results)
        except UsageError as error:
            if not self._told:
                print(f"note: {error}", file=sys.stderr, flush=True)
            self._told = True

    def write(self, results: dict[str, Any]) -> None:
        """Write the results; raises UsageError where that cannot be. The CSV is never behind."""
        if self._csv is not None:
            write_whole("--csv", self._csv, csv_text(results["rows"]))
        if self._json is not None:
            write_json(self._json, self._schema, results)


def sizes_flag(text: str) -> list[int]:
    """Parse --sizes; raises UsageError."""
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise UsageError(f"--sizes {text}: {error}") from None
