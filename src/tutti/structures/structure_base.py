"""What all structures share: creation and end on all ranks, waits, and the compiled calls.

The compiled half is shm/core/structures.h; `core()` and `quick()` are that library with its
signatures declared for ctypes.
"""

import ctypes
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn, Self

import torch

from tutti.comm.shm import native
from tutti.comm.shm.native import PeerDied, PeerLeft
from tutti.comm.symmetric.heap import Heap
from tutti.comm.symmetric.heap_rendezvous import Timeout, lost_peer
from tutti.comm.symmetric.symmetric_tensor import SymmetricTensor
from tutti.world.errors import UsageError

FULL, OVERTAKEN, VERSION_SHIFT = native.FULL, native.OVERTAKEN, native.VERSION_SHIFT
BUSY = native.BUSY  # or less: BUSY - the rank that is writing the value

# The core's numbers of the dtypes that can be added atomically.
ADDABLE = {
    torch.float64: native.F64,
    torch.float32: native.F32,
    torch.int64: native.I64,
    torch.int32: native.I32,
}

_pointer, _u64, _i64 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64
_u32, _int = ctypes.c_uint32, ctypes.c_int

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "tutti_rows_create": (_pointer, [_pointer, _u32, _u32, _u64, _u64, _u64, _u32]),
    "tutti_rows_free": (None, [_pointer]),
    "tutti_rows_gather": (_i64, [_pointer, _pointer, _u64, _pointer]),
    "tutti_rows_scatter": (_i64, [_pointer, _pointer, _u64, _pointer]),
    "tutti_rows_scatter_add": (_i64, [_pointer, _pointer, _u64, _pointer, _u32]),
    "tutti_cell_bytes": (_u64, [_u64]),
    "tutti_rows_lookup": (_i64, [_pointer, _u64, _pointer]),
    "tutti_rows_lookup_many": (_i64, [_pointer, _pointer, _u64, _pointer, _pointer]),
    "tutti_rows_publish": (_i64, [_pointer, _u64, _pointer]),
    "tutti_rows_state": (_pointer, [_pointer, _u64]),
    "tutti_rows_lookups": (_u64, [_pointer]),
    "tutti_rows_retries": (_u64, [_pointer]),
    "tutti_rows_declare_dead": (None, [_pointer, _u32]),
    "tutti_map_shard_bytes": (_u64, [_u64, _u64]),
    "tutti_map_create": (_pointer, [_pointer, _u32, _u32, _u64, _u64]),
    "tutti_map_free": (None, [_pointer]),
    "tutti_map_owner": (_u32, [_pointer, _u64]),
    "tutti_map_get": (_int, [_pointer, _u64, _pointer]),
    "tutti_map_has": (_int, [_pointer, _u64]),
    "tutti_map_get_many": (_u64, [_pointer, _pointer, _u64, _pointer, _pointer]),
    "tutti_map_put": (_int, [_pointer, _u64, _pointer]),
    "tutti_map_add": (_int, [_pointer, _u64, _pointer, _u32]),
    "tutti_map_delete": (_int, [_pointer, _u64]),
    "tutti_map_put_many": (_u64, [_pointer, _pointer, _u64, _pointer, ctypes.c_int32, _pointer]),
    "tutti_map_live": (_u64, [_pointer, _u32]),
    "tutti_map_claimed": (_u64, [_pointer, _u32]),
    "tutti_map_limit": (_u64, [_pointer]),
    "tutti_map_collect": (_u64, [_pointer, _u64, _pointer, _pointer]),
    "tutti_map_compact": (_int, [_pointer]),
    "tutti_map_gets": (_u64, [_pointer]),
    "tutti_map_hits": (_u64, [_pointer]),
    "tutti_map_retries": (_u64, [_pointer]),
    "tutti_map_declare_dead": (None, [_pointer, _u32]),
    "tutti_slot_begin": (None, [_pointer]),
    "tutti_slot_write": (None, [_pointer, _pointer, _u64]),
    "tutti_slot_end": (_u64, [_pointer]),
    "tutti_slot_copy": (_int, [_pointer, _pointer, _u64, _pointer, _u64]),
    "tutti_await_word": (_u64, [_pointer, _u64, ctypes.c_double]),
}


@cache
def core() -> Any:
    """The core, releasing the GIL: for copies and waits."""
    return _declared(native.core())


@cache
def quick() -> Any:
    """The core, keeping the GIL: for calls of less than a microsecond."""
    return _declared(native.core_holding_gil())


def pointers(addresses: list[int]) -> Any:
    """A C array of addresses."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _declared(library: Any) -> Any:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


# A wait returns to Python this often: for Ctrl-C, and to check that the peer still lives.
_SLICE_SECONDS = 0.1
_SUSPICIOUS_SECONDS = 0.02  # a writer that holds a value for longer may have died
_AT_ONCE_SECONDS = 1e-6  # to the core 0 means for ever


class Structure:
    """A data structure in the memory of a heap. Creation and close are collective, use is not.

    A `with` block closes it at its end, but not after an error, because then the other ranks may
    never call close(): the memory is freed with the heap.
    """

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
        """This rank's part of closing; subclasses also free their compiled handle."""
        self.closed = True

    def _on_cpu(self) -> None:
        if self.heap.device.type != "cpu":
            raise UsageError(
                f"{type(self).__name__} works on CPU heaps only, this one is on "
                f"{self.heap.device}: make one with Heap(device='cpu')"
            )

    def _refuse(self, *arguments: object) -> NoReturn:
        """Replaces the compiled calls of a closed structure, so that the hot path has no check."""
        raise UsageError(f"this {type(self).__name__} is closed: make another on all ranks")

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
        # Views keep the memory mapped even if the heap is closed: compiled code holds addresses.
        self._memory.append(tensor)
        self._views_kept += [tensor.peer(rank) for rank in range(self.size)]
        return tensor

    def _seconds(self, timeout: float | None) -> float:
        return self.heap.timeout if timeout is None else timeout

    def _await(
        self, word: int, at_least: int, source: int, timeout: float | None, what: str
    ) -> int:
        """Wait until the word at an address is at least `at_least` (acquire); returns the word.

        Raises PeerDied or PeerLeft when rank `source`, which must write it, cannot any more.
        """
        seconds = self._seconds(timeout)
        wait = core().tutti_await_word
        value = int(wait(word, at_least, max(min(seconds, _SLICE_SECONDS), _AT_ONCE_SECONDS)))
        if value >= at_least:
            return value
        deadline = time.monotonic() + seconds - min(seconds, _SLICE_SECONDS)
        while True:
            end = self._gone(source)
            remaining = min(deadline - time.monotonic(), _SLICE_SECONDS)
            # Read once more after the peer is gone: it may have written the word before it ended.
            value = int(
                wait(word, at_least, _AT_ONCE_SECONDS if end else max(remaining, _AT_ONCE_SECONDS))
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

    def _gone(self, rank: int) -> type[PeerDied] | type[PeerLeft] | None:
        """PeerDied if a rank has died, PeerLeft if it has closed the heap, else None."""
        if rank == self.rank:
            return None
        try:  # wait for a signal that is never sent: its error says what became of the rank
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
        self,
        call: Callable[[], int],
        declare_dead: Callable[[int], None],
        timeout: float | None,
        what: str,
    ) -> int:
        """The result of a compiled call that may have to wait for another writer.

        If the writer that holds the claim on a value has died, its claim is taken over: a write
        becomes visible to readers only when it is complete. A rank that only closed the heap keeps
        its claim: another of its threads may still be writing.
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
            if now - began > self._seconds(timeout):
                who = f"rank {writer} is" if code <= BUSY else "other ranks are"
                raise Timeout(
                    f"{what} waited {self._seconds(timeout):g} s on rank {self.rank}: {who} "
                    "writing it without pause"
                )
            time.sleep(0)  # the writer may need this core
            code = call()
        return code
