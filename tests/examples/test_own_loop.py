"""The example of your own loop learns, and resumes from its checkpoint with other ranks."""

from pathlib import Path

from worlds import run_tutti, run_warm

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def test_the_example_learns_and_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    short = tmp_path / "short.py"
    short.write_text(EXAMPLE.read_text().replace("EPOCHS = 12", "EPOCHS = 3"))
    first = run_tutti("run", "-n", 2, "--show", "first", short, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    done = run_warm([EXAMPLE], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("epoch 4:") and lines[-1].startswith("epoch 12:")
    assert float(lines[-1].split()[3].rstrip(",")) < 0.1
    again = run_warm([EXAMPLE], cwd=tmp_path)
    assert again.returncode == 0 and again.stdout.count("12 epochs are done") == 1, again.stderr
