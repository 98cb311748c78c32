"""The examples of symmetric memory run, and their own checks hold."""

from pathlib import Path

import pytest

from worlds import TUTTI, run_command, run_tutti

EXAMPLES = Path(__file__).parents[2] / "examples" / "symmetric"
SHOWN = {
    "gradient_sync": "differ by",
    "parameter_server": "no barrier in between",
    "pipeline_handoff": "microbatches through",
    "async_gradients": "none lost",
    "parallel_matmul": "row-parallel over",
}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_shows_what_it_says(name: str) -> None:
    ranks = 3 if name == "parameter_server" else 2
    done = run_command([*TUTTI, "run", "-n", ranks, "--device", "cpu", EXAMPLES / f"{name}.py"])
    assert done.returncode == 0, done.stderr
    assert SHOWN[name] in done.stdout


def test_a_number_of_ranks_that_does_not_divide_is_one_line() -> None:
    done = run_tutti("run", "-n", "7", "--device", "cpu", EXAMPLES / "parallel_matmul.py")
    assert done.returncode == 2, done.stderr
    assert "960 hidden columns do not divide by 7 ranks: start 2, 3 or 4" in done.stderr
