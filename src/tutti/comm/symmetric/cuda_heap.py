"""The memory of a heap on NVIDIA GPUs: one block of torch's symmetric memory per rank.

All calls are enqueued on the current stream and run in stream order. Memory order: a signal is
stored with release at system scope by a kernel that follows the put on its stream, and awaited with
acquire, so work that follows the wait on the waiting stream sees the data that was put. Streams of
one rank are ordered only by events.

A wait runs on the GPU and cannot raise. After its timeout it sets a flag and lets the stream
continue; the next call on the heap raises Timeout, or PeerDied if the process of a rank has ended.
Kernels that wait for each other must run at the same time: ranks that share a GPU need MPS (`tutti
run --ranks-per-gpu`), because without MPS the GPU runs one rank at a time, for milliseconds each.
CUDA loads a kernel when it is first used, and loading may wait for all running kernels. If a stream
waits for data that another stream has not sent yet, this may block the sender: run the sending
kernels once beforehand, or set CUDA_MODULE_LOADING=EAGER.
"""

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.shm.native import PeerDied
from tutti.comm.symmetric import cuda_kernels
from tutti.comm.symmetric.cuda_collectives import CudaCollectives
from tutti.comm.symmetric.heap_rendezvous import (
    HeapRendezvous,
    Timeout,
    lost_peer,
    refuse_different_calls,
    refuse_different_heaps,
)
from tutti.comm.symmetric.symmetric_tensor import CHANNELS
from tutti.world.errors import UsageError

_ALLOW_SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_REMEMBERED_WAITS = 256  # the number of waits whose descriptions are kept for timeout errors


class CudaMemory:
    """The same methods as CpuMemory. Created on all ranks of a group together."""

    alignment = 256

    def __init__(
        self,
        group: dist.ProcessGroup,
        bytes: int,
        device: torch.device,
        backend: str,
        signals: int,
        timeout: float,
        reason: str,
    ) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self.backend = backend
        self.bytes = bytes
        self.device = device
        self.signals = signals
        self.rank = group.rank()
        self.size = group.size()
        self.group_name = group.group_name
        # The block of each rank: signals, then for every channel one arrival word per peer, then
        # this rank's own barrier count of each channel, then the data.
        self._arrivals_at = 8 * signals
        self._counts_at = self._arrivals_at + 8 * (CHANNELS + 1) * self.size
        end = self._counts_at + 8 * (CHANNELS + 1)
        self._data_at = -(-end // self.alignment) * self.alignment

        self._rendezvous = HeapRendezvous(group, "symmetric.Heap", timeout)
        with torch.cuda.device(device):
            self._words = Words(self.rank, device)
            ranks = self._introduce(bytes, signals)
            here = ranks[self.rank]["boot"]
            self._words.pids = [each["pid"] if each["boot"] == here else None for each in ranks]
            self.sharing = max(sum(r["gpu"] == each["gpu"] for r in ranks) for each in ranks)
            if self.sharing > 1 and backend == "nvshmem":
                raise UsageError(
                    f"backend='nvshmem': {self.sharing} ranks share a GPU, where torch's NVSHMEM "
                    "crashes: use backend='cuda', or a GPU per rank"
                )
            _select_backend(symm_mem, backend, device)
            shared = f"; {self.sharing} ranks share a GPU" if self.sharing > 1 else ""
            self.reason = reason + shared
            with _sharing_allowed(self.sharing > 1):
                self._block = self._allocate(symm_mem, self._data_at + bytes)
                self._handle: Any = symm_mem.rendezvous(self._block, group.group_name)
            self._bases = [int(pointer) for pointer in self._handle.buffer_ptrs]
            if 0 in self._bases:
                raise UsageError(
                    f"rank {self.rank} cannot reach the memory of rank {self._bases.index(0)} "
                    f"directly: a heap needs GPUs that are linked (backend={backend!r})"
                )
            self._table = torch.tensor(self._bases, dtype=torch.int64, device=device)
            self.collectives = CudaCollectives(self)
            self.puts = self.put_bytes = self.gets = self.get_bytes = 0
            self.waits = self.barriers = 0
            # When all ranks have exchanged this, all blocks are zeroed and mapped.
            self._rendezvous.exchange("ready")
            self.stream_barrier(CHANNELS, timeout, "the first barrier")
            self.quiet()

    def _introduce(self, bytes: int, signals: int) -> list[dict[str, Any]]:
        """Compile the kernels, and exchange parameters with the other ranks."""
        failure = None
        try:
            self._words.compile()
        except Exception as error:
            failure = (
                f"its kernels do not compile or run ({type(error).__name__}: {error}): Triton "
                "needs a C compiler"
            )
        properties = torch.cuda.get_device_properties(self.device)
        gpu = str(getattr(properties, "uuid", f"{socket.gethostname()}:{self.device}"))
        ranks = self._rendezvous.introduce([bytes, signals], failure, {"gpu": gpu})
        refuse_different_heaps(ranks)
        return ranks

    def _allocate(self, symm_mem: Any, bytes: int) -> torch.Tensor:
        """Allocate a zeroed block; raises on all ranks if one rank cannot allocate its block.

        Otherwise torch's rendezvous would wait for that rank forever.
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
        return self._view(rank, self._data_at + offset, shape, dtype)

    def _view(
        self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
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
        # A copy to the host is complete on return, as everywhere in torch.
        out.copy_(self.view(source, offset, tuple(out.shape), out.dtype))

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
        self.put(to, offset, source, bytes)
        signal = self.signal_address(to, slot)
        (self._words.add if add else self._words.store)(signal, value)

    # ---- Words ----

    def signal_address(self, rank: int, slot: int) -> int:
        return self._bases[rank] + 8 * slot

    def load(self, address: int, /) -> int:
        return self._words.load(address)

    def store(self, address: int, value: int, /) -> None:
        self.check()
        self._words.store(address, value)

    def add(self, address: int, value: int, /) -> None:
        self.check()
        self._words.add(address, value)

    def fetch_add(self, address: int, value: int, /) -> int:
        return self._words.fetch_add(address, value)

    def compare_swap(self, address: int, expected: int, desired: int, /) -> int:
        return self._words.compare_swap(address, expected, desired)

    def wait_word(
        self, address: int, at_least: int, source: int | None, timeout: float, what: str
    ) -> None:
        self.check()
        self.waits += 1
        sender = "" if source is None else f" from rank {source}"
        self._words.wait(address, at_least, timeout, f"{what}{sender} to reach {at_least}")

    # ---- Order and barriers ----

    def fence(self) -> None:
        """Nothing to do: a stream keeps its order, and every signal is a system-scope release."""

    def quiet(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()
        self.check()

    def barrier(self, channel: int, timeout: float) -> None:
        self.check()
        self.barriers += 1
        self.stream_barrier(channel, timeout, "a barrier")

    def stream_barrier(self, channel: int, timeout: float, what: str) -> None:
        """A barrier between the current streams of all ranks; collectives use channel CHANNELS."""
        arrivals = self._arrivals_at + 8 * channel * self.size
        count = self._counts_at + 8 * channel
        table = self._table.data_ptr()
        self._words.stream_barrier(table, self.rank, self.size, arrivals, count, timeout, what)

    def agree(self, call: str, timeout: float) -> None:
        # The stream may still use memory that is freed or reused.
        self.quiet()
        self._rendezvous.timeout = timeout
        refuse_different_calls(self._rendezvous.exchange(call))

    @property
    def in_step(self) -> bool:
        torch.cuda.synchronize(self.device)
        return self._words.in_step

    @property
    def check(self) -> Callable[[], None]:
        """Raises the error of an earlier wait on the GPU."""
        return self._words.check

    # ---- Statistics and end ----

    def stats(self) -> dict[str, int]:
        names = ("puts", "put_bytes", "gets", "get_bytes", "waits", "barriers")
        return {name: getattr(self, name) for name in names} | {
            "collectives": self.collectives.calls,
            "ranks_on_gpu": self.sharing,
        }

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        del self.collectives, self._handle, self._block


def _select_backend(symm_mem: Any, backend: str, device: torch.device) -> None:
    """Select one of torch's backends, which is possible only once, before the first use."""
    wanted = {"cuda": "CUDA", "nvshmem": "NVSHMEM"}[backend]
    now = symm_mem.get_backend(device) if hasattr(symm_mem, "get_backend") else None
    if now == wanted or (now is None and wanted == "CUDA"):  # torch's default
        return
    try:
        symm_mem.set_backend(wanted)
    except RuntimeError as error:
        raise UsageError(
            f"backend={backend!r}: this process already uses torch's {now} symmetric memory, and "
            f"torch allows only one: make all heaps with the same backend ({error})"
        ) from None


@contextlib.contextmanager
def _sharing_allowed(sharing: bool) -> Iterator[None]:
    """torch refuses ranks that share a GPU unless this variable allows it."""
    before = os.environ.get(_ALLOW_SHARING)
    if sharing:
        os.environ[_ALLOW_SHARING] = "1"
    try:
        yield
    finally:
        if sharing and before is None:
            del os.environ[_ALLOW_SHARING]


class Words:
    """64-bit words in GPU memory: launches the kernels, and raises the errors of failed waits."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._ignored = torch.zeros(1, dtype=torch.int64, device=device)
        # In host memory, so that the host can read it without waiting for the GPU.
        self._failed = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._failed_word = ctypes.c_int64.from_address(self._failed.data_ptr())
        self._waits: dict[int, str] = {}
        self._tickets = 0
        self._broken: str | None = None
        self.pids: list[int | None] = []  # of each rank; None for ranks on other hosts

    def compile(self) -> None:
        """Compile and run each kernel once, on scratch memory, before other ranks wait for it."""
        table, count, arrival = 0, 8, 16
        scratch = torch.zeros(3, dtype=torch.int64, device=self._device)
        word = scratch.data_ptr()
        scratch[0] = word
        self.stream_barrier(word + table, 0, 1, arrival, count, 10.0, "itself")
        self.wait(word + arrival, 1, 10.0, "itself")
        self.store(word, 1)
        self.add(word, 1)
        self.compare_swap(word, 2, 3)

    def load(self, address: int, /) -> int:
        """The current value (acquire); waits for the stream."""
        return self.fetch_add(address, 0)

    def store(self, address: int, value: int, /) -> None:
        """Set the word (release)."""
        self._launch(cuda_kernels.set_word, address, _signed(value))

    def add(self, address: int, value: int, /) -> None:
        """Add to the word (release)."""
        answer = self._ignored.data_ptr()
        self._launch(cuda_kernels.add_to_word, address, _signed(value), answer)

    def fetch_add(self, address: int, value: int, /) -> int:
        """Add; returns the value before, and waits for the stream."""
        before = torch.empty_like(self._ignored)
        self._launch(cuda_kernels.add_to_word, address, _signed(value), before.data_ptr())
        return self._result(before)

    def compare_swap(self, address: int, expected: int, desired: int, /) -> int:
        """Store `desired` if the value is `expected`; returns the value before."""
        before = torch.empty_like(self._ignored)
        numbers = (_signed(expected), _signed(desired))
        self._launch(cuda_kernels.swap_word, address, *numbers, before.data_ptr())
        return self._result(before)

    def wait(self, address: int, at_least: int, timeout: float, what: str) -> None:
        """Let the stream wait until the word is at least `at_least` (acquire)."""
        self._launch(
            cuda_kernels.wait_for_word,
            address,
            _signed(at_least),
            int(timeout * 1e9),
            self._failed.data_ptr(),
            self._ticket(f"{timeout:g} s for {what}"),
        )

    def stream_barrier(
        self,
        table: int,
        rank: int,
        size: int,
        arrivals: int,
        count: int,
        timeout: float,
        what: str,
    ) -> None:
        """A barrier between the streams of all ranks; cuda_kernels.stream_barrier has details."""
        limit, failed = int(timeout * 1e9), self._failed.data_ptr()
        ticket = self._ticket(f"{timeout:g} s for all ranks in {what}")
        words = (table, rank, size, arrivals, count)
        self._launch(cuda_kernels.stream_barrier, *words, limit, failed, ticket)

    @property
    def in_step(self) -> bool:
        """Whether all barriers so far completed, as far as is known."""
        return self._broken is None and self._failed_word.value == 0

    def check(self) -> None:
        """Raise the error of an earlier wait on the GPU, if one timed out."""
        if self._broken is not None:
            raise UsageError(
                f"this heap is out of step since an earlier error ({self._broken}): close it and "
                "make another"
            )
        ticket = self._failed_word.value
        if ticket == 0:
            return
        self._failed_word.value = 0
        what = self._waits.get(ticket, "a signal or a barrier")
        for rank, pid in enumerate(self.pids):
            if pid is not None and not _is_running(pid):
                self._broken = f"rank {rank} died"
                raise lost_peer(PeerDied, rank, what)
        if "all ranks" in what:
            self._broken = f"rank {self._rank} waited {what}"
        raise Timeout(f"rank {self._rank} waited {what}")

    def _result(self, word: torch.Tensor) -> int:
        value = int(word.item())
        self.check()
        return value % (1 << 64)

    def _ticket(self, what: str) -> int:
        self._tickets += 1
        self._waits[self._tickets] = what
        self._waits.pop(self._tickets - _REMEMBERED_WAITS, None)
        return self._tickets

    def _launch(self, kernel: object, *arguments: int) -> None:
        with torch.cuda.device(self._device):
            kernel[(1,)](*arguments, num_warps=cuda_kernels.WARPS)  # type: ignore[index]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process, but running
        pass
    return True


def _signed(value: int) -> int:
    """The signed number with the same 64 bits: the kernels' words are signed."""
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value
