"""The backends of `tutti bench collectives`: torch.distributed, comm.group() and symmetric memory.

`open_backends` turns the names of --backends into objects that a Sweep can measure, or into the
reason why one is not available here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti import comm
from tutti.bench import Unsupported
from tutti.bench.collectives.cases import (
    Backend,
    Buffers,
    CollectiveCase,
    PreparedCase,
    allocate,
    copy_then_call,
)
from tutti.bench.collectives.mpi_backend import OpenMpi
from tutti.comm import symmetric
from tutti.comm.symmetric.heap_collectives import STAGED_BYTES, Stage
from tutti.world.errors import UsageError
from tutti.world.world import World

# torch 2.13 renamed these two; the old names warn there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_SYMMETRIC_ALGORITHMS = {"one-shot": "one_shot", "two-shot": "two_shot", "ring": "ring"}
# Each grouped call needs tensors of its own; larger messages gain nothing from a group.
_MAX_GROUPED_BYTES = 256 << 20


@contextmanager
def open_backends(
    names: Sequence[str], world: World, largest: int
) -> Iterator[tuple[list[Backend], list[dict[str, str]]]]:
    """The available backends, and {backend, reason} of each that is not available here.

    Collective on entry and on exit. `largest` is the size of the largest message in bytes.
    """
    with ExitStack() as stack:
        buffers = Buffers(world.device)
        available: list[Backend] = []
        missing = []
        for name in names:
            try:
                available.append(_open_backend(name, world, largest, buffers, stack))
            except (Unsupported, UsageError) as error:
                missing.append({"backend": name, "reason": str(error)})
        yield available, missing


def _open_backend(
    name: str, world: World, largest: int, buffers: Buffers, stack: ExitStack
) -> Backend:
    def heap(group: dist.ProcessGroup | None = None) -> symmetric.Heap:
        # Send and receive buffers, plus alignment.
        size = 2 * largest + (1 << 20)
        return stack.enter_context(symmetric.Heap(group, bytes=size, device=world.device))

    on_cpu = world.device.type == "cpu"
    if name == "nccl" and on_cpu:
        raise Unsupported("NCCL communicates CUDA tensors only: use --device cuda")
    if name in ("mpi", "shm") and not on_cpu:
        raise Unsupported(f"{name} communicates CPU tensors only: use --device cpu")
    if name == "mpi":
        try:
            return OpenMpi(buffers, world.size)
        except ImportError as error:
            raise Unsupported(f"{error}: pip install 'tutti-torch[mpi]'") from None
    if name == "symmetric" and on_cpu:
        group, about = process_group("shm")
        return ZeroCopyBackend(name, group, heap(group), about)
    if name == "staged":
        stage = Stage(device=world.device)
        stack.callback(stage.close)
        return StagedBackend(name, stage, buffers)
    if name == "symmetric" or name in _SYMMETRIC_ALGORITHMS:
        return SymmetricBackend(name, heap(), _SYMMETRIC_ALGORITHMS.get(name, "auto"))
    return TorchBackend(name, *process_group(name), buffers)


def process_group(name: str) -> tuple[dist.ProcessGroup, str]:
    """A new process group over all ranks, and a description of its backend."""
    about = ""
    if name == "shm":
        from tutti.comm.shm import available, register

        usable, about = available()
        if not usable:
            raise Unsupported(about)
        register()
    group = dist.new_group(backend=name)
    assert isinstance(group, dist.ProcessGroup)
    return group, about


# ---- torch.distributed ----


class TorchBackend:
    """A backend of torch.distributed: one process group over all ranks."""

    def __init__(self, name: str, group: dist.ProcessGroup, about: str, buffers: Buffers) -> None:
        self.name = name
        self.about = about
        self.group = group
        self._buffers = buffers

    def prepare(self, case: CollectiveCase) -> PreparedCase:
        """The case on ordinary tensors."""
        take = partial(self._buffers.take, dtype=case.dtype)
        return prepare_torch_call(case, self.group, take)


def prepare_torch_call(
    case: CollectiveCase, group: dist.ProcessGroup, take: Callable[[str, int], Tensor]
) -> PreparedCase:
    """The case through torch.distributed, as a program would call it.

    If torch offers an operation in place only, out of place is a copy and the operation in place.
    """
    sent, received, fill, check = allocate(case, take)
    match case.operation.name:
        case "all_reduce":
            call = partial(dist.all_reduce, received, group=group)
        case "reduce":
            call = partial(dist.reduce, received, 0, group=group)
        case "broadcast":
            call = partial(dist.broadcast, received, 0, group=group)
        case "all_gather":
            call = partial(_all_gather, received, sent, group=group)
        case "reduce_scatter":
            call = partial(_reduce_scatter, received, sent, group=group)
        case "gather":
            shards = list(received.chunk(case.ranks)) if case.is_root else None
            call = partial(dist.gather, sent, shards, 0, group=group)
        case "scatter":
            shards = list(sent.chunk(case.ranks)) if case.is_root else None
            call = partial(dist.scatter, received, shards, 0, group=group)
        case "all_to_all":
            call = partial(dist.all_to_all_single, received, sent, group=group)
        case "all_to_all_uneven":
            splits = case.uneven_splits(case.rank)
            call = partial(dist.all_to_all_single, received, sent, splits, splits, group=group)
        case "all_gather_uneven":
            call = partial(_all_gather_uneven, received, sent, group)
        case "send_recv":
            exchange = _exchange_batched if sent.is_cuda else _exchange
            call = partial(exchange, sent, received, *case.neighbours, group)
        case _:
            call = partial(dist.barrier, group=group)
    native_in_place = case.operation.native == "in"
    if native_in_place and not case.in_place and case.sends:
        call = partial(copy_then_call, received, sent, call)
    return PreparedCase(fill, check, call)


def _all_gather_uneven(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    # torch has no such call that every backend supports; tutti.comm's pads, and returns a list.
    torch.cat(comm.all_gather_uneven(sent, group=group), out=received)


def _exchange(
    sent: Tensor, received: Tensor, to: int, source: int, group: dist.ProcessGroup
) -> None:
    sending = dist.isend(sent, to, group=group)
    dist.recv(received, source, group=group)
    if sending is not None:
        sending.wait()


def _exchange_batched(
    sent: Tensor, received: Tensor, to: int, source: int, group: dist.ProcessGroup
) -> None:
    # A ring of NCCL sends that wait for their receives would deadlock: post both in one batch.
    both = [
        dist.P2POp(dist.isend, sent, to, group=group),
        dist.P2POp(dist.irecv, received, source, group=group),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()


# ---- comm.group() ----


def with_grouped(
    backends: Sequence[Backend], times: int, device: torch.device
) -> Iterator[Backend]:
    """The backends, each torch.distributed backend followed by its GroupedBackend."""
    buffers = Buffers(device)
    for backend in backends:
        yield backend
        if isinstance(backend, TorchBackend):
            yield GroupedBackend(backend, times, buffers)


class GroupedBackend:
    """A torch.distributed backend through tutti.comm, `times` calls in each comm.group() block."""

    def __init__(self, backend: TorchBackend, times: int, buffers: Buffers) -> None:
        self.name = f"{backend.name} x{times}"
        self.about = f"{times} calls in one comm.group(), time per call"
        self._group = backend.group
        self._times = times
        self._buffers = buffers

    def prepare(self, case: CollectiveCase) -> PreparedCase:
        """One row of a matrix per call; every row is checked."""
        if case.bytes * self._times > _MAX_GROUPED_BYTES:
            raise Unsupported(
                f"{self._times} messages of {case.bytes} bytes are more than "
                f"{_MAX_GROUPED_BYTES >> 20} MiB"
            )

        def take(role: str, count: int) -> Tensor:
            tensor = self._buffers.take(f"{role}, grouped", count * self._times, case.dtype)
            return tensor.view(self._times, count)

        name = case.operation.name
        function: Any = getattr(comm, name, None)
        sent, received, fill, check = allocate(case, take)
        rows = zip(sent, received, strict=True)
        match name:
            case "all_reduce" | "reduce" | "broadcast":
                calls = [
                    partial(function, row, out=None if case.in_place else out) for row, out in rows
                ]
            case "all_gather" | "gather" | "reduce_scatter" | "all_to_all":
                calls = [
                    partial(function, row, out=out if case.receives else None) for row, out in rows
                ]
            case "scatter":
                calls = [
                    partial(function, row if case.is_root else None, out=out) for row, out in rows
                ]
            case "send_recv":
                to, source = case.neighbours
                calls = [partial(comm.send, row, to) for row in sent]
                calls += [partial(comm.recv, row, source) for row in received]
            case _:
                raise Unsupported(f"comm.group() does not support {name}")
        call = partial(_call_grouped, calls, self._group)
        return PreparedCase(fill, check, call, operations=self._times)


def _call_grouped(calls: list[partial[Any]], group: dist.ProcessGroup) -> None:
    with comm.group():
        for call in calls:
            call(group=group)


# ---- Symmetric memory ----


class ZeroCopyBackend:
    """torch.distributed on shm with tensors in symmetric memory, which peers read in place."""

    def __init__(
        self, name: str, group: dist.ProcessGroup, heap: symmetric.Heap, about: str
    ) -> None:
        self.name = name
        self.about = about
        self._group = group
        self._heap = heap

    def prepare(self, case: CollectiveCase) -> PreparedCase:
        """The case on symmetric tensors."""
        tensors = _HeapTensors(self._heap, case.dtype)
        prepared = prepare_torch_call(
            case, self._group, lambda role, count: tensors.allocate(count).local
        )
        return PreparedCase(prepared.sent, prepared.received, prepared.call, tensors.free)


class SymmetricBackend:
    """The collectives of tutti.comm.symmetric, with one algorithm or an automatic choice."""

    def __init__(self, name: str, heap: symmetric.Heap, algorithm: str = "auto") -> None:
        self.name = name
        self.about = heap.reason
        self._heap = heap
        self._algorithm = algorithm

    def prepare(self, case: CollectiveCase) -> PreparedCase:
        """all_reduce with any algorithm; all_gather and reduce_scatter with the automatic one."""
        name, tensors = case.operation.name, _HeapTensors(self._heap, case.dtype)
        if name == "all_reduce":
            sent = tensors.allocate(case.count)
            received = sent if case.in_place else tensors.allocate(case.count)
            call = partial(
                symmetric.all_reduce,
                sent,
                algorithm=self._algorithm,  # type: ignore[arg-type]
                out=None if case.in_place else received,
            )
            return PreparedCase(sent.local, received.local, call, tensors.free)
        if self._algorithm != "auto" or name not in ("all_gather", "reduce_scatter"):
            raise Unsupported(f"{self.name} has no {name} on symmetric tensors")
        if case.in_place:
            raise Unsupported(f"{name} on symmetric tensors is out of place only")
        gathers = name == "all_gather"
        sent = tensors.allocate(case.count if gathers else case.total_count)
        count = case.total_count if gathers else case.count
        result = torch.empty(count, dtype=case.dtype, device=self._heap.device)
        function = symmetric.all_gather if gathers else symmetric.reduce_scatter
        return PreparedCase(sent.local, result, partial(function, sent, out=result), tensors.free)


class StagedBackend:
    """all_reduce of ordinary tensors through an existing symmetric buffer."""

    def __init__(self, name: str, stage: Stage, buffers: Buffers) -> None:
        self.name = name
        self.about = stage.heap.reason
        self._stage = stage
        self._buffers = buffers

    def prepare(self, case: CollectiveCase) -> PreparedCase:
        """In place, up to the size of the buffer."""
        if case.operation.name != "all_reduce" or not case.in_place:
            raise Unsupported("staged has all_reduce in place only")
        if case.bytes > STAGED_BYTES:
            raise Unsupported(f"the symmetric buffer has {STAGED_BYTES} bytes")
        tensor = self._buffers.take("received", case.count, case.dtype)
        return PreparedCase(tensor, tensor, partial(self._stage.all_reduce, tensor))


class _HeapTensors:
    """Tensors of a symmetric heap that are freed together, last first."""

    def __init__(self, heap: symmetric.Heap, dtype: torch.dtype) -> None:
        self._heap = heap
        self._dtype = dtype
        self._allocated: list[symmetric.SymmetricTensor] = []

    def allocate(self, count: int) -> symmetric.SymmetricTensor:
        self._allocated.append(self._heap.empty(count, dtype=self._dtype))
        return self._allocated[-1]

    def free(self) -> None:
        while self._allocated:
            self._heap.free(self._allocated.pop())
