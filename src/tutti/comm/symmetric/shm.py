"""The heap's memory on CPU: one shared segment per rank, mapped by all ranks of the host.

Memory order. A signal, a counter and a barrier line are 64-bit words that are stored with release
and loaded with acquire (C11). Whoever sees the new value of such a word therefore sees all that its
writer had written before it, to whichever segment, on x86-64 and ARM64 alike: bytes first, then the
word. Plain loads and stores of tensor elements have no order of their own; between a write on one
rank and a read on another there must be a signal, a counter or a barrier.
"""

import ctypes
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from tutti.comm.shm import native, native_group
from tutti.comm.symmetric.errors import PeerDied, PeerLeft, Timeout
from tutti.comm.symmetric.meeting import Meeting, refuse_different_calls
from tutti.comm.symmetric.memory import CHANNELS, Algorithm
from tutti.comm.symmetric.shm_collectives import ShmCollectives
from tutti.comm.symmetric.shm_segments import mapped, meet
from tutti.world.errors import UsageError

LINE = 64  # bytes of a cache line: words with different writers lie on different lines
PAGE = 4096
_TEXT = 512  # bytes of a call's description

# The control page of each segment. Only its owner writes there.
_TOKEN = 0
_LEFT = LINE
_BARRIERS = 2 * LINE  # one line per channel
_AGREEMENT = _BARRIERS + CHANNELS * LINE  # the barrier under agree()
_PROGRESS = _AGREEMENT + LINE  # how far this rank is in a collective
_TEXTS = _PROGRESS + LINE  # two descriptions, used in turn
_CONTROL = PAGE
assert _TEXTS + 2 * _TEXT <= _CONTROL

# A wait returns to Python this often: for Ctrl-C, and to look whether the peers still live.
_SLICE = 0.1
# A copy up to this size takes less time than it takes to let go of the interpreter's lock.
_SMALL = 32 << 10


class ShmMemory:
    """See Memory. Made on all ranks of a group together; all of them must be on one host."""

    backend = "shm"
    alignment = LINE
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
        self._quick = native.core_holding_gil()
        self._peers = [rank for rank in range(self.size) if rank != self.rank]
        self._data_at = _CONTROL + -(-signals * 8 // PAGE) * PAGE
        meeting = Meeting(group, "symmetric.Heap", timeout)
        self.number = meeting.number
        self._segments = meet(meeting, self._core, self._data_at + bytes, [bytes, signals])
        self._control = [int(self._core.tutti_segment_base(each)) for each in self._segments]
        self._signals = [base + _CONTROL for base in self._control]
        self._data = [base + self._data_at for base in self._control]
        self._blocks = [
            mapped(self._core, segment, base, self._data_at + bytes)
            for segment, base in zip(self._segments, self._control, strict=True)
        ]
        # Calls that cannot block keep Python's lock, which is cheaper than letting it go.
        quick = self._quick
        self.load: Callable[[int], int] = quick.tutti_load
        self.store: Callable[[int, int], None] = quick.tutti_store
        self.fetch_add: Callable[[int, int], int] = quick.tutti_fetch_add
        self.compare_swap: Callable[[int, int, int], int] = quick.tutti_compare_swap
        self._put, self._put_signal = quick.tutti_put, quick.tutti_put_signal
        self._put_large, self._put_signal_large = self._core.tutti_put, self._core.tutti_put_signal
        self._wait = self._core.tutti_wait_signal
        self._epochs = dict.fromkeys((_AGREEMENT, *(_barrier(c) for c in range(CHANNELS))), 0)
        self._exchanges = 0
        self._broken: str | None = None
        self._collectives = ShmCollectives(self, self._core, self._quick)
        self.puts = self.put_bytes = self.gets = self.get_bytes = 0
        self.waits = self.barriers = 0
        self._group = group
        self._add_to_backend()
        self.agree("Heap", timeout)
        meeting.end()

    def _add_to_backend(self) -> None:
        """Let torch.distributed's own collectives on the heap's tensors do without copies."""
        self._backend = native_group(self._group)
        if self._backend is not None:
            bases = (ctypes.c_void_p * self.size)(*self._data)
            native.raise_for(
                self._core.tutti_group_add_block(self._backend, self.number, bases, self.bytes)
            )

    # ---- Bytes ----

    def view(
        self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        # The tensor keeps the mapping alive, so that it can be read even after the heap is closed.
        flat = torch.frombuffer(
            self._blocks[rank], dtype=dtype, count=count, offset=self._data_at + offset
        )
        return flat.view(shape)

    def address(self, rank: int, offset: int) -> int:
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
        self.waits += 1
        watched = None if source is None else self._segments[source]
        first = _SLICE if timeout > _SLICE else timeout
        if first <= 0 or self._wait(address, at_least, first, watched) != 0:
            whom = self._peers if source is None else [source]
            if what == "signal":
                what = f"signal {(address - self._signals[self.rank]) // 8}"
            self._wait_on(address, at_least, whom, timeout, f"{what} to reach {at_least}")

    # ---- Order and meeting points ----

    def fence(self) -> None:
        self._quick.tutti_fence()

    def quiet(self) -> None:
        # A put is a copy by this very thread: it is done when the call returns.
        self._quick.tutti_fence()

    def barrier(self, channel: int, timeout: float) -> None:
        self.barriers += 1
        self._meet_at(_barrier(channel), timeout, "a barrier")

    def agree(self, call: str, timeout: float) -> None:
        refuse_different_calls(self.exchange(call, timeout, call))

    def exchange(self, text: str, timeout: float, what: str) -> list[str]:
        """Every rank's short text, in rank order."""
        # Two places in turn: who writes to one again has passed the meeting in between, to which
        # all came after they had read it.
        at = _TEXTS + _TEXT * (self._exchanges % 2)
        self._exchanges += 1
        encoded = text.encode()[: _TEXT - 1] + b"\0"
        ctypes.memmove(self._control[self.rank] + at, encoded, len(encoded))
        self._meet_at(_AGREEMENT, timeout, what)
        return [ctypes.string_at(base + at).decode(errors="replace") for base in self._control]

    def _meet_at(self, line: int, timeout: float, what: str) -> None:
        """Store this rank's count of meetings (release), wait for that of each peer (acquire)."""
        self.check()
        self._epochs[line] = epoch = self._epochs[line] + 1
        self.store(self._control[self.rank] + line, epoch)
        for peer in self._peers:
            self.wait_for_peer(peer, self._control[peer] + line, epoch, timeout, what)

    def progress_address(self, rank: int) -> int:
        """The word in which a rank tells how far it has come in a collective."""
        return self._control[rank] + _PROGRESS

    def wait_for_peer(self, peer: int, address: int, value: int, timeout: float, what: str) -> None:
        """Wait until a word that only `peer` writes has come so far (acquire)."""
        first = _SLICE if timeout > _SLICE else timeout
        if self._wait(address, value, first, self._segments[peer]) == 0:
            return
        try:
            # Whoever of all ranks has died, this meeting will not take place.
            self._wait_on(address, value, self._peers, timeout, f"rank {peer} in {what}")
        except BaseException as error:
            self.fall_out_of_step(error)
            raise

    def _wait_on(
        self, address: int, value: int, watched: Sequence[int], timeout: float, what: str
    ) -> None:
        """The slow part of a wait: in slices, looking between them whether the peers still live."""
        deadline = time.monotonic() + timeout - min(timeout, _SLICE)
        while True:
            gone = self.gone(what, watched)
            if gone is not None and self.load(address) < value:
                raise gone
            remaining = min(deadline - time.monotonic(), _SLICE)  # 0 would mean for ever
            if remaining <= 0:
                now = self.load(address)
                if now >= value:
                    return
                raise Timeout(
                    f"rank {self.rank} waited {timeout:g} s for {what}; its value is {now}"
                )
            if self._wait(address, value, remaining, None) == 0:
                return

    def gone(self, waiting_for: str, watched: Sequence[int] | None = None) -> Exception | None:
        """The error for the first rank that has died or left, if there is one."""
        ranks = self._peers if watched is None else watched
        alive = self._core.tutti_segment_owner_lives
        dead = [peer for peer in ranks if not alive(self._segments[peer])]
        left = [peer for peer in ranks if self.load(self._control[peer] + _LEFT)]
        # Death first: who has left may have done so because of it.
        for peer in dead:
            if peer not in left:
                return PeerDied(peer, waiting_for)
        return PeerLeft(left[0], waiting_for) if left else None

    def fall_out_of_step(self, error: BaseException) -> None:
        """Remember that counts of meetings no longer agree: nothing collective can follow."""
        self._broken = f"{type(error).__name__}: {error}"

    def check(self) -> None:
        """Refuse what is collective after a meeting has failed."""
        if self._broken is not None:
            raise UsageError(
                f"this heap is out of step since an earlier error ({self._broken}): close it and "
                "make another"
            )

    # ---- Collectives ----

    def all_reduce(
        self,
        local: torch.Tensor,
        offset: int,
        op: str,
        algorithm: Algorithm,
        out: torch.Tensor,
        out_offset: int | None,
        timeout: float,
    ) -> None:
        self.check()
        self._collectives.all_reduce(local, offset, op, algorithm, out, out_offset, timeout)

    def all_reduce_staged(
        self, buffer: torch.Tensor, offset: int, tensor: torch.Tensor, op: str, timeout: float
    ) -> None:
        self.check()
        buffer.copy_(tensor)
        self._collectives.all_reduce(buffer, offset, op, "one_shot", tensor, None, timeout)

    def all_gather(
        self, local: torch.Tensor, offset: int, out: torch.Tensor, timeout: float
    ) -> None:
        self.check()
        self._collectives.all_gather(local, offset, out, timeout)

    def reduce_scatter(
        self, local: torch.Tensor, offset: int, op: str, out: torch.Tensor, timeout: float
    ) -> None:
        self.check()
        self._collectives.reduce_scatter(local, offset, op, out, timeout)

    # ---- Life ----

    def stats(self) -> dict[str, int]:
        names = ("puts", "put_bytes", "gets", "get_bytes", "waits", "barriers")
        return {name: getattr(self, name) for name in names} | {
            "collectives": self._collectives.calls,
            "known_to_backend": int(self._backend is not None),
        }

    def close(self) -> None:
        self.store(self._control[self.rank] + _LEFT, 1)
        self._collectives.close()
        if self._backend is not None and self._backend == native_group(self._group):
            self._core.tutti_group_remove_block(self._backend, self.number)
        # What is mapped goes when the last tensor that lies in it does.
        self._blocks.clear()


def available() -> tuple[bool, str]:
    """Whether CPU heaps can be made here, and why."""
    try:
        native.core()
    except (ImportError, UsageError) as error:
        return False, str(error)
    return True, "shared memory between the ranks of one host"


def _barrier(channel: int) -> int:
    return _BARRIERS + LINE * channel
