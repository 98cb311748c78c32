"""The job that is run with each number of ranks: a recipe of tutti, or any training program."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tutti.machine.cpu_numa import allowed_cpus, cpu_quota
from tutti.machine.gpus import visible_gpu_count
from tutti.profile.captured_command import captured_environment
from tutti.world.errors import UsageError
from tutti.world.launch import LocalWorld

Mode = Literal["strong", "weak"]

RANKS = "{ranks}"  # placeholder for the number of ranks in a command
PROFILER_WARMUP = 2
_RANK_FLAGS = {
    "torchrun": "--nproc-per-node",
    "torch.distributed.run": "--nproc-per-node",
    "torch.distributed.launch": "--nproc-per-node",
    "accelerate": "--num_processes",
    "deepspeed": "--num_gpus",
    "mpirun": "-n",
    "mpiexec": "-n",
    "srun": "-n",
    "tutti": "-n",
}


@dataclass(frozen=True)
class Schedule:
    """The steps of a run: first skipped steps, then timed steps, then recorded steps."""

    settle: int = 5
    timed: int = 20
    recorded: int = 5

    @property
    def steps(self) -> int:
        """Optimizer steps that a run needs; the first one starts the capture."""
        return 1 + self.settle + self.timed + PROFILER_WARMUP + self.recorded


@dataclass(frozen=True)
class Job:
    """A command for any number of ranks.

    `starts_ranks`: the command starts all ranks itself, and {ranks} in it is replaced by their
    number; otherwise it is the command of one rank, and `tutti run` starts the ranks. `ends`: the
    program ends by itself after the schedule.
    """

    command: tuple[str, ...]
    starts_ranks: bool = False
    ends: bool = False
    device: str = "auto"
    ranks_per_gpu: int = 1

    def command_for(self, ranks: int, extra: Sequence[str] = ()) -> list[str]:
        """The whole command, with `extra` words at its end."""
        words = [word.replace(RANKS, str(ranks)) for word in (*self.command, *extra)]
        if self.starts_ranks:
            return words
        run = [sys.executable, "-m", "tutti", "run", "-n", str(ranks), "--device", self.device]
        run += ["--ranks-per-gpu", str(min(ranks, self.ranks_per_gpu))]
        return [*run, "--", *words]

    def environment(self, schedule: Schedule, traces: Path, most_ranks: int) -> dict[str, str]:
        """The environment variables with which every rank records its own trace."""
        settings = {
            "directory": str(traces),
            "wait": schedule.settle + schedule.timed,
            "warmup": PROFILER_WARMUP,
            "active": schedule.recorded,
            "stop": not self.ends,
        }
        env = captured_environment(settings, os.environ)
        # A rank has the same number of threads in every run. Otherwise a single rank would use all
        # cores, and would be compared with ranks that have only a share of the cores.
        env.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // most_ranks)))
        return env

    def check(self, sizes: Sequence[int]) -> None:
        """Raise UsageError, before the first run, if this host cannot start so many ranks."""
        for ranks in () if self.starts_ranks else sizes:
            shared = min(ranks, self.ranks_per_gpu)
            LocalWorld(self.command, ranks, self.device, ranks_per_gpu=shared).check()

    def describe(self, sizes: Sequence[int]) -> str:
        """A sentence about the number of threads, which is the same in every run."""
        given = os.environ.get("OMP_NUM_THREADS")
        threads = given or str(max(1, _cores() // max(sizes)))
        reason = "OMP_NUM_THREADS" if given else f"{_cores()} cores / {max(sizes)}"
        return f"every rank has {threads} thread{'s' * (threads != '1')} in every run ({reason})"

    def notes(self, sizes: Sequence[int]) -> list[str]:
        """Notes about conditions that limit what can be concluded from the results."""
        notes = []
        if self.ranks_per_gpu > 1:
            notes.append("ranks share a GPU: this measures software overhead, not GPU links")
        on_cpus = self.device == "cpu" or not visible_gpu_count()
        if on_cpus and max(sizes) > _cores() and not self.starts_ranks:
            notes.append(f"{max(sizes)} ranks share {_cores()} cores: they slow each other down")
        return notes


def _cores() -> int:
    return min(len(allowed_cpus()), cpu_quota() or sys.maxsize)


def starts_ranks_itself(words: Sequence[str], sizes: Sequence[int]) -> bool:
    """Whether the command starts its ranks; raises UsageError for a launcher without {ranks}."""
    if any(RANKS in word for word in words):
        return True
    launcher = _launcher_of(words)
    if launcher is None:
        return False
    flag = _RANK_FLAGS[launcher]
    raise UsageError(
        f"{launcher} starts ranks itself, and nothing in the command says how many: write {RANKS} "
        f"for the number ({launcher} {'run ' * (launcher == 'tutti')}{flag} {RANKS} …), or give "
        f"the script alone: tutti scale --ranks {','.join(map(str, sizes))} -- train.py"
    )


def _launcher_of(words: Sequence[str]) -> str | None:
    """The launcher that a command begins with: torchrun, python -m torch.distributed.run, …"""
    first = Path(words[0]).name
    if first.startswith(("mpirun.", "mpiexec.")):  # mpirun.openmpi, mpiexec.hydra
        first = first.partition(".")[0]
    if first == "tutti":
        return "tutti" if words[1:2] == ["run"] else None
    if first in _RANK_FLAGS:
        return first
    if re.fullmatch(r"python[\d.]*", first) and words[1:2] == ["-m"] and words[2:3]:
        return words[2] if words[2] in _RANK_FLAGS else None
    return None
