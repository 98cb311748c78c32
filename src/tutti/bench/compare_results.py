"""Compare two bench results, and find the differences that exceed the measurement spread.

A bench result is the JSON that `tutti bench --json` writes. A figure is one measured value of a
row. A figure is identified by its metric and by the key fields of its row. The spread of a figure
is its relative standard deviation (σ / value). The row has the statistics for the estimate: the
variation between calls for a time, between passes for a bandwidth, and between rounds for a pair.
"""

import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tutti.world.errors import UsageError

Content = dict[str, Any]
Row = dict[str, Any]
Key = tuple[tuple[str, Any], ...]

VERDICTS = ("wrong", "slower", "faster", "same", "new", "gone")
TOLERANCE = 0.05  # two runs on an otherwise idle machine differ by a few per cent
RESULT_FIELDS = tomllib.loads(Path(__file__).with_name("result_fields.toml").read_text())
# For many normally distributed samples: (p95 - min) / σ, (p99 - min) / σ, and (p75 - p25) / σ.
_SIGMAS_TO_P95, _SIGMAS_TO_P99 = 4.0, 5.0
_SIGMAS_BETWEEN_QUARTILES = 1.349


# One entry per list of rows in the JSON of a bench. In the JSON of `bench`, the list has the key
# `name`. result_fields.toml describes the other keys of an entry: `key`, `figures` and `others`.
ROW_LISTS: list[dict[str, Any]] = [
    {**table, "bench": bench, "name": name}
    for table in RESULT_FIELDS["lists"]
    for bench, name in (path.split(".") for path in table["in"])
]


# ---- Reading figures ----


class Figure(NamedTuple):
    """One measured value of a row."""

    name: str  # the names and values of the key fields
    metric: str
    value: float
    spread: float
    higher_is_better: bool
    wrong: bool


def read_results(flag: str, path: Path, bench: str | None = None) -> Content:
    """Return the bench result in the file `path`. Raise UsageError if the file has no such result.

    If `bench` is given, a result of a different bench is an error, too. `flag` is the command-line
    flag that error messages name.
    """
    cure = "Give a file that tutti bench --json wrote"
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}. {cure}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} {path}: the file is not JSON ({error}). {cure}") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema not in [f"tutti.bench.{rows['bench']}/1" for rows in ROW_LISTS]:
        found = "the file has no schema" if schema is None else f"the schema is {schema!r}"
        raise UsageError(f"{flag} {path}: {found}. {cure}")
    if bench not in (None, bench_of(content)):
        kinds = f"is a result of bench {bench_of(content)}, but this is bench {bench}"
        raise UsageError(f"{flag} {path} {kinds}: give a result of the same bench")
    if (problem := row_error(content)) is not None:
        raise UsageError(f"{flag} {path} {problem}. Measure again")
    return dict(content)


def row_error(content: Content) -> str | None:
    """Return why the rows of a result cannot be read, or None if they can be read."""
    try:
        check_types(content)
        return None if figures_of(content) else "has no figures"
    except KeyError as error:
        return f"has a row without the key {error}"
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        return f"has an invalid row ({error})"


def check_types(content: Content) -> None:
    """Raise TypeError if a field of a row is not a number, unless it is one of the text fields."""
    for rows, row in rows_of(content):
        for name in (*rows["key"], *rows["figures"], *rows["others"]):
            value = value_of(row, name)
            if name not in RESULT_FIELDS["texts"] and not isinstance(value, int | float | None):
                raise TypeError(f"{name} is {value!r}, expected a number")


def bench_of(content: Content) -> str:
    """Return the kind of bench: collectives, symmetric, bandwidth or pairs."""
    return str(content["schema"]).removeprefix("tutti.bench.").partition("/")[0]


def rows_of(content: Content) -> Iterator[tuple[dict[str, Any], Row]]:
    """Yield (entry of ROW_LISTS, row) for every row of the lists that ROW_LISTS names."""
    for rows in ROW_LISTS:
        if rows["bench"] == bench_of(content):
            yield from ((rows, row) for row in content.get(rows["name"]) or ())


def figures_of(content: Content) -> dict[tuple[Key, str], Figure]:
    """Return {(key of the row, metric): figure} for every figure of a result."""
    found: dict[tuple[Key, str], Figure] = {}
    for rows, row in rows_of(content):
        row_key: Key = () if rows["name"] == "rows" else (("part", rows["name"]),)
        # Leave a `group` of 1 out of the key, because older versions wrote no `group` field.
        named = ((name, row[name]) for name in rows["key"] if name in row)
        row_key += tuple(item for item in named if item != ("group", 1))
        if "ranks" not in row and "world" in content:
            row_key += (("ranks", content["world"]["size"]),)
        wrong = bool(row.get("wrong") or str(row.get("check", "")).startswith("different"))
        for metric, higher_is_better in rows["figures"].items():
            value = value_of(row, metric)
            if not isinstance(value, int | float) or value <= 0:
                continue
            key, repeat = row_key, 2
            while (key, metric) in found:  # number the rows that have equal keys
                key, repeat = (*row_key, ("again", repeat)), repeat + 1
            name = ", ".join(f"{field} {value}" for field, value in key)
            spread = _spread(row, metric)
            found[key, metric] = Figure(name, metric, float(value), spread, higher_is_better, wrong)
    return found


def value_of(row: Row, name: str) -> Any:
    """Return the value with a dotted name such as `time_us.p50`, or None if the row lacks it."""
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _spread(row: Row, metric: str) -> float:
    """Return the relative standard deviation (σ / value) of a figure."""
    if metric == "time_us.p50":
        times = row["time_us"]
        # One outlier inflates cv, but not the distance from min to p95.
        to_p95 = (times["p95"] - times["min"]) / times["p50"] / _SIGMAS_TO_P95
        return float(min(times["cv"], to_p95))
    if metric == "p50_us":
        return float((row["p99_us"] - row["min_us"]) / row["p50_us"] / _SIGMAS_TO_P99)
    spread = row["spread"]
    if isinstance(spread, dict):
        return float((spread["p75"] - spread["p25"]) / row[metric] / _SIGMAS_BETWEEN_QUARTILES)
    return float(spread)


# ---- Comparing two results ----


class Change(NamedTuple):
    """The comparison of one figure. The figure may be missing in the old or in the new result."""

    name: str
    metric: str
    old: float | None
    new: float | None
    spread_old: float | None
    spread_new: float | None
    ratio: float | None  # new speed / old speed
    limit: float | None  # a ratio between 1 / (1 + limit) and 1 + limit has the verdict "same"
    verdict: str


def compare(old: Content, new: Content, tolerance: float = TOLERANCE) -> list[Change]:
    """Return one Change per figure, in the order of the new result.

    Figures that are missing in the new result come last.
    """
    if bench_of(old) != bench_of(new):
        kinds = f"OLD is of bench {bench_of(old)}, but NEW is of bench {bench_of(new)}"
        raise UsageError(f"{kinds}: give two results of the same bench")
    before, after = figures_of(old), figures_of(new)
    changes = [_change(before.get(key), figure, tolerance) for key, figure in after.items()]
    gone = [_change(figure, None, tolerance) for key, figure in before.items() if key not in after]
    return changes + gone


def _change(old: Figure | None, new: Figure | None, tolerance: float) -> Change:
    name, metric, *_ = new or old or ("", "")
    ratio = limit = None
    verdict = "new" if old is None else "gone"
    if old is not None and new is not None:
        ratio = new.value / old.value if new.higher_is_better else old.value / new.value
        # Allow 2 σ of the difference between two independent figures, but at least `tolerance`.
        limit = max(tolerance, 2 * math.hypot(old.spread, new.spread))
        verdict = "faster" if ratio > 1 + limit else "slower" if ratio < 1 / (1 + limit) else "same"
        ratio, limit = round(ratio, 4), round(limit, 4)
    if new is not None and new.wrong:
        verdict = "wrong"
    old_value, new_value = (side.value if side else None for side in (old, new))
    spread_old, spread_new = (round(side.spread, 4) if side else None for side in (old, new))
    values = (old_value, new_value, spread_old, spread_new)
    return Change(name, metric, *values, ratio, limit, verdict)


def environment_differences(old: Content, new: Content) -> list[str]:
    """Return one description per difference between the environments of two results."""
    before, after = old.get("environment", {}), new.get("environment", {})
    found = []
    for name in ("host", "system", "cpu", "cpus", "cpu_quota", "memory_bytes"):
        if before.get(name) != after.get(name):
            found.append(f"{name}: {before.get(name)} → {after.get(name)}")
    gpus = [Counter(gpu["name"] for gpu in side.get("gpus", ())) for side in (before, after)]
    if gpus[0] != gpus[1]:
        counts = [", ".join(f"{n} × {name}" for name, n in side.items()) or "none" for side in gpus]
        found.append(f"gpus: {counts[0]} → {counts[1]}")
    for part in ("versions", "variables"):
        one, other = before.get(part, {}), after.get(part, {})
        for name in sorted({*one, *other}):
            if one.get(name) != other.get(name) and not name.startswith("TUTTI_"):
                found.append(f"{name}: {one.get(name, 'none')} → {other.get(name, 'none')}")
    for name, content in (("old", old), ("new", new)):
        if content.get("complete") is False:
            found.append(f"the {name} result was interrupted")
    return found
