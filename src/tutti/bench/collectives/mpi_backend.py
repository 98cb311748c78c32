"""Open MPI as a backend, through mpi4py: messages through shared memory, without torch.

MPI ranks must be started by mpirun, or by Slurm with PMIx. With --backends mpi, `tutti bench`
starts its local ranks with mpirun, and the torch backends run in the same processes.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch

from tutti.bench import Unsupported
from tutti.bench.collectives.cases import (
    Backend,
    Buffers,
    CollectiveCase,
    PreparedCase,
    allocate,
    copy_then_call,
)
from tutti.measure.message_cost import uneven_shards
from tutti.world.errors import UsageError

_MPI_TYPES = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
}
# At least one of these variables is set if MPI can find the other ranks, that is, if mpirun or
# Slurm with PMIx started the ranks.
_MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MPI_LOCALRANKID")

# Exit codes of mpirun if a signal that mpirun forwarded has killed a rank.
_KILLED_BY_SIGNAL = (128 + signal.SIGUSR1, 128 + signal.SIGTERM)


def mpirun_command(ranks: int, command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` as an Open MPI job on this host.

    Raises UsageError if mpi4py or mpirun is missing.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise UsageError(
            "--backends mpi needs mpi4py: pip install 'tutti-torch[mpi]', or leave mpi out"
        )
    program = _open_mpi()
    if program is None:
        raise UsageError(
            "--backends mpi needs Open MPI's mpirun, and none is on the PATH: install openmpi-bin, "
            "or leave mpi out"
        )
    # Without --host, mpirun inside a Slurm job would place ranks on all nodes of the job.
    flags = ["-n", str(ranks), "--host", f"localhost:{ranks}", "--bind-to", "none"]
    flags += ["--oversubscribe", "--quiet"]
    if os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    return [program, *flags, *command]


def _open_mpi() -> str | None:
    for name in ("mpirun.openmpi", "mpirun"):
        program = shutil.which(name)
        if program is None:
            continue
        version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30)
        if "Open MPI" in version.stdout:
            return program
    return None


def run_mpirun(command: Sequence[str], width: int) -> int:
    """Run an mpirun command to its end; returns its exit code.

    After Ctrl-C, mpirun would kill its ranks within a second, and their results would be lost.
    Therefore mpirun runs in its own process group, which Ctrl-C does not reach. This process sends
    SIGUSR1 instead, and mpirun forwards SIGUSR1 to the ranks, which finish their round and write
    their files. A second Ctrl-C terminates the ranks. The first Ctrl-C also terminates ranks that
    have not installed their signal handlers yet.
    """
    with subprocess.Popen(
        list(command),
        # mpirun gives rank 0 a pseudo-terminal whose width is not set.
        env={**os.environ, "COLUMNS": str(width)},
        stdin=subprocess.DEVNULL,
        process_group=0,
    ) as mpirun:
        interrupted = False

        def forward(number: int, frame: FrameType | None) -> None:
            nonlocal interrupted
            mpirun.send_signal(signal.SIGTERM if interrupted else signal.SIGUSR1)
            interrupted = True

        before = {each: signal.signal(each, forward) for each in (signal.SIGINT, signal.SIGTERM)}
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

    Raises Unsupported, with the reason, if MPI cannot be used.
    """
    if "SLURM_STEP_ID" in os.environ and not any(map(os.environ.__contains__, _MPI_VARIABLES)):
        # MPI_Init would end this process, and srun would then end all other ranks.
        raise Unsupported(
            "srun started the ranks without MPI support: use srun --mpi=pmix, or mpirun in the "
            "job, or let tutti bench start the ranks with --ranks"
        )
    try:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"  # only one thread calls MPI: no locking needed
        from mpi4py import MPI
    except ImportError as error:
        raise Unsupported(f"{error}: pip install 'tutti-torch[mpi]'") from None
    about, size = MPI.Get_library_version().split(",")[0].strip(), MPI.COMM_WORLD.size
    if size != ranks:
        raise Unsupported(
            f"MPI sees {size} of the {ranks} ranks: start them with the mpirun of {about}, or let "
            "tutti bench start them with --ranks"
        )
    return Backend("mpi", about, partial(_prepare, MPI, buffers))


def _prepare(mpi: Any, buffers: Buffers, case: CollectiveCase) -> PreparedCase:
    if case.dtype not in _MPI_TYPES:
        raise Unsupported(f"MPI has no type for {case.dtype}")
    datatype, world = getattr(mpi, _MPI_TYPES[case.dtype]), mpi.COMM_WORLD
    sent, received, fill, check = allocate(case, partial(buffers.take, dtype=case.dtype))
    if case.operation.name == "reduce_scatter" and case.in_place:
        # MPI writes the shard of a rank to the start of the rank's buffer.
        received = check = sent[: case.count]
    send, receive = [sent.numpy(), datatype], [received.numpy(), datatype]
    send_uneven, receive_uneven = (
        [each.numpy(), case.uneven_splits(case.rank), datatype] for each in (sent, received)
    )
    gathered = [received.numpy(), uneven_shards(case.count, case.ranks), datatype]
    send_or_in_place = mpi.IN_PLACE if case.in_place else send
    root = case.is_root
    # In rooted operations, only the root passes IN_PLACE.
    root_source = send_or_in_place if root else send
    root_target = mpi.IN_PLACE if root and case.in_place else receive
    scattered = (mpi.IN_PLACE, send) if case.in_place else (send, receive)
    calls: dict[str, tuple[Any, ...]] = {
        "all_reduce": (world.Allreduce, send_or_in_place, receive),
        "reduce": (world.Reduce, root_source, receive if root else None),
        "broadcast": (world.Bcast, receive),
        "all_gather": (world.Allgather, send_or_in_place, receive),
        "reduce_scatter": (world.Reduce_scatter_block, *scattered),
        "gather": (world.Gather, root_source, receive if root else None),
        "scatter": (world.Scatter, send if root else None, root_target),
        "all_to_all": (world.Alltoall, send, receive),
        # (buffer, to, tag, buffer, from)
        "send_recv": (world.Sendrecv, send, case.neighbours[0], 0, receive, case.neighbours[1]),
        "all_gather_uneven": (world.Allgatherv, send, gathered),
        "all_to_all_uneven": (world.Alltoallv, send_uneven, receive_uneven),
        "barrier": (world.Barrier,),
    }
    function, *arguments = calls[case.operation.name]
    call = partial(function, *arguments)
    if case.operation.name == "broadcast" and root and not case.in_place:
        call = partial(copy_then_call, received, sent, call)
    return PreparedCase(fill, check, call)
