"""The examples of symmetric memory run, and their own checks hold."""

from pathlib import Path

import pytest

from worlds import run_tutti

EXAMPLES = Path(__file__).parents[2] / "examples" / "symmetric"
SHOWN = {
    "gradient_sync": "differ by",
    "parameter_server": "no barrier in between",
    "pipeline_handoff": "microbatches through",
    "async_gradients": "none lost",
    "parallel_matmul": "row-parallel on 2 ranks",
}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_prints_its_result(name: str) -> None:
    ranks = 3 if name == "parameter_server" else 2
    done = run_tutti("run", "-n", ranks, "--device", "cpu", EXAMPLES / f"{name}.py")
    assert done.returncode == 0, done.stderr
    assert SHOWN[name] in done.stdout


def test_ranks_that_do_not_divide_the_columns_are_a_usage_error() -> None:
    done = run_tutti("run", "-n", "7", "--device", "cpu", EXAMPLES / "parallel_matmul.py")
    assert done.returncode == 2, done.stderr
    assert "960 hidden columns" in done.stderr and "7 ranks: start 2, 3 or 4" in done.stderr
