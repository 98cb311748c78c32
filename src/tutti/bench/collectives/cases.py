"""One collective at one size: its tensors on this rank, the data to send and the expected result.

All values are integers whose sum over all ranks fits into the mantissa of the dtype, so a correct
result is exact in any order of reduction. Values depend on the rank and the index, and repeat after
8191 elements. 8191 is a prime, so no chunk size of a backend is a multiple of the period, and a
chunk that was written to the wrong place is detected. No value is 0, and receive buffers are
cleared before the call, so an element that was not written is detected.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.measure.collective_bandwidth import OPERATIONS, Operation, uneven_shards
from tutti.world.world import World

_PERIOD = 8191
_SENDS_ALL_SHARDS = ("reduce_scatter", "scatter", "all_to_all", "all_to_all_uneven")
_RECEIVES_ALL_SHARDS = (
    "all_gather",
    "gather",
    "all_gather_uneven",
    "all_to_all",
    "all_to_all_uneven",
)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_FLOATS, *_INTEGERS)}


@dataclass(frozen=True)
class CollectiveCase:
    """One operation at one message size. All compared backends run the same cases.

    The root of operations such as broadcast is rank 0.
    """

    operation: Operation
    count: int
    dtype: torch.dtype
    placement: str  # "in" (place) or "out" (of place)
    rank: int
    ranks: int

    @property
    def bytes(self) -> int:
        """The message size S in bytes, as in nccl-tests (see measure/collective_bandwidth.py)."""
        return self.operation.bytes(self.count, self.dtype.itemsize, self.ranks)

    @property
    def in_place(self) -> bool:
        """Whether the result overwrites the input."""
        return self.placement == "in"

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root (rank 0)."""
        return self.rank == 0

    @property
    def sends(self) -> bool:
        """Whether this rank has input data."""
        return self.is_root or self.operation.name not in ("broadcast", "scatter")

    @property
    def receives(self) -> bool:
        """Whether this rank gets a result."""
        return self.is_root or self.operation.name not in ("reduce", "gather")

    @property
    def sent_count(self) -> int:
        """The number of elements in the input of this rank."""
        if self.operation.name == "all_gather_uneven":
            return uneven_shards(self.count, self.ranks)[self.rank]
        return self.count * self.ranks if self.operation.name in _SENDS_ALL_SHARDS else self.count

    @property
    def received_count(self) -> int:
        """The number of elements in the result of this rank."""
        all_shards = self.operation.name in _RECEIVES_ALL_SHARDS
        return self.count * self.ranks if all_shards else self.count

    @property
    def neighbours(self) -> tuple[int, int]:
        """(next rank, previous rank) in the ring along which send_recv sends."""
        return (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks

    def uneven_splits(self, rank: int) -> list[int]:
        """Return the number of elements that `rank` sends to each rank in all_to_all_uneven."""
        shards = uneven_shards(self.count, self.ranks)
        return [shards[(rank + peer) % self.ranks] for peer in range(self.ranks)]


def case_groups(
    op: str, sizes: Sequence[int], dtype: torch.dtype, world: World, placement: str = "native"
) -> list[list[CollectiveCase]]:
    """Return one group of cases per size, for a Sweep. Cases of a group differ in placement only.

    `placement` is "in", "out", "both" or "native". "native" is the placement of the operation in
    torch.distributed.
    """
    operation = OPERATIONS[op]
    named = {"native": (operation.native,), "both": ("out", "in")}.get(placement, (placement,))
    placements = [name for name in named if name in operation.placements]
    # Several small sizes may give the same number of elements.
    counts = sorted({operation.count(size, dtype.itemsize, world.size) for size in sizes})
    return [
        [CollectiveCase(operation, count, dtype, p, world.rank, world.size) for p in placements]
        for count in counts
        if placements
    ]


@dataclass(frozen=True)
class PreparedCase:
    """A case on one backend.

    The caller fills `sent` before the first call, and checks `received` after the last call.
    """

    sent: Tensor
    received: Tensor
    call: Callable[[], Any]
    close: Callable[[], None] = lambda: None
    operations: int = 1  # number of operations per call; times are reported per operation


@dataclass(frozen=True)
class Backend:
    """A backend, or one algorithm of a backend, that a sweep can measure."""

    name: str  # the name in --backends, tables and JSON
    about: str  # a description, such as the version or variant, or ""
    # Allocates the tensors of a case and returns the prepared case. Raises Unsupported, with the
    # reason as message, if the backend cannot run the case.
    prepare: Callable[[CollectiveCase], PreparedCase]
    group: dist.ProcessGroup | None = None  # the group of a torch.distributed backend


class Buffers:
    """Ordinary tensors. All backends share them, so all backends use the same memory pages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, Tensor] = {}

    def take(self, role: str, count: int, dtype: torch.dtype) -> Tensor:
        """Return the tensor with this role. It is reallocated if `count` or `dtype` has changed."""
        tensor = self._tensors.get(role)
        if tensor is None or tensor.numel() != count or tensor.dtype != dtype:
            self._tensors.pop(role, None)  # free the old tensor before a new one is allocated
            tensor = self._tensors[role] = torch.zeros(count, dtype=dtype, device=self._device)
        return tensor


def allocate(
    case: CollectiveCase, take: Callable[[str, int], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of a case: (sent, received, tensor to fill, tensor to check).

    `sent` and `received` are the arguments of the call. The tensor to fill is empty on ranks
    without input, and the tensor to check is empty on ranks without a result. `take(role, count)`
    must return a tensor with `count` elements in its last dim. Symmetric memory requires that all
    ranks call `take` with the same roles and counts in the same order.
    """
    name, nothing = case.operation.name, torch.empty(0, dtype=case.dtype)
    # gather and scatter are in place only on the root, but all ranks allocate both tensors.
    root_in_place = name in ("gather", "scatter")
    if name == "barrier":
        sent = received = nothing
    elif not case.in_place or root_in_place:
        # In all_gather_uneven, allocate the largest shard on all ranks, because symmetric memory
        # requires the same number of elements on all ranks.
        uneven = name == "all_gather_uneven"
        largest = max(uneven_shards(case.count, case.ranks)) if uneven else case.sent_count
        sent = take("sent", largest)[..., : case.sent_count]
        received = take("received", case.received_count)
    elif case.sent_count > case.received_count:
        sent = received = take("sent", case.sent_count)
    else:
        sent = received = take("received", case.received_count)
    if case.in_place and (case.is_root or not root_in_place):
        own_shard = slice(case.rank * case.count, (case.rank + 1) * case.count)
        if name in ("all_gather", "gather"):
            sent = received[..., own_shard]
        elif name in ("reduce_scatter", "scatter"):
            received = sent[..., own_shard]
    return sent, received, sent if case.sends else nothing, received if case.receives else nothing


def copy_then_call(received: Tensor, sent: Tensor, call: Callable[[], Any]) -> None:
    """Copy the input to `received` and make the in-place call, so that the input is kept."""
    received.copy_(sent)
    call()


@dataclass(frozen=True)
class Payload:
    """The data that this rank sends in a case, and the expected result."""

    sent: Tensor
    expected: Tensor

    def count_wrong(self, received: Tensor) -> int:
        """Return the number of elements that are NaN or differ from the expected result."""
        return int((received.to(self.expected.device) != self.expected).sum())


def payload(case: CollectiveCase) -> Payload:
    """Return the data and the expected result of this rank. Each of the two may be empty."""
    count, rank, nothing = case.count, case.rank, torch.empty(0, dtype=case.dtype)
    tiles = _tiles(case.dtype, case.ranks)
    summed = torch.stack(tiles).sum(0).to(case.dtype) if case.operation.reduces else tiles[0]
    match case.operation.name:
        case "all_reduce" | "reduce" | "broadcast":
            expected = _repeat(summed, 0, count)
        case "reduce_scatter" | "scatter":
            expected = _repeat(summed, rank * count, count)
        case "all_gather" | "gather":
            expected = torch.cat([_repeat(tile, 0, count) for tile in tiles])
        case "all_to_all":
            expected = torch.cat([_repeat(tile, rank * count, count) for tile in tiles])
        case "send_recv":
            expected = _repeat(tiles[rank - 1], 0, count)
        case "all_gather_uneven":
            shards = zip(tiles, uneven_shards(count, case.ranks), strict=True)
            expected = torch.cat([_repeat(tile, 0, shard) for tile, shard in shards])
        case "all_to_all_uneven":
            parts = []
            for sender, tile in enumerate(tiles):
                splits = case.uneven_splits(sender)
                parts.append(_repeat(tile, sum(splits[:rank]), splits[rank]))
            expected = torch.cat(parts)
        case _:  # barrier
            expected = nothing
    sent = _repeat(tiles[rank], 0, case.sent_count)
    return Payload(sent if case.sends else nothing, expected if case.receives else nothing)


def _tiles(dtype: torch.dtype, ranks: int) -> list[Tensor]:
    """Return one period of each rank's data."""
    # A floating-point dtype represents all integers up to 2 / eps exactly.
    exact = int(2 / torch.finfo(dtype).eps) if dtype in _FLOATS else torch.iinfo(dtype).max
    largest = max(1, min(1000, exact // ranks))
    tiles = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(1 + rank)
        tiles.append(torch.randint(1, largest + 1, (_PERIOD,), generator=generator).to(dtype))
    return tiles


def _repeat(tile: Tensor, first: int, length: int) -> Tensor:
    """Return elements `first` to `first + length - 1` of an infinitely repeated tile."""
    start = first % _PERIOD
    times = -(-(start + length) // _PERIOD)
    return tile.repeat(times)[start : start + length]
