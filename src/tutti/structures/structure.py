"""What all structures have in common: they are made, closed and counted together on all ranks."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

import torch

from tutti.comm.symmetric.heap import Heap
from tutti.comm.symmetric.heap_rendezvous import PeerDied, PeerLeft, Timeout
from tutti.comm.symmetric.symmetric_tensor import SymmetricTensor
from tutti.structures import native
from tutti.world.errors import UsageError

# A wait returns to Python this often: for Ctrl-C, and to look whether the peer still lives.
_SLICE = 0.1
_SUSPICIOUS = 0.02  # a writer that holds a value for longer, in seconds, may have died
_AT_ONCE = 1e-6  # seconds: to the core 0 means "for ever"


class Structure:
    """Memory of a heap with a meaning. Making and closing it is collective; using it is not.

    A `with` block closes it at its end, but not after an error, because then the other ranks may
    never come: the memory goes back when the heap does.
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
        """Free the memory. Collective: nobody may use the structure any more."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()

    def _end(self) -> None:
        """This rank's part of closing; subclasses free what is theirs."""
        self.closed = True

    def _on_cpu(self) -> None:
        if self.heap.device.type != "cpu":
            raise UsageError(
                f"{type(self).__name__} works on CPU heaps only, this one is on "
                f"{self.heap.device}: make one with Heap(device='cpu')"
            )

    def _refuse(self, *arguments: object) -> NoReturn:
        """Stands where a closed structure had its compiled calls, so that checks cost nothing."""
        raise UsageError(f"this {type(self).__name__} is closed: make it anew on all ranks")

    def _check_open(self) -> None:
        if self.closed or self.heap.closed:
            which = type(self).__name__ if self.closed else "heap"
            raise UsageError(f"this {which} is closed: make it anew on all ranks")

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        return self._kept(self.heap.zeros(shape, dtype=dtype))

    def _host_zeros(self, bytes: int) -> SymmetricTensor:
        """Bytes that processors read: in the heap, or in one of their own if that is on a GPU."""
        heap = self.heap
        if heap.device.type != "cpu":
            heap = Heap(heap.group, bytes=bytes, device="cpu", timeout=heap.timeout)
            self._host = heap
        return self._kept(heap.zeros((bytes,), dtype=torch.uint8))

    def _kept(self, tensor: SymmetricTensor) -> SymmetricTensor:
        # Views keep memory mapped, whatever becomes of the heap: compiled code has addresses.
        self._memory.append(tensor)
        self._views_kept += [tensor.peer(rank) for rank in range(self.size)]
        return tensor

    def _seconds(self, timeout: float | None) -> float:
        return self.heap.timeout if timeout is None else timeout

    def _await(
        self, word: int, at_least: int, source: int, timeout: float | None, what: str
    ) -> int:
        """The word at an address once it is `at_least` so much (acquire).

        Raises PeerDied or PeerLeft when rank `source`, who must bring it, cannot any more.
        """
        seconds = self._seconds(timeout)
        wait = native.core().tutti_await_word
        value = int(wait(word, at_least, max(min(seconds, _SLICE), _AT_ONCE)))
        if value >= at_least:
            return value
        deadline = time.monotonic() + seconds - min(seconds, _SLICE)
        while True:
            end = self._gone(source)
            remaining = min(deadline - time.monotonic(), _SLICE)
            # Look once more after seeing that the peer is gone: it may have come before it went.
            value = int(wait(word, at_least, _AT_ONCE if end else max(remaining, _AT_ONCE)))
            if value >= at_least:
                return value
            if end is not None:
                raise end(source, what)
            if remaining <= 0:
                raise Timeout(
                    f"rank {self.rank} waited {seconds:g} s for {what}: rank {source} lives, but "
                    "did not come to it"
                )

    def _gone(self, rank: int) -> type[PeerDied] | type[PeerLeft] | None:
        """Whether a rank has died, or has closed the heap: which of the two, or None."""
        if rank == self.rank:
            return None
        try:  # a signal that never comes: the wait says why
            (self._host or self.heap).wait(
                slot=0, at_least=2**64 - 1, source=rank, timeout=_AT_ONCE
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

        A writer that died with the value in its hands has changed nothing that readers see: its
        claim is taken over.
        """
        code = call()
        if code > native.BUSY and code != native.OVERTAKEN:
            return code
        began = looked = time.monotonic()
        while code <= native.BUSY or code == native.OVERTAKEN:
            now = time.monotonic()
            writer = native.BUSY - code
            if code <= native.BUSY and now - looked > _SUSPICIOUS:
                looked = now
                # Only a dead writer may lose its claim: one that merely left may still be writing.
                if self._gone(writer) is PeerDied:
                    declare_dead(writer)
            if now - began > self._seconds(timeout):
                who = f"rank {writer} is" if code <= native.BUSY else "others are"
                raise Timeout(
                    f"{what} waited {self._seconds(timeout):g} s on rank {self.rank}: {who} "
                    "writing it without a pause"
                )
            time.sleep(0)  # whoever holds it may need this core
            code = call()
        return code
