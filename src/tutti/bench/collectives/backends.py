"""The backends of `tutti bench collectives`: torch.distributed, comm.group() and symmetric memory.

For each name in --backends, `open_backends` returns an object that a Sweep can measure, or the
reason why the backend is not available here.
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
from tutti.bench.collectives.mpi_backend import open_mpi
from tutti.comm import symmetric
from tutti.comm.symmetric.heap_collectives import STAGED_BYTES, Stage
from tutti.world.errors import UsageError
from tutti.world.world import World

# torch 2.13 renamed these two functions. From that version on, the old names print a warning.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# {name of the backend: algorithm of symmetric.all_reduce}
_ALGORITHMS = {"symmetric": "auto", "one-shot": "one_shot", "two-shot": "two_shot", "ring": "ring"}
# Limit for the tensors of all calls in a group: each grouped call needs its own tensors. Larger
# messages gain nothing from a group.
_MAX_GROUPED_BYTES = 256 << 20


@contextmanager
def open_backends(
    names: Sequence[str], world: World, largest: int
) -> Iterator[tuple[list[Backend], list[dict[str, str]]]]:
    """Yield the available backends, and {backend, reason} of each backend that is not available.

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
    def open_heap(group: dist.ProcessGroup | None = None) -> symmetric.Heap:
        # Send and receive buffers, plus alignment.
        size = 2 * largest + (1 << 20)
        return stack.enter_context(symmetric.Heap(group, bytes=size, device=world.device))

    on_cpu = world.device.type == "cpu"
    if name == "nccl" and on_cpu:
        raise Unsupported("NCCL communicates CUDA tensors only: use --device cuda")
    if name in ("mpi", "shm") and not on_cpu:
        raise Unsupported(f"{name} communicates CPU tensors only: use --device cpu")
    if name == "mpi":
        return open_mpi(buffers, world.size)
    if name == "symmetric" and on_cpu:
        group, about = process_group("shm")
        return Backend(name, about, partial(_prepare_zero_copy, group, open_heap(group)))
    if name == "staged":
        stage = Stage(device=world.device)
        stack.callback(stage.close)
        return Backend(name, stage.heap.reason, partial(_prepare_staged, stage, buffers))
    if name in _ALGORITHMS:
        heap = open_heap()
        return Backend(name, heap.reason, partial(_prepare_symmetric, name, heap))
    return torch_backend(name, *process_group(name), buffers)


def process_group(name: str) -> tuple[dist.ProcessGroup, str]:
    """Create a process group over all ranks; return the group and a description of its backend."""
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


def torch_backend(name: str, group: dist.ProcessGroup, about: str, buffers: Buffers) -> Backend:
    """A process group of torch.distributed on ordinary tensors."""

    def prepare(case: CollectiveCase) -> PreparedCase:
        return _prepare_torch_call(case, group, partial(buffers.take, dtype=case.dtype))

    return Backend(name, about, prepare, group)


def _prepare_torch_call(
    case: CollectiveCase, group: dist.ProcessGroup, take: Callable[[str, int], Tensor]
) -> PreparedCase:
    """Prepare a case that calls torch.distributed as a program would.

    If torch has only an in-place form of the operation, the out-of-place form is a copy followed by
    the in-place operation.
    """
    sent, received, fill, check = allocate(case, take)
    splits = case.uneven_splits(case.rank)
    sent_shards, received_shards = (
        list(each.chunk(case.ranks)) if case.is_root else None for each in (sent, received)
    )
    calls: dict[str, tuple[Any, ...]] = {
        "all_reduce": (dist.all_reduce, received),
        "reduce": (dist.reduce, received, 0),
        "broadcast": (dist.broadcast, received, 0),
        "all_gather": (_all_gather, received, sent),
        "reduce_scatter": (_reduce_scatter, received, sent),
        "gather": (dist.gather, sent, received_shards, 0),
        "scatter": (dist.scatter, received, sent_shards, 0),
        "all_to_all": (dist.all_to_all_single, received, sent),
        "all_to_all_uneven": (dist.all_to_all_single, received, sent, splits, splits),
        "all_gather_uneven": (_all_gather_uneven, received, sent),
        "send_recv": (send_recv, sent, received, *case.neighbours),
        "barrier": (dist.barrier,),
    }
    function, *arguments = calls[case.operation.name]
    call = partial(function, *arguments, group=group)
    if case.operation.native == "in" and not case.in_place and case.sends:
        call = partial(copy_then_call, received, sent, call)
    return PreparedCase(fill, check, call)


def _all_gather_uneven(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    # torch has no uneven all-gather that every backend supports. comm.all_gather_uneven pads the
    # shards, and returns a list.
    torch.cat(comm.all_gather_uneven(sent, group=group), out=received)


def send_recv(
    sent: Tensor, received: Tensor, to: int, source: int, group: dist.ProcessGroup
) -> None:
    """Send to one rank while receiving from another."""
    if sent.is_cuda:
        # NCCL sends that wait for their receives would deadlock in a ring, so post one batch.
        send = dist.P2POp(dist.isend, sent, to, group=group)
        receive = dist.P2POp(dist.irecv, received, source, group=group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return
    sending = dist.isend(sent, to, group=group)
    dist.recv(received, source, group=group)
    if sending is not None:
        sending.wait()


# ---- comm.group() ----


def with_grouped(
    backends: Sequence[Backend], times: int, device: torch.device
) -> Iterator[Backend]:
    """Yield the backends, each torch.distributed backend followed by its grouped form.

    The grouped form makes `times` calls in one comm.group().
    """
    buffers = Buffers(device)
    about = f"{times} calls in one comm.group(), time per call"
    for backend in backends:
        yield backend
        if backend.group is not None:
            prepare = partial(_prepare_grouped, backend.group, times, buffers)
            yield Backend(f"{backend.name} x{times}", about, prepare)


def _prepare_grouped(
    group: dist.ProcessGroup, times: int, buffers: Buffers, case: CollectiveCase
) -> PreparedCase:
    """Prepare a case of grouped calls of tutti.comm.

    The tensors are matrices with one row per call, and every row is checked.
    """
    if case.bytes * times > _MAX_GROUPED_BYTES:
        limit = _MAX_GROUPED_BYTES >> 20
        raise Unsupported(f"{times} messages of {case.bytes} bytes are more than {limit} MiB")
    name = case.operation.name
    if name in ("all_gather_uneven", "all_to_all_uneven", "barrier"):
        raise Unsupported(f"comm.group() does not support {name}")

    def take(role: str, count: int) -> Tensor:
        return buffers.take(f"{role}, grouped", count * times, case.dtype).view(times, count)

    sent, received, fill, check = allocate(case, take)
    if name == "send_recv":
        to, source = case.neighbours
        calls = [partial(comm.send, row, to) for row in sent]
        calls += [partial(comm.recv, row, source) for row in received]
    else:
        function: Any = getattr(comm, name)
        native_in_place = case.operation.native == "in"
        has_in = name != "scatter" or case.is_root
        has_out = not case.in_place if native_in_place else case.receives
        calls = [
            partial(function, row if has_in else None, out=out if has_out else None)
            for row, out in zip(sent, received, strict=True)
        ]

    def call_all() -> None:
        with comm.group():
            for call in calls:
                call(group=group)

    return PreparedCase(fill, check, call_all, operations=times)


# ---- Symmetric memory ----


def _prepare_zero_copy(
    group: dist.ProcessGroup, heap: symmetric.Heap, case: CollectiveCase
) -> PreparedCase:
    """Prepare a case on the shm backend with tensors in symmetric memory.

    Peers read such tensors directly, without a copy.
    """
    empty, free = _heap_tensors(heap, case.dtype)
    prepared = _prepare_torch_call(case, group, lambda role, count: empty(count).local)
    return PreparedCase(prepared.sent, prepared.received, prepared.call, free)


def _prepare_symmetric(name: str, heap: symmetric.Heap, case: CollectiveCase) -> PreparedCase:
    """Prepare a case on symmetric tensors.

    all_reduce supports every algorithm, all_gather and reduce_scatter only "auto".
    """
    op, algorithm = case.operation.name, _ALGORITHMS[name]
    empty, free = _heap_tensors(heap, case.dtype)
    if op == "all_reduce":
        sent = empty(case.count)
        received = sent if case.in_place else empty(case.count)
        out = None if case.in_place else received
        reduce = partial(symmetric.all_reduce, sent, algorithm=algorithm, out=out)  # type: ignore[arg-type]
        return PreparedCase(sent.local, received.local, reduce, free)
    if algorithm != "auto" or op not in ("all_gather", "reduce_scatter"):
        raise Unsupported(f"{name} has no {op} on symmetric tensors")
    if case.in_place:
        raise Unsupported(f"{op} on symmetric tensors is out of place only")
    function: Any = getattr(symmetric, op)
    gathers = op == "all_gather"
    sent = empty(case.count if gathers else case.total_count)
    result_count = case.total_count if gathers else case.count
    result = torch.empty(result_count, dtype=case.dtype, device=heap.device)
    return PreparedCase(sent.local, result, partial(function, sent, out=result), free)


def _heap_tensors(
    heap: symmetric.Heap, dtype: torch.dtype
) -> tuple[Callable[[int], symmetric.SymmetricTensor], Callable[[], None]]:
    """Return a function that allocates a tensor, and a function that frees all such tensors.

    Tensors are freed in the reverse order of their allocation.
    """
    allocated = ExitStack()

    def empty(count: int) -> symmetric.SymmetricTensor:
        tensor = heap.empty(count, dtype=dtype)
        allocated.callback(heap.free, tensor)
        return tensor

    return empty, allocated.close


def _prepare_staged(stage: Stage, buffers: Buffers, case: CollectiveCase) -> PreparedCase:
    """Prepare an in-place all_reduce of an ordinary tensor through a symmetric buffer."""
    if case.operation.name != "all_reduce" or not case.in_place:
        raise Unsupported("staged has all_reduce in place only")
    if case.bytes > STAGED_BYTES:
        raise Unsupported(f"the symmetric buffer has {STAGED_BYTES} bytes")
    tensor = buffers.take("received", case.count, case.dtype)
    return PreparedCase(tensor, tensor, partial(stage.all_reduce, tensor))
