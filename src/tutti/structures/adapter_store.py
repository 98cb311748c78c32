"""AdapterStore: adapters (small sets of weights) on every rank, switched in microseconds."""

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tutti.comm.shm import native
from tutti.comm.symmetric.heap import Heap
from tutti.structures.structure_base import Structure
from tutti.world.errors import UsageError

_COPY_ATTEMPTS = 100  # a copy is repeated if the slot's owner changes the slot during the copy
_ALIGNMENT = 64  # tensors begin at multiples of this number of bytes
_NAME_BYTES = 120
_RECORD_BYTES = 192  # size of the record of a slot; 24 + _NAME_BYTES bytes are used
_CELL_BYTES = 320  # size of the cell (cell.h) that holds the name of the announced adapter


@dataclass(eq=False)
class Slot:
    """A slot of this rank. Only this process writes to it, and peers copy from it."""

    number: int
    tensors: dict[str, torch.Tensor]  # views of the slot's memory
    name: str = ""
    version: int = 0  # 0 means that the slot is empty
    is_original: bool = False  # the adapter was put on this rank, so it is never evicted
    is_being_written: bool = False
    pins: int = 0


class SlotCopy(NamedTuple):
    """A copy of an adapter in a slot of any rank.

    `sequence` was the slot's sequence number when the copy was found.
    """

    rank: int
    slot: int
    sequence: int
    version: int


class Adapter(Mapping[str, torch.Tensor]):
    """The tensors of one adapter, as views of its slot.

    The tensors stay unchanged at least until `activate` has been called two more times. Inside a
    `with` block, they stay unchanged until the block ends.
    """

    def __init__(self, lock: threading.RLock, slot: Slot, epoch: int) -> None:
        self.name, self.version, self.epoch = slot.name, slot.version, epoch
        self._lock, self._slot = lock, slot

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._slot.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slot.tensors)

    def __len__(self) -> int:
        return len(self._slot.tensors)

    def __enter__(self) -> "Adapter":
        with self._lock:
            if (self._slot.name, self._slot.version) != (self.name, self.version):
                raise UsageError(
                    f"adapter {self.name!r} is no longer in its slot: call active() again"
                )
            self._slot.pins += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        with self._lock:
            self._slot.pins -= 1


class AdapterStore(Structure):
    """Adapters (for example LoRA matrices) with the same shapes, in `slots` slots per rank.

    Use it if a server switches between fine-tuned variants from one request to the next. One rank
    puts an adapter. The other ranks prefetch the adapter in the background while they still compute
    with another adapter. Then `activate` switches to the new adapter in microseconds.

    Do not use it for weights that change every step (use ParameterCache or an all-reduce), or for
    more adapters in use at once than there are slots.

    `template` maps each tensor name to a shape, or to a tensor with the shape and dtype. An adapter
    that was put on a rank stays there until that rank removes it or puts it again. Copies on other
    ranks may be evicted, least recently used first, but never the active adapter, the previous
    active adapter, or an adapter inside a `with` block. If a name is put again, it gets a new
    version. `prefetch` fetches the newest version.

    A copy is valid only if the source slot's sequence number did not change during the copy.
    Otherwise the copy is repeated. So no rank pins a slot of another rank, and a rank that dies
    leaves no slot pinned.
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
            raise UsageError(f"an AdapterStore needs at least 2 slots, got slots={slots}")
        if not template:
            raise UsageError("the template is empty: give the name and shape of each tensor")
        self.slots = slots
        # Each tensor of the template: its first byte in a slot, its shape and its dtype.
        layout: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        self._slot_bytes = 0
        for name, like in template.items():
            shape = like.shape if isinstance(like, torch.Tensor) else torch.Size(like)
            kind = like.dtype if isinstance(like, torch.Tensor) else dtype
            layout[name] = (self._slot_bytes, shape, kind)
            lines = max(1, -(-shape.numel() * kind.itemsize // _ALIGNMENT))
            self._slot_bytes += lines * _ALIGNMENT
        self._payload = self._zeros((slots, self._slot_bytes))
        record_bytes = _CELL_BYTES + slots * _RECORD_BYTES
        bases = self._addresses_of(self._zeros((record_bytes,), on_host=True))
        self._records: list[int] = [base + _CELL_BYTES for base in bases]
        # activate(everywhere=True) announces an adapter in row 0 of a table that has one row per
        # rank. Row 0 is in rank 0's memory. The version of row 0 is the number of announcements.
        self._announced = self._core.tutti_rows_create(
            bases, heap.size, heap.rank, heap.size, _NAME_BYTES, _CELL_BYTES, 0
        )
        self._announcement = self._core.tutti_rows_state(self._announced, 0)
        self._stream: torch.cuda.Stream | None = None
        if heap.device.type != "cpu":
            self._stream = torch.cuda.Stream(heap.device)  # type: ignore[no-untyped-call]
        # The slots are ordered by their last use, least recently used first. The lock is held from
        # a query of the slots until the change that depends on the query.
        self._lock = threading.RLock()
        self._slots: list[Slot] = []
        for number, memory in enumerate(self._payload.local):
            tensors = {
                name: memory[at : at + shape.numel() * kind.itemsize].view(kind).view(shape)
                for name, (at, shape, kind) in layout.items()
            }
            self._slots.append(Slot(number, tensors))
        self._active_slots: tuple[Slot, ...] = ()  # the active slot and the previous one
        self._current: Adapter | None = None
        self._last_followed = 0  # number of the last announcement that this rank has followed
        self._epoch = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tutti-adapters")
        self._counts = dict.fromkeys(("puts", "fetched", "resident", "late", "again", "evicted"), 0)
        heap.barrier()

    # ---- Putting and fetching ----

    def put(self, name: str, tensors: Mapping[str, torch.Tensor]) -> int:
        """Store an adapter in a slot of this rank, and return the adapter's version.

        Other ranks may fetch the adapter. Only one rank at a time should put the same name. If two
        ranks put the same name at the same time, either version may remain.
        """
        self._check_open()
        self._check_adapter(_checked_name(name), tensors)
        with self._lock:
            before = self._newest(name)
            slot = self._begin_write(name)
            try:
                for key, view in slot.tensors.items():
                    self._write(view, tensors[key])
            except BaseException:
                self._clear(slot)
                raise
            self._finish_write(slot, name, before.version + 1 if before else 1, is_original=True)
            self._counts["puts"] += 1
            return slot.version

    def prefetch(self, name: str) -> "Future[int]":
        """Copy the newest version of an adapter to a slot of this rank, in a background thread.

        The result of the future is the version. The future raises LookupError if no rank has the
        adapter.
        """
        self._check_open()
        return self._thread.submit(self._fetch, _checked_name(name))

    def remove(self, name: str) -> None:
        """Empty the slot that holds an adapter on this rank."""
        self._check_open()
        with self._lock:
            slot = self._find(name)
            if slot is None:
                raise LookupError(f"adapter {name!r} is not on rank {self.rank}")
            if self._in_use(slot):
                raise UsageError(f"adapter {name!r} is in use: activate another adapter first")
            self._clear(slot)

    # ---- Switching ----

    def activate(self, name: str, everywhere: bool = False) -> int:
        """Make an adapter active, and return this rank's epoch: the number of its switches so far.

        The call takes microseconds if the adapter was prefetched. Otherwise it waits for the copy.
        With everywhere=True, every other rank switches at its next call of `active`. That call
        waits for the copy if the rank has not prefetched the adapter.
        """
        self._check_open()
        self._ensure_resident(_checked_name(name))
        if not everywhere:
            return self._switch_to(name)
        text = name.encode().ljust(_NAME_BYTES, b"\0")
        publish = self._core_holding_gil.tutti_rows_publish
        number = self._retry(
            lambda: publish(self._announced, 0, text), f"activation of {name!r} everywhere"
        )
        with self._lock:
            self._last_followed = max(self._last_followed, number)
            return self._switch_to(name)

    def active(self) -> Adapter:
        """Return the active adapter.

        This is the adapter that this rank activated last, unless another rank has called
        `activate(name, everywhere=True)` since then.
        """
        if self.closed:
            self._check_open()
        state = int(self._core_holding_gil.tutti_load(self._announcement))
        announcement = state >> native.VERSION_SHIFT
        if announcement > self._last_followed:
            self._follow_announcement()
        if self._current is None:
            raise LookupError("no adapter is active: call activate() first")
        return self._current

    def _ensure_resident(self, name: str) -> None:
        if self._find(name) is None:
            self._counts["late"] += 1
            self.prefetch(name).result()

    def _switch_to(self, name: str) -> int:
        with self._lock:
            slot = self._find(name)
            if slot is None:
                raise LookupError(
                    f"adapter {name!r} was evicted from rank {self.rank} before the switch. Use "
                    "more slots."
                )
            self._epoch += 1
            self._touch(slot)
            previous = [other for other in self._active_slots if other is not slot]
            self._active_slots = (slot, *previous[:1])
            self._current = Adapter(self._lock, slot, self._epoch)
            return self._epoch

    def _follow_announcement(self) -> None:
        """Switch to the adapter that another rank has announced."""
        text = ctypes.create_string_buffer(_NAME_BYTES + 1)
        address, lookup = ctypes.addressof(text), self._core_holding_gil.tutti_rows_lookup
        number = self._retry(
            lambda: lookup(self._announced, 0, address), "reading the announced adapter"
        )
        name = text.value.decode()
        self._ensure_resident(name)
        with self._lock:
            if number > self._last_followed:
                self._last_followed = number
                self._switch_to(name)

    # ---- Queries ----

    def holders(self, name: str) -> dict[int, int]:
        """Return {rank: newest version on that rank} for each rank that has the adapter."""
        self._check_open()
        return {
            rank: max(copy.version for copy in copies)
            for rank in range(self.size)
            if (copies := self._copies_on(rank, name))
        }

    def resident(self) -> list[str]:
        """Return the adapters in this rank's slots, least recently used first."""
        with self._lock:
            return [slot.name for slot in self._slots if slot.version]

    def stats(self) -> dict[str, int]:
        """Return this rank's counts.

        `resident` counts prefetches of adapters that this rank already had, `late` counts
        activations that had to wait for a copy, and `again` counts copies that were repeated.
        """
        return self._counts | {"epoch": self._epoch, "slots": self.slots}

    def _release(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._core.tutti_rows_free(self._announced)

    def _declare_dead(self, rank: int) -> None:
        self._core.tutti_rows_declare_dead(self._announced, rank)

    # ---- Copies, in the background thread ----

    def _fetch(self, name: str) -> int:
        for _ in range(_COPY_ATTEMPTS):
            source = self._newest(name)
            with self._lock:
                resident = self._find(name)
                if resident and (source is None or resident.version >= source.version):
                    self._touch(resident)
                    self._counts["resident"] += 1
                    return resident.version
                if source is None:
                    raise LookupError(f"no rank has adapter {name!r}: put it on one rank first")
                slot = self._begin_write(name)
            copied = False
            try:
                copied = self._copy_slot(source, slot)
            finally:
                with self._lock:
                    if copied:
                        self._finish_write(slot, name, source.version, is_original=False)
                    else:
                        self._clear(slot)
                    self._counts["fetched" if copied else "again"] += 1
            if copied:
                return source.version
        raise UsageError(
            f"adapter {name!r} changed {_COPY_ATTEMPTS} times during the copy: put it less often"
        )

    def _copy_slot(self, source: SlotCopy, slot: Slot) -> bool:
        """Copy a peer's slot to `slot`. Return False if the peer's slot changed during the copy."""
        target = self._payload.local[slot.number]
        origin = self._payload.peer(source.rank)[source.slot]
        if self._stream is None:
            record = self._record(source.rank, source.slot)
            addresses = target.data_ptr(), origin.data_ptr()
            copy = self._core.tutti_slot_copy
            return bool(copy(*addresses, self._slot_bytes, record, source.sequence))
        with torch.cuda.stream(self._stream):
            target.copy_(origin)
        self._stream.synchronize()
        return self._sequence(source.rank, source.slot) == source.sequence

    def _write(self, view: torch.Tensor, value: torch.Tensor) -> None:
        if self._stream is None:
            source = value.cpu().contiguous()
            self._core.tutti_slot_write(view.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            view.copy_(value)
            torch.cuda.current_stream(self.heap.device).synchronize()

    def _check_adapter(self, adapter: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise UsageError if the tensors of an adapter differ from the template."""
        template = self._slots[0].tensors
        for name, like in template.items():
            tensor = tensors.get(name)
            if tensor is None or tensor.shape != like.shape or tensor.dtype is not like.dtype:
                what = "missing" if tensor is None else f"{tensor.dtype} of {tuple(tensor.shape)}"
                raise UsageError(
                    f"adapter {adapter!r}: {name} is {what}, but the template has {like.dtype} of "
                    f"{tuple(like.shape)}"
                )
        if extra := sorted(set(tensors) - set(template)):
            raise UsageError(f"adapter {adapter!r} has {extra}, which are not in the template")

    # ---- The slots of this rank ----

    def _find(self, name: str) -> Slot | None:
        """Return the slot with the newest version of an adapter."""
        with self._lock:
            found = [slot for slot in self._slots if slot.version and slot.name == name]
            return max(found, key=lambda slot: slot.version, default=None)

    def _in_use(self, slot: Slot) -> bool:
        return slot.is_being_written or slot.pins > 0 or slot in self._active_slots

    def _touch(self, slot: Slot) -> None:
        """Mark the slot as the most recently used."""
        self._slots.remove(slot)
        self._slots.append(slot)

    def _begin_write(self, name: str) -> Slot:
        """Return a slot to which adapter `name` can be written."""
        candidates = [
            slot
            for slot in self._slots
            if not self._in_use(slot) and (not slot.is_original or slot.name == name)
        ]
        if not candidates:
            originals = sum(slot.is_original for slot in self._slots)
            raise UsageError(
                f"no slot for adapter {name!r} on rank {self.rank}: of {self.slots} slots, "
                f"{originals} hold adapters that were put on this rank, and the others are in "
                "use. Use more slots, or remove() adapters"
            )
        # Prefer an empty slot, then an older version of the same adapter, then the least recently
        # used slot.
        slot = min(candidates, key=lambda slot: (slot.version > 0, slot.name != name))
        self._counts["evicted"] += slot.version > 0 and slot.name != name
        slot.is_being_written, slot.version = True, 0
        self._core_holding_gil.tutti_slot_begin(self._record(self.rank, slot.number))
        return slot

    def _finish_write(self, slot: Slot, name: str, version: int, is_original: bool) -> None:
        """Mark a slot as written. Remove older versions of the adapter that are not in use."""
        self._end_record(slot.number, name, version)
        slot.name, slot.version = name, version
        slot.is_original, slot.is_being_written = is_original, False
        self._touch(slot)
        for old in self._slots:
            if old is not slot and old.version and old.name == name:
                old.is_original = False
                if not self._in_use(old):
                    self._clear(old)

    def _clear(self, slot: Slot) -> None:
        self._core_holding_gil.tutti_slot_begin(self._record(self.rank, slot.number))
        self._end_record(slot.number, "", 0)
        slot.name, slot.version, slot.is_original, slot.is_being_written = "", 0, False, False

    # ---- The records of all ranks' slots ----
    #
    # Each slot has a record: a sequence number (odd while the slot is being written), then the
    # version, the length of the name and the name. The sequence number covers both the record and
    # the slot's tensors. A rank writes only the records of its own slots.

    def _record(self, rank: int, slot: int) -> int:
        """Return the address of a slot's sequence number."""
        return self._records[rank] + slot * _RECORD_BYTES

    def _sequence(self, rank: int, slot: int) -> int:
        return int(self._core_holding_gil.tutti_load(self._record(rank, slot)))

    def _end_record(self, slot: int, name: str, version: int) -> None:
        """Record the adapter that a slot of this rank now holds. Version 0 means an empty slot."""
        record, text = self._record(self.rank, slot), name.encode()
        words = (ctypes.c_uint64 * 2)(version, len(text))
        core = self._core_holding_gil
        core.tutti_slot_write(record + 8, ctypes.addressof(words), 16)
        core.tutti_slot_write(record + 24, text.ljust(_NAME_BYTES, b"\0"), _NAME_BYTES)
        core.tutti_slot_end(record)

    def _newest(self, name: str) -> SlotCopy | None:
        """Return the newest copy of an adapter, preferably the copy on this rank."""
        ranks = [(self.rank + i) % self.size for i in range(self.size)]
        copies = self._search_consistently(
            ranks, lambda: [c for rank in ranks for c in self._copies_on(rank, name)]
        )
        return max(copies, key=lambda copy: copy.version, default=None)

    def _copies_on(self, rank: int, name: str) -> list[SlotCopy]:
        """Return a rank's copies of an adapter. A rank may hold several versions."""
        return self._search_consistently([rank], lambda: list(self._read_copies(rank, name)))

    def _read_copies(self, rank: int, name: str) -> Iterator[SlotCopy]:
        """Yield a rank's copies of an adapter, except copies in slots that are being written."""
        buffer = ctypes.create_string_buffer(16 + _NAME_BYTES)
        target = ctypes.addressof(buffer)
        for slot in range(self.slots):
            record, sequence = self._record(rank, slot), self._sequence(rank, slot)
            if sequence == 0 or sequence % 2:
                continue
            copy = self._core_holding_gil.tutti_slot_copy
            if copy(target, record + 8, len(buffer), record, sequence):
                version, length = (ctypes.c_uint64 * 2).from_buffer(buffer)
                if version and buffer.raw[16 : 16 + length].decode() == name:
                    yield SlotCopy(rank, slot, sequence, version)

    def _search_consistently(
        self, ranks: list[int], search: Callable[[], list[SlotCopy]]
    ) -> list[SlotCopy]:
        """Return the result of `search`, which must read the slots of `ranks`.

        A new version is written to another slot before the old version is removed. A search that
        reads one slot after the other may miss both versions, so an empty result is accepted only
        if no slot changed during the search.
        """
        slots = [(rank, slot) for rank in ranks for slot in range(self.slots)]
        while True:
            before = [self._sequence(*slot) for slot in slots]
            copies = search()
            if copies or before == [self._sequence(*slot) for slot in slots]:
                return copies


def _checked_name(name: str) -> str:
    """Return the name if it fits into a record. Raise UsageError otherwise."""
    length = len(name.encode())
    if 0 < length <= _NAME_BYTES and "\0" not in name:
        return name
    raise UsageError(f"adapter name {name!r} must have 1 to {_NAME_BYTES} bytes, got {length}")
