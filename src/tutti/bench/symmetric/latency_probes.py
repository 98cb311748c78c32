"""Latency probes: one-sided operations of a symmetric heap, and structures in symmetric memory.

Almost all probes measure calls of rank 0 on memory of rank 1. A ping-pong probe runs on both ranks
and reports half of the round-trip time.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle
from typing import Any

import torch
from torch import Tensor

from tutti.comm.symmetric import Heap
from tutti.structures import (
    AdapterStore,
    DistributedTensor,
    HashMap,
    ParameterCache,
    PooledCache,
    RingBuffer,
)

_SIZES = (8, 1 << 10, 64 << 10, 1 << 20)
_ROWS, _COLUMNS = 4096, 64
_KEYS = 4096
_SLOT_BYTES = 16 << 10
_POOLED_BYTES = 16 << 10
# A LoRA adapter of rank 16 for eight matrices of 2048 × 2048 elements: 2 MB.
_ADAPTER = {f"{half}{layer}": (16, 2048) for layer in range(8) for half in "ab"}


@dataclass
class Probe:
    """One operation whose latency is measured; `call` is None on ranks that take no part."""

    name: str
    bytes: int
    call: Callable[[], Any] | None = None
    parts: int = 1  # 2 if a call is a round trip and the row reports one way
    slowest_rank: bool = False  # report the slowest rank's time instead of rank 0's
    wrong: Callable[[], int] = lambda: 0  # returns the number of errors; all ranks, after a round
    seconds: list[Tensor] = field(default_factory=list)
    calls: int = 0  # per round
    total_wrong: int = 0


def all_probes(heap: Heap, stack: ExitStack) -> Iterator[tuple[str, Callable[[], Iterable[Probe]]]]:
    """Yield (name, function that makes probes).

    These functions are collective: all ranks call them in this order. `stack` closes the
    structures.
    """
    slots = iter(range(heap.signals))
    for size in _SIZES:
        yield f"put and get, {size} bytes", partial(_messages, heap, size, next(slots))
    yield "signal", partial(_signal, heap, next(slots))
    yield "atomics", partial(_atomics, heap)
    yield "barrier", lambda: [Probe("barrier", 0, heap.barrier, slowest_rank=True)]
    yield "parameter cache", partial(_parameter_cache, heap, stack)
    yield "hash map", partial(_hash_map, heap, stack)
    yield "ring", partial(_ring_buffer, heap, stack)
    yield "adapter", partial(_adapter_store, heap, stack)
    yield "distributed tensor", partial(_distributed_tensor, heap, stack)
    yield "pooled cache", partial(_pooled_cache, heap, stack)


# ---- One-sided operations ----


def _messages(heap: Heap, size: int, slot: int) -> Iterator[Probe]:
    positive = torch.arange(1, size // 4 + 1, dtype=torch.float32).to(heap.device)
    data = [positive, -positive]  # data of ranks 0 and 1; each checks the other
    target, source, mailbox = (heap.zeros(size // 4, dtype=torch.float32) for _ in range(3))
    source.local.copy_(data[min(heap.rank, 1)])
    heap.barrier()
    put, get = Probe("put", size), Probe("get", size)
    put_signal = Probe("put_signal one way", size, parts=2)
    if heap.rank == 0:
        out = torch.empty_like(positive)
        put.call = partial(target.put, data[0], to=1)
        get.call = partial(source.get, source=1, out=out)
        get.wrong = partial(_count_different, out, data[1])
    if heap.rank == 1:
        put.wrong = partial(_count_different, target.local, data[0])
    if heap.rank < 2:
        peer = 1 - heap.rank

        def send(number: int) -> None:
            mailbox.put_signal(data[heap.rank], to=peer, slot=slot, value=number)

        put_signal.call = _ping_pong(heap, slot, send)
        put_signal.wrong = partial(_count_different, mailbox.local, data[peer])
    yield from (put, get, put_signal)


def _signal(heap: Heap, slot: int) -> Iterator[Probe]:
    probe = Probe("signal one way", 8, parts=2)
    if heap.rank < 2:
        sent = 0

        def send(number: int) -> None:
            nonlocal sent
            sent = number
            heap.signal(to=1 - heap.rank, slot=slot, value=number)

        probe.call = _ping_pong(heap, slot, send)
        probe.wrong = lambda: int(heap.read_signal(slot) != sent)
    yield probe


def _ping_pong(heap: Heap, slot: int, send: Callable[[int], None]) -> Callable[[], None]:
    """Return the call of this rank: rank 0 sends and waits for an answer, rank 1 answers.

    The value of a signal is the number of calls so far.
    """
    numbers = count(1)

    def ping() -> None:
        number = next(numbers)
        send(number)
        heap.wait(slot=slot, at_least=number, source=1)

    def pong() -> None:
        number = next(numbers)
        heap.wait(slot=slot, at_least=number, source=0)
        send(number)

    return ping if heap.rank == 0 else pong


def _atomics(heap: Heap) -> Iterator[Probe]:
    counters = heap.counters(3)
    calls = [0, 0, 0]  # by counter

    def add(counter: int) -> None:
        calls[counter] += 1
        counters.fetch_add(counter, 1, at=1)

    def swap() -> None:
        counters.compare_swap(1, calls[1], calls[1] + 1, at=1)
        calls[1] += 1

    def wrong(counter: int, adding_ranks: int) -> int:
        return int(counters.load(counter, at=1) != calls[counter] * adding_ranks)

    one, two = Probe("fetch_add", 8), Probe("compare_swap", 8)
    contended = Probe("fetch_add, all ranks at one", 8, partial(add, 2), slowest_rank=True)
    if heap.rank == 0:
        one.call, two.call = partial(add, 0), swap
        one.wrong, two.wrong = partial(wrong, 0, 1), partial(wrong, 1, 1)
        contended.wrong = partial(wrong, 2, heap.size)
    yield from (one, two, contended)


def _count_different(found: Tensor, expected: Tensor) -> int:
    return int((found != expected).sum())


# ---- Structures ----


def _parameter_cache(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    cache = stack.enter_context(ParameterCache(heap, _ROWS, _COLUMNS, placement="cyclic"))
    for index in cache.local_indices.tolist():
        cache.publish(index, _numbered_row(index))
    _barrier_on_host(heap)
    lookup = Probe("parameter cache lookup", _COLUMNS * 4)
    many = Probe("parameter cache lookup of 64 rows", 64 * _COLUMNS * 4)
    publish = Probe("parameter cache publish", _COLUMNS * 4)
    if heap.rank == 0:
        remote = [index for index in range(_ROWS) if cache.owner(index) == 1]
        indices, found = cycle(remote), torch.empty(_COLUMNS)
        several, rows = torch.tensor(remote[:64]), torch.empty(64, _COLUMNS)
        lookup.call = lambda: cache.lookup(next(indices), out=found)
        lookup.wrong = lambda: int(not torch.equal(found, _numbered_row(int(found[0]))))
        many.call = lambda: cache.lookup_many(several, out=rows)
        many.wrong = lambda: int(not torch.equal(rows[:, 0], several.float()))
        mine = int(cache.local_indices[0])
        row = _numbered_row(mine)
        publish.call = lambda: cache.publish(mine, row)
        publish.wrong = lambda: int(not torch.equal(cache.lookup(mine), row))
    yield from (lookup, many, publish)


def _hash_map(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    table = stack.enter_context(HashMap(heap, 2 * _KEYS, value_shape=(16,)))
    keys = [key * 0x9E3779B97F4A7C15 % 2**61 for key in range(1, _KEYS + 1)]
    if heap.rank == 0:
        for number, key in enumerate(keys):
            table.put(key, torch.full((16,), float(number)))
    _barrier_on_host(heap)
    get, put = Probe("hash map get", 64), Probe("hash map put", 64)
    if heap.rank == 0:
        remote = [(float(n), key) for n, key in enumerate(keys) if table.owner(key) == 1]
        entries, value = cycle(remote), torch.empty(16)
        last = remote[0]

        def get_next() -> None:
            nonlocal last
            last = next(entries)
            table.get(last[1], out=value)

        first_number, key = remote[0]
        written = torch.full((16,), first_number)
        get.call, get.wrong = get_next, lambda: int(not bool((value == last[0]).all()))
        put.call = lambda: table.put(key, written)
        put.wrong = lambda: int(not torch.equal(table[key], written))
    yield from (get, put)


def _ring_buffer(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    """Send 16 KiB to rank 1 and back through two rings; a read returns a view of the slot."""
    rings = [
        stack.enter_context(RingBuffer(heap, rank, 1 - rank, slots=4, slot_bytes=_SLOT_BYTES))
        for rank in (0, 1)
    ]
    probe = Probe("ring hand-off one way", _SLOT_BYTES, parts=2)
    message = torch.arange(_SLOT_BYTES, device=heap.device).to(torch.uint8)
    received: list[Tensor] = []

    def ping() -> None:
        rings[0].put(message)
        with rings[1].next() as item:
            received[:] = [item]

    def pong() -> None:
        with rings[0].next() as item:
            received[:] = [item]
        rings[1].put(message)

    if heap.rank < 2:
        probe.call = ping if heap.rank == 0 else pong
        probe.wrong = lambda: int(not torch.equal(received[0], message))
    yield probe


def _adapter_store(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    store = stack.enter_context(AdapterStore(heap, 4, _ADAPTER))
    size = sum(rows * columns * 4 for rows, columns in _ADAPTER.values())

    def put(name: str, value: float) -> None:
        tensors = {k: torch.full(s, value, device=heap.device) for k, s in _ADAPTER.items()}
        store.put(name, tensors)

    values = {"first": 1.0, "second": 2.0}
    if heap.rank == 1:
        for name, value in values.items():
            put(name, value)
    _barrier_on_host(heap)
    switch = Probe("adapter switch, prefetched", size)
    fetch = Probe("adapter prefetch", size)
    if heap.rank == 0:
        names, active = cycle(values), ""
        for name in values:
            store.prefetch(name).result()
        store.activate("second")

        def activate_next() -> None:
            nonlocal active
            active = next(names)
            store.activate(active)

        switch.call = activate_next
        switch.wrong = lambda: int(
            any(not bool((each == values[active]).all()) for each in store.active().values())
        )
    yield switch
    if heap.rank == 1:
        put("third", 3.0)
    _barrier_on_host(heap)
    if heap.rank == 0:
        store.prefetch("third").result()

        def fetch_again() -> None:
            # The third adapter is neither active nor the previous one, so it can be removed.
            store.remove("third")
            store.prefetch("third").result()

        fetch.call = fetch_again
        fetch.wrong = lambda: int("third" not in store.resident())
    yield fetch


def _distributed_tensor(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    table = stack.enter_context(DistributedTensor(heap, (_ROWS, _COLUMNS), placement="cyclic"))
    table.local.copy_(torch.stack([_numbered_row(int(index)) for index in table.local_indices]))
    _barrier_on_host(heap)
    gather = Probe("distributed tensor gather of 64 rows", 64 * _COLUMNS * 4)
    add = Probe("distributed tensor scatter_add of 64 rows", 64 * _COLUMNS * 4)
    if heap.rank == 0:
        generator = torch.Generator().manual_seed(0)
        indices = torch.randperm(_ROWS, generator=generator)[:64].to(heap.device)
        found = torch.empty(64, _COLUMNS, device=heap.device)
        zeros = torch.zeros(64, _COLUMNS, device=heap.device)
        gather.call = lambda: table.gather(indices, out=found)
        gather.wrong = lambda: int((found[:, 0] != indices).sum())
        add.call = lambda: table.scatter_add(indices, zeros)
        add.wrong = lambda: int((table.gather(indices)[:, 0] != indices).sum())
    yield from (gather, add)


def _pooled_cache(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    """Probe gets from each tier of a pooled cache.

    Two values are read in turns. If the local tier has space for only one value, each get finds its
    value in the other tier, "peer" or "host".
    """
    tiers = {"local": (2, 0, 0), "peer": (1, 2, 0), "host": (1, 0, 2)}
    for name, (local, peer, host) in tiers.items():
        probe = Probe(f"pooled cache get, {name}", _POOLED_BYTES)
        sizes = (local * _POOLED_BYTES, peer * _POOLED_BYTES * (heap.size - 1))
        cache = stack.enter_context(PooledCache(heap, *sizes, host * _POOLED_BYTES))
        if heap.rank == 0:
            _alternate_gets(cache, probe, name, heap)
        yield probe


def _alternate_gets(cache: PooledCache, probe: Probe, tier: str, heap: Heap) -> None:
    values = {key: torch.full((_POOLED_BYTES // 4,), key, device=heap.device) for key in (1.0, 2.0)}
    for key, value in values.items():
        cache.put(key, value)
    keys, out = cycle(values), torch.empty(_POOLED_BYTES // 4, device=heap.device)
    key = 1.0

    def get() -> None:
        nonlocal key
        key = next(keys)
        cache.get(key, out=out)

    probe.call = get
    # The value that was not read last must be in the named tier.
    probe.wrong = lambda: (
        int(not torch.equal(out, values[key])) + int(cache.tier(3.0 - key) != tier)
    )


def _numbered_row(index: int) -> Tensor:
    return torch.full((_COLUMNS,), float(index))


def _barrier_on_host(heap: Heap) -> None:
    """Wait on the host until all ranks arrive; heap.barrier() alone may only order the streams.

    The host barrier is needed because names are looked up on the host.
    """
    heap.barrier()
    heap.quiet()
