"""`tutti tune` keeps a change only if it is faster, and survives candidates that fail."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tutti.cli.train import check_before_start, read_flags
from tutti.cli.tune import Tune, _recipe_search
from tutti.plan.cluster_spec import Cluster, named_cluster
from tutti.plan.measured_search import Change, Search, program_candidates, result_lines
from tutti.plan.planned_job import PlannedJob
from tutti.profile.captured_command import run_captured
from tutti.profile.try_advice import TimedRun
from worlds import run_tutti

PROGRAM = Path(__file__).parent / "slow_loader_program.py"


@pytest.mark.measured
def test_a_faster_change_is_kept_and_a_failing_change_is_a_row(tmp_path: Path) -> None:
    """Two workers load two batches of 20 ms at the same time; -1 workers are refused by torch."""

    def candidates(setting: str, best: Change, first: TimedRun) -> Iterator[Change]:
        assert first.program["loader"]["workers"] == 0
        yield {"loader": {"num_workers": -1}}
        yield {"loader": {"num_workers": 2}}

    command = [sys.executable, str(PROGRAM)]
    fewer = {"pairs": 1, "final_pairs": 1}
    search = Search(command, candidates, ["loader workers"], tmp_path, budget_s=300, **fewer)

    result = search.execute()

    failed, faster = result["rows"]
    assert failed["result"].startswith("failed: exit code 1") and "num_workers" in failed["result"]
    assert not failed["kept"] and faster["kept"], result
    assert result["change"] == {"loader": {"num_workers": 2}}
    assert result["gain"]["speedup"]["p50"] > 1.2, result
    (gain, keep) = result_lines(result, program=True)
    assert "×" in gain and keep == "change: DataLoader(num_workers=2)"


def test_a_rank_out_of_memory_fails_its_candidate_and_the_search_goes_on(tmp_path: Path) -> None:
    """With one loader worker, rank 1 runs out of memory while rank 0 waits for its gradients."""

    def candidates(setting: str, best: Change, first: TimedRun) -> Iterator[Change]:
        yield {"loader": {"num_workers": 1}}
        yield {"ddp": {"bucket_cap_mb": 5.0}}

    program = str(PROGRAM.with_name("out_of_memory_program.py"))
    command = [sys.executable, "-m", "tutti", "run", "-n", "2", "--device", "cpu", "--"]
    command += [sys.executable, program]
    search = Search(command, candidates, ["loader workers"], tmp_path, 300, pairs=1, final_pairs=1)

    result = search.execute()

    failed, other = result["rows"]
    assert failed["result"].startswith("failed: exit code") and "memory" in failed["result"]
    assert "time limit" not in failed["result"] and not failed["kept"]
    assert other["step_s"] > 0 and result["complete"]


SMALL_GPT = ["--recipe", "gpt", "--layers", "2", "--dim", "128", "--heads", "4", "--seq-len", "16"]


def test_layouts_are_tried_in_the_order_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks with 7 MiB each: dp2 needs 16 bytes for each of 490,000 parameters."""

    def small(ranks: int, device: str, ranks_per_gpu: int = 1) -> Cluster:
        return replace(named_cluster("cpu", ranks), memory_bytes=7 * 2**20)

    monkeypatch.setattr("tutti.plan.planned_job.local_cluster", small)
    flags = [*SMALL_GPT, "--batch", "2", "--layout", "shard2"]
    search = _recipe_search(Tune(device="cpu", ranks=2), flags, tmp_path / "out", 1.0)
    assert "layout" not in search.settings  # a layout that is given is not changed

    tried = [change["flags"] for change in search.candidates("layout", {}, None)]  # type: ignore[arg-type]

    settings = read_flags([*SMALL_GPT, "--global-batch", "4"])[0].settings
    plan = PlannedJob.of(settings, "cpu").plan(small(2, "cpu"))
    predicted = [str(each.candidate.layout) for each in plan.layouts if each.fits]
    assert [values["--layout"] for values in tried] == [x for x in predicted if x != "shard2"]
    assert "--layout dp2 is not tried: needs" in capsys.readouterr().err and "dp2" not in predicted
    assert len(tried) >= 1 and all("--accumulation" in values for values in tried)


def test_layouts_of_a_model_that_cannot_be_traced_are_tried_unsorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "untraceable.py").write_text(
        "from torch import nn\n"
        "class Depends(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x.flatten(1)) * (1 if x.sum().item() > 0 else 2)\n"
        "def model():\n"
        "    return Depends(8, 4)\n"
        "def data():\n"
        "    import torch\n"
        "    from torch.utils.data import TensorDataset\n"
        "    rows = TensorDataset(torch.ones(64, 8), torch.zeros(64, dtype=torch.int64))\n"
        "    return rows, rows\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--model", "untraceable:model", "--dataset", "untraceable:data", "--batch", "4"]
    search = _recipe_search(Tune(device="cpu", ranks=2), flags, tmp_path / "out", 1.0)

    tried = [change["flags"] for change in search.candidates("layout", {}, None)]  # type: ignore[arg-type]

    assert {"--layout": "shard2"} in tried
    assert "planning failed" in capsys.readouterr().err


def test_a_run_that_exceeds_its_limit_is_killed_with_its_children(tmp_path: Path) -> None:
    child = f"import time; open({str(tmp_path / 'pid')!r}, 'w').write('x'); time.sleep(1000)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    settings = {"directory": str(tmp_path)}

    code = run_captured([sys.executable, "-c", parent], settings, limit_s=3.0)

    assert code == 124
    for _ in range(50):
        left = subprocess.run(["pgrep", "-f", str(tmp_path / "pid")], capture_output=True).stdout
        if not left:
            break
        time.sleep(0.1)
    assert not left


def test_candidates_of_a_program_are_settings_that_it_has() -> None:
    ddp = {"other_buckets": {f"{n}": [] for n in range(9)}, "gradient_as_bucket_view": False}
    first = TimedRun(0, 0.1, {"ddp": [ddp], "fsdp": [], "loader": None}, Path())

    def values(setting: str) -> list[Change]:
        return list(program_candidates(setting, {}, first, cores=4))

    assert [v["ddp"]["bucket_cap_mb"] for v in values("bucket size")] == [0, 2, 4, 6, 8]
    assert values("gradient_as_bucket_view") == [{"ddp": {"gradient_as_bucket_view": True}}]
    assert values("loader workers") == values("prefetch") == []


@pytest.mark.measured
def test_a_recipe_keeps_its_global_batch_and_its_losses(tmp_path: Path) -> None:
    """Given flags are not changed, and wrong settings are not tried: 8 samples on 2 ranks."""
    flags = "--recipe lenet --ranks 2 --batch 4 --layout dp2 --workers 0 --no-compile"
    done = run_tutti(
        "tune", "--budget", "30s", *flags.split(), "--bucket-mb", "25", "--device", "cpu",
        "--out", str(tmp_path / "out"), cwd=tmp_path, timeout=110,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert {row["setting"] for row in result["rows"]} <= {"microbatch"}
    recipe = (tmp_path / "out" / "run1" / "run" / "recipe.toml").read_text()
    assert "global_batch = 8" in recipe


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--budget", "soon", "--recipe", "gpt"], "--budget"),
        (["--budget", "0s", "--recipe", "gpt"], "--budget"),
        (["--recipe", "gpt", "--layout", "tp3", "--ranks", "2"], "tp3"),
        (["--ranks", "2"], "--recipe"),
        (["--ranks", "2", "--", "torchrun", "--nproc-per-node", "2", "x.py"], "--ranks"),
        (["--", "missing.py"], "missing.py"),
        (["--lr", "1", "--", "x.py"], "--lr"),
        (["--recipe", "gpt", "--batch-find"], "--batch-find only works with tutti train"),
        (["--recipe", "gpt", "--lr-find", "50"], "--lr-find only works with tutti train"),
    ],
)
def test_wrong_input_is_refused(tmp_path: Path, arguments: list[str], named: str) -> None:
    done = run_tutti("tune", *arguments, cwd=tmp_path)

    assert done.returncode == 2
    assert named in done.stderr and len(done.stderr.splitlines()) == 1


def test_timed_runs_have_no_flags_that_need_evaluations(tmp_path: Path) -> None:
    flags = ["--recipe", "lenet", "--keep-best", "loss", "--patience", "3", "--lr", "0.1"]
    command = list(_recipe_search(Tune(device="cpu"), flags, tmp_path / "out", 1.0).command)
    train, base = read_flags(command[command.index("train") + 1 :])
    assert (train.settings.length.keep_best, train.settings.length.patience) == (None, None)
    assert train.settings.optimization.lr == 0.1
    check_before_start(train, base, 1)
