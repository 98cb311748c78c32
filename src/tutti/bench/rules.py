"""The rules of --expect FILE.toml: read, and checked against the rows that a bench will give.

A rule that cannot fit any row is a mistake in the file. It is told before anything is measured: a
threshold that is noticed to be misspelt after an hour has checked nothing in that hour.
"""

import math
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tutti.bench.backend_names import BACKENDS
from tutti.measure.bus_bandwidth import OPERATIONS
from tutti.measure.units import parse_size
from tutti.world.errors import UsageError, did_you_mean

Rule = Mapping[str, Any]
Words = Mapping[str, Collection[str]]

# A table for one of these chooses rows; for any other number it is a bound.
CHOOSES = ("bytes", "ranks", "count", "src", "dst", "root", "rank")
_WHOLE = (*CHOOSES, "group", "calls", "rounds", "slowest")
_TEXTS = (
    *("op", "backend", "dtype", "redop", "placement", "timing", "class", "verdict", "name"),
    *("kind", "device", "check", "about", "note", "expected_source"),
)
_OPERATION = (
    *("op", "backend", "ranks", "bytes", "count", "dtype", "redop", "root", "placement", "timing"),
    *("group", "calls", "time_us.p50", "time_us.p95", "time_us.p99", "time_us.min"),
    *("time_us.mean", "time_us.cv", "algbw_gbs", "busbw_gbs", "wrong"),
)
# The values in the rows of each part of each bench that rules can be about.
FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "collectives": {"rows": _OPERATION},
    "bandwidth": {
        "pairs": (
            *("src", "dst", "backend", "bytes", "class", "gbs_uni", "gbs_uni_best", "gbs_bi"),
            *("gbs_bi_best", "spread", "wrong", "verdict"),
        ),
        "one_to_all": ("root", "bytes", "gbs", "spread", "slowest", "wrong"),
        "all_to_all": _OPERATION,
        "ring_vs_tree": _OPERATION,
        "copies": (
            *("rank", "device", "name", "kind", "bytes", "gbs", "spread", "wrong", "verdict"),
            *("expected_gbs", "expected_source"),
        ),
    },
    "pairs": {
        "rows": (
            *("name", "about", "baseline_ms", "optimized_ms", "speedup", "spread.p25"),
            *("spread.p75", "verdict", "rounds", "calls_per_round.baseline"),
            *("calls_per_round.optimized", "check", "note"),
        )
    },
}
# What a text can be, where that is known: anything else is misspelt.
WORDS: dict[str, Words] = {
    "collectives": {
        "op": tuple(OPERATIONS),
        "backend": BACKENDS,
        "dtype": (
            *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8"),
        ),
        "redop": ("sum", "none"),
        "placement": ("in", "out"),
        "timing": ("back-to-back", "isolated"),
    },
    "bandwidth": {
        "op": ("all_to_all", "all_reduce"),
        "backend": ("shm", "gloo", "nccl"),
        "dtype": ("float32",),
        "redop": ("sum", "none"),
        "placement": ("in", "out"),
        "timing": ("back-to-back",),
        "class": (
            *("same core", "same NUMA node", "other NUMA node", "same host", "other host"),
            *("same GPU", "NVLink", "NVSwitch", "NUMA", "PCIe"),
        ),
        "verdict": ("unknown", "good", "degraded", "bad"),
    },
    "pairs": {"verdict": ("faster", "slower", "no difference")},
}


def read_rules(flag: str, path: Path, bench: str, words: Words) -> tuple[Rule, ...]:
    """The rules in a file, of which each can fit rows of this bench.

    `words` are texts that the caller alone knows, such as the names of pairs.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no TOML: {error}"
        raise UsageError(
            f"{flag} {path}: {reason}: give catalogue, a .json that a bench wrote, or a .toml of "
            "thresholds"
        ) from None
    rules = content.get("expect")
    tables = isinstance(rules, list) and all(isinstance(rule, dict) for rule in rules)
    if not rules or not tables or set(content) != {"expect"}:
        raise UsageError(f"{flag} {path}: a file of thresholds is a list of [[expect]] tables")
    rules = [dict(_flat(rule)) for rule in rules]
    for number, rule in enumerate(rules, 1):
        try:
            _check(rule, bench, {**WORDS[bench], **words})
        except UsageError as error:
            raise UsageError(f"{flag} {path}: rule {number}: {error}") from None
    return tuple(rules)


def bounds(rule: Rule) -> dict[str, dict[str, float]]:
    """What a rule demands; its other keys choose rows."""
    return {
        name: value
        for name, value in rule.items()
        if isinstance(value, dict) and name not in CHOOSES
    }


def number_of(value: Any) -> float:
    """A number, or a size such as 64M."""
    return parse_size(value) if isinstance(value, str) else float(value)


def _flat(rule: Rule) -> Iterator[tuple[str, Any]]:
    """TOML reads time_us.p50 without quotes as a table in a table: the same is meant."""
    for name, value in rule.items():
        if isinstance(value, dict) and value and all(isinstance(e, dict) for e in value.values()):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())
        else:
            yield name, value


def _check(rule: Rule, bench: str, words: Words) -> None:
    parts = FIELDS[bench]
    known = list(dict.fromkeys(name for fields in parts.values() for name in fields))
    for name in rule:
        if name not in known and name != "part":
            raise UsageError(f"bench {bench} has no {name!r}: {_meant(name, known)}")
    for name, value in rule.items():
        if name == "part":
            _check_words(name, value, parts)
        elif name in _TEXTS:
            _check_words(name, value, words.get(name))
        elif isinstance(value, dict):
            _check_range(name, value)
        else:
            _check_number(name, value)
    asked = bounds(rule)
    if not asked:
        raise UsageError("it has no bound: give one, such as " + _EXAMPLES[bench])
    named = rule.get("part", list(parts))
    chosen = [name for name in rule if name not in asked and name != "part"]
    fitting = {
        part: fields
        for part, fields in parts.items()
        if part in (named if isinstance(named, list) else [named]) and {*chosen} <= {*fields}
    }
    for name in asked:
        if not any(name in fields for fields in fitting.values()):
            having = [part for part, fields in parts.items() if name in fields]
            raise UsageError(
                f"{name} is in {' and '.join(having)}, whose rows the other keys leave out: "
                "make it two rules"
            )


_EXAMPLES = {
    "collectives": "busbw_gbs = { min = 350 }",
    "bandwidth": "gbs_uni = { min = 330 }",
    "pairs": "speedup = { min = 1.05 }",
}


def _meant(name: str, known: Collection[str]) -> str:
    inside = [each for each in known if each.startswith(f"{name}.")]
    return did_you_mean(name, inside or ["part", *known])


def _check_words(name: str, value: Any, allowed: Collection[str] | None) -> None:
    for each in _each(value):
        if not isinstance(each, str):
            raise UsageError(f"{name} = {text_of(value)}: it is a text: write one, or a list")
        # A backend may be told with how it was called: "gloo x16", "shm ring".
        word = each.partition(" ")[0] if name == "backend" else each
        if allowed is not None and word not in allowed:
            raise UsageError(f"no {name} {each!r}: {did_you_mean(each, allowed)}")


def _check_range(name: str, value: Mapping[str, Any]) -> None:
    if not value or not set(value) <= {"min", "max"}:
        raise UsageError(f"{name} = {text_of(value)}: a bound has min, max or both")
    ends = {end: _checked(f"{name}.{end}", each, name) for end, each in value.items()}
    if ends.get("min", -math.inf) > ends.get("max", math.inf):
        raise UsageError(f"{name}: nothing is {text_of(value)}: exchange the two")


def _check_number(name: str, value: Any) -> None:
    for each in _each(value):
        _checked(name, each, name)
    if name not in _WHOLE:
        raise UsageError(
            f"{name} = {text_of(value)}: no figure is equal to another: give a bound, such as "
            f"{name} = {{ {'max' if name == 'wrong' or 'us.' in name else 'min'} = {value} }}"
        )


def _checked(label: str, value: Any, name: str) -> float:
    try:
        if isinstance(value, str) and name != "bytes":
            raise ValueError
        number = number_of(value)
    except (UsageError, ValueError, TypeError):
        number = math.nan
    if math.isnan(number) or isinstance(value, bool):
        cure = "64M or 1024" if name == "bytes" else "a number, without quotes"
        raise UsageError(f"{label} = {value!r} is no number: write {cure}")
    return number


def _each(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, list) else [value]


def text_of(value: Any) -> str:
    """A value of a rule in words."""
    if isinstance(value, dict):
        signs = {"min": "at least", "max": "at most"}
        return " and ".join(f"{signs.get(end, end)} {each}" for end, each in value.items())
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)
