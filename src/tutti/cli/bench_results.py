"""What the benches share: --json and --csv written after every row, --sizes, --expect."""

import sys
from pathlib import Path
from typing import Any

from tutti.bench.csv_rows import csv_text
from tutti.bench.expect import Source, expect, notes, read_source
from tutti.bench.rules import Words
from tutti.cli.results import write_json, write_result
from tutti.machine.gpus import visible_gpu_count
from tutti.measure.terminal import print_line, print_note
from tutti.measure.units import parse_sizes
from tutti.world.errors import UsageError


class ResultFiles:
    """The files of --json and --csv, written again after every row.

    So Ctrl-C, kill -9 or the death of a rank loses no measured row. `complete` in the results is
    false until everything is measured.
    """

    def __init__(self, schema: str, json: Path | None, csv: Path | None = None) -> None:
        self._schema = schema
        self._json = json
        self._csv = csv
        self._failed = False

    def update(self, results: dict[str, Any]) -> None:
        """Write the results so far. A full disk is noted once and does not end the measurement."""
        try:
            self.write(results)
        except UsageError as error:
            if not self._failed:
                print(f"note: {error}", file=sys.stderr, flush=True)
            self._failed = True

    def write(self, results: dict[str, Any]) -> None:
        """Write the results, CSV first; raises UsageError if a file cannot be written."""
        if self._csv is not None:
            write_result("--csv", self._csv, csv_text(results["rows"]))
        if self._json is not None:
            write_json(self._json, self._schema, results)


def sizes_flag(text: str) -> list[int]:
    """Parse --sizes; raises UsageError."""
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise UsageError(f"--sizes {text}: {error}") from None


# -- --expect --------------------------------------------------------------------------------------


def read_expectation(
    text: str | None, bench: str, device: str, words: Words | None = None
) -> Source | None:
    """Read the baseline, catalogue or thresholds of --expect, before anything is measured.

    `device` is the value of --device; `words` are the possible texts in the rows of this run, such
    as the names of pairs.
    """
    if text is None:
        return None
    source = read_source("--expect", text, bench, words)
    # The catalogue has figures of GPUs; only bandwidth also classifies the links of CPUs.
    needs_gpu = text == "catalogue" and bench != "bandwidth"
    if needs_gpu and (device == "cpu" or not visible_gpu_count()):
        raise UsageError(
            "--expect catalogue: the catalogue has only figures of GPUs, and ranks are on the CPU: "
            "give an earlier result or a file of thresholds"
        )
    return source


def check_expectation(schema: str, planned: dict[str, Any], source: Source | None) -> None:
    """Refuse a baseline or catalogue without any of the planned rows.

    Thresholds are not refused: one file may serve several runs.
    """
    if source is not None and source.rules is None:
        expect({"schema": schema, **planned}, source)


def report_misses(schema: str, results: dict[str, Any], source: Source | None) -> bool:
    """Print the rows that miss --expect; returns whether there are any.

    `results` is the content of --json. Call it after the world is closed: raises UsageError if no
    row could be checked.
    """
    if source is None:
        return False
    content = {"schema": schema, **results}
    for note in notes(content, source):
        print_line(f"--expect {source.name}: conditions differ: {note}", sys.stderr)
    misses = expect(content, source)
    for miss in misses:
        print_note(f"missed: {miss}")
    if not misses:
        print_note(f"--expect {source.name}: every row meets it")
    return bool(misses)
