"""The memory of a heap on the CPU: one shared segment per rank, mapped by all ranks of the host.

Memory order. Signals, counters and barrier words are 64-bit words that are stored with release and
loaded with acquire (C11). A rank that sees the new value of such a word therefore sees everything
that its writer wrote before, to any segment, on both x86-64 and ARM64. Plain loads and stores of
tensor elements are not ordered: between a write on one rank and a read on another there must be a
signal, a counter or a barrier.

A segment has a control page, then the signals, then the data.
"""

import ctypes
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.shm import native, native_group
from tutti.comm.symmetric.cpu_collectives import CpuCollectives
from tutti.comm.symmetric.heap_rendezvous import (
    HeapRendezvous,
    Timeout,
    lost_peer,
    refuse_different_calls,
    refuse_different_heaps,
)
from tutti.comm.symmetric.symmetric_tensor import CHANNELS
from tutti.world.errors import UsageError

_PAGE = 4096
# Copying up to this size takes less time than releasing the GIL.
_SMALL = 32 << 10

# Heaps that were not closed stay mapped: peers and the backend's collectives may still use them.
_open: set["CpuMemory"] = set()


class CpuMemory:
    """One block of the same size on every rank; an `offset` in bytes is the same on all ranks.

    All ranks of a group create it together and must be on one host. CudaMemory has the same
    methods.
    """

    backend = "shm"
    alignment = 64  # bytes of a cache line
    device = torch.device("cpu")

    def __init__(
        self, group: dist.ProcessGroup, bytes: int, signals: int, timeout: float, reason: str
    ) -> None:
        self.reason = reason
        self.bytes = bytes
        self.signals = signals
        self.rank = group.rank()
        self.size = group.size()
        self._core = native.core()
        self._data_at = _PAGE + -(-signals * 8 // _PAGE) * _PAGE
        total = self._data_at + bytes
        rendezvous = HeapRendezvous(group, "symmetric.Heap", timeout)
        self.number = rendezvous.number
        segments = _open_segments(rendezvous, self._core, total, [bytes, signals])
        bases = [int(self._core.tutti_segment_base(segment)) for segment in segments]
        self._signals = [base + _PAGE for base in bases]
        self._data = [base + self._data_at for base in bases]
        self._blocks = [
            _as_buffer(self._core, segment, base, total)
            for segment, base in zip(segments, bases, strict=True)
        ]
        # Calls that cannot block keep the GIL, which is cheaper than releasing it.
        core, quick = self._core, native.core_holding_gil()
        self.load: Callable[[int], int] = quick.tutti_load
        self.store: Callable[[int, int], None] = quick.tutti_store
        self.fetch_add: Callable[[int, int], int] = quick.tutti_fetch_add
        self.add = self.fetch_add
        self.compare_swap: Callable[[int, int, int], int] = quick.tutti_compare_swap
        self.fence: Callable[[], None] = quick.tutti_fence
        self._put, self._put_signal = quick.tutti_put, quick.tutti_put_signal
        self._put_large, self._put_signal_large = core.tutti_put, core.tutti_put_signal
        self.control = ControlPages(self.rank, segments)
        self.collectives = CpuCollectives(self)
        self.puts = self.put_bytes = self.gets = self.get_bytes = 0
        self.waits = self.barriers = 0
        self._group = group
        # A group that uses shm is given the address of the heap: then collectives of
        # torch.distributed on the heap's tensors work without copies.
        self._backend = native_group(group)
        try:
            if self._backend is not None:
                pointers = (ctypes.c_void_p * self.size)(*self._data)
                native.raise_for(
                    core.tutti_group_add_block(self._backend, self.number, pointers, bytes)
                )
            self.agree("Heap", timeout)
        except BaseException:
            self.close()  # else the backend would keep a block whose memory is gone
            raise
        rendezvous.end()
        _open.add(self)

    # ---- Bytes ----

    def view(
        self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A rank's bytes as a tensor, without a copy."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        # The tensor keeps the mapping alive, so it can be read even after the heap is closed.
        flat = torch.frombuffer(
            self._blocks[rank], dtype=dtype, count=count, offset=self._data_at + offset
        )
        return flat.view(shape)

    def address(self, rank: int, offset: int) -> int:
        """The address of a rank's byte in this process."""
        return self._data[rank] + offset

    def put(self, to: int, offset: int, source: torch.Tensor, bytes: int) -> None:
        if not (source.is_cpu and source.is_contiguous()):
            source = source.detach().to("cpu").contiguous()
        self.puts += 1
        self.put_bytes += bytes
        copy = self._put if bytes <= _SMALL else self._put_large
        copy(self._data[to] + offset, source.data_ptr(), bytes)

    def get(self, source: int, offset: int, out: torch.Tensor, bytes: int) -> None:
        if not (out.is_cpu and out.is_contiguous()):
            out.copy_(self.view(source, offset, tuple(out.shape), out.dtype))
            return
        self.gets += 1
        self.get_bytes += bytes
        copy = self._put if bytes <= _SMALL else self._put_large
        copy(out.data_ptr(), self._data[source] + offset, bytes)

    def put_signal(
        self,
        to: int,
        offset: int,
        source: torch.Tensor,
        bytes: int,
        slot: int,
        value: int,
        add: int,
    ) -> None:
        if not (source.is_cpu and source.is_contiguous()):
            source = source.detach().to("cpu").contiguous()
        self.puts += 1
        self.put_bytes += bytes
        copy = self._put_signal if bytes <= _SMALL else self._put_signal_large
        signal = self._signals[to] + 8 * slot
        copy(self._data[to] + offset, source.data_ptr(), bytes, signal, value, add)

    # ---- Words ----

    def signal_address(self, rank: int, slot: int) -> int:
        return self._signals[rank] + 8 * slot

    def wait_word(
        self, address: int, at_least: int, source: int | None, timeout: float, what: str
    ) -> None:
        """Wait until the word is at least `at_least`; raises if rank `source` (None: any) died."""
        self.waits += 1
        self.control.wait_for_word(address, at_least, source, timeout, what)

    # ---- Order and barriers ----

    def quiet(self) -> None:
        # This thread itself copies the data of a put, so a put is complete when its call returns.
        self.fence()

    def barrier(self, channel: int, timeout: float) -> None:
        self.barriers += 1
        self.control.barrier(channel, timeout)

    def agree(self, call: str, timeout: float) -> None:
        """Return when all ranks make the same call; raise RanksDiffer when they do not."""
        refuse_different_calls(self.control.exchange(call, timeout, call))

    @property
    def in_step(self) -> bool:
        return self.control.in_step

    # ---- Statistics and end ----

    def stats(self) -> dict[str, int]:
        names = ("puts", "put_bytes", "gets", "get_bytes", "waits", "barriers")
        return {name: getattr(self, name) for name in names} | {
            "collectives": self.collectives.calls,
            "known_to_backend": int(self._backend is not None),
        }

    def close(self) -> None:
        """Leave the heap; peers that still wait for this rank raise PeerLeft. Not collective."""
        _open.discard(self)
        self.control.leave()
        self.collectives.close()
        if self._backend is not None and self._backend == native_group(self._group):
            self._core.tutti_group_remove_block(self._backend, self.number)
        # A segment is unmapped when the last tensor in it is gone.
        self._blocks.clear()


def available() -> tuple[bool, str]:
    """Whether CPU heaps can be created here, and why."""
    try:
        native.core()
    except (ImportError, UsageError) as error:
        return False, str(error)
    return True, "shared memory between the ranks of one host"


# ---- Segments: each rank creates one and opens those of all others ----


def _open_segments(
    rendezvous: HeapRendezvous, core: Any, bytes: int, parameters: list[int]
) -> list[Any]:
    """Every rank's segment, in rank order; or the same error on all ranks.

    Two ranks share a host if one can open the other's segment and reads from it the random number
    that the other wrote.
    """
    own = core.tutti_segment_create(f"heap {rendezvous.number}".encode(), bytes)
    token, fd, failure = secrets.randbits(62), -1, None
    if own:
        _token(core, own).value = token
        fd = core.tutti_segment_fd(own)
    else:
        failure = core.tutti_error().decode()
    segments: list[Any] = [own] if own else []
    try:
        ranks = rendezvous.introduce(parameters, failure, {"fd": fd, "token": token})
        refuse_different_heaps(ranks)
        by_rank = []
        for rank, peer in enumerate(ranks):
            if rank == rendezvous.rank:
                by_rank.append(own)
                continue
            opened = core.tutti_segment_open(peer["pid"], peer["fd"], bytes)
            if not opened:
                failure = _unreachable(rendezvous.rank, rank, ranks, core.tutti_error().decode())
                break
            segments.append(opened)
            by_rank.append(opened)
            if _token(core, opened).value != peer["token"]:
                failure = _unreachable(rendezvous.rank, rank, ranks, "its pid is another process")
        for text in rendezvous.exchange(failure):
            if text is not None:
                raise UsageError(text)
    except BaseException:
        for segment in segments:
            core.tutti_segment_close(segment)
        raise
    return by_rank


def _as_buffer(core: Any, segment: Any, base: int, bytes: int) -> Any:
    """A segment as a buffer; it is unmapped when neither the heap nor a tensor uses it."""

    class Mapping(ctypes.Array):  # type: ignore[type-arg]
        _type_ = ctypes.c_char
        _length_ = bytes

    buffer = Mapping.from_address(base)
    # At the interpreter's exit tensors may still be in use, so the segment is left mapped, and the
    # kernel unmaps it when the process ends.
    weakref.finalize(buffer, core.tutti_segment_close, segment).atexit = False
    return buffer


def _token(core: Any, segment: Any) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(core.tutti_segment_base(segment))


def _unreachable(rank: int, other: int, ranks: list[dict[str, Any]], why: str) -> str:
    mine, theirs = ranks[rank], ranks[other]
    if mine["boot"] != theirs["boot"]:
        return (
            f"a heap in shared memory needs all ranks on one host: rank {rank} is on "
            f"{mine['host']}, rank {other} on {theirs['host']}: make a group per host "
            "(dist.new_subgroups) and a heap per group"
        )
    return (
        f"rank {rank} cannot open the memory of rank {other} (process {theirs['pid']} on "
        f"{theirs['host']}): {why}: ranks in containers need one process namespace and one user"
    )


# ---- The control page: barriers and exchanges between the ranks of a heap ----

_LINE = 64  # bytes of a cache line: words with different readers are on different lines
_TEXT = 512  # bytes of a text that ranks exchange

# The first line holds the token of _open_segments.
_LEFT = _LINE
_BARRIERS = 2 * _LINE  # one line per channel
_EXCHANGE = _BARRIERS + CHANNELS * _LINE  # the barrier that exchange() uses
_PROGRESS = _EXCHANGE + _LINE  # this rank's progress in a collective
_TEXTS = _PROGRESS + _LINE  # two texts, used in turn
assert _TEXTS + 2 * _TEXT <= _PAGE

# A wait returns to Python at this interval, to handle Ctrl-C and to check that the peers are alive.
_SLICE_SECONDS = 0.1


class ControlPages:
    """The first pages of all ranks' segments, as mapped by one rank.

    Each word has one writer, the owner of the page. Words are stored with release and loaded with
    acquire, so a rank that sees a peer's arrival sees everything that the peer wrote before.
    """

    def __init__(self, rank: int, segments: list[Any]) -> None:
        core = native.core()
        self._rank = rank
        self._peers = [peer for peer in range(len(segments)) if peer != rank]
        self._segments = segments
        self._pages = [int(core.tutti_segment_base(segment)) for segment in segments]
        self._alive: Callable[[Any], int] = core.tutti_segment_owner_lives
        self._wait: Callable[[int, int, float, Any], int] = core.tutti_wait_signal
        self._load: Callable[[int], int] = native.core_holding_gil().tutti_load
        self._store: Callable[[int, int], None] = native.core_holding_gil().tutti_store
        self._arrivals = [0] * _PAGE  # by the offset of the line
        self._exchanges = 0
        self._broken: str | None = None

    def barrier(self, channel: int, timeout: float) -> None:
        """Wait until all ranks have called barrier() on this channel."""
        self._barrier_on(_BARRIERS + _LINE * channel, timeout, "a barrier")

    def exchange(self, text: str, timeout: float, what: str) -> list[str]:
        """Every rank's short text, in rank order."""
        # Two buffers are used in turn. Before a rank writes to a buffer again, it has passed the
        # barrier of the other buffer, which all ranks entered after they had read this buffer.
        at = _TEXTS + _TEXT * (self._exchanges % 2)
        self._exchanges += 1
        encoded = text.encode()[: _TEXT - 1] + b"\0"
        ctypes.memmove(self._pages[self._rank] + at, encoded, len(encoded))
        self._barrier_on(_EXCHANGE, timeout, what)
        return [ctypes.string_at(page + at).decode(errors="replace") for page in self._pages]

    def progress(self, rank: int) -> int:
        """The address of the word that holds a rank's progress in a collective."""
        return self._pages[rank] + _PROGRESS

    def leave(self) -> None:
        """Mark this rank as gone, for ranks that still wait for it."""
        self._store(self._pages[self._rank] + _LEFT, 1)

    def wait_for_word(
        self, address: int, at_least: int, source: int | None, timeout: float, what: str
    ) -> None:
        """Wait for any word; the end of rank `source` (None: of any rank) also ends the wait."""
        watched = None if source is None else self._segments[source]
        first = _SLICE_SECONDS if timeout > _SLICE_SECONDS else timeout
        if first <= 0 or self._wait(address, at_least, first, watched) != 0:
            ranks = self._peers if source is None else [source]
            self._wait_in_slices(address, at_least, ranks, timeout, f"{what} to reach {at_least}")

    def wait_for_peer(self, peer: int, address: int, value: int, timeout: float, what: str) -> None:
        """Wait, in a collective, until a word that only `peer` writes reaches this value."""
        first = _SLICE_SECONDS if timeout > _SLICE_SECONDS else timeout
        if self._wait(address, value, first, self._segments[peer]) == 0:
            return
        try:
            # If any rank has died, this collective cannot complete.
            self._wait_in_slices(address, value, self._peers, timeout, f"rank {peer} in {what}")
        except BaseException as error:
            self.fall_out_of_step(error)
            raise

    def gone(self, waiting_for: str, watched: Sequence[int] | None = None) -> Exception | None:
        """The error for the first rank that has died or left, if there is one."""
        ranks = self._peers if watched is None else watched
        dead = [peer for peer in ranks if not self._alive(self._segments[peer])]
        left = [peer for peer in ranks if self._load(self._pages[peer] + _LEFT)]
        # Report deaths first: a rank may have left because another rank died.
        for peer in dead:
            if peer not in left:
                return lost_peer(native.PeerDied, peer, waiting_for)
        return lost_peer(native.PeerLeft, left[0], waiting_for) if left else None

    def fall_out_of_step(self, error: BaseException) -> None:
        """Record that the ranks' arrival counts now differ: no further collective is possible."""
        self._broken = f"{type(error).__name__}: {error}"

    @property
    def in_step(self) -> bool:
        """Whether all barriers and collectives so far completed."""
        return self._broken is None

    def check(self) -> None:
        """Raise UsageError if an earlier barrier or collective has failed."""
        if self._broken is not None:
            raise UsageError(
                f"this heap is out of step since an earlier error ({self._broken}): close it and "
                "make another"
            )

    def _barrier_on(self, line: int, timeout: float, what: str) -> None:
        self.check()
        self._arrivals[line] = count = self._arrivals[line] + 1
        self._store(self._pages[self._rank] + line, count)
        for peer in self._peers:
            self.wait_for_peer(peer, self._pages[peer] + line, count, timeout, what)

    def _wait_in_slices(
        self, address: int, value: int, watched: Sequence[int], timeout: float, what: str
    ) -> None:
        """The slow part of a wait: between slices, check whether the peers are still alive."""
        deadline = time.monotonic() + timeout - min(timeout, _SLICE_SECONDS)
        while True:
            gone = self.gone(what, watched)
            if gone is not None and self._load(address) < value:
                raise gone
            # 0 must not be passed to the core, where it means to wait forever.
            remaining = min(deadline - time.monotonic(), _SLICE_SECONDS)
            if remaining <= 0:
                now = self._load(address)
                if now >= value:
                    return
                raise Timeout(
                    f"rank {self._rank} waited {timeout:g} s for {what}; its value is {now}"
                )
            if self._wait(address, value, remaining, None) == 0:
                return
