"""Finds the launcher and the rank of this process in environment variables.

One function per launcher returns an Identity, which also names the variable behind each value. If
several launchers are found, the innermost one is used: inside an srun step, the variables of
torchrun and mpirun take precedence over the variables of Slurm.
"""

import hashlib
import os
import random
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from tutti.world.errors import UsageError

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Identity:
    """The values that the launcher set for this process.

    A value is None if the launcher did not set it. The rendezvous then determines the value.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None
    nodes: int | None = None
    master_host: str | None = None
    master_port: int | None = None
    # The id of the job, from which ports are derived. Two jobs on one host have different ids.
    job: str = ""
    # True if torchrun's agent serves the store at the master port. Then all ranks are clients of
    # this store. Otherwise rank 0 serves the store.
    agent_store: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)


def identify(env: Environment) -> Identity:
    """Return the Identity from the innermost launcher, or of a one-rank world without a launcher.

    Raise UsageError if RANK and WORLD_SIZE contradict the variables of a launcher.
    """
    readers = (_from_torch_variables, _from_openmpi, _from_mpich, _from_slurm)
    found = [identity for read in readers if (identity := read(env)) is not None]
    if not found:
        _refuse_incomplete_variables(env)
        values = ("launcher", "rank", "size", "local_rank", "local_size", "node", "nodes")
        reasons = dict.fromkeys(values, "default: no launcher found")
        return Identity("python", 0, 1, 0, 1, 0, 1, reasons=reasons)
    identity = found[0]
    if identity.launcher == "environment":
        # RANK and WORLD_SIZE may have been set in the shell for another run. If a launcher sets
        # other values, either pair could be the wrong one, and the run could hang or train with
        # wrong ranks.
        for other in found[1:]:
            if (identity.rank, identity.size) != (other.rank, other.size):
                rank_variable, size_variable = other.reasons["rank"], other.reasons["size"]
                raise UsageError(
                    f"RANK={identity.rank} and WORLD_SIZE={identity.size} contradict "
                    f"{rank_variable}={other.rank} and {size_variable}={other.size}. Unset RANK "
                    f"and WORLD_SIZE to use {other.launcher}, or unset {rank_variable} and "
                    f"{size_variable}."
                )
    return identity


def without_launcher_variables(env: Environment) -> dict[str, str]:
    """Return a copy of `env` without variables that launchers set."""
    return {
        name: value
        for name, value in env.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }


_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Launchers that set torch's variables. Each launcher is detected if all its listed variables are
# set. "environment" means that the user or a scheduler has set torch's variables.
_TORCH_LAUNCHERS = {
    "torchrun": ("TORCHELASTIC_RUN_ID",),
    "tutti": ("TUTTI_RUN_ID",),
    "environment": _REQUIRED,
}
_OPTIONAL = {
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
    "node": "GROUP_RANK",
    "nodes": "GROUP_WORLD_SIZE",
}
_LAUNCHER_VARIABLES = {
    *_REQUIRED,
    *_OPTIONAL.values(),
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "SLURM_STEP_ID",
    "SLURM_STEPID",
    "TUTTI_RUN_ID",
    "TUTTI_REPORT",
    "TUTTI_RANKS_PER_GPU",
    "TUTTI_TIMEOUT",
    "TUTTI_START_TIMEOUT",
}
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL")


def _from_torch_variables(env: Environment) -> Identity | None:
    for launcher, variables in _TORCH_LAUNCHERS.items():
        if not all(name in env for name in variables):
            continue
        reader = _Reader(env, launcher, " ".join(variables))
        reader.integers(rank="RANK", size="WORLD_SIZE")
        address, port = (reader.text("master", name) for name in ("MASTER_ADDR", "MASTER_PORT"))
        reader.integers(**{value: name for value, name in _OPTIONAL.items() if name in env})
        job = f"{address}:{port}" if launcher == "environment" else env[variables[0]]
        agent_store = launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return reader.identity(job, agent_store=agent_store)
    return None


def _from_openmpi(env: Environment) -> Identity | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    reader = _Reader(env, "openmpi", "OMPI_COMM_WORLD_RANK")
    values = ("rank", "size", "local_rank", "local_size")
    reader.integers(**{value: f"OMPI_COMM_WORLD_{value.upper()}" for value in values})
    host = None
    if not reader.on_one_host and "MASTER_ADDR" not in env:
        # Open MPI does not report the host of rank 0. In a Slurm job, assume the first node of the
        # job. Otherwise assume the host of mpirun. rendezvous.py checks this assumption on rank 0.
        uri = env.get("OMPI_MCA_orte_hnp_uri", "")
        if "SLURM_JOB_NODELIST" in env:
            host = reader.first_node("SLURM_JOB_NODELIST")
        elif "tcp://" in uri:
            host = uri.split("tcp://", 1)[1].split(":", 1)[0].split(",", 1)[0]
            reader.reasons["master"] = "OMPI_MCA_orte_hnp_uri, the host of mpirun"
    job = env.get("PMIX_NAMESPACE", env.get("OMPI_MCA_ess_base_jobid", ""))
    return reader.identity(f"openmpi-{job}", host)


def _from_mpich(env: Environment) -> Identity | None:
    # `srun --mpi=pmi2` also sets PMI_RANK, but not MPI_LOCALRANKID. _from_slurm handles srun.
    if "PMI_RANK" not in env or "MPI_LOCALRANKID" not in env:
        return None
    reader = _Reader(env, "mpich", "PMI_RANK and MPI_LOCALRANKID")
    reader.integers(rank="PMI_RANK", size="PMI_SIZE")
    reader.integers(local_rank="MPI_LOCALRANKID", local_size="MPI_LOCALNRANKS")
    host, job = None, ""
    if reader.on_one_host:
        job = "mpich-" + (env.get("PMI_JOBID") or _socket_peer(env.get("PMI_FD", "")))
    elif "SLURM_STEP_ID" in env:
        # Inside a Slurm job, Hydra (the launcher of MPICH) starts its ranks in a separate job step.
        job = f"mpich-slurm-{env.get('SLURM_JOB_ID', '')}-{env['SLURM_STEP_ID']}"
        host = reader.first_node("SLURM_STEP_NODELIST")
    return reader.identity(job, host)


def _socket_peer(descriptor: str) -> str:
    """Return the process id of Hydra at the other end of this socket, or "" if it is no socket.

    Hydra, the launcher of MPICH, sets no job id. All local ranks of a job are children of one Hydra
    process, so its process id is used as the job id. Then two jobs that run at the same time derive
    different ports.
    """
    try:
        with socket.socket(fileno=os.dup(int(descriptor))) as to_launcher:
            credentials = to_launcher.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            return str(struct.unpack("3i", credentials)[0])
    except (ValueError, OSError):  # not a number, not open or not a socket
        return ""


def _from_slurm(env: Environment) -> Identity | None:
    # SLURM_PROCID or SLURM_NTASKS are also set in the batch script and in an salloc shell, which
    # are not ranks. Only the processes of a job step are ranks.
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return None
    reader = _Reader(env, "slurm", "SLURM_STEP_ID")
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    reader.integers(rank="SLURM_PROCID", size=tasks)
    if reader.values["size"] == 1:
        # A step with one task is usually a shell (srun --pty bash). Commands in this shell start
        # ranks as in any other shell. Or the user has started several steps with one task each, and
        # has set RANK and WORLD_SIZE in each step.
        return None
    reader.integers(local_rank="SLURM_LOCALID", node="SLURM_NODEID")
    node, variable = reader.values["node"], "SLURM_STEP_TASKS_PER_NODE"
    tasks_per_node = reader.text("local_size", variable)
    counts = expand_tasks_per_node(tasks_per_node, variable)
    if node >= len(counts):
        raise UsageError(
            f"SLURM_NODEID is {node}, but {variable}={tasks_per_node} lists only {len(counts)} "
            "nodes. Start the ranks with srun."
        )
    reader.values |= {"local_size": counts[node], "nodes": len(counts)}
    reader.reasons["nodes"] = variable
    # Rank 0 is on the first node of the step's node list. SLURM_LAUNCH_NODE_IPADDR is the host that
    # called srun, and the job's node list may have nodes without a task of this step.
    host = reader.first_node("SLURM_STEP_NODELIST")
    return reader.identity(f"slurm-{env.get('SLURM_JOB_ID', '')}-{env['SLURM_STEP_ID']}", host)


class _Reader:
    """Reads one launcher's variables, and records the variable behind each value."""

    def __init__(self, env: Environment, launcher: str, recognised_by: str) -> None:
        self.env, self.launcher = env, launcher
        self.values: dict[str, Any] = {}  # fields of Identity
        self.reasons = {"launcher": recognised_by}

    @property
    def on_one_host(self) -> bool:
        return bool(self.values.get("local_size") == self.values["size"])

    def text(self, value: str, variable: str) -> str:
        if variable not in self.env:
            raise UsageError(
                f"{self.launcher} started this process, but {variable} is not set. Do not clear "
                "the environment between the launcher and the process."
            )
        self.reasons[value] = variable
        return self.env[variable]

    def integers(self, **variables: str) -> None:
        for value, variable in variables.items():
            text = self.text(value, variable)
            if not text.isdecimal():
                raise UsageError(f"{variable}={text!r} must be an integer >= 0, or unset")
            self.values[value] = int(text)

    def first_node(self, variable: str) -> str | None:
        """Return the first host of a node list, or None if MASTER_ADDR is set and used instead."""
        if "MASTER_ADDR" in self.env:
            return None
        return expand_hosts(self.text("master", variable), variable)[0]

    def identity(self, job: str, host: str | None = None, agent_store: bool = False) -> Identity:
        rank, size = self.values["rank"], self.values["size"]
        if size < 1:
            raise UsageError(f"{self.reasons['size']}={size} must be at least 1")
        if rank >= size:
            variable, limit = self.reasons["rank"], f"{self.reasons['size']}={size}"
            raise UsageError(f"{variable}={rank} must be less than {limit}")
        if self.env.get("MASTER_ADDR"):
            host = self.text("master", "MASTER_ADDR")
        elif self.on_one_host:
            host = "127.0.0.1"
            self.reasons["master"] = f"all {size} ranks are on this host"
        if "MASTER_PORT" in self.env:
            self.integers(port="MASTER_PORT")
        port = self.values.pop("port", None)
        if port is not None and not 0 < port < 65536:
            raise UsageError(f"MASTER_PORT={port} is not a port. Use 1024 to 65535.")
        self.values |= {"master_host": host, "master_port": port, "job": job}
        self.values["agent_store"] = agent_store
        return Identity(self.launcher, **self.values, reasons=self.reasons)


def _refuse_incomplete_variables(env: Environment) -> None:
    """Raise UsageError if torch's variables are incomplete.

    Without this error, each rank would train in its own world of one rank.
    """
    for name in ("WORLD_SIZE", "PMI_SIZE", "RANK"):
        if env.get(name, "0") not in (("0",) if name == "RANK" else ("0", "1")):
            missing = [variable for variable in _REQUIRED if variable not in env]
            raise UsageError(
                f"{name}={env[name]} is set without {' and '.join(missing)}. Set all of "
                f"{', '.join(_REQUIRED)}, or unset {name}."
            )


# Ports for stores. They are below 32768, because Linux uses ports 32768 to 60999 for outgoing
# connections.
_PORTS = range(20000, 30000)


def port_candidates(job: str) -> list[int]:
    """Return the ports that a job tries, in order. The ports depend only on the job id."""
    numbers = struct.unpack(">5H", hashlib.sha256(job.encode()).digest()[:10])
    return [_PORTS[number % len(_PORTS)] for number in numbers]


def free_port() -> int:
    """Return a port that is free now and that Linux does not use for outgoing connections."""
    # random.sample would advance the global generator, which a training script may have seeded.
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise UsageError(f"all ports from {_PORTS[0]} to {_PORTS[-1]} are in use on this host")


_RANGES = r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*"
_HOSTS = re.compile(rf"(?:[^\[\],\s]|\[{_RANGES}\])+")


def expand_hosts(text: str, variable: str = "the node list") -> list[str]:
    """Return the host names of `rack1n[01-03,7],login`, in order. Zero padding is kept."""
    hosts: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):  # split at commas outside brackets
        parts = re.split(r"\[(.*?)\]", item)  # literal, ranges, literal, ranges, …
        choices: list[list[str]] = [[]]
        if _HOSTS.fullmatch(item):
            choices = [_expand_ranges(p) if n % 2 else [p] for n, p in enumerate(parts)]
        if not all(choices):
            raise UsageError(
                f"{variable}={text!r} cannot be parsed at {item!r}. Use a list such as "
                "n[1-4,07],login1, or set MASTER_ADDR and MASTER_PORT."
            )
        hosts.extend("".join(choice) for choice in product(*choices))
    return hosts


def _expand_ranges(ranges: str) -> list[str]:
    """Return the numbers of `01-03,7`, or an empty list if a range descends."""
    expanded: list[str] = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers:
            return []
        width = len(first) if first.startswith("0") else 0
        expanded.extend(str(n).zfill(width) for n in numbers)
    return expanded


def expand_tasks_per_node(text: str, variable: str = "tasks per node") -> list[int]:
    """Return the number of tasks on each node of a step: `2(x3),1` becomes [2, 2, 2, 1]."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise UsageError(
                f"{variable}={text!r} cannot be parsed at {item!r}. Use a list such as 2(x3),1."
            )
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts
