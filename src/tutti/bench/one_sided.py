"""Probes of a symmetric heap: put, get, signals, atomics and barriers between ranks 0 and 1."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from tutti.bench.probe import Probe
from tutti.comm.symmetric import Heap, SymmetricTensor

_SIZES = (8, 1 << 10, 64 << 10, 1 << 20)


def one_sided_probes(
    heap: Heap,
) -> Iterator[tuple[str, Callable[[], Iterable[Probe]]]]:
    """Names and makers of probes. Making them is collective, in this order."""
    slots = iter(range(heap.signals))
    for size in _SIZES:
        slot = next(slots)
        yield f"put and get, {size} bytes", partial(_messages, heap, size, slot)
    yield "signal", partial(_signal, heap, next(slots))
    yield "atomics", partial(_atomics, heap)
    yield "barrier", lambda: [Probe("barrier", 0, heap.barrier, of="slowest")]


def _messages(heap: Heap, size: int, slot: int) -> Iterator[Probe]:
    yield _put(heap, size)
    yield _get(heap, size)
    yield _put_signal(heap, size, slot)


def _put(heap: Heap, size: int) -> Probe:
    target, sources = _target(heap, size), _sources(heap, size)
    probe = Probe("put", size)
    if heap.rank == 0:
        probe.call = lambda: target.put(sources[0], to=1)
    if heap.rank == 1:
        probe.wrong = lambda: _differences(target.local, sources[0])
    return probe


def _get(heap: Heap, size: int) -> Probe:
    target, sources = _target(heap, size), _sources(heap, size)
    target.local.copy_(sources[min(heap.rank, 1)])
    heap.barrier()
    probe = Probe("get", size)
    if heap.rank == 0:
        out = torch.empty_like(sources[1])
        probe.call = lambda: target.get(source=1, out=out)
        probe.wrong = lambda: _differences(out, sources[1])
    return probe


def _put_signal(heap: Heap, size: int, slot: int) -> Probe:
    """There and back: each side waits for the other's message before it sends its own."""
    target, sources = _target(heap, size), _sources(heap, size)
    probe = Probe("put_signal one way", size, parts=2)
    sent = 0

    def ping() -> None:
        nonlocal sent
        sent += 1
        target.put_signal(sources[0], to=1, slot=slot, value=sent)
        heap.wait(slot=slot, at_least=sent, source=1)

    def pong() -> None:
        nonlocal sent
        sent += 1
        heap.wait(slot=slot, at_least=sent, source=0)
        target.put_signal(sources[1], to=0, slot=slot, value=sent)

    if heap.rank < 2:
        probe.call = ping if heap.rank == 0 else pong
        probe.wrong = lambda: _differences(target.local, sources[1 - heap.rank])
    return probe


def _signal(heap: Heap, slot: int) -> Iterator[Probe]:
    probe = Probe("signal one way", 8, parts=2)
    sent = 0

    def ping() -> None:
        nonlocal sent
        sent += 1
        heap.signal(to=1, slot=slot, value=sent)
        heap.wait(slot=slot, at_least=sent, source=1)

    def pong() -> None:
        nonlocal sent
        sent += 1
        heap.wait(slot=slot, at_least=sent, source=0)
        heap.signal(to=0, slot=slot, value=sent)

    if heap.rank < 2:
        probe.call = ping if heap.rank == 0 else pong
        probe.wrong = lambda: int(heap.read_signal(slot) != sent)
    yield probe


def _atomics(heap: Heap) -> Iterator[Probe]:
    counters = heap.counters(3)
    added = swapped = together = 0

    def add() -> None:
        nonlocal added
        added += 1
        counters.fetch_add(0, 1, at=1)

    def swap() -> None:
        nonlocal swapped
        counters.compare_swap(1, swapped, swapped + 1, at=1)
        swapped += 1

    def add_together() -> None:
        nonlocal together
        together += 1
        counters.fetch_add(2, 1, at=1)

    alone = heap.rank == 0
    one = Probe("fetch_add", 8)
    two = Probe("compare_swap", 8)
    all_at_once = Probe("fetch_add, all ranks at one", 8, add_together, of="slowest")
    if alone:
        one.call, two.call = add, swap
        one.wrong = lambda: int(counters.load(0, at=1) != added)
        two.wrong = lambda: int(counters.load(1, at=1) != swapped)
        all_at_once.wrong = lambda: int(counters.load(2, at=1) != together * heap.size)
    yield from (one, two, all_at_once)


def _target(heap: Heap, size: int) -> SymmetricTensor:
    return heap.zeros(size // 4, dtype=torch.float32)


def _sources(heap: Heap, size: int) -> list[Tensor]:
    """What ranks 0 and 1 send; both know both, to check."""
    first = torch.arange(1, size // 4 + 1, dtype=torch.float32)
    return [first.to(heap.device), (-first).to(heap.device)]


def _differences(found: Tensor, expected: Tensor) -> int:
    return int((found != expected).sum())
