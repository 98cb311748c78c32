"""The numbers that a run is known by: for its row in the table and for the page's first lines."""

from dataclasses import dataclass
from statistics import mean
from typing import Any

from tutti.report.collect import Result, Run
from tutti.report.palette import LOSS_NAMES

# These parts of a step are lost: nothing computes in them. By what a sentence calls them.
LOST = {
    "exposed": "exposed communication",
    "wait": "waiting for ranks",
    "bubble": "pipeline bubbles",
    "input": "waiting for input",
    "host_gap": "gaps",
}


@dataclass(frozen=True)
class KeyNumbers:
    """None is unknown."""

    ranks: int | None
    backend: str | None
    samples_per_s: float | None
    step_s: float | None
    computing: float | None
    """Share of the step, mean over ranks: compute, alone or with communication behind it."""
    lost: dict[str, float]
    """Share of the step by part, mean over ranks, the largest first."""
    late: dict[str, Any] | None
    """The row of the costliest straggler."""


def of_run(run: Run) -> KeyNumbers:
    """What the summary says, and what the traces say where it does not."""
    profile = run.profile or {}
    rows = profile.get("ranks") or []
    world = run.summary.get("world") or run.started.get("world") or {}
    lost = {name: mean(row["parts_share"][name] for row in rows) for name in LOST if rows}
    late = [each for each in profile.get("stragglers") or [] if each["straggler"]]
    return KeyNumbers(
        ranks=world.get("size") or profile.get("world_size"),
        backend="+".join(sorted({row["backend"] for row in rows})) or None,
        samples_per_s=run.summary.get("samples_per_s"),
        step_s=mean(row["step_s"]["mean"] for row in rows) if rows else None,
        computing=mean(row["busy"] for row in rows) if rows else None,
        lost=dict(sorted(lost.items(), key=lambda item: -item[1])),
        late=late[0] if late else None,
    )


Rows = list[dict[str, Any]]


def of_scale(result: Result) -> dict[str, Rows]:
    """Rows by ascending ranks; of a sweep, by the flags that were tried."""
    found: dict[str, Rows] = {"": result.content["rows"]} if result.content["rows"] else {}
    for row in result.content.get("sweep") or []:
        if "efficiency" in row:
            found.setdefault(flags_of(row), []).append(row)
    return {flags: sorted(rows, key=lambda row: int(row["ranks"])) for flags, rows in found.items()}


def of_learning_rates(result: Result) -> Rows:
    """What a sweep of learning rates gave: losses, and no efficiency. Ascending."""
    rows = [row for row in result.content.get("sweep") or [] if "final_loss" in row]
    return sorted(rows, key=lambda row: (row["ranks"], learning_rate(row)))


def learning_rate(row: dict[str, Any]) -> float:
    """Of a row of such a sweep."""
    return float(row["flags"]["lr"])


def best_of_scale(result: Result) -> Rows:
    """Of a sweep, the rows of the flags that were fastest on the most ranks."""
    found = of_scale(result).values()
    return max(found, key=lambda rows: (rows[-1]["ranks"], rows[-1]["samples_per_s"]), default=[])


def unit_of(result: Result) -> str:
    """What a scaling's throughput counts."""
    return result.content.get("unit") or "samples/s"


def largest_loss(row: dict[str, Any]) -> tuple[str, float]:
    """What it is called, and its share of the step; `other` is looked into."""
    causes = {LOSS_NAMES[name]: share for name, share in row["loss"].items() if name != "other"}
    named = {"compute": "slower compute", "gaps": "more gaps", "rest": "rest"}
    for name, share in (row.get("other") or {"rest": row["loss"]["other"]}).items():
        causes[named.get(name, name)] = share
    name = max(causes, key=lambda each: float(causes[each]))
    return name, causes[name]


def flags_of(row: dict[str, Any]) -> str:
    """As people type them."""
    return " ".join(f"--{name.lstrip('-')} {value}" for name, value in row["flags"].items())
