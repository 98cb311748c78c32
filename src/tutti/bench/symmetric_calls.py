"""Collectives on tensors that live in symmetric memory."""

from functools import partial

import torch
import torch.distributed as dist

from tutti.bench import torch_calls
from tutti.bench.attempt import Unsupported
from tutti.bench.case import Buffers, Case, Prepared
from tutti.comm import symmetric
from tutti.comm.symmetric.heap_collectives import STAGED_BYTES, Stage


class ZeroCopy:
    """torch.distributed on the shm backend, on tensors that peers can read where they are."""

    def __init__(
        self, name: str, group: dist.ProcessGroup, heap: symmetric.Heap, about: str
    ) -> None:
        self.name = name
        self.about = about
        self._group = group
        self._heap = heap

    def prepare(self, case: Case) -> Prepared:
        """The case on symmetric tensors: sent and received both are."""
        buffers = _HeapBuffers(self._heap)
        prepared = torch_calls.prepare(case, self._group, buffers)
        return Prepared(prepared.sent, prepared.received, prepared.call, buffers.free)


class SymmetricCollective:
    """tutti.comm.symmetric's own collectives, by one algorithm or the one it chooses."""

    def __init__(self, name: str, heap: symmetric.Heap, algorithm: str = "auto") -> None:
        self.name = name
        self.about = heap.reason
        self._heap = heap
        self._algorithm = algorithm

    def prepare(self, case: Case) -> Prepared:
        """all_reduce by any algorithm; all_gather and reduce_scatter where it may choose."""
        heap, name = self._heap, case.operation.name
        in_place, buffers = case.placement == "in", _HeapBuffers(self._heap)
        if name == "all_reduce":
            sent = buffers.symmetric(case.count, case.dtype)
            received = sent if in_place else buffers.symmetric(case.count, case.dtype)
            call = partial(
                symmetric.all_reduce,
                sent,
                algorithm=self._algorithm,  # type: ignore[arg-type]
                out=None if in_place else received,
            )
            return Prepared(sent.local, received.local, call, buffers.free)
        if self._algorithm != "auto" or name not in ("all_gather", "reduce_scatter") or in_place:
            raise Unsupported("there is no such collective on symmetric tensors")
        gathers = name == "all_gather"
        sent = buffers.symmetric(case.count if gathers else case.all_shares, case.dtype)
        result = torch.empty(
            case.all_shares if gathers else case.count, dtype=case.dtype, device=heap.device
        )
        function = symmetric.all_gather if gathers else symmetric.reduce_scatter
        return Prepared(sent.local, result, partial(function, sent, out=result), buffers.free)


class Staged:
    """all_reduce of ordinary tensors by way of a symmetric buffer, which exists already."""

    def __init__(self, name: str, stage: Stage, buffers: Buffers) -> None:
        self.name = name
        self.about = stage.heap.reason
        self._stage = stage
        self._buffers = buffers

    def prepare(self, case: Case) -> Prepared:
        """In place, as far as the buffer goes."""
        if case.operation.name != "all_reduce" or case.placement != "in":
            raise Unsupported("only all_reduce in place goes through a symmetric buffer")
        if case.bytes > STAGED_BYTES:
            raise Unsupported(f"the symmetric buffer has {STAGED_BYTES} bytes")
        tensor = self._buffers.take("received", case.count, case.dtype)
        return Prepared(tensor, tensor, partial(self._stage.all_reduce, tensor))


class _HeapBuffers:
    """Tensors of a heap, until they are freed together."""

    def __init__(self, heap: symmetric.Heap) -> None:
        self._heap = heap
        self._held: list[symmetric.SymmetricTensor] = []

    def take(self, role: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self.symmetric(count, dtype).local

    def symmetric(self, count: int, dtype: torch.dtype) -> symmetric.SymmetricTensor:
        self._held.append(self._heap.empty(count, dtype=dtype))
        return self._held[-1]

    def free(self) -> None:
        while self._held:
            self._heap.free(self._held.pop())
