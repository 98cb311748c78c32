"""torch's own DDP, FSDP, tensor and pipeline parallelism gives the same results as on gloo."""

import json
import os
import sys
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from forked_ranks import forked
from shm_cases import group_of
from tutti.comm.shm import register
from worlds import in_world, run_command


def groups() -> dict[str, Any]:
    return {"gloo": dist.new_group(backend="gloo"), "shm": group_of()}


def unlike(results: dict[str, list[Tensor]]) -> list[str]:
    """Return the backends whose results differ from the results of gloo in any bit."""
    expected = results["gloo"]
    assert expected and all(torch.isfinite(t.float()).all() for t in expected)
    return [
        f"{name}: tensor {i} differs by {(got - want).abs().max().item()}"
        for name, tensors in results.items()
        for i, (got, want) in enumerate(zip(tensors, expected, strict=True))
        if not torch.equal(got, want)
    ]


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(24, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, 6))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(16, 24, generator=torch.Generator().manual_seed(100 * rank + step))


# ---- Data parallel ----


def ddp(world: Any, made: dict[str, Any]) -> list[str]:
    results, logged = {}, {}
    for name, group in made.items():
        # Ranks start differently: DDP must broadcast rank 0's parameters and buffers.
        wrapped = nn.parallel.DistributedDataParallel(
            model(world.rank), process_group=group, bucket_cap_mb=0.002
        )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for step in range(6):
            with wrapped.no_sync() if step % 3 == 1 else torch.enable_grad():
                loss = wrapped(batch(world.rank, step)).square().mean()
                loss.backward()
            if step % 3 != 1:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        results[name] = [*losses, *(t.detach().float() for t in wrapped.state_dict().values())]
        logged[name] = wrapped._get_ddp_logging_data()
    # torch names every backend of other packages "custom" here; all else is as on gloo.
    assert logged["shm"]["backend_name"] in ("shm", "custom")
    facts = ("world_size", "rank", "module_name", "iteration", "bucket_sizes", "comm_hook")
    wrong = [key for key in facts if logged["shm"].get(key) != logged["gloo"].get(key)]
    return [*wrong, *unlike(results)]


def ddp_with_a_hook(world: Any, made: dict[str, Any]) -> list[str]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    results = {}
    for name, group in made.items():
        wrapped = nn.parallel.DistributedDataParallel(model(), process_group=group)
        wrapped.register_comm_hook(group, default_hooks.fp16_compress_hook)
        loss = wrapped(batch(world.rank, 0)).square().mean()
        loss.backward()
        results[name] = [p.grad for p in wrapped.parameters() if p.grad is not None]
    return unlike(results)


# ---- Sharded ----


def fsdp2(world: Any, made: dict[str, Any]) -> list[str]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    results = {}
    for name, group in made.items():
        mesh = DeviceMesh.from_group(group, "cpu")
        sharded = model()
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for layer in (sharded[0], sharded[3]):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(sharded, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
        losses = []
        for step in range(4):
            loss = sharded(batch(world.rank, step)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        full = [p.full_tensor().detach() for p in sharded.parameters()]  # type: ignore[attr-defined]
        results[name] = [*losses, *full]
    return unlike(results)


# ---- Tensors with placements ----


def dtensor(world: Any, made: dict[str, Any]) -> list[str]:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    results = {}
    torch.manual_seed(0)
    whole = torch.randint(-50, 50, (10, 7)).float()
    for name, group in made.items():
        mesh = DeviceMesh.from_group(group, "cpu")
        actual = []
        kinds = [Replicate(), Shard(0), Shard(1)]
        spread = [distribute_tensor(whole, mesh, [kind]) for kind in kinds]
        spread.append(DTensor.from_local(whole + world.rank, mesh, [Partial()]))
        for before in spread:
            for after in kinds:
                moved = before.redistribute(mesh, [after])
                actual += [moved.to_local(), moved.full_tensor()]
        torch.manual_seed(1)
        mlp = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12))
        parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        out = mlp(torch.ones(4, 12))
        out.square().mean().backward()
        grads = [p.grad.full_tensor() for p in mlp.parameters()]
        results[name] = [t.detach() for t in (*actual, out, *grads)]
    return unlike(results)


def all_of_these(world: Any) -> dict[str, list[str]]:
    made = groups()
    return {
        "DDP": ddp(world, made),
        "DDP with a communication hook": ddp_with_a_hook(world, made),
        "FSDP2": fsdp2(world, made),
        "DTensor, and an MLP in tensor parallel": dtensor(world, made),
    }


def test_data_tensor_and_sharded_parallel() -> None:
    for reports in in_world(all_of_these, 2):
        assert not any(reports.values()), reports


# ---- Pipelines ----


def pipeline(world: Any) -> list[str]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    results = {}
    for name, group in groups().items():
        actual = []
        for schedule_class in (ScheduleGPipe, Schedule1F1B):
            torch.manual_seed(0)
            parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(world.size)]
            part = parts[world.rank]
            stage = PipelineStage(part, world.rank, world.size, torch.device("cpu"), group=group)
            schedule = schedule_class(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
            inputs = batch(0, 1)[:, :8].contiguous()
            losses: list[Tensor] = []
            if world.rank == 0:
                schedule.step(inputs)
            elif world.rank == world.size - 1:
                actual.append(schedule.step(target=torch.zeros(16, 8), losses=losses))
            else:
                schedule.step()
            actual += [*losses, *(p.grad for p in part.parameters() if p.grad is not None)]
        results[name] = [t.detach() for t in actual]
    return unlike(results)


def test_pipelines() -> None:
    assert in_world(pipeline, 3) == [[], [], []]


# ---- shm as the default group of a plain script ----


def _double_and_sum(tensor: Tensor) -> Tensor:
    return functional.all_reduce(tensor * 2, "sum", dist.group.WORLD)


def as_default(rank: int, compiled: bool) -> dict[str, Any]:
    reports: dict[str, Any] = {"backend": dist.get_backend()}
    objects: list[Any] = [None] * 4
    dist.all_gather_object(objects, {"rank": rank})
    reports["objects"] = [each["rank"] for each in objects]
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mesh.get_group("a"))
    reports["along a"] = tensor.item()
    names = ("all_gather_single", "all_gather_tensor")  # of torch 2.13, and before
    all_gather_tensor = next(getattr(functional, n) for n in names if hasattr(functional, n))
    gathered = all_gather_tensor(torch.tensor([rank]), 0, mesh.get_group("b"))
    reports["along b"] = [int(each) for each in gathered]
    # "cpu:shm" is the same object: no need to compile twice, which takes seconds.
    call = torch.compile(_double_and_sum, backend="aot_eager") if compiled else _double_and_sum
    reports["summed"] = [float(each) for each in call(torch.ones(2))]
    dist.barrier()
    return reports


@pytest.mark.parametrize("backend", ["shm", "cpu:shm"])
def test_a_plain_script_may_use_shm_as_its_default(backend: str) -> None:
    for rank, reports in enumerate(forked(as_default, 4, backend == "shm", backend=backend)):
        first, second = rank % 2, rank // 2
        assert reports == {
            "backend": backend,
            "objects": [0, 1, 2, 3],
            "along a": float(first + first + 2),
            "along b": [2 * second, 2 * second + 1],
            "summed": [8.0, 8.0],
        }


def split(rank: int) -> list[float]:
    tensor = torch.tensor([float(rank)])
    # As DeviceMesh does by dist.split_group where the default group is bound to a GPU.
    part = dist.group.WORLD.split_group([0, 1] if rank < 2 else [2, 3], group_name=f"{rank // 2}")
    part.allreduce([tensor]).wait()
    return [tensor.item(), part.size()]


def test_a_group_can_be_split() -> None:
    assert forked(split, 4) == [[1.0, 2], [1.0, 2], [5.0, 2], [5.0, 2]]


def new_api(rank: int) -> dict[str, Any]:
    """The groups of torch.distributed._dist2, which no global variable holds."""
    from torch.distributed import _dist2

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = [server.port]
    dist.broadcast_object_list(address, 0)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(address[0]), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    limit = timedelta(seconds=20)
    first, second = (_dist2.new_group("shm", limit, "cpu") for _ in range(2))
    mine, ones, outs = torch.full((2,), rank + 1.0), torch.ones(2), [torch.zeros(2), torch.zeros(2)]
    first.allreduce(ones, timeout=limit).wait()
    second.broadcast(mine, root=1, timeout=limit).wait()
    first.allgather(outs, mine + rank, timeout=limit).wait()
    first.gather(outs if rank == 0 else [], mine + rank, root=0, timeout=limit).wait()
    given = [torch.full((2,), 7.0), torch.full((2,), 8.0)] if rank == 0 else []
    got, part = torch.zeros(2), torch.zeros(2)
    first.scatter(got, given, root=0, timeout=limit).wait()
    first.reduce_scatter(part, [torch.ones(2), mine], timeout=limit).wait()
    second.barrier(timeout=limit).wait()
    reports = {"sums": [each.tolist() for each in (ones, mine, *outs, got, part)]}
    alone = [first.split_group([each], timeout=limit, group_name=f"{each}") for each in (0, 1)]
    reports["split"] = [each.size() if each else None for each in alone]
    store = dist.TCPStore("127.0.0.1", address[0], is_master=False)
    merged = alone[rank].merge_remote_group(store, 2, timedelta(seconds=15), "merged")
    options = merged._get_backend(torch.device("cpu")).options
    merged.allreduce(ones).wait()
    reports["merged"] = [merged.size(), options._timeout.total_seconds(), ones[0].item()]
    with pytest.raises(ValueError, match="cpu"):
        _dist2.new_group("shm", limit, "cuda")
    for group in (merged, alone[rank], first, second):
        group.shutdown()
    dist.barrier()
    return reports


@pytest.mark.skipif(
    find_spec("torch.distributed._dist2") is None,
    reason="this torch has no torch.distributed._dist2",
)
def test_the_new_groups_of_torch_use_shm() -> None:
    for rank, reports in enumerate(forked(new_api, 2)):
        ones, mine, zero, one, got, part = reports["sums"]
        assert (ones, mine, got) == ([2.0, 2.0], [2.0, 2.0], [7.0 + rank] * 2)
        assert (zero, one) == ([2.0, 2.0], [3.0, 3.0])
        assert part == [2.0 if rank == 0 else 4.0] * 2
        assert reports["split"] == ([1, None] if rank == 0 else [None, 1])
        assert reports["merged"] == [2, 15.0, 4.0]


def test_registering_shm_changes_no_default_of_torch() -> None:
    register()
    assert dist.get_default_backend_for_device("cpu") == "gloo"
    assert dist.get_default_backend_for_device("cuda") == "nccl"
    both = dist.distributed_c10d.BackendConfig("cpu:shm,cuda:nccl")
    assert both.get_device_backend_map() == {"cpu": "shm", "cuda": "nccl"}
    assert dist.distributed_c10d.BackendConfig("shm").get_device_backend_map() == {"cpu": "shm"}


ENTRY = """
import torch, torch.distributed as dist
dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
print(dist.get_backend(), tensor.tolist())
"""


def test_torch_finds_the_backend_of_an_installed_package(tmp_path: Path) -> None:
    """The entry point of pyproject.toml, in the form in which pip installs it."""
    import tomllib

    root = Path(__file__).parent.parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    target = project["entry-points"]["torch.backends"]["shm"]
    info = tmp_path / "shm_entry-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shm-entry\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\nshm = {target}\n")
    path = f"{root / 'src'}:{tmp_path}"
    done = run_command([sys.executable, "-c", ENTRY], env={"PYTHONPATH": path})
    assert done.stdout.strip() == "shm [1.0, 1.0, 1.0]", done.stderr


# ---- Traces ----


def traced(world: Any, folder: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    group = group_of()
    with torch.profiler.profile() as profiler:
        dist.all_reduce(torch.ones(100), group=group)
        dist.all_gather(
            [torch.ones(7), torch.ones(7)], torch.ones(7), group=group, async_op=True
        ).wait()
    file = f"{folder}/{world.rank}.json"
    profiler.export_chrome_trace(file)
    for event in json.loads(Path(file).read_text())["traceEvents"]:
        name, about = event.get("name", ""), event.get("args", {})
        if name.startswith("shm:"):
            found.setdefault("titles", []).append(name)
        if "Collective name" in about:
            keys = ("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size")
            found.setdefault("comms", []).append([about[key] for key in keys])
    return found


def test_traces_carry_operation_sizes_and_group(tmp_path: Path) -> None:
    for reports in in_world(traced, 2, str(tmp_path)):
        assert set(reports["titles"]) == {"shm:all_reduce", "shm:all_gather"}
        assert ["all_reduce", 100, 100, "Float", 2] in reports["comms"]
        assert ["all_gather", 7, 14, "Float", 2] in reports["comms"]
