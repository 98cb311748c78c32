"""The figures in the JSON of any bench: what identifies each, its spread, and what is better.

A spread is σ as a part of the value, as well as the file tells it: of single calls for times, of
passes for bandwidths.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.world.errors import UsageError

Content = dict[str, Any]
Row = dict[str, Any]
Key = tuple[tuple[str, Any], ...]

_OPERATION = (
    *("op", "backend", "ranks", "bytes", "dtype", "redop", "placement", "timing", "group"),
)
# What identifies a row, where it has it; the figures; and whether more of a figure is better.
_PARTS: dict[str, tuple[tuple[str, ...], dict[str, bool]]] = {
    "collectives rows": (_OPERATION, {"time_us.p50": False}),
    "symmetric rows": (("name", "backend", "bytes"), {"p50_us": False}),
    "pairs rows": (("name",), {"speedup": True}),
    "bandwidth pairs": (
        ("src", "dst", "class", "backend", "bytes"),
        {"gbs_uni": True, "gbs_bi": True},
    ),
    "bandwidth one_to_all": (("root", "bytes"), {"gbs": True}),
    "bandwidth all_to_all": (_OPERATION, {"time_us.p50": False}),
    "bandwidth ring_vs_tree": (_OPERATION, {"time_us.p50": False}),
    "bandwidth copies": (("rank", "device", "kind", "bytes"), {"gbs": True}),
}
# For a normal distribution: so many σ lie between the least of many samples and p95 or p99.
_SIGMAS_TO_P95, _SIGMAS_TO_P99 = 4.0, 5.0
_SIGMAS_BETWEEN_QUARTILES = 1.349


@dataclass(frozen=True)
class Measurement:
    """One figure."""

    key: Key
    metric: str
    value: float
    spread: float
    more_is_better: bool
    wrong: int

    @property
    def name(self) -> str:
        """What identifies it, for people."""
        return ", ".join(f"{name} {value}" for name, value in self.key)


def read_results(flag: str, path: Path) -> Content:
    """The JSON of a bench; says what is wrong with a file that is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no JSON: {error}"
        raise UsageError(f"{flag} {path}: {reason}: give what --json of a bench wrote") from None
    schema = content.get("schema", "") if isinstance(content, dict) else ""
    if not any(f"tutti.bench.{part.split()[0]}/" in schema for part in _PARTS):
        said = f"its schema is {schema!r}" if schema else "it has no schema"
        raise UsageError(f"{flag} {path}: {said}: give what --json of a tutti bench wrote")
    return dict(content)


def kind_of(content: Content) -> str:
    """collectives, symmetric, bandwidth or pairs."""
    return str(content["schema"]).removeprefix("tutti.bench.").partition("/")[0]


def rows_of(content: Content) -> Iterator[tuple[str, Row]]:
    """Every row, and the part of the JSON that it is in."""
    for part in _PARTS:
        kind, _, key = part.partition(" ")
        if kind == kind_of(content):
            yield from ((key, row) for row in content.get(key) or ())


def measurements(content: Content) -> dict[tuple[Key, str], Measurement]:
    """Every figure of a result, by what identifies it and its metric."""
    found: dict[tuple[Key, str], Measurement] = {}
    for part, row in rows_of(content):
        names, metrics = _PARTS[f"{kind_of(content)} {part}"]
        parts = () if part == "rows" else (("part", part),)
        # One operation at a time goes without saying: older results do not say it.
        told = (name for name in names if name in row and (name, row[name]) != ("group", 1))
        identity: Key = (*parts, *((name, row[name]) for name in told))
        if "ranks" not in row and "world" in content:
            identity += (("ranks", content["world"]["size"]),)
        for metric, more_is_better in metrics.items():
            value = value_of(row, metric)
            if not isinstance(value, int | float) or value <= 0:
                continue
            key, again = identity, 2
            while (key, metric) in found:  # rows that nothing tells apart: by their order
                key, again = (*identity, ("again", again)), again + 1
            wrong = row.get("wrong", str(row.get("check", "")).startswith("different"))
            found[key, metric] = Measurement(
                key, metric, float(value), spread_of(row, metric), more_is_better, int(wrong)
            )
    return found


def value_of(row: Row, name: str) -> Any:
    """A value by its name; `time_us.p50` goes into the parts of one. None where there is none."""
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def spread_of(row: Row, metric: str) -> float:
    """σ of a figure as a part of it; 0 where the row does not tell."""
    if metric == "time_us.p50":
        times = row["time_us"]
        # cv grows with a single late call; the way from the least to p95 does not.
        to_p95 = (times["p95"] - times["min"]) / times["p50"] / _SIGMAS_TO_P95
        return float(min(times["cv"], to_p95))
    if metric == "p50_us":
        return float((row["p99_us"] - row["min_us"]) / row["p50_us"] / _SIGMAS_TO_P99)
    spread = row["spread"]
    if isinstance(spread, dict):
        return float((spread["p75"] - spread["p25"]) / row[metric] / _SIGMAS_BETWEEN_QUARTILES)
    return float(spread)
