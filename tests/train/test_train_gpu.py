"""Training on a real GPU: graphs, precisions and ranks on one GPU, compared with eager float32."""

import json
from pathlib import Path
from typing import Any

import pytest

from worlds import TUTTI, run_command

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

LENET = ["--recipe", "lenet", "--device", "cuda", "--data-on-device", "--steps", "60"]
GPU = {"CUDA_VISIBLE_DEVICES": "0"}


def train(out: Path, *flags: str, code: int = 0) -> Any:
    done = run_command([*TUTTI, "train", *flags, "--out", out], timeout=300, env=GPU)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


def losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics" / "rank0.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    out = tmp_path_factory.mktemp("eager") / "run"
    train(out, *LENET, "--no-evaluate")
    return losses(out)


def test_a_cuda_graph_gives_the_losses_of_eager_steps(eager: list[float], tmp_path: Path) -> None:
    # 1437 samples in steps of 32: the last step of an epoch is smaller and runs eagerly.
    train(tmp_path / "run", *LENET, "--no-evaluate", "--cuda-graph")
    # In float32 the order of summation in convolutions may differ, so losses slowly drift apart.
    graphed = losses(tmp_path / "run")
    assert graphed[:8] == pytest.approx(eager[:8], rel=1e-3)
    assert graphed[:30] == pytest.approx(eager[:30], rel=2e-2)
    assert graphed == pytest.approx(eager, rel=0.1)


def test_a_run_with_a_cuda_graph_resumes(eager: list[float], tmp_path: Path) -> None:
    out = tmp_path / "run"
    graphed = [*LENET[:-1], "30", "--no-evaluate", "--cuda-graph", "--schedule", "constant"]
    train(out, *graphed)
    longer = [*LENET, "--no-evaluate", "--cuda-graph", "--schedule", "constant"]
    train(out, *longer, "--resume")
    assert len(losses(out)) == 60


@pytest.mark.parametrize("flags", [["--precision", "bf16"], ["--precision", "fp16"], ["--compile"]])
def test_reduced_precision_and_compilation_reduce_the_loss(
    flags: list[str], eager: list[float], tmp_path: Path
) -> None:
    train(tmp_path / "run", *LENET, "--no-evaluate", *flags)
    last = sum(losses(tmp_path / "run")[-10:]) / 10
    assert last < 0.5 * eager[0]


def test_two_ranks_on_one_gpu_give_the_losses_of_one_rank(tmp_path: Path) -> None:
    exact = ["--recipe", "lenet", "--device", "cuda", "--precision", "float64", "--steps", "20"]
    exact += ["--global-batch", "60", "--no-evaluate"]
    train(tmp_path / "one", *exact)
    done = train(tmp_path / "two", *exact, "--ranks", "2", "--ranks-per-gpu", "2")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    assert "2 ranks share one GPU" in done.stdout
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert "share one GPU" in summary["sharing_note"]


def test_the_gpt_reports_its_model_flops_utilization(tmp_path: Path) -> None:
    gpt = ["--recipe", "gpt", "--device", "cuda", "--precision", "bf16", "--steps", "60"]
    done = train(tmp_path / "run", *gpt, "--no-evaluate")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    known = summary["mfu_peak"] != "unknown device"
    assert (summary["mfu"] is not None) == known
    assert "tokens/s" in done.stderr
