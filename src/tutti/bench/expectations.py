"""`--expect`: check bench results against the hardware catalogue, an earlier result or thresholds.

A threshold file contains rules. Each rule selects rows of the result and sets bounds for fields of
these rows:

    [[expect]]
    op = "all_reduce"
    backend = ["nccl", "shm"]     # rows with any of these backends
    bytes = "64M"                 # or a range: { min = "1M" }, { max = "1G" }
    busbw_gbs = { min = 350 }
    "time_us.p50" = { max = 400 }

A key with a value or a list selects the rows whose field has this value or one of the list's
values. A key with a table of `min`, `max` or both sets a bound. The `selectors` in
result_fields.toml, such as `bytes` and `ranks`, are an exception: a table for a selector selects
rows. A rule that can never match a row is reported as an error before the measurement. A rule that
matches no row of the present run counts as not met, because nothing was checked.
"""

import math
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tutti.bench import compare_results
from tutti.bench.collectives import BACKENDS
from tutti.bench.compare_results import RESULT_FIELDS, Content, Row, bench_of, rows_of, value_of
from tutti.machine.environment import describe_environment
from tutti.machine.gpus import visible_gpu_count
from tutti.machine.hardware_catalogue import figure
from tutti.measure.collective_bandwidth import OPERATIONS
from tutti.measure.units import parse_size
from tutti.world.errors import UsageError, did_you_mean

Rule = Mapping[str, Any]
AllowedValues = Mapping[str, Collection[str]]

# A measured bandwidth must reach this fraction of the published bandwidth. The fraction is below 1,
# because machines of the same kind differ in speed.
CATALOGUE_FRACTION = 0.8

_SELECTORS = RESULT_FIELDS["selectors"]
# {bench: {name of a list of rows in the JSON of the bench: fields of the rows}}
FIELDS: dict[str, dict[str, list[str]]] = {"collectives": {}, "bandwidth": {}, "pairs": {}}
for _rows in compare_results.ROW_LISTS:
    if _rows["bench"] in FIELDS:
        _fields = [*_rows["key"], *_rows["figures"], *_rows["others"]]
        FIELDS[_rows["bench"]][_rows["name"]] = _fields
# {bench: {text field: values that the field can have}}
ALLOWED_VALUES: dict[str, dict[str, Collection[str]]] = RESULT_FIELDS["allowed"]
ALLOWED_VALUES["collectives"] |= {"op": tuple(OPERATIONS), "backend": BACKENDS}

# ---- Reading --expect ----


class Expectation(NamedTuple):
    """The parsed value of --expect: the catalogue, or an earlier result, or rules.

    If `baseline` and `rules` are None, results are checked against the hardware catalogue.
    """

    name: str
    baseline: Content | None = None  # the content of an earlier result
    rules: list[Rule] | None = None  # the rules of a threshold file


def read_expectation(
    text: str, bench: str, device: str = "auto", allowed: AllowedValues | None = None
) -> Expectation:
    """Parse and check the value of --expect before the measurement.

    `device` is the value of --device. `allowed` maps text fields to the values that are possible in
    this run. An example is the field "name" with the names of pairs.
    """
    path = Path(text)
    if text == "catalogue":
        # bench bandwidth needs no catalogue figure, because it compares each link with similar
        # links. It can therefore be checked on CPUs, too.
        on_gpu = bench == "bandwidth" or (device != "cpu" and visible_gpu_count())
        if bench == "pairs" or not on_gpu:
            content = "the catalogue has only figures of links and of collectives on GPUs"
            raise UsageError(f"--expect catalogue: {content}. Give a JSON or TOML file")
        return Expectation(text)
    if path.suffix == ".json":
        baseline = compare_results.read_results("--expect", path, bench)
        return Expectation(text, baseline=baseline)
    rules = _read_rules(path)
    for number, rule in enumerate(rules, 1):
        try:
            _check_rule(rule, bench, {**ALLOWED_VALUES[bench], **(allowed or {})})
        except UsageError as error:
            raise UsageError(f"--expect {path}, rule {number}: {error}") from None
    return Expectation(text, rules=rules)


def _read_rules(path: Path) -> list[Rule]:
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not TOML ({error})"
        cure = "Give 'catalogue', a .json file that a bench wrote, or a .toml file with thresholds"
        raise UsageError(f"--expect {path}: {reason}. {cure}") from None
    rules = content.get("expect")
    tables = isinstance(rules, list) and all(isinstance(rule, dict) for rule in rules)
    if not rules or not tables or set(content) != {"expect"}:
        raise UsageError(f"--expect {path}: a threshold file must be a list of [[expect]] tables")
    return [dict(_flatten(rule)) for rule in rules]


def _flatten(rule: Rule) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each key in a rule. A key of a nested table gets a dotted name.

    The TOML parser reads an unquoted key `time_us.p50` as the key `p50` in a table `time_us`.
    """
    for name, value in rule.items():
        if isinstance(value, dict) and value and all(isinstance(e, dict) for e in value.values()):
            yield from ((f"{name}.{inner}", bound) for inner, bound in value.items())
        else:
            yield name, value


def _check_rule(rule: Rule, bench: str, allowed: AllowedValues) -> None:
    parts = FIELDS[bench]
    names = list(dict.fromkeys(["part", *(name for fields in parts.values() for name in fields)]))
    for name in rule:
        if name not in names:
            inner = [field for field in names if field.startswith(f"{name}.")]
            raise UsageError(f"bench {bench} has no {name!r}: {did_you_mean(name, inner or names)}")
    for name, value in rule.items():
        if name in RESULT_FIELDS["texts"]:
            _check_text(name, value, parts if name == "part" else allowed.get(name))
        else:
            _check_number(name, value)
    bounds = _bounds(rule)
    if not bounds:
        example = RESULT_FIELDS["example_bounds"][bench]
        raise UsageError(f"the rule has no bound. Add one, such as {example}")
    named_parts = _as_list(rule.get("part", list(parts)))
    selected = {name for name in rule if name not in bounds and name != "part"}
    matching = [parts[part] for part in parts if part in named_parts and selected <= {*parts[part]}]
    for name in bounds:
        if not any(name in fields for fields in matching):
            having = " and ".join(part for part, fields in parts.items() if name in fields)
            other = f"{name} is a field of {having}, but the other keys select other rows"
            raise UsageError(f"{other}: write two rules")


def _check_text(name: str, value: Any, allowed: Collection[str] | None) -> None:
    for text in _as_list(value):
        if not isinstance(text, str):
            raise UsageError(f"{name} = {_format(value)} must be a string or a list of strings")
        # In rows, the name of a backend may have a suffix, as in "gloo x16" and "shm ring".
        word = text.partition(" ")[0] if name == "backend" else text
        if allowed is not None and word not in allowed:
            raise UsageError(f"there is no {name} {text!r}: {did_you_mean(word, allowed)}")


def _check_number(name: str, value: Any) -> None:
    """Check that `value` is a number, a list of numbers, or a table with `min`, `max` or both."""
    is_bound = isinstance(value, dict)
    if is_bound and (not value or not set(value) <= {"min", "max"}):
        raise UsageError(f"{name} = {_format(value)} must have min, max or both")
    ends = value.items() if is_bound else [(None, number) for number in _as_list(value)]
    for end, number in ends:
        quoted = isinstance(number, str) and name != "bytes"
        try:
            valid = not isinstance(number, bool) and not quoted and not math.isnan(_number(number))
        except (ValueError, TypeError):
            valid = False
        if not valid:
            label = f"{name}.{end}" if is_bound else name
            cure = "64M or 1024" if name == "bytes" else "a number without quotes"
            raise UsageError(f"{label} = {number!r} is not a number. Write {cure}")
    if is_bound:
        if _number(value.get("min", -math.inf)) > _number(value.get("max", math.inf)):
            raise UsageError(f"{name}: no value is {_format(value)}. Exchange min and max")
    elif name not in (*_SELECTORS, *RESULT_FIELDS["other_integers"]):
        end = "max" if name == "wrong" or "us." in name else "min"
        bound = f"{name} = {{ {end} = {value} }}"
        raise UsageError(f"{name} = {_format(value)} is not a bound. Give one, such as {bound}")


def _bounds(rule: Rule) -> dict[str, dict[str, float]]:
    """Return the keys of a rule that set bounds. The other keys of the rule select rows."""
    tables = {name: value for name, value in rule.items() if isinstance(value, dict)}
    return {name: value for name, value in tables.items() if name not in _SELECTORS}


def _number(value: Any) -> float:
    """Return the value as a number. A size such as "64M" becomes a number of bytes."""
    return parse_size(value) if isinstance(value, str) else float(value)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _format(value: Any) -> str:
    """Return a value of a rule as text for messages."""
    if isinstance(value, dict):
        signs = {"min": "at least", "max": "at most"}
        return " and ".join(f"{signs.get(end, end)} {number}" for end, number in value.items())
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)


# ---- Checking results ----


def unmet_expectations(results: Content, expectation: Expectation) -> list[str]:
    """Return one description per expectation that the results do not meet.

    `results` is the JSON of a bench. The key `schema` is required, and the key `environment` is
    optional. Raises UsageError if nothing could be checked, because a run without any check must
    not pass.
    """
    if expectation.rules is not None:
        return [unmet for rule in expectation.rules for unmet in _check_against_rule(rule, results)]
    if expectation.baseline is not None:
        return _check_against_baseline(results, expectation.baseline, expectation.name)
    return _check_against_catalogue(results)


def baseline_differences(results: Content, expectation: Expectation) -> list[str]:
    """Return one description per difference between the environments of baseline and results."""
    if expectation.baseline is None:
        return []
    environment = results.get("environment") or describe_environment()
    results = {**results, "environment": environment}
    return compare_results.environment_differences(expectation.baseline, results)


def _check_against_rule(rule: Rule, results: Content) -> Iterator[str]:
    bounds = _bounds(rule)
    selection = {name: value for name, value in rule.items() if name not in bounds}
    checked = False
    for rows, row in rows_of(results):
        if not _matches(selection, rows["name"], row):
            continue
        for name, bound in bounds.items():
            value = value_of(row, name)
            if value is None:
                continue
            checked = True
            if not _within(value, bound):
                row_name = _row_name(row, selection)
                yield f"{row_name}: {name} is {value:g}, expected {name} {_format(bound)}"
    if not checked:
        selected = ", ".join(f"{name} {_format(value)}" for name, value in selection.items())
        names = ", ".join(bounds)
        yield f"{selected or 'every row'}: no row matches, so nothing was checked (bounds: {names})"


def _matches(selection: Mapping[str, Any], part: str, row: Row) -> bool:
    for name, selected in selection.items():
        value: Any = part if name == "part" else row.get(name)
        if isinstance(selected, dict):
            if value is None or not _within(value, selected):
                return False
        elif value not in [_number(e) if name == "bytes" else e for e in _as_list(selected)]:
            return False
    return True


def _within(value: float, bound: Mapping[str, Any]) -> bool:
    return _number(bound.get("min", value)) <= value <= _number(bound.get("max", value))


def _row_name(row: Row, selection: Mapping[str, Any]) -> str:
    names = ("op", "name", "kind", "backend", "src", "dst", "root", "rank", "bytes", *selection)
    return ", ".join(f"{name} {row[name]}" for name in dict.fromkeys(names) if name in row)


def _check_against_baseline(results: Content, baseline: Content, name: str) -> list[str]:
    changes = compare_results.compare(baseline, results)
    if not any(change.ratio is not None for change in changes):
        cure = "use the flags with which the file was measured"
        raise UsageError(f"--expect {name} has no row in common with this run: {cure}")
    unmet = []
    for change in changes:
        if change.verdict in ("slower", "wrong"):
            observed = f"{change.new:g}" if change.verdict == "slower" else "the result is wrong"
            expected = f"{change.old or 0:g} within {100 * (change.limit or 0):.0f} %"
            unmet.append(f"{change.name}, {change.metric}: {observed}, expected {expected}")
    return unmet


def _check_against_catalogue(results: Content) -> list[str]:
    gpu = _gpu_of_exclusive_node(results)
    unmet = list(_unmet_verdicts(results)) if bench_of(results) == "bandwidth" else []
    checked = 0
    for _, row in rows_of(results):
        # Rows of bench bandwidth with a verdict have been checked by _unmet_verdicts.
        checked += row.get("verdict", "unknown") != "unknown"
        if gpu is None or "busbw_gbs" not in row:
            continue
        published = figure(gpu, row["op"], row["bytes"], row["ranks"], row["timing"])
        if published is None:
            continue
        checked += 1
        if row["busbw_gbs"] < CATALOGUE_FRACTION * published.gbs:
            observed = f"{_row_name(row, {})}: busbw is {row['busbw_gbs']:g} GB/s"
            expected = f"{CATALOGUE_FRACTION:g} × {published.gbs:g} GB/s ({published.source})"
            unmet.append(f"{observed}, expected {expected}")
    if not checked:
        missing = f"the catalogue has no figure for this run on {gpu or 'this machine'}"
        raise UsageError(f"--expect catalogue: {missing}. Give an earlier result or thresholds")
    return unmet


def _unmet_verdicts(results: Content) -> Iterator[str]:
    """Yield one description per slow link and per slow copy of bench bandwidth."""
    for finding in results["findings"]:
        expected = f"{finding['against_gbs']:g}: {finding['against']}"
        yield f"{finding['what']}: {finding['gbs']:g} GB/s, expected {expected}"
    for row in results["copies"]:
        if row["verdict"] in ("degraded", "bad"):
            expected = (
                f"{CATALOGUE_FRACTION:g} × {row['expected_gbs']:g} ({row['expected_source']})"
            )
            yield f"rank {row['rank']}, {row['kind']}: {row['gbs']:g} GB/s, expected {expected}"


def _gpu_of_exclusive_node(results: Content) -> str | None:
    """Return the GPU model if all ranks are on one node and each rank has its own GPU, else None.

    If GPUs of several models are visible, the model is unknown and None is returned, too.
    """
    ranks = results.get("world", {}).get("ranks", [])
    environment = results.get("environment") or describe_environment()
    models = {gpu["name"] for gpu in environment.get("gpus", ())}
    on_gpus = bool(ranks) and all(str(rank["device"]).startswith("cuda") for rank in ranks)
    sharing = any(rank.get("ranks_on_device", 1) > 1 for rank in ranks)
    nodes = len({rank["node"] for rank in ranks})
    return models.pop() if on_gpus and len(models) == 1 and nodes == 1 and not sharing else None
