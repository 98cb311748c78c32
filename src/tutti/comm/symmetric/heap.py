"""Heap: memory that every rank of a group can read and write at the same offsets."""

import importlib.util
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch
import torch.distributed as dist

from tutti.comm.symmetric import cpu_heap
from tutti.comm.symmetric.symmetric_tensor import (
    CHANNELS,
    Counters,
    HeapObject,
    Released,
    SymmetricTensor,
)
from tutti.world.errors import UsageError, checked_seconds, did_you_mean

if TYPE_CHECKING:
    from tutti.comm.symmetric.symmetric_tensor import HeapMemory

Backend = Literal["auto", "shm", "cuda", "nvshmem"]


class Heap:
    """A block of `bytes` on every rank of `group` (default: all ranks), shared by them all.

        with symmetric.Heap(bytes=1 << 20) as heap:
            t = heap.zeros(1024)
            t.put_signal(torch.ones(1024), to=(heap.rank + 1) % heap.size)
            heap.wait()                      # the previous rank has put its ones into t.local
            print(t.local.sum())

    These calls are collective (all ranks make them in the same order): creating and closing the
    heap, `empty`, `zeros`, `counters`, `free`, `barrier`. Differences between ranks raise
    RanksDiffer. All other calls are one-sided: the peer need not do anything. The garbage collector
    frees nothing; a heap that is never closed ends with its process, and leaves nothing behind.

    device: cpu or cuda; None takes the device of the group's backend. backend: "shm" is shared
    memory on one host (CPU), "cuda" is torch's symmetric memory, "nvshmem" is torch's NVSHMEM;
    "auto" takes the first backend for the device, and the attribute `reason` explains the choice.
    signals: the number of signal slots of each rank. timeout: in seconds, for every wait that has
    no timeout of its own.

    On the CPU calls act at once. On CUDA they are enqueued on the current stream and run in stream
    order; calls that return a number wait for the stream.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        bytes: int = 64 << 20,
        device: str | torch.device | None = None,
        backend: Backend = "auto",
        signals: int = 1024,
        timeout: float = 30.0,
    ) -> None:
        if not dist.is_initialized():
            raise UsageError("a heap needs a world: call tutti.init() first")
        self.group = cast(dist.ProcessGroup, dist.group.WORLD if group is None else group)
        if bytes < 1 or signals < 1:
            raise UsageError(f"bytes={bytes}, signals={signals}: both must be above 0")
        self.timeout = checked_seconds("timeout", timeout)
        self.rank = self.group.rank()
        self.size = self.group.size()
        self._memory = _heap_memory(self.group, bytes, device, backend, signals, self.timeout)
        self.device = self._memory.device
        self.backend = self._memory.backend
        self.reason = self._memory.reason
        self.signals = signals
        self.bytes = bytes
        self.closed = False
        self._allocator = Allocator(self._memory.bytes, self._memory.alignment)
        self._alive: dict[int, HeapObject] = {}

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"Heap({self.bytes} bytes on {self.backend}, rank {self.rank} of {self.size}{state})"

    # ---- Allocation: collective ----

    def empty(
        self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32
    ) -> SymmetricTensor:
        """A tensor on every rank, not initialised."""
        return self._tensor("empty", shape, dtype, zero=False)

    def zeros(
        self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32
    ) -> SymmetricTensor:
        """A tensor of zeros on every rank; all ranks' tensors are zeroed when this returns."""
        return self._tensor("zeros", shape, dtype, zero=True)

    def counters(self, count: int, *, spacing: int = 64) -> Counters:
        """Zeroed 64-bit counters on every rank, `spacing` bytes apart.

        64 gives each counter its own cache line, for counters that many ranks change; 8 packs them.
        """
        if count < 1 or spacing < 8 or spacing % 8:
            raise UsageError(f"count={count}, spacing={spacing}: use 1 or more, and 8, 16, … bytes")
        offset = self._take(f"counters({count}, spacing={spacing})", count * spacing, zero=True)
        counters = self._alive[offset] = Counters(self, self._memory, offset, count, spacing)
        return counters

    def free(self, what: HeapObject) -> None:
        """Free the memory, on all ranks. Views of it must not be used any more."""
        self._memory.agree(f"free({_describe(what)})", self.timeout)
        if self._alive.pop(what.offset, None) is not what:
            raise UsageError(f"{_describe(what)} is not of this heap, or was already freed")
        self._allocator.give(what.offset)
        what.release(f"{_describe(what)} was freed")

    # ---- Signals ----

    def signal(
        self, to: int, slot: int = 0, value: int = 1, op: Literal["set", "add"] = "set"
    ) -> None:
        """Set a slot of rank `to`, or add to it, with release: a waiter sees all earlier puts."""
        if not 0 <= to < self.size:
            raise UsageError(f"rank {to}: the heap's ranks are 0 to {self.size - 1}")
        if not 0 <= slot < self.signals or (op != "set" and op != "add"):
            self.refuse_signal(slot, op)
        address = self._memory.signal_address(to, slot)
        if op == "add":
            self._memory.add(address, value)
        else:
            self._memory.store(address, value)

    def read_signal(self, slot: int = 0) -> int:
        """The current value of one of this rank's own slots (acquire)."""
        if not 0 <= slot < self.signals:
            self.refuse_signal(slot)
        return self._memory.load(self._memory.signal_address(self.rank, slot))

    def wait(
        self,
        slot: int = 0,
        at_least: int = 1,
        source: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Wait until this rank's own slot is at least `at_least`; earlier puts are then visible.

        source: the rank that is expected to signal, whose death ends the wait; None: any rank.
        Raises Timeout, PeerDied or PeerLeft. Slots are not reset: use increasing values, or signal
        0 to this rank itself. On CUDA the stream waits, not the caller, and a later call raises
        Timeout.
        """
        if not 0 <= slot < self.signals:
            self.refuse_signal(slot)
        if at_least < 0:
            raise UsageError(f"at_least is {at_least}: signals count from 0 up")
        memory = self._memory
        seconds = self.timeout if timeout is None else timeout
        address = memory.signal_address(self.rank, slot)
        memory.wait_word(address, at_least, source, seconds, f"signal {slot}")

    # ---- Order ----

    def fence(self) -> None:
        """Order this rank's puts and signals.

        Every rank sees those before the fence earlier than those after the fence.
        """
        self._memory.fence()

    def quiet(self) -> None:
        """Return when all puts and signals of this rank are complete."""
        self._memory.quiet()

    def barrier(self, channel: int = 0) -> None:
        """Wait until all ranks have called it; each rank then sees what the others wrote before.

        Threads or streams that synchronise independently of each other use different channels.
        """
        if not 0 <= channel < CHANNELS:
            raise UsageError(f"channel={channel}: channels are 0 to {CHANNELS - 1}")
        self._memory.barrier(channel, self.timeout)

    # ---- Statistics and end ----

    def stats(self) -> dict[str, Any]:
        """The backend, free memory, and how often this rank used each operation."""
        return {
            "backend": self.backend,
            "bytes": self.bytes,
            "free_bytes": self._allocator.free,
            "largest_gap_bytes": self._allocator.largest_gap,
            "allocations": len(self._alive),
            **self._memory.stats(),
        }

    def close(self) -> None:
        """Close the heap, on all ranks together. Safe to call twice."""
        if self.closed:
            return
        try:
            if self._memory.in_step:
                self._memory.agree("close()", self.timeout)
        finally:
            self.leave()

    def __enter__(self) -> "Heap":
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is None:
            self.close()
        else:  # the other ranks may never call close()
            self.leave()

    def leave(self) -> None:
        """Close the heap without the other ranks; ranks that wait for this rank get PeerLeft."""
        if self.closed:
            return
        self.closed = True
        memory = self._memory
        reason = "this heap is closed: make another, or close it later"
        self._memory = cast("HeapMemory", Released(reason))
        for each in self._alive.values():
            each.release(reason)
        self._alive.clear()
        memory.close()

    def _tensor(
        self, name: str, shape: int | Sequence[int], dtype: torch.dtype, zero: bool
    ) -> SymmetricTensor:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise UsageError(f"shape={sizes}: sizes must not be negative")
        bytes = torch.Size(sizes).numel() * dtype.itemsize
        offset = self._take(f"{name}({sizes}, {dtype})", bytes, zero)
        tensor = self._alive[offset] = SymmetricTensor(self, self._memory, offset, sizes, dtype)
        return tensor

    def _take(self, call: str, bytes: int, zero: bool) -> int:
        """The offset of `bytes` bytes, after checking that all ranks make the same call."""
        offset, full = -1, None
        try:
            offset = self._allocator.take(bytes)
        except UsageError as error:  # raised after the check that all ranks make the same call
            full = error
        try:
            if zero and full is None:
                self._memory.view(self.rank, offset, (bytes,), torch.uint8).zero_()
            self._memory.agree(f"{call} = {bytes} bytes at {offset}", self.timeout)
        except BaseException:
            if full is None:
                self._allocator.give(offset)
            raise
        if full is not None:
            raise full
        return offset

    def refuse_signal(self, slot: int, op: str = "set") -> NoReturn:
        """Raise the error for a wrong slot or operation of a signal."""
        if op not in ("set", "add"):
            raise UsageError(f"op={op!r}: a signal is 'set' or 'add'")
        raise UsageError(
            f"slot={slot}: the heap has {self.signals} signal slots: make it with signals="
            f"{slot + 1} or more"
        )


def _describe(what: HeapObject) -> str:
    if not isinstance(what, SymmetricTensor):
        return f"counters at {what.offset}"
    return f"tensor {tuple(what.shape)} {what.dtype} at {what.offset}"


def _heap_memory(
    group: dist.ProcessGroup,
    bytes: int,
    device: str | torch.device | None,
    backend: str,
    signals: int,
    timeout: float,
) -> "HeapMemory":
    """The memory of the requested backend, or of the first backend for the device."""
    kind, why = _device(group, device)
    fitting = available(kind)
    if backend == "auto":
        backend = next(iter(fitting))
    elif backend not in fitting:
        known = {**available("cpu"), **available("cuda")}
        if backend not in known:
            raise UsageError(f"backend={backend!r}: {did_you_mean(backend, ('auto', *known))}")
        raise UsageError(
            f"backend={backend!r} does not serve device {kind} ({why}): there "
            f"{'are' if len(fitting) > 1 else 'is'} {', '.join(fitting)}"
        )
    can, reason = fitting[backend]
    if not can:
        raise UsageError(f"backend={backend!r} is not available: {reason}")
    reason = f"{reason} ({kind}: {why})"
    if kind.type == "cpu":
        return cpu_heap.CpuMemory(group, bytes, signals, timeout, reason)
    from tutti.comm.symmetric.cuda_heap import CudaMemory

    return CudaMemory(group, bytes, kind, backend, signals, timeout, reason)


def _device(
    group: dist.ProcessGroup, device: str | torch.device | None
) -> tuple[torch.device, str]:
    """The device and the reason: the device of the group's tensors, unless one is given."""
    if device is not None:
        kind, why = torch.device(device), "asked for"
    elif "nccl" in str(dist.get_backend_config(group)) and torch.cuda.is_available():
        kind, why = torch.device("cuda"), "the group has NCCL"
    else:
        kind, why = torch.device("cpu"), "the group has no NCCL"
    if kind.type not in ("cpu", "cuda"):
        raise UsageError(f"device={device!r}: use cpu or cuda")
    if kind.type == "cuda" and kind.index is None and torch.cuda.is_available():
        kind = torch.device("cuda", torch.cuda.current_device())
    return kind, why


def available(device: str | torch.device = "cpu") -> dict[str, tuple[bool, str]]:
    """For each backend of a device, whether it can be used here, and why: {"shm": (True, "…")}.

    The backend for cpu is shm; those for cuda are cuda and nvshmem. Whether ranks share a host or a
    GPU is checked by `Heap`.
    """
    if torch.device(device).type == "cpu":
        return {"shm": cpu_heap.available()}
    cuda = _cuda_available()
    return {"cuda": cuda, "nvshmem": _nvshmem_available() if cuda[0] else cuda}


def _cuda_available() -> tuple[bool, str]:
    if not torch.cuda.is_available():
        return False, "torch sees no NVIDIA GPU"
    if torch.version.hip is not None:
        return False, "this torch is built for ROCm, the kernels of the heap are for NVIDIA GPUs"
    if importlib.util.find_spec("triton") is None:
        return False, "signals and atomics are Triton kernels: pip install triton"
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return False, f"torch {torch.__version__} has no symmetric memory: use 2.11 or newer"
    return True, "torch's symmetric memory on NVIDIA GPUs"


def _nvshmem_available() -> tuple[bool, str]:
    from torch.distributed import _symmetric_memory as symm_mem

    is_available = getattr(symm_mem, "is_nvshmem_available", None)
    if is_available is None or not is_available():
        return False, f"torch {torch.__version__} was built without NVSHMEM, or does not find it"
    return True, "torch's NVSHMEM, for ranks that have a GPU each"


class Allocator:
    """First-fit offsets in a block of `bytes`; allocations begin at multiples of `alignment`.

    Every rank makes the same calls on its own allocator, so offsets agree without communication.
    """

    def __init__(self, bytes: int, alignment: int = 64) -> None:
        self.bytes = bytes
        self.alignment = alignment
        self.taken: dict[int, int] = {}  # offset → bytes
        self._gaps = [(0, bytes)] if bytes else []  # (offset, bytes), by offset, never adjacent

    def take(self, wanted: int) -> int:
        """Allocate `wanted` bytes and return their offset.

        Even 0 bytes take `alignment` bytes, so that all offsets differ.
        """
        rounded = max(1, -(-wanted // self.alignment)) * self.alignment
        for index, (offset, gap) in enumerate(self._gaps):
            if gap < rounded:
                continue
            if gap == rounded:
                del self._gaps[index]
            else:
                self._gaps[index] = (offset + rounded, gap - rounded)
            self.taken[offset] = rounded
            return offset
        raise UsageError(
            f"the heap has no room for {wanted} bytes: of its {self.bytes} bytes {self.free} are "
            f"free, at most {self.largest_gap} contiguous: make the heap with bytes="
            f"{self.bytes + rounded} or more, or free tensors that are no longer needed"
        )

    def give(self, offset: int) -> None:
        """Free an allocation and merge it with the gaps on both sides."""
        length = self.taken.pop(offset)
        index = bisect_left(self._gaps, (offset, 0))
        if index < len(self._gaps) and self._gaps[index][0] == offset + length:
            length += self._gaps.pop(index)[1]
        if index > 0 and sum(self._gaps[index - 1]) == offset:
            index -= 1
            offset, before = self._gaps.pop(index)
            length += before
        self._gaps.insert(index, (offset, length))

    @property
    def free(self) -> int:
        """Bytes that are not taken."""
        return sum(length for _, length in self._gaps)

    @property
    def largest_gap(self) -> int:
        """The largest allocation that would fit now."""
        return max((length for _, length in self._gaps), default=0)
