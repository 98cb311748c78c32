"""PooledCache: tensors under keys, kept near, then in peers' spare memory, then on the host."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tutti.comm.symmetric.heap import Heap
from tutti.structures.memory_tier import UNIT, AreaTier, Held, HostTier, MemoryTier
from tutti.structures.structure import Structure
from tutti.world.errors import UsageError


class PooledCache(Structure):
    """This rank's cache of immutable tensors, which spills over: local → peers → host → dropped.

    Use it for values that are dear to make again and come in different sizes: key-value blocks of
    long prompts, decoded samples, intermediate features. When `local_bytes` are full, the least
    recently used values move to memory that the other ranks lend (`peer_bytes` per rank, shared
    out evenly among the others), then to ordinary memory of the host (`host_bytes`; pinned when
    the heap is on a GPU). A `get` from a lower tier promotes the value again.

    Do not use it to share values between ranks: keys are this rank's own (that is HashMap). On a
    CPU all tiers are equally near, unless they lie on other NUMA nodes; it pays on GPUs.

    Nothing is lost silently: `put` returns the keys that were dropped for want of room, `on_drop`
    is called with each, `stats` counts them, and no `get` ever drops anything. Values never
    change: to replace one, remove it first. One thread at a time; on CUDA one stream.
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
                f"local_bytes={local_bytes}, peer_bytes={peer_bytes}, host_bytes={host_bytes}: "
                f"local_bytes must be {UNIT} or more, the others not negative"
            )
        local = local_bytes // UNIT * UNIT
        others = heap.size - 1
        lent = peer_bytes // others // UNIT * UNIT if others else 0
        pool = self._zeros((local + lent * others,), torch.uint8)
        loans = []
        for lender in range(heap.size) if lent else ():
            if lender != heap.rank:
                # A lender's loans lie in the order of the borrowers' ranks.
                begin = local + lent * (heap.rank - (heap.rank > lender))
                loans.append(pool.peer(lender)[begin : begin + lent])
        self._tiers: list[MemoryTier] = [
            AreaTier("local", [pool.local[:local]]),
            AreaTier("peer", loans),
            HostTier(host_bytes, pinned=heap.device.type != "cpu"),
        ]
        self._on_drop = on_drop
        self._puts = self._misses = self._spilled = self._promoted = self._dropped = 0
        heap.barrier()

    def put(self, key: Hashable, value: torch.Tensor) -> list[Hashable]:
        """Keep a copy of a value; returns the keys that were dropped to make room for it.

        A value that fits into no tier is dropped itself: then its own key is returned.
        """
        self._check_open()
        if key in self:
            raise UsageError(f"key {key!r} has a value, and values do not change: remove it first")
        self._puts += 1
        dropped: list[Hashable] = []
        self._place(key, value, self._tiers, dropped)
        self._dropped += len(dropped)
        if self._on_drop is not None:
            for lost in dropped:
                self._on_drop(lost)
        return dropped

    def get(self, key: Hashable, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """A copy of the value, or None. It is promoted to the local tier if that drops nothing."""
        tier, held = self._hit(key)
        if tier is None or held is None:
            return None
        if out is None:
            out = torch.empty(held.view.shape, dtype=held.view.dtype, device=self.heap.device)
        out.copy_(held.view)
        if tier is not self._tiers[0] and not held.pins:
            self._promote(key, tier, out)
        return out

    @contextmanager
    def borrow(self, key: Hashable) -> Iterator[torch.Tensor]:
        """`with cache.borrow(key) as view:` gives the value where it lies, without a copy.

        It stays there inside the block. Do not write to it. Raises KeyError if it is not there.
        """
        _, held = self._hit(key)
        if held is None:
            raise KeyError(key)
        held.pins += 1
        try:
            yield held.view
        finally:
            held.pins -= 1

    def remove(self, key: Hashable) -> None:
        """Forget a value. Raises KeyError if it is not there."""
        self._check_open()
        tier = self._tier_of(key)
        if tier is None:
            raise KeyError(key)
        if tier.values[key].pins:
            raise UsageError(f"key {key!r} is borrowed: remove it after its block")
        tier.drop(key)

    def tier(self, key: Hashable) -> str | None:
        """Where a value is now: local, peer, host, or None."""
        tier = self._tier_of(key)
        return None if tier is None else tier.name

    def __contains__(self, key: Hashable) -> bool:
        return self._tier_of(key) is not None

    def __len__(self) -> int:
        return sum(len(tier.values) for tier in self._tiers)

    def stats(self) -> dict[str, int]:
        """Hits, values and bytes of every tier, and what has moved or was dropped."""
        counts = {
            "puts": self._puts,
            "misses": self._misses,
            "spilled": self._spilled,
            "promoted": self._promoted,
            "dropped": self._dropped,
        }
        for tier in self._tiers:
            counts[f"{tier.name}_hits"] = tier.hits
            counts[f"{tier.name}_values"] = len(tier.values)
            counts[f"{tier.name}_bytes"] = tier.bytes
        return counts

    def _tier_of(self, key: Hashable) -> MemoryTier | None:
        return next((tier for tier in self._tiers if key in tier.values), None)

    def _hit(self, key: Hashable) -> tuple[MemoryTier | None, Held | None]:
        self._check_open()
        tier = self._tier_of(key)
        if tier is None:
            self._misses += 1
            return None, None
        tier.hits += 1
        tier.values.move_to_end(key)
        return tier, tier.values[key]

    def _place(
        self,
        key: Hashable,
        data: torch.Tensor,
        tiers: Sequence[MemoryTier],
        dropped: list[Hashable],
    ) -> bool:
        """Store in the first tier that can have it; what was used least gives way downwards."""
        for level, tier in enumerate(tiers):
            if not tier.could_store(data):
                continue
            while not tier.store(key, data):
                oldest = tier.oldest()
                view = tier.values[oldest].view
                self._spilled += self._place(oldest, view, tiers[level + 1 :], dropped)
                tier.drop(oldest)
            return True
        dropped.append(key)
        return False

    def _promote(self, key: Hashable, lower: MemoryTier, data: torch.Tensor) -> None:
        """Bring a value to the local tier, if all that must give way finds free room below."""
        local = self._tiers[0]
        while local.could_store(data):
            if local.store(key, data):
                lower.drop(key)
                self._promoted += 1
                return
            oldest = local.oldest()
            view = local.values[oldest].view
            if not any(tier.store(oldest, view) for tier in self._tiers[1:]):
                self._swap(key, lower, data)
                return
            local.drop(oldest)
            self._spilled += 1

    def _swap(self, key: Hashable, lower: MemoryTier, data: torch.Tensor) -> None:
        """Exchange places with the oldest local value of the same size: needs no free room."""
        local, bytes = self._tiers[0], lower.values[key].bytes
        for other, held in local.values.items():
            if held.pins or held.bytes != bytes:
                continue
            kept = held.view.clone()
            local.drop(other)
            lower.drop(key)
            local.store(key, data)  # each fits into the place that the other has left
            lower.store(other, kept)
            self._promoted += 1
            self._spilled += 1
            return
