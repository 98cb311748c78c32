"""Measured: one run at one size, as the traces of its ranks tell it."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from tutti.profile.explain import explain
from tutti.scale.causes import Step, seen_from_the_fastest
from tutti.scale.job import Schedule
from tutti.world.errors import UsageError


class NotMeasured(Exception):
    """The run ended, and its traces do not show what was asked for; the message says why."""


@dataclass(frozen=True)
class Measured:
    """Seconds are of steps that no profiler watched; `step.parts` of steps that were recorded."""

    ranks: int
    repeat: int
    folder: Path
    flags: dict[str, str]  # what a sweep has set
    samples: float | None  # per step, over all ranks
    step: Step
    hidden: float  # communication behind compute, as a share of the step
    comm: list[dict[str, Any]]
    late: dict[str, Any] | None  # the rank that others wait for most, if any
    overhead: float  # recorded / not recorded
    notes: list[str]

    def row(self) -> dict[str, Any]:
        """For the JSON: what a run gave by itself."""
        return {
            "ranks": self.ranks,
            "repeat": self.repeat,
            "flags": self.flags,
            "folder": str(self.folder),
            "step_s": self.step.seconds,
            "samples_per_step": self.samples,
            "parts_s": self.step.parts,
            "recording_overhead": self.overhead,
            "late": self.late,
        }


def read(
    folder: Path, ranks: int, repeat: int, schedule: Schedule, flags: dict[str, str] | None = None
) -> Measured:
    """Read what a run has left."""
    files = list((folder / "traces").glob("rank*.json.gz"))
    if not files:
        raise NotMeasured(
            f"no rank left a trace: each must take {schedule.steps} steps of a torch optimizer: "
            "train longer, or give --steps or --settle less"
        )
    if len(files) != ranks:
        raise NotMeasured(
            f"{len(files)} of {ranks} ranks left a trace: does the command start {ranks}, and does "
            "each train?"
        )
    try:
        explanation = explain(files)
    except (UsageError, ValueError, OSError) as error:
        raise NotMeasured(str(error)) from None
    rows = explanation.rows()
    if len(rows["ranks"]) != ranks or rows["world_size"] != ranks:
        raise NotMeasured(
            f"its ranks say that they are a world of {rows['world_size']}, not of {ranks}"
        )
    times = [trace.about.get("step_s", [])[schedule.settle :] for trace in explanation.traces]
    if not all(times):
        raise NotMeasured("a trace holds no step that was timed without the profiler")
    seconds = mean(mean(each) for each in times)
    parts = [each["parts_s"] for each in rows["ranks"]]
    recorded = mean(each["step_s"]["mean"] for each in rows["ranks"])
    notes = [note for note in rows["notes"] if "missing" in note]
    if ranks > 1 and not rows["comm"]:
        notes.append(
            f"the {ranks} ranks do not communicate: each trains alone, which is no scaling "
            "(does the script call init_process_group and wrap its model?)"
        )
    late = next((each for each in rows["stragglers"] if each["straggler"]), None)
    return Measured(
        ranks=ranks,
        repeat=repeat,
        folder=folder,
        flags=flags or {},
        samples=_samples(folder, [trace.about.get("batch") for trace in explanation.traces]),
        step=Step(seconds, seen_from_the_fastest(parts)),
        hidden=mean(each["hidden"] for each in parts) / recorded,
        comm=rows["comm"],
        late=late and {key: late[key] for key in ("rank", "cost_s", "cost_share", "instead")},
        overhead=recorded / seconds,
        notes=notes,
    )


def _samples(folder: Path, batches: list[Any]) -> float | None:
    """Samples of a step: as tutti's own run says, else the sum of what ranks' loaders gave."""
    summary = folder / "summary.json"
    if summary.is_file():  # ranks of one tensor-parallel group or pipeline have the same samples
        batch = json.loads(summary.read_text()).get("plan", {}).get("global_batch")
        if batch:
            return float(batch)
    return float(sum(batches)) if all(batches) else None
