"""The example of tutti.train runs as a script."""

from pathlib import Path

from worlds import run_warm

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_from_python.py"


def test_the_example_trains_continues_and_reads_its_metrics(tmp_path: Path) -> None:
    done = run_warm([EXAMPLE, tmp_path / "run"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("best checkpoint: step ") for line in lines)
    # 1437 samples in batches of 2 × 32 are 23 steps per epoch; 6 epochs are 138 steps.
    assert "step 138: layout shard2" in lines
    assert any(line.startswith("138 losses") for line in lines)
