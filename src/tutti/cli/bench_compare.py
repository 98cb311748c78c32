"""tutti bench compare: print the differences of two bench results that exceed their spread."""

import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tutti.bench.compare_results import (
    TOLERANCE,
    VERDICTS,
    Change,
    compare,
    environment_differences,
    read_results,
)
from tutti.cli.flags import parse
from tutti.cli.results import check_writable, write_json
from tutti.measure.terminal import print_line, print_note, terminal_width, wrap_line
from tutti.world.errors import UsageError

_FULL_WIDTH = 80


@dataclass(frozen=True)
class Compare:
    """Compare two results of a bench: tutti bench compare OLD.json NEW.json

    Rows are matched by their key fields. ratio is of speeds: above 1, the new result is faster. A
    row counts as faster or slower if the ratio differs from 1 by more than --tolerance and by more
    than twice the combined spread of both results.
    """

    old: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OLD")]
    """A file that --json of collectives, bandwidth, symmetric or pairs wrote."""
    new: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="NEW")]
    """A later file of the same bench."""
    show: Literal["changed", "all"] = "changed"
    """Rows to print: those that changed, or all."""
    fail_on: Literal["nothing", "slower"] = "nothing"
    """slower: exit with 1 if a row is slower or its result is wrong."""
    tolerance: float = TOLERANCE
    """Smaller relative differences count as the same: no two runs are equal."""
    json: Path | None = None
    """Also write the rows to this file."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Compare, "tutti bench compare", arguments)
    if not 0 <= options.tolerance < 1:
        raise UsageError(f"--tolerance {options.tolerance}: use a fraction such as 0.05")
    check_writable("--json", options.json)
    old, new = read_results("OLD", options.old), read_results("NEW", options.new)
    changes = compare(old, new, options.tolerance)
    differences = environment_differences(old, new)
    for difference in differences:
        print_line(f"tutti bench compare: other environment: {difference}", sys.stderr)
    counts = Counter(change.verdict for change in changes)
    if set(counts) <= {"new", "gone"}:
        raise UsageError(
            f"OLD and NEW have no row in common ({counts['gone']} in OLD alone, {counts['new']} in "
            "NEW alone): measure NEW with the flags of OLD"
        )
    _print(changes, options.show)
    if options.json is not None:
        results = {"rows": [asdict(each) for each in changes], "differences": differences}
        write_json(options.json, "tutti.bench.compare/1", results)
    return int(bool(counts["slower"] or counts["wrong"]) and options.fail_on == "slower")


def _print(changes: list[Change], show: str) -> None:
    shown = [each for each in changes if show == "all" or each.verdict != "same"]
    width = terminal_width(sys.stdout)
    spreads = width >= _FULL_WIDTH  # a narrow terminal has no space for spreads
    if shown:
        plus_minus = [f"{'±':>6}"] if spreads else []
        heads = [f"{'old':>10}", *plus_minus, f"{'new':>10}", *plus_minus, f"{'ratio':>7}"]
        print_line(" ".join([f"# {'verdict':<7}", *heads, "same within", " what"]))
    for each in sorted(shown, key=lambda each: VERDICTS.index(each.verdict)):
        cells = [f"  {each.verdict:<7}"]
        for value, spread in ((each.old, each.spread_old), (each.new, each.spread_new)):
            cells.append(f"{'' if value is None else f'{value:.5g}':>10}")
            cells += [f"{_percent(spread):>6}"] if spreads else []
        cells.append(f"{'' if each.ratio is None else f'{each.ratio:.3g}':>7}")
        cells.append(f"{_percent(each.limit):>11}")
        row, what = " ".join(cells), f"{each.metric}: {each.name}"
        if len(row) + 2 + len(what) <= width:
            print_line(f"{row}  {what}")
            continue
        print_line(row)
        for line in wrap_line(f"{'':10}{what}", width, " " * 10):
            print_line(line)
    counts = Counter(each.verdict for each in changes)
    print_note(", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name]))


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"
