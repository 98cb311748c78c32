"""--expect, for every bench: after the results are out, what they miss, and the exit code."""

import sys
from typing import Any

from tutti.bench.expect import Source, expect, notes
from tutti.bench.table import print_line


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
        print_line(f"# missed: {miss}")
    if not misses:
        print_line(f"# --expect {source.name}: nothing is missed")
    return bool(misses)
