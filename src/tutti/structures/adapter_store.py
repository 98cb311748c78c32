"""AdapterStore: small sets of weights in slots on every rank, switched in microseconds."""

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tutti.comm.shm import native
from tutti.comm.symmetric.heap import Heap
from tutti.structures.structure_base import Structure
from tutti.world.errors import UsageError

_COPY_ATTEMPTS = 100  # a copy is repeated if the slot's owner changes the slot during the copy
_ALIGNMENT = 64  # bytes: tensors begin at multiples of this
_NAME_BYTES = 120
_RECORD_BYTES = 192  # size of the record of a slot; 24 + _NAME_BYTES bytes are used
_CELL_BYTES = 320  # size of the announcement: a cell (structures.h) that holds a name


class Adapter(Mapping[str, torch.Tensor]):
    """The tensors of one adapter, as views of its slot.

    The tensors stay unchanged at least until `activate` has been called twice more, and inside a
    `with` block until the block ends.
    """

    def __init__(
        self, lock: threading.RLock, slot: "Slot", epoch: int, tensors: dict[str, torch.Tensor]
    ) -> None:
        self.name, self.version, self.epoch = slot.name, slot.version, epoch
        self._lock, self._slot, self._tensors = lock, slot, tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> "Adapter":
        with self._lock:
            if (self._slot.name, self._slot.version) != (self.name, self.version):
                raise UsageError(f"adapter {self.name!r} has left its slot: call active() again")
            self._slot.pins += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        with self._lock:
            self._slot.pins -= 1


class AdapterStore(Structure):
    """Adapters (LoRA matrices and the like) of one template, resident in `slots` slots per rank.

    Use it if a server switches between fine-tuned variants from one request to the next: one
    rank puts an adapter, the others prefetch it in the background while they still compute with
    another, then `activate` switches to it in microseconds.

    Do not use it for weights that change every step (use ParameterCache or an all-reduce), or for
    more adapters in use at once than there are slots.

    template: tensor name → shape, or → a tensor of that shape and dtype. An adapter that was put on
    a rank stays there until that rank removes it or puts it again. Copies on other ranks may be
    evicted, least recently used first, but never the active adapter, the previous active adapter,
    or an adapter inside a `with` block. Putting a name again makes a new version; `prefetch`
    fetches the newest version.

    A copy is valid only if the source slot's sequence number did not change during the copy;
    otherwise the copy is repeated. So no rank pins a slot of another rank, and a rank that dies
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
            raise UsageError(f"slots={slots}: a switch needs 2 slots or more")
        self.slots = slots
        self.template = AdapterTemplate(template, dtype)
        self._core = native.core()
        self._payload = self._zeros((slots, self.template.bytes), torch.uint8)
        records = self._host_zeros(_CELL_BYTES + slots * _RECORD_BYTES)
        self._directory = AdapterDirectory(self._addresses_of(records), heap.rank, heap.size, slots)
        self._stream: torch.cuda.Stream | None = None
        if heap.device.type != "cpu":
            self._stream = torch.cuda.Stream(heap.device)  # type: ignore[no-untyped-call]
        self._slots = AdapterSlots(self._directory, slots)
        self._views = [self.template.views(slot) for slot in self._payload.local]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tutti-adapters")
        self._current: Adapter | None = None
        self._followed = self._epoch = 0
        self._counts = dict.fromkeys(("puts", "fetched", "resident", "late", "again"), 0)
        heap.barrier()

    # ---- Putting and fetching ----

    def put(self, name: str, tensors: Mapping[str, torch.Tensor]) -> int:
        """Store an adapter in a slot of this rank; returns its version. Other ranks may fetch it.

        Only one rank at a time should put a name: of two concurrent puts either may remain.
        """
        self._check_open()
        self.template.check(_checked_name(name), tensors)
        with self._slots.lock:
            before = self._directory.newest(name)
            slot = self._slots.begin(name)
            try:
                for key, view in self._views[slot.number].items():
                    self._write(view, tensors[key])
            except BaseException:
                self._slots.clear(slot)
                raise
            self._slots.finish(slot, name, before.version + 1 if before else 1, is_original=True)
            self._counts["puts"] += 1
            return slot.version

    def prefetch(self, name: str) -> "Future[int]":
        """Copy the newest version of an adapter to a slot of this rank, in a background thread.

        The result of the future is the version, or LookupError if no rank has the adapter.
        """
        self._check_open()
        return self._thread.submit(self._fetch, _checked_name(name))

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

        This takes microseconds if the adapter was prefetched; otherwise the call waits for the
        copy. With `everywhere`, every other rank switches at its next call of `active`; call
        `prefetch` on all ranks first.
        """
        self._check_open()
        self._ensure_resident(_checked_name(name))
        if not everywhere:
            return self._switch_to(name)
        number = self._served(
            lambda: self._directory.announce(name),
            self._directory.declare_dead,
            f"activation of {name!r} everywhere",
        )
        with self._slots.lock:
            self._followed = max(self._followed, number)
            return self._switch_to(name)

    def active(self) -> Adapter:
        """The active adapter.

        This is the adapter that this rank activated last, or one that another rank has activated
        everywhere since then.
        """
        if self.closed:
            self._check_open()
        if self._directory.announcements > self._followed:
            self._follow()
        if self._current is None:
            raise LookupError("no adapter is active: activate one first")
        return self._current

    # ---- Queries ----

    def holders(self, name: str) -> dict[int, int]:
        """The ranks that have an adapter now, each with its newest version."""
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
        """This rank's counts; `late` counts activations that had to wait for a copy."""
        more = {"evicted": self._slots.evicted, "epoch": self._epoch, "slots": self.slots}
        return self._counts | more

    def _release(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._directory.free()

    # ---- Epochs ----

    def _ensure_resident(self, name: str) -> None:
        if self._slots.find(name) is None:
            self._counts["late"] += 1
            self.prefetch(name).result()

    def _switch_to(self, name: str) -> int:
        with self._slots.lock:
            slot = self._slots.find(name)
            if slot is None:
                raise LookupError(
                    f"adapter {name!r} was evicted from rank {self.rank} before the switch"
                )
            self._epoch += 1
            self._slots.touch(slot)
            others = [each for each in self._slots.active if each is not slot]
            self._slots.active = (slot, *others[:1])
            self._current = Adapter(self._slots.lock, slot, self._epoch, self._views[slot.number])
            return self._epoch

    def _follow(self) -> None:
        name = ""

        def look() -> int:
            nonlocal name
            number, name = self._directory.announced()
            return number

        number = self._served(look, self._directory.declare_dead, "the announced adapter")
        self._ensure_resident(name)
        with self._slots.lock:
            if number > self._followed:
                self._followed = number
                self._switch_to(name)

    # ---- Copies, in the background thread ----

    def _fetch(self, name: str) -> int:
        for _ in range(_COPY_ATTEMPTS):
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
                copied = self._copy_slot(source, slot)
            finally:
                with self._slots.lock:
                    if copied:
                        self._slots.finish(slot, name, source.version, is_original=False)
                    else:
                        self._slots.clear(slot)
                    self._counts["fetched" if copied else "again"] += 1
            if copied:
                return source.version
        raise UsageError(
            f"adapter {name!r} changed {_COPY_ATTEMPTS} times while it was being copied"
        )

    def _copy_slot(self, source: "Listing", slot: "Slot") -> bool:
        """Copy a peer's slot into one of this rank; False if the peer's slot changed meanwhile."""
        target = self._payload.local[slot.number]
        origin = self._payload.peer(source.rank)[source.slot]
        if self._stream is None:
            record = self._directory.record(source.rank, source.slot)
            addresses = target.data_ptr(), origin.data_ptr()
            copy = self._core.tutti_slot_copy
            return bool(copy(*addresses, self.template.bytes, record, source.sequence))
        with torch.cuda.stream(self._stream):
            target.copy_(origin)
        self._stream.synchronize()
        return self._directory.sequence(source.rank, source.slot) == source.sequence

    def _write(self, view: torch.Tensor, value: torch.Tensor) -> None:
        if self._stream is None:
            source = value.cpu().contiguous()
            self._core.tutti_slot_write(view.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            view.copy_(value)
            torch.cuda.current_stream(self.heap.device).synchronize()


class AdapterTemplate:
    """Names, shapes and dtypes of an adapter's tensors, packed one after the other into `bytes`."""

    def __init__(
        self, tensors: Mapping[str, tuple[int, ...] | torch.Tensor], dtype: torch.dtype
    ) -> None:
        if not tensors:
            raise UsageError("the template is empty: name the tensors of an adapter")
        self._layout: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        self.bytes = 0
        for name, like in tensors.items():
            shape = like.shape if isinstance(like, torch.Tensor) else torch.Size(like)
            kind = like.dtype if isinstance(like, torch.Tensor) else dtype
            self._layout[name] = (self.bytes, shape, kind)
            self.bytes += max(1, -(-shape.numel() * kind.itemsize // _ALIGNMENT)) * _ALIGNMENT

    def views(self, slot: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of a slot, as views of its bytes."""
        return {
            name: slot[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (at, shape, dtype) in self._layout.items()
        }

    def check(self, adapter: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise UsageError if the tensors of an adapter differ from the template."""
        for name, (_, shape, dtype) in self._layout.items():
            given = tensors.get(name)
            if given is None or given.shape != shape or given.dtype is not dtype:
                what = "missing" if given is None else f"{given.dtype} of {tuple(given.shape)}"
                raise UsageError(
                    f"adapter {adapter!r}: {name} is {what}, the template has {dtype} of "
                    f"{tuple(shape)}"
                )
        if extra := sorted(set(tensors) - set(self._layout)):
            raise UsageError(f"adapter {adapter!r} has {extra}, which the template does not have")


@dataclass(eq=False)
class Slot:
    """One of this rank's own slots. Only this process writes them; peers copy from them."""

    number: int
    name: str = ""
    version: int = 0  # 0: empty
    is_original: bool = False  # put on this rank, not fetched: never evicted
    is_being_written: bool = False
    pins: int = 0
    last_used: int = 0  # the value of AdapterSlots._clock at the last use


class AdapterSlots:
    """The slots of one rank. Callers hold `lock` from a query until the change that follows it."""

    def __init__(self, directory: "AdapterDirectory", count: int) -> None:
        self.lock = threading.RLock()
        self.active: tuple[Slot, ...] = ()  # the active slot and the previous one
        self.evicted = 0
        self._directory = directory
        self._slots = [Slot(number) for number in range(count)]
        self._clock = 0

    def find(self, name: str) -> Slot | None:
        """The slot with the newest version of an adapter."""
        with self.lock:
            found = [slot for slot in self._slots if slot.version and slot.name == name]
            return max(found, key=lambda slot: slot.version, default=None)

    def names(self) -> list[str]:
        """The adapters in the slots, least recently used first."""
        with self.lock:
            return [s.name for s in sorted(self._slots, key=lambda s: s.last_used) if s.version]

    def in_use(self, slot: Slot) -> bool:
        """Whether the slot is being written, pinned, active or the previous active one."""
        return slot.is_being_written or slot.pins > 0 or slot in self.active

    def touch(self, slot: Slot) -> None:
        """Mark the slot as the most recently used."""
        self._clock += 1
        slot.last_used = self._clock

    def begin(self, wanted: str) -> Slot:
        """An empty slot, or the least recently used one that is not in use, ready to be written."""
        candidates = [
            slot
            for slot in self._slots
            if not self.in_use(slot) and (not slot.is_original or slot.name == wanted)
        ]
        if not candidates:
            count, originals = len(self._slots), sum(slot.is_original for slot in self._slots)
            raise UsageError(
                f"no slot for adapter {wanted!r} on rank {self._directory.rank}: of {count} slots "
                f"{originals} hold adapters that were put here, the others are in use: use more "
                "slots, or remove() adapters"
            )
        # Prefer an empty slot, then an older version of the same adapter, then the slot that was
        # not used for the longest time.
        slot = min(candidates, key=lambda s: (s.version > 0, s.name != wanted, s.last_used))
        self.evicted += slot.version > 0 and slot.name != wanted
        slot.is_being_written, slot.version = True, 0
        self._directory.begin(slot.number)
        return slot

    def finish(self, slot: Slot, name: str, version: int, is_original: bool) -> None:
        """Mark a slot as written; older versions of the adapter are removed unless in use."""
        self._directory.end(slot.number, name, version)
        slot.name, slot.version = name, version
        slot.is_original, slot.is_being_written = is_original, False
        self.touch(slot)
        for old in self._slots:
            if old is not slot and old.version and old.name == name:
                old.is_original = False
                if not self.in_use(old):
                    self.clear(old)

    def clear(self, slot: Slot) -> None:
        """Empty a slot."""
        self._directory.begin(slot.number)
        self._directory.end(slot.number, "", 0)
        slot.name, slot.version, slot.is_original, slot.is_being_written = "", 0, False, False


class Listing(NamedTuple):
    """One adapter in one slot of a rank, as recorded at `sequence`."""

    rank: int
    slot: int
    sequence: int
    version: int
    name: str


class AdapterDirectory:
    """The contents of all ranks' slots, readable by every rank, and the announced adapter.

    Each slot has a record: a sequence number (odd while the slot is being written), then the
    version, the length of the name and the name. The sequence number covers both the record and
    the slot's tensors. A rank writes only its own records; any rank may announce an adapter.
    """

    def __init__(self, bases: Any, rank: int, size: int, slots: int) -> None:
        self.rank, self.size, self.slots = rank, size, slots
        self._core, self._quick = native.core(), native.core_holding_gil()
        # The announcement is row 0, in rank 0's memory, of a table that has one row per rank.
        self._announced = self._core.tutti_rows_create(
            bases, size, rank, size, _NAME_BYTES, _CELL_BYTES, 0
        )
        self._announcement = self._core.tutti_rows_state(self._announced, 0)
        self._records: list[int] = [base + _CELL_BYTES for base in bases]

    def record(self, rank: int, slot: int) -> int:
        """The address of a slot's sequence number."""
        return self._records[rank] + slot * _RECORD_BYTES

    def begin(self, slot: int) -> None:
        """Mark a slot of this rank as being written: copies made from now on are refused."""
        self._quick.tutti_slot_begin(self.record(self.rank, slot))

    def end(self, slot: int, name: str, version: int) -> None:
        """Record what a slot of this rank holds now; version 0 means that it is empty."""
        record, text = self.record(self.rank, slot), name.encode()
        words = (ctypes.c_uint64 * 2)(version, len(text))
        self._quick.tutti_slot_write(record + 8, ctypes.addressof(words), 16)
        self._quick.tutti_slot_write(record + 24, text.ljust(_NAME_BYTES, b"\0"), _NAME_BYTES)
        self._quick.tutti_slot_end(record)

    def sequence(self, rank: int, slot: int) -> int:
        """A slot's sequence number now."""
        return int(self._quick.tutti_load(self.record(rank, slot)))

    def of(self, rank: int) -> Iterator[Listing]:
        """The adapters in a rank's slots now, except in slots that are being written."""
        buffer = ctypes.create_string_buffer(16 + _NAME_BYTES)
        target = ctypes.addressof(buffer)
        for slot in range(self.slots):
            record = self.record(rank, slot)
            sequence = self.sequence(rank, slot)
            if sequence == 0 or sequence % 2:
                continue
            if self._quick.tutti_slot_copy(target, record + 8, len(buffer), record, sequence):
                version, length = (ctypes.c_uint64 * 2).from_buffer(buffer)
                if version:
                    name = buffer.raw[16 : 16 + length].decode()
                    yield Listing(rank, slot, sequence, version, name)

    def newest(self, name: str) -> Listing | None:
        """The newest copy on any rank.

        Among copies of the same version this rank's own is preferred, then the next rank's.
        """
        ranks = [(self.rank + i) % self.size for i in range(self.size)]
        copies = self._found(ranks, lambda: [c for rank in ranks for c in self.copies(rank, name)])
        return max(copies, key=lambda copy: copy.version, default=None)

    def copies(self, rank: int, name: str) -> list[Listing]:
        """A rank's copies of an adapter; several while older versions are still in use."""
        return self._found([rank], lambda: [c for c in self.of(rank) if c.name == name])

    def _found(self, ranks: list[int], search: Callable[[], list[Listing]]) -> list[Listing]:
        """The result of a search on these ranks.

        A new version is written to another slot before the old version is removed. A search that
        reads one slot after the other may miss both versions, so an empty result is accepted only
        if no slot changed during the search.
        """
        slots = [(rank, slot) for rank in ranks for slot in range(self.slots)]
        while True:
            before = [self.sequence(*slot) for slot in slots]
            copies = search()
            if copies or before == [self.sequence(*slot) for slot in slots]:
                return copies

    # ---- The announcement of an adapter for all ranks ----

    @property
    def announcements(self) -> int:
        """The number of announcements so far."""
        return int(self._quick.tutti_load(self._announcement)) >> native.VERSION_SHIFT

    def announce(self, name: str) -> int:
        """Announce an adapter to all ranks; returns the number of this announcement.

        Other results are codes for Structure._served, which repeats the call.
        """
        text = name.encode().ljust(_NAME_BYTES, b"\0")
        return int(self._quick.tutti_rows_publish(self._announced, 0, text))

    def announced(self) -> tuple[int, str]:
        """The number and the name of the last announcement; a negative number means: try again."""
        text = ctypes.create_string_buffer(_NAME_BYTES + 1)
        number = self._quick.tutti_rows_lookup(self._announced, 0, ctypes.addressof(text))
        return int(number), text.value.decode()

    def declare_dead(self, rank: int) -> None:
        """Take over the claim of a rank that died while it announced an adapter."""
        self._core.tutti_rows_declare_dead(self._announced, rank)

    def free(self) -> None:
        self._core.tutti_rows_free(self._announced)


def _checked_name(name: str) -> str:
    """Return the name if it fits into a record; raise UsageError otherwise."""
    length = len(name.encode())
    if 0 < length <= _NAME_BYTES and "\0" not in name:
        return name
    raise UsageError(f"adapter name {name!r} takes {length} bytes: 1 to {_NAME_BYTES} are allowed")
