"""The command tutti train: run, stop, kill, resume, compare, and messages for wrong usage."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tutti.train.recipe import read_recipe_and_ranks
from tutti.train.run_directory import Metrics
from warm import WarmProcess
from worlds import run_tutti, run_warm, start_warm

pytestmark = pytest.mark.timeout(240)

# No learning-rate schedule: the learning rate must not depend on the length of the run.
SHORT = ["--recipe", "lenet", "--pixels", "8", "--no-evaluate"]
SHORT += ["--schedule", "constant", "--warmup", "0"]
# Long enough to be interrupted in the middle, with checkpoints frequent enough to be interrupted
# during one.
LONG = [*SHORT, "--steps", "400", "--checkpoint-every", "20", "--ranks", "2", "--keep", "3"]


def train(*flags: str | Path, code: int = 0, timeout: float = 120) -> Any:
    done = run_tutti("train", *flags, timeout=timeout)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


def losses(run: Path, rank: int = 0) -> dict[int, float]:
    lines = (run / "metrics" / f"rank{rank}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the loss of every step of the long run without interruption."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(*LONG, "--out", out)
    curve = losses(out)
    assert sorted(curve) == list(range(400))
    return curve


@contextmanager
def started(*flags: str | Path) -> Iterator[WarmProcess]:
    with start_warm(["-m", "tutti", "train", *flags]) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition: Any, process: WarmProcess, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"the condition was not met within {seconds} s"
        time.sleep(0.002)


def test_a_stopped_and_resumed_run_equals_the_uninterrupted_run_bit_for_bit(
    uninterrupted: dict[int, float], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with started(*LONG, "--out", out) as process:
        wait_for(lambda: list((out / "checkpoints").glob("step-*[0-9]")), process)
        process.send_signal(signal.SIGINT)  # Ctrl-C
        stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 75, stdout
    assert "stopped by a signal at step" in stdout
    first_part = losses(out)
    assert 20 <= len(first_part) < 400
    command = next(line.split() for line in stdout.splitlines() if "--resume" in line)
    train(*command[2:])
    assert losses(out) == uninterrupted
    done = train("--resume", "--out", out)  # with the recipe and the ranks of the run
    assert "the run is complete" in done.stdout
    assert json.loads((out / "summary.json").read_text())["world"]["size"] == 2


def test_a_signal_for_the_whole_process_group_saves_a_checkpoint(tmp_path: Path) -> None:
    """A scheduler sends SIGTERM, and a terminal Ctrl-C, also to the workers of the data loader."""
    flags = [*SHORT, "--epochs", "1000", "--workers", "1", "--out", str(tmp_path / "run")]
    with started(*flags) as process:
        wait_for(lambda: list((tmp_path / "run").glob("metrics/*")), process)
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert f"--resume --out {tmp_path / 'run'}" in out
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*[0-9]"))) > 0


def test_a_second_ctrl_c_ends_the_process_at_once(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, time, torch\n"
        "from tutti.train.telemetry import StatusSync, StepTimer\n"
        "StatusSync(0, 1, 0, StepTimer(torch.device('cpu'), own_time=False))\n"
        "for pause in (0.0, 0.1, 1.5):\n"  # 0.1 s later: the same Ctrl-C, sent by a launcher
        "    time.sleep(pause)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('continues', flush=True)\n"
    )
    done = run_warm([program])
    assert (done.returncode, done.stdout.count("continues")) == (130, 2)
    assert "Ctrl-C again" in done.stderr


def test_after_a_rank_is_killed_during_a_save_the_run_resumes_from_the_previous_checkpoint(
    uninterrupted: dict[int, float], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with started(*LONG, "--out", out) as process:
        checkpoints = out / "checkpoints"
        wait_for(lambda: list(checkpoints.glob("step-*[0-9]")), process)
        wait_for(lambda: list(checkpoints.glob("*.tmp")), process)
        psutil.Process(process.pid).children()[1].kill()  # rank 1
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert max(losses(out), default=0) < 399
    train(*LONG, "--out", out, "--resume")
    assert losses(out) == uninterrupted
    assert not list(checkpoints.glob("*.tmp"))


EXACT = [*SHORT, "--precision", "float64", "--global-batch", "60", "--steps", "30"]


def test_losses_do_not_depend_on_the_number_of_ranks_also_after_resuming(
    tmp_path: Path,
) -> None:
    curves = {}
    for ranks in (1, 3):
        out = tmp_path / str(ranks)
        train(*EXACT, "--ranks", str(ranks), "--out", out)
        curves[ranks] = list(losses(out).values())
    # In float64, a different order of summation changes the loss by far less than 1e-9 in 30 steps.
    assert curves[3] == pytest.approx(curves[1], rel=1e-9)

    moved = tmp_path / "moved"
    shorter = [*EXACT[:-1], "20", "--ranks", "2", "--out", moved]
    train(*shorter)
    train(*EXACT, "--ranks", "3", "--out", moved, "--resume")
    assert list(losses(moved).values()) == pytest.approx(curves[1], rel=1e-9)


# 1437 samples in steps of 300: the fifth step of an epoch is smaller.
RAGGED = [*SHORT, "--precision", "float64", "--global-batch", "300", "--steps", "7"]


@pytest.fixture(scope="module")
def ragged_on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    out = tmp_path_factory.mktemp("ragged") / "run"
    train(*RAGGED, "--out", out)
    return list(losses(out).values())


@pytest.mark.parametrize(
    "flags", [["--split", "2,1", "--accumulation", "3"], ["--split", "measured", "--no-overlap"]]
)
def test_losses_do_not_depend_on_how_the_batch_is_split(
    flags: list[str], ragged_on_one_rank: list[float], tmp_path: Path
) -> None:
    train(*RAGGED, *flags, "--ranks", "2", "--out", tmp_path / "run")
    assert list(losses(tmp_path / "run").values()) == pytest.approx(ragged_on_one_rank, rel=1e-9)


def test_two_ranks_with_synchronised_batch_norm_train_as_one_rank(tmp_path: Path) -> None:
    wide = ["--recipe", "wideresnet", "--dataset", "synthetic", "--pixels", "16", "--depth", "10"]
    wide += ["--width", "1", "--precision", "float64", "--global-batch", "12", "--steps", "4"]
    wide += ["--no-evaluate", "--checkpoint-activations", "full"]
    train(*wide, "--out", tmp_path / "one")
    train(*wide, "--sync-batchnorm", "--ranks", "2", "--out", tmp_path / "two")
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert list(two.values()) == pytest.approx(list(one.values()), rel=1e-9)


@pytest.mark.parametrize(
    ("flags", "layout"), [(["--ranks", "2"], "dp2"), (["--layout", "shard2"], "shard2")]
)
def test_the_recipe_in_a_run_directory_repeats_the_run_with_its_ranks_and_layout(
    flags: list[str], layout: str, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    train(*SHORT, "--steps", "12", "--lr", "0.07", *flags, "--out", first)
    recipe, ranks = read_recipe_and_ranks(str(first / "recipe.toml"))
    assert (recipe.optimization.lr, ranks) == (0.07, 2)
    again = tmp_path / "again"
    train("--recipe", first / "recipe.toml", "--out", again)
    assert losses(again) == losses(first) == losses(first, rank=1)
    summary = json.loads((again / "summary.json").read_text())
    keys = {"steps", "samples_per_s", "final_loss", "test_accuracy", "layout", "world"}
    assert keys <= set(summary) and summary["steps"] == 12 and summary["layout"] == layout
    environment = json.loads((first / "environment.json").read_text())
    assert environment["world"]["size"] == 2 and environment["environment"]["versions"]["torch"]


def test_every_test_sample_is_evaluated_once_with_any_number_of_ranks(tmp_path: Path) -> None:
    base = ["--recipe", "lenet", "--pixels", "8", "--steps", "5", "--precision", "float64"]
    # 360 test samples: with a batch of 42, or of 14 on three ranks, the last batch is smaller.
    base += ["--global-batch", "42"]
    scores = []
    for ranks in ("1", "3"):
        out = tmp_path / ranks
        train(*base, "--ranks", ranks, "--out", out)
        summary = json.loads((out / "summary.json").read_text())
        scores.append((summary["test_loss"], summary["test_accuracy"]))
    assert scores[1][1] == scores[0][1]
    assert scores[1][0] == pytest.approx(scores[0][0], rel=1e-9)


def test_a_user_model_and_dataset_are_trained(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def model():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(),\n"
        "                               torch.nn.Linear(16, 3))\n"
        "def data():\n"
        "    g = torch.Generator().manual_seed(0)\n"
        "    x = torch.randn(300, 4, generator=g)\n"
        "    y = (x @ torch.randn(4, 3, generator=g)).argmax(-1)\n"
        "    return (x[:240], y[:240]), (x[240:], y[240:])\n"
    )
    own = ["--model", "mine:model", "--dataset", "mine:data", "--epochs", "30", "--ranks", "2"]
    done = run_tutti("train", *own, "--lr", "0.03", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (out,) = (tmp_path / "runs").glob("model-*")  # the name of the function
    summary = json.loads((out / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.85
    recipe, _ = read_recipe_and_ranks(str(out / "recipe.toml"))
    assert recipe.optimization.optimizer == "adamw" and recipe.model == "mine:model"
    assert "image_size" not in done.stderr and "momentum" not in done.stderr


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Linear(4, 3, dtype=torch.cfloat)", ["0.weight is complex", "view_as_complex"]),
        ("LazyLinear(3)", ["0.weight is lazy", "sizes"]),
        ("Embedding(4, 3, sparse=True)", ["layer 0 has sparse gradients"]),
        ("ReLU()", ["no parameter that requires a gradient"]),
    ],
)
def test_parameters_that_cannot_be_trained_are_refused(
    model: str, expected: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch.nn import *\n"
        f"def model():\n    return Sequential({model})\n"
        "def data():\n    x = torch.zeros(64, 4)\n    y = torch.zeros(64).long()\n"
        "    return (x, y), (x, y)\n"
    )
    done = run_tutti("train", "--model", "mine:model", "--dataset", "mine:data", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and "--model mine:model" in done.stderr, done.stderr
    assert all(words in done.stderr for words in expected), done.stderr


def test_the_gpt_learns_from_the_standard_library(tmp_path: Path) -> None:
    tiny = ["--recipe", "gpt", "--dim", "64", "--layers", "2", "--seq-len", "64", "--steps", "40"]
    train(*tiny, "--ranks", "2", "--no-evaluate", "--accumulation", "2", "--out", tmp_path / "run")
    curve = losses(tmp_path / "run")
    assert curve[0] > 5.4 and curve[39] < 4.0  # a uniform prediction has ln 256 = 5.5 nats
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["mfu"] is None and summary["mfu_peak"] == "unknown device"


def test_a_loss_that_is_not_finite_ends_the_run_with_step_and_rank(tmp_path: Path) -> None:
    wild = [*SHORT, "--lr", "1e30", "--steps", "50", "--ranks", "2"]
    done = train(*wild, "--out", tmp_path / "run", code=1)
    assert "the loss of step" in done.stderr and "is not finite, first on rank" in done.stderr
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("ranks", [[], ["--ranks", "2"]])
def test_a_run_whose_checkpoints_cannot_be_written_fails(tmp_path: Path, ranks: list[str]) -> None:
    """A directory in the place of a checkpoint file makes writing fail, as a full disk would."""
    out = tmp_path / "run"
    train(*SHORT, "--steps", "2", "--out", out)
    shutil.rmtree(out / "checkpoints")
    (out / "checkpoints" / ".writer").mkdir(parents=True)
    done = train(*SHORT, "--steps", "4", "--out", out, "--resume", *ranks, code=2)
    line = done.stderr.splitlines()[-1]
    assert "1 checkpoint (step 4" in line and str(out) in line
    assert json.loads((out / "summary.json").read_text())["steps"] == 4


@pytest.mark.parametrize(
    ("kilobytes", "after", "missing"),
    [(1, 1, ["recipe.toml"]), (4, 500, ["2 checkpoints", "rank0.jsonl"])],
)
def test_a_run_whose_files_cannot_be_written_fails(
    kilobytes: int, after: int, missing: list[str], tmp_path: Path
) -> None:
    """A limit on the size of files makes writing fail in the middle, as a full disk does.

    The dataset sets the limit when `after` samples have been read: communication needs larger files
    at the start.
    """
    (tmp_path / "mine.py").write_text(
        "import resource, torch\n"
        "class Digits:\n"
        "    fetched = 0\n"
        "    def __len__(self):\n"
        "        return 64\n"
        "    def __getitem__(self, index):\n"
        "        self.fetched += 1\n"
        f"        if self.fetched == {after}:\n"
        f"            limit = {kilobytes << 10}, {kilobytes << 10}\n"
        "            resource.setrlimit(resource.RLIMIT_FSIZE, limit)\n"
        "        return torch.zeros(1, 8, 8), 0\n"
        "def data():\n"
        "    return Digits(), Digits()\n"
    )
    flags = ["--dataset", "mine:data", "--steps", "400", "--no-evaluate", "--out", "run"]
    flags += ["--checkpoint-every", "200"]
    done = run_tutti("train", *flags, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    line = done.stderr.splitlines()[-1]
    assert all(name in line for name in missing) and "Traceback" not in done.stderr, done.stderr


def test_metrics_survive_a_full_disk_and_tensorboard_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    board = SimpleNamespace(add_scalar=no_space, close=no_space)
    module = SimpleNamespace(SummaryWriter=lambda _: board)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)  # may not be installed
    metrics = Metrics(tmp_path / "full", 0, tmp_path)  # the directory does not exist
    metrics.add(0, loss=1.0)
    metrics.flush()
    assert metrics.failed.keys() == {str(metrics.path), "TensorBoard files"}
    metrics.path.parent.mkdir()
    metrics.add(1, loss=0.5)
    metrics.close()
    assert metrics.failed.keys() == {"TensorBoard files"}
    assert len(metrics.path.read_text().splitlines()) == 2


def test_a_sweep_of_learning_rates_prints_a_table(tmp_path: Path) -> None:
    sweep = [*SHORT, "--steps", "6", "--lr-sweep", "0.01,1e30", "--ranks", "1,2"]
    done = train(*sweep)
    assert "learning rate" in done.stdout and "2 ranks" in done.stdout
    assert "0.01" in done.stdout and done.stdout.count("diverged") == 2


_RANDOM = {
    "a random split": (
        "    samples = [(torch.full((1, 8, 8), float(i)), i % 10) for i in range(90)]\n"
        "    return torch.utils.data.random_split(samples, [80, 10])\n"
    ),
    "random samples": (
        "    x, y = torch.randn(80, 1, 8, 8), torch.tensor(np.random.randint(0, 10, 80))\n"
        "    return (x, y), (x, y)\n"
    ),
    "a generator without a seed": (
        "    y = torch.tensor(np.random.default_rng().integers(0, 10, 80))\n"
        "    return (torch.zeros(80, 1, 8, 8), y), (torch.zeros(80, 1, 8, 8), y)\n"
    ),
    "other lengths": (
        "    size = 80 + int(os.environ['RANK'])\n"
        "    part = torch.zeros(size, 1, 8, 8), torch.zeros(size, dtype=torch.long)\n"
        "    return part, part\n"
    ),
}


@pytest.mark.parametrize("kind", _RANDOM)
def test_all_ranks_train_on_the_same_random_data_or_the_run_fails(
    kind: str, tmp_path: Path
) -> None:
    function = f"import os\nimport numpy as np\nimport torch\n\ndef data():\n{_RANDOM[kind]}"
    (tmp_path / "mine.py").write_text(function)
    flags = [*SHORT[:2], "--dataset", "mine:data", "--steps", "2", "--ranks", "2", "--out", "run"]
    done = run_tutti("train", *flags, cwd=tmp_path)
    if kind in ("a random split", "random samples"):  # made from generators that tutti seeds
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 2 and "the dataset of rank 1" in done.stderr, done.stderr
    expected = "81, others 80" if kind == "other lengths" else "training targets"
    assert expected in done.stderr and "Traceback" not in done.stderr


def test_an_error_on_one_rank_ends_all_ranks_and_names_the_rank(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, torch\n"
        "from tutti.data import DataError\n"
        "def data():\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise DataError('the disk of this host is empty')\n"
        "    x, y = torch.zeros(64, 1, 8, 8), torch.zeros(64, dtype=torch.long)\n"
        "    return (x, y), (x, y)\n"
    )
    own = ["--dataset", "mine:data", "--ranks", "2", "--out", "run"]
    done = run_tutti("train", *own, cwd=tmp_path)
    assert done.returncode == 2
    assert "the disk of this host is empty (on rank 1)" in done.stderr
    assert not (tmp_path / "run").exists()  # the run directory was not created


def test_a_run_resumed_with_other_ranks_trains_on_the_same_number_of_samples(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    train(*SHORT, "--epochs", "2", "--ranks", "2", "--out", out)  # 2 × 23 steps of 64
    shutil.rmtree(out / "checkpoints" / "step-00000046")  # as if the run had been stopped halfway
    done = train("--resume", "--out", out, "--ranks", "1")  # 45 steps of 32 are left
    assert "resumed at step 23" in done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (23 + 45, 2 * 1437)

    train("--resume", "--out", out, "--ranks", "2", "--epochs", "3")  # 23 more steps of 64
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (23 + 45 + 23, 3 * 1437)


def test_an_existing_directory_is_refused_without_resume(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    done = train(*SHORT, "--steps", "2", "--out", tmp_path, code=2)
    assert "exists and is not empty: add --resume" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(*SHORT, "--steps", "2", "--out", out)
    other = ["--recipe", "lenet", "--pixels", "28", "--steps", "4", "--no-evaluate"]
    done = train(*other, "--out", out, "--resume", code=2)
    assert "fc1" in done.stderr or "weight" in done.stderr, done.stderr
