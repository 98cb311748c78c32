"""Pairs of messages: what many small ones cost, and what one costs by another road."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti import comm
from tutti.bench.pairs.pair import Pair, Setting
from tutti.comm.symmetric import Heap, all_reduce
from tutti.models import WideResNet, WideResNetConfig
from tutti.parallel.flat import sum_over_ranks
from tutti.parallel.scratch import sum_one_by_one

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def grouped(setting: Setting) -> Pair:
    """What comm.group() is for: each message has a price, whatever its size."""
    count, elements = setting.pick(64, 8), 256
    generator = torch.Generator().manual_seed(setting.world.rank)
    sent = torch.randint(1, 9, (count, elements), generator=generator).float().to(setting.device)
    received = [torch.empty_like(sent) for _ in range(2)]

    def each() -> Tensor:
        for tensor, out in zip(sent, received[0], strict=True):
            comm.all_reduce(tensor, out=out)
        return received[0]

    def together() -> Tensor:
        with comm.group():
            for tensor, out in zip(sent, received[1], strict=True):
                comm.all_reduce(tensor, out=out)
        return received[1]

    return Pair(each, together, reason=f"{count} all-reduces of {elements * 4} bytes")


def from_scratch(setting: Setting) -> Pair:
    """The lesson of parallel/scratch.py: gradient by gradient, or all end to end."""
    depth = setting.pick(28, 10)
    with torch.device("meta"):
        model = WideResNet(WideResNetConfig(depth=depth, width=1))
    shapes = [each.shape for each in model.parameters()]
    generator = torch.Generator().manual_seed(setting.world.rank)
    made = [torch.randn(shape, generator=generator).to(setting.device) for shape in shapes]
    work = [[torch.empty_like(each) for each in made] for _ in range(2)]

    def side(number: int, reduce: Any) -> list[Tensor]:
        for target, source in zip(work[number], made, strict=True):
            target.copy_(source)
        reduce(work[number])
        return work[number]

    megabytes = sum(each.nbytes for each in made) / 1e6
    return Pair(
        baseline=partial(side, 0, sum_one_by_one),
        optimized=partial(side, 1, sum_over_ranks),
        tolerance=0.0 if setting.world.size <= 2 else 1e-5,
        reason=f"the {len(shapes)} gradients of a WideResNet-{depth}-1, {megabytes:.2g} MB",
    )


def symmetric(setting: Setting) -> Pair:
    """A collective arranges a meeting; memory that peers see needs a write and a signal."""
    world = setting.world
    setting.need(world.size > 1, "a message needs a peer: use --ranks 2")
    setting.need(world.nodes == 1, "symmetric memory is that of one host")
    if setting.on_gpu:
        return _one_shot(setting)
    elements = 64
    mine = torch.arange(elements, dtype=torch.float32) + 1000 * world.rank
    gathered = torch.empty(world.size * elements)
    letters = Letters(elements, setting)
    return Pair(
        baseline=lambda: _gathered(gathered, mine),
        optimized=lambda: letters.exchange(mine),
        reason=f"every rank gives all others {mine.nbytes} bytes: all_gather, or put and signal",
        close=letters.close,
    )


def _gathered(into: Tensor, mine: Tensor) -> Tensor:
    _all_gather(into, mine)
    return into


def _one_shot(setting: Setting) -> Pair:
    """On GPUs: an all-reduce in which every rank reads the others' memory."""
    elements, rank = 4096, setting.world.rank
    heap = Heap(bytes=1 << 20, device=setting.device)
    shared = heap.empty(elements, dtype=torch.float32)
    sent = torch.arange(elements, device=setting.device).remainder(97).float() + rank
    plain = torch.empty_like(sent)

    def by_collective() -> Tensor:
        dist.all_reduce(plain.copy_(sent))
        return plain

    def by_memory() -> Tensor:
        shared.local.copy_(sent)
        all_reduce(shared)
        return shared.local

    return Pair(
        baseline=by_collective,
        optimized=by_memory,
        reason=f"all-reduce of {sent.nbytes} bytes, {heap.reason}",
        close=heap.close,
    )


class Letters:
    """Every rank puts its part into everybody's memory, and signals that it is there.

    Two sets of boxes serve in turn. A rank writes into the same set again only after everybody's
    next letter, which is sent when the one before has been read: nothing is overwritten unread.
    """

    def __init__(self, elements: int, setting: Setting) -> None:
        self._heap = Heap(bytes=1 << 20, device=setting.device)
        self._elements = elements
        size = setting.world.size
        self._boxes = [self._heap.zeros(size * elements) for _ in range(2)]
        self._peers = [rank for rank in range(size) if rank != setting.world.rank]
        self._own = slice(setting.world.rank * elements, (setting.world.rank + 1) * elements)
        self._round = 0

    def exchange(self, mine: Tensor) -> Tensor:
        """All parts, one after the other; valid until the next but one."""
        self._round += 1
        boxes = self._boxes[self._round % 2]
        boxes.local[self._own] = mine
        for peer in self._peers:
            # A slot for each sender, so that each one's count is its own.
            boxes.put_signal(
                mine, to=peer, at=self._own.start, slot=self._heap.rank, value=self._round
            )
        for peer in self._peers:
            self._heap.wait(slot=peer, at_least=self._round, source=peer)
        return boxes.local

    def close(self) -> None:
        """Collective."""
        self._heap.close()
