"""A world of local ranks: what to start on this host, checked and prepared."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tutti.machine.cpus import allowed_cpus, cpu_quota
from tutti.machine.gpus import visible_gpu_count
from tutti.world.conductor import Conductor
from tutti.world.errors import UsageError
from tutti.world.gpu_sharing import MpsDaemon, shared_gpu_variables
from tutti.world.identity import clean_of_launchers
from tutti.world.network import free_port
from tutti.world.output import RankOutput
from tutti.world.placement import refuse_more_ranks_than_gpus
from tutti.world.timeouts import START_TIMEOUT, TIMEOUT, checked_seconds


@dataclass(frozen=True)
class LocalWorld:
    """What to start on this host, and how. The fields mean what the flags of `tutti run` mean."""

    command: Sequence[str]
    ranks: int
    device: str = "auto"
    ranks_per_gpu: int = 1
    show: Literal["all", "first", "none"] = "all"
    log_dir: Path | None = None
    start_timeout: float = START_TIMEOUT
    timeout: float = TIMEOUT
    grace: float = 5.0
    answers: Sequence[int] = (2,)
    """Exit codes with which ranks answer, in good order, after rank 0 has said why."""

    def check(self) -> None:
        """Refuse what cannot work, before anything is started."""
        if self.ranks < 1:
            raise UsageError(f"--ranks {self.ranks}: a world has at least one rank, use -n 1")
        if self.ranks_per_gpu < 1:
            raise UsageError(f"--ranks-per-gpu {self.ranks_per_gpu}: use 1 or more")
        for name in ("start_timeout", "timeout", "grace"):
            checked_seconds(f"--{name.replace('_', '-')}", getattr(self, name))
        gpus = 0 if self.device == "cpu" else visible_gpu_count()
        if gpus:
            refuse_more_ranks_than_gpus(self.ranks, gpus, self.ranks_per_gpu, os.uname().nodename)
        elif self.device == "cuda" or self.ranks_per_gpu > 1:
            flag = "--device cuda" if self.device == "cuda" else "--ranks-per-gpu"
            raise UsageError(f"{flag}: no GPU is visible on this host: leave the flag out")

    def run(self, env: Mapping[str, str] | None = None) -> int:
        """Run it to its end; returns the exit code of the first failure, or 0."""
        self.check()
        shared = clean_of_launchers(os.environ if env is None else env)
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tutti-run-")))
            if self.ranks_per_gpu > 1:
                note = f"{self.ranks_per_gpu} ranks share one GPU: this shows correctness"
                print(f"tutti run: {note}, not links between GPUs", file=sys.stderr)
                shared |= _start_mps(scratch, stack)
            output = stack.enter_context(RankOutput(self.ranks, self.show, self.log_dir))
            environments = self._environments(shared, scratch)
            return Conductor(self.command, environments, output, self.grace, self.answers).run()

    def _environments(self, shared: Mapping[str, str], scratch: Path) -> list[dict[str, str]]:
        """What each rank is told: the names torchrun uses, and ours (docs/world.md lists them)."""
        cores = min(len(allowed_cpus()), cpu_quota() or sys.maxsize)
        common = {
            # Without it every rank would start a thread per core of the machine.
            "OMP_NUM_THREADS": str(max(1, cores // self.ranks)),
            # Output is read from a pipe: a buffered line would come minutes late.
            "PYTHONUNBUFFERED": "1",
            **shared,
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TUTTI_RUN_ID": scratch.name,
            "TUTTI_RANKS_PER_GPU": str(self.ranks_per_gpu),
            "TUTTI_START_TIMEOUT": str(self.start_timeout),
            "TUTTI_TIMEOUT": str(self.timeout),
        }
        if self.device == "cpu":
            common["CUDA_VISIBLE_DEVICES"] = ""
        return [
            {
                **common,
                **(shared_gpu_variables(rank, one_machine=True) if self.ranks_per_gpu > 1 else {}),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "TUTTI_REPORT": str(scratch / f"rank{rank}.json"),
            }
            for rank in range(self.ranks)
        ]


def _start_mps(scratch: Path, stack: ExitStack) -> dict[str, str]:
    if not MpsDaemon.available():
        slow = "ranks on one GPU will take turns, which is slow"
        print(f"tutti run: nvidia-cuda-mps-control is not installed: {slow}", file=sys.stderr)
        return {}
    daemon = MpsDaemon(scratch)
    stack.callback(_stop_mps, daemon)
    # No signal may come between the daemon's start and our knowing how to end it.
    with _signals_held():
        try:
            daemon.start()
        except (subprocess.SubprocessError, OSError) as error:
            print(
                f"tutti run: MPS does not start ({error}): ranks will take turns", file=sys.stderr
            )
            return {}
    return daemon.variables


def _stop_mps(daemon: MpsDaemon) -> None:
    with _signals_held():
        daemon.stop()


@contextmanager
def _signals_held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
