"""tutti train with layouts: the same losses as one rank, also if resumed under another layout.

Tolerance: the tests run five steps of AdamW with clipping in float64. Another order of summation
changes a loss by about 1e-15 relative, and AdamW amplifies errors, because it divides small
gradients by their own size. 1e-10 allows for that. A wrong factor, norm, sample or optimizer state
changes the loss by more than 1e-6.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from worlds import run_tutti

pytestmark = pytest.mark.timeout(300)

TOLERANCE = 1e-10
NEW_SEEDS = "the random number generators get new seeds"
FAST = ["--recipe", "gpt", "--dataset", "synthetic", "--precision", "float64", "--seq-len", "16"]
FAST += ["--clip", "0.5", "--schedule", "constant", "--warmup", "0", "--global-batch", "16"]
FAST += ["--device", "cpu", "--no-evaluate", "--vocab-size", "64"]
SMALL = [*FAST, "--layers", "2", "--dim", "32", "--heads", "4", "--tied"]


def train(*flags: str | Path, code: int = 0, timeout: float = 150) -> Any:
    done = run_tutti("train", *flags, timeout=timeout)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


def recorded(run: Path, rank: int = 0, name: str = "loss") -> list[float]:
    lines = (run / "metrics" / f"rank{rank}.jsonl").read_text().splitlines()
    return [row[name] for row in map(json.loads, lines) if name in row]


def test_a_run_of_eight_ranks_resumes_in_other_layouts_with_the_same_curves(
    tmp_path: Path,
) -> None:
    alone, eight = tmp_path / "alone", tmp_path / "eight"
    train(*SMALL, "--steps", "5", "--out", alone)
    expected = recorded(alone)

    train(*SMALL, "--steps", "3", "--ranks", "8", "--layout", "dp2.tp2.pp2", "--out", eight)
    summary = json.loads((eight / "summary.json").read_text())
    assert summary["layout"] == "dp2.tp2.pp2"
    assert summary["plan"]["global_batch"] == 16
    for rank in range(8):  # ranks of every pipeline stage record the loss
        assert recorded(eight, rank) == pytest.approx(expected[:3], rel=TOLERANCE)

    for layout in ("shard4", "tp2.pp2"):
        run = tmp_path / layout
        shutil.copytree(eight, run)
        flags = ["--resume", "--out", run, "--ranks", "4", "--layout", layout, "--steps", "5"]
        done = train(*flags)
        assert "resumed at step 3" in done.stderr
        assert recorded(run) == pytest.approx(expected, rel=TOLERANCE)
        for name in ("lr", "grad_norm"):
            assert recorded(run, 1, name) == pytest.approx(recorded(alone, 0, name), rel=TOLERANCE)


def test_a_benchmark_measures_throughput_and_writes_no_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--ranks", "2", "--layout", "shard2", "--steps", "3", "--out", run]
    train(*SMALL[:2], *SMALL[4:], *flags, "--benchmark", "--precision", "float32")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["samples_per_s"] > 0
    assert summary["steps"] == len(recorded(run)) == 3
    assert summary["final_loss"] == recorded(run)[-1]
    assert not (run / "checkpoints").exists()


def test_a_pipeline_with_a_v_schedule_and_tied_embeddings_is_saved_and_resumed(
    tmp_path: Path,
) -> None:
    """Both copies of the embedding are on rank 0: each must be restored with its state."""
    flags = [*SMALL, "--ranks", "2", "--layout", "pp2", "--layers", "4"]
    flags += ["--pipeline-schedule", "zbv"]
    train(*flags, "--steps", "4", "--out", tmp_path / "whole")
    train(*flags, "--steps", "2", "--out", tmp_path / "half")
    train("--resume", "--out", tmp_path / "half", "--ranks", "2", "--steps", "4")
    assert recorded(tmp_path / "half") == pytest.approx(recorded(tmp_path / "whole"), rel=TOLERANCE)


DROPOUT = """
from collections import OrderedDict
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.inside, self.after = nn.Dropout(0.5), nn.Dropout(0.5)
    def forward(self, x):
        return x + self.after(self.down(self.inside(torch.tanh(self.up(self.norm(x))))))

def make():
    layers = [("embed", nn.Embedding(64, 16)), ("one", Block()), ("two", Block())]
    return nn.Sequential(OrderedDict([*layers, ("head", nn.Linear(16, 64, bias=False))]))
"""


@pytest.mark.parametrize("stream", ["--sequence-parallel", "--no-sequence-parallel"])
def test_a_resumed_run_draws_the_same_dropout_masks_as_an_uninterrupted_run(
    tmp_path: Path, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noisy.py").write_text(DROPOUT)
    monkeypatch.chdir(tmp_path)
    flags = [*FAST, "--model", "noisy:make", "--ranks", "4", "--layout", "tp2.pp2", stream]
    train(*flags, "--steps", "4", "--out", tmp_path / "whole")
    train(*flags, "--steps", "2", "--out", tmp_path / "half")
    resume = ["--resume", "--ranks", "4", "--steps", "4", "--out"]
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "half", other)
    done = train(*resume, tmp_path / "half")
    assert "resumed at step 2" in done.stderr and NEW_SEEDS not in done.stderr
    expected = recorded(tmp_path / "whole")
    assert recorded(tmp_path / "half") == pytest.approx(expected, rel=TOLERANCE)

    # The layout is the same, but the flag changes whether tp ranks share their random numbers.
    flag = {"--sequence-parallel": "--no-sequence-parallel"}.get(stream, "--sequence-parallel")
    done = train(*resume, other, flag)
    assert "along tp" in done.stderr and NEW_SEEDS in done.stderr
    assert recorded(other)[:2] == pytest.approx(expected[:2], rel=TOLERANCE)
    assert recorded(other)[2:] != pytest.approx(expected[2:], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layout", "dp3"], "dp3 needs 3 ranks, but this world has 2: use --ranks 3 or dp2"),
        (["--layout", "pp2", "--accumulation", "1"], "use --accumulation 2"),
        (["--workers", "1", "--data-on-device"], "--workers 1 has no effect with --data-on-device"),
        (["--layout", "tp2", "--seq-len", "15"], "15 / 2 = 7.5): use --seq-len 16"),
        (["--layout", "shard2", "--bucket-mb", "3"], "--bucket-mb 25.0"),
        (
            ["--prefetch", "3"],
            "layout dp2, which has no shard: leave it out, or pass --prefetch 1",
        ),
    ],
)
def test_an_impossible_layout_is_refused_in_one_line_with_the_cure(
    flags: list[str], message: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = train(*SMALL, *flags, "--steps", "1", "--ranks", "2", "--out", out, code=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()
