"""Checkpoints of several ranks (real processes): resharding, one writer per shard, failures."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tutti
import worlds
from tutti.train.checkpoint import Checkpoints, format, save
from tutti.train.checkpoint.format import saved_steps
from tutti.world.errors import RanksDiffer, UsageError

ROWS, COLUMNS = 7, 5  # not divisible by the number of ranks of any world below


def mixed_model(seed: int, sharded: bool = True) -> nn.Module:
    """Weights sharded by rows and by columns, and replicated; plain tensors if not sharded."""
    torch.manual_seed(seed)
    model = nn.Module()
    by_row, by_column, both = (torch.randn(ROWS, COLUMNS) for _ in range(3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if sharded else None
    placements = {"by_row": Shard(0), "by_column": Shard(1), "replicated": Replicate()}
    for (name, placement), full in zip(placements.items(), (by_row, by_column, both), strict=True):
        value = distribute_tensor(full, mesh, [placement]) if sharded else full
        setattr(model, name, nn.Parameter(value))
    model.plain = nn.Parameter(torch.randn(3))
    return model


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        # Gradients are elementwise, so the result is the same for every sharding.
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 2
        optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All values of the model and the optimizer, as full tensors."""
    values = {}
    for name, parameter in model.named_parameters():
        slots = {"value": parameter.detach(), **optimizer.state[parameter]}
        for slot, tensor in slots.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            values[f"{name}.{slot}"] = full.tolist()
    return values


def save_sharded(world: tutti.World, directory: str) -> Any:
    model = mixed_model(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_steps(model, optimizer, 2)
    torch.manual_seed(100 + world.rank)
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(2, model, optimizer, {"samples": 64})
    drawn = torch.rand(2).tolist()
    saved = everything(model, optimizer)
    train_steps(model, optimizer, 1)
    return saved, everything(model, optimizer), drawn


def load_and_continue(world: tutti.World | None, directory: str) -> Any:
    """Resume in another world, or in a single process, and save again with its sharding."""
    model = mixed_model(seed=2, sharded=world is not None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    with Checkpoints(directory) as checkpoints:
        loaded = checkpoints.load(model, optimizer)
        checkpoints.save(loaded.step, model, optimizer, loaded.state)
    drawn = torch.rand(2).tolist()
    values = everything(model, optimizer)
    kinds = {isinstance(slots["exp_avg"], DTensor) for slots in optimizer.state.values()}
    train_steps(model, optimizer, 1)
    following = everything(model, optimizer)
    return [values, following, drawn, loaded.notes, loaded.state, loaded.ranks, sorted(kinds)]


def test_a_checkpoint_of_two_ranks_loads_on_three_ranks_and_on_one(tmp_path: Path) -> None:
    directory = str(tmp_path)
    [(saved, following, *drawn), (*_, other)] = worlds.in_world(save_sharded, 2, directory)
    drawn.append(other)

    three = worlds.in_world(load_and_continue, 3, directory)
    for values, next_values, _, _, state, ranks, kinds in three:
        assert values == saved and next_values == following
        assert state == {"samples": 64} and ranks == 2 and kinds == [False, True]
    assert [result[2] for result in three[:2]] == drawn
    assert three[2][2] not in drawn
    assert [result[3] for result in three[:2]] == [[], []]
    [note] = three[2][3]
    assert note.startswith("rank 2: the random number generators cpu, python")

    values, next_values, first, notes, _, ranks, kinds = load_and_continue(None, directory)
    assert values == saved and next_values == following
    assert ranks == 3 and kinds == [False] and notes == () and first == drawn[0]


def save_replicas(world: tutti.World, directory: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)), nn.BatchNorm1d(64))
    nn.init.constant_(model[6].running_mean, world.rank + 1)  # the ranks have different statistics
    wrapped = nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2, 1))
    grid = distribute_tensor(torch.ones(8, 64), mesh, [Replicate(), Shard(0)])
    wrapped.register_parameter("grid", nn.Parameter(grid))
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(1, wrapped)
        checkpoints.save(2, wrapped)


def test_replicas_are_written_once_and_divided_over_ranks(tmp_path: Path) -> None:
    worlds.in_world(save_replicas, 2, str(tmp_path))
    checkpoint = tmp_path / "step-00000002"
    index = json.loads((checkpoint / "index.json").read_text())
    assert len(index["tensors"]["model.grid"]["chunks"]) == 1
    assert all(len(index["tensors"][f"model.{n}.weight"]["chunks"]) == 1 for n in range(6))
    sizes = [(checkpoint / f"rank{rank}.safetensors").stat().st_size for rank in range(2)]
    one_weight = 64 * 64 * 4
    assert max(sizes) - min(sizes) < 1.5 * one_weight, sizes
    # Buffers that differ between ranks are saved from rank 0, as in DDP.
    bare = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)), nn.BatchNorm1d(64))
    bare.register_parameter("grid", nn.Parameter(torch.zeros(8, 64)))
    Checkpoints(tmp_path).load(bare)
    assert set(bare[6].running_mean.tolist()) == {1.0} and bool((bare.grid == 1).all())
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=checkpoint, capture_output=True)
    assert done.returncode == 0, done.stderr


def load_damaged(world: tutti.World, directory: str) -> Any:
    with Checkpoints(directory) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, mixed_model(step))
    if world.rank == 0:  # rank 0 verifies one of the files, rank 1 the other
        for step, rank in ((2, 0), (3, 1)):
            file = Path(directory, f"step-0000000{step}", f"rank{rank}.safetensors")
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
    dist.barrier()
    model = mixed_model(seed=5)
    step = checkpoints.load(model).step
    same = torch.equal(model.by_row.full_tensor(), mixed_model(1).by_row.full_tensor())
    try:
        checkpoints.load(nn.Linear(2, 2) if world.rank == 1 else model)
    except UsageError as error:
        return step, same, str(error)


def test_a_problem_on_one_rank_is_reported_on_all_ranks(tmp_path: Path) -> None:
    [first, second] = worlds.in_world(load_damaged, 2, str(tmp_path))
    assert first == second
    step, same, complaint = first
    assert step == 1 and same
    assert "does not fit this model" in complaint and "has no weight, bias" in complaint


def die_while_writing(world: tutti.World, directory: str, victim: int) -> None:
    model = mixed_model(1)
    with Checkpoints(directory, timeout=20) as checkpoints:
        checkpoints.save(1, model)
        checkpoints.wait()
        if world.rank == victim:
            # The rank is killed after it wrote its tensor file and before it writes its note.
            save.sync_path = lambda path: os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.save(2, model)
        checkpoints.wait()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_writing_does_not_change_the_previous_checkpoint(
    tmp_path: Path, victim: int
) -> None:
    with pytest.raises(AssertionError, match=f"rank {victim} on .* killed by SIGKILL"):
        worlds.in_world(die_while_writing, 2, str(tmp_path), victim)
    assert saved_steps(tmp_path) == [1]
    assert list(tmp_path.glob("step-00000002.*.tmp"))
    model = mixed_model(3, sharded=False)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.load(model).step == 1
        checkpoints.save(2, model)
    assert saved_steps(tmp_path) == [1, 2] and not list(tmp_path.glob("*.tmp"))


def fill_the_disk(world: tutti.World, directory: str) -> Any:
    small, large = nn.Linear(10, 10), nn.Linear(700, 700)  # large: 2 MB, most of it on one rank
    failures = []
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(1, small, state={"step": 1})
        checkpoints.save(2, large)
        checkpoints.save(3, small, state={"step": 3})  # the disk has space again
        failures.append({**checkpoints.failed})
        checkpoints.save(4, large)
        checkpoints.wait()
        failures.append({**checkpoints.failed})
        dist.barrier()
        return failures, saved_steps(Path(directory)), checkpoints.load(small).state


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    mount = "mount -t tmpfs none /mnt"
    return subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode == 0


def test_a_full_disk_is_reported_and_the_training_continues(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("needs the right to mount")
    results = tmp_path / "results"
    results.mkdir()
    directory = tmp_path / "disk"
    directory.mkdir()
    job = [__file__, "fill_the_disk", json.dumps([str(directory)]), str(results)]
    mount = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
    run = [*worlds.TUTTI, "run", "-n", "2", "--device", "cpu", worlds.__file__, *job]
    done = worlds.run_command(["unshare", "-m", "sh", "-c", mount, directory, *run])
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        failures, steps, state = json.loads((results / str(rank)).read_text())
        assert [[*failed] for failed in failures] == [["2"], ["2", "4"]]
        assert all("No space left on device" in reason for reason in failures[1].values())
        assert steps == [1, 3] and state == {"step": 3}
    assert "checkpoint step-00000002 was not written: rank" in done.stderr
    assert "step-00000001 is the newest" in done.stderr


def save_a_file_too_large(world: tutti.World, directory: str) -> Any:
    import resource

    large = nn.Linear(700, 700)
    with Checkpoints(directory) as checkpoints:
        if world.rank == 1:  # the file of rank 1 exceeds its size limit; rank 0 has no limit
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        checkpoints.save(1, large)
        checkpoints.wait()
        try:
            checkpoints.save(5 + world.rank, large)
        except RanksDiffer as error:
            return checkpoints.failed, str(error)


def test_a_rank_that_cannot_write_ends_the_save_on_all_ranks(tmp_path: Path) -> None:
    # Without the detection, rank 0 would wait for its timeout of 600 s.
    [first, second] = worlds.in_world(save_a_file_too_large, 2, str(tmp_path), timeout=60)
    assert first == second
    failed, differ = first
    assert failed["1"].startswith("rank 1: ") and "File too large" in failed["1"]
    assert differ == "ranks save different steps: 5, 6"
    assert saved_steps(tmp_path) == [] and not list(tmp_path.glob("step-00000001*"))


def test_a_full_disk_of_a_single_process_is_reported(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, nn.Linear(2, 2))
        checkpoints.wait()
        monkeypatch.setattr(format, "sync_path", full)
        checkpoints.save(2, nn.Linear(2, 2))
        checkpoints.wait()
    assert "No space left" in checkpoints.failed[2] and saved_steps(tmp_path) == [1]
