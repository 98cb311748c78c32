"""What ranks send in a benchmark, and what must arrive: exact whatever the order of reduction.

Values are whole numbers whose sum over all ranks still fits the mantissa, so a right result is
right to the bit. They depend on rank and index without a pattern that chunks could hide behind:
a period of 8191 is a prime, and no chunk is a multiple of it. No value is 0, so that a
receiving buffer cleared before the call holds nothing right by chance.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.measure.bus_bandwidth import Operation, uneven_shards

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
class Payload:
    """This rank's part of one operation: what it sends, and what it must receive."""

    sent: Tensor
    expected: Tensor

    def wrong_in(self, received: Tensor) -> int:
        """How many elements are not what they must be; NaN is wrong, too."""
        return int((received.to(self.expected.device) != self.expected).sum())


def payload(operation: Operation, count: int, dtype: torch.dtype, rank: int, ranks: int) -> Payload:
    """What `rank` sends and must receive; empty where it does neither. The root is rank 0."""
    tiles = _tiles(dtype, ranks)
    total = torch.stack(tiles).sum(0).to(dtype) if operation.reduces else tiles[0]
    nothing = torch.empty(0, dtype=dtype)
    root = rank == 0
    mine, all_mine = _stretch(tiles[rank], 0, count), count * ranks
    match operation.name:
        case "all_reduce":
            return Payload(mine, _stretch(total, 0, count))
        case "reduce":
            return Payload(mine, _stretch(total, 0, count) if root else nothing)
        case "broadcast":
            return Payload(mine if root else nothing, _stretch(tiles[0], 0, count))
        case "all_gather" | "gather":
            parts = [_stretch(tile, 0, count) for tile in tiles]
            receives = root or operation.name == "all_gather"
            return Payload(mine, torch.cat(parts) if receives else nothing)
        case "reduce_scatter":
            return Payload(_stretch(tiles[rank], 0, all_mine), _stretch(total, rank * count, count))
        case "scatter":
            sent = _stretch(tiles[0], 0, all_mine) if root else nothing
            return Payload(sent, _stretch(tiles[0], rank * count, count))
        case "all_to_all":
            parts = [_stretch(tile, rank * count, count) for tile in tiles]
            return Payload(_stretch(tiles[rank], 0, all_mine), torch.cat(parts))
        case "send_recv":
            return Payload(mine, _stretch(tiles[rank - 1], 0, count))
        case "all_gather_uneven":
            shares = uneven_shards(count, ranks)
            parts = [_stretch(tile, 0, share) for tile, share in zip(tiles, shares, strict=True)]
            return Payload(parts[rank], torch.cat(parts))
        case "all_to_all_uneven":
            parts = [_sent_to(rank, each, count, ranks, tile) for each, tile in enumerate(tiles)]
            return Payload(_stretch(tiles[rank], 0, all_mine), torch.cat(parts))
        case "barrier":
            return Payload(nothing, nothing)
    raise AssertionError(f"no payload for {operation.name}")


def _sent_to(receiver: int, sender: int, count: int, ranks: int, tile: Tensor) -> Tensor:
    shares = uneven_shards(count, ranks)
    lengths = [shares[(sender + each) % ranks] for each in range(ranks)]
    return _stretch(tile, sum(lengths[:receiver]), lengths[receiver])


def _tiles(dtype: torch.dtype, ranks: int) -> list[Tensor]:
    largest = max(1, min(1000, _LARGEST_EXACT[dtype] // ranks))
    tiles = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(1 + rank)
        tiles.append(torch.randint(1, largest + 1, (_PERIOD,), generator=generator).to(dtype))
    return tiles


def _stretch(tile: Tensor, first: int, length: int) -> Tensor:
    """`length` elements of the endlessly repeated tile, from index `first` on."""
    start = first % _PERIOD
    times = -(-(start + length) // _PERIOD)
    return tile.repeat(times)[start : start + length]
