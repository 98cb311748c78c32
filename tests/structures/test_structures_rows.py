"""DistributedTensor and ParameterCache: rows sharded over ranks, plain and versioned."""

from typing import Any

import pytest
import torch

from tutti.comm import symmetric
from tutti.structures import DistributedTensor, ParameterCache
from tutti.structures.distributed_tensor import RowPlacement
from tutti.world.errors import UsageError
from worlds import in_world

ADDED = (torch.float32, torch.float64, torch.int32, torch.int64)


def test_every_row_has_one_position_on_one_rank() -> None:
    for placement in ("block", "cyclic"):
        for count in (1, 2, 5, 7, 12):
            for size in (1, 2, 3, 5):
                rows = RowPlacement(count, size, placement)
                placed = [(rows.owner(i), rows.position(i)) for i in range(count)]
                assert len(set(placed)) == count
                assert all(place < rows.per_rank for _, place in placed)
                listed = [(r, p) for r in range(size) for p in range(len(rows.indices_of(r)))]
                assert sorted(placed) == sorted(listed)
                assert all(
                    placed[i] == (r, p) for r in range(size) for p, i in _numbered_rows(rows, r)
                )


def _numbered_rows(rows: RowPlacement, rank: int) -> list[tuple[int, int]]:
    return list(enumerate(rows.indices_of(rank).tolist()))


def use_distributed_tensors(world: Any) -> dict[str, Any]:
    checked = 0
    with symmetric.Heap(bytes=4 << 20) as heap:
        for placement in ("block", "cyclic"):
            for rows, columns in ((1, 1), (7, 3), (8, 8), (100, 5), (3, 1024)):
                for dtype in ADDED:
                    with DistributedTensor(heap, (rows, columns), dtype, placement) as table:
                        _check_concurrent_additions(table, heap)
                        checked += 1
        _rows_move_and_mistakes_are_named(heap)
    return {"checked": checked}


def _check_concurrent_additions(table: DistributedTensor, heap: symmetric.Heap) -> None:
    rows, columns = table.shape
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    size = heap.size
    indices = torch.randint(rows, (size, 40), generator=generator)
    values = torch.randint(-9, 9, (size, 40, columns), generator=generator).to(table.dtype)
    table.scatter_add(indices[heap.rank], values[heap.rank])
    heap.barrier()
    expected = torch.zeros(rows, columns, dtype=table.dtype)
    expected.index_add_(0, indices.flatten(), values.flatten(0, 1))
    assert torch.equal(table.to_full(), expected)
    assert torch.equal(table.gather(indices), expected[indices])
    assert torch.equal(table.local, expected[table.local_indices])
    assert all(table.owner(int(i)) == heap.rank for i in table.local_indices)
    heap.barrier()


def _rows_move_and_mistakes_are_named(heap: symmetric.Heap) -> None:
    with DistributedTensor(heap, (10, 4)) as table:
        indices = torch.arange(heap.rank, 10, heap.size)
        table.scatter(indices, indices[:, None].expand(-1, 4).float())
        heap.barrier()
        assert table.row(7).tolist() == [7] * 4
        out = torch.empty(2, 4, dtype=torch.float32).T.contiguous().T
        assert table.gather(torch.tensor([9, 1], dtype=torch.int32), out=out) is out
        assert out[:, 0].tolist() == [9, 1]
        assert table.gather(torch.empty(0, dtype=torch.int64)).shape == (0, 4)
        for bad in (-1, 10):
            with pytest.raises(IndexError, match=f"row {bad} does not exist: the rows are 0 to 9"):
                table.scatter_add(torch.tensor([0, bad]), torch.ones(2, 4))
        with pytest.raises(
            UsageError, match=r"values must be .* got torch.float32 of shape \(2, 3\)"
        ):
            table.scatter(torch.tensor([0, 1]), torch.ones(2, 3))
        heap.barrier()
        assert table.to_full()[:, 0].tolist() == list(range(10)), "a refused call changed the table"
        assert table.stats()["scattered"] == len(indices)
        heap.barrier()
    with pytest.raises(UsageError, match="this DistributedTensor is closed"):
        table.gather(torch.tensor([0]))
    with (
        DistributedTensor(heap, (4, 4), torch.float16) as halves,
        pytest.raises(UsageError, match="float16: use float64, float32, int64, int32"),
    ):
        halves.scatter_add(torch.tensor([0]), torch.ones(1, 4, dtype=torch.float16))


def test_no_concurrent_addition_is_lost_and_gather_finds_every_row() -> None:
    for rank in in_world(use_distributed_tensors, 3):
        assert rank == {"checked": 40}


def use_parameter_cache(world: Any) -> dict[str, Any]:
    with symmetric.Heap(bytes=4 << 20) as heap:
        _published_rows_are_found(heap)
        return _count_torn_rows(heap)


def _published_rows_are_found(heap: symmetric.Heap) -> None:
    with ParameterCache(heap, 9, 3, torch.float64, "cyclic") as cache:
        with pytest.raises(LookupError, match=r"row 4 was never published.*wait_for"):
            cache.lookup(4)
        if heap.rank:
            assert cache.wait_for(0, 2) >= 2
        else:
            cache.publish(0, torch.ones(3, dtype=torch.float64))
            assert cache.publish(0, torch.full((3,), 2.0, dtype=torch.float64)) == 2
        heap.barrier()
        indices = cache.local_indices[:, None]  # indices may have any number of dimensions
        cache.publish_all(indices, indices[..., None].expand(-1, -1, 3).double())
        heap.barrier()
        rows, versions = cache.lookup_many(torch.tensor([[0, 8], [5, 5]]))
        assert rows[..., 2].tolist() == [[0, 8], [5, 5]]
        assert versions.tolist() == [[3, 1], [1, 1]] and cache.version(0) == 3
        assert cache.lookup_versioned(7)[1] == 1
        out = torch.empty(3, dtype=torch.float64)
        assert cache.lookup(8, out=out) is out and out[0] == 8
        peer = (heap.rank + 1) % heap.size
        with pytest.raises(UsageError, match=f"row {peer}, which rank {peer} owns"):
            cache.publish(peer, out)
        with pytest.raises(UsageError, match=r"row must be .* got torch.float32 of shape \(3,\)"):
            cache.publish(heap.rank, out.float())
        with pytest.raises(IndexError, match="row 9"):
            cache.lookup(9)
        with pytest.raises(
            symmetric.Timeout, match=f"version 99 of row {peer}.* rank {peer} is alive"
        ):
            cache.wait_for(peer, 99, timeout=0.05)
        heap.barrier()
    with pytest.raises(UsageError, match="is closed"):
        cache.lookup(0)


def _count_torn_rows(heap: symmetric.Heap) -> dict[str, Any]:
    reads, torn, backwards = 0, 0, 0
    with ParameterCache(heap, 2 * heap.size, 513, torch.int64) as cache:
        done = heap.counters(1)
        if heap.rank == 0:
            row = torch.empty(513, dtype=torch.int64)
            version = 0
            while (
                done.load(0, at=0) < heap.size - 1
            ):  # publish without pause until all ranks have read
                version += 1
                row.fill_(version)
                cache.publish(0, row)
                cache.publish(1, row)
        else:
            cache.wait_for(1, 1)
            out = torch.empty(513, dtype=torch.int64)
            numbers = out.numpy()
            last = 0
            for _ in range(50_000):
                cache.lookup(0, out=out)
                first = int(numbers[0])
                torn += not (numbers == first).all()
                backwards += first < last
                last = first
                reads += 1
            rows, versions = cache.lookup_many(torch.tensor([0, 1] * 100))
            torn += int((rows != versions[:, None]).sum())
            done.fetch_add(0, at=0)
        heap.barrier()
        published = cache.stats()["published"]
    return {"reads": reads, "torn": torn, "backwards": backwards, "published": published}


def test_no_reader_sees_a_torn_or_older_row() -> None:
    writer, *readers = in_world(use_parameter_cache, 3)
    assert writer["published"] > 1000
    for reader in readers:
        assert reader == {"reads": 50_000, "torn": 0, "backwards": 0, "published": 0}
