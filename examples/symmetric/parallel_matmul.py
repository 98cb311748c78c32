"""Column- and row-parallel matrix products, as in the two halves of a transformer's MLP.

    tutti run -n 2 --device cpu examples/symmetric/parallel_matmul.py

Column-parallel: each rank has some columns of A and computes the same columns of the result; an
all-gather puts them side by side. Row-parallel: each rank has some rows of B and computes a part of
every sum; an all-reduce adds the parts. A column-parallel product that is followed by a
row-parallel product needs no all-gather.
"""

import time

import torch

import tutti
from tutti.comm import symmetric

BATCH, WIDTH, HIDDEN, REPEATS = 32, 240, 960, 20


def seconds_of(work: object) -> float:
    """Return the median time of REPEATS calls in seconds."""
    assert callable(work)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[REPEATS // 2]


with tutti.init() as world, symmetric.Heap(bytes=16 << 20) as heap:
    if HIDDEN % world.size:
        raise tutti.UsageError(
            f"{HIDDEN} hidden columns cannot be divided by {world.size} ranks: start 2, 3 or 4"
        )
    torch.manual_seed(0)  # all ranks have the same data, and each computes with its part
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    a = torch.randn(WIDTH, HIDDEN, dtype=torch.float64) / WIDTH**0.5
    b = torch.randn(HIDDEN, WIDTH, dtype=torch.float64) / HIDDEN**0.5
    share = HIDDEN // world.size
    own_part = slice(world.rank * share, (world.rank + 1) * share)
    a_columns, b_rows = a[:, own_part].contiguous(), b[own_part].contiguous()

    # The products are written into symmetric memory, where the peers read them.
    columns = heap.empty((share, BATCH), dtype=torch.float64)
    partial = heap.empty((BATCH, WIDTH), dtype=torch.float64)

    def column_parallel() -> torch.Tensor:
        # The product is transposed, because all_gather concatenates the ranks' results along rows.
        torch.mm(a_columns.T, x.T, out=columns.local)
        return symmetric.all_gather(columns).T

    def row_parallel() -> torch.Tensor:
        torch.mm((x @ a_columns).relu(), b_rows, out=partial.local)
        return symmetric.all_reduce(partial)

    gathered, summed = column_parallel(), row_parallel().clone()
    one_rank = (x @ a).relu() @ b
    for name, result, expected in (("column", gathered, x @ a), ("row", summed, one_rank)):
        error = float((result - expected).norm() / expected.norm())
        assert error < 1e-12, (name, error)
        if world.is_first:
            print(f"{name}-parallel on {world.size} ranks differs by {error:.0e} from one rank")
    parallel, alone = seconds_of(row_parallel), seconds_of(lambda: (x @ a).relu() @ b)
    if world.is_first:
        print(f"MLP: {parallel * 1e6:.0f} µs on {world.size} ranks, {alone * 1e6:.0f} µs on one")
    heap.free(partial)
    heap.free(columns)
