"""--lr-find and --batch-find: found values, several ranks and layouts, a rank without memory."""

import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tutti.train.batch_find import judge, largest_batch
from tutti.train.lr_find import RangeTest
from worlds import run_tutti, start_warm

pytestmark = pytest.mark.timeout(240)


def curve(loss: "list[float]") -> RangeTest:
    rates = [1e-7 * 1e8 ** (n / (len(loss) - 1)) for n in range(len(loss))]
    return RangeTest([*zip(rates, loss, strict=True)], lr_factor=1.0)


def test_the_suggested_rate_is_a_tenth_of_the_rate_with_the_smallest_loss() -> None:
    steps = range(100)
    # The loss falls from step 40, and rises after step 70: 1e-7 · 1e8^(70/99) = 0.0455.
    falling = [2.0 + 0.01 * (-1) ** n - 0.05 * max(0, min(n, 70) - 40) for n in steps]
    loss = [value + 0.3 * max(0, n - 70) for n, value in zip(steps, falling, strict=True)]
    found = curve(loss)
    # The window of the smoothed loss has 11 steps, and a rate grows by 1.2 in a step.
    assert found.suggestion() == pytest.approx(0.00455, rel=0.6)
    assert found.describe()[-1].startswith("suggested (a tenth of it): --lr 0.00")
    scaled = RangeTest(found.curve, lr_factor=4.0)
    assert scaled.suggestion() == pytest.approx((found.suggestion() or 0) / 4)
    noise = [2.0 + 0.1 * math.sin(7 * n) for n in steps]
    assert curve(noise).suggestion() is None
    assert "does not fall" in curve(noise).describe()[-1]
    empty = RangeTest([], 1.0)
    assert empty.suggestion() is None and "first loss is not finite" in empty.describe()[0]
    assert len(RangeTest([(1.0, 1.0)], 1.0).describe())


def test_lr_find_gives_the_same_curve_in_every_layout_and_writes_nothing(tmp_path: Path) -> None:
    flags = ["train", "--recipe", "gpt", "--dataset", "synthetic", "--seq-len", "8", "--device"]
    flags += ["cpu", "--layers", "2", "--dim", "16", "--heads", "2", "--precision", "float64"]
    flags += ["--global-batch", "16", "--lr-find", "20"]
    curves = {}
    for layout in ("dp1", "dp2", "shard2", "pp2"):
        done = run_tutti(*flags, "--layout", layout, cwd=tmp_path)
        rows = re.findall(r"(?m)^(\d\.\d\de[+-]\d\d) +(\d+\.\d{4})", done.stdout)
        assert done.returncode in (0, 1) and len(rows) >= 8, done.stderr
        curves[layout] = rows[:8]  # rows after divergence depend on the rounding
    assert curves["dp1"] == curves["dp2"] == curves["shard2"] == curves["pp2"]
    assert not list(tmp_path.iterdir())


def test_the_search_for_the_batch_halves_doubles_and_ends() -> None:
    for first, limit in ((32, 100), (32, 5), (32, 1), (1, 1000), (32, 0), (7, 7)):
        tried: list[int] = []

        def attempt(batch: int, tried: list[int] = tried, limit: int = limit) -> "str":
            tried.append(batch)
            return "fits" if batch <= limit else "too large"

        found = largest_batch(first, attempt)  # type: ignore[arg-type]
        assert found <= limit and limit - found <= max(0, limit // 16), (first, limit, tried)
        assert len(tried) == len(set(tried)) < 20
    assert largest_batch(4, lambda batch: "whole" if batch >= 64 else "fits") == 64
    assert judge(128 + signal.SIGKILL, {}) == ("too large", "a rank was killed by SIGKILL")
    assert judge(1, {}) is None and judge(130, {}) is None


# Rank 1 may map only so much memory, from the moment when the dataset is loaded.
PROGRAM = """
import os, resource, time, torch
from pathlib import Path

def data():
    if os.environ.get("RANK") == "1":
        lines = Path("/proc/self/status").read_text().splitlines()
        used = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
        limit = used + (int(os.environ.get("MORE", "120")) << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    x = torch.randn(6000, 64)
    return (x, x[:, :1]), (x[:100], x[:100, :1])

def model():
    hidden = [layer for _ in range(4) for layer in (
        torch.nn.Linear(64, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 64))]
    return torch.nn.Sequential(*hidden, torch.nn.Linear(64, 1))
"""
FLAGS = ["--model", "mine:model", "--dataset", "mine:data", "--loss", "mse", "--device", "cpu"]
FLAGS += ["--ranks", "2"]


def test_the_found_batch_trains_and_twice_the_batch_does_not(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM)
    # Without threads, the memory of a step does not depend on the machine.
    env = {"OMP_NUM_THREADS": "1"}
    words = ["train", *FLAGS, "--batch", "256"]
    (tmp_path / "start.toml").write_text('base = "own"\n[batching]\nbatch = 256\n')
    search = ["train", "--recipe", "start.toml", *FLAGS, "--batch-find"]
    done = run_tutti(*search, cwd=tmp_path, env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    found = re.search(r"the largest batch that fits: (\d+)\nTo train with it: (.*)", done.stdout)
    assert found is not None, done.stdout
    batch = int(found[1])
    assert "rank 1 is out of memory" in done.stderr and "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) in (
        [],
        ["__pycache__"],
    )
    words = ["train", *FLAGS, "--steps", "6", "--evaluate-every", "3", "--checkpoint-every", "2"]
    done = run_tutti(*words, *found[2].split(), "--out", "fits", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    too_large = ["--batch", str(2 * batch), "--out", "large"]
    done = run_tutti(*words, *too_large, cwd=tmp_path, env=env)
    assert done.returncode == 2 and "out of memory" in done.stderr
    assert json.loads((tmp_path / "large" / "summary.json").read_text())["out_of_memory"]["rank"]


def test_ctrl_c_ends_the_search(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM)
    words = ["-m", "tutti", "train", *FLAGS, "--batch-find"]
    with start_warm(words, cwd=tmp_path, env={"MORE": "4000"}) as process:
        try:
            time.sleep(1)
            os.kill(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode in (75, 130, 128 + signal.SIGINT), errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lr-find", "5"], "--lr-find must be at least 20 steps, got 5"),
        (["--lr-find", "x"], "'x' is not a number"),
        (["--lr-find", "50", "--lr", "0.3"], "--lr 0.3 has no effect with --lr-find"),
        (["--lr-find", "50", "--steps", "9"], "--steps 9 has no effect with --lr-find"),
        (["--lr-find", "50", "--out", "new"], "--out has no effect with --lr-find"),
        (["--lr-find", "50", "--batch-find"], "no effect with --"),
        (["--lr-find", "50", "--lr-sweep", "0.1"], "--lr-sweep has no effect with --lr-find"),
        (["--batch-find", "--batch", "64"], "--batch 64 has no effect with --batch-find"),
        (["--batch-find", "--global-batch", "64"], "--global-batch 64 has no effect"),
        (["--batch-find", "--resume", "--out", "new"], "has no effect with --batch-find"),
        (["--batch-find", "--benchmark"], "--benchmark has no effect with --batch-find"),
        (["--batch-find", "--keep-best", "loss"], "--keep-best loss has no effect"),
        (
            ["--evaluate-only", "--resume", "--out", "new", "--wandb", "project"],
            "--wandb has no effect with --evaluate-only",
        ),
        (["--wandb", "project"], "--wandb project needs a package: pip install wandb"),
    ],
)
def test_flags_without_effect_are_refused(flags: list[str], message: str, tmp_path: Path) -> None:
    done = run_tutti("train", "--device", "cpu", *flags, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_batch_find_in_ranks_of_a_launcher_is_refused(tmp_path: Path) -> None:
    train = ["-m", "tutti", "train", "--recipe", "lenet", "--device", "cpu", "--batch-find"]
    done = run_tutti("run", "-n", "2", "--", sys.executable, *train, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "--batch-find starts its own ranks: use --ranks N instead of a launcher" in done.stderr
    assert not list(tmp_path.iterdir())


def test_lr_find_names_a_dataset_with_an_unusable_sample(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from tutti.data import DataError\n"
        "class Samples(list):\n"
        "    def __getitem__(self, index):\n"
        "        if index == 20:\n"
        "            raise DataError('sample 20 is damaged')\n"
        "        return torch.ones(4), torch.ones(1)\n"
        "def data():\n"
        "    return Samples(range(64)), Samples(range(16))\n"
        "def model():\n"
        "    return torch.nn.Linear(4, 1)\n"
    )
    words = ["--model", "mine:model", "--dataset", "mine:data", "--loss", "mse", "--batch", "8"]
    done = run_tutti("train", *words, "--lr-find", "20", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "--dataset mine:data: " in done.stderr and "sample 20 is damaged" in done.stderr
