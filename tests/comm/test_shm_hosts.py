"""Given ranks on several hosts, when they form one shm group, then each host uses its memory and
gloo joins the hosts, and every result is exact and the same on all ranks."""

import itertools
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forked_ranks import forked
from hosts import hosts_missing, two_hosts
from shm_cases import FLOATS, INTS, OPS, Checks, valid
from tutti.comm.shm.connect import _hosts
from tutti.comm.shm.registration import ShmOptions
from tutti.world.errors import UsageError


def everywhere(checks: Checks) -> list[str]:
    """Run all operations. A group over several hosts has the same results as on one host."""
    roots = itertools.cycle(range(checks.size))
    for dtype, op in itertools.product((*FLOATS, *INTS, torch.bool, torch.complex64), OPS):
        if valid(dtype, op):
            checks.all_reduce(65, dtype, op)
            checks.reduce(9, dtype, op, next(roots))
            checks.reduce_scatter(3, dtype, op)
    for dtype, count in itertools.product((torch.float32, torch.bool, torch.complex64), (0, 1, 65)):
        checks.move_everything(count, dtype, next(roots))
    for root in range(checks.size):
        checks.move_everything(7, torch.int16, root)
    checks.large()
    _asynchronous_and_views(checks)
    dist.barrier(checks.group)
    return checks.wrong


def _asynchronous_and_views(checks: Checks) -> None:
    tensors = [torch.full((50, 3), float(i + checks.rank)) for i in range(30)]
    works = [dist.all_reduce(tensor.T, group=checks.group, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works]
    torch.futures.wait_all(futures)
    for i, tensor in enumerate(tensors):
        total = sum(float(i + rank) for rank in range(checks.size))
        checks.same(tensor, torch.full((50, 3), total), "in flight", i)
    # Random floats: whatever the order of the sum, all ranks hold the same bits.
    noise = torch.randn(10_001, generator=torch.Generator().manual_seed(checks.rank))
    dist.all_reduce(noise, group=checks.group)
    rows = [torch.empty_like(noise) for _ in range(checks.size)]
    dist.all_gather(rows, noise, group=checks.group)
    for row in rows:
        checks.same(row, noise, "the same bits")
    parts = [torch.empty(rank) for rank in range(checks.size)]
    dist.all_gather(parts, torch.full((checks.rank,), float(checks.rank)), group=checks.group)
    for rank, part in enumerate(parts):
        checks.same(part, torch.full((rank,), float(rank)), "uneven all_gather")


# ---- Pretended hosts: ranks of another number in `layout` cannot open the memory ----


def pretended(rank: int, layout: list[int]) -> list[str]:
    """`layout` has the host of each rank."""
    from tutti.comm.shm.connect import shares_memory

    pids: dict[int, int] = {}

    def same_host(card: dict[str, Any]) -> bool:
        return pids[card["pid"]] == layout[rank] and shares_memory(card)

    import os

    gathered: list[Any] = [None] * len(layout)
    dist.all_gather_object(gathered, os.getpid())
    pids.update(zip(gathered, layout, strict=True))
    options = ShmOptions(can_open=same_host)
    group = dist.new_group(backend="shm", pg_options=options)
    wrong = everywhere(Checks(group))
    group.set_timeout(timedelta(seconds=0.5))
    group.monitored_barrier(timedelta(seconds=20))
    if rank == 0:
        with pytest.raises(RuntimeError, match=rf"{len(layout) - 1}"):
            group.monitored_barrier(wait_all_ranks=True)  # no other rank calls it
    dist.barrier()
    dist.destroy_process_group(group)
    return wrong


@pytest.mark.parametrize("layout", [[0, 0, 1, 1], [0, 1, 0, 2, 0]], ids=["2 + 2", "3 + 1 + 1"])
def test_every_operation_is_exact_over_hosts(layout: list[int]) -> None:
    reports = forked(pretended, len(layout), layout, timeout=110)
    assert reports == [[]] * len(layout)


def test_ranks_of_which_only_some_share_memory_are_named() -> None:
    names = ("a", "a", "b")
    assert _hosts([[0, 1], [0, 1], [2]], names) == ((0, 1), (2,))
    assert _hosts([[0, 1, 2], [0, 1], [2]], names) == ((0, 1), (2,))  # one way does not count
    with pytest.raises(UsageError, match="rank"):
        _hosts([[0, 1, 2], [0, 1], [0, 2]], names)


# ---- Two hosts with their own process tables ----

RANK = """
import json, sys
from datetime import timedelta
import torch, torch.distributed as dist
from shm_cases import Checks
from test_shm_hosts import everywhere
from tutti.comm.shm import native_group, register

rank, size, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
register()
store = dist.TCPStore("10.77.0.1", 29777, size, is_master=rank == 0)
limit = timedelta(seconds=60)
dist.init_process_group("shm", store=store, rank=rank, world_size=size, timeout=limit)
wrong = everywhere(Checks(dist.group.WORLD))
hosts = dist.group.WORLD._get_backend(torch.device("cpu")).hosts
json.dump([wrong, hosts, native_group()], open(out, "w"))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(hosts_missing() is not None, reason=str(hosts_missing()))
def test_ranks_of_one_host_are_found_by_opening_memory(tmp_path: Path) -> None:
    """Ranks 0 and 2 are on n1 and rank 1 is on n2. No variable contains this."""
    tests = Path(__file__).parent.parent
    path = f"{tests.parent / 'src'}:{tests}:{tests / 'comm'}"
    with two_hosts() as (n1, n2):
        processes = [
            host.popen(
                [sys.executable, "-c", RANK, str(rank), "3", str(tmp_path / str(rank))],
                env={"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
            )
            for rank, host in enumerate((n1, n2, n1))
        ]
        for process in processes:
            out, err = process.communicate(timeout=100)
            assert process.returncode == 0, out + err
    for rank in range(3):
        wrong, hosts, group = json.loads((tmp_path / str(rank)).read_text())
        assert (wrong, hosts, group) == ([], 2, None)
