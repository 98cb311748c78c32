"""Pairs of messages: many small messages or one large message, collectives or symmetric memory."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tutti import comm
from tutti.bench.collectives.backends import process_group, send_recv
from tutti.bench.pairs import Pair, Setting
from tutti.comm.collectives import all_reduce_coalesced
from tutti.comm.symmetric import Heap, all_reduce
from tutti.models import WideResNet, WideResNetConfig
from tutti.parallel.teaching import all_reduce_each


def grouped(setting: Setting) -> Pair:
    """Single messages, or all messages in one comm.group(), with one fixed cost instead of many."""
    count, elements = setting.pick(64, 8), 256
    generator = torch.Generator().manual_seed(setting.world.rank)
    sent = torch.randint(1, 9, (count, elements), generator=generator).float().to(setting.device)
    received = [torch.empty_like(sent) for _ in range(2)]

    def one_by_one() -> Tensor:
        for tensor, out in zip(sent, received[0], strict=True):
            comm.all_reduce(tensor, out=out)
        return received[0]

    def in_one_group() -> Tensor:
        with comm.group():
            for tensor, out in zip(sent, received[1], strict=True):
                comm.all_reduce(tensor, out=out)
        return received[1]

    return Pair(one_by_one, in_one_group, reason=f"{count} all-reduces of {elements * 4} bytes")


def from_scratch(setting: Setting) -> Pair:
    """One all-reduce per gradient, as in parallel/teaching.py, or one for all gradients."""
    depth = setting.pick(28, 10)
    with torch.device("meta"):
        model = WideResNet(WideResNetConfig(depth=depth, width=1))
    generator = torch.Generator().manual_seed(setting.world.rank)
    gradients = [
        torch.randn(each.shape, generator=generator).to(setting.device)
        for each in model.parameters()
    ]
    sums = [[torch.empty_like(each) for each in gradients] for _ in range(2)]

    def side(number: int, reduce: Callable[[list[Tensor]], None]) -> list[Tensor]:
        for result, gradient in zip(sums[number], gradients, strict=True):
            result.copy_(gradient)
        reduce(sums[number])
        return sums[number]

    megabytes = sum(each.nbytes for each in gradients) / 1e6
    exact = setting.world.size <= 2
    return Pair(
        baseline=partial(side, 0, all_reduce_each),
        optimized=partial(side, 1, all_reduce_coalesced),
        tolerance=0.0 if exact else 1e-5,
        reason=f"the {len(gradients)} gradients of a WideResNet-{depth}-1, {megabytes:.2g} MB"
        + ("" if exact else "; ranks are summed in another order"),
    )


def symmetric(setting: Setting) -> Pair:
    """Send and receive, which synchronize both ranks, or one write and one signal to the peer."""
    world = setting.world
    setting.need(world.size > 1, "a message needs a peer: use --ranks 2")
    setting.need(world.nodes == 1, "symmetric memory spans one host only")
    if setting.on_gpu:
        return _one_shot_all_reduce(setting)
    elements, rank = 64, world.rank
    following, previous = (rank + 1) % world.size, (rank - 1) % world.size
    mine = torch.arange(elements, dtype=torch.float32) + 1000 * rank
    received = torch.empty_like(mine)
    group, _ = process_group("shm")  # the fastest collective within a host
    exchange = RingExchange(elements, following, previous)

    def by_collective() -> Tensor:
        send_recv(mine, received, following, previous, group)
        return received

    def close() -> None:
        exchange.heap.close()
        dist.destroy_process_group(group)

    return Pair(
        baseline=by_collective,
        optimized=lambda: exchange.exchange(mine),
        reason=f"every rank sends {mine.nbytes} bytes to the next: send and recv over shm, or put "
        "and signal",
        close=close,
    )


def _one_shot_all_reduce(setting: Setting) -> Pair:
    """The pair on GPUs: dist.all_reduce, or a kernel that reads the memory of the other ranks."""
    elements, rank = 4096, setting.world.rank
    heap = Heap(bytes=1 << 20, device=setting.device)
    shared = heap.empty(elements, dtype=torch.float32)
    sent = torch.arange(elements, device=setting.device).remainder(97).float() + rank
    plain = torch.empty_like(sent)

    def by_collective() -> Tensor:
        dist.all_reduce(plain.copy_(sent))
        return plain

    def by_symmetric_memory() -> Tensor:
        shared.local.copy_(sent)
        all_reduce(shared)
        return shared.local

    return Pair(
        baseline=by_collective,
        optimized=by_symmetric_memory,
        reason=f"all-reduce of {sent.nbytes} bytes, {heap.reason}",
        close=heap.close,
    )


class RingExchange:
    """Every rank puts a message into the memory of the next rank, and signals its arrival.

    Two buffers alternate. At the start of an exchange, a rank signals that it no longer needs the
    message of the exchange before. The sender waits for this signal before it reuses the buffer.
    """

    _ARRIVED, _READ = 0, 1  # signal slots; the value of a signal is a number of messages

    def __init__(self, elements: int, following: int, previous: int) -> None:
        self.heap = Heap(bytes=1 << 16, device="cpu")
        self._buffers = [self.heap.zeros(elements) for _ in range(2)]
        self._following, self._previous = following, previous
        self._sent = 0

    def exchange(self, mine: Tensor) -> Tensor:
        """Send a message, and return the received message. It is valid until the next exchange."""
        heap, before = self.heap, self._sent
        self._sent = number = before + 1
        buffer = self._buffers[number % 2]
        heap.signal(self._previous, self._READ, before)
        if before > 1:
            heap.wait(self._READ, before - 1, self._following)
        buffer.put_signal(mine, self._following, self._ARRIVED, number)
        heap.wait(self._ARRIVED, number, self._previous)
        return buffer.local
