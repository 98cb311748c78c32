"""One collective at one size: its tensors on this rank, the data to send, the expected result.

Values are integers whose sum over all ranks fits the mantissa of the dtype, so every correct
result is exact in any order of reduction. Values depend on rank and index. They repeat after 8191
elements, a prime, so that no chunk size of a backend is a multiple of the period. No value is 0:
every element of a receive buffer that is cleared before the call is wrong until it is written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.measure.message_cost import OPERATIONS, Operation, uneven_shards
from tutti.world.world import World

_PERIOD = 8191
_LARGEST_EXACT = {
    torch.float64: 1 << 53,
    torch.float32: 1 << 24,
    torch.float16: 1 << 11,
    torch.bfloat16: 1 << 8,
    torch.int64: 1 << 62,
    torch.int32: 1 << 30,
    torch.int8: 127,
    torch.uint8: 255,
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _LARGEST_EXACT}


@dataclass(frozen=True)
class CollectiveCase:
    """One operation at one size, the same for all compared backends. The root is rank 0."""

    operation: Operation
    count: int
    dtype: torch.dtype
    placement: str  # in or out
    rank: int
    ranks: int

    @property
    def bytes(self) -> int:
        """The message size S in bytes, as nccl-tests defines it (see measure/message_cost.py)."""
        return self.operation.bytes(self.count, self.dtype.itemsize, self.ranks)

    @property
    def total_count(self) -> int:
        """The number of elements in the shards of all ranks."""
        return self.count * self.ranks

    @property
    def in_place(self) -> bool:
        """Whether the result overwrites the input."""
        return self.placement == "in"

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root, if the operation has one."""
        return self.rank == 0

    @property
    def idempotent(self) -> bool:
        """Whether a second call gives the same result.

        An in-place reduction is not idempotent: a second call adds up the sums of the first.
        """
        return not self.in_place or not self.operation.reduces

    @property
    def sends(self) -> bool:
        """Whether this rank has input data."""
        return self.is_root or self.operation.name not in ("broadcast", "scatter")

    @property
    def receives(self) -> bool:
        """Whether this rank gets a result."""
        return self.is_root or self.operation.name not in ("reduce", "gather")

    @property
    def neighbours(self) -> tuple[int, int]:
        """(next rank, previous rank) in the ring in which send_recv sends."""
        return (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks

    def uneven_splits(self, rank: int) -> list[int]:
        """Return how many elements `rank` sends to each rank in all_to_all_uneven.

        `rank` receives the same numbers of elements.
        """
        shards = uneven_shards(self.count, self.ranks)
        return [shards[(rank + peer) % self.ranks] for peer in range(self.ranks)]

    def own_shard(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a tensor that has the shards of all ranks in its last dim."""
        return whole[..., self.rank * self.count : (self.rank + 1) * self.count]


def case_groups(
    op: str, sizes: Sequence[int], dtype: torch.dtype, world: World, placement: str = "native"
) -> list[list[CollectiveCase]]:
    """Return one group of cases per size, for a Sweep. Cases of a group differ in placement only.

    `placement` is "in", "out", "both", or "native" for the form that torch.distributed has.
    """
    operation = OPERATIONS[op]
    wanted = {"native": (operation.native,), "both": ("out", "in")}.get(placement, (placement,))
    placements = [each for each in wanted if each in operation.placements]
    # Several small sizes may give the same count; the dict removes duplicates.
    counts = dict.fromkeys(operation.count(size, dtype.itemsize, world.size) for size in sizes)
    return [
        [CollectiveCase(operation, count, dtype, p, world.rank, world.size) for p in placements]
        for count in counts
        if placements
    ]


@dataclass(frozen=True)
class PreparedCase:
    """A case on one backend: a tensor to fill before the call, and a tensor to check afterwards."""

    sent: Tensor
    received: Tensor
    call: Callable[[], Any]
    close: Callable[[], None] = lambda: None
    operations: int = 1  # per call; reported times are call times divided by this number


@dataclass(frozen=True)
class Backend:
    """A backend, or one algorithm of a backend, that a sweep can measure."""

    name: str  # as in --backends, tables and JSON
    about: str  # version or variant, or empty
    # Allocates tensors and binds the call; raises Unsupported with the reason.
    prepare: Callable[[CollectiveCase], PreparedCase]
    group: dist.ProcessGroup | None = None  # of a torch.distributed backend


class Buffers:
    """Ordinary tensors that all backends share, so that page placement is the same for all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, Tensor] = {}

    def take(self, role: str, count: int, dtype: torch.dtype) -> Tensor:
        """Return the tensor of this role. It is reallocated if the size or dtype changes."""
        tensor = self._tensors.get(role)
        if tensor is None or tensor.numel() != count or tensor.dtype != dtype:
            self._tensors.pop(role, None)  # free the old tensor first: both may be large
            tensor = self._tensors[role] = torch.zeros(count, dtype=dtype, device=self._device)
        return tensor


def allocate(
    case: CollectiveCase, take: Callable[[str, int], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of a case: (sent, received, tensor to fill, tensor to check).

    `sent` and `received` are the arguments of the call. The tensor to fill is empty on ranks
    without input, and the tensor to check is empty on ranks without a result. `take(role, count)`
    returns a tensor with `count` elements in its last dim. All ranks call `take` with the same
    roles and counts in the same order, as symmetric memory requires.
    """
    count, total = case.count, case.total_count
    match case.operation.name:
        case "all_reduce" | "reduce" | "broadcast":
            received = take("received", count)
            sent = received if case.in_place else take("sent", count)
        case "all_gather":
            received = take("received", total)
            sent = case.own_shard(received) if case.in_place else take("sent", count)
        case "gather":
            received, sent = take("received", total), take("sent", count)
            sent = case.own_shard(received) if case.in_place and case.is_root else sent
        case "reduce_scatter":
            sent = take("sent", total)
            received = case.own_shard(sent) if case.in_place else take("received", count)
        case "scatter":
            sent, received = take("sent", total), take("received", count)
            received = case.own_shard(sent) if case.in_place and case.is_root else received
        case "all_to_all" | "all_to_all_uneven":
            sent, received = take("sent", total), take("received", total)
        case "send_recv":
            sent, received = take("sent", count), take("received", count)
        case "all_gather_uneven":
            shards = uneven_shards(count, case.ranks)
            sent = take("sent", max(shards))[..., : shards[case.rank]]
            received = take("received", total)
        case _:  # barrier
            sent = received = torch.empty(0, dtype=case.dtype)
    nothing = torch.empty(0, dtype=case.dtype)
    return sent, received, sent if case.sends else nothing, received if case.receives else nothing


def copy_then_call(received: Tensor, sent: Tensor, call: Callable[[], Any]) -> None:
    """Call an in-place operation on a copy of the input, so that the input is kept."""
    received.copy_(sent)
    call()


@dataclass(frozen=True)
class Payload:
    """The data that this rank sends in a case, and the result that it must receive."""

    sent: Tensor
    expected: Tensor

    def count_wrong(self, received: Tensor) -> int:
        """Return the number of elements that differ from the expected result; NaN differs."""
        return int((received.to(self.expected.device) != self.expected).sum())


def payload(case: CollectiveCase) -> Payload:
    """Return the data and the expected result of this rank.

    The tensors are empty if this rank has no input or no result.
    """
    count, total, rank, name = case.count, case.total_count, case.rank, case.operation.name
    tiles = _tiles(case.dtype, case.ranks)
    summed = torch.stack(tiles).sum(0).to(case.dtype) if case.operation.reduces else tiles[0]
    nothing = torch.empty(0, dtype=case.dtype)
    sent = _repeat(tiles[rank], 0, count)
    match name:
        case "all_reduce" | "reduce":
            expected = _repeat(summed, 0, count)
        case "broadcast":
            expected = _repeat(tiles[0], 0, count)
        case "all_gather" | "gather":
            expected = torch.cat([_repeat(tile, 0, count) for tile in tiles])
        case "reduce_scatter":
            sent = _repeat(tiles[rank], 0, total)
            expected = _repeat(summed, rank * count, count)
        case "scatter":
            sent, expected = _repeat(tiles[0], 0, total), _repeat(tiles[0], rank * count, count)
        case "all_to_all":
            sent = _repeat(tiles[rank], 0, total)
            expected = torch.cat([_repeat(tile, rank * count, count) for tile in tiles])
        case "send_recv":
            expected = _repeat(tiles[rank - 1], 0, count)
        case "all_gather_uneven":
            shards = zip(tiles, uneven_shards(count, case.ranks), strict=True)
            parts = [_repeat(tile, 0, shard) for tile, shard in shards]
            sent, expected = parts[rank], torch.cat(parts)
        case "all_to_all_uneven":
            sent = _repeat(tiles[rank], 0, total)
            parts = []
            for sender, tile in enumerate(tiles):
                splits = case.uneven_splits(sender)
                parts.append(_repeat(tile, sum(splits[:rank]), splits[rank]))
            expected = torch.cat(parts)
        case _:  # barrier
            sent = expected = nothing
    return Payload(sent if case.sends else nothing, expected if case.receives else nothing)


def _tiles(dtype: torch.dtype, ranks: int) -> list[Tensor]:
    """Return one period of the data of each rank."""
    largest = max(1, min(1000, _LARGEST_EXACT[dtype] // ranks))
    tiles = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(1 + rank)
        tiles.append(torch.randint(1, largest + 1, (_PERIOD,), generator=generator).to(dtype))
    return tiles


def _repeat(tile: Tensor, first: int, length: int) -> Tensor:
    """Return `length` elements, from index `first` on, of the infinitely repeated tile."""
    start = first % _PERIOD
    times = -(-(start + length) // _PERIOD)
    return tile.repeat(times)[start : start + length]
