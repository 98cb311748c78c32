"""A sweep: the same job with one flag at several values, in turns, at every size."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from tutti.measure.spread import percentile
from tutti.scale.job import Mode
from tutti.scale.measured import Measured
from tutti.scale.scaling import Scaling
from tutti.scale.table import note_lines, table, table_line
from tutti.world.errors import UsageError

# Quartiles of fewer say nothing of how far repeats spread.
_FEWEST_REPEATS = 3


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """Read `bucket-mb=1,5,25`: the flag without its dashes, and its values."""
    flag, equals, values = text.partition("=")
    flag = flag.strip().lstrip("-").replace("_", "-")
    listed = [value.strip() for value in values.split(",") if value.strip()]
    if not flag or not equals or len(listed) < 2:
        raise UsageError(
            f"--sweep {text}: a flag of tutti train and two values or more, as bucket-mb=1,5,25"
        )
    if len(set(listed)) != len(listed):
        raise UsageError(f"--sweep {text}: a value is there twice")
    return flag, listed


def sweep_rows(runs: Sequence[Measured], mode: Mode) -> list[dict[str, Any]]:
    """The rows of each value, with its flags; `best` where it wins beyond the spread.

    Efficiency is relative to the smallest size with the same value.
    """
    by_value: dict[str, list[Measured]] = {}
    for run in runs:
        by_value.setdefault(str(run.flags), []).append(run)
    rows = []
    for those in by_value.values():
        scaling = Scaling(those, mode)
        rows += [{"flags": those[0].flags, "unit": scaling.unit, **row} for row in scaling.rows()]
    for row in rows:
        row["best"] = _wins(row, runs, mode)
    return rows


def _wins(row: dict[str, Any], runs: Sequence[Measured], mode: Mode) -> bool:
    """Whether it is faster than each other value in three of four repeats, at its size.

    Of fewer than three repeats nothing is: one that is faster may be so by noise.
    """
    same = [run for run in runs if run.ranks == row["ranks"]]
    speed = Scaling(same, mode).throughput
    mine = {run.repeat: speed(run) for run in same if run.flags == row["flags"]}
    others = {str(run.flags) for run in same if run.flags != row["flags"]}
    for other in others:
        ratios = sorted(
            mine[run.repeat] / speed(run)
            for run in same
            if str(run.flags) == other and run.repeat in mine
        )
        if len(ratios) < _FEWEST_REPEATS or percentile(ratios, 25) <= 1:
            return False
    return bool(others)


def sweep_lines(
    rows: Sequence[dict[str, Any]], notes: Sequence[str], width: int = 80
) -> Iterator[str]:
    """One table: a block for each value."""
    if not rows:
        return
    head, _ = [*table(rows[:1], rows[0]["unit"], width)]
    yield head
    for before, row in pairwise([None, *rows]):
        assert row is not None
        if before is None or before["flags"] != row["flags"]:
            yield " ".join(f"--{flag} {value}" for flag, value in row["flags"].items())
        yield table_line(row, width)
    yield ""
    sizes = sorted({row["ranks"] for row in rows})
    for ranks in sizes:
        best = next((row for row in rows if row["ranks"] == ranks and row["best"]), None)
        where = f"at {ranks} rank{'s' * (ranks != 1)}"
        if any(row["ranks"] == ranks and row["repeats"] < _FEWEST_REPEATS for row in rows):
            yield (
                f"{where} no value is best: too few repeats tell no spread "
                f"(--repeats {_FEWEST_REPEATS})"
            )
        elif best is None:
            yield f"{where} no value is best beyond the spread of repeats"
        else:
            flags = " ".join(f"--{flag} {value}" for flag, value in best["flags"].items())
            yield f"{where} {flags} is best: ahead of every other in its quartiles"
    yield from note_lines(notes, width)
