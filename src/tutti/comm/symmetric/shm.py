"""The heap's memory on CPU: one shared segment per rank, mapped by all ranks of the host.

Memory order. A signal, a counter and a barrier line are 64-bit words that are stored with release
and loaded with acquire (C11). Whoever sees the new value of such a word therefore sees all that its
writer had written before it, to whichever segment, on x86-64 and ARM64 alike: bytes first, then the
word. Plain loads and stores of tensor elements have no order of their own; between a write on one
rank and a read on another there must be a signal, a counter or a barrier.
"""

import ctypes
from collections.abc import Callable

import torch
import torch.distributed as dist

from tutti.comm.shm import native, native_group
from tutti.comm.symmetric.meeting import Meeting, refuse_different_calls
from tutti.comm.symmetric.memory import Algorithm
from tutti.comm.symmetric.shm_collectives import ShmCollectives
from tutti.comm.symmetric.shm_control import CONTROL_BYTES, LINE, Control
from tutti.comm.symmetric.shm_segments import mapped, meet
from tutti.world.errors import UsageError

_PAGE = 4096
# A copy up to this size takes less time than it takes to let go of the interpreter's lock.
_SMALL = 32 << 10


# Memory that was not closed stays: peers and the backend's collectives may still use it.
_open: set["ShmMemory"] = set()


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
        # A segment: the control page, the signals, the data.
        self._data_at = CONTROL_BYTES + -(-signals * 8 // _PAGE) * _PAGE
        whole = self._data_at + bytes
        meeting = Meeting(group, "symmetric.Heap", timeout)
        self.number = meeting.number
        segments = meet(meeting, self._core, whole, [bytes, signals])
        bases = [int(self._core.tutti_segment_base(segment)) for segment in segments]
        self._signals = [base + CONTROL_BYTES for base in bases]
        self._data = [base + self._data_at for base in bases]
        self._blocks = [
            mapped(self._core, segment, base, whole)
            for segment, base in zip(segments, bases, strict=True)
        ]
        # Calls that cannot block keep Python's lock, which is cheaper than letting it go.
        core, quick = self._core, native.core_holding_gil()
        self.load: Callable[[int], int] = quick.tutti_load
        self.store: Callable[[int, int], None] = quick.tutti_store
        self.fetch_add: Callable[[int, int], int] = quick.tutti_fetch_add
        self.add = self.fetch_add
        self.compare_swap: Callable[[int, int, int], int] = quick.tutti_compare_swap
        self.fence: Callable[[], None] = quick.tutti_fence
        self._put, self._put_signal = quick.tutti_put, quick.tutti_put_signal
        self._put_large, self._put_signal_large = core.tutti_put, core.tutti_put_signal
        self.control = Control(self.rank, segments)
        self._collectives = ShmCollectives(self)
        self.puts = self.put_bytes = self.gets = self.get_bytes = 0
        self.waits = self.barriers = 0
        self._group = group
        try:
            self._add_to_backend()
            self.agree("Heap", timeout)
        except BaseException:
            self.close()  # else the backend would keep a block whose memory is gone
            raise
        meeting.end()
        _open.add(self)

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
        self.control.wait_for_word(address, at_least, source, timeout, what)

    # ---- Order and meeting points ----

    def quiet(self) -> None:
        # A put is a copy by this very thread: it is done when the call returns.
        self.fence()

    def barrier(self, channel: int, timeout: float) -> None:
        self.barriers += 1
        self.control.barrier(channel, timeout)

    def agree(self, call: str, timeout: float) -> None:
        refuse_different_calls(self.control.exchange(call, timeout, call))

    @property
    def in_step(self) -> bool:
        return self.control.in_step

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
        self.control.check()
        self._collectives.all_reduce(local, offset, op, algorithm, out, out_offset, timeout)

    def sum_in_place(self, local: torch.Tensor) -> None:
        """The core decides by itself, in C."""

    def all_reduce_staged(
        self, buffer: torch.Tensor, offset: int, tensor: torch.Tensor, op: str, timeout: float
    ) -> None:
        self.control.check()
        buffer.copy_(tensor)
        self._collectives.all_reduce(buffer, offset, op, "auto", tensor, None, timeout)

    def all_gather(
        self, local: torch.Tensor, offset: int, out: torch.Tensor, timeout: float
    ) -> None:
        self.control.check()
        self._collectives.all_gather(local, offset, out, timeout)

    def reduce_scatter(
        self, local: torch.Tensor, offset: int, op: str, out: torch.Tensor, timeout: float
    ) -> None:
        self.control.check()
        self._collectives.reduce_scatter(local, offset, op, out, timeout)

    # ---- Life ----

    def stats(self) -> dict[str, int]:
        names = ("puts", "put_bytes", "gets", "get_bytes", "waits", "barriers")
        return {name: getattr(self, name) for name in names} | {
            "collectives": self._collectives.calls,
            "known_to_backend": int(self._backend is not None),
        }

    def close(self) -> None:
        _open.discard(self)
        self.control.leave()
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
