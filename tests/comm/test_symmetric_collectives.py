"""Collectives on symmetric memory on the CPU: every algorithm, staged, and torch.distributed."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from exact_reductions import check_same, reduced, whole_numbers
from tutti.comm import shm, symmetric
from tutti.comm.symmetric.heap_collectives import _stages as stages
from tutti.world.errors import UsageError
from worlds import in_world

REDUCED = {
    "sum": [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32],
    "mean": [torch.float32, torch.bfloat16],
    "product": [torch.float32, torch.int64],
    "min": [torch.float32, torch.int16, torch.uint8],
    "max": [torch.float64, torch.float16, torch.int8],
    "band": [torch.int32],
    "bor": [torch.uint8, torch.bool],
    "bxor": [torch.int64],
}
ODD_COUNTS = (0, 1, 3, 15, 17, 255, 4097)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_gets_the_exact_result(ranks: int) -> None:
    assert in_world(every_collective, ranks) == ["done"] * ranks


def every_collective(world: Any) -> str:
    with symmetric.Heap(bytes=4 << 20) as heap:
        collectives(heap)
    staged(world)
    torch_distributed_needs_no_copies(world)
    return "done"


def collectives(heap: symmetric.Heap) -> None:
    for op, dtypes in REDUCED.items():
        for dtype in dtypes:
            for count in ODD_COUNTS if heap.size < 4 else (3, 4097):
                inputs = [whole_numbers(count, dtype, rank) for rank in range(heap.size)]
                expected = reduced(inputs, op)
                with heap.empty(count, dtype) as t, heap.empty(count, dtype) as other:
                    for algorithm in ("auto", "one_shot", "two_shot", "ring"):
                        t.local.copy_(inputs[heap.rank])
                        symmetric.all_reduce(t, op, algorithm)
                        check_same(t.local, expected, f"{op} {dtype} {count} {algorithm}")
                    t.local.copy_(inputs[heap.rank])
                    out = symmetric.all_reduce(t, op, out=torch.empty(count, dtype=dtype))
                    check_same(out, expected, f"{op} out of place")
                    for algorithm in ("one_shot", "two_shot", "ring"):
                        symmetric.all_reduce(t, op, algorithm, out=other)
                        check_same(other.local, expected, f"{op} {algorithm} into the heap")
                        assert torch.equal(t.local, inputs[heap.rank])
    # Large enough for several chunks, with values whose sum depends on the order of addition.
    torch.manual_seed(heap.rank)
    with heap.empty(300_001) as t:
        results = []
        values = torch.randn(300_001) * 10 ** torch.randint(-3, 4, (300_001,))
        for algorithm in ("one_shot", "two_shot", "ring"):
            t.local.copy_(values)
            results.append(symmetric.all_reduce(t, algorithm=algorithm).clone())
            heap.barrier()
            assert all(torch.equal(t.peer(rank), t.local) for rank in range(heap.size))
            heap.barrier()
        assert torch.equal(results[0], results[1])
        assert torch.allclose(results[0], results[2], rtol=1e-4, atol=1e-2)
    with heap.empty((3, 2), torch.int64) as t:
        t.local.fill_(heap.rank)
        gathered = symmetric.all_gather(t)
        assert gathered.shape == (3 * heap.size, 2)
        assert gathered[:, 0].tolist() == [rank for rank in range(heap.size) for _ in range(3)]
        stacked = torch.empty((heap.size, 3, 2), dtype=torch.int64)
        assert symmetric.all_gather(t, out=stacked)[-1].unique().tolist() == [heap.size - 1]
    with heap.empty((2 * heap.size, 3)) as t:
        rows = torch.arange(6.0 * heap.size).view(-1, 3)
        t.local.copy_(rows * (heap.rank + 1))
        part_sum = symmetric.reduce_scatter(t)
        factor = heap.size * (heap.size + 1) / 2
        assert torch.equal(part_sum, rows[2 * heap.rank : 2 * heap.rank + 2] * factor)
        assert torch.equal(symmetric.reduce_scatter(t, "max"), part_sum / factor * heap.size)


def staged(world: Any) -> None:
    for shape, dtype in (((10, 3), torch.float32), ((), torch.int64), ((1 << 17,), torch.float32)):
        tensor = torch.ones(shape, dtype=dtype)
        assert (symmetric.all_reduce_staged(tensor) == world.size).all()
    columns = torch.ones(4, 4).t()[1:]
    assert (symmetric.all_reduce_staged(columns, "max") == 1).all()
    with pytest.raises(UsageError, match="1048576"):
        symmetric.all_reduce_staged(torch.ones(1 << 19))
    groups = [dist.new_group() for _ in range(2)]
    symmetric.all_reduce_staged(torch.ones(1), group=groups[0])
    destroyed = next(stage for stage in stages.values() if stage.heap.group is groups[0])
    dist.destroy_process_group(groups[0])
    symmetric.all_reduce_staged(torch.ones(1), group=groups[1])
    assert destroyed.heap.closed and destroyed not in stages.values()


def torch_distributed_needs_no_copies(world: Any) -> None:
    """The shm backend reduces tensors of the heaps of its groups in place."""
    shm.register()
    group = dist.new_group(backend="cpu:shm")
    with symmetric.Heap(group, bytes=1 << 20) as heap:
        assert heap.stats()["known_to_backend"] == 1
        t = heap.zeros(100_000)
        kept = t.local
        for tensor in (t.local, t.local[500:700], t.local[:0]):
            tensor.fill_(world.rank + 1)
            dist.all_reduce(tensor, group=group)
            assert (tensor == world.size * (world.size + 1) / 2).all()
        # Different offsets on different ranks: not in place, but correct.
        part = t.local[world.rank * 8 :][:64].fill_(1)
        dist.all_reduce(part, group=group)
        assert (part == world.size).all()
        heap.barrier()
    dist.all_reduce(kept.fill_(1), group=group)
    assert (kept == world.size).all()
    with symmetric.Heap(group, bytes=4096) as heap:  # its group ends before the heap does
        dist.destroy_process_group(group)
        heap.barrier()
