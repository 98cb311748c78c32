"""The command tutti predict: after tutti train, wrong usage, a killed rank."""

import csv
import json
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from saved_runs import gpt_run

from worlds import run_tutti, start_warm

pytestmark = pytest.mark.timeout(180)


def predict(*flags: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_tutti("predict", "--device", "cpu", *flags)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of a short training on two ranks."""
    out = tmp_path_factory.mktemp("trained") / "run"
    flags = ["--recipe", "lenet", "--pixels", "8", "--epochs", "2", "--checkpoint-every", "30"]
    done = run_tutti("train", *flags, "--ranks", "2", "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def test_the_score_equals_that_of_the_training_summary(trained: Path) -> None:
    done = predict("--run", trained, "--json", trained / "score.json")
    summary = json.loads((trained / "summary.json").read_text())
    score = json.loads((trained / "score.json").read_text())
    assert score["schema"] == "tutti.predict/1" and score["layout"] == "dp1"
    assert score["accuracy"] == summary["test_accuracy"] and score["step"] == summary["steps"]
    # Other batch sizes change the rounding in float32 by less than 1e-6 relative.
    assert score["loss"] == pytest.approx(summary["test_loss"], rel=1e-6)
    line = f"test accuracy {100 * score['accuracy']:.2f} %, test loss {score['loss']:.4f}\n"
    *_, last = csv.DictReader((trained / "metrics.csv").open())
    assert int(last["step"]) == summary["steps"] - 1
    assert float(last["test_accuracy"]) == summary["test_accuracy"]
    evaluated = run_tutti("train", "--evaluate-only", "--resume", "--out", trained)
    expected = f"step {score['step']}: {line[:-1]}, mean over "
    assert evaluated.stdout.startswith(expected), evaluated.stderr
    assert done.stdout.startswith(line)
    rows = [json.loads(each) for each in (trained / "predictions-test.jsonl").open()]
    assert [row["index"] for row in rows] == list(range(len(rows))) and len(rows) == 360
    assert sum(row["right"] for row in rows) / len(rows) == score["accuracy"]


def test_two_ranks_write_the_same_bytes_as_one_also_for_an_earlier_step(
    trained: Path, tmp_path: Path
) -> None:
    common = ["--run", trained, "--checkpoint", "30", "--split", "train", "--limit", "101"]
    common += ["--batch", "7"]
    one = predict(*common, "--out", tmp_path / "one.jsonl")
    two = predict(*common, "--out", tmp_path / "two.jsonl", "--ranks", "2")
    assert "step-00000030" in one.stderr
    assert one.stdout.splitlines()[0] == two.stdout.splitlines()[0]
    text = (tmp_path / "one.jsonl").read_bytes()
    assert text.count(b"\n") == 101 and text == (tmp_path / "two.jsonl").read_bytes()


def test_texts_are_printed_in_the_order_of_the_prompts_and_written_on_request(
    tmp_path: Path,
) -> None:
    run, lines, out = gpt_run(tmp_path), tmp_path / "prompts", tmp_path / "texts.jsonl"
    lines.write_text("second\nthird\n")
    flags = ["--run", run, "--prompt", "first", "--prompts", lines, "--tokens", "5"]
    one = predict(*flags, "--out", out)
    two = predict(*flags, "--ranks", "2")
    assert one.stdout == two.stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["first", "second", "third"]
    expected = "".join(f"--- prompt {r['index']}\n{r['prompt']}{r['text']}\n" for r in rows)
    assert one.stdout == expected
    other = predict(*flags, "--seed", "1")
    assert other.stdout != one.stdout


SLOW = """
import time
import torch

class Slow:
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        if not 0 <= index < 4000:
            raise IndexError
        time.sleep(0.005)
        return torch.zeros(1, 8, 8), index % 10

def data():
    return Slow(), Slow()
"""


def test_a_killed_rank_leaves_the_old_file_and_no_partial_one(
    trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    out = tmp_path / "results" / "rows.jsonl"
    out.parent.mkdir()
    out.write_text("the old one\n")
    flags = ["--run", str(trained), "--dataset", "slow:data", "--ranks", "2", "--out", str(out)]
    with start_warm(["-m", "tutti", "predict", *flags, "--batch", "4"], cwd=tmp_path) as process:
        deadline = time.monotonic() + 60
        while not any(each.stat().st_size for each in out.parent.glob(".rows.jsonl.*.partial")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "nothing was ever written"
            time.sleep(0.01)
        psutil.Process(process.pid).children()[1].kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode not in (0, 2) and "rank 1" in errors and "SIGKILL" in errors
    assert out.read_text() == "the old one\n"
    assert [each.name for each in out.parent.iterdir()] == ["rows.jsonl"]


@pytest.fixture(scope="module")
def folder_of_mistakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of a gpt, a run without a checkpoint, and other files."""
    folder = tmp_path_factory.mktemp("mistaken")
    run = gpt_run(folder)
    (folder / "young").mkdir()
    (folder / "young" / "recipe.toml").write_text((run / "recipe.toml").read_text())
    (folder / "other").mkdir()
    (folder / "empty").write_text("")
    (folder / "gap").write_text("one\n\nthree\n")
    (folder / "tokens").mkdir()
    recipe = (run / "recipe.toml").read_text().replace('"text"', '"tokens"')
    (folder / "tokens" / "recipe.toml").write_text(recipe)
    (folder / "tokens" / "checkpoints").symlink_to(run / "checkpoints")
    return folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--run nowhere", "--run nowhere does not exist"),
        ("--run other", "--run other has no recipe.toml"),
        ("--run young", "--run young has no checkpoint yet"),
        ("--run run --checkpoint 7", "run has no --checkpoint 7: use 5, 6, best or last"),
        ("--run run --checkpoint best", "has a score, which --keep-best saves: use last"),
        ("--run run --checkpoint first", "--checkpoint must be best, last or a step"),
        ("--run run --ema", "was trained without --ema"),
        ("--run run --layout tp2", "layout tp2 needs 2 ranks, but this world has 1"),
        ("--run run --tokens 3", "--tokens has no effect without --prompt"),
        ("--run run --limit 0", "--limit must be at least 1, got 0"),
        ("--run run --dataset digits", "model gpt needs text"),
        ("--run run --data-dir missing", "missing does not exist"),
        ("--run run --out /proc/no/x", "--out /proc/no/x: the directory /proc/no does not exist"),
        ("--run run --prompt=", "prompt 0 is empty"),
        ("--run run --prompts empty", "--prompts empty is empty"),
        ("--run run --prompts gap", "prompt 1 is empty"),
        ("--run run --prompts missing", "--prompts missing does not exist"),
        ("--run run --prompt a --limit 3", "--limit has no effect with --prompt"),
        ("--run run --prompt a --temperature -1", "--temperature must be at least 0, got -1"),
        ("--run run --prompt a --tokens 0", "--tokens must be at least 1, got 0"),
        ("--run tokens --prompt a", "was trained on tokens"),
        ("--run run --prompt a --precision bf16", "--precision must be float32 or float64"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(
    folder_of_mistakes: Path, flags: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder_of_mistakes)
    errors = predict(*flags.split(), code=2).stderr
    assert message in errors and errors.count("\n") == 1, errors


def test_an_error_on_all_ranks_is_printed_once(trained: Path) -> None:
    done = predict("--run", trained, "--prompt", "a", "--ranks", "2", code=2)
    assert f"tutti predict: --prompt needs a gpt, but {trained} is a lenet" in done.stderr
    assert done.stderr.count("--prompt needs a gpt") == 1


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(tmp_path: Path) -> None:
    run = gpt_run(tmp_path)
    older = predict("--run", run, "--checkpoint", "5").stdout.splitlines()[0]
    file = run / "checkpoints" / "step-00000006" / "rank0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    done = predict("--run", run)
    assert "step-00000006 is damaged" in done.stderr
    assert done.stdout.splitlines()[0] == older
    assert predict("--run", run, "--prompt", "a", "--tokens", "3").stdout
