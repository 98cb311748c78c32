"""Best checkpoints, early ends and moving averages: in every layout, stopped, resumed, exported."""

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tutti.train.checkpoint.exported_weights import Export
from tutti.train.run_directory import saved_steps
from tutti.world.errors import UsageError
from worlds import run_tutti, start_warm

pytestmark = pytest.mark.timeout(240)

DATA = '''
import torch

def data():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 32, (48, 9), generator=generator)
    return (tokens[:32, :8], tokens[:32, 1:]), (tokens[32:, :8], tokens[32:, 1:])

def rows():
    rows = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    return (rows[:32], rows[:32, :2]), (rows[32:], rows[32:, :2])

def half():
    model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
    model.bias.requires_grad_(False)
    return model

SCORES = [0.5, 0.4, float("nan"), 0.6, 0.3, 0.7, 0.8, 0.9, 0.2, 0.1, 0.1]
calls = 0

def planned(outputs, targets):
    """Return the next planned score. A rank has one test batch, so it calls this once."""
    global calls
    calls += 1
    return torch.full((len(targets),), SCORES[calls - 1])
'''
GPT = ["--recipe", "gpt", "--dataset", "mine:data", "--vocab-size", "32", "--layers", "2"]
GPT += ["--dim", "16", "--heads", "2", "--kv-heads", "2", "--precision", "float64"]
GPT += ["--global-batch", "16", "--schedule", "constant", "--warmup", "0", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("best")
    (folder / "mine.py").write_text(DATA)
    return folder


def tutti(folder: Path, *words: str, code: int = 0) -> str:
    done = run_tutti(*words, cwd=folder, timeout=120)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def exported(
    folder: Path, run: str, checkpoint: str = "last", ema: bool | None = None
) -> dict[str, torch.Tensor]:
    to = folder / f"exported-{len(list(folder.iterdir()))}"
    Export(folder / run, checkpoint, to, "safetensors", ema).write()
    return load_file(to / "model.safetensors")


def metrics(folder: Path, run: str) -> list[dict[str, Any]]:
    lines = (folder / run / "metrics" / "rank0.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


def curve(folder: Path, run: str, *keys: str) -> list[tuple[Any, ...]]:
    return [
        (row["step"], key, row[key]) for row in metrics(folder, run) for key in keys if key in row
    ]


def test_the_moving_average_is_the_same_in_every_layout_and_after_resuming(folder: Path) -> None:
    """The expectation is computed from the weights of every step of a run without --ema."""
    steps, decay = 5, 0.7
    short = [*GPT, "--steps", str(steps), "--clip", "0.5"]
    every = ["--checkpoint-every", "1", "--keep", "9", "--no-evaluate"]
    tutti(folder, "train", *short, *every, "--out", "plain")
    # The average begins with the initial weights, which a run with a tiny learning rate keeps.
    tiny = ["--lr", "1e-300", "--weight-decay", "0", "--steps", "1", "--out", "initial"]
    tutti(folder, "train", *short, *every, *tiny)
    expected = exported(folder, "initial")
    for step in range(1, steps + 1):
        for name, weight in exported(folder, "plain", str(step)).items():
            expected[name] = decay * expected[name] + (1 - decay) * weight
    layouts = ["dp1", "dp2", "shard2.tp2", "pp2"]
    for layout in layouts:
        flags = [*short, "--ema", str(decay), "--layout", layout, "--evaluate-every", "2"]
        if "pp" not in layout:
            flags += ["--accumulation", "2"]
        tutti(folder, "train", *flags, "--checkpoint-every", "3", "--out", layout)
    # pp2 ends after 3 steps, and continues as shard2.
    flags = [*short, "--ema", str(decay), "--no-evaluate", "--out", "changed"]
    tutti(folder, "train", *flags, "--steps", "3", "--layout", "pp2")
    resume = ["--resume", "--layout", "shard2", "--steps", "5", "--out", "changed"]
    tutti(folder, "train", *resume, "--accumulation", "1")
    plain = exported(folder, "plain")
    for run in [*layouts, "changed"]:
        average, weights = exported(folder, run), exported(folder, run, ema=False)
        for name, value in expected.items():
            torch.testing.assert_close(average[name], value, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(weights[name], plain[name], rtol=1e-10, atol=1e-12)

    # Evaluations use the average, and predictions do by default.
    tested = {run: curve(folder, run, "test_loss") for run in layouts}
    for run in layouts[1:]:
        for one, other in zip(tested["dp1"], tested[run], strict=True):
            assert one[0] == other[0] and one[2] == pytest.approx(other[2], rel=1e-9)
    for name, flags in {"average": [], "weights": ["--no-ema"]}.items():
        words = ["--run", "shard2.tp2", "--json", f"{name}.json", *flags]
        tutti(folder, "predict", *words, "--device", "cpu")
        loss = json.loads((folder / f"{name}.json").read_text())["loss"]
        assert (abs(loss - tested["dp1"][-1][2]) < 1e-9) == (name == "average")
    words = ["train", "--resume", "--evaluate-only", "--out", "shard2.tp2"]
    assert f"test loss {tested['dp1'][-1][2]:.4f}" in tutti(folder, *words)
    with pytest.raises(UsageError, match="was trained without --ema"):
        exported(folder, "plain", ema=True)


def test_moving_averages_of_low_precision_weights_are_float32(folder: Path) -> None:
    """fp16 computes with float32 weights and a loss scaler; model keeps bfloat16 weights."""
    flags = ["--steps", "4", "--no-evaluate", "--dataset", "mine:rows", "--batch", "8"]
    flags += ["--device", "cpu", "--model", "mine:half", "--loss", "mse", "--clip", "1"]
    for precision in ("fp16", "model"):
        out = ["--precision", precision, "--accumulation", "2", "--ema", "0.9", "--out", precision]
        tutti(folder, "train", *flags, *out, "--ranks", "2")
        index = folder / precision / "checkpoints" / "step-00000004" / "index.json"
        tensors = json.loads(index.read_text())["tensors"]
        assert {tensors[name]["dtype"] for name in tensors if name.startswith("ema.")} == {"F32"}
        average, weights = exported(folder, precision), exported(folder, precision, ema=False)
        expected = torch.bfloat16 if precision == "model" else torch.float32
        assert {tensor.dtype for tensor in average.values()} == {expected}
        assert not torch.equal(average["weight"], weights["weight"])
        # A frozen parameter has no average, and is exported as it is.
        assert "ema.bias" not in tensors and torch.equal(average["bias"], weights["bias"])


def test_evaluations_and_checkpoints_do_not_change_a_run_without_resharding(folder: Path) -> None:
    """Blocks that stayed gathered after an evaluation would be trained with averaged weights."""
    flags = [*GPT, "--steps", "5", "--layout", "shard2", "--no-reshard", "--ema", "0.5"]
    tutti(folder, "train", *flags, "--no-evaluate", "--out", "unevaluated")
    events = ["--evaluate-every", "2", "--checkpoint-every", "2", "--keep", "9"]
    tutti(folder, "train", *flags, *events, "--out", "evaluated")
    losses = curve(folder, "evaluated", "loss")
    assert len(losses) == 5 and losses == curve(folder, "unevaluated", "loss")
    assert saved(folder, "evaluated") == [2, 4, 5]


def test_adapters_of_a_run_with_moving_averages_are_initial_weights(folder: Path) -> None:
    """Only the last stage of pp2 has trained parameters; the other stage has no averages."""
    lora = ["--lora", "rank=2,targets=blocks.1.attention.wq", "--steps", "3", "--no-evaluate"]
    flags = [*GPT, *lora, "--ema", "0.5"]
    tutti(folder, "train", *flags, "--layout", "pp2", "--lr", "0.1", "--out", "adapted")
    tutti(folder, "train", *flags, "--lr", "1e-300", "--init-from", "adapted", "--out", "next")
    first, second = exported(folder, "adapted", ema=False), exported(folder, "next", ema=False)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


PLANNED = ["--metric", "mine:planned", "--evaluate-every", "1", "--checkpoint-every", "5"]
PLANNED += ["--keep-best", "max:planned", "--keep", "1", "--ranks", "2"]


def saved(folder: Path, run: str) -> list[int]:
    return saved_steps(folder / run / "checkpoints")


def summary(folder: Path, run: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / run / "summary.json").read_text())
    return content


def test_the_best_checkpoint_stays_and_patience_ends_the_run_on_all_ranks(folder: Path) -> None:
    """The scores are planned: the best is at step 8, and the third score is NaN."""
    flags = [*GPT, *PLANNED, "--steps", "20", "--patience", "3", "--out", "early"]
    text = tutti(folder, "train", *flags)
    assert "step 11: the run has ended early (--patience 3): 3 " in text
    assert "best planned 0.9, checkpoint of step 8" in text
    assert saved(folder, "early") == [8, 11]
    result = summary(folder, "early")
    assert result["ended_early"] and result["steps"] == 11
    assert (result["best"]["value"], result["best"]["step"]) == (pytest.approx(0.9), 8)
    scores = {step: value for step, _, value in curve(folder, "early", "test_planned")}
    assert scores[2] is None and scores[7] == pytest.approx(0.9)  # metrics count steps from 0
    text = tutti(folder, "train", "--resume", "--out", "early")
    assert "is at step 11: the run has ended early" in text and "--patience 6" in text
    # The scores begin again, and are not better: 6 evaluations without a better score.
    tutti(folder, "train", "--resume", "--out", "early", "--patience", "6")
    assert saved(folder, "early") == [8, 14] and summary(folder, "early")["ended_early"]

    tutti(folder, "predict", "--run", "early", "--checkpoint", "best", "--json", "best.json")
    assert json.loads((folder / "best.json").read_text())["step"] == 8
    best, last = exported(folder, "early", "best"), exported(folder, "early")
    assert not torch.equal(best["embed.weight"], last["embed.weight"])
    assert torch.equal(best["embed.weight"], exported(folder, "early", "8")["embed.weight"])


# The learning rate is so large that the test loss rises and falls.
ROUGH = [*GPT, "--lr", "0.03", "--evaluate-every", "1", "--keep-best", "loss", "--ranks", "2"]


def test_the_best_score_and_patience_survive_a_signal_and_another_layout(folder: Path) -> None:
    flags = [
        *ROUGH,
        "--steps",
        "200",
        "--checkpoint-every",
        "50",
        "--patience",
        "40",
        "--keep",
        "1",
    ]
    tutti(folder, "train", *flags, "--out", "whole")
    whole = summary(folder, "whole")
    assert whole["ended_early"] and 40 < whole["steps"] < 200
    assert saved(folder, "whole") == [whole["best"]["step"], whole["steps"]]
    with start_warm(["-m", "tutti", "train", *flags, "--out", "cut"], cwd=folder) as process:
        try:
            file = folder / "cut" / "metrics" / "rank0.jsonl"
            while not file.exists() or file.read_text().count("test_loss") < 3:
                assert process.poll() is None, process.communicate()
                time.sleep(0.002)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 75
    step = saved(folder, "cut")[-1]
    assert 3 <= step < whole["steps"]
    # The evaluation after the last step before the signal is made up for.
    assert step - 1 not in {row[0] for row in curve(folder, "cut", "test_loss")}
    shutil.copytree(folder / "cut", folder / "other")
    tutti(folder, "train", "--resume", "--out", "cut")
    assert curve(folder, "cut", "loss", "test_loss") == curve(folder, "whole", "loss", "test_loss")
    assert summary(folder, "cut")["best"] == whole["best"]
    assert saved(folder, "cut") == saved(folder, "whole")
    # In another layout, sums are rounded differently: compare the best score of the first steps.
    until = ["--steps", str(step + 2), "--layout", "tp2"]
    tutti(folder, "train", "--resume", "--out", "other", *until)
    first = [row[2] for row in curve(folder, "whole", "test_loss")[: step + 2]]
    assert summary(folder, "other")["best"]["value"] == pytest.approx(min(first), rel=1e-9)
