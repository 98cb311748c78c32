"""Given ranks on a GPU, when a group is "cpu:shm,cuda:nccl", then both devices are served."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shm_cases import Checks, all_gather_flat, reduce_scatter_flat
from tutti.comm.shm import native_group, register
from worlds import in_world

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def both_devices(world: Any) -> list[str]:
    register()
    group = dist.new_group(backend="cpu:shm,cuda:nccl")
    assert native_group(group) is not None
    checks = Checks(group)
    checks.everything((3,))
    _on_cuda(checks, world.device)
    checks.all_reduce(1025, torch.float32, "SUM")
    dist.barrier(group)
    return checks.wrong


def _on_cuda(checks: Checks, device: torch.device) -> None:
    size, rank, group = checks.size, checks.rank, checks.group
    tensor = torch.full((1000,), float(rank + 1), device=device)
    dist.all_reduce(tensor, group=group)
    total = float(size * (size + 1) // 2)
    checks.same(tensor.cpu(), torch.full((1000,), total), "all_reduce on CUDA")
    work = dist.broadcast(tensor.fill_(float(rank)), 0, group=group, async_op=True)
    work.wait()
    checks.same(tensor.cpu(), torch.zeros(1000), "broadcast on CUDA")
    gathered = torch.empty(size * 5, device=device)
    all_gather_flat(gathered, torch.full((5,), float(rank), device=device), group=group)
    expected = torch.arange(size).repeat_interleave(5).float()
    checks.same(gathered.cpu(), expected, "all_gather on CUDA")
    part = torch.empty(5, device=device)
    reduce_scatter_flat(part, gathered, group=group)
    checks.same(part.cpu(), torch.full((5,), float(rank * size)), "reduce_scatter on CUDA")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4).to(device), process_group=group)
    model(torch.full((2, 8), float(rank + 1), device=device)).sum().backward()
    mean = torch.full((4, 8), 2 * total / size)
    assert model.module.weight.grad is not None
    checks.same(model.module.weight.grad.cpu(), mean, "DDP on CUDA")


def test_cpu_and_cuda_tensors_in_one_group() -> None:
    assert in_world(both_devices, 2, gpu=True, timeout=250) == [[], []]
