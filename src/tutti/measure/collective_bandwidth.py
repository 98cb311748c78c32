"""Message size, algorithm bandwidth and bus bandwidth of each collective, as in nccl-tests.

S is the message size in bytes: the larger of a rank's input and a rank's output. `count` is the
count argument of the NCCL call. If the tensor is sharded over ranks, `count` is the number of
elements in one shard. Otherwise `count` is the number of elements in the whole tensor.

algbw = S / time. busbw = algbw × (bytes that a ring algorithm moves over its slowest link) / S, so
busbw can be compared with the speed of that link for any number of ranks.

The α–β model predicts the time of a collective: seconds = α × rounds + β × bytes. The rounds of a
collective are its communication steps, which run one after the other. α is the latency of one round
in seconds, and β is the time per byte in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Operation:
    """A collective, and how its size is counted."""

    name: str
    sharded: bool  # S covers all shards; `count` is the mean number of elements in a shard
    reduces: bool
    native: str  # the form in torch.distributed: "in" for in place, "out" for out of place
    placements: tuple[str, ...] = ("out", "in")
    rooted: bool = False  # the collective has a root, which is rank 0

    def count(self, size: int, element_bytes: int, ranks: int) -> int:
        """Return the largest count with S ≤ `size`, but at least 1. A barrier has count 0."""
        if self.name == "barrier":
            return 0
        return max(1, size // (element_bytes * (ranks if self.sharded else 1)))

    def bytes(self, count: int, element_bytes: int, ranks: int) -> int:
        """Return S for a count."""
        return count * element_bytes * (ranks if self.sharded else 1)

    def bus_factor(self, ranks: int) -> float:
        """Return busbw / algbw."""
        if self.name == "all_reduce":
            return 2 * (ranks - 1) / ranks
        return (ranks - 1) / ranks if self.sharded else 1.0


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", sharded=False, reduces=True, native="in"),
        Operation("all_gather", sharded=True, reduces=False, native="out"),
        Operation("reduce_scatter", sharded=True, reduces=True, native="out"),
        Operation("all_to_all", sharded=True, reduces=False, native="out", placements=("out",)),
        Operation("broadcast", sharded=False, reduces=False, native="in", rooted=True),
        Operation("reduce", sharded=False, reduces=True, native="in", rooted=True),
        Operation("gather", sharded=True, reduces=False, native="out", rooted=True),
        Operation("scatter", sharded=True, reduces=False, native="out", rooted=True),
        Operation("send_recv", sharded=False, reduces=False, native="out", placements=("out",)),
        Operation("all_gather_uneven", True, False, native="out", placements=("out",)),
        Operation("all_to_all_uneven", True, False, native="out", placements=("out",)),
        Operation("barrier", sharded=False, reduces=False, native="out", placements=("out",)),
    )
}


def uneven_shards(count: int, ranks: int) -> list[int]:
    """Return shard sizes in the proportion 1 : 2 : 3 : …, with a mean of `count` elements.

    Let sizes be the returned list and n the number of ranks. In all_gather_uneven, rank r has a
    shard of sizes[r] elements. In all_to_all_uneven, rank i sends sizes[(i + j) % n] elements to
    rank j, so every rank sends and receives n × count elements, as in all_to_all.
    """
    total, steps = count * ranks, ranks * (ranks + 1)
    ends = [total * rank * (rank + 1) // steps for rank in range(ranks + 1)]
    return [end - start for start, end in pairwise(ends)]


def bandwidth(operation: Operation, size: int, ranks: int, seconds: float) -> tuple[float, float]:
    """Return (algbw, busbw) in GB/s."""
    if seconds <= 0:
        return 0.0, 0.0
    algorithm = size / seconds / 1e9
    return algorithm, algorithm * operation.bus_factor(ranks)


Row = tuple[float, float, float, float]  # weight, rounds, bytes, seconds


def fit_alpha_beta(rows: Sequence[Row]) -> tuple[float, float]:
    """Return (α, β), fitted by weighted least squares with α ≥ 0 and β ≥ 0.

    If bytes are proportional to rounds, the rows cannot separate the two terms, and α is 0. If no
    row has bytes, β is 0.
    """
    aa = sum(w * rounds * rounds for w, rounds, _, _ in rows)
    bb = sum(w * size * size for w, _, size, _ in rows)
    ab = sum(w * rounds * size for w, rounds, size, _ in rows)
    at = sum(w * rounds * seconds for w, rounds, _, seconds in rows)
    bt = sum(w * size * seconds for w, _, size, seconds in rows)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        both = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
        if min(both) >= 0:
            return both
    # The unconstrained optimum is negative or not unique. The constrained optimum lies on an edge
    # of the allowed region, where α or β is 0.
    only_beta, only_alpha = (0.0, bt / bb if bb else 0.0), (at / aa if aa else 0.0, 0.0)
    tolerance = 1e-9 * sum(w * seconds * seconds for w, _, _, seconds in rows)
    if squared_error(rows, only_alpha) < squared_error(rows, only_beta) - tolerance:
        return only_alpha
    return only_beta


def squared_error(rows: Sequence[Row], alpha_beta: tuple[float, float]) -> float:
    """Return the weighted sum of squared residuals."""
    alpha, beta = alpha_beta
    return sum(w * (alpha * rounds + beta * size - t) ** 2 for w, rounds, size, t in rows)
