"""Who writes what: every piece of every tensor once, each rank about the same number of bytes.

A rank holds a whole tensor (replicated) or a box of it (a shard of a DTensor). The ranks tell
each other what they hold, as JSON; then each works out the same division by itself.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from tutti.train.tensor_file import DTYPE_NAMES, DTYPES
from tutti.world.errors import RanksDiffer, UsageError

# Compared before and after; the text of what a rank holds travels only when it has changed.
DIGEST_BYTES = 16


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins in each dim, and its size."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Piece:
    """A box of a named tensor, as some rank writes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box

    @property
    def bytes(self) -> int:
        return self.box.elements * self.dtype.itemsize

    @property
    def key(self) -> str:
        """Its name in the file: that of the tensor, with the slices unless it is the whole."""
        if self.box.sizes == self.shape:
            return self.name
        spans = zip(self.box.offsets, self.box.sizes, strict=True)
        return f"{self.name}[{','.join(f'{start}:{start + size}' for start, size in spans)}]"


@dataclass(frozen=True)
class Holding:
    """What one rank holds: dtype and shape of each tensor by name, and its own boxes of them.

    uneven: tensors of which the ranks have the same shape but not the same values (statistics of
    a batch norm): the first rank's are kept, as DDP broadcasts the first rank's.
    """

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    boxes: dict[str, Box]
    uneven: frozenset[str]

    def to_json(self) -> Any:
        boxes = {name: [box.offsets, box.sizes] for name, box in self.boxes.items()}
        return {"tensors": self.tensors, "boxes": boxes, "uneven": sorted(self.uneven)}

    @staticmethod
    def from_json(value: Any) -> "Holding":
        return Holding(
            {name: (dtype, tuple(shape)) for name, (dtype, shape) in value["tensors"].items()},
            {name: Box(tuple(at), tuple(sizes)) for name, (at, sizes) in value["boxes"].items()},
            frozenset(value["uneven"]),
        )

    @property
    def digest(self) -> str:
        text = json.dumps(self.to_json()).encode()
        return hashlib.blake2b(text, digest_size=DIGEST_BYTES).hexdigest()


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, Box]:
    """The memory of a tensor on this rank, and which box of the whole it is."""
    shape = tuple(tensor.shape)
    if not hasattr(tensor, "__create_chunk_list__"):  # DTensor has it, and whatever comes next
        return tensor.detach(), Box((0,) * len(shape), shape)
    chunks: list[ChunkStorageMetadata] = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise UsageError(
            f"a tensor of shape {shape} lies in {len(chunks)} parts on one rank: checkpoints "
            "want one, as with the placements Shard and Replicate"
        )
    local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local.detach(), Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def holding(tensors: Mapping[str, torch.Tensor], uneven: frozenset[str]) -> Holding:
    """What this rank holds. A tensor without elements has no box, nor has a rank beside a mesh."""
    described, boxes = {}, {}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided:
            what = f"{tensor.dtype} ({tensor.layout})"
            raise UsageError(f"checkpoints cannot hold {name}: it is {what}, and no dense tensor")
        described[name] = (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        local, box = local_part(tensor)
        if local.numel():
            boxes[name] = box
    return Holding(described, boxes, uneven)


def divide(holdings: Sequence[Holding]) -> list[list[Piece]]:
    """The pieces that each rank writes: replicas once, bytes balanced over their holders."""
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    holders: dict[Piece, list[int]] = {}
    for rank, held in enumerate(holdings):
        for name, what in held.tensors.items():
            if described.setdefault(name, what) != what:
                raise RanksDiffer(f"{name} is {what} on rank {rank}, {described[name]} on others")
        for name, box in held.boxes.items():
            dtype, shape = held.tensors[name]
            holders.setdefault(Piece(name, DTYPES[dtype], shape, box), []).append(rank)
    boxes: dict[str, list[Box]] = {name: [] for name in described}
    for piece in holders:
        boxes[piece.name].append(piece.box)
    for name, (_, shape) in described.items():
        if problem := cover_problem(shape, boxes[name]):
            raise RanksDiffer(f"the ranks' parts of {name} do not make one tensor: {problem}")
    # The largest first, each to the holder with the least so far: close to even, and the same
    # on every rank.
    uneven = frozenset[str]().union(*(held.uneven for held in holdings))
    shares: list[list[Piece]] = [[] for _ in holdings]
    loads = [0] * len(holdings)
    for piece in sorted(holders, key=lambda piece: (-piece.bytes, piece.key)):
        ranks = holders[piece][:1] if piece.name in uneven else holders[piece]
        writer = min(ranks, key=lambda rank: (loads[rank], rank))
        shares[writer].append(piece)
        loads[writer] += piece.bytes
    return shares


def cover_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """What is wrong with boxes that should fill a shape exactly once; None if nothing is."""
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            return f"a part with {len(box.sizes)} dims in a tensor with {len(shape)}"
        spans = zip(box.offsets, box.sizes, shape, strict=True)
        if not all(start >= 0 and 0 < size <= whole - start for start, size, whole in spans):
            return f"a part at {list(box.offsets)} of {list(box.sizes)} is outside {list(shape)}"
    present, wanted = sum(box.elements for box in boxes), math.prod(shape)
    if present != wanted:
        return f"its parts have {present} elements together, not {wanted}"
    return _overlap(boxes) if len(boxes) > 1 else None


def _overlap(boxes: Sequence[Box]) -> str | None:
    # Sweep along the dim with the most cuts; only boxes that the sweep line crosses can overlap.
    dims = range(len(boxes[0].offsets))
    sweep = max(dims, key=lambda dim: len({box.offsets[dim] for box in boxes}), default=None)
    if sweep is None:
        return "a number comes in several parts"
    crossed: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[sweep]):
        start = box.offsets[sweep]
        crossed = [other for other in crossed if other.offsets[sweep] + other.sizes[sweep] > start]
        for other in crossed:
            if all(
                box.offsets[dim] < other.offsets[dim] + other.sizes[dim]
                and other.offsets[dim] < box.offsets[dim] + box.sizes[dim]
                for dim in dims
            ):
                return f"parts at {list(other.offsets)} and {list(box.offsets)} overlap"
        crossed.append(box)
    return None
