"""Open MPI as a contender, through mpi4py: what shared memory on one host can do without torch.

MPI's ranks must be started by mpirun, and tutti understands it: so where MPI takes part, mpirun
starts the ranks, and torch's backends run in the very same processes.
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

from tutti.bench.attempt import Unsupported
from tutti.bench.case import Buffers, Case, Prepared
from tutti.measure.bus_bandwidth import uneven_shards
from tutti.world.errors import UsageError

_TYPES = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
}
# Any of these is there where MPI can find the other ranks: by mpirun, or by Slurm with PMIx.
_MPI_STARTED = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MPI_LOCALRANKID")

# How mpirun ends when the signal that it passed on has killed a rank.
_ENDED_BY_SIGNALS = (128 + signal.SIGUSR1, 128 + signal.SIGTERM)


def mpirun_command(ranks: int, command: Sequence[str]) -> list[str]:
    """`command` as an Open MPI job on this host; says what is missing."""
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
    # Inside a Slurm job mpirun would deal the ranks out to all of its nodes.
    flags = ["-n", str(ranks), "--host", f"localhost:{ranks}", "--bind-to", "none"]
    flags += ["--oversubscribe", "--quiet"]
    if os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    return [program, *flags, *command]


def run_job(job: Sequence[str], width: int) -> int:
    """Run an mpirun command to its end; returns its exit code.

    At Ctrl-C mpirun itself would kill its ranks within a second, and what they measured would be
    lost. So it is kept from the terminal's signals, and passes SIGUSR1 on to its ranks: they stop
    in good order. Asked twice, it ends them; so does SIGUSR1 before they have begun to measure.
    """
    with subprocess.Popen(
        list(job),
        # mpirun gives rank 0 a terminal that does not know how wide it is.
        env={**os.environ, "COLUMNS": str(width)},
        stdin=subprocess.DEVNULL,
        process_group=0,
    ) as mpirun:
        asked = False

        def pass_on(number: int, frame: FrameType | None) -> None:
            nonlocal asked
            mpirun.send_signal(signal.SIGTERM if asked else signal.SIGUSR1)
            asked = True

        before = {each: signal.signal(each, pass_on) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = mpirun.wait()
            if asked and code in _ENDED_BY_SIGNALS:
                print("tutti bench: stopped, nothing was measured yet", file=sys.stderr)
                return 130
            return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class OpenMpi:
    """MPI's own calls on numpy views of ordinary tensors."""

    name = "mpi"

    def __init__(self, buffers: Buffers, ranks: int) -> None:
        if "SLURM_STEP_ID" in os.environ and not any(map(os.environ.__contains__, _MPI_STARTED)):
            # Without this MPI itself would end the process, and all of srun's ranks with it.
            raise Unsupported(
                "srun started the ranks, and not for MPI: use srun --mpi=pmix, or mpirun in the "
                "job, or let tutti bench start ranks with --ranks"
            )
        import mpi4py

        # Only one thread calls MPI: it need not lock against others.
        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._world: Any = MPI.COMM_WORLD
        self._buffers = buffers
        self.about = MPI.Get_library_version().split(",")[0].strip()
        if self._world.size != ranks:
            raise Unsupported(
                f"MPI sees {self._world.size} of the {ranks} ranks: start them with the mpirun of "
                f"{self.about}, or let tutti bench start them with --ranks"
            )

    def prepare(self, case: Case) -> Prepared:
        """The case with MPI's own call."""
        if case.dtype not in _TYPES:
            raise Unsupported(f"MPI has no type for {case.dtype}")
        datatype = getattr(self._mpi, _TYPES[case.dtype])
        world, here = self._world, self._mpi.IN_PLACE
        take = partial(self._buffers.take, dtype=case.dtype)
        count, every, root = case.count, case.all_shares, case.rank == 0
        in_place = case.placement == "in"
        nothing = torch.empty(0, dtype=case.dtype)

        def of(tensor: torch.Tensor) -> list[Any]:
            return [tensor.numpy(), datatype]

        match case.operation.name:
            case "all_reduce":
                received = take("received", count)
                sent = received if in_place else take("sent", count)
                call = partial(world.Allreduce, here if in_place else of(sent), of(received))
            case "reduce":
                received = take("received", count)
                sent = received if in_place else take("sent", count)
                given = here if in_place and root else of(sent)
                call = partial(world.Reduce, given, of(received) if root else None)
                received = received if root else nothing
            case "broadcast":
                received = take("received", count)
                sent = received if in_place else take("sent", count)
                broadcast = partial(world.Bcast, of(received))
                call = (
                    broadcast if in_place or not root else partial(_copy, received, sent, broadcast)
                )
                sent = sent if root else nothing
            case "all_gather":
                received = take("received", every)
                sent = received[case.rank * count :][:count] if in_place else take("sent", count)
                call = partial(world.Allgather, here if in_place else of(sent), of(received))
            case "reduce_scatter":
                # In place, MPI leaves a rank's share at the front of its buffer.
                sent = take("sent", every)
                received = sent[:count] if in_place else take("received", count)
                given = (here, of(sent)) if in_place else (of(sent), of(received))
                call = partial(world.Reduce_scatter_block, *given)
            case "gather":
                received = take("received", every) if root else nothing
                sent = received[:count] if in_place and root else take("sent", count)
                given = here if in_place and root else of(sent)
                call = partial(world.Gather, given, of(received) if root else None)
            case "scatter":
                sent = take("sent", every) if root else nothing
                received = sent[:count] if in_place and root else take("received", count)
                into = here if in_place and root else of(received)
                call = partial(world.Scatter, of(sent) if root else None, into)
            case "all_to_all":
                sent, received = take("sent", every), take("received", every)
                call = partial(world.Alltoall, of(sent), of(received))
            case "send_recv":
                sent, received = take("sent", count), take("received", count)
                following, previous = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks
                call = partial(
                    world.Sendrecv,
                    *(of(sent), following),
                    recvbuf=of(received),
                    source=previous,
                )
            case "all_gather_uneven":
                shares = uneven_shards(count, case.ranks)
                sent, received = take("sent", shares[case.rank]), take("received", every)
                call = partial(world.Allgatherv, of(sent), [received.numpy(), shares, datatype])
            case "all_to_all_uneven":
                shares = uneven_shards(count, case.ranks)
                splits = [shares[(case.rank + each) % case.ranks] for each in range(case.ranks)]
                sent, received = take("sent", every), take("received", every)
                given = ([each.numpy(), splits, datatype] for each in (sent, received))
                call = partial(world.Alltoallv, *given)
            case _:
                sent, received, call = nothing, nothing, world.Barrier
        return Prepared(sent, received, call)


def _copy(received: torch.Tensor, sent: torch.Tensor, call: Any) -> None:
    received.copy_(sent)
    call()


def _open_mpi() -> str | None:
    for name in ("mpirun.openmpi", "mpirun"):
        program = shutil.which(name)
        if program is None:
            continue
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30)
        if "Open MPI" in said.stdout:
            return program
    return None
