"""Two results of a bench: what changed beyond the spread, and whether they can be compared."""

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from tutti.bench.measurements import Content, Measurement, kind_of, measurements
from tutti.world.errors import UsageError

VERDICTS = ("wrong", "slower", "faster", "same", "new", "gone")
# Two runs differ by a few per cent for no reason that can be found.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Change:
    """One figure in both results, or in one of them."""

    name: str
    metric: str
    old: float | None
    new: float | None
    spread_old: float | None
    spread_new: float | None
    ratio: float | None  # of speeds: above 1 is faster
    limit: float | None  # how far from 1 the ratio may be, and still be the same
    verdict: str

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def compare(old: Content, new: Content, tolerance: float = TOLERANCE) -> list[Change]:
    """Every figure of both, in the order of the new one; those that are gone come last."""
    if kind_of(old) != kind_of(new):
        raise UsageError(
            f"a result of bench {kind_of(old)} and one of bench {kind_of(new)} have nothing to "
            "compare: give two of the same bench"
        )
    before, after = measurements(old), measurements(new)
    changes = [_change(before.get(key), each, tolerance) for key, each in after.items()]
    gone = [_change(each, None, tolerance) for key, each in before.items() if key not in after]
    return changes + gone


def differences(old: Content, new: Content) -> list[str]:
    """How the machines and versions behind two results differ: times do not compare then."""
    before, after = old.get("environment", {}), new.get("environment", {})
    found = []
    for name in ("host", "system", "cpu", "cpus", "cpu_quota", "memory_bytes"):
        if before.get(name) != after.get(name):
            found.append(f"{name}: {before.get(name)} → {after.get(name)}")
    gpus = [Counter(gpu["name"] for gpu in each.get("gpus", ())) for each in (before, after)]
    if gpus[0] != gpus[1]:
        found.append(f"gpus: {_counted(gpus[0])} → {_counted(gpus[1])}")
    for part in ("versions", "variables"):
        one, other = before.get(part, {}), after.get(part, {})
        for name in sorted({*one, *other}):
            if one.get(name) != other.get(name) and not name.startswith("TUTTI_"):
                found.append(f"{name}: {one.get(name, 'none')} → {other.get(name, 'none')}")
    for name, content in (("the old", old), ("the new", new)):
        if content.get("complete") is False:
            found.append(f"{name} result was interrupted")
    return found


def _change(old: Measurement | None, new: Measurement | None, tolerance: float) -> Change:
    either = new or old
    assert either is not None
    ratio = limit = None
    verdict = "new" if old is None else "gone"
    if old is not None and new is not None:
        ratio = new.value / old.value if new.more_is_better else old.value / new.value
        # Both scatter: two σ of the difference of both.
        limit = max(tolerance, 2 * math.hypot(old.spread, new.spread))
        verdict = "faster" if ratio > 1 + limit else "slower" if ratio < 1 / (1 + limit) else "same"
    if new is not None and new.wrong:
        verdict = "wrong"  # however fast it was
    return Change(
        name=either.name,
        metric=either.metric,
        old=None if old is None else old.value,
        new=None if new is None else new.value,
        spread_old=None if old is None else round(old.spread, 4),
        spread_new=None if new is None else round(new.spread, 4),
        ratio=None if ratio is None else round(ratio, 4),
        limit=None if limit is None else round(limit, 4),
        verdict=verdict,
    )


def _counted(gpus: "Counter[str]") -> str:
    return ", ".join(f"{count} × {name}" for name, count in gpus.items()) or "none"
