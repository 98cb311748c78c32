"""The base class of all structures: collective creation and close, waits, tensor checks.

The compiled part of the structures is declared in shm/core/structures.h.
"""

import time
from collections.abc import Callable
from typing import Any, NoReturn, Self, cast

import torch

from tutti.comm.shm import native
from tutti.comm.shm.native import BUSY, OVERTAKEN, PeerDied
from tutti.comm.symmetric.cpu_collectives import pointers
from tutti.comm.symmetric.cpu_heap import SLICE_SECONDS, CpuMemory
from tutti.comm.symmetric.heap import Heap
from tutti.comm.symmetric.heap_rendezvous import Timeout
from tutti.comm.symmetric.symmetric_tensor import SymmetricTensor
from tutti.world.errors import UsageError

_SUSPICIOUS_SECONDS = 0.02  # after this time, check whether the writer of a value has died
# The C core's codes of the dtypes that it can add atomically.
_ADDABLE = {
    torch.float64: native.F64,
    torch.float32: native.F32,
    torch.int64: native.I64,
    torch.int32: native.I32,
}


def addable(dtype: torch.dtype, call: str) -> int:
    """Return the C core's code of a dtype. Raises UsageError if it cannot be added atomically."""
    code = _ADDABLE.get(dtype)
    if code is None:
        names = ", ".join(str(known).removeprefix("torch.") for known in _ADDABLE)
        raise UsageError(f"{call} does not support {dtype}: use {names}")
    return code


class Structure:
    """A data structure in a heap. All ranks create and close it. Reads and writes are one-sided.

    A `with` block closes the structure at its end. After an error in the block, only this rank's
    part is closed, because the other ranks may never call close(). The memory is then freed when
    the heap is closed.
    """

    dtype: torch.dtype

    def __init__(self, heap: Heap, cpu_only: bool = False) -> None:
        self._on_cpu = heap.device.type == "cpu"  # computing this in each call would take 0.4 µs
        if cpu_only and not self._on_cpu:
            raise UsageError(
                f"{type(self).__name__} needs a CPU heap, but this heap is on {heap.device}: "
                "create a heap with Heap(device='cpu')"
            )
        self.heap, self.rank, self.size = heap, heap.rank, heap.size
        self.closed = False
        # Calls that cannot block keep the GIL, which is cheaper than releasing it.
        self._core, self._core_holding_gil = native.core(), native.core_holding_gil()
        self._host: Heap | None = None
        self._memory: list[SymmetricTensor] = []
        self._views_kept: list[torch.Tensor] = []

    def close(self) -> None:
        """Free the memory on all ranks (collective). No rank may use the structure afterwards."""
        if self.closed:
            return
        self._check_open()
        self.heap.barrier()
        self._end()
        for tensor in reversed(self._memory):
            tensor.heap.free(tensor)
        if self._host is not None:
            self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is None:
            self.close()
        else:
            self._end()

    def _end(self) -> None:
        """Close only this rank's part of the structure."""
        if not self.closed:
            self.closed = True
            self._release()

    def _release(self) -> None:
        """Free the compiled handle. Subclasses implement this method.

        If a subclass makes compiled calls without checking `closed`, this method must replace these
        calls with `_refuse`.
        """

    def _declare_dead(self, rank: int) -> None:
        """Ignore the claims of a dead rank from now on.

        A writer claims a value before it writes the value (cell.h). Subclasses with such writers
        implement this method.
        """

    def _refuse(self, *arguments: object) -> NoReturn:
        """Raise UsageError.

        `close` replaces compiled calls with this method, so that frequent calls need not check
        `closed`.
        """
        raise UsageError(f"this {type(self).__name__} is closed: create a new one on all ranks")

    def _check_tensor(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], contiguous: bool = False
    ) -> None:
        """Raise UsageError if the shape, the dtype or the device of the tensor is wrong."""
        wrong_device = self._on_cpu and not tensor.is_cpu
        if tensor.shape != shape or tensor.dtype is not self.dtype or wrong_device:
            raise UsageError(
                f"{name} must be {self.dtype} of shape {shape} on {self.heap.device}, got "
                f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
            )
        if contiguous and not tensor.is_contiguous():
            raise UsageError(f"{name} must be contiguous")

    def _output(
        self, out: torch.Tensor | None, shape: tuple[int, ...], contiguous: bool = False
    ) -> torch.Tensor:
        """Return `out` after checking it, or a new tensor if `out` is None."""
        if out is None:
            return torch.empty(shape, dtype=self.dtype, device=self.heap.device)
        self._check_tensor("out", out, shape, contiguous)
        return out

    def _check_open(self) -> None:
        if self.closed or self.heap.closed:
            which = type(self).__name__ if self.closed else "heap"
            raise UsageError(f"this {which} is closed: create a new one on all ranks")

    def _zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8, on_host: bool = False
    ) -> SymmetricTensor:
        """Return a zeroed tensor in the heap.

        If `on_host` is True and the heap is on a GPU, the tensor is in a new CPU heap.
        """
        heap = self.heap
        if on_host and not self._on_cpu:
            bytes = torch.Size(shape).numel() * dtype.itemsize
            heap = self._host = Heap(heap.group, bytes=bytes, device="cpu", timeout=heap.timeout)
        tensor = heap.zeros(shape, dtype)
        # Compiled code holds addresses in this memory. The views keep the memory mapped even if the
        # heap is closed.
        self._memory.append(tensor)
        self._views_kept += [tensor.peer(rank) for rank in range(self.size)]
        return tensor

    def _addresses_of(self, tensor: SymmetricTensor) -> Any:
        """Return a C array of the addresses of all ranks' tensors."""
        return pointers([tensor.address(rank) for rank in range(self.size)])

    def _cpu_memory(self) -> CpuMemory:
        # Only structures that wait for words call this method. Their last allocation is always in
        # host memory, even if the heap is on a GPU.
        return cast(CpuMemory, self._memory[-1].memory)

    def _await(
        self, word: int, at_least: int, source: int, timeout: float | None, what: str
    ) -> int:
        """Wait until the word at address `word` is at least `at_least` (acquire). Return its value.

        Rank `source` is expected to write the word. Raises PeerDied or PeerLeft if rank `source`
        has died or has closed the heap, and Timeout if the word is not written in time.
        """
        seconds = self.heap.timeout if timeout is None else timeout
        first = max(min(seconds, SLICE_SECONDS), 1e-6)  # for the core, 0 means to wait forever
        value = int(self._core.tutti_await_word(word, at_least, first))
        if value >= at_least:
            return value
        memory = self._cpu_memory()
        memory.wait_in_slices(word, at_least, [source], seconds, what)
        return memory.load(word)

    def _retry(self, call: Callable[[], int], what: str) -> int:
        """Repeat a compiled call while another writer blocks it. Return the call's result.

        If the writer that has claimed the value has died, its claim is taken over. This is safe,
        because a write becomes visible to readers only when it is complete. A rank that has closed
        the heap but is alive keeps its claim, because one of its threads may still be writing.
        """
        code = call()
        if code > BUSY and code != OVERTAKEN:
            return code
        start = last_check = time.monotonic()
        while code <= BUSY or code == OVERTAKEN:
            now = time.monotonic()
            writer = BUSY - code
            if code <= BUSY and now - last_check > _SUSPICIOUS_SECONDS:
                last_check = now
                if isinstance(self._cpu_memory().lost_peer_error(what, [writer]), PeerDied):
                    self._declare_dead(writer)
            if now - start > self.heap.timeout:
                writers = f"rank {writer} is" if code <= BUSY else "other ranks are"
                raise Timeout(
                    f"{what} waited {self.heap.timeout:g} s on rank {self.rank}: {writers} still "
                    "writing the value"
                )
            time.sleep(0)  # the writer may need this CPU core
            code = call()
        return code
