"""The example of collective patterns runs, and its own checks hold."""

from pathlib import Path

import pytest

from worlds import run_tutti

EXAMPLE = Path(__file__).parents[2] / "examples" / "collective_patterns.py"


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_patterns_hold_for_this_many_ranks(ranks: int) -> None:
    done = run_tutti("run", "-n", ranks, "--device", "cpu", EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert f"{ranks} ranks agreed" in done.stdout and "overlapped 3" in done.stdout
