"""Given exported memory, when groups use it, then nothing is staged, and all of it is freed again.

The tests count mappings: a process maps a peer's exported memory only if it accesses it directly.
"""

import ctypes
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shm_cases import group_of
from shm_ranks import Group, results
from tutti.comm.shm import native
from tutti.comm.shm.native import core
from worlds import in_world


def mapped() -> int:
    """Return the number of exports that this process has mapped, its own and those of peers."""
    return sum(
        "exported memory" in line for line in Path("/proc/self/maps").read_text().splitlines()
    )


def export(count: int) -> tuple[int, np.ndarray]:
    address = core().tutti_export_alloc(4 * count)
    assert address
    return address, np.frombuffer((ctypes.c_float * count).from_address(address), np.float32)


def without_agreement(g: Group) -> None:
    count = 20001
    address, local = export(count + 16 * g.rank)  # another size and offset on every rank
    local = local[16 * g.rank :]
    parts = [np.arange(count, dtype=np.float32) * (1 + rank) for rank in range(g.size)]
    total = np.sum(parts, 0)
    for _ in range(2):
        local[:] = parts[g.rank]
        g.run(native.ALL_REDUCE, [local], [local], dtype=native.F32)
        np.testing.assert_array_equal(local, total)
        assert mapped() == g.size
    outs = [np.empty_like(local) for _ in range(g.size)]
    local[:] = parts[g.rank]
    g.run(native.ALL_GATHER, [local], outs)
    for got, want in zip(outs, parts, strict=True):
        np.testing.assert_array_equal(got, want)
    # One rank's tensor is in ordinary memory: all ranks stage, with the same result.
    one = local if g.rank else np.empty_like(local)
    one[:] = parts[g.rank]
    g.run(native.ALL_REDUCE, [one], [one], dtype=native.F32)
    np.testing.assert_array_equal(one, total)
    # Freed by a forked child, which must not affect the parent.
    local[:] = parts[g.rank]
    child = os.fork()
    if child == 0:
        core().tutti_export_free(address)
        os._exit(mapped() != g.size - 1)
    assert os.waitpid(child, 0)[1] == 0
    g.run(native.ALL_REDUCE, [local], [local], dtype=native.F32)
    np.testing.assert_array_equal(local, total)
    for _ in range(5):  # peers unmap the previous export each time
        core().tutti_export_free(address)
        address, local = export(count)
        local[:] = parts[g.rank]
        g.run(native.ALL_REDUCE, [local], [local], dtype=native.F32)
        np.testing.assert_array_equal(local, total)
        assert mapped() == g.size
    core().tutti_export_free(address)


def test_exported_memory_needs_no_agreement_and_is_unmapped_when_freed() -> None:
    results(without_agreement, 2)
    results(without_agreement, 3)


class Net(nn.Module):
    """Three layers, one of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.skipped, self.last = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        x = self.first(x).relu()
        return self.last(x if skip else self.skipped(x))  # type: ignore[no-any-return]


WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "gradients in buckets": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True, "gradient_as_bucket_view": True},
}


def trained(group: Any, rank: int) -> tuple[dict[str, list[Tensor]], list[Any]]:
    """Train four models with alternating steps and return losses, parameters and the models."""
    models = {
        name: DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.04, **how)
        for name, how in WAYS.items()
    }
    reports: dict[str, list[Tensor]] = {name: [] for name in models}
    for step in range(4):
        for name, model in models.items():
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = model(x, name == "unused parameters" and step % 2 == 1).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
            model.zero_grad()
            reports[name].append(loss.detach())
    for name, model in models.items():
        reports[name] += [parameter.detach() for parameter in model.parameters()]
    return reports, list(models.values())


def buckets(world: Any) -> dict[str, Any]:
    assert os.environ["DDP_DISABLE_COMM_MEM"] == "0"  # set by tutti.init
    gloo, shm = dist.new_group(backend="gloo"), group_of()
    expected, _ = trained(gloo, world.rank)
    got, models = trained(shm, world.rank)
    same = [name for name in WAYS if all(map(torch.equal, got[name], expected[name]))]
    gc.collect()
    in_use = mapped()
    bucket = shm._get_backend(torch.device("cpu")).allocate_tensor(
        50000, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    bucket.fill_(world.rank)
    dist.all_reduce(bucket, group=shm)
    with_one_more = mapped()
    dist.destroy_process_group(shm)
    # This rank's exports live as long as their tensors; mappings of peers' end with the group.
    own = mapped()
    value = bucket.float().sum().item()
    del models, bucket
    gc.collect()
    counts = {"in use": in_use, "one more": with_one_more, "own": own, "left": mapped()}
    return {"same": same, "counts": counts, "value": value}


def test_ddp_buckets_in_exported_memory_train_as_on_gloo() -> None:
    for reports in in_world(buckets, 2):
        assert reports["same"] == list(WAYS)
        assert reports["value"] == 50000
        counts = reports["counts"]
        # Each model has at least one bucket, and every rank has mapped those of both ranks.
        assert counts["in use"] >= len(WAYS) * 2 and counts["in use"] % 2 == 0
        assert counts["one more"] == counts["in use"] + 2
        assert counts["own"] == counts["one more"] // 2
        assert counts["left"] == 0
