"""tutti plan as a user runs it: recipes, own modules, one-line errors, --from and --layout auto."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from worlds import run_tutti

pytestmark = pytest.mark.timeout(240)

GPT = ["--recipe", "gpt", "--layers", "4", "--dim", "64", "--heads", "4", "--seq-len", "64"]
MODULE = """
import torch
from torch import nn

def images():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))

class Depends(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        return self.layer(x) if x.sum().item() > 0 else x

def depends():
    return Depends()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan")
    (path / "models_of_mine.py").write_text(MODULE)
    (path / "old.json").write_text('{"schema": "tutti.machine/99", "machines": []}')
    return path


def _plan(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    done = run_tutti("plan", *words, "--json", "plan.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return content, done.stdout


def test_layouts_are_ranked_by_time_and_split_by_cause(folder: Path) -> None:
    words = [*GPT, "--gpus", "4xH100", "--global-batch", "16", "--timeline", "step.json"]
    content, text = _plan(folder, *words)
    layouts = content["layouts"]
    assert {row["layout"] for row in layouts} >= {"dp4", "shard4", "tp4", "pp4", "dp2.tp2"}
    times = [row["step_s"] for row in layouts if row["fits"] and row["step_s_band"]]
    assert times == sorted(times, key=lambda seconds: round(math.log(seconds) / 0.005))
    for row in layouts:
        memory = row["memory_bytes"]
        parts = ("parameters", "gradients", "optimizer", "activations", "buffers")
        assert sum(memory[part] for part in parts) == memory["allocated"]
        assert memory["allocated"] + memory["overhead"] == memory["total"]
        samples = row["microbatch"] * row["accumulation"]
        assert 16 % samples == 0
        assert sum(row["parts"].values()) == pytest.approx(row["step_s"], rel=1e-6)
    assert layouts[0]["step_s_band"][0] < layouts[0]["step_s"] < layouts[0]["step_s_band"][1]
    assert content["null_model"]["step_s"] > 0 and content["assumptions"]
    assert f"--layout {layouts[0]['layout']}" in text
    assert json.loads((folder / "step.json").read_text())["traceEvents"]
    # 12 × 64² weights of wq, wk, wv, wo and of the MLP with 8/3 × 64 rounded up to 192.
    block = 4 * 64 * 64 + 3 * 64 * 192 + 2 * 64
    assert content["model"]["parameters"] == 4 * block + 2 * 256 * 64 + 64


def test_a_job_that_does_not_fit_names_cause_shortage_and_cure(folder: Path) -> None:
    large = ["--layers", "32", "--dim", "4096", "--heads", "32", "--precision", "bf16"]
    words = ["--recipe", "gpt", *large, "--gpus", "2xH100", "--global-batch", "8"]
    done = run_tutti("plan", *words, "--layout", "dp2", cwd=folder)
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "dp2 does not fit: needs" in text and "too much, mostly optimizer state" in text
    assert "The nearest change that fits: layout" in text


def test_a_range_of_gpus_has_a_curve_and_a_knee(folder: Path) -> None:
    words = [*GPT, "--gpus", "1..8xH100", "--global-batch", "16", "--layers", "2"]
    content, text = _plan(folder, *words)
    assert [row["gpus"] for row in content["curve"]] == [1, 2, 4, 8]
    assert content["knee"] in (1, 2, 4, 8) and "knee" in text


def test_a_module_of_ones_own_needs_only_the_shape_of_its_inputs(folder: Path) -> None:
    words = ["--model", "models_of_mine:images", "--batch-shape", "3x8x8", "--gpus", "2xH100"]
    content, _ = _plan(folder, *words, "--global-batch", "8")
    assert content["model"]["parameters"] == 3 * 8 * 9 + 8 + 8 * 36 * 10 + 10
    # Multiplications and additions of forward; backward has twice as many, but the inputs of the
    # first layer need no gradient.
    first, second = 2 * 36 * 8 * 27, 2 * 8 * 36 * 10
    assert content["model"]["flops_per_sample"] == 2 * first + 3 * second


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([*GPT, "--gpus", "4xH1000"], ("H1000", "H100")),
        ([*GPT], ("--gpus", "--machine", "--cluster")),
        ([*GPT, "--gpus", "4xH100", "--global-batch", "3", "--layout", "dp4"], ("3", "--global")),
        ([*GPT, "--gpus", "4xH100", "--layout", "dp3"], ("dp3", "3xH100", "dp4")),
        ([*GPT, "--machine", "old.json"], ("old.json", "tutti topo --record")),
        ([*GPT, "--gpus", "3xH100", "--layout", "tp3", "--global-batch", "3"], ("tp3", "tp2")),
        (
            ["--model", "models_of_mine:depends", "--batch-shape", "8", "--gpus", "1xH100"],
            ("item",),
        ),
        (["--model", "models_of_mine:images", "--gpus", "1xH100"], ("--batch-shape",)),
        (["--from", ".", "--layers", "2"], ("--from", "--layers")),
        (["--from", "."], ("recipe.toml",)),
    ],
)
def test_wrong_input_is_one_line_with_the_cure(
    folder: Path, words: list[str], parts: tuple[str, ...]
) -> None:
    done = run_tutti("plan", *words, cwd=folder)
    assert done.returncode == 2, done.stdout
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for part in parts:
        assert part in done.stderr


def test_auto_trains_the_best_plan_and_from_compares_the_run(folder: Path) -> None:
    words = [*GPT, "--layout", "auto", "--ranks", "2", "--benchmark", "--steps", "3"]
    done = run_tutti("train", *words, "--global-batch", "8", "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "--layout auto: --layout" in done.stderr
    summary = json.loads((folder / "run/summary.json").read_text())
    assert summary["plan"]["global_batch"] == 8 and summary["layout"] != "auto"
    compared = run_tutti("plan", "--from", "run", "--json", "compared.json", cwd=folder)
    assert compared.returncode == 0, compared.stderr
    rows = {r["term"]: r for r in json.loads((folder / "compared.json").read_text())["rows"]}
    for term in ("parameters", "optimizer"):
        assert abs(rows[term]["error"]) < 0.01
    assert rows["step"]["measured"] > 0
