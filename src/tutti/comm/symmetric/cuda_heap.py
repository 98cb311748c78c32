"""The memory of a heap on NVIDIA GPUs: one block of torch's symmetric memory per rank.

All calls are enqueued on the current stream and run in stream order. Memory order: after a put, a
kernel on the same stream stores the signal with a system-scope release. A wait for the signal is an
acquire. So work that is enqueued after the wait, on the same stream, sees the data of the put. Two
streams of one rank are ordered only if the caller orders them by CUDA events.

A wait runs on the GPU and cannot raise an exception. After its timeout, the wait sets a flag and
lets the stream continue. The next call on the heap raises Timeout, or PeerDied if the process of a
rank has ended.

Kernels that wait for each other must run at the same time. Ranks that share a GPU therefore need
MPS (`tutti run --ranks-per-gpu`). Without MPS, the GPU runs one rank at a time, in time slices of
milliseconds. CUDA loads a kernel at its first use, and loading may wait until all running kernels
have finished. If a running kernel waits for data that the new kernel sends, both kernels wait
forever. To prevent this, run the sending kernels once beforehand, or set CUDA_MODULE_LOADING=EAGER.
"""

import ctypes
import os
import socket
from typing import Any

import torch

from tutti.comm.shm.native import PeerDied
from tutti.comm.symmetric import cuda_kernels
from tutti.comm.symmetric.cuda_collectives import CudaCollectives
from tutti.comm.symmetric.heap import Heap
from tutti.comm.symmetric.heap_rendezvous import HeapRendezvous, Timeout, lost_peer
from tutti.comm.symmetric.symmetric_tensor import CHANNELS
from tutti.world.errors import UsageError

_ALLOW_SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_REMEMBERED_WAITS = 256  # the number of waits whose descriptions are kept for timeout errors


class CudaMemory:
    """GPU memory, with the same methods as CpuMemory. All ranks of a group create it together."""

    alignment = 256

    def __init__(self, heap: Heap, reason: str, device: torch.device, backend: str) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self.device, self.backend = device, backend
        self.bytes, self.timeout, signals = heap.bytes, heap.timeout, heap.signals
        self.rank, self.size = heap.rank, heap.size
        self.group_name = heap.group.group_name
        # The block of each rank: signals, then for every channel one arrival word per peer, then
        # this rank's own barrier count of each channel, then the data.
        self._arrivals_at = 8 * signals
        self._counts_at = self._arrivals_at + 8 * (CHANNELS + 1) * self.size
        end = self._counts_at + 8 * (CHANNELS + 1)
        self._data_at = -(-end // self.alignment) * self.alignment

        self._rendezvous = HeapRendezvous(heap.group, heap.timeout)
        with torch.cuda.device(device):
            # add() writes the previous value of a word here, and nothing reads it.
            self._ignored = torch.zeros(1, dtype=torch.int64, device=device)
            # The flag that a timed-out wait sets. It is in host memory, so that the host can read
            # it without waiting for the GPU.
            self._failed = torch.zeros(1, dtype=torch.int64, pin_memory=True)
            self._failed_word = ctypes.c_int64.from_address(self._failed.data_ptr())
            self._waits: dict[int, str] = {}  # the description of each wait, by its number
            self._wait_count = 0
            self._broken: str | None = None
            self._pids: list[int | None] = []  # the pid of each rank; None for other hosts
            ranks = self._exchange_rank_info(signals)
            boot = ranks[self.rank]["boot"]
            self._pids = [values["pid"] if values["boot"] == boot else None for values in ranks]
            gpus = [values["gpu"] for values in ranks]
            sharing = max(gpus.count(gpu) for gpu in gpus)  # largest number of ranks on one GPU
            if sharing > 1 and backend == "nvshmem":
                raise UsageError(
                    f"backend='nvshmem' crashes in torch if ranks share a GPU, but {sharing} ranks "
                    "share a GPU: use backend='cuda', or one GPU per rank"
                )
            _select_backend(symm_mem, backend, device)
            self.backend_stats = {"ranks_on_gpu": sharing}
            self.reason = reason + (f"; {sharing} ranks share a GPU" if sharing > 1 else "")
            # torch refuses ranks that share a GPU unless this variable allows it.
            allow_sharing = sharing > 1 and _ALLOW_SHARING not in os.environ
            if allow_sharing:
                os.environ[_ALLOW_SHARING] = "1"
            try:
                self._block = self._allocate(symm_mem, self._data_at + heap.bytes)
                self._handle: Any = symm_mem.rendezvous(self._block, self.group_name)
            finally:
                if allow_sharing:
                    del os.environ[_ALLOW_SHARING]
            self._bases = [int(pointer) for pointer in self._handle.buffer_ptrs]
            if 0 in self._bases:
                raise UsageError(
                    f"rank {self.rank} cannot access the memory of rank {self._bases.index(0)} "
                    f"directly: a heap needs GPUs with peer access (backend={backend!r})"
                )
            # The argument `bases` of cuda_kernels.stream_barrier.
            self._table = torch.tensor(self._bases, dtype=torch.int64, device=device)
            self.collectives = CudaCollectives(self)
            self.puts = self.put_bytes = self.gets = self.get_bytes = self.waits = self.barriers = 0
            # After this exchange, the blocks of all ranks are zeroed and mapped.
            self._rendezvous.exchange("ready")
            self.stream_barrier(CHANNELS, "the first barrier")
            self.quiet()

    def _exchange_rank_info(self, signals: int) -> list[dict[str, Any]]:
        """Compile the kernels, and return the information about all ranks."""
        failure = None
        try:
            self._compile_kernels()
        except Exception as error:
            failure = (
                f"the Triton kernels do not compile or run ({type(error).__name__}: {error}). "
                "Triton needs a C compiler"
            )
        properties = torch.cuda.get_device_properties(self.device)
        gpu = str(getattr(properties, "uuid", f"{socket.gethostname()}:{self.device}"))
        return self._rendezvous.exchange_rank_info(self.bytes, signals, failure, gpu=gpu)

    def _compile_kernels(self) -> None:
        """Compile each kernel and run it once on scratch memory, before other ranks wait for it."""
        table, count, arrival = 0, 8, 16
        scratch = torch.zeros(3, dtype=torch.int64, device=self.device)
        word = scratch.data_ptr()
        scratch[0] = word
        self._launch_barrier(word + table, 0, 1, arrival, count, 10.0, "a kernel test")
        self._launch_wait(word + arrival, 1, 10.0, "a kernel test")
        self.store(word, 1)
        self.add(word, 1)
        self.compare_swap(word, 2, 3)

    def _allocate(self, symm_mem: Any, bytes: int) -> torch.Tensor:
        """Return a zeroed block. If one rank cannot allocate its block, all ranks raise an error.

        Without this error, torch's rendezvous would wait for the failed rank forever.
        """
        failure = None
        try:
            block: torch.Tensor = symm_mem.empty(bytes, dtype=torch.uint8, device=self.device)
            block.zero_()
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            failure = str(error).partition("\n")[0]
        for rank, text in enumerate(self._rendezvous.exchange(failure)):
            if text is not None:
                raise UsageError(f"rank {rank} could not allocate {bytes} bytes on its GPU: {text}")
        return block

    # ---- Bytes ----

    def view(
        self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        offset += self._data_at
        count = torch.Size(shape).numel()
        if rank == self.rank:  # a view of the block itself, as torch's own operators require
            return self._block[offset : offset + count * dtype.itemsize].view(dtype).view(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        buffer: torch.Tensor = self._handle.get_buffer(
            rank, list(shape), dtype, storage_offset=offset // dtype.itemsize
        )
        return buffer

    def address(self, rank: int, offset: int) -> int:
        return self._bases[rank] + self._data_at + offset

    def put(self, to: int, offset: int, source: torch.Tensor, bytes: int) -> None:
        self.check()
        self.puts += 1
        self.put_bytes += bytes
        target = self.view(to, offset, tuple(source.shape), source.dtype)
        target.copy_(source.detach(), non_blocking=True)

    def get(self, source: int, offset: int, out: torch.Tensor, bytes: int) -> None:
        self.check()
        self.gets += 1
        self.get_bytes += bytes
        # If `out` is on the host, copy_() returns when the copy is complete.
        out.copy_(self.view(source, offset, tuple(out.shape), out.dtype))

    def put_signal(
        self, to: int, at: int, source: torch.Tensor, bytes: int, slot: int, value: int, add: int
    ) -> None:
        self.put(to, at, source, bytes)
        (self.add if add else self.store)(self.signal_address(to, slot), value)

    # ---- Words: a call that returns a number waits for the stream ----

    def signal_address(self, rank: int, slot: int) -> int:
        return self._bases[rank] + 8 * slot

    def load(self, address: int, /) -> int:
        return self.fetch_add(address, 0)

    def store(self, address: int, value: int, /) -> None:
        self.check()
        self._launch(cuda_kernels.set_word, address, _signed(value))

    def add(self, address: int, value: int, /) -> None:
        self.check()
        answer = self._ignored.data_ptr()
        self._launch(cuda_kernels.add_to_word, address, _signed(value), answer)

    def fetch_add(self, address: int, value: int, /) -> int:
        before = torch.empty_like(self._ignored)
        self._launch(cuda_kernels.add_to_word, address, _signed(value), before.data_ptr())
        return self._result(before)

    def compare_swap(self, address: int, expected: int, desired: int, /) -> int:
        before = torch.empty_like(self._ignored)
        numbers = (_signed(expected), _signed(desired))
        self._launch(cuda_kernels.swap_word, address, *numbers, before.data_ptr())
        return self._result(before)

    def wait_word(
        self, address: int, at_least: int, source: int | None, timeout: float, what: str
    ) -> None:
        self.check()
        self.waits += 1
        sender = "" if source is None else f" from rank {source}"
        self._launch_wait(address, at_least, timeout, f"{what}{sender} to reach {at_least}")

    # ---- Order and barriers ----

    def fence(self) -> None:
        """Do nothing: streams keep their order, and every signal is a system-scope release."""

    def quiet(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()
        self.check()

    def barrier(self, channel: int) -> None:
        self.check()
        self.barriers += 1
        self.stream_barrier(channel, "a barrier")

    def stream_barrier(self, channel: int, what: str) -> None:
        """Enqueue a barrier between the current streams of all ranks.

        Channels 0 to CHANNELS - 1 are for callers of `barrier`. Collectives use channel CHANNELS.
        """
        arrivals = self._arrivals_at + 8 * channel * self.size
        count = self._counts_at + 8 * channel
        words = (self._table.data_ptr(), self.rank, self.size, arrivals, count)
        self._launch_barrier(*words, self.timeout, what)

    def agree(self, call: str) -> None:
        # Queued work on the stream may use memory that the caller frees or reuses after this call.
        self.quiet()
        HeapRendezvous.check_same_calls(self._rendezvous.exchange(call))

    @property
    def usable(self) -> bool:
        """Whether all barriers so far completed."""
        torch.cuda.synchronize(self.device)
        return self._broken is None and self._failed_word.value == 0

    def check(self) -> None:
        """Raise an error if an earlier wait on the GPU has timed out."""
        if self._broken is not None:
            raise UsageError(
                f"this heap is unusable after an earlier error ({self._broken}). Close it and "
                "create another heap"
            )
        number = self._failed_word.value
        if number == 0:
            return
        self._failed_word.value = 0
        what = self._waits.get(number, "a signal or a barrier")
        for rank, pid in enumerate(self._pids):
            if pid is not None and not os.path.exists(f"/proc/{pid}"):
                self._broken = f"rank {rank} died"
                raise lost_peer(PeerDied, rank, what)
        if "all ranks" in what:
            self._broken = f"rank {self.rank} waited {what}"
        raise Timeout(f"rank {self.rank} waited {what}")

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        del self.collectives, self._handle, self._block

    # ---- Kernel launches ----

    def _launch_wait(self, address: int, at_least: int, timeout: float, what: str) -> None:
        limit, failed = int(timeout * 1e9), self._failed.data_ptr()
        number = self._wait_number(f"{timeout:g} s for {what}")
        self._launch(cuda_kernels.wait_for_word, address, _signed(at_least), limit, failed, number)

    def _launch_barrier(
        self, table: int, rank: int, size: int, arrivals: int, count: int, timeout: float, what: str
    ) -> None:
        """Launch cuda_kernels.stream_barrier, which documents the arguments."""
        limit, failed = int(timeout * 1e9), self._failed.data_ptr()
        number = self._wait_number(f"{timeout:g} s for all ranks in {what}")
        words = (table, rank, size, arrivals, count)
        self._launch(cuda_kernels.stream_barrier, *words, limit, failed, number)

    def _result(self, word: torch.Tensor) -> int:
        value = int(word.item())
        self.check()
        return value % (1 << 64)

    def _wait_number(self, what: str) -> int:
        self._wait_count += 1
        self._waits[self._wait_count] = what
        self._waits.pop(self._wait_count - _REMEMBERED_WAITS, None)
        return self._wait_count

    def _launch(self, kernel: object, *arguments: int) -> None:
        with torch.cuda.device(self.device):
            kernel[(1,)](*arguments, num_warps=cuda_kernels.WARPS)  # type: ignore[index]


def _signed(value: int) -> int:
    """Return the signed number with the same 64 bits, because the kernels' words are signed."""
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value


def _select_backend(symm_mem: Any, backend: str, device: torch.device) -> None:
    """Select torch's symmetric-memory backend. torch allows this only before the first use."""
    wanted = {"cuda": "CUDA", "nvshmem": "NVSHMEM"}[backend]
    now = symm_mem.get_backend(device) if hasattr(symm_mem, "get_backend") else None
    if now == wanted or (now is None and wanted == "CUDA"):  # torch's default
        return
    try:
        symm_mem.set_backend(wanted)
    except RuntimeError as error:
        raise UsageError(
            f"backend={backend!r}: this process already uses torch's {now} symmetric memory, and "
            f"torch allows only one backend. Create all heaps with the same backend ({error})"
        ) from None
