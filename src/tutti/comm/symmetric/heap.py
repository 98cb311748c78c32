"""Heap: memory that every rank of a group can read and write at the same offsets."""

import importlib.util
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch
import torch.distributed as dist

from tutti.comm.shm import native
from tutti.comm.symmetric.symmetric_tensor import CHANNELS, Counters, Released, SymmetricTensor
from tutti.world.errors import UsageError, checked_seconds, did_you_mean

if TYPE_CHECKING:
    from tutti.comm.symmetric.symmetric_tensor import HeapMemory, HeapObject


class Heap:
    """A block of `bytes` bytes on each rank of `group`. Every rank can read and write all blocks.

        with symmetric.Heap(bytes=1 << 20) as heap:
            t = heap.zeros(1024)
            t.put_signal(torch.ones(1024), to=(heap.rank + 1) % heap.size)
            heap.wait()                      # the previous rank has put its ones into t.local
            print(t.local.sum())

    These calls are collective, so all ranks must make them in the same order: creating and closing
    the heap, `empty`, `zeros`, `counters`, `free`, `barrier`. If the calls differ between ranks,
    they raise RanksDiffer. All other calls are one-sided: the peer does not take part. A heap that
    is not closed exists until its process ends. Its memory is then freed.

    `group` is the group of ranks, by default all ranks. `device` is "cpu" or "cuda". The default is
    "cuda" if the group has NCCL, and "cpu" otherwise. `backend` is "shm" (shared memory on one
    host, for "cpu"), "cuda" (torch's symmetric memory), "nvshmem" (torch's NVSHMEM) or "auto" (the
    first backend for the device). The attribute `reason` explains the choice. `signals` is the
    number of signal slots of each rank. A signal slot is a 64-bit word. Other ranks set it to
    announce data, and its owner waits for a value. `timeout` is the default timeout of waits, in
    seconds.

    On the CPU, calls take effect immediately. On CUDA, calls are enqueued on the current stream and
    run in stream order. Calls that return a number wait for the stream.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        bytes: int = 64 << 20,
        device: str | torch.device | None = None,
        backend: Literal["auto", "shm", "cuda", "nvshmem"] = "auto",
        signals: int = 1024,
        timeout: float = 30.0,
    ) -> None:
        if not dist.is_initialized():
            raise UsageError("a heap needs a process group: call tutti.init() first")
        self.group = cast(dist.ProcessGroup, dist.group.WORLD if group is None else group)
        if bytes < 1 or signals < 1:
            raise UsageError(f"bytes and signals must be at least 1, got {bytes} and {signals}")
        self.timeout = checked_seconds("timeout", timeout)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.bytes, self.signals = bytes, signals
        memory = self._create_memory(device, backend)
        self.memory: HeapMemory = memory
        self.device, self.backend, self.reason = memory.device, memory.backend, memory.reason
        self.closed = False
        self._allocator = Allocator(bytes, memory.alignment)
        self._objects: dict[int, HeapObject] = {}  # tensors and counters by offset

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"Heap({self.bytes} bytes on {self.backend}, rank {self.rank} of {self.size}{state})"

    # ---- Allocation: collective ----

    def empty(
        self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32
    ) -> SymmetricTensor:
        """Create an uninitialized tensor on every rank, and return this rank's tensor."""
        return self._tensor("empty", shape, dtype, zero=False)

    def zeros(
        self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32
    ) -> SymmetricTensor:
        """Like `empty`, but all ranks' tensors are filled with zeros when the call returns."""
        return self._tensor("zeros", shape, dtype, zero=True)

    def counters(self, count: int, *, spacing: int = 64) -> Counters:
        """Create zeroed 64-bit counters on every rank, `spacing` bytes apart, and return them.

        With the default spacing of 64, each counter has its own cache line. This is faster if many
        ranks change the counters.
        """
        if count < 1 or spacing < 8 or spacing % 8:
            raise UsageError(
                f"counters(count={count}, spacing={spacing}): count must be at least 1, and "
                "spacing must be a multiple of 8 bytes"
            )
        offset = self._allocate(f"counters({count}, spacing={spacing})", count * spacing, zero=True)
        counters = self._objects[offset] = Counters(self, offset, count, spacing)
        return counters

    def free(self, target: "HeapObject") -> None:
        """Free a tensor or counters on all ranks (collective). Existing views become invalid."""
        name = f"counters at {target.offset}"
        if isinstance(target, SymmetricTensor):
            name = f"tensor {tuple(target.shape)} {target.dtype} at {target.offset}"
        self.memory.agree(f"free({name})")
        if self._objects.pop(target.offset, None) is not target:
            raise UsageError(f"{name} does not belong to this heap, or was already freed")
        self._allocator.free(target.offset)
        target.release(f"{name} was freed")

    # ---- Signals ----

    def signal(
        self, to: int, slot: int = 0, value: int = 1, op: Literal["set", "add"] = "set"
    ) -> None:
        """Set signal `slot` of rank `to` to `value`, or add `value` to it (release).

        When a wait of rank `to` for this signal ends, rank `to` sees all earlier puts of this rank.
        """
        if not 0 <= to < self.size:
            self.refuse_rank(to)
        if not 0 <= slot < self.signals or (op != "set" and op != "add"):
            self.refuse_signal(slot, op)
        address = self.memory.signal_address(to, slot)
        if op == "add":
            self.memory.add(address, value)
        else:
            self.memory.store(address, value)

    def read_signal(self, slot: int = 0) -> int:
        """Return the current value of one of this rank's slots (acquire)."""
        if not 0 <= slot < self.signals:
            self.refuse_signal(slot)
        return self.memory.load(self.memory.signal_address(self.rank, slot))

    def wait(
        self,
        slot: int = 0,
        at_least: int = 1,
        source: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Wait until signal `slot` of this rank is at least `at_least`.

        After the wait, this rank sees all puts that the sender made before its signal. `source` is
        the rank that is expected to signal, or None for any rank. Raises Timeout after `timeout`
        seconds. Raises PeerDied or PeerLeft if rank `source` dies or closes the heap. If `source`
        is None, this applies to any rank. A wait does not reset the slot: use increasing values, or
        reset the slot with `heap.signal(heap.rank, slot, 0)`. On CUDA, the current stream waits
        instead of the host, and a later call on the heap raises the error.
        """
        if not 0 <= slot < self.signals:
            self.refuse_signal(slot)
        if at_least < 0:
            raise UsageError(f"at_least must be 0 or more, got {at_least}")
        memory = self.memory
        seconds = self.timeout if timeout is None else timeout
        address = memory.signal_address(self.rank, slot)
        memory.wait_word(address, at_least, source, seconds, f"signal {slot}")

    # ---- Order ----

    def fence(self) -> None:
        """Make earlier puts and signals of this rank visible before later puts and signals."""
        self.memory.fence()

    def quiet(self) -> None:
        """Return when all puts and signals of this rank are complete."""
        self.memory.quiet()

    def barrier(self, channel: int = 0) -> None:
        """Wait until all ranks have called `barrier`. Then every rank sees all earlier writes.

        Threads or streams that synchronize independently of each other must use different channels.
        """
        if not 0 <= channel < CHANNELS:
            raise UsageError(f"channel must be 0 to {CHANNELS - 1}, got {channel}")
        self.memory.barrier(channel)

    # ---- Statistics and end ----

    def stats(self) -> dict[str, Any]:
        """Return the backend, the free memory, and the number of calls of each operation."""
        memory = self.memory
        counts = ("puts", "put_bytes", "gets", "get_bytes", "waits", "barriers")
        return {
            "backend": self.backend,
            "bytes": self.bytes,
            "free_bytes": self._allocator.free_bytes,
            "largest_gap_bytes": self._allocator.largest_gap,
            "allocations": len(self._objects),
            **{name: getattr(memory, name) for name in counts},
            "collectives": memory.collectives.calls,
            **memory.backend_stats,
        }

    def close(self) -> None:
        """Close the heap on all ranks (collective). A second call does nothing."""
        if self.closed:
            return
        try:
            if self.memory.usable:
                self.memory.agree("close()")
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
        """Close the heap on this rank only. Ranks that wait for this rank raise PeerLeft."""
        if self.closed:
            return
        self.closed = True
        memory = self.memory
        reason = "this heap is closed: create another heap, or close this heap after its last use"
        self.memory = cast("HeapMemory", Released(reason))
        for target in self._objects.values():
            target.release(reason)
        self._objects.clear()
        memory.close()

    def _tensor(
        self, name: str, shape: int | Sequence[int], dtype: torch.dtype, zero: bool
    ) -> SymmetricTensor:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise UsageError(f"the sizes of a shape must not be negative, got {sizes}")
        bytes = torch.Size(sizes).numel() * dtype.itemsize
        offset = self._allocate(f"{name}({sizes}, {dtype})", bytes, zero)
        tensor = self._objects[offset] = SymmetricTensor(self, offset, sizes, dtype)
        return tensor

    def _allocate(self, call: str, bytes: int, zero: bool) -> int:
        """Allocate memory and return its offset. Raise RanksDiffer if the ranks' calls differ."""
        offset, full = -1, None
        try:
            offset = self._allocator.allocate(bytes)
        except UsageError as error:  # raised below, after the ranks have compared their calls
            full = error
        try:
            if zero and full is None:
                self.memory.view(self.rank, offset, (bytes,), torch.uint8).zero_()
            self.memory.agree(f"{call} = {bytes} bytes at {offset}")
        except BaseException:
            if full is None:
                self._allocator.free(offset)
            raise
        if full is not None:
            raise full
        return offset

    def refuse_rank(self, rank: int) -> NoReturn:
        """Raise the error for a rank that the heap does not have."""
        raise UsageError(f"rank {rank} is not in the heap: the heap has ranks 0 to {self.size - 1}")

    def refuse_signal(self, slot: int, op: str = "set") -> NoReturn:
        """Raise the error for a signal with a wrong slot or operation."""
        if op not in ("set", "add"):
            raise UsageError(f"op must be 'set' or 'add', got {op!r}")
        raise UsageError(
            f"slot={slot} does not exist: the heap has signal slots 0 to {self.signals - 1}. "
            f"Create the heap with signals={slot + 1} or more"
        )

    def _create_memory(self, device: str | torch.device | None, backend: str) -> "HeapMemory":
        """Create the memory with the requested backend, or with the device's first backend."""
        if device is not None:
            kind, why = torch.device(device), "requested"
        elif "nccl" in str(dist.get_backend_config(self.group)) and torch.cuda.is_available():
            kind, why = torch.device("cuda"), "the group has NCCL"
        else:
            kind, why = torch.device("cpu"), "the group has no NCCL"
        if kind.type not in ("cpu", "cuda"):
            raise UsageError(f"device must be cpu or cuda, got {device!r}")
        if kind.type == "cuda" and kind.index is None and torch.cuda.is_available():
            kind = torch.device("cuda", torch.cuda.current_device())
        backends = available(kind)
        if backend == "auto":
            backend = next(iter(backends))
        elif backend not in backends:
            known = ("auto", *available("cpu"), *available("cuda"))
            if backend not in known:
                raise UsageError(f"backend={backend!r}: {did_you_mean(backend, known)}")
            raise UsageError(
                f"backend={backend!r} does not support device {kind} ({why}): use "
                f"{' or '.join(backends)}"
            )
        can_be_used, reason = backends[backend]
        if not can_be_used:
            raise UsageError(f"backend={backend!r} is not available: {reason}")
        reason = f"{reason} ({kind}: {why})"
        if kind.type == "cpu":
            from tutti.comm.symmetric.cpu_heap import CpuMemory

            return CpuMemory(self, reason)
        from tutti.comm.symmetric.cuda_heap import CudaMemory

        return CudaMemory(self, reason, kind, backend)


def available(device: str | torch.device = "cpu") -> dict[str, tuple[bool, str]]:
    """Return {backend: (can be used, reason)} for a device, such as {"shm": (True, "…")}.

    The backend for "cpu" is "shm". The backends for "cuda" are "cuda" and "nvshmem". This function
    does not check whether ranks share a host or a GPU. `Heap` checks this.
    """
    if torch.device(device).type == "cpu":
        try:
            native.core()
        except (ImportError, UsageError) as error:
            return {"shm": (False, str(error))}
        return {"shm": (True, "shared memory between the ranks of one host")}
    cuda = nvshmem = _cuda_available()
    if cuda[0]:
        from torch.distributed import _symmetric_memory as symm_mem

        is_available = getattr(symm_mem, "is_nvshmem_available", None)
        if is_available is not None and is_available():
            nvshmem = True, "torch's NVSHMEM, for ranks that have a GPU each"
        else:
            nvshmem = (
                False,
                f"torch {torch.__version__} was built without NVSHMEM or cannot find it",
            )
    return {"cuda": cuda, "nvshmem": nvshmem}


def _cuda_available() -> tuple[bool, str]:
    if not torch.cuda.is_available():
        return False, "torch finds no NVIDIA GPU"
    if torch.version.hip is not None:
        return False, "this torch is built for ROCm, but the heap's kernels need an NVIDIA GPU"
    if importlib.util.find_spec("triton") is None:
        return False, "Triton is missing (signals and atomics are Triton kernels): install triton"
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return False, f"torch {torch.__version__} has no symmetric memory: use 2.11 or newer"
    return True, "torch's symmetric memory on NVIDIA GPUs"


class Allocator:
    """A first-fit allocator for a block of `bytes` bytes. Offsets are multiples of `alignment`.

    Every rank makes the same calls on its own allocator, so the offsets are the same on all ranks
    without communication.
    """

    def __init__(self, bytes: int, alignment: int = 64) -> None:
        self.bytes = bytes
        self.alignment = alignment
        self.taken: dict[int, int] = {}  # keys: offsets; values: sizes in bytes
        self._gaps = [(0, bytes)] if bytes else []  # (offset, bytes), sorted, never adjacent

    def rounded(self, bytes: int) -> int:
        """Return `bytes`, rounded up to a multiple of the alignment.

        The result is never 0, so that every allocation has its own offset.
        """
        return max(1, -(-bytes // self.alignment)) * self.alignment

    def allocate(self, wanted: int) -> int:
        """Allocate `wanted` bytes and return their offset."""
        rounded = self.rounded(wanted)
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
            f"the heap has no room for {wanted} bytes: of its {self.bytes} bytes, "
            f"{self.free_bytes} are free, and the largest free block has {self.largest_gap}. "
            f"Create the heap with bytes={self.bytes + rounded} or more, or free other tensors"
        )

    def free(self, offset: int) -> None:
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
    def free_bytes(self) -> int:
        return sum(length for _, length in self._gaps)

    @property
    def largest_gap(self) -> int:
        """The size of the largest allocation that would fit now."""
        return max((length for _, length in self._gaps), default=0)
