"""AdapterStore: small sets of weights in slots on every rank, switched by turning an epoch."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from tutti.comm.symmetric.heap import Heap
from tutti.structures import native
from tutti.structures.adapter_directory import (
    AdapterDirectory,
    Listing,
    checked_name,
)
from tutti.structures.adapter_slots import AdapterSlots, Slot
from tutti.structures.adapter_template import AdapterTemplate
from tutti.structures.structure import Structure
from tutti.world.errors import UsageError

_ATTEMPTS = 100  # to copy a slot that changes under the copier


class Adapter(Mapping[str, torch.Tensor]):
    """The tensors of one adapter, as views of the slot that it is in.

    They stay as they are at least until the second next `activate`; inside a `with` block, for the
    whole block.
    """

    def __init__(
        self, slots: AdapterSlots, slot: Slot, epoch: int, tensors: dict[str, torch.Tensor]
    ) -> None:
        self.name = slot.name
        self.version = slot.version
        self.epoch = epoch
        self._slots = slots
        self._slot = slot
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> "Adapter":
        self._slots.pin(self._slot, self.name, self.version)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._slots.unpin(self._slot)


class AdapterStore(Structure):
    """Adapters (LoRA matrices and the like) of one template, resident in `slots` slots per rank.

    Use it where a server switches between fine-tuned variants from one request to the next: one
    rank puts an adapter, the others prefetch it in the background while they still compute with
    another, then `activate` flips to it in microseconds. Slots are reused in order of last use.

    Do not use it for weights that change every step (ParameterCache, an all-reduce), or for more
    adapters in use at once than there are slots.

    template: tensor name → shape, or → a tensor of that shape and dtype. An adapter that was put on
    a rank stays there until it is removed there or put again; copies elsewhere may be evicted when
    room is needed, least recently used first, but never the active one, the one before it, or one
    inside a `with` block. Putting a name again makes a new version; `prefetch` fetches the newest.

    A copy is checked against its source's sequence number before and after, and made again if the
    source changed meanwhile: nobody pins a slot of another rank, so nobody can leave it pinned.
    """

    def __init__(
        self,
        heap: Heap,
        slots: int,
        template: Mapping[str, tuple[int, ...] | torch.Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(heap)
        if slots < 2:
            raise UsageError(f"slots={slots}: a switch needs 2 slots or more")
        self.slots = slots
        self.template = AdapterTemplate(template, dtype)
        self._core = native.core()
        self._payload = self._zeros((slots * self.template.bytes,), torch.uint8)
        records = self._host_zeros(AdapterDirectory.bytes(slots))
        self._directory = AdapterDirectory(records, heap.rank, heap.size, slots)
        self._stream = None if heap.device.type == "cpu" else _stream(heap.device)
        self._slots = AdapterSlots(self._directory, slots)
        self._views = [self.template.views(self._bytes_of(heap.rank, n)) for n in range(slots)]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tutti-adapters")
        self._current: Adapter | None = None
        self._followed = self._epoch = 0
        self._counts = dict.fromkeys(("puts", "fetched", "resident", "late", "again"), 0)
        heap.barrier()

    # ---- Filling ----

    def put(self, name: str, tensors: Mapping[str, torch.Tensor]) -> int:
        """Store an adapter in a slot of this rank; returns its version. Others may fetch it.

        One rank at a time puts a name: of two that do so at once either may stay.
        """
        self._check_open()
        self.template.check(checked_name(name), tensors)
        with self._slots.lock:
            before = self._directory.newest(name)
            slot = self._slots.begin(name)
            try:
                for key, view in self._views[slot.number].items():
                    self._write(view, tensors[key])
            except BaseException:
                self._slots.clear(slot)
                raise
            self._slots.finish(slot, name, before.version + 1 if before else 1, home=True)
            self._counts["puts"] += 1
            return slot.version

    def prefetch(self, name: str) -> "Future[int]":
        """Have the newest version in a slot of this rank, copied by a thread in the background.

        The future's result is the version; LookupError if no rank has the adapter.
        """
        self._check_open()
        return self._thread.submit(self._fetch, checked_name(name))

    def remove(self, name: str) -> None:
        """Empty the slot that holds an adapter on this rank."""
        self._check_open()
        with self._slots.lock:
            slot = self._slots.find(name)
            if slot is None:
                raise LookupError(f"adapter {name!r} is not on rank {self.rank}")
            if self._slots.in_use(slot):
                raise UsageError(f"adapter {name!r} is in use: activate another one first")
            self._slots.clear(slot)

    # ---- Switching ----

    def activate(self, name: str, everywhere: bool = False) -> int:
        """Make an adapter the active one; returns this rank's new epoch.

        Prefetched before, this takes microseconds; else it waits for the copy. With `everywhere`,
        every other rank follows at its next call of `active`; prefetch on all ranks first.
        """
        self._check_open()
        self._have(checked_name(name))
        if not everywhere:
            return self._flip(name)
        number = self._served(
            lambda: self._directory.announce(name),
            self._directory.declare_dead,
            *(None, f"activation of {name!r} everywhere"),
        )
        with self._slots.lock:
            self._followed = max(self._followed, number)
            return self._flip(name)

    def active(self) -> Adapter:
        """The active adapter: what this rank activated, or what was activated everywhere since."""
        if self.closed:
            self._check_open()
        if self._directory.announcements > self._followed:
            self._follow()
        if self._current is None:
            raise LookupError("no adapter is active: activate one first")
        return self._current

    # ---- Looking ----

    def holders(self, name: str) -> dict[int, int]:
        """The ranks that have an adapter now, and in which version."""
        self._check_open()
        return {
            rank: max(each.version for each in found)
            for rank in range(self.size)
            if (found := self._directory.copies(rank, name))
        }

    def resident(self) -> list[str]:
        """The adapters in this rank's slots, least recently used first."""
        return self._slots.names()

    def stats(self) -> dict[str, int]:
        """What this rank has done; `late` activations had to wait for a copy."""
        more = {"evicted": self._slots.evicted, "epoch": self._epoch, "slots": self.slots}
        return self._counts | more

    def _end(self) -> None:
        if not self.closed:
            self._thread.shutdown(wait=True, cancel_futures=True)
            super()._end()
            self._directory.free()

    # ---- Epochs ----

    def _have(self, name: str) -> None:
        if self._slots.find(name) is None:
            self._counts["late"] += 1
            self.prefetch(name).result()

    def _flip(self, name: str) -> int:
        with self._slots.lock:
            slot = self._slots.find(name)
            if slot is None:
                raise LookupError(f"adapter {name!r} was evicted from rank {self.rank} meanwhile")
            self._epoch += 1
            self._slots.touch(slot)
            others = [each for each in self._slots.active if each is not slot]
            self._slots.active = (slot, *others[:1])
            self._current = Adapter(self._slots, slot, self._epoch, self._views[slot.number])
            return self._epoch

    def _follow(self) -> None:
        name = ""

        def look() -> int:
            nonlocal name
            number, name = self._directory.announced()
            return number

        number = self._served(look, self._directory.declare_dead, None, "the announced adapter")
        self._have(name)
        with self._slots.lock:
            if number > self._followed:
                self._followed = number
                self._flip(name)

    # ---- Copies; in the background thread ----

    def _fetch(self, name: str) -> int:
        for _ in range(_ATTEMPTS):
            source = self._directory.newest(name)
            with self._slots.lock:
                have = self._slots.find(name)
                if have is not None and (source is None or have.version >= source.version):
                    self._slots.touch(have)
                    self._counts["resident"] += 1
                    return have.version
                if source is None:
                    raise LookupError(f"no rank has adapter {name!r}: put it on one first")
                slot = self._slots.begin(name)
            copied = False
            try:
                copied = self._copied(source, slot)
            finally:
                with self._slots.lock:
                    if copied:
                        self._slots.finish(slot, name, source.version, home=False)
                    else:
                        self._slots.clear(slot)
                    self._counts["fetched" if copied else "again"] += 1
            if copied:
                return source.version
        raise UsageError(f"adapter {name!r} changed {_ATTEMPTS} times while it was being copied")

    def _copied(self, source: Listing, slot: Slot) -> bool:
        """Copy a peer's slot into one of ours; whether it stayed the same meanwhile."""
        target, origin = self._bytes_of(self.rank, slot.number), self._bytes_of(*source[:2])
        if self._stream is None:
            record = self._directory.record(source.rank, source.slot)
            return bool(
                self._core.tutti_slot_copy(
                    *(target.data_ptr(), origin.data_ptr(), self.template.bytes),
                    *(record, source.sequence),
                )
            )
        with torch.cuda.stream(self._stream):
            target.copy_(origin)
        self._stream.synchronize()
        return self._directory.sequence(source.rank, source.slot) == source.sequence

    def _bytes_of(self, rank: int, slot: int) -> torch.Tensor:
        begin = slot * self.template.bytes
        return self._payload.peer(rank)[begin : begin + self.template.bytes]

    def _write(self, view: torch.Tensor, value: torch.Tensor) -> None:
        if self._stream is None:
            source = value.cpu().contiguous()
            bytes = source.numel() * source.itemsize
            self._core.tutti_slot_write(view.data_ptr(), source.data_ptr(), bytes)
        else:
            view.copy_(value)
            torch.cuda.current_stream(self.heap.device).synchronize()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
