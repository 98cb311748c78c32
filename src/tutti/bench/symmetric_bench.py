"""`tutti bench symmetric`: latency of one-sided operations and of structures in symmetric memory.

A probe is one operation whose latency is measured. In most probes, rank 0 accesses the memory of
rank 1. A one-way probe is a ping-pong between ranks 0 and 1, and reports half of the round-trip
time. Each round measures all probes in turn. After the last round, all_reduce is measured on all
backends.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle
from typing import Any

import torch
from torch import Tensor

from tutti import structures
from tutti.bench.collectives.backends import open_backends
from tutti.bench.collectives.cases import case_groups
from tutti.bench.collectives.interleaved_sweep import Sweep
from tutti.bench.rank_control import RankControl, try_on_all_ranks
from tutti.comm.symmetric import Counters, Heap
from tutti.measure.spread import summarize_us
from tutti.measure.timing import time_back_to_back
from tutti.world.rank_cases import Cases
from tutti.world.world import World

Row = dict[str, Any]
_HEAP_BYTES = 256 << 20
_ROUNDS = 8
_MAX_CALLS_PER_ROUND = 1000
_PROBES = "one-sided operations and structures"
_BACKENDS = {
    "cpu": ("gloo", "shm", "symmetric", "one-shot", "two-shot", "ring"),
    "cuda": ("nccl", "one-shot", "two-shot", "ring"),
}


@dataclass
class Probe:
    """One operation whose latency is measured."""

    name: str
    bytes: int
    call: Callable[[], Any]
    correct: Callable[[], bool] = lambda: True  # checks the result of the last call of a round
    one_way: bool = False  # a call is a round trip of ranks 0 and 1; the row reports half its time
    all_ranks: bool = False  # all ranks make the call; the row reports the slowest rank
    seconds: list[Tensor] = field(default_factory=list)
    calls: int = 0  # number of calls per round
    wrong: int = 0  # number of wrong results over all rounds and ranks
    case: str = ""  # name of the probe's case in `_all_probes`

    def runs_on(self, rank: int) -> bool:
        """Return whether this rank makes the call and checks the result."""
        return self.all_ranks or rank < (2 if self.one_way else 1)


@dataclass
class SymmetricBench:
    """Settings and results of the benchmark. All ranks have the same values."""

    world: World
    control: RankControl
    budget: float  # seconds per row
    report: Callable[[list[Row]], None]  # called with rows when their measurement is complete
    rows: list[Row] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    stopped: bool = False
    complete: bool = False  # whether every row was measured
    cases: Cases = field(default_factory=lambda: Cases(None))
    save: Callable[[], None] = lambda: None
    """Called after each round of probes and after each all-reduce size."""

    def run(self, sizes: Sequence[int]) -> None:
        """Measure all probes, then all-reduces of `sizes` bytes. All ranks must call it."""
        if _PROBES in self.cases.rows:
            self.rows = list(self.cases.rows[_PROBES]["rows"])
        else:
            with Heap(bytes=_HEAP_BYTES, device=self.world.device) as heap, ExitStack() as stack:
                self._run_probes(heap, stack)
            if self.world.is_first and not self.stopped:
                self.cases.add_row(_PROBES, {"rows": self.rows})
        if not self.stopped:
            self._compare_all_reduces(sizes)
        self.complete = not self.stopped

    def _run_probes(self, heap: Heap, stack: ExitStack) -> None:
        probes: list[Probe] = []
        for name, make in _all_probes(heap, stack):
            if name in self.cases.crashed:
                continue
            with self.cases.running(name, self.world.rank):
                made, reason = try_on_all_ranks(lambda make=make: list(make()))  # type: ignore[misc]
                if made is None:
                    self.skipped.append({"name": name, "reason": reason})
                for probe in made or ():
                    probe.case = name
                    if reason := self._warm_up(probe):
                        self.skipped.append({"name": probe.name, "reason": reason})
                    else:
                        probes.append(probe)
        try:
            self._run_rounds(probes, heap.backend)
        except Exception:
            # Report the rows now, unless new ranks will be started after this crash.
            if not self.cases.restarts:
                self.report(self.rows)
            raise
        self.report(self.rows)

    def _run_rounds(self, probes: list[Probe], backend: str) -> None:
        for _ in range(_ROUNDS):
            for probe in probes:
                if self.control.check_stop():
                    self.stopped = True
                    break
                with self.cases.running(probe.case, self.world.rank):
                    probe.seconds.append(self._round(probe))
                    wrong = probe.runs_on(self.world.rank) and not probe.correct()
                    probe.wrong += self.control.sum_over_ranks(int(wrong))
            self.rows = []
            for probe in (probe for probe in probes if probe.seconds):
                seconds = torch.cat(probe.seconds).tolist()
                measured = (summarize_us(seconds), len(seconds), probe.wrong)
                self.rows.append(_row(probe.name, backend, probe.bytes, *measured))
            self.save()
            if self.stopped:
                break

    def _warm_up(self, probe: Probe) -> str:
        """Choose the number of calls per round. If a call failed, return the reason, else ""."""
        device = self.world.device

        def first_call() -> None:
            if probe.runs_on(self.world.rank):
                probe.call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        _, reason = try_on_all_ranks(first_call)
        if not reason:
            probe.calls = 10
            call_seconds = float(self._round(probe).mean()) * (2 if probe.one_way else 1)
            calls = math.ceil(self.budget / _ROUNDS / call_seconds)
            probe.calls = min(_MAX_CALLS_PER_ROUND, max(2, calls))
        return reason

    def _round(self, probe: Probe) -> Tensor:
        """Return the seconds of each call in one round. All ranks return the same values."""
        self.control.check_stop()
        times = torch.zeros(probe.calls, dtype=torch.float64)
        if probe.runs_on(self.world.rank):  # the other ranks sleep in max_of_tensor
            times = time_back_to_back(probe.call, probe.calls, self.world.device)
        if not probe.all_ranks and self.world.rank != 0:
            times.zero_()
        return self.control.max_of_tensor(times) / (2 if probe.one_way else 1)

    def _compare_all_reduces(self, sizes: Sequence[int]) -> None:
        world = self.world
        groups = case_groups("all_reduce", sizes, torch.float32, world)

        probes = self.rows

        def add(measured: list[Row]) -> None:
            self.rows = probes + _all_reduce_rows(sweep.rows)
            self.report(_all_reduce_rows(measured))
            self.save()

        with open_backends(_BACKENDS[world.device.type], world, max(sizes)) as (backends, missing):
            sweep = Sweep(backends, self.control, world, self.budget)
            sweep.run(groups, add, self.cases)
            self.rows = probes + _all_reduce_rows(sweep.rows)
            self.stopped = sweep.stopped
        for skip in missing + sweep.skipped:
            name = f"all_reduce {skip['backend']}"
            self.skipped.append({"name": name, "reason": skip["reason"]})


def _all_reduce_rows(measured: list[Row]) -> list[Row]:
    fields = ("backend", "bytes", "time_us", "calls", "wrong")
    return [_row("all_reduce", *(row[field] for field in fields)) for row in measured]


def _row(
    name: str, backend: str, size: int, times: dict[str, float], calls: int, wrong: int
) -> Row:
    times_us = {f"{key}_us": times[key] for key in ("p50", "p99", "min")}
    row = {"name": name, "backend": backend, "bytes": size, **times_us}
    return {**row, "calls": calls, "wrong": wrong}


# ---- One-sided operations ----

_MESSAGE_BYTES = (8, 1 << 10, 64 << 10, 1 << 20)


def _all_probes(
    heap: Heap, stack: ExitStack
) -> Iterator[tuple[str, Callable[[], Iterable[Probe]]]]:
    """Yield (name, function that makes probes) for each case. All ranks must call each function.

    The functions push the structures that they create onto `stack`, which closes them at the end.
    """
    slots = iter(range(heap.signals))
    for size in _MESSAGE_BYTES:
        yield f"put and get, {size} bytes", partial(_messages, heap, size, next(slots))
    yield "signal", partial(_signal, heap, next(slots))
    yield "atomics", partial(_atomics, heap)
    yield "barrier", lambda: [Probe("barrier", 0, heap.barrier, all_ranks=True)]
    yield "parameter cache", partial(_parameter_cache, heap, stack)
    yield "hash map", partial(_hash_map, heap, stack)
    yield "ring", partial(_ring_buffer, heap, stack)
    yield "adapter", partial(_adapter_store, heap, stack)
    yield "distributed tensor", partial(_distributed_tensor, heap, stack)
    yield "pooled cache", partial(_pooled_cache, heap, stack)


def _messages(heap: Heap, size: int, slot: int) -> Iterator[Probe]:
    positive = torch.arange(1, size // 4 + 1, dtype=torch.float32).to(heap.device)
    data = [positive, -positive]  # the data of rank 0 and of rank 1
    target, source, mailbox = (heap.zeros(size // 4, dtype=torch.float32) for _ in range(3))
    source.local.copy_(data[min(heap.rank, 1)])
    heap.barrier()
    out, peer = torch.empty_like(positive), 1 - heap.rank

    def send(number: int) -> None:
        mailbox.put_signal(data[heap.rank], to=peer, slot=slot, value=number)

    first = data[0]

    # These calls are functions, because functools.partial with keyword arguments is 0.1 µs slower.
    def put() -> None:
        target.put(first, to=1)

    def get() -> None:
        source.get(source=1, out=out)

    exchange = _ping_pong(heap, slot, send)

    def received() -> bool:
        return torch.equal(mailbox.local, data[peer])

    yield Probe("put", size, put, lambda: torch.equal(target.get(source=1), data[0]))
    yield Probe("get", size, get, lambda: torch.equal(out, data[1]))
    yield Probe("put_signal one way", size, exchange, received, one_way=True)


def _signal(heap: Heap, slot: int) -> Iterator[Probe]:
    sent = 0

    def send(number: int) -> None:
        nonlocal sent
        sent = number
        heap.signal(to=1 - heap.rank, slot=slot, value=number)

    def correct() -> bool:
        return heap.read_signal(slot) == sent

    yield Probe("signal one way", 8, _ping_pong(heap, slot, send), correct, one_way=True)


def _ping_pong(heap: Heap, slot: int, send: Callable[[int], None]) -> Callable[[], None]:
    """Return the function that this rank calls: rank 0 sends, then waits; rank 1 waits, then sends.

    Both functions call `send` with the value of the signal, which is the number of calls so far.
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
    swaps = 0

    def swap() -> None:
        nonlocal swaps
        counters.compare_swap(1, swaps, swaps + 1, at=1)
        swaps += 1

    yield Probe("fetch_add", 8, *_additions(counters, 0, 1))
    yield Probe("compare_swap", 8, swap, lambda: counters.load(1, at=1) == swaps)
    everyone = _additions(counters, 2, heap.size)
    yield Probe("fetch_add, all ranks on one counter", 8, *everyone, all_ranks=True)


def _additions(
    counters: Counters, counter: int, adding_ranks: int
) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Return a function that adds 1 to a counter of rank 1, and a function that checks it."""
    calls = 0

    def add() -> None:
        nonlocal calls
        calls += 1
        counters.fetch_add(counter, 1, at=1)

    def correct() -> bool:
        return counters.load(counter, at=1) == calls * adding_ranks

    return add, correct


# ---- Structures ----

_ROWS, _COLUMNS = 4096, 64
_ROW_BYTES = _COLUMNS * 4
_KEYS = 4096
_SLOT_BYTES = 16 << 10
_POOLED_BYTES = 16 << 10
# A LoRA adapter of rank 16 for eight matrices of 2048 × 2048 elements: 2 MB.
_ADAPTER = {f"{half}{layer}": (16, 2048) for layer in range(8) for half in "ab"}


def _parameter_cache(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    cache = stack.enter_context(
        structures.ParameterCache(heap, _ROWS, _COLUMNS, placement="cyclic")
    )
    for index in cache.local_indices.tolist():
        cache.publish(index, _numbered_row(index))
    _barrier_on_host(heap)
    remote = [index for index in range(_ROWS) if cache.owner(index) == 1]
    indices, found = cycle(remote), torch.empty(_COLUMNS)
    batch, rows = torch.tensor(remote[:64]), torch.empty(64, _COLUMNS)
    own_index = int(cache.local_indices[0])
    own_row = _numbered_row(own_index)

    def lookup() -> None:
        cache.lookup(next(indices), out=found)

    def found_row() -> bool:
        return torch.equal(found, _numbered_row(int(found[0])))

    def found_batch() -> bool:
        return torch.equal(rows[:, 0], batch.float())

    def published() -> bool:
        return torch.equal(cache.lookup(own_index), own_row)

    lookup_many = partial(cache.lookup_many, batch, out=rows)
    publish = partial(cache.publish, own_index, own_row)
    yield Probe("parameter cache lookup", _ROW_BYTES, lookup, found_row)
    yield Probe("parameter cache lookup of 64 rows", 64 * _ROW_BYTES, lookup_many, found_batch)
    yield Probe("parameter cache publish", _ROW_BYTES, publish, published)


def _hash_map(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    table = stack.enter_context(structures.HashMap(heap, 2 * _KEYS, value_shape=(16,)))
    keys = [key * 0x9E3779B97F4A7C15 % 2**61 for key in range(1, _KEYS + 1)]
    if heap.rank == 0:
        for number, key in enumerate(keys):
            table.put(key, torch.full((16,), float(number)))
    _barrier_on_host(heap)
    remote = [(float(n), key) for n, key in enumerate(keys) if table.owner(key) == 1]
    entries, value, last = cycle(remote), torch.empty(16), remote[0]
    first_number, first_key = remote[0]
    written = torch.full((16,), first_number)

    def get_next() -> None:
        nonlocal last
        last = next(entries)
        table.get(last[1], out=value)

    put = partial(table.put, first_key, written)
    yield Probe("hash map get", 64, get_next, lambda: bool((value == last[0]).all()))
    yield Probe("hash map put", 64, put, lambda: torch.equal(table[first_key], written))


def _ring_buffer(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    """Yield a probe that sends 16 KiB to rank 1 and back through two ring buffers."""
    rings = [
        stack.enter_context(
            structures.RingBuffer(heap, rank, 1 - rank, slots=4, slot_bytes=_SLOT_BYTES)
        )
        for rank in (0, 1)
    ]
    message = torch.arange(_SLOT_BYTES, device=heap.device).to(torch.uint8)
    received: list[Tensor] = []

    def receive(ring: structures.RingBuffer) -> None:
        with ring.next() as item:
            received[:] = [item]

    def ping() -> None:
        rings[0].put(message)
        receive(rings[1])

    def pong() -> None:
        receive(rings[0])
        rings[1].put(message)

    def correct() -> bool:
        return torch.equal(received[0], message)

    call = ping if heap.rank == 0 else pong
    yield Probe("ring hand-off one way", _SLOT_BYTES, call, correct, one_way=True)


def _adapter_store(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    store = stack.enter_context(structures.AdapterStore(heap, 4, _ADAPTER))
    size = sum(rows * columns * 4 for rows, columns in _ADAPTER.values())
    values = {"first": 1.0, "second": 2.0}
    names, active = cycle(values), ""

    def put_from_rank_1(adapters: dict[str, float]) -> None:
        for name, value in adapters.items() if heap.rank == 1 else ():
            tensors = {k: torch.full(s, value, device=heap.device) for k, s in _ADAPTER.items()}
            store.put(name, tensors)
        _barrier_on_host(heap)

    def activate_next() -> None:
        nonlocal active
        active = next(names)
        store.activate(active)

    def activated() -> bool:
        return all(bool((tensor == values[active]).all()) for tensor in store.active().values())

    def fetch_again() -> None:
        # remove() accepts the adapter "third", because "third" is neither active nor the adapter
        # that was active before the current one.
        store.remove("third")
        store.prefetch("third").result()

    put_from_rank_1(values)
    if heap.rank == 0:
        for name in values:
            store.prefetch(name).result()
        store.activate("second")
    yield Probe("adapter switch, prefetched", size, activate_next, activated)
    put_from_rank_1({"third": 3.0})
    if heap.rank == 0:
        store.prefetch("third").result()
    yield Probe("adapter prefetch", size, fetch_again, lambda: "third" in store.resident())


def _distributed_tensor(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    table = stack.enter_context(
        structures.DistributedTensor(heap, (_ROWS, _COLUMNS), placement="cyclic")
    )
    table.local.copy_(torch.stack([_numbered_row(int(index)) for index in table.local_indices]))
    _barrier_on_host(heap)
    generator = torch.Generator().manual_seed(0)
    indices = torch.randperm(_ROWS, generator=generator)[:64].to(heap.device)
    found = torch.empty(64, _COLUMNS, device=heap.device)
    zeros = torch.zeros(64, _COLUMNS, device=heap.device)
    gather = partial(table.gather, indices, out=found)
    add = partial(table.scatter_add, indices, zeros)

    def unchanged() -> bool:
        return torch.equal(table.gather(indices)[:, 0].long(), indices)

    def gathered() -> bool:
        return torch.equal(found[:, 0].long(), indices)

    yield Probe("distributed tensor gather of 64 rows", 64 * _ROW_BYTES, gather, gathered)
    yield Probe("distributed tensor scatter_add of 64 rows", 64 * _ROW_BYTES, add, unchanged)


def _pooled_cache(heap: Heap, stack: ExitStack) -> Iterator[Probe]:
    # {tier that `get` reads: number of values that fit into the local, peer and host tiers}
    # Two values are read in turn. If the local tier can hold only one value, each `get` finds its
    # value in the tier "peer" or "host".
    tiers = {"local": (2, 0, 0), "peer": (1, 2, 0), "host": (1, 0, 2)}
    count = _POOLED_BYTES // 4
    values = {key: torch.full((count,), key, device=heap.device) for key in (1.0, 2.0)}
    for tier, (local, peer, host) in tiers.items():
        sizes = (local * _POOLED_BYTES, peer * _POOLED_BYTES * (heap.size - 1))
        cache = stack.enter_context(structures.PooledCache(heap, *sizes, host * _POOLED_BYTES))
        if heap.rank == 0:
            for key, value in values.items():
                cache.put(key, value)
        yield _alternating_gets(cache, tier, values)


def _alternating_gets(
    cache: structures.PooledCache, tier: str, values: dict[float, Tensor]
) -> Probe:
    keys, out, key = cycle(values), torch.empty_like(values[1.0]), 1.0

    def get() -> None:
        nonlocal key
        key = next(keys)
        cache.get(key, out=out)

    def correct() -> bool:
        # `tier` must contain the value that the next `get` reads.
        return torch.equal(out, values[key]) and cache.tier(3.0 - key) == tier

    return Probe(f"pooled cache get, {tier}", _POOLED_BYTES, get, correct)


def _numbered_row(index: int) -> Tensor:
    return torch.full((_COLUMNS,), float(index))


def _barrier_on_host(heap: Heap) -> None:
    # On a GPU, heap.barrier() synchronizes streams, but not the host. The host must also wait,
    # because it looks up keys and names that other ranks have written.
    heap.barrier()
    heap.quiet()
