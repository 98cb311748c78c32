"""The base class of all structures: collective creation and close, waits, checks of tensors.

The compiled part of the structures is declared in shm/core/structures.h.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch

from tutti.comm.shm import native
from tutti.comm.shm.native import BUSY, OVERTAKEN, PeerDied, PeerLeft
from tutti.comm.symmetric.heap import Heap
from tutti.comm.symmetric.heap_rendezvous import Timeout, lost_peer
from tutti.comm.symmetric.symmetric_tensor import SymmetricTensor
from tutti.world.errors import UsageError

# The C core's codes of the dtypes that it can add atomically.
_ADDABLE = {
    torch.float64: native.F64,
    torch.float32: native.F32,
    torch.int64: native.I64,
    torch.int32: native.I32,
}


def addable(dtype: torch.dtype, call: str) -> int:
    """The C core's code of a dtype; raises UsageError if the core cannot add it atomically."""
    code = _ADDABLE.get(dtype)
    if code is None:
        names = ", ".join(str(each).removeprefix("torch.") for each in _ADDABLE)
        raise UsageError(f"{call} on {dtype}: it adds {names} atomically")
    return code


# A wait returns to Python at this interval, to handle Ctrl-C and to check that the peer is alive.
_SLICE_SECONDS = 0.1
_SUSPICIOUS_SECONDS = 0.02  # a writer that holds a value for longer may have died
_AT_ONCE_SECONDS = 1e-6  # the shortest wait: for the core, 0 means to wait forever


class Structure:
    """A data structure in the memory of a heap. Creation and close are collective, use is not.

    A `with` block closes the structure at its end. After an error in the block only this rank's
    part is closed, because the other ranks may never call close(); the memory is then freed with
    the heap.
    """

    dtype: torch.dtype

    def __init__(self, heap: Heap) -> None:
        self.heap = heap
        self.rank = heap.rank
        self.size = heap.size
        self.closed = False
        self._host: Heap | None = None
        self._memory: list[SymmetricTensor] = []
        self._views_kept: list[torch.Tensor] = []

    def close(self) -> None:
        """Free the memory. Collective: no rank may use the structure any more."""
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
        """Close this rank's part of the structure."""
        if not self.closed:
            self.closed = True
            self._release()

    def _release(self) -> None:
        """Free the compiled handle; for subclasses.

        Compiled calls that are made without a check of `closed` must be replaced by `_refuse`.
        """

    def _on_cpu(self) -> None:
        if self.heap.device.type != "cpu":
            raise UsageError(
                f"{type(self).__name__} works on CPU heaps only, this one is on "
                f"{self.heap.device}: make one with Heap(device='cpu')"
            )

    def _refuse(self, *arguments: object) -> NoReturn:
        """Replaces the compiled calls of a closed structure, so that the hot path has no check."""
        raise UsageError(f"this {type(self).__name__} is closed: make another on all ranks")

    def _check_tensor(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], contiguous: bool = False
    ) -> None:
        """Refuse a tensor of another shape or dtype, or one on a GPU if the heap is on the CPU."""
        elsewhere = self.heap.device.type == "cpu" and not tensor.is_cpu
        if tensor.shape != shape or tensor.dtype is not self.dtype or elsewhere:
            raise UsageError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}: this "
                f"call takes {self.dtype} of shape {shape} on {self.heap.device}"
            )
        if contiguous and not tensor.is_contiguous():
            raise UsageError(f"{name} is not contiguous: give it a contiguous tensor")

    def _check_open(self) -> None:
        if self.closed or self.heap.closed:
            which = type(self).__name__ if self.closed else "heap"
            raise UsageError(f"this {which} is closed: make another on all ranks")

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        return self._kept(self.heap.zeros(shape, dtype=dtype))

    def _host_zeros(self, bytes: int) -> SymmetricTensor:
        """Bytes in host memory: in the heap, or in a separate CPU heap if this one is on a GPU."""
        heap = self.heap
        if heap.device.type != "cpu":
            heap = Heap(heap.group, bytes=bytes, device="cpu", timeout=heap.timeout)
            self._host = heap
        return self._kept(heap.zeros((bytes,), dtype=torch.uint8))

    def _kept(self, tensor: SymmetricTensor) -> SymmetricTensor:
        # The views keep the memory mapped even if the heap is closed, because compiled code holds
        # addresses in it.
        self._memory.append(tensor)
        self._views_kept += [tensor.peer(rank) for rank in range(self.size)]
        return tensor

    def _addresses_of(self, tensor: SymmetricTensor) -> Any:
        """A C array of the addresses of all ranks' tensors."""
        return (ctypes.c_void_p * self.size)(*(tensor.address(rank) for rank in range(self.size)))

    def _await(
        self, word: int, at_least: int, source: int, timeout: float | None, what: str
    ) -> int:
        """Wait until the word at an address is at least `at_least` (acquire); returns the word.

        Raises PeerDied or PeerLeft if rank `source`, which should write the word, has died or has
        closed the heap.
        """
        seconds = self.heap.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        remaining, end = max(seconds, _AT_ONCE_SECONDS), None
        while True:
            # If the peer is gone, read once more: it may have written the word before it ended.
            longest = 0 if end else min(remaining, _SLICE_SECONDS)
            value = int(
                native.core().tutti_await_word(word, at_least, max(longest, _AT_ONCE_SECONDS))
            )
            if value >= at_least:
                return value
            if end is not None:
                raise lost_peer(end, source, what)
            if remaining <= 0:
                raise Timeout(
                    f"rank {self.rank} waited {seconds:g} s for {what}: rank {source} is alive, "
                    "but did not write it"
                )
            end = self._gone(source)
            remaining = deadline - time.monotonic()

    def _gone(self, rank: int) -> type[PeerDied] | type[PeerLeft] | None:
        """PeerDied if a rank has died, PeerLeft if it has closed the heap, else None."""
        if rank == self.rank:
            return None
        try:  # wait for a signal that is never sent: the error depends on the state of the rank
            (self._host or self.heap).wait(
                slot=0, at_least=2**64 - 1, source=rank, timeout=_AT_ONCE_SECONDS
            )
        except PeerDied:
            return PeerDied
        except PeerLeft:
            return PeerLeft
        except Timeout:
            pass
        return None

    def _served(
        self, call: Callable[[], int], declare_dead: Callable[[int], None], what: str
    ) -> int:
        """Repeat a compiled call while another writer blocks it; returns the call's result.

        If the writer that holds the claim on a value has died, its claim is taken over. This is
        safe, because a write becomes visible to readers only when it is complete. A rank that only
        closed the heap keeps its claim: another of its threads may still be writing.
        """
        code = call()
        if code > BUSY and code != OVERTAKEN:
            return code
        began = looked = time.monotonic()
        while code <= BUSY or code == OVERTAKEN:
            now = time.monotonic()
            writer = BUSY - code
            if code <= BUSY and now - looked > _SUSPICIOUS_SECONDS:
                looked = now
                if self._gone(writer) is PeerDied:
                    declare_dead(writer)
            if now - began > self.heap.timeout:
                who = f"rank {writer} is" if code <= BUSY else "other ranks are"
                raise Timeout(
                    f"{what} waited {self.heap.timeout:g} s on rank {self.rank}: {who} writing it "
                    "without pause"
                )
            time.sleep(0)  # the writer may need this CPU core
            code = call()
        return code
