"""Programs without tutti are captured and explained: real processes."""

import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tutti.profile.trace_file import TraceFile
from tutti.profile.trace_reader import read_rank
from worlds import TUTTI, run_command, run_tutti, run_warm

SCRIPT = Path(__file__).parent / "plain_ddp.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
STEPS = 6
SCHEDULE = ["--wait", "1", "--warmup", "1", "--active", str(STEPS)]
RANKS = 3
LATE, SLEEP_S = 1, 0.03  # in plain_ddp.py


def _profile(
    out: Path, command: list[Any], env: dict[str, str] | None = None, flags: Sequence[Any] = ()
) -> dict[str, Any]:
    result = out.with_suffix(".json")
    words = ["profile", "--out", out, *SCHEDULE, "--json", result, *flags, "--", *command]
    done = run_tutti(*words, env=env, cwd=out.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: dict[str, Any] = json.loads(result.read_text())
    rows["printed"] = done.stdout
    return rows


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Plain DDP with gloo on three ranks under torchrun. Rank LATE sleeps before backward."""
    out = tmp_path_factory.mktemp("gloo") / "out"
    command = [*TORCHRUN, str(RANKS), SCRIPT, "gloo", "10"]
    return out, _profile(out, command, {"LATE": str(LATE)})


@pytest.mark.measured  # the first test that needs the fixture: it is measured alone
def test_a_plain_ddp_script_is_captured_on_every_rank(gloo: tuple[Path, dict[str, Any]]) -> None:
    out, rows = gloo

    assert sorted(path.name for path in (out / "traces").iterdir()) == [
        f"rank{rank}.json.gz" for rank in range(RANKS)
    ]
    assert rows["schema"] == "tutti.profile/1"
    assert {"environment", "command", "ranks", "steps", "comm", "stragglers"} <= set(rows)
    assert [each["rank"] for each in rows["ranks"]] == list(range(RANKS))
    assert all(each["steps"] == STEPS and each["backend"] == "gloo" for each in rows["ranks"])


@pytest.mark.measured
def test_a_trace_has_the_times_of_unrecorded_steps(
    gloo: tuple[Path, dict[str, Any]],
) -> None:
    for path, row in zip(sorted((gloo[0] / "traces").iterdir()), gloo[1]["ranks"], strict=True):
        info = read_rank(path).capture_info

        assert len(info["step_s"]) == 1  # one step during --wait
        assert info["step_s"][0] > 0.9 * SLEEP_S  # rank LATE sleeps, the other ranks wait for it
        assert 0.5 < info["overhead"] < 20
        assert row["recording_overhead"] == info["overhead"]
        assert info["batch"] == 16  # batch size of the DataLoader
        assert info["threads"] == 1
        assert info["cpus"] == sorted(os.sched_getaffinity(0))


@pytest.mark.measured
def test_the_rank_that_sleeps_is_the_straggler(gloo: tuple[Path, dict[str, Any]]) -> None:
    _, rows = gloo

    _assert_named_with_its_cost(rows)
    # The sleep is a gap on the rank itself, and waiting on the others.
    for part, more in (("host_gap", True), ("wait", False)):
        seconds = [each["parts_s"][part] for each in rows["ranks"]]
        late = seconds.pop(LATE)
        assert all((late > other) == more for other in seconds)
    assert rows["stragglers"][0]["excess"]["part"] == "host_gap"


def _assert_named_with_its_cost(rows: dict[str, Any]) -> None:
    worst = rows["stragglers"][0]
    assert worst["rank"] == LATE
    assert worst["straggler"] and worst["steady"]
    assert worst["cost_s"]["p50"] == pytest.approx(SLEEP_S, rel=0.2)
    assert f"rank {LATE} is late" in rows["printed"]


def test_the_parts_of_captured_steps_add_up(gloo: tuple[Path, dict[str, Any]]) -> None:
    _, rows = gloo

    assert len(rows["steps"]) == RANKS * STEPS
    for each in rows["steps"]:
        assert sum(each["parts_s"].values()) == pytest.approx(each["seconds"], rel=1e-6)
        assert min(each["parts_s"].values()) >= -1e-9
        assert each["parts_s"]["input"] > 0  # the DataLoader


def test_collectives_are_matched_by_group_and_sequence_with_their_sizes(
    gloo: tuple[Path, dict[str, Any]],
) -> None:
    _, rows = gloo
    gradients = [each for each in rows["comm"] if each["op"] == "all_reduce" and each["bytes"] > 4]
    losses = [each for each in rows["comm"] if each["bytes"] == 4]

    assert len({each["group"] for each in rows["comm"]}) == 2  # of DDP and of the script
    assert all(each["matched"] == each["count"] for each in rows["comm"])
    parameters = 4 * (128 * 128 + 128) * 4  # bytes
    assert sum(each["bytes"] * each["count"] for each in gradients) == STEPS * parameters
    assert sum(each["count"] for each in losses) == STEPS  # each at the beginning of the next step


def test_the_printed_table_fits_80_columns(gloo: tuple[Path, dict[str, Any]]) -> None:
    _, rows = gloo

    assert max(map(len, rows["printed"].splitlines())) <= 80


def test_one_trace_can_be_read_without_the_others(
    gloo: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, rows = gloo
    (tmp_path / "rank1.json.gz").write_bytes((out / "traces" / "rank1.json.gz").read_bytes())

    result = tmp_path / "r.json"
    done = run_tutti("profile", "--trace", tmp_path, "--json", result)
    again = json.loads(result.read_text())

    assert done.returncode == 0, done.stderr
    assert "traces of ranks 0, 2 are missing" in again["notes"][0]
    assert [each["rank"] for each in again["ranks"]] == [1]
    assert again["ranks"][0]["step_s"] == pytest.approx(rows["ranks"][1]["step_s"])


def test_the_merged_trace_has_an_arrow_for_every_matched_collective(
    gloo: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, rows = gloo
    merged = tmp_path / "all.json.gz"

    done = run_tutti("profile", "--trace", out, "--merge", merged)

    assert done.returncode == 0, done.stderr
    events = list(TraceFile(merged).events())
    slices = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    ends = [e for e in events if e["ph"] == "f" and e.get("cat") == "tutti"]
    # From the last rank to each of the others.
    assert len(ends) == (RANKS - 1) * sum(each["matched"] for each in rows["comm"])
    assert all((e["pid"], e["tid"]) in slices for e in ends)


@pytest.mark.measured
def test_shm_under_tutti_run_is_explained_like_gloo(tmp_path: Path) -> None:
    run = ["tutti", "run", "-n", str(RANKS), "--device", "cpu", SCRIPT, "shm", "10"]
    tensorboard = ["--tensorboard", tmp_path / "board"]
    rows = _profile(tmp_path / "out", run, {"LATE": str(LATE)}, tensorboard)

    _assert_named_with_its_cost(rows)
    assert {each["backend"] for each in rows["ranks"]} == {"shm"}
    assert all(each["bytes"] for each in rows["comm"])
    # TensorBoard's profile plugin needs names like these.
    found = sorted((tmp_path / "board").iterdir())
    assert [re.sub(r"\d{19}", "TIME", path.name) for path in found] == [
        f"rank{rank}.TIME.pt.trace.json.gz" for rank in range(RANKS)
    ]
    assert found[0].read_bytes() == (tmp_path / "out/traces/rank0.json.gz").read_bytes()
    for each in rows["steps"]:
        assert sum(each["parts_s"].values()) == pytest.approx(each["seconds"], rel=1e-6)


OWN_LOOP = """
import torch, tutti
from torch.utils.data import DataLoader, dataloader
draw = dataloader._BaseDataLoaderIter.__next__
for batch in DataLoader(range(9)):
    pass  # no training yet
weight = torch.zeros(8, requires_grad=True)
with tutti.profile("traces", wait=1, warmup=0, active=2) as p:
    for microbatch, x in enumerate(DataLoader(range(40), batch_size=4)):
        (weight.sum() - x.sum()).square().backward()
        if microbatch % 2:
            p.step()
        if p.path is not None:
            assert dataloader._BaseDataLoaderIter.__next__ is draw
print(p.path.name)
"""


def test_a_training_loop_marks_its_own_steps(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(OWN_LOOP)

    done = run_warm(["loop.py"], cwd=tmp_path)
    read = run_tutti("profile", "--trace", tmp_path, "--json", tmp_path / "r.json.out")

    assert done.stdout.strip() == "rank0.json.gz", done.stderr
    assert read.returncode == 0, read.stderr
    rows = json.loads((tmp_path / "r.json.out").read_text())
    assert [each["step"] for each in rows["steps"]] == [1, 2]
    assert rows["ranks"][0]["parts_s"]["compute"] > 0
    assert read_rank(tmp_path / "traces" / "rank0.json.gz").capture_info["batch"] == 2 * 4


def test_tutti_train_records_batch_and_input(tmp_path: Path) -> None:
    run = ["train", "--recipe", "lenet", "--batch", "8", "--accumulation", "2"]
    run += ["--device", "cpu", "--steps", "12", "--no-evaluate", "--profile", "--out", "run"]

    done = run_tutti(*run, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    trace = read_rank(tmp_path / "run" / "traces" / "rank0.json.gz")
    assert trace.capture_info["batch"] == 16
    assert len(trace.capture_info["step_s"]) == 6
    assert trace.input.seconds > 0


NVTX = """
import torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
profiler_types = set()
for _ in range(9):
    model(torch.ones(64, device="cuda")).sum().backward()
    optimizer.step()
    profiler_types.add(torch._C._autograd._profiler_type().name)
print(sorted(profiler_types))
"""


@pytest.mark.gpu
def test_steps_are_marked_for_nsight_instead_of_recorded(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(NVTX)
    words = [*TUTTI, "profile", "--nvtx", *SCHEDULE, "--", "program.py"]

    done = run_command(words, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": "0"})

    assert done.returncode == 0, done.stderr
    assert "NVTX" in done.stdout  # torch gave every operator a range
    assert "Exception" not in done.stderr
    assert "steps 2 to 7 are marked for Nsight Systems" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_startup_code_does_not_affect_other_programs(tmp_path: Path) -> None:
    """torch is not imported, the environment's own sitecustomize runs, the exit code is kept."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.own_sitecustomize = True")
    (tmp_path / "program.py").write_text(
        "import sys, sitecustomize\n"
        "assert sys.own_sitecustomize and sitecustomize.__file__.endswith('sitecustomize.py')\n"
        "assert 'torch' not in sys.modules and 'tutti' not in sys.modules\n"
        "assert not any(entry.endswith('startup') for entry in sys.path)\n"
        "sys.exit(7)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    done = run_command(
        [*TUTTI, "profile", "--", "program.py"], env={"PYTHONPATH": path}, cwd=tmp_path
    )

    assert done.returncode == 7, done.stderr
    assert "nothing was captured. If no process took 10 steps" in done.stderr
    assert "PYTHONPATH" in done.stderr


OWN_PROFILER = """
import importlib.util
assert importlib.util.find_spec("torch")  # some libraries do so before they import torch
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.profiler.profile() as own_profiler:
    for _ in range(9):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
assert any(event.name == "aten::linear" for event in own_profiler.events())
"""


def test_a_program_keeps_its_own_profiler(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(OWN_PROFILER)

    done = run_tutti("profile", "--", "program.py", cwd=tmp_path)

    assert done.returncode == 2, done.stderr
    assert "its own torch.profiler" in done.stderr
    assert "AssertionError" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "--trace"),
        (["--trace", "nowhere"], "does not exist"),
        (["--", "no-such-program"], "is not a program"),
        (["--active", "0", "--", "python", "x.py"], "--active must be at least 1"),
        (
            ["--nvtx", "--", "python", "x.py"],
            "--nvtx needs CUDA",
        ),
        (
            ["--nvtx", "--json", "x.json", "--", "python", "x.py"],
            "--json needs traces, but --nvtx records none",
        ),
    ],
)
def test_wrong_usage_prints_one_line(flags: list[str], expected: str, tmp_path: Path) -> None:
    done = run_tutti("profile", *flags, cwd=tmp_path)

    assert done.returncode == 2
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_accelerate_script_is_captured(tmp_path: Path) -> None:
    script = Path(__file__).parent / "plain_accelerate.py"

    rows = _profile(tmp_path / "out", [*TORCHRUN, "2", script, "16"])

    assert [each["rank"] for each in rows["ranks"]] == [0, 1]
    assert any(each["op"] == "all_reduce" for each in rows["comm"])
    info = read_rank(tmp_path / "out" / "traces" / "rank0.json.gz").capture_info
    assert info["batch"] == 16  # batch size of each rank's loader


LIGHTNING = """
import torch
try:
    import lightning as L
except ImportError:
    import pytorch_lightning as L
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.randn(512, 64), batch_size=16)
L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=12, logger=False,
          enable_checkpointing=False, enable_progress_bar=False).fit(Model(), loader)
"""


@pytest.mark.skipif(
    not any(map(importlib.util.find_spec, ("lightning", "pytorch_lightning"))),
    reason="Lightning is not installed here",
)
def test_a_lightning_script_is_captured(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LIGHTNING)

    rows = _profile(tmp_path / "out", ["python", "script.py"])

    assert [each["rank"] for each in rows["ranks"]] == [0, 1]
    assert any(each["op"] == "all_reduce" for each in rows["comm"])
