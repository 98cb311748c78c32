"""Probes of the structures in symmetric memory: what rank 0 does with what rank 1 holds."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from tutti.bench.probe import Probe
from tutti.comm.symmetric import Heap
from tutti.structures import (
    AdapterStore,
    DistributedTensor,
    HashMap,
    ParameterCache,
    PooledCache,
    RingBuffer,
)

_ROWS, _COLUMNS = 4096, 64
_KEYS = 4096
_SLOT_BYTES = 16 << 10
_POOLED_BYTES = 16 << 10
# LoRA of rank 16 for eight matrices of 2048 × 2048: 2 MB.
_ADAPTER = {f"{half}{layer}": (16, 2048) for layer in range(8) for half in "ab"}


def structure_probes(
    heap: Heap, stack: ExitStack
) -> Iterator[tuple[str, Callable[[], Iterable[Probe]]]]:
    """Names and makers of probes. Making them is collective, in this order; the stack closes."""
    yield "parameter cache", partial(_parameter_cache, heap, stack)
    yield "hash map", partial(_hash_map, heap, stack)
    yield "ring", partial(_ring, heap, stack)
    yield "adapter", partial(_adapter_store, heap, stack)
    yield "distributed tensor", partial(_distributed_tensor, heap, stack)
    yield "pooled cache", partial(_pooled_cache, heap, stack)


def _parameter_cache(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    cache = stack.enter_context(ParameterCache(heap, _ROWS, _COLUMNS, placement="cyclic"))
    for index in cache.local_indices.tolist():
        cache.publish(index, _row(index))
    _meet(heap)
    lookup = Probe("parameter cache lookup", _COLUMNS * 4)
    many = Probe("parameter cache lookup of 64 rows", 64 * _COLUMNS * 4)
    publish = Probe("parameter cache publish", _COLUMNS * 4)
    if heap.rank == 0:
        of_peers = [index for index in range(_ROWS) if cache.owner(index) == 1]
        indices, found = cycle(of_peers), torch.empty(_COLUMNS)
        several = torch.tensor(of_peers[:64])
        rows = torch.empty(64, _COLUMNS)
        lookup.call = lambda: cache.lookup(next(indices), out=found)
        lookup.wrong = lambda: int(not torch.equal(found, _row(int(found[0]))))
        many.call = lambda: cache.lookup_many(several, out=rows)
        many.wrong = lambda: int(not torch.equal(rows[:, 0], several.float()))
        mine, row = int(cache.local_indices[0]), _row(int(cache.local_indices[0]))
        publish.call = lambda: cache.publish(mine, row)
        publish.wrong = lambda: int(not torch.equal(cache.lookup(mine), row))
    yield from (lookup, many, publish)


def _hash_map(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    table = stack.enter_context(HashMap(heap, 2 * _KEYS, value_shape=(16,)))
    keys = [key * 0x9E3779B97F4A7C15 % 2**61 for key in range(1, _KEYS + 1)]
    if heap.rank == 0:
        for number, key in enumerate(keys):
            table.put(key, torch.full((16,), float(number)))
    _meet(heap)
    get, put = Probe("hash map get", 64), Probe("hash map put", 64)
    if heap.rank == 0:
        there = [(float(n), key) for n, key in enumerate(keys) if table.owner(key) == 1]
        turn, value = cycle(there), torch.empty(16)
        last = there[0]

        def look() -> None:
            nonlocal last
            last = next(turn)
            table.get(last[1], out=value)

        value_there, key = there[0]
        written = torch.full((16,), value_there)
        get.call, get.wrong = look, lambda: int(not bool((value == last[0]).all()))
        put.call = lambda: table.put(key, written)
        put.wrong = lambda: int(not torch.equal(table[key], written))
    yield from (get, put)


def _ring(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    """16 KB there and back through two rings: put copies in, the reader sees the slot itself."""
    forth, back = (
        stack.enter_context(
            RingBuffer(heap, producer, 1 - producer, slots=4, slot_bytes=_SLOT_BYTES)
        )
        for producer in (0, 1)
    )
    probe = Probe("ring hand-off one way", _SLOT_BYTES, parts=2)
    message = torch.arange(_SLOT_BYTES, device=heap.device).to(torch.uint8)
    seen: list[Tensor] = []

    def ping() -> None:
        forth.put(message)
        with back.next() as item:
            seen[:] = [item]

    def pong() -> None:
        with forth.next() as item:
            seen[:] = [item]
        back.put(message)

    if heap.rank < 2:
        probe.call = ping if heap.rank == 0 else pong
        probe.wrong = lambda: int(not torch.equal(seen[0], message))
    yield probe


def _adapter_store(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    store = stack.enter_context(AdapterStore(heap, 4, _ADAPTER))
    size = sum(rows * columns * 4 for rows, columns in _ADAPTER.values())
    if heap.rank == 1:
        for value, name in enumerate(("first", "second"), start=1):
            shapes = _ADAPTER.items()
            store.put(name, {k: torch.full(s, float(value), device=heap.device) for k, s in shapes})
    _meet(heap)
    switch = Probe("adapter switch, prefetched", size)
    fetch = Probe("adapter prefetch", size)
    if heap.rank == 0:
        values = {"first": 1.0, "second": 2.0}
        turn, now = cycle(values), ""
        for name in values:
            store.prefetch(name).result()
        store.activate("second")

        def change() -> None:
            nonlocal now
            now = next(turn)
            store.activate(now)

        def fetch_again() -> None:
            # The one that is neither active nor the one before it can go, and comes back.
            store.remove("third")
            store.prefetch("third").result()

        switch.call = change
        switch.wrong = lambda: int(
            any(not bool((each == values[now]).all()) for each in store.active().values())
        )
    yield switch
    if heap.rank == 1:
        shapes = _ADAPTER.items()
        store.put("third", {k: torch.full(s, 3.0, device=heap.device) for k, s in shapes})
    _meet(heap)
    if heap.rank == 0:
        store.prefetch("third").result()
        fetch.call = fetch_again
        fetch.wrong = lambda: int("third" not in store.resident())
    yield fetch


def _distributed_tensor(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    table = stack.enter_context(DistributedTensor(heap, (_ROWS, _COLUMNS), placement="cyclic"))
    rows = torch.stack([_row(int(index)) for index in table.local_indices])
    table.local.copy_(rows)
    _meet(heap)
    gather = Probe("distributed tensor gather of 64 rows", 64 * _COLUMNS * 4)
    add = Probe("distributed tensor scatter_add of 64 rows", 64 * _COLUMNS * 4)
    if heap.rank == 0:
        generator = torch.Generator().manual_seed(0)
        indices = torch.randperm(_ROWS, generator=generator)[:64].to(heap.device)
        found = torch.empty(64, _COLUMNS, device=heap.device)
        nothing = torch.zeros(64, _COLUMNS, device=heap.device)
        gather.call = lambda: table.gather(indices, out=found)
        gather.wrong = lambda: int((found[:, 0] != indices).sum())
        add.call = lambda: table.scatter_add(indices, nothing)
        add.wrong = lambda: int((table.gather(indices)[:, 0] != indices).sum())
    yield from (gather, add)


def _pooled_cache(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    """Two values take turns where one has room: each get finds its value one tier further down."""
    tiers = {"local": (2, 0, 0), "peer": (1, 2, 0), "host": (1, 0, 2)}
    for name, (local, peer, host) in tiers.items():
        probe = Probe(f"pooled cache get, {name}", _POOLED_BYTES)
        sizes = (local * _POOLED_BYTES, peer * _POOLED_BYTES * (heap.size - 1))
        cache = stack.enter_context(PooledCache(heap, *sizes, host * _POOLED_BYTES))
        if heap.rank == 0:
            _take_turns(cache, probe, name, heap)
        yield probe


def _take_turns(cache: PooledCache, probe: Probe, tier: str, heap: Heap) -> None:
    values = {key: torch.full((_POOLED_BYTES // 4,), key, device=heap.device) for key in (1.0, 2.0)}
    for key, value in values.items():
        cache.put(key, value)
    turn, out = cycle(values), torch.empty(_POOLED_BYTES // 4, device=heap.device)
    key = 1.0

    def get() -> None:
        nonlocal key
        key = next(turn)
        cache.get(key, out=out)

    def wrong() -> int:
        other = 3.0 - key
        where = cache.tier(other)
        return int(not torch.equal(out, values[key])) + int(where != tier)

    probe.call, probe.wrong = get, wrong


def _row(index: int) -> Tensor:
    """A row that says which one it is."""
    return torch.full((_COLUMNS,), float(index))


def _meet(heap: Heap) -> None:
    """All ranks are here, and not only their streams: names are looked up on the host."""
    heap.barrier()
    heap.quiet()
