"""--expect: turn a bench into a check, by the catalogue, an earlier result, or thresholds.

A file of thresholds has rules; each says which rows it is about, and bounds for their values:

    [[expect]]
    op = "all_reduce"
    backend = ["nccl", "shm"]     # any of these
    bytes = "64M"                 # or { min = "1M" }, { max = … }
    busbw_gbs = { min = 350 }
    "time_us.p50" = { max = 400 }

A table with min or max bounds a value, `bytes` and `ranks` in a table choose rows, and everything
else must be equal. A rule that no row can ever fit is a mistake in the file (rules.py); one that no
row of this run fits is missed: it checked nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.bench.compare import compare, differences
from tutti.bench.measurements import (
    Content,
    Row,
    kind_of,
    measurements,
    read_results,
    rows_of,
    value_of,
)
from tutti.bench.rules import Rule, Words, bounds, number_of, read_rules, text_of
from tutti.machine.environment import describe_environment
from tutti.machine.hardware_catalogue import figure
from tutti.world.errors import UsageError

# What a published figure is held against: other machines of a kind are not equal to the digit.
CATALOGUE_PART = 0.8


@dataclass(frozen=True)
class Source:
    """What --expect named, read: the catalogue, an earlier result, or rules."""

    name: str
    baseline: Content | None = None
    rules: tuple[Rule, ...] | None = None


@dataclass(frozen=True)
class Miss:
    """One expectation that was not met."""

    what: str
    observed: str
    expected: str

    def __str__(self) -> str:
        return f"{self.what}: {self.observed}, expected {self.expected}"


def read_source(flag: str, text: str, bench: str, words: Words | None = None) -> Source:
    """Read and check what --expect names, before anything is measured.

    `bench` is the kind that is about to measure; `words` are texts in rows that it alone knows.
    """
    path = Path(text)
    if text == "catalogue":
        if bench == "pairs":
            raise UsageError(
                f"{flag} catalogue: nobody has published speed-ups of pairs: give an earlier JSON "
                "or a file of thresholds"
            )
        return Source(text)
    if path.suffix == ".json":
        return Source(text, baseline=_read_baseline(flag, path, bench))
    return Source(text, rules=read_rules(flag, path, bench, words or {}))


def _read_baseline(flag: str, path: Path, bench: str) -> Content:
    baseline = read_results(flag, path)
    if kind_of(baseline) != bench:
        raise UsageError(
            f"{flag} {path}: it is a result of bench {kind_of(baseline)}, and this is bench "
            f"{bench}: give one of the same bench"
        )
    try:
        figures = measurements(baseline)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise UsageError(
            f"{flag} {path}: its rows are not as a bench writes them ({error}): measure it again"
        ) from None
    if not figures:
        raise UsageError(f"{flag} {path}: it has no figures: give a result that has")
    return baseline


def expect(results: Content, source: Source) -> list[Miss]:
    """What the results of a bench miss of what was expected; empty where all is met.

    `results` are what the bench writes as JSON, with its schema; the environment may be missing.
    Raises UsageError where nothing could be held against anything: that is no pass.
    """
    if source.rules is not None:
        return [miss for rule in source.rules for miss in _missed_rule(rule, results)]
    if source.baseline is not None:
        return _missed_baseline(results, source.baseline, source.name)
    return _missed_catalogue(results)


def notes(results: Content, source: Source) -> list[str]:
    """Why a baseline may not be one for this run: it is of another machine, say."""
    if source.baseline is None:
        return []
    environment = results.get("environment") or describe_environment()
    return differences(source.baseline, {**results, "environment": environment})


# ---- Rules ----


def _missed_rule(rule: Rule, results: Content) -> Iterator[Miss]:
    asked = bounds(rule)
    chosen = {name: value for name, value in rule.items() if name not in asked}
    rows = [(part, row) for part, row in rows_of(results) if _fits(chosen, part, row)]
    about = ", ".join(f"{name} {text_of(value)}" for name, value in chosen.items()) or "every row"
    checked = 0
    for _, row in rows:
        for name, bound in asked.items():
            value = value_of(row, name)
            if value is None:
                continue
            checked += 1
            low, high = bound.get("min"), bound.get("max")
            if (low is not None and value < low) or (high is not None and value > high):
                yield Miss(_name(row, chosen), f"{name} is {value:g}", f"{name} {text_of(bound)}")
    if not checked:
        yield Miss(about, "no row fits, nothing was checked", f"{', '.join(asked)} of some row")


def _fits(chosen: Mapping[str, Any], part: str, row: Row) -> bool:
    for name, wanted in chosen.items():
        value: Any = part if name == "part" else row.get(name)
        if isinstance(wanted, dict):
            ends = {end: number_of(each) for end, each in wanted.items()}
            if value is None or not ends.get("min", value) <= value <= ends.get("max", value):
                return False
            continue
        options = wanted if isinstance(wanted, list) else [wanted]
        if name == "bytes":
            options = [number_of(each) for each in options]
        if value not in options:
            return False
    return True


def _name(row: Row, chosen: Mapping[str, Any]) -> str:
    names = ("op", "name", "kind", "backend", "src", "dst", "root", "rank", "bytes")
    shown = [name for name in names if name in row]
    shown += [name for name in chosen if name in row and name not in shown]
    return ", ".join(f"{name} {row[name]}" for name in shown)


# ---- A baseline ----


def _missed_baseline(results: Content, baseline: Content, name: str) -> list[Miss]:
    changes = compare(baseline, results)
    if not any(change.ratio is not None for change in changes):
        raise UsageError(
            f"--expect {name}: nothing that is measured here is in it: use the flags it was made "
            "with"
        )
    return [
        Miss(
            f"{change.name}, {change.metric}",
            "the result is wrong" if change.verdict == "wrong" else f"{change.new:g}",
            f"{change.old or 0:g} within {100 * (change.limit or 0):.0f} %",
        )
        for change in changes
        if change.verdict in ("slower", "wrong")
    ]


# ---- The catalogue ----


def _missed_catalogue(results: Content) -> list[Miss]:
    device, nodes, sharing = _setting(results)
    missed, judged = _missed_verdicts(results)
    for _, row in rows_of(results):
        if device is None or "busbw_gbs" not in row or nodes > 1 or sharing:
            continue
        known = figure(device, row["op"], row["bytes"], row["ranks"], row["timing"])
        if known is None:
            continue
        judged += 1
        if row["busbw_gbs"] < CATALOGUE_PART * known.gbs:
            least = f"{CATALOGUE_PART:g} × {known.gbs:g} GB/s ({known.source})"
            missed.append(Miss(_name(row, {}), f"busbw is {row['busbw_gbs']:g} GB/s", least))
    if not judged:
        where = device or "this machine"
        raise UsageError(
            f"--expect catalogue: it has no figure for what is measured on {where}: give an "
            "earlier result or a file of thresholds"
        )
    return missed


def _missed_verdicts(results: Content) -> tuple[list[Miss], int]:
    """Bandwidth judges by itself: against classes and the catalogue."""
    if kind_of(results) != "bandwidth":
        return [], 0
    judged = [row for _, row in rows_of(results) if row.get("verdict", "unknown") != "unknown"]
    missed = [
        Miss(each["what"], f"{each['gbs']:g} GB/s", f"{each['against_gbs']:g} as {each['against']}")
        for each in results["findings"]
    ]
    slow: Sequence[Row] = [r for r in results["copies"] if r["verdict"] in ("degraded", "bad")]
    missed += [
        Miss(
            f"rank {row['rank']}, {row['kind']}",
            f"{row['gbs']:g} GB/s",
            f"{CATALOGUE_PART:g} × {row['expected_gbs']:g} ({row['expected_source']})",
        )
        for row in slow
    ]
    return missed, len(judged)


def _setting(results: Content) -> tuple[str | None, int, bool]:
    """The kind of GPU that ranks compute on (None where there is not one), nodes, and sharing."""
    ranks = results.get("world", {}).get("ranks", [])
    environment = results.get("environment") or describe_environment()
    names = {gpu["name"] for gpu in environment.get("gpus", ())}
    on_gpus = bool(ranks) and all(str(each["device"]).startswith("cuda") for each in ranks)
    sharing = any(each.get("ranks_on_device", 1) > 1 for each in ranks)
    nodes = len({each["node"] for each in ranks})
    return (names.pop() if on_gpus and len(names) == 1 else None), nodes, sharing
