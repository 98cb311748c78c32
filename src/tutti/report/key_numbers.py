"""The numbers that a run is known by: for its row in the table and for the page's first lines."""

from dataclasses import dataclass
from statistics import mean
from typing import Any

from tutti.report.collect import Run

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
