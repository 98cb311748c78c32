"""--expect, for every bench: what it names, checked first; then what the results miss of it."""

import sys
from typing import Any

from tutti.bench.expect import Source, expect, notes, read_source
from tutti.bench.rules import Words
from tutti.machine.gpus import visible_gpu_count
from tutti.measure.terminal import print_line, print_note
from tutti.world.errors import UsageError


def expected(
    text: str | None, bench: str, device: str, words: Words | None = None
) -> Source | None:
    """What --expect names; refuses, before anything is measured, what no result could be held to.

    `device` is the flag's; `words` are texts in the rows of this run, such as the names of pairs.
    """
    if text is None:
        return None
    source = read_source("--expect", text, bench, words)
    # Of a CPU's links bandwidth judges by itself, each by its class.
    judged = text != "catalogue" or bench == "bandwidth"
    if not judged and (device == "cpu" or not visible_gpu_count()):
        raise UsageError(
            "--expect catalogue: it has figures of GPUs only, and ranks are on the CPU: give an "
            "earlier result or a file of thresholds"
        )
    return source


def check_plan(schema: str, planned: dict[str, Any], source: Source | None) -> None:
    """Refuse a baseline or a catalogue that has nothing of what is about to be measured.

    A rule that no row of this run fits is another matter: its file may serve several runs.
    """
    if source is not None and source.rules is None:
        expect({"schema": schema, **planned}, source)


def missed(schema: str, results: dict[str, Any], source: Source | None) -> bool:
    """Print what the results of a bench miss of --expect; whether they miss anything.

    `results` are what goes into the JSON. Call it when the world is closed: it raises UsageError
    where nothing could be checked.
    """
    if source is None:
        return False
    content = {"schema": schema, **results}
    for note in notes(content, source):
        print_line(f"--expect {source.name}: not the same as then: {note}", sys.stderr)
    misses = expect(content, source)
    for miss in misses:
        print_note(f"missed: {miss}")
    if not misses:
        print_note(f"--expect {source.name}: nothing is missed")
    return bool(misses)
