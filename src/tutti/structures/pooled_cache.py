"""PooledCache: a cache of tensors in local memory, peer memory and host memory."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tutti.comm.symmetric.heap import Allocator, Heap
from tutti.structures.structure_base import Structure
from tutti.world.errors import UsageError

UNIT = 64  # values begin at multiples of this number of bytes


@dataclass
class CachedValue:
    """A value in a tier. In symmetric memory, the value is at `offset` of area number `area`."""

    view: torch.Tensor
    area: int = 0
    offset: int = 0
    pins: int = 0


class HostTier:
    """One tier of the cache: values in the order of their last use.

    The values are in ordinary host memory (page-locked if the heap is on a GPU) and take at most
    `limit` bytes together. PooledCache decides which values to evict from a tier.
    """

    name = "host"

    def __init__(self, limit: int, page_locked: bool) -> None:
        self.values: OrderedDict[Hashable, CachedValue] = OrderedDict()
        self.hits = 0
        self._limit, self._page_locked = limit, page_locked

    def store(self, key: Hashable, data: torch.Tensor) -> bool:
        """Store a copy as the most recently used value. Return False if it does not fit."""
        cached = self._allocate(data)
        if cached is None:
            return False
        cached.view.copy_(data)
        self.values[key] = cached
        return True

    def drop(self, key: Hashable) -> None:
        """Remove a value and free its memory."""
        self.values.pop(key)

    def could_store(self, data: torch.Tensor) -> bool:
        """Return whether `data` would fit if all values that are not pinned were removed."""
        pinned = sum(cached.view.nbytes for cached in self.values.values() if cached.pins)
        return data.nbytes <= self._limit - pinned

    def oldest(self) -> Hashable:
        """Return the key of the least recently used value that is not pinned."""
        return next(key for key, cached in self.values.items() if not cached.pins)

    @property
    def bytes(self) -> int:
        return sum(cached.view.nbytes for cached in self.values.values())

    def _allocate(self, data: torch.Tensor) -> CachedValue | None:
        """Return memory for a copy of `data`, or None if there is not enough memory."""
        if data.nbytes > self._limit - self.bytes:
            return None
        view = torch.empty(data.shape, dtype=data.dtype, pin_memory=self._page_locked)
        return CachedValue(view)


class AreaTier(HostTier):
    """Values in areas of symmetric memory that only this rank's cache writes."""

    def __init__(self, name: str, areas: list[torch.Tensor]) -> None:
        super().__init__(limit=0, page_locked=False)
        self.name = name
        self._areas = areas
        self._allocators = [Allocator(area.numel(), UNIT) for area in areas]

    def drop(self, key: Hashable) -> None:
        cached = self.values.pop(key)
        self._allocators[cached.area].free(cached.offset)

    def could_store(self, data: torch.Tensor) -> bool:
        pinned = sorted((value.area, value.offset) for value in self.values.values() if value.pins)
        for number, allocator in enumerate(self._allocators):
            end, largest_gap = 0, 0
            for offset in (offset for area, offset in pinned if area == number):
                largest_gap = max(largest_gap, offset - end)
                end = offset + allocator.taken[offset]
            if data.nbytes <= max(largest_gap, allocator.bytes - end):
                return True
        return False

    def _allocate(self, data: torch.Tensor) -> CachedValue | None:
        bytes = data.nbytes
        fitting = [
            (allocator.free_bytes, -number)
            for number, allocator in enumerate(self._allocators)
            if allocator.largest_gap >= allocator.rounded(bytes)
        ]
        if not fitting:
            return None
        area = -max(fitting)[1]  # the area with the most free memory, to fill all areas evenly
        offset = self._allocators[area].allocate(bytes)
        view = self._areas[area][offset : offset + bytes].view(data.dtype).view(data.shape)
        return CachedValue(view, area, offset)


class PooledCache(Structure):
    """A cache of immutable tensors for this rank, with three tiers: local, peer and host.

    Use it for values that are expensive to compute again and have different sizes: key-value blocks
    of long prompts, decoded samples, intermediate features. When the local tier
    (`local_bytes`) is full, the least recently used values move to memory on the other ranks
    (`peer_bytes` in total, divided evenly among these ranks), then to ordinary host memory
    (`host_bytes`; page-locked if the heap is on a GPU). When the host tier is full, values are
    dropped. A `get` from a lower tier moves the value back to the local tier.

    Do not use it to share values between ranks: each rank has its own keys (use HashMap). On the
    CPU all tiers are equally fast, unless they are on different NUMA nodes, so the cache is useful
    mainly on GPUs.

    No value is lost silently: `put` returns the keys of dropped values, `on_drop` is called with
    each of these keys, and `stats` counts them. `get` never drops a value. Values are immutable: to
    replace a value, remove it first. Use the cache from one thread at a time and, on CUDA, on one
    stream.
    """

    def __init__(
        self,
        heap: Heap,
        local_bytes: int,
        peer_bytes: int = 0,
        host_bytes: int = 0,
        on_drop: Callable[[Hashable], None] | None = None,
    ) -> None:
        super().__init__(heap)
        if local_bytes < UNIT or min(peer_bytes, host_bytes) < 0:
            raise UsageError(
                f"local_bytes must be {UNIT} or more, and peer_bytes and host_bytes must not be "
                f"negative, got {local_bytes}, {peer_bytes} and {host_bytes}"
            )
        local = local_bytes // UNIT * UNIT
        peers = heap.size - 1
        share = peer_bytes // peers // UNIT * UNIT if peers else 0
        pool = self._zeros((local + share * peers,))
        peer_areas = []
        for peer in range(heap.size) if share else ():
            if peer != heap.rank:
                # Each rank's memory contains one area for every other rank, in rank order.
                begin = local + share * (heap.rank - (heap.rank > peer))
                peer_areas.append(pool.peer(peer)[begin : begin + share])
        self._tiers: list[HostTier] = [
            AreaTier("local", [pool.local[:local]]),
            AreaTier("peer", peer_areas),
            HostTier(host_bytes, page_locked=heap.device.type != "cpu"),
        ]
        self._on_drop = on_drop
        self._counts = dict.fromkeys(("puts", "misses", "spilled", "promoted", "dropped"), 0)
        heap.barrier()

    def put(self, key: Hashable, value: torch.Tensor) -> list[Hashable]:
        """Store a copy of a value, and return the keys of the values that were dropped for it.

        If the value itself fits into no tier, it is not stored, and the list contains `key`.
        """
        self._check_open()
        if key in self:
            raise UsageError(f"key {key!r} already has a value: remove the value first")
        self._counts["puts"] += 1
        dropped: list[Hashable] = []
        self._place(key, value, self._tiers, dropped)
        self._counts["dropped"] += len(dropped)
        if self._on_drop is not None:
            for dropped_key in dropped:
                self._on_drop(dropped_key)
        return dropped

    def get(self, key: Hashable, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return a copy of the value, or None if the key has no value.

        The value is moved to the local tier if no other value must be dropped for that.
        """
        tier = self._hit(key)
        if tier is None:
            return None
        cached = tier.values[key]
        if out is None:
            out = torch.empty(cached.view.shape, dtype=cached.view.dtype, device=self.heap.device)
        out.copy_(cached.view)
        if tier is not self._tiers[0] and not cached.pins:
            self._promote(key, tier, out)
        return out

    @contextmanager
    def borrow(self, key: Hashable) -> Iterator[torch.Tensor]:
        """`with cache.borrow(key) as view:` gives a view of the value in its tier, without a copy.

        The value stays in its tier until the block ends. Do not write to the view. Raises KeyError
        if the key has no value.
        """
        tier = self._hit(key)
        if tier is None:
            raise KeyError(key)
        cached = tier.values[key]
        cached.pins += 1
        try:
            yield cached.view
        finally:
            cached.pins -= 1

    def remove(self, key: Hashable) -> None:
        """Remove a value. Raises KeyError if the key has no value."""
        self._check_open()
        tier = self._tier_of(key)
        if tier is None:
            raise KeyError(key)
        if tier.values[key].pins:
            raise UsageError(f"key {key!r} is borrowed: remove it after the `with` block")
        tier.drop(key)

    def tier(self, key: Hashable) -> str | None:
        """Return the tier of a value (local, peer or host), or None if the key has no value."""
        tier = self._tier_of(key)
        return None if tier is None else tier.name

    def __contains__(self, key: Hashable) -> bool:
        return self._tier_of(key) is not None

    def __len__(self) -> int:
        return sum(len(tier.values) for tier in self._tiers)

    def stats(self) -> dict[str, int]:
        """Return the hits, values and bytes of each tier, and the numbers of moves and drops."""
        counts = dict(self._counts)
        for tier in self._tiers:
            counts[f"{tier.name}_hits"] = tier.hits
            counts[f"{tier.name}_values"] = len(tier.values)
            counts[f"{tier.name}_bytes"] = tier.bytes
        return counts

    def _tier_of(self, key: Hashable) -> HostTier | None:
        return next((tier for tier in self._tiers if key in tier.values), None)

    def _hit(self, key: Hashable) -> HostTier | None:
        """Return the tier of a value, and make the value the tier's most recently used one."""
        self._check_open()
        tier = self._tier_of(key)
        if tier is None:
            self._counts["misses"] += 1
        else:
            tier.hits += 1
            tier.values.move_to_end(key)
        return tier

    def _place(
        self, key: Hashable, data: torch.Tensor, tiers: Sequence[HostTier], dropped: list[Hashable]
    ) -> bool:
        """Store `data` in the first tier that can hold it. Return whether there is such a tier.

        To free memory in this tier, its least recently used values move to lower tiers. The keys of
        values that fit into no tier are appended to `dropped`.
        """
        for level, tier in enumerate(tiers):
            if not tier.could_store(data):
                continue
            while not tier.store(key, data):
                oldest = tier.oldest()
                view = tier.values[oldest].view
                self._counts["spilled"] += self._place(oldest, view, tiers[level + 1 :], dropped)
                tier.drop(oldest)
            return True
        dropped.append(key)
        return False

    def _promote(self, key: Hashable, lower: HostTier, data: torch.Tensor) -> None:
        """Move a value to the local tier, if the values that it replaces fit into lower tiers."""
        local = self._tiers[0]
        while local.could_store(data):
            if local.store(key, data):
                lower.drop(key)
                self._counts["promoted"] += 1
                return
            oldest = local.oldest()
            view = local.values[oldest].view
            if not any(tier.store(oldest, view) for tier in self._tiers[1:]):
                self._swap(key, lower, data)
                return
            local.drop(oldest)
            self._counts["spilled"] += 1

    def _swap(self, key: Hashable, lower: HostTier, data: torch.Tensor) -> None:
        """Swap a value with the oldest local value of the same size. This needs no free memory."""
        local, bytes = self._tiers[0], lower.values[key].view.nbytes
        for other, cached in local.values.items():
            if cached.pins or cached.view.nbytes != bytes:
                continue
            copy = cached.view.clone()
            local.drop(other)
            lower.drop(key)
            local.store(key, data)  # each value fits into the memory that the other value freed
            lower.store(other, copy)
            self._counts["promoted"] += 1
            self._counts["spilled"] += 1
            return
