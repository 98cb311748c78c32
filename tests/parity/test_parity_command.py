"""The command tutti parity: exit codes, table, JSON, your own model, wrong usage."""

import json
from pathlib import Path

import pytest

from worlds import run_tutti

PARITY = ["parity", "--device", "cpu"]
TINY = ["--layers", "2", "--dim", "16", "--heads", "2", "--mlp-dim", "32", "--seq-len", "8"]
TINY += ["--vocab-size", "16", "--steps", "2"]


def test_layouts_of_the_gpt_pass_and_are_written(tmp_path: Path) -> None:
    file = tmp_path / "parity.json"
    flags = ["--ranks", "2", "--layouts", "all", "--json", str(file), "--tied", "--padded", *TINY]
    done = run_tutti(*PARITY, *flags, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["schema"] == "tutti.parity/1" and result["complete"]
    assert result["command"][:2] == ["tutti", "parity"] and "versions" in result["environment"]
    assert [row["layout"] for row in result["rows"]] == ["dp2", "shard2", "tp2", "pp2"]
    for row in result["rows"]:
        assert row["ok"] is True and row["ranks"] == 2 and row["worst_parameter"]
        assert max(row["loss_rel_err"], row["grad_rel_err"], row["norm_rel_err"]) < 1e-10
        assert max(row["update_rel_err"].values()) < 1e-10
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines), done.stdout
    assert [line.split()[0] for line in lines[-4:]] == ["dp2", "shard2", "tp2", "pp2"]


MODEL = """
import os
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
    def forward(self, x):
        return x + self.drop(torch.tanh(self.norm(self.fc(x))))

def plain():
    return nn.Sequential(nn.Linear(6, 8), Block(), Block(), nn.Linear(8, 3))

class Crash(nn.Module):
    # Under tp, rank 1 fails while rank 0 waits for it in a collective.
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)
    def forward(self, x):
        if hasattr(self.fc1.weight, "placements") and os.environ["RANK"] == "1":
            raise RuntimeError("a planted error")
        return self.fc2(torch.tanh(self.fc1(x)))

class Output(nn.Module):
    # Returns a dict, as models of transformers do.
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)
    def forward(self, x):
        return {"loss": None, "scores": self.fc(x)}

def data():
    x, y = torch.zeros(64, 6), torch.zeros(64, dtype=torch.long)
    return (x, y), (x, y)
"""


def test_your_own_model_under_the_layouts_that_it_supports(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    file = tmp_path / "parity.json"
    flags = ["--model", "mine:plain", "--ranks", "2", "--json", str(file)]
    done = run_tutti(*PARITY, *flags, timeout=110, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["layout"]: row for row in json.loads(file.read_text())["rows"]}
    for layout in ("dp2", "shard2", "pp2"):
        assert rows[layout]["ok"] and rows[layout]["buffer_rel_err"] < 1e-10
    assert rows["tp2"]["ok"] is None
    assert "tp2    not applicable: no layer of Sequential" in done.stdout


def test_statistics_of_a_ranks_own_samples_are_noted_below_its_row(tmp_path: Path) -> None:
    instances = MODEL.replace("nn.BatchNorm1d(8)", "Instances(8, track_running_stats=True)")
    own = "class Instances(nn.InstanceNorm1d):\n    def forward(self, x):\n"
    own += "        return super().forward(x[..., None].expand(-1, -1, 2))[..., 0] + x\n"
    (tmp_path / "mine.py").write_text(instances.replace("class Block", f"{own}\nclass Block"))
    done = run_tutti(*PARITY, "--model", "mine:plain", "--layouts", "dp2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dp2 note: 1.norm.running_mean and 3 more were not compared" in done.stdout


def test_a_layout_that_crashes_is_a_row_and_the_others_are_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    file = tmp_path / "parity.json"
    flags = ["--model", "mine:Crash", "--layouts", "tp2,dp2", "--json", str(file)]
    done = run_tutti(*PARITY, *flags, timeout=110, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    content = json.loads(file.read_text())
    tp2, dp2 = content["rows"]
    assert tp2["ok"] is False and tp2["error"] == "rank 1: RuntimeError: a planted error"
    assert dp2["ok"] is True and dp2["error"] is None and content["complete"]
    assert "tp2    FAILED: rank 1: RuntimeError: a planted error" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["tp2", "dp2"]
    # Only rank 0 is shown, but the traceback is that of rank 1.
    assert 'raise RuntimeError("a planted error")' in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--layouts all needs the number of ranks"),
        (["--layouts", "all"], "--layouts all needs the number of ranks"),
        (["--layouts", "dp2.tp2", "--ranks", "2"], "layout dp2.tp2 needs 2 × 2 = 4 ranks"),
        (["--layouts", "dp2,tp4"], "layout tp4 needs 4 ranks, but this world has 2"),
        (["--layouts", "zp2"], "no axis 'zp'"),
        (["--recipe", "gtp", "--ranks", "2"], "--recipe gtp: did you mean gpt?"),
        (["--steps", "1", "--ranks", "2"], "--steps must be at least 2, got 1"),
        (["--layout", "dp2", "--ranks", "2"], "use --layouts dp2"),
        (["--model", "nowhere:f", "--layouts", "dp1"], "--model nowhere:f: No module named"),
        (["--json", "/proc/nowhere/x", "--ranks", "2"], "--json /proc/nowhere/x"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_two(flags: list[str], message: str) -> None:
    done = run_tutti(*PARITY, *flags)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr, done.stderr


def test_outputs_of_a_model_are_checked_with_a_dataset_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    own = ["--model", "mine:Output", "--dataset", "mine:data"]
    for command in (["parity", "--layouts", "dp1"], ["train", "--out", str(tmp_path / "run")]):
        done = run_tutti(*command, *own, "--device", "cpu", cwd=tmp_path)
        assert done.returncode == 2, done.stdout + done.stderr
        last = done.stderr.splitlines()[-1]
        assert "mine:Output returned dict with loss, scores" in last, done.stderr
        assert "logits" in last and "Traceback" not in done.stderr
