"""tutti.train: a run as a function, in new ranks and in this rank, interrupted and refused."""

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tutti
from tutti.train.recipe import RECIPES, with_flags
from worlds import in_world, run_command, run_tutti, run_warm, start_warm


def losses(run: Path) -> list[float]:
    lines = (run / "metrics" / "rank0.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["loss"] for row in rows if "loss" in row]


def train_in_this_rank(world: Any, out: str) -> dict[str, Any]:
    recipe = with_flags(RECIPES["lenet"], {"pixels": 8, "steps": 8, "evaluate": False})
    summary = tutti.train(recipe, world=world, out=out)
    result: dict[str, Any] = {key: summary[key] for key in ("steps", "layout", "final_loss", "out")}
    return result


def test_the_function_computes_what_the_command_computes(tmp_path: Path) -> None:
    flags = ["--recipe", "lenet", "--pixels", "8", "--steps", "8", "--no-evaluate"]
    done = run_tutti("train", *flags, "--ranks", "2", "--out", tmp_path / "command")
    assert done.returncode == 0, done.stderr
    script = tmp_path / "script.py"
    script.write_text(
        "import json, tutti\n"
        "short = {'pixels': 8, 'steps': 8, 'evaluate': False}\n"
        "first = tutti.train('lenet', ranks=2, out='function', show='none', **short)\n"
        # A run that is complete is not trained again.
        "again = tutti.train(resume=True, out='function', show='none')\n"
        "try:\n"
        "    tutti.train('lenet', out='diverged', lr=1e30, show='none', **short)\n"
        "except tutti.RankFailed as error:\n"
        "    failed = str(error)\n"
        "print(json.dumps([first, again, failed]))\n"
    )
    done = run_warm([script], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary, again, failed = json.loads(done.stdout.splitlines()[-1])
    assert summary == again == json.loads((tmp_path / "function" / "summary.json").read_text())
    assert summary["out"] == "function" and summary["steps"] == 8
    assert re.search(r"LossNotFinite: the loss of step \d+ is not finite", failed)
    assert json.loads((tmp_path / "diverged" / "summary.json").read_text())["diverged"]
    ranks = in_world(train_in_this_rank, 2, str(tmp_path / "rank"))
    assert ranks[0] == ranks[1] and ranks[0]["final_loss"] == summary["final_loss"]
    expected = losses(tmp_path / "command")
    assert losses(tmp_path / "function") == expected == losses(tmp_path / "rank")


def test_wrong_values_are_refused_before_a_rank_starts(tmp_path: Path) -> None:
    for values, message in (
        ({"lrr": 1}, "no value lrr: did you mean lr"),
        ({"lr": "fast"}, "lr must be a float, got 'fast'"),
        ({"steps": 2.5}, "steps must be a int, got 2.5"),
        ({"layout": "dp3", "ranks": 2}, "layout dp3 needs 3 ranks"),
        ({"betas": (0.5, 0.5)}, "has no effect with --optimizer sgd"),
        ({"patience": 3}, "add --keep-best loss"),
        ({"out": "/etc"}, "exists and is not empty"),
        ({"resume": True}, "resume=True needs the directory"),
        ({"resume": True, "out": tmp_path / "none"}, "there is no run in"),
        ({"wandb": "project"}, "--wandb project needs a package: pip install wandb"),
        ({"ranks": 0}, "--ranks must be at least 1"),
    ):
        arguments: Any = {"device": "cpu", "out": tmp_path / "refused", **values}
        if "resume" in values and "out" not in values:
            del arguments["out"]
        with pytest.raises(tutti.UsageError) as refused:
            tutti.train("lenet", **arguments)
        assert message in str(refused.value)
    assert not (tmp_path / "refused").exists()


def test_importing_tutti_does_not_import_torch() -> None:
    program = "import sys, tutti; tutti.train; tutti.Recipe; assert 'torch' not in sys.modules"
    assert run_command([sys.executable, "-c", program]).returncode == 0


def test_ctrl_c_saves_a_checkpoint_and_raises_keyboard_interrupt(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import tutti\n"
        "try:\n"
        "    tutti.train('lenet', ranks=2, pixels=8, epochs=1000, evaluate=False, out='run')\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    with start_warm([script], cwd=tmp_path) as process:
        try:
            metrics = tmp_path / "run" / "metrics" / "rank1.jsonl"
            while not metrics.exists():
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert "interrupted" in output, errors
    assert list((tmp_path / "run" / "checkpoints").glob("step-*[0-9]"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"]
