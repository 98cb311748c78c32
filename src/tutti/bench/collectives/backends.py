"""The backends of `tutti bench collectives`: torch.distributed, symmetric memory, Open MPI."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti import comm
from tutti.bench import Unsupported
from tutti.bench.collectives import cases
from tutti.bench.collectives.cases import Backend, Buffers, CollectiveCase, PreparedCase
from tutti.comm import symmetric
from tutti.comm.symmetric.heap_collectives import STAGED_BYTES, Stage
from tutti.measure.collective_bandwidth import uneven_shards
from tutti.world.errors import UsageError
from tutti.world.world import World

# torch 2.13 renamed these two functions. From that version on, the old names print a warning.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# {name of the backend: algorithm of symmetric.all_reduce}
_ALGORITHMS = {"symmetric": "auto", "one-shot": "one_shot", "two-shot": "two_shot", "ring": "ring"}
# Maximum total size in bytes of all messages in a comm.group(). Each call in a group needs its own
# tensors, and large messages gain nothing from a group.
_MAX_GROUPED_BYTES = 256 << 20


@contextmanager
def open_backends(
    names: Sequence[str], world: World, largest: int
) -> Iterator[tuple[list[Backend], list[dict[str, str]]]]:
    """Yield (available backends, list of {"backend", "reason"} for unavailable backends).

    All ranks must enter and leave the `with` block together. `largest` is the size of the largest
    message in bytes.
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
        # The heap holds a send buffer and a receive buffer, plus alignment.
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
    """Create a process group of all ranks. Return (group, description of its backend)."""
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
    """Return a backend that calls torch.distributed on ordinary tensors."""

    def prepare(case: CollectiveCase) -> PreparedCase:
        return _prepare_torch_call(case, group, partial(buffers.take, dtype=case.dtype))

    return Backend(name, about, prepare, group)


def _prepare_torch_call(
    case: CollectiveCase, group: dist.ProcessGroup, take: Callable[[str, int], Tensor]
) -> PreparedCase:
    """Prepare a case as a call of torch.distributed on the tensors that `take` returns."""
    sent, received, fill, check = cases.allocate(case, take)
    splits = case.uneven_splits(case.rank)
    sent_shards, received_shards = (
        list(tensor.chunk(case.ranks)) if case.is_root else None for tensor in (sent, received)
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
        # torch.distributed has only an in-place form of the operation, so copy the input first.
        call = partial(cases.copy_then_call, received, sent, call)
    return PreparedCase(fill, check, call)


def _all_gather_uneven(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    # torch has no all-gather of uneven shards that every backend supports. comm.all_gather_uneven
    # pads the shards and returns a list of tensors.
    torch.cat(comm.all_gather_uneven(sent, group=group), out=received)


def send_recv(
    sent: Tensor, received: Tensor, to: int, source: int, group: dist.ProcessGroup
) -> None:
    """Send to the rank `to` while receiving from the rank `source`."""
    if sent.is_cuda:
        # Post send and receive in one batch. A separate NCCL send waits for the peer's receive, so
        # a ring of separate sends would deadlock.
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
    """Yield every backend. After each torch.distributed backend, also yield its grouped variant.

    The grouped variant makes `times` calls in one comm.group().
    """
    buffers = Buffers(device)
    about = f"{times} calls in one comm.group(); the reported time is per call"
    for backend in backends:
        yield backend
        if backend.group is not None:
            prepare = partial(_prepare_grouped, backend.group, times, buffers)
            yield Backend(f"{backend.name} x{times}", about, prepare)


def _prepare_grouped(
    group: dist.ProcessGroup, times: int, buffers: Buffers, case: CollectiveCase
) -> PreparedCase:
    """Prepare grouped tutti.comm calls. The tensors are matrices with one row per call."""
    if case.bytes * times > _MAX_GROUPED_BYTES:
        limit = _MAX_GROUPED_BYTES >> 20
        raise Unsupported(f"{times} messages of {case.bytes} bytes exceed {limit} MiB")
    name = case.operation.name
    if name in ("all_gather_uneven", "all_to_all_uneven", "barrier"):
        raise Unsupported(f"comm.group() does not support {name}")

    def take(role: str, count: int) -> Tensor:
        return buffers.take(f"{role}, grouped", count * times, case.dtype).view(times, count)

    sent, received, fill, check = cases.allocate(case, take)
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
    """Prepare a case on the shm backend with symmetric tensors.

    Peers read symmetric tensors directly, without a copy.
    """
    empty, free = _heap_tensors(heap, case.dtype)
    prepared = _prepare_torch_call(case, group, lambda role, count: empty(count).local)
    return PreparedCase(prepared.sent, prepared.received, prepared.call, free)


def _prepare_symmetric(name: str, heap: symmetric.Heap, case: CollectiveCase) -> PreparedCase:
    """Prepare a collective on symmetric tensors.

    all_reduce has several algorithms. all_gather and reduce_scatter have only "auto".
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
        raise Unsupported(f"{op} on symmetric tensors works only out of place")
    function: Any = getattr(symmetric, op)
    sent = empty(case.sent_count)
    result = torch.empty(case.received_count, dtype=case.dtype, device=heap.device)
    return PreparedCase(sent.local, result, partial(function, sent, out=result), free)


def _heap_tensors(
    heap: symmetric.Heap, dtype: torch.dtype
) -> tuple[Callable[[int], symmetric.SymmetricTensor], Callable[[], None]]:
    """Return a function that allocates a tensor, and a function that frees all its tensors."""
    allocated = ExitStack()  # frees in the reverse order of allocation

    def empty(count: int) -> symmetric.SymmetricTensor:
        tensor = heap.empty(count, dtype=dtype)
        allocated.callback(heap.free, tensor)
        return tensor

    return empty, allocated.close


def _prepare_staged(stage: Stage, buffers: Buffers, case: CollectiveCase) -> PreparedCase:
    """Prepare an in-place all_reduce of an ordinary tensor through a symmetric buffer."""
    if case.operation.name != "all_reduce" or not case.in_place:
        raise Unsupported("staged supports only in-place all_reduce")
    if case.bytes > STAGED_BYTES:
        raise Unsupported(f"the message exceeds the symmetric buffer of {STAGED_BYTES} bytes")
    tensor = buffers.take("received", case.count, case.dtype)
    return PreparedCase(tensor, tensor, partial(stage.all_reduce, tensor))


# ---- Open MPI, through mpi4py ----

# MPI requires that mpirun, or Slurm with PMIx, starts the ranks. With --backends mpi, `tutti bench`
# therefore starts its local ranks with mpirun. The torch backends run in the same processes.
_MPI_TYPES = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
}
# At least one of these variables is set if mpirun or Slurm with PMIx started the ranks.
_MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MPI_LOCALRANKID")

# Exit codes of mpirun if a forwarded SIGUSR1 or SIGTERM has killed a rank.
_KILLED_BY_SIGNAL = (128 + signal.SIGUSR1, 128 + signal.SIGTERM)


def mpirun_command(ranks: int, command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` as an Open MPI job on this host."""
    if importlib.util.find_spec("mpi4py") is None:
        raise UsageError("--backends mpi needs mpi4py: pip install 'tutti-torch[mpi]'")
    found = filter(None, map(shutil.which, ("mpirun.openmpi", "mpirun")))
    program = next((path for path in found if "Open MPI" in _version(path)), None)
    if program is None:
        raise UsageError("--backends mpi needs Open MPI's mpirun on the PATH: install openmpi-bin")
    # Without --host, mpirun inside a Slurm job would place ranks on all nodes of the job.
    flags = ["-n", str(ranks), "--host", f"localhost:{ranks}", "--bind-to", "none"]
    flags += ["--oversubscribe", "--quiet"]
    if os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    return [program, *flags, *command]


def _version(mpirun: str) -> str:
    command = [mpirun, "--version"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout


def run_mpirun(command: Sequence[str], width: int) -> int:
    """Run an mpirun command until it ends, and return its exit code.

    If Ctrl-C reached mpirun, it would kill its ranks within a second, and their results would be
    lost. Therefore mpirun runs in its own process group, which Ctrl-C does not reach. On Ctrl-C,
    this process sends SIGUSR1 to mpirun, which forwards the signal to the ranks. The ranks finish
    their round and write their files. A rank that has not installed its signal handlers yet ends.
    A second Ctrl-C terminates the ranks.
    """
    with subprocess.Popen(
        list(command),
        # The pseudo-terminal that mpirun gives to rank 0 has no width.
        env={**os.environ, "COLUMNS": str(width)},
        stdin=subprocess.DEVNULL,
        process_group=0,
    ) as mpirun:
        interrupted = False

        def forward(number: int, frame: FrameType | None) -> None:
            nonlocal interrupted
            mpirun.send_signal(signal.SIGTERM if interrupted else signal.SIGUSR1)
            interrupted = True

        before = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = mpirun.wait()
            if interrupted and code in _KILLED_BY_SIGNAL:
                print("tutti bench: stopped before anything was measured", file=sys.stderr)
                return 130
            return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def open_mpi(buffers: Buffers, ranks: int) -> Backend:
    """Return a backend that calls MPI on numpy views of ordinary tensors.

    Raises Unsupported if MPI cannot be used.
    """
    if "SLURM_STEP_ID" in os.environ and not any(map(os.environ.__contains__, _MPI_VARIABLES)):
        # MPI_Init would end this process, and srun would then end all other ranks.
        raise Unsupported("srun started the ranks without MPI: use srun --mpi=pmix, or mpirun")
    try:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"  # only one thread calls MPI, so no locking is needed
        from mpi4py import MPI
    except ImportError as error:
        raise Unsupported(f"{error}: pip install 'tutti-torch[mpi]'") from None
    about, size = MPI.Get_library_version().split(",")[0].strip(), MPI.COMM_WORLD.size
    if size != ranks:
        raise Unsupported(
            f"MPI has {size} of {ranks} ranks: start all ranks with the mpirun of {about}"
        )
    return Backend("mpi", about, partial(_prepare_mpi, MPI, buffers))


def _prepare_mpi(mpi: Any, buffers: Buffers, case: CollectiveCase) -> PreparedCase:
    if case.dtype not in _MPI_TYPES:
        raise Unsupported(f"MPI has no data type for {case.dtype}")
    name, root, in_place = case.operation.name, case.is_root, case.in_place
    datatype, world = getattr(mpi, _MPI_TYPES[case.dtype]), mpi.COMM_WORLD
    sent, received, fill, check = cases.allocate(case, partial(buffers.take, dtype=case.dtype))
    if name == "reduce_scatter" and in_place:
        # MPI writes this rank's shard to the start of the buffer.
        received = check = sent[: case.count]
    send, receive = [sent.numpy(), datatype], [received.numpy(), datatype]
    splits, shards = case.uneven_splits(case.rank), uneven_shards(case.count, case.ranks)
    send_splits, receive_splits, receive_shards = (
        [tensor.numpy(), counts, datatype]
        for tensor, counts in ((sent, splits), (received, splits), (received, shards))
    )
    send_or_in_place = mpi.IN_PLACE if in_place else send
    # In rooted operations, only the root passes IN_PLACE.
    root_source = send_or_in_place if root else send
    root_target = mpi.IN_PLACE if root and in_place else receive
    shard_target = send if in_place else receive
    calls: dict[str, tuple[Any, ...]] = {
        "all_reduce": (world.Allreduce, send_or_in_place, receive),
        "reduce": (world.Reduce, root_source, receive if root else None),
        "broadcast": (world.Bcast, receive),
        "all_gather": (world.Allgather, send_or_in_place, receive),
        "reduce_scatter": (world.Reduce_scatter_block, send_or_in_place, shard_target),
        "gather": (world.Gather, root_source, receive if root else None),
        "scatter": (world.Scatter, send if root else None, root_target),
        "all_to_all": (world.Alltoall, send, receive),
        # The arguments are (send buffer, to, tag, receive buffer, from).
        "send_recv": (world.Sendrecv, send, case.neighbours[0], 0, receive, case.neighbours[1]),
        "all_gather_uneven": (world.Allgatherv, send, receive_shards),
        "all_to_all_uneven": (world.Alltoallv, send_splits, receive_splits),
        "barrier": (world.Barrier,),
    }
    function, *arguments = calls[name]
    call = partial(function, *arguments)
    if name == "broadcast" and root and not in_place:
        call = partial(cases.copy_then_call, received, sent, call)
    return PreparedCase(fill, check, call)
