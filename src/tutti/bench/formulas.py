"""What a size means for each operation, and bandwidth as nccl-tests defines it.

S is the larger of the bytes sent and received in the whole operation, and `count` what NCCL's own
call is given: the elements of one rank's share where ranks have shares. algbw = S / time. busbw
scales it by what a ring must move over its slowest link, so that it can be held against the
speed of that link whatever the number of ranks. GB/s are 1e9 bytes per second.
"""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Operation:
    """How a collective counts. `shares`: S is the sum of all ranks' shares, `count` their mean."""

    name: str
    shares: bool
    reduces: bool
    # The form that torch.distributed has: in place, or from one tensor into another.
    native: str
    placements: tuple[str, ...] = ("out", "in")
    rooted: bool = False  # rank 0 is the root then

    def count(self, size: int, element_bytes: int, ranks: int) -> int:
        """The count nearest below `size` bytes; at least one element, unless nothing is sent."""
        if self.name == "barrier":
            return 0
        return max(1, size // (element_bytes * (ranks if self.shares else 1)))

    def bytes(self, count: int, element_bytes: int, ranks: int) -> int:
        """S for a count."""
        return count * element_bytes * (ranks if self.shares else 1)

    def bus_factor(self, ranks: int) -> float:
        """busbw / algbw."""
        if self.name == "all_reduce":
            return 2 * (ranks - 1) / ranks
        if self.shares:
            return (ranks - 1) / ranks
        return 1.0


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", shares=False, reduces=True, native="in"),
        Operation("all_gather", shares=True, reduces=False, native="out"),
        Operation("reduce_scatter", shares=True, reduces=True, native="out"),
        Operation("all_to_all", shares=True, reduces=False, native="out", placements=("out",)),
        Operation("broadcast", shares=False, reduces=False, native="in", rooted=True),
        Operation("reduce", shares=False, reduces=True, native="in", rooted=True),
        Operation("gather", shares=True, reduces=False, native="out", rooted=True),
        Operation("scatter", shares=True, reduces=False, native="out", rooted=True),
        Operation("send_recv", shares=False, reduces=False, native="out", placements=("out",)),
        Operation("all_gather_uneven", True, False, native="out", placements=("out",)),
        Operation("all_to_all_uneven", True, False, native="out", placements=("out",)),
        Operation("barrier", shares=False, reduces=False, native="out", placements=("out",)),
    )
}


def uneven_parts(count: int, ranks: int) -> list[int]:
    """`ranks` shares of unlike sizes, `count` elements on average: they grow as 1, 2, 3, …

    In all_gather_uneven rank r has share r. In all_to_all_uneven rank i sends share (i + j) mod n
    to rank j: every rank sends and receives n × count elements, and S is that of all_to_all.
    """
    total, steps = count * ranks, ranks * (ranks + 1)
    ends = [total * rank * (rank + 1) // steps for rank in range(ranks + 1)]
    return [end - start for start, end in pairwise(ends)]


def bandwidth(operation: Operation, size: int, ranks: int, seconds: float) -> tuple[float, float]:
    """algbw and busbw in GB/s."""
    if seconds <= 0:
        return 0.0, 0.0
    algorithm = size / seconds / 1e9
    return algorithm, algorithm * operation.bus_factor(ranks)
