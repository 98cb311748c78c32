"""--expect: check results of a bench against the catalogue, an earlier result, or thresholds.

A threshold file contains rules. Each rule selects rows and sets bounds for their values:

    [[expect]]
    op = "all_reduce"
    backend = ["nccl", "shm"]     # any of these
    bytes = "64M"                 # or { min = "1M" }, { max = … }
    busbw_gbs = { min = 350 }
    "time_us.p50" = { max = 400 }

A table with min or max selects rows if the field is bytes, ranks or another of the `selectors` in
result_fields.toml; for any other field the table is a bound. Any value other than a table selects
the rows with that value. A rule that cannot match a row of any run is an error in the file, which
is reported before anything is measured. A rule that matches no row of the present run counts as
unmet, because nothing was checked.
"""

import math
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.bench.collectives import BACKENDS
from tutti.bench.compare_results import (
    RESULT_FIELDS,
    ROW_LISTS,
    Content,
    Row,
    bench_of,
    compare,
    environment_differences,
    figures_of,
    read_results,
    rows_of,
    value_of,
)
from tutti.machine.environment import describe_environment
from tutti.machine.hardware_catalogue import figure
from tutti.measure.message_cost import OPERATIONS
from tutti.measure.units import parse_size
from tutti.world.errors import UsageError, did_you_mean

Rule = Mapping[str, Any]
AllowedValues = Mapping[str, Collection[str]]

# Fraction of a published figure that must be reached. Machines of the same kind differ in speed.
CATALOGUE_FRACTION = 0.8

_SELECTORS = RESULT_FIELDS["selectors"]
# {bench: {name of a list in its JSON: fields of the rows in that list}}
FIELDS = {
    bench: {e.name: (*e.key, *e.figures, *e.others) for e in ROW_LISTS if e.bench == bench}
    for bench in ("collectives", "bandwidth", "pairs")
}
# {bench: {text field: values that the field can have}}
ALLOWED_VALUES: dict[str, dict[str, tuple[str, ...]]] = {
    bench: {name: tuple(values) for name, values in allowed.items()}
    for bench, allowed in RESULT_FIELDS["allowed"].items()
}
ALLOWED_VALUES["collectives"] |= {"op": tuple(OPERATIONS), "backend": BACKENDS}

# ---- Reading --expect ----


@dataclass(frozen=True)
class Expectation:
    """The parsed argument of --expect.

    `baseline` is an earlier result, `rules` are those of a threshold file. Both are None if results
    are compared with the catalogue.
    """

    name: str
    baseline: Content | None = None
    rules: tuple[Rule, ...] | None = None


def read_expectation(text: str, bench: str, allowed: AllowedValues | None = None) -> Expectation:
    """Read and check --expect before anything is measured.

    `allowed` has more values that text fields can have in this run, such as the names of pairs.
    """
    path = Path(text)
    if text == "catalogue":
        if bench == "pairs":
            raise UsageError(
                "--expect catalogue: it has no speed-ups of pairs: give an earlier JSON or a TOML "
                "file of thresholds"
            )
        return Expectation(text)
    if path.suffix == ".json":
        return Expectation(text, baseline=_read_baseline(path, bench))
    return Expectation(text, rules=_read_rules(path, bench, allowed or {}))


def _read_baseline(path: Path, bench: str) -> Content:
    baseline = read_results("--expect", path)
    if bench_of(baseline) != bench:
        raise UsageError(
            f"--expect {path}: it is a result of bench {bench_of(baseline)}, this is bench "
            f"{bench}: give a result of the same bench"
        )
    try:
        if not figures_of(baseline):
            raise UsageError(f"--expect {path}: it has no figures: give a complete result")
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise UsageError(
            f"--expect {path}: its rows are not those of a bench ({error}): measure it again"
        ) from None
    return baseline


def _read_rules(path: Path, bench: str, allowed: AllowedValues) -> tuple[Rule, ...]:
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not TOML: {error}"
        raise UsageError(
            f"--expect {path}: {reason}: give catalogue, a .json that a bench wrote, or a .toml of "
            "thresholds"
        ) from None
    rules = content.get("expect")
    tables = isinstance(rules, list) and all(isinstance(rule, dict) for rule in rules)
    if not rules or not tables or set(content) != {"expect"}:
        raise UsageError(f"--expect {path}: a file of thresholds is a list of [[expect]] tables")
    rules = [dict(_flatten(rule)) for rule in rules]
    for number, rule in enumerate(rules, 1):
        try:
            _check_rule(rule, bench, {**ALLOWED_VALUES[bench], **allowed})
        except UsageError as error:
            raise UsageError(f"--expect {path}: rule {number}: {error}") from None
    return tuple(rules)


def _flatten(rule: Rule) -> Iterator[tuple[str, Any]]:
    """Restore dotted names, because TOML reads an unquoted time_us.p50 as a table in a table."""
    for name, value in rule.items():
        if isinstance(value, dict) and value and all(isinstance(e, dict) for e in value.values()):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())
        else:
            yield name, value


def _check_rule(rule: Rule, bench: str, allowed: AllowedValues) -> None:
    parts = FIELDS[bench]
    known = list(dict.fromkeys(["part", *(name for fields in parts.values() for name in fields)]))
    for name in rule:
        if name not in known:
            inner = [each for each in known if each.startswith(f"{name}.")]
            raise UsageError(f"bench {bench} has no {name!r}: {did_you_mean(name, inner or known)}")
    for name, value in rule.items():
        if name in RESULT_FIELDS["texts"]:
            _check_text(name, value, parts if name == "part" else allowed.get(name))
        else:
            _check_number(name, value)
    bounds = _bounds(rule)
    if not bounds:
        example = RESULT_FIELDS["example_bounds"][bench]
        raise UsageError(f"it has no bound: add one, such as {example}")
    named = _as_list(rule.get("part", list(parts)))
    selected = {name for name in rule if name not in bounds and name != "part"}
    matching = [parts[part] for part in parts if part in named and selected <= {*parts[part]}]
    for name in bounds:
        if not any(name in fields for fields in matching):
            having = " and ".join(part for part, fields in parts.items() if name in fields)
            raise UsageError(
                f"{name} is a field of {having}, which the other keys exclude: write two rules"
            )


def _check_text(name: str, value: Any, allowed: Collection[str] | None) -> None:
    for each in _as_list(value):
        if not isinstance(each, str):
            raise UsageError(f"{name} = {_format(value)}: write a string, or a list of strings")
        # In rows, the name of a backend may have a suffix: "gloo x16", "shm ring".
        word = each.partition(" ")[0] if name == "backend" else each
        if allowed is not None and word not in allowed:
            raise UsageError(f"no {name} {each!r}: {did_you_mean(word, allowed)}")


def _check_number(name: str, value: Any) -> None:
    """Check a number, a list of numbers, or a table with min, max or both."""
    is_range = isinstance(value, dict)
    if is_range and (not value or not set(value) <= {"min", "max"}):
        raise UsageError(f"{name} = {_format(value)}: a bound has min, max or both")
    for end, each in value.items() if is_range else ((None, each) for each in _as_list(value)):
        try:
            if isinstance(each, bool) or (isinstance(each, str) and name != "bytes"):
                raise ValueError
            if math.isnan(_number(each)):
                raise ValueError
        except (ValueError, TypeError):
            label = f"{name}.{end}" if is_range else name
            cure = "64M or 1024" if name == "bytes" else "a number without quotes"
            raise UsageError(f"{label} = {each!r} is not a number: write {cure}") from None
    if is_range:
        if _number(value.get("min", -math.inf)) > _number(value.get("max", math.inf)):
            raise UsageError(f"{name}: no value is {_format(value)}: exchange min and max")
    elif name not in (*_SELECTORS, *RESULT_FIELDS["other_integers"]):
        end = "max" if name == "wrong" or "us." in name else "min"
        raise UsageError(
            f"{name} = {_format(value)}: a measured value never equals a number: give a bound, "
            f"such as {name} = {{ {end} = {value} }}"
        )


def _bounds(rule: Rule) -> dict[str, dict[str, float]]:
    """Return the bounds of a rule. The other keys of the rule select rows."""
    return {
        name: value
        for name, value in rule.items()
        if isinstance(value, dict) and name not in _SELECTORS
    }


def _number(value: Any) -> float:
    """Return a number, or the bytes of a size such as 64M."""
    return parse_size(value) if isinstance(value, str) else float(value)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _format(value: Any) -> str:
    """Format a value of a rule for messages."""
    if isinstance(value, dict):
        signs = {"min": "at least", "max": "at most"}
        return " and ".join(f"{signs.get(end, end)} {each}" for end, each in value.items())
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)


# ---- Checking results ----


@dataclass(frozen=True)
class Unmet:
    """One expectation that a result does not meet."""

    what: str
    observed: str
    expected: str

    def __str__(self) -> str:
        return f"{self.what}: {self.observed}, expected {self.expected}"


def unmet_expectations(results: Content, expectation: Expectation) -> list[Unmet]:
    """Return the expectations that the results do not meet.

    `results` is the JSON of a bench with its schema; the environment may be missing. Raises
    UsageError if nothing could be checked, because a run without any check must not pass.
    """
    if expectation.rules is not None:
        return [unmet for rule in expectation.rules for unmet in _check_against_rule(rule, results)]
    if expectation.baseline is not None:
        return _check_against_baseline(results, expectation.baseline, expectation.name)
    return _check_against_catalogue(results)


def baseline_differences(results: Content, expectation: Expectation) -> list[str]:
    """Describe how the environment of the baseline differs from the environment of this run."""
    if expectation.baseline is None:
        return []
    environment = results.get("environment") or describe_environment()
    return environment_differences(expectation.baseline, {**results, "environment": environment})


def _check_against_rule(rule: Rule, results: Content) -> Iterator[Unmet]:
    bounds = _bounds(rule)
    selection = {name: value for name, value in rule.items() if name not in bounds}
    checked = 0
    for rows, row in rows_of(results):
        if not _matches(selection, rows.name, row):
            continue
        for name, bound in bounds.items():
            value = value_of(row, name)
            if value is None:
                continue
            checked += 1
            if not _within(value, bound):
                what, expected = _row_name(row, selection), f"{name} {_format(bound)}"
                yield Unmet(what, f"{name} is {value:g}", expected)
    if not checked:
        about = ", ".join(f"{name} {_format(value)}" for name, value in selection.items())
        expected = f"{', '.join(bounds)} of some row"
        yield Unmet(about or "every row", "no row matches, nothing was checked", expected)


def _matches(selection: Mapping[str, Any], part: str, row: Row) -> bool:
    for name, wanted in selection.items():
        value: Any = part if name == "part" else row.get(name)
        if isinstance(wanted, dict):
            if value is None or not _within(value, wanted):
                return False
        elif value not in [_number(e) if name == "bytes" else e for e in _as_list(wanted)]:
            return False
    return True


def _within(value: float, bound: Mapping[str, Any]) -> bool:
    return _number(bound.get("min", value)) <= value <= _number(bound.get("max", value))


def _row_name(row: Row, selection: Mapping[str, Any]) -> str:
    names = ("op", "name", "kind", "backend", "src", "dst", "root", "rank", "bytes", *selection)
    return ", ".join(f"{name} {row[name]}" for name in dict.fromkeys(names) if name in row)


def _check_against_baseline(results: Content, baseline: Content, name: str) -> list[Unmet]:
    changes = compare(baseline, results)
    if not any(change.ratio is not None for change in changes):
        raise UsageError(
            f"--expect {name}: it has no row in common with this run: use the flags that it was "
            "measured with"
        )
    return [
        Unmet(
            f"{change.name}, {change.metric}",
            "the result is wrong" if change.verdict == "wrong" else f"{change.new:g}",
            f"{change.old or 0:g} within {100 * (change.limit or 0):.0f} %",
        )
        for change in changes
        if change.verdict in ("slower", "wrong")
    ]


def _check_against_catalogue(results: Content) -> list[Unmet]:
    gpu = _gpu_of_exclusive_node(results)
    unmet = _unmet_verdicts(results) if bench_of(results) == "bandwidth" else []
    checked = 0
    for _, row in rows_of(results):
        # Pairs and copies of bench bandwidth already have a verdict.
        checked += row.get("verdict", "unknown") != "unknown"
        if gpu is None or "busbw_gbs" not in row:
            continue
        published = figure(gpu, row["op"], row["bytes"], row["ranks"], row["timing"])
        if published is None:
            continue
        checked += 1
        if row["busbw_gbs"] < CATALOGUE_FRACTION * published.gbs:
            expected = f"{CATALOGUE_FRACTION:g} × {published.gbs:g} GB/s ({published.source})"
            observed = f"busbw is {row['busbw_gbs']:g} GB/s"
            unmet.append(Unmet(_row_name(row, {}), observed, expected))
    if not checked:
        raise UsageError(
            f"--expect catalogue: it has no figure for this run on {gpu or 'this machine'}: give "
            "an earlier result or a file of thresholds"
        )
    return unmet


def _unmet_verdicts(results: Content) -> list[Unmet]:
    unmet = [
        Unmet(each["what"], f"{each['gbs']:g} GB/s", f"{each['against_gbs']:g}: {each['against']}")
        for each in results["findings"]
    ]
    for row in results["copies"]:
        if row["verdict"] in ("degraded", "bad"):
            what, observed = f"rank {row['rank']}, {row['kind']}", f"{row['gbs']:g} GB/s"
            published = f"{row['expected_gbs']:g} ({row['expected_source']})"
            unmet.append(Unmet(what, observed, f"{CATALOGUE_FRACTION:g} × {published}"))
    return unmet


def _gpu_of_exclusive_node(results: Content) -> str | None:
    """Return the GPU model if all ranks are on one node, each with its own GPU of this model."""
    ranks = results.get("world", {}).get("ranks", [])
    environment = results.get("environment") or describe_environment()
    models = {gpu["name"] for gpu in environment.get("gpus", ())}
    on_gpus = bool(ranks) and all(str(each["device"]).startswith("cuda") for each in ranks)
    sharing = any(each.get("ranks_on_device", 1) > 1 for each in ranks)
    nodes = len({each["node"] for each in ranks})
    return models.pop() if on_gpus and len(models) == 1 and nodes == 1 and not sharing else None
