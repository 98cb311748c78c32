"""The recorder's ring has what the program did: operations, lines, steps, phases, workers."""

import json
from pathlib import Path
from typing import Any

import pytest

from tutti.observe import ring_reader
from worlds import run_tutti

SCRIPT = """
import json, os, sys, threading, time
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.utils.data import DataLoader
from tutti.observe import ring_reader

backend, out = sys.argv[1:]
dist.init_process_group(backend)
rank = dist.get_rank()
pair = dist.new_group([0, 1], group_desc="pair")
x = torch.ones(3, 4)
dist.all_reduce(x)  # line 1
dist.broadcast(torch.ones(2, dtype=torch.int64), 1)  # line 2
dist.all_gather_into_tensor(torch.ones(8), torch.ones(4))  # line 3
dist.all_reduce(x, op=dist.ReduceOp.MAX, group=pair, async_op=True).wait()  # line 4
dist.barrier()  # line 5
if rank == 0:
    dist.send(x, 1, tag=5)  # line 6 of rank 0
else:
    dist.recv(x, 0, tag=5)  # line 6 of rank 1
with torch.inference_mode():
    dist.all_reduce(torch.ones(5, dtype=torch.bfloat16))  # line 7

def in_thread():
    dist.all_reduce(torch.ones(6))  # line 8

thread = threading.Thread(target=in_thread)
thread.start()
thread.join()
functional.all_reduce(torch.ones(7), "sum", dist.group.WORLD).sum().item()  # line 9
if os.fork() == 0:
    os._exit(0)  # a forked child does not write into the ring of its parent
os.wait()

class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.ones(4)

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
folder = ring_reader.job_folder(os.environ["TUTTI_RUN_ID"])
workers = 0
for batch in DataLoader(Items(), num_workers=rank):
    job = ring_reader.read_job(folder, 0, 0)
    workers = max(workers, sum(each.parent == os.getpid() and each.worker >= 0 for each in job))
    model(batch).sum().backward()
    optimizer.step()
time.sleep(1.1)  # a thread asks the sends and receives of gloo twice a second
process = ring_reader.read_ring(folder / f"{os.getpid()}.ring")
with open(f"{out}/{rank}.json", "w") as file:
    json.dump({**process.to_json(), "workers": workers}, file)
dist.barrier()
left = [each.worker for each in ring_reader.read_job(folder, 0, 0)]
assert left == [-1, -1], left
"""


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_ring_has_what_the_program_did(backend: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    lines = {
        line.rpartition("# line ")[2]: number
        for number, line in enumerate(SCRIPT.splitlines(), start=1)
        if "# line " in line
    }
    done = run_tutti("run", "-n", "2", "--device", "cpu", script, backend, tmp_path)
    assert done.returncode == 0, done.stderr

    for rank in range(2):
        content = json.loads((tmp_path / f"{rank}.json").read_text())
        assert content.pop("workers") == rank  # rank 1 has a loader worker, which has its own ring
        process = ring_reader.Process.from_json(content)
        _check_operations(process, rank, lines)
        _check_steps(process, rank)
        assert (process.rank, process.world_size, process.backend) == (rank, 2, backend)
        assert process.alive and process.exit_state == ring_reader.RUNNING


def _check_operations(process: ring_reader.Process, rank: int, lines: dict[str, int]) -> None:
    message = ("send", "float32", (3, 4), 1, 5, "") if rank == 0 else (
        "recv", "float32", (3, 4), 0, 5, ""
    )  # fmt: skip
    expected: list[tuple[Any, ...]] = [
        ("all_reduce", "float32", (3, 4), -1, -1, "sum"),
        ("broadcast", "int64", (2,), 1, -1, ""),
        ("all_gather_into_tensor", "float32", (4,), -1, -1, ""),
        ("all_reduce", "float32", (3, 4), -1, -1, "max"),
        ("barrier",),
        message,
        ("all_reduce", "bfloat16", (5,), -1, -1, "sum"),
        ("all_reduce", "float32", (6,), -1, -1, "sum"),
        ("all_reduce", "float32", (7,), -1, -1, "sum"),
    ]
    assert len(process.operations) == process.entered == len(expected)
    for number, (found, wanted) in enumerate(zip(process.operations, expected, strict=True), 1):
        fields = (found.kind, found.dtype, found.shape, found.peer, found.tag, found.reduction)
        assert fields[: len(wanted)] == wanted
        line = lines.get(str(number)) or lines[f"{number} of rank {rank}"]
        assert found.site.split("/")[-1].startswith(f"script.py:{line} in "), found
        assert found.state == "completed" and found.completed >= found.entered > 0
    label = {each.label: each for each in process.groups.values()}
    pair = next(group for name, group in label.items() if name.startswith("group pair"))
    assert pair.ranks == (0, 1) and process.operations[3].group == pair.key
    # Collectives are counted per group. Messages are counted by peer and tag.
    sequences = [each.sequence for each in process.operations]
    assert sequences == [1, 2, 3, 1, 4, 1, 5, 6, 7]


def _check_steps(process: ring_reader.Process, rank: int) -> None:
    assert (process.steps, process.batches, process.loaders_ended) == (4, 4, 1)
    assert [step.number for step in process.step_history] == [1, 2, 3, 4]
    for step in process.step_history:
        assert sum(step.phases.values()) == pytest.approx(step.ended - step.began, abs=1e-3)
        if rank == 0:  # each batch takes 50 ms in this process
            assert step.phases["input"] >= 0.05
        assert step.phases["backward"] > 0 and step.phases["optimizer"] > 0


def test_a_ring_that_is_cut_off_or_of_another_version_is_ignored(tmp_path: Path) -> None:
    import ctypes

    size = ctypes.sizeof(ring_reader.Ring)
    for name, content in {
        "empty": b"",
        "short": b"tuttiobs" + bytes(100),
        "other": b"somebody" + bytes(size - 8),
        "version": b"tuttiobs" + (99).to_bytes(4, "little") + bytes(size - 12),
    }.items():
        (tmp_path / f"{name}.ring").write_bytes(content)
        assert ring_reader.read_ring(tmp_path / f"{name}.ring") is None
    assert ring_reader.read_job(tmp_path) == [] and ring_reader.read_progress(tmp_path) == []


def test_old_jobs_are_removed_and_running_jobs_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    monkeypatch.setattr(ring_reader, "rings_folder", lambda: tmp_path)
    for number in range(6):
        folder = tmp_path / f"job{number}"
        folder.mkdir()
        (folder / ("1.ring" if number == 0 else "999999999.ring")).touch()  # pid 1 is running
        age = 1000 * (6 - number)
        os.utime(folder, (folder.stat().st_mtime - age,) * 2)
    ring_reader.remove_old_jobs(max_age=3500, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job0", "job4", "job5"]
