"""Several ranks on one real GPU: NCCL, DDP and FSDP2 are correct, and MPS ends afterwards."""

import json
from pathlib import Path

import psutil
import pytest

from worlds import TUTTI, run_command

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROGRAM = """
import copy, json, sys, torch, torch.distributed as dist, torch.nn as nn, tutti
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def train(model, batches, optimizer):
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


with tutti.init() as world:
    total = torch.arange(1000.0, device=world.device) * (world.rank + 1)
    dist.all_reduce(total)
    factor = sum(range(1, world.size + 1))
    reduced = torch.equal(total, torch.arange(1000.0, device=world.device) * factor)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).to(world.device)
    x, y = torch.randn(5, 8 * world.size, 64), torch.randn(5, 8 * world.size, 8)
    mine = slice(8 * world.rank, 8 * (world.rank + 1))
    whole = [(a.to(world.device), b.to(world.device)) for a, b in zip(x, y)]
    part = [(a[mine], b[mine]) for a, b in whole]

    # The reference: one device with the whole batch.
    expected = copy.deepcopy(model)
    train(expected, whole, torch.optim.SGD(expected.parameters(), lr=0.1))

    ddp = DistributedDataParallel(copy.deepcopy(model), device_ids=[world.device])
    train(ddp, part, torch.optim.SGD(ddp.parameters(), lr=0.1))
    ddp_error = max((a - b).abs().max().item()
                    for a, b in zip(ddp.module.parameters(), expected.parameters()))

    sharded = copy.deepcopy(model)
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer)
    train(sharded, part, torch.optim.SGD(sharded.parameters(), lr=0.1))
    fsdp_error = max((a.full_tensor() - b).abs().max().item()
                     for a, b in zip(sharded.parameters(), expected.parameters()))
    row = {"reduced": reduced, "ddp": ddp_error, "fsdp": fsdp_error,
           "device": str(world.device), "sharing": world.ranks_on_device,
           "note": world.sharing_note, "backend": world.backend}
    with open(f"{sys.argv[1]}/{world.rank}", "w") as file:
        json.dump(row, file)
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_one_gpu_compute_the_result_of_one_device(ranks: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = [*TUTTI, "run", "-n", ranks, "--ranks-per-gpu", ranks, program, tmp_path]
    done = run_command(run, timeout=200, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for rank in range(ranks):
        row = json.loads((tmp_path / str(rank)).read_text())
        assert row["reduced"] and row["device"] == "cuda:0" and row["sharing"] == ranks
        assert row["backend"] == "nccl" and "share one GPU" in row["note"]
        # float32 sums over another order of the batch: a few units in the last place.
        assert row["ddp"] < 1e-5 and row["fsdp"] < 1e-5, row
    assert f"{ranks} ranks share one GPU" in done.stderr
    assert mps_processes() == []


def test_mps_ends_with_a_world_that_fails(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import tutti\nwith tutti.init() as w:\n    raise ValueError('no')\n")
    run = [*TUTTI, "run", "-n", 2, "--ranks-per-gpu", 2, program]
    done = run_command(run, timeout=120, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert done.returncode == 1 and "ValueError: no" in done.stderr
    assert mps_processes() == []


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('never')\n")
    done = run_command([*TUTTI, "run", "-n", 3, program], env={"CUDA_VISIBLE_DEVICES": "0"})
    assert done.returncode == 2 and "3 ranks" in done.stderr
    assert "--ranks-per-gpu 3" in done.stderr and "never" not in done.stdout


def test_the_table_notes_that_ranks_share_a_gpu(tmp_path: Path) -> None:
    world = [*TUTTI, "world", "--ranks", 2, "--ranks-per-gpu", 2, "--json", tmp_path / "w.json"]
    done = run_command(world, timeout=120, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert done.returncode == 0, done.stderr
    assert "2 ranks share one GPU" in done.stdout
    rows = json.loads((tmp_path / "w.json").read_text())["rows"]
    assert [row["ranks_on_device"] for row in rows] == [2, 2]


def mps_processes() -> list[str]:
    return [
        str(process)
        for process in psutil.process_iter(["name", "status"])
        if process.info["name"].startswith("nvidia-cuda-mps")
        and process.info["status"] != psutil.STATUS_ZOMBIE  # ended, only not yet waited for
    ]
