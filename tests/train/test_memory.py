"""Memory by cause: the parts of a known model, and out of memory on one rank of a real run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tutti.parallel.apply import build_engine
from tutti.parallel.layout import EngineOptions, ParallelOptions
from tutti.train.memory import PARTS, MemoryByCause
from tutti.train.out_of_memory import asked_bytes, find_place, is_out_of_memory
from worlds import TUTTI, in_world, run_command, run_tutti

pytestmark = pytest.mark.timeout(240)

F32 = 4
WEIGHTS = F32 * (8 * 16 + 16 + 16 * 4 + 4)
TENSORS = 4  # parameters; AdamW keeps a step number of 4 bytes for each
SAMPLES = 32


def _counted(
    world: tutti.World, layout: str, accumulation: int, samples: int = SAMPLES
) -> dict[str, Any]:
    """Return the parts of two steps of a small MLP."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    options = EngineOptions(engine="single") if world.size == 1 else None
    engine = build_engine(model, world, options, ParallelOptions(layout=layout))
    optimizer = torch.optim.AdamW(engine.model.parameters())
    memory = MemoryByCause(world.device)
    memory.begin_steps(engine, optimizer, accumulation)
    batches = [(torch.randn(samples, 8), torch.zeros(samples, dtype=torch.int64))] * accumulation
    for _ in range(3):
        with memory.step():
            engine.run(batches, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
    return memory.summary()


def test_the_parts_of_an_mlp_have_the_bytes_of_its_tensors() -> None:
    with tutti.init(device="cpu") as world:
        row, few = _counted(world, "dp1", 1), _counted(world, "dp1", 1, samples=2)
    # The inputs of both matrix products (the second is also ReLU's output), the logarithms of the
    # softmax, the targets (int64), and the total weight of the loss.
    inputs, hidden = F32 * SAMPLES * 8, F32 * SAMPLES * 16
    loss = F32 * SAMPLES * 4 + 8 * SAMPLES + F32
    # With many samples, the sum is largest when backward begins; with few, in the optimizer step.
    assert (row["activations"], row["gradients"]) == (inputs + hidden + loss, 0)
    assert (few["activations"], few["gradients"]) == (0, WEIGHTS)
    modules = {item["module"]: item["bytes"] for item in row["activations_by_module"]}
    assert modules == {"0": inputs, "1": hidden, "loss": loss}
    for each in (row, few):
        assert each["parameters"] == WEIGHTS
        assert each["optimizer"] == 2 * WEIGHTS + F32 * TENSORS
        assert sum(each[part] for part in PARTS) == each["total"]
        assert each["other"] > 0 and each["note"] is None


def _in_two_layouts(world: tutti.World) -> list[dict[str, Any]]:
    cases = (("dp2", 1), ("dp2", 2), ("shard2", 1))
    return [_counted(world, layout, accumulation) for layout, accumulation in cases]


def test_buckets_and_gathered_parameters_are_buffers() -> None:
    for one, several, sharded in in_world(_in_two_layouts, 2):
        # Gradients are views of the buckets, except those of the first of several microbatches.
        assert (one["gradients"], one["buffers"]) == (WEIGHTS, 0)
        assert several["buffers"] == WEIGHTS
        assert sharded["parameters"] == WEIGHTS / 2
        assert sharded["optimizer"] == WEIGHTS + F32 * TENSORS
        assert sharded["buffers"] >= WEIGHTS  # the model has no blocks: all is gathered
        for row in (one, several, sharded):
            assert sum(row[part] for part in PARTS) == row["total"]


def test_errors_of_allocators_are_recognised() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    assert is_out_of_memory(raised.value) and asked_bytes(raised.value) == 1 << 62
    assert Path(find_place(raised.value).file or "").name == Path(__file__).name
    on_gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has")
    assert is_out_of_memory(on_gpu) and asked_bytes(on_gpu) == 3 << 29
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes differ"))


# Eight blocks that keep five activations of 4 KiB per sample, 160 KiB per sample in all. Rank 1
# may map only so much memory; the limit begins with the dataset, before the model is built.
MODEL = """
import os, resource
from pathlib import Path
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.LayerNorm(1024)
    def forward(self, x):
        x = self.scale(x)
        for _ in range(4):
            x = torch.sin(x)  # asks for memory
        return x

def make():
    return nn.Sequential(nn.Sequential(*[Block() for _ in range(8)]), nn.Linear(1024, 4))

def wide():
    return nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(4)])

class Samples:
    def __init__(self, size):
        self.size, self.more = size, int(os.environ.get("MORE_MB", 0)) << 20
    def __len__(self):
        return 8192
    def __getitem__(self, index):
        if self.more and os.environ.get("RANK", "1") == "1":
            self.limit()
        return torch.ones(self.size), 0
    def limit(self):
        more, self.more = self.more, 0
        if os.environ["CUDA_VISIBLE_DEVICES"]:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(more / total)
            return
        lines = Path("/proc/self/status").read_text().splitlines()
        used = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + more, resource.RLIM_INFINITY))

def samples():
    return Samples(1024), Samples(1024)

def wide_samples():
    return Samples(4096), Samples(4096)
"""
RUN = ["--steps", "2", "--benchmark"]


def train(
    folder: Path, megabytes: int, out: str, *flags: str, device: str = "cpu", code: int = 0
) -> tuple[str, dict[str, Any]]:
    (folder / "mine.py").write_text(MODEL)
    words = ["train", *RUN, "--device", device, *flags, "--out", str(folder / out)]
    if device == "cuda":
        env = {"MORE_MB": str(megabytes), "CUDA_VISIBLE_DEVICES": "0"}
        done = run_command([*TUTTI, *words], timeout=200, env=env, cwd=folder)
    else:
        done = run_tutti(*words, timeout=200, env={"MORE_MB": str(megabytes)}, cwd=folder)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stderr, json.loads((folder / out / "summary.json").read_text())


def test_out_of_memory_on_one_rank_names_the_line_and_changes_that_fit(tmp_path: Path) -> None:
    model = ["--model", "mine:make", "--dataset", "mine:samples", "--layout", "dp2"]
    flags = [*model, "--batch", "2048"]  # 320 MiB of activations
    text, summary = train(tmp_path, 240, "first", *flags, code=2)
    found = summary["out_of_memory"]
    line = next(n for n, row in enumerate(MODEL.splitlines(), 1) if "asks for memory" in row)
    assert (found["rank"], found["file"], found["line"]) == (1, "mine.py", line)
    assert found["operation"] == "torch.sin" and found["asked"] == 2048 * 1024 * F32
    assert found["memory"]["activations"] > 100 << 20
    assert sum(found["memory"][part] for part in PARTS) == found["memory"]["total"]
    assert "rank 1" in text and f"mine.py:{line}" in text and "Traceback" not in text
    changes = [change["flags"] for change in found["changes"] if change["fits"]]
    assert changes[0] == "--checkpoint-activations full"
    assert re.fullmatch(r"--batch \d+ --accumulation \d+", changes[1])
    for number, change in enumerate(changes):
        assert change in text
        _, summary = train(
            tmp_path, 240, f"cured{number}", *model, "--batch", "2048", *change.split()
        )
        assert summary["steps"] == 2


def test_out_of_memory_while_the_model_is_created_or_updated(tmp_path: Path) -> None:
    # 256 MiB of parameters: gradients and AdamW's state need another 768 MiB.
    flags = ["--model", "mine:wide", "--dataset", "mine:wide_samples", "--batch", "2"]
    text, summary = train(tmp_path, 150, "created", *flags, "--ranks", "2", code=2)
    assert summary["out_of_memory"]["phase"] == "while the model was created"
    assert "while the model was created" in text and "Traceback" not in text
    text, summary = train(tmp_path, 800, "updated", *flags, code=2)
    found = summary["out_of_memory"]
    assert found["phase"] == "in the optimizer step"
    assert found["memory"]["parameters"] == found["memory"]["gradients"] == 256 << 20


def test_out_of_memory_in_lr_find_is_explained_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    words = ["train", "--lr-find", "20", "--model", "mine:wide", "--dataset", "mine:wide_samples"]
    for megabytes, phase in ((150, "while the model was created"), (800, "in the optimizer step")):
        env = {"MORE_MB": str(megabytes)}
        done = run_tutti(*words, "--batch", "2", "--device", "cpu", env=env, cwd=tmp_path)
        assert done.returncode == 2 and phase in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_out_of_memory_on_a_gpu(tmp_path: Path) -> None:
    """One rank, and two ranks on one GPU of which only rank 1 has a limit."""
    line = next(n for n, row in enumerate(MODEL.splitlines(), 1) if "asks for memory" in row)
    model = ["--model", "mine:make", "--dataset", "mine:samples", "--batch", "4096"]
    two = ["--ranks", "2", "--ranks-per-gpu", "2", "--layout", "dp2"]
    for name, flags, rank in (("one", model, 0), ("two", [*model, *two], 1)):
        text, summary = train(tmp_path, 400, f"{name}-first", *flags, device="cuda", code=2)
        found = summary["out_of_memory"]
        assert (found["rank"], found["file"]) == (rank, "mine.py")
        assert found["operation"] == "torch.sin" and found["line"] == line
        assert found["asked"] == 4096 * 1024 * F32
        assert found["memory"]["activations"] > 100 << 20
        assert sum(found["memory"][part] for part in PARTS) == found["memory"]["total"]
        assert f"mine.py:{line}" in text and "Traceback" not in text
        fitting = [change["flags"] for change in found["changes"] if change["fits"]]
        assert fitting
        for number, change in enumerate(fitting):
            assert change in text
            out = f"{name}-cured{number}"
            _, summary = train(tmp_path, 400, out, *flags, *change.split(), device="cuda")
            row = summary["memory"]["ranks"][rank]
            assert summary["steps"] == 2
            assert sum(row[part] for part in PARTS) == row["total"] <= 400 << 20
