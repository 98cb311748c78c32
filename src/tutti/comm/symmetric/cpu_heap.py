"""The memory of a heap on the CPU: one shared segment per rank, mapped by all ranks of the host.

Memory order. Signals, counters and barrier words are 64-bit words that are stored with release and
loaded with acquire (C11). A rank that sees the new value of such a word therefore sees everything
that the writer of the word wrote before, in any segment, on both x86-64 and ARM64. Plain loads and
stores of tensor elements are not ordered, so a signal, a counter or a barrier must separate a write
on one rank from a read on another rank.

A segment has a control page, then the signals, then the data. Each word of a control page is
written only by the owner of the page.
"""

import ctypes
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tutti.comm.shm import native, native_group
from tutti.comm.symmetric.cpu_collectives import CpuCollectives, pointers
from tutti.comm.symmetric.heap import Heap
from tutti.comm.symmetric.heap_rendezvous import HeapRendezvous, Timeout, lost_peer
from tutti.comm.symmetric.symmetric_tensor import CHANNELS
from tutti.world.errors import UsageError

# Offsets in the control page, in bytes. The first cache line holds the random token that
# _open_segments compares. Words with different readers are on different cache lines.
_PAGE = 4096
_LINE = 64
_TEXT = 512  # size in bytes of a text that ranks exchange
_LEFT = _LINE  # offset of a word that is 1 if the rank has left the heap
_BARRIERS = 2 * _LINE  # one line per channel
_EXCHANGE = _BARRIERS + CHANNELS * _LINE  # the barrier that exchange() uses
_PROGRESS = _EXCHANGE + _LINE  # the rank's progress in a collective
_TEXTS = _PROGRESS + _LINE  # two buffers for texts, used alternately
assert _TEXTS + 2 * _TEXT <= _PAGE

# Copying up to this number of bytes takes less time than releasing the GIL.
_SMALL = 32 << 10
# A wait returns to Python at this interval, to handle Ctrl-C and to check that the peers are alive.
SLICE_SECONDS = 0.1

# Heaps that were not closed. They stay mapped, because peers and collectives may still use them.
_open: set["CpuMemory"] = set()


class CpuMemory:
    """One block of the same size on every rank. An `offset` in bytes is valid on all ranks.

    All ranks of a group create the memory together and must be on one host. CudaMemory has the
    same methods.
    """

    backend = "shm"
    alignment = 64  # size of a cache line in bytes
    device = torch.device("cpu")

    def __init__(self, heap: Heap, reason: str) -> None:
        self.reason, self.bytes, self.timeout = reason, heap.bytes, heap.timeout
        self.rank, self.size = heap.rank, heap.size
        self.peers = [rank for rank in range(self.size) if rank != self.rank]
        self._core = core = native.core()
        self._data_at = _PAGE + -(-heap.signals * 8 // _PAGE) * _PAGE
        total = self._data_at + heap.bytes
        rendezvous = HeapRendezvous(heap.group, heap.timeout)
        self.number = rendezvous.number
        segments = _open_segments(rendezvous, core, total, heap.bytes, heap.signals)
        self._segments = segments
        self._pages = [int(core.tutti_segment_base(segment)) for segment in segments]
        self.progress_words = [page + _PROGRESS for page in self._pages]
        self._signals = [page + _PAGE for page in self._pages]
        self._data = [page + self._data_at for page in self._pages]
        self._blocks = [_as_buffer(core, segment, total) for segment in segments]
        # Calls that cannot block keep the GIL, which is cheaper than releasing it.
        core_holding_gil = native.core_holding_gil()
        self.load: Callable[[int], int] = core_holding_gil.tutti_load
        self.store: Callable[[int, int], None] = core_holding_gil.tutti_store
        self.fetch_add: Callable[[int, int], int] = core_holding_gil.tutti_fetch_add
        self.add = self.fetch_add
        self.compare_swap: Callable[[int, int, int], int] = core_holding_gil.tutti_compare_swap
        self.fence: Callable[[], None] = core_holding_gil.tutti_fence
        self._wait: Callable[[int, int, float, Any], int] = core.tutti_wait_signal
        self._put = core_holding_gil.tutti_put
        self._put_signal = core_holding_gil.tutti_put_signal
        self._put_large, self._put_signal_large = core.tutti_put, core.tutti_put_signal
        self._arrivals = [0] * _PAGE  # barrier counts, indexed by the offset of the barrier's line
        self._exchanges = 0
        self._broken: str | None = None
        self.collectives = CpuCollectives(self)
        self.puts = self.put_bytes = self.gets = self.get_bytes = self.waits = self.barriers = 0
        self._group = heap.group
        # If the group uses shm, the heap's addresses are registered with its backend, so that
        # collectives of torch.distributed on the heap's tensors need no copies.
        self._backend = native_group(heap.group)
        self.backend_stats = {"known_to_backend": int(self._backend is not None)}
        try:
            if self._backend is not None:
                bases = pointers(self._data)
                add_block = core.tutti_group_add_block
                native.raise_for(add_block(self._backend, self.number, bases, heap.bytes))
            self.agree("Heap")
        except BaseException:
            self.close()  # otherwise the backend would keep a block of unmapped memory
            raise
        rendezvous.end()
        _open.add(self)

    def close(self) -> None:
        """Leave the heap on this rank only. Peers that wait for this rank raise PeerLeft."""
        _open.discard(self)
        self.store(self._pages[self.rank] + _LEFT, 1)
        self.collectives.close()
        if self._backend is not None and self._backend == native_group(self._group):
            self._core.tutti_group_remove_block(self._backend, self.number)
        # A segment is unmapped when the last tensor that uses it is deleted.
        self._blocks.clear()

    # ---- Bytes ----

    def view(
        self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a view of a rank's memory as a tensor."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        # The tensor keeps the mapping alive, so it can be read even after the heap is closed.
        at = self._data_at + offset
        return torch.frombuffer(self._blocks[rank], dtype=dtype, count=count, offset=at).view(shape)

    def address(self, rank: int, offset: int) -> int:
        """Return the address, in this process, of the byte at `offset` in a rank's memory."""
        return self._data[rank] + offset

    def addresses(self, offset: int) -> list[int]:
        """Return the addresses of the byte at `offset` in each rank's memory, in rank order."""
        return [base + offset for base in self._data]

    def put(self, to: int, offset: int, source: torch.Tensor, bytes: int) -> None:
        if not (source.is_cpu and source.is_contiguous()):
            source = source.detach().to("cpu").contiguous()
        self.puts += 1
        self.put_bytes += bytes
        copy = self._put if bytes <= _SMALL else self._put_large
        copy(self._data[to] + offset, source.data_ptr(), bytes)

    def get(self, source: int, offset: int, out: torch.Tensor, bytes: int) -> None:
        self.gets += 1
        self.get_bytes += bytes
        if not (out.is_cpu and out.is_contiguous()):
            out.copy_(self.view(source, offset, tuple(out.shape), out.dtype))
            return
        copy = self._put if bytes <= _SMALL else self._put_large
        copy(out.data_ptr(), self._data[source] + offset, bytes)

    def put_signal(
        self, to: int, at: int, source: torch.Tensor, bytes: int, slot: int, value: int, add: int
    ) -> None:
        if not (source.is_cpu and source.is_contiguous()):
            source = source.detach().to("cpu").contiguous()
        self.puts += 1
        self.put_bytes += bytes
        copy = self._put_signal if bytes <= _SMALL else self._put_signal_large
        signal = self._signals[to] + 8 * slot
        copy(self._data[to] + at, source.data_ptr(), bytes, signal, value, add)

    def quiet(self) -> None:
        # This thread itself copies the data of a put, so a put is complete when its call returns.
        self.fence()

    # ---- Waits ----

    def signal_address(self, rank: int, slot: int) -> int:
        return self._signals[rank] + 8 * slot

    def wait_word(
        self, address: int, at_least: int, source: int | None, timeout: float, what: str
    ) -> None:
        """Wait until the word is at least `at_least`.

        Raises an error if rank `source` has died or left the heap. If `source` is None, the method
        raises an error if any rank has died or left the heap.
        """
        self.waits += 1
        watched = None if source is None else self._segments[source]
        first = SLICE_SECONDS if timeout > SLICE_SECONDS else timeout
        if first <= 0 or self._wait(address, at_least, first, watched) != 0:
            ranks = self.peers if source is None else [source]
            what = f"{what} to reach {at_least}"
            try:
                self.wait_in_slices(address, at_least, ranks, timeout, what)
            except Timeout as error:
                raise Timeout(f"{error}. The value is {self.load(address)}") from None

    def wait_for_peer(self, peer: int, address: int, value: int, what: str) -> None:
        """Wait until the word at `address`, which only rank `peer` writes, reaches `value`.

        This method is for collectives: after an error, the heap is unusable.
        """
        timeout = self.timeout
        first = SLICE_SECONDS if timeout > SLICE_SECONDS else timeout
        if self._wait(address, value, first, self._segments[peer]) == 0:
            return
        try:
            # If any rank has died, this collective cannot complete.
            self.wait_in_slices(address, value, self.peers, timeout, f"rank {peer} in {what}")
        except BaseException as error:
            self.mark_unusable(error)
            raise

    def wait_in_slices(
        self, address: int, value: int, watched: Sequence[int], timeout: float, what: str
    ) -> None:
        """Continue a wait after its first SLICE_SECONDS.

        After every further SLICE_SECONDS, check that the `watched` ranks are alive.
        """
        deadline = time.monotonic() + timeout - min(timeout, SLICE_SECONDS)
        while True:
            error = self.lost_peer_error(what, watched)
            if error is not None and self.load(address) < value:
                raise error
            # A timeout of 0 must not be passed to the core, which would then wait forever.
            remaining = min(deadline - time.monotonic(), SLICE_SECONDS)
            if remaining <= 0:
                if self.load(address) >= value:
                    return
                alive = f", but rank {watched[0]} is alive" if len(watched) == 1 else ""
                raise Timeout(f"rank {self.rank} waited {timeout:g} s for {what}{alive}")
            if self._wait(address, value, remaining, None) == 0:
                return

    def lost_peer_error(
        self, waiting_for: str, watched: Sequence[int] | None = None
    ) -> Exception | None:
        """Return the error for the first watched rank that has died or left the heap, or None.

        The default of `watched` is all other ranks.
        """
        ranks = self.peers if watched is None else watched
        is_alive = self._core.tutti_segment_owner_lives
        dead = [peer for peer in ranks if not is_alive(self._segments[peer])]
        left = [peer for peer in ranks if self.load(self._pages[peer] + _LEFT)]
        # Report dead ranks first. If a rank dies, other ranks raise an error and then leave the
        # heap, so the dead rank is the cause.
        for peer in dead:
            if peer not in left:
                return lost_peer(native.PeerDied, peer, waiting_for)
        return lost_peer(native.PeerLeft, left[0], waiting_for) if left else None

    # ---- Barriers and exchanges ----

    def barrier(self, channel: int) -> None:
        self.barriers += 1
        self._barrier_on(_BARRIERS + _LINE * channel, "a barrier")

    def agree(self, call: str) -> None:
        """Wait until all ranks have called this method. Raise RanksDiffer if `call` differs."""
        HeapRendezvous.check_same_calls(self.exchange(call, call))

    def exchange(self, text: str, what: str) -> list[str]:
        """Return the texts of all ranks, in rank order. Texts are cut to 511 bytes."""
        # Two buffers are used alternately. Before a rank writes to a buffer again, it has passed
        # the barrier of the exchange with the other buffer. All ranks entered that barrier after
        # they had read this buffer, so no rank still reads this buffer.
        at = _TEXTS + _TEXT * (self._exchanges % 2)
        self._exchanges += 1
        encoded = text.encode()[: _TEXT - 1] + b"\0"
        ctypes.memmove(self._pages[self.rank] + at, encoded, len(encoded))
        self._barrier_on(_EXCHANGE, what)
        return [ctypes.string_at(page + at).decode(errors="replace") for page in self._pages]

    def _barrier_on(self, line: int, what: str) -> None:
        self.check()
        self._arrivals[line] = count = self._arrivals[line] + 1
        self.store(self._pages[self.rank] + line, count)
        for peer in self.peers:
            self.wait_for_peer(peer, self._pages[peer] + line, count, what)

    def mark_unusable(self, error: BaseException) -> None:
        """Refuse further collectives, because barrier counts may now differ between ranks."""
        self._broken = f"{type(error).__name__}: {error}"

    @property
    def usable(self) -> bool:
        """Whether all barriers and collectives so far completed."""
        return self._broken is None

    def check(self) -> None:
        """Raise UsageError if an earlier barrier or collective has failed."""
        if self._broken is not None:
            raise UsageError(
                f"this heap is unusable after an earlier error ({self._broken}). Close it and "
                "create another heap"
            )


# ---- Segments: each rank creates one segment and opens the segments of all other ranks ----


def _open_segments(
    rendezvous: HeapRendezvous, core: Any, segment_bytes: int, bytes: int, signals: int
) -> list[Any]:
    """Return the segments of all ranks, in rank order, or raise the same error on all ranks.

    Two ranks are on the same host if each rank can open the segment of the other rank and finds the
    other rank's random token in it.
    """
    own_segment = core.tutti_segment_create(f"heap {rendezvous.number}".encode(), segment_bytes)
    token, fd, failure = secrets.randbits(62), -1, None
    if own_segment:
        ctypes.c_uint64.from_address(core.tutti_segment_base(own_segment)).value = token
        fd = core.tutti_segment_fd(own_segment)
    else:
        failure = core.tutti_error().decode()
    segments: dict[int, Any] = {rendezvous.rank: own_segment} if own_segment else {}
    try:
        ranks = rendezvous.exchange_rank_info(bytes, signals, failure, fd=fd, token=token)
        for rank, peer in enumerate(ranks):
            if rank == rendezvous.rank:
                continue
            opened = core.tutti_segment_open(peer["pid"], peer["fd"], segment_bytes)
            if not opened:
                failure = _unreachable(ranks, rendezvous.rank, rank, core.tutti_error().decode())
                break
            segments[rank] = opened
            read = ctypes.c_uint64.from_address(core.tutti_segment_base(opened)).value
            if read != peer["token"]:
                why = "on this host, this pid belongs to another process"
                failure = _unreachable(ranks, rendezvous.rank, rank, why)
        for text in rendezvous.exchange(failure):
            if text is not None:
                raise UsageError(text)
    except BaseException:
        for segment in segments.values():
            core.tutti_segment_close(segment)
        raise
    return [segments[rank] for rank in range(rendezvous.size)]


def _as_buffer(core: Any, segment: Any, bytes: int) -> Any:
    """Return a segment as a buffer.

    The segment is unmapped when neither the heap nor a tensor uses the buffer.
    """

    class Mapping(ctypes.Array):  # type: ignore[type-arg]
        _type_ = ctypes.c_char
        _length_ = bytes

    buffer = Mapping.from_address(core.tutti_segment_base(segment))
    # At interpreter exit, tensors may still be in use. The segment therefore stays mapped until the
    # kernel unmaps it at the end of the process.
    weakref.finalize(buffer, core.tutti_segment_close, segment).atexit = False
    return buffer


def _unreachable(ranks: list[dict[str, Any]], rank: int, other: int, why: str) -> str:
    host, peer = ranks[rank]["host"], ranks[other]
    if ranks[rank]["boot"] != peer["boot"]:
        return (
            f"a heap in shared memory needs all ranks on one host, but rank {rank} is on {host} "
            f"and rank {other} is on {peer['host']}: make a group per host (dist.new_subgroups) "
            "and a heap per group"
        )
    return (
        f"rank {rank} cannot open the memory of rank {other} (process {peer['pid']} on "
        f"{peer['host']}): {why}. Run all ranks as one user and in one PID namespace (container)"
    )
