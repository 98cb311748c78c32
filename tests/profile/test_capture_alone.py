"""A capture in this very process: its schedule, and what it leaves to others."""

import re
from pathlib import Path
from typing import Any

import torch

from tutti.profile.capture import Capture
from tutti.profile.trace_file import TraceFile


def _step() -> None:
    torch.ones(4, requires_grad=True).sum().backward()


def _about(directory: Path, rank: int = 0) -> dict[str, Any]:
    file = TraceFile(directory / f"rank{rank}.json.gz")
    numbers = []
    for event in file.events():
        number = re.fullmatch(r"ProfilerStep#(\d+)", str(event.get("name")))
        if number and event.get("cat") == "user_annotation":
            numbers.append(int(number[1]))
    about: dict[str, Any] = file.metadata["tutti"]
    return {**about, "numbers": sorted(numbers)}


def test_a_loop_that_ends_early_says_which_steps_are_whole(tmp_path: Path) -> None:
    with Capture(tmp_path, wait=1, warmup=1, active=9) as capture:
        for _ in range(5):
            _step()
            capture.step()

    about = _about(tmp_path)
    assert about["numbers"] == [2, 3, 4, 5]  # torch ends the one that had only begun
    assert about["steps"] == 5


def test_a_schedule_that_ends_has_whole_steps_alone(tmp_path: Path) -> None:
    with Capture(tmp_path, wait=1, warmup=1, active=2) as capture:
        for _ in range(9):
            _step()
            capture.step()

    about = _about(tmp_path)
    assert about["numbers"] == [2, 3]
    assert about["steps"] == 4


def test_nothing_is_written_where_no_recorded_step_has_ended(tmp_path: Path) -> None:
    with Capture(tmp_path, wait=1, warmup=1, active=2) as capture:
        for _ in range(2):
            _step()
            capture.step()

    assert capture.path is None
    assert not list(tmp_path.iterdir())
