"""tutti bench compare: print the rows of two bench results that differ by more than the spread."""

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from tutti.bench import compare_results
from tutti.bench.compare_results import TOLERANCE, VERDICTS, Change, read_results
from tutti.cli.flags import InputFile, OutputFile, parse
from tutti.cli.results import write_json
from tutti.measure.terminal import print_line, print_note, terminal_width, wrap_line
from tutti.world.errors import UsageError

_FULL_WIDTH = 80


@dataclass(frozen=True)
class Compare:
    """Compare two result files of the same bench: tutti bench compare OLD.json NEW.json

    Two rows are compared if they measured the same case, for example the same operation, backend
    and message size. The ratio is new speed / old speed. A ratio above 1 means that the new result
    is faster. A row counts as faster or slower if its ratio differs from 1 by more than --tolerance
    and by more than twice the combined spread of both results.
    """

    old: Annotated[tyro.conf.Positional[InputFile], tyro.conf.arg(metavar="OLD")]
    """A JSON file that `collectives`, `bandwidth`, `symmetric` or `pairs` wrote with --json."""
    new: Annotated[tyro.conf.Positional[InputFile], tyro.conf.arg(metavar="NEW")]
    """A JSON file of a later run of the same bench."""
    show: Literal["changed", "all"] = "changed"
    """Rows to print: rows that changed, or all rows."""
    fail_on: Literal["nothing", "slower"] = "nothing"
    """`slower`: exit with code 1 if a row is slower or its results are wrong. `nothing`: always
    exit with code 0."""
    tolerance: float = TOLERANCE
    """Speeds that differ by at most this fraction count as the same, because the speeds of two runs
    are never exactly equal."""
    json: OutputFile | None = None
    """Also write the rows to this JSON file."""


def main(arguments: list[str]) -> int:
    options = parse(Compare, "tutti bench compare", arguments)
    if not 0 <= options.tolerance < 1:
        raise UsageError(f"--tolerance must be at least 0 and below 1, got {options.tolerance}")
    old, new = read_results("OLD", options.old), read_results("NEW", options.new)
    changes = compare_results.compare(old, new, options.tolerance)
    differences = compare_results.environment_differences(old, new)
    for difference in differences:
        print_line(f"tutti bench compare: the environment differs ({difference})", sys.stderr)
    counts = Counter(change.verdict for change in changes)
    if set(counts) <= {"new", "gone"}:
        rows = f"{counts['gone']} in OLD alone, {counts['new']} in NEW alone"
        raise UsageError(
            f"the files have no row in common ({rows}). Measure NEW with the flags of OLD."
        )
    _print([change for change in changes if options.show == "all" or change.verdict != "same"])
    print_note(", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name]))
    if options.json is not None:
        results = {"rows": [change._asdict() for change in changes], "differences": differences}
        write_json(options.json, "tutti.bench.compare/1", results)
    return int(bool(counts["slower"] or counts["wrong"]) and options.fail_on == "slower")


def _print(changes: list[Change]) -> None:
    width = terminal_width()
    # A narrow terminal has no space for the columns of the spreads.
    columns = [f"{'old':>10}", f"{'±':>6}", f"{'new':>10}", f"{'±':>6}", f"{'ratio':>7}"]
    shown = [0, 1, 2, 3, 4] if width >= _FULL_WIDTH else [0, 2, 4]
    if changes:
        heads = [columns[position] for position in shown]
        print_line(" ".join([f"# {'verdict':<7}", *heads, "same within", " figure"]))
    for change in sorted(changes, key=lambda change: VERDICTS.index(change.verdict)):
        old, new = ("" if v is None else f"{v:.5g}" for v in (change.old, change.new))
        spread_old, spread_new, limit = (
            "" if value is None else f"{100 * value:.0f} %"
            for value in (change.spread_old, change.spread_new, change.limit)
        )
        ratio = "" if change.ratio is None else f"{change.ratio:.3g}"
        cells = [f"{old:>10}", f"{spread_old:>6}", f"{new:>10}", f"{spread_new:>6}", f"{ratio:>7}"]
        cells = [cells[position] for position in shown]
        row = " ".join([f"  {change.verdict:<7}", *cells, f"{limit:>11}"])
        what = f"{change.metric}: {change.name}"
        if len(row) + 2 + len(what) <= width:
            print_line(f"{row}  {what}")
            continue
        print_line(row)
        for line in wrap_line(f"{'':10}{what}", width, " " * 10):
            print_line(line)
