"""tutti bench compare: what changed between two results of a bench, beyond the spread."""

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tutti.bench.compare import TOLERANCE, VERDICTS, Change, compare, differences
from tutti.bench.measurements import read_results
from tutti.cli.flags import parse
from tutti.cli.results import check_writable, write_json
from tutti.measure.terminal import print_line, print_note, terminal_width, wrap_line
from tutti.world.errors import UsageError

_FULL_WIDTH = 80


@dataclass(frozen=True)
class Compare:
    """Compare two results of a bench: tutti bench compare OLD.json NEW.json

    Rows are matched by what identifies them. ratio is of speeds: above 1, the new one is faster. A
    row is faster or slower where the ratio is further from 1 than twice the scatter of both, and
    than --tolerance.
    """

    old: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OLD")]
    """What --json of collectives, bandwidth, symmetric or pairs wrote."""
    new: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="NEW")]
    """The same, later."""
    show: Literal["changed", "all"] = "changed"
    """Rows to print: those that changed, or all of them."""
    fail_on: Literal["nothing", "slower"] = "nothing"
    """Exit with 1 where a row is slower, or its result wrong."""
    tolerance: float = TOLERANCE
    """Differences below this part are none: two runs are never the same."""
    json: Path | None = None
    """Write the rows to this file, too."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Compare, "tutti bench compare", arguments)
    if not 0 <= options.tolerance < 1:
        raise UsageError(f"--tolerance {options.tolerance}: a part such as 0.05")
    check_writable("--json", options.json)
    old, new = read_results("OLD", options.old), read_results("NEW", options.new)
    changes = compare(old, new, options.tolerance)
    notes = differences(old, new)
    for note in notes:
        print_line(f"tutti bench compare: not the same in both: {note}", sys.stderr)
    if not any(change.verdict not in ("new", "gone") for change in changes):
        counts = Counter(change.verdict for change in changes)
        raise UsageError(
            f"OLD and NEW have no row in common ({counts['gone']} in OLD alone, {counts['new']} in "
            "NEW alone): make NEW with the flags OLD was made with"
        )
    _print(changes, options.show)
    if options.json is not None:
        results = {"rows": [each.row() for each in changes], "differences": notes}
        write_json(options.json, "tutti.bench.compare/1", results)
    failed = any(change.verdict in ("slower", "wrong") for change in changes)
    return int(failed and options.fail_on == "slower")


def _print(changes: list[Change], show: str) -> None:
    shown = [each for each in changes if show == "all" or each.verdict != "same"]
    width = terminal_width(sys.stdout)
    spreads = width >= _FULL_WIDTH  # a narrow terminal has no room for them
    if shown:
        one, other = ([f"{'±':>6}"] if spreads else [] for _ in range(2))
        heads = [f"{'old':>10}", *one, f"{'new':>10}", *other, f"{'ratio':>7}", "same within"]
        print_line(" ".join([f"# {'verdict':<7}", *heads, " what"]))
    for each in sorted(shown, key=lambda each: VERDICTS.index(each.verdict)):
        ratio = "" if each.ratio is None else f"{each.ratio:.3g}"
        limit = "" if each.limit is None else f"{100 * each.limit:.0f} %"
        one, other = (
            [f"{_part(spread):>6}"] if spreads else []
            for spread in (each.spread_old, each.spread_new)
        )
        cells = [f"  {each.verdict:<7}", f"{_value(each.old):>10}", *one]
        cells += [f"{_value(each.new):>10}", *other, f"{ratio:>7}", f"{limit:>11}"]
        row, what = " ".join(cells), f"{each.metric}: {each.name}"
        if len(row) + 2 + len(what) <= width:
            print_line(f"{row}  {what}")
            continue
        print_line(row)
        for line in wrap_line(f"{'':10}{what}", width, " " * 10):
            print_line(line)
    counts = Counter(each.verdict for each in changes)
    told = ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])
    print_note(told)


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _part(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"
