"""Who this process is, from what its launcher left in the environment.

Every launcher speaks its own dialect. One function per dialect turns it into the same Identity,
and for every value the variable that gave it. They are tried in a fixed order, innermost
launcher first: a torchrun inside an srun step is torchrun, an mpirun inside one is mpirun.
"""

import os
import re
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product

from tutti.world.errors import UsageError

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Identity:
    """What the launcher said about this process. None: it did not say; the roll call finds out."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None
    nodes: int | None = None
    master_host: str | None = None
    master_port: int | None = None
    # Tells this world from others on the same hosts: port candidates are derived from it.
    job: str = ""
    # torchrun's agent already listens on the master port; every rank is a client.
    agent_store: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)


def identify(env: Environment) -> Identity:
    """The identity of this process: from the first launcher that applies, else a world of one."""
    found = [(read, identity) for read in _DIALECTS if (identity := read(env)) is not None]
    if not found:
        _refuse_half_a_set(env)
        return Identity(
            "python",
            rank=0,
            size=1,
            local_rank=0,
            local_size=1,
            node=0,
            nodes=1,
            reasons=dict.fromkeys(_VALUES, "default: no launcher found"),
        )
    read, identity = found[0]
    if read is _from_plain_set:
        # RANK and WORLD_SIZE may be left over in a shell; a launcher that disagrees is right next
        # to them, and either choice would hang or train the wrong thing.
        for _, other in found[1:]:
            _refuse_contradiction(identity, other)
    return identity


def without_launcher_variables(env: Environment) -> dict[str, str]:
    """The environment without what an outer launcher said, for one that starts its own world."""
    return {
        name: value
        for name, value in env.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }


_VALUES = ("launcher", "rank", "size", "local_rank", "local_size", "node", "nodes")
_PLAIN_SET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHER_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_STEP_ID", "SLURM_STEPID", "TUTTI_RUN_ID", "TUTTI_REPORT", "TUTTI_RANKS_PER_GPU"),
    *("TUTTI_TIMEOUT", "TUTTI_START_TIMEOUT"),
}
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL")


def _from_torchrun(env: Environment) -> Identity | None:
    name = "TORCHELASTIC_RUN_ID"
    if name not in env:
        return None
    agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _complete_set(env, "torchrun", name, job=env[name], agent_store=agent_store)


def _from_tutti_run(env: Environment) -> Identity | None:
    name = "TUTTI_RUN_ID"
    return _complete_set(env, "tutti", name, job=env[name]) if name in env else None


def _from_plain_set(env: Environment) -> Identity | None:
    if not all(name in env for name in _PLAIN_SET):
        return None
    job = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    return _complete_set(env, "environment", " ".join(_PLAIN_SET), job)


def _from_openmpi(env: Environment) -> Identity | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    reader = _Reader(env, "Open MPI", "OMPI_COMM_WORLD_RANK")
    rank = reader.integer("rank", "OMPI_COMM_WORLD_RANK")
    size = reader.integer("size", "OMPI_COMM_WORLD_SIZE")
    local_rank = reader.integer("local_rank", "OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = reader.integer("local_size", "OMPI_COMM_WORLD_LOCAL_SIZE")
    host = None
    if local_size < size and "MASTER_ADDR" not in env:
        # Open MPI does not say where rank 0 is: usually on the first node of a Slurm job, or where
        # mpirun runs, an address that is known to all. Rank 0 checks that it is really there.
        uri = env.get("OMPI_MCA_orte_hnp_uri", "")
        if "SLURM_JOB_NODELIST" in env:
            host = _first_node(reader, "SLURM_JOB_NODELIST")
        elif "tcp://" in uri:
            host = uri.split("tcp://", 1)[1].split(":", 1)[0].split(",", 1)[0]
            reader.reasons["master"] = "OMPI_MCA_orte_hnp_uri, where mpirun runs"
    job = "openmpi-" + env.get("PMIX_NAMESPACE", env.get("OMPI_MCA_ess_base_jobid", ""))
    return reader.identity("openmpi", rank, size, local_rank, local_size, host=host, job=job)


def _from_mpich(env: Environment) -> Identity | None:
    # `srun --mpi=pmi2` sets PMI_RANK too, but no local rank: that is Slurm's to tell.
    if "PMI_RANK" not in env or "MPI_LOCALRANKID" not in env:
        return None
    reader = _Reader(env, "MPICH", "PMI_RANK and MPI_LOCALRANKID")
    rank = reader.integer("rank", "PMI_RANK")
    size = reader.integer("size", "PMI_SIZE")
    local_rank = reader.integer("local_rank", "MPI_LOCALRANKID")
    local_size = reader.integer("local_size", "MPI_LOCALNRANKS")
    host, job = None, ""
    if local_size == size:
        job = "mpich-" + (env.get("PMI_JOBID") or _process_behind(env.get("PMI_FD", "")))
    elif "SLURM_STEP_ID" in env:
        # Inside a Slurm job Hydra starts its ranks by a step of their own.
        job = f"mpich-slurm-{env.get('SLURM_JOB_ID', '')}-{env['SLURM_STEP_ID']}"
        if "MASTER_ADDR" not in env:
            host = _first_node(reader, "SLURM_STEP_NODELIST")
    return reader.identity("mpich", rank, size, local_rank, local_size, host=host, job=job)


def _from_slurm(env: Environment) -> Identity | None:
    # The batch shell and an salloc shell show SLURM_PROCID or SLURM_NTASKS too, but nobody
    # started the other ranks: only a step has peers.
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return None
    reader = _Reader(env, "Slurm", "SLURM_STEP_ID")
    rank = reader.integer("rank", "SLURM_PROCID")
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    size = reader.integer("size", tasks)
    if size == 1:
        # Most often a shell (srun --pty bash), whose commands start ranks as in any other shell;
        # or one of several steps, whose ranks were numbered by hand.
        return None
    local_rank = reader.integer("local_rank", "SLURM_LOCALID")
    node = reader.integer("node", "SLURM_NODEID")
    tasks_per_node = reader.text("local_size", "SLURM_STEP_TASKS_PER_NODE")
    counts = expand_tasks_per_node(tasks_per_node, "SLURM_STEP_TASKS_PER_NODE")
    if node >= len(counts):
        raise UsageError(
            f"SLURM_NODEID={node} but SLURM_STEP_TASKS_PER_NODE={tasks_per_node} names only "
            f"{len(counts)} nodes: start the ranks with srun"
        )
    reader.reasons["nodes"] = "SLURM_STEP_TASKS_PER_NODE"
    host = None
    if "MASTER_ADDR" not in env:
        # Not SLURM_LAUNCH_NODE_IPADDR: that is the host srun was typed on. Not the job's node
        # list either: a step may run on some of the job's nodes only.
        host = _first_node(reader, "SLURM_STEP_NODELIST")
    job = f"slurm-{env.get('SLURM_JOB_ID', '')}-{env['SLURM_STEP_ID']}"
    return reader.identity(
        "slurm", rank, size, local_rank, counts[node], node, len(counts), host, job=job
    )


_DIALECTS: tuple[Callable[[Environment], Identity | None], ...] = (
    _from_torchrun,
    _from_tutti_run,
    _from_plain_set,
    _from_openmpi,
    _from_mpich,
    _from_slurm,
)


class _Reader:
    """Reads one dialect's variables and remembers which variable gave which value."""

    def __init__(self, env: Environment, dialect: str, recognised_by: str) -> None:
        self.env = env
        self.dialect = dialect
        self.reasons = {"launcher": recognised_by}

    def text(self, value: str, variable: str) -> str:
        if variable not in self.env:
            raise UsageError(
                f"{self.dialect} started this process but {variable} is not set: "
                "start it again without clearing the environment"
            )
        self.reasons[value] = variable
        return self.env[variable]

    def integer(self, value: str, variable: str) -> int:
        text = self.text(value, variable)
        if not text.isdecimal():
            raise UsageError(
                f"{variable}={text!r} is not a whole number from 0 up: unset or correct it"
            )
        return int(text)

    def optional(self, value: str, variable: str) -> int | None:
        return self.integer(value, variable) if variable in self.env else None

    def identity(
        self,
        launcher: str,
        rank: int,
        size: int,
        local_rank: int | None = None,
        local_size: int | None = None,
        node: int | None = None,
        nodes: int | None = None,
        host: str | None = None,
        job: str = "",
        agent_store: bool = False,
    ) -> Identity:
        if size < 1:
            raise UsageError(f"{self.reasons['size']}={size}: a world has at least one rank")
        if not 0 <= rank < size:
            raise UsageError(
                f"{self.reasons['rank']}={rank} but {self.reasons['size']}={size}: "
                f"a rank is 0 to {size - 1}"
            )
        if self.env.get("MASTER_ADDR"):
            host = self.text("master", "MASTER_ADDR")
        elif local_size == size:
            host = "127.0.0.1"
            self.reasons["master"] = f"all {size} ranks are on this host"
        port = self.optional("port", "MASTER_PORT")
        if port is not None and not 0 < port < 65536:
            raise UsageError(f"MASTER_PORT={port} is no port: use one from 1024 to 65535")
        return Identity(
            launcher,
            rank,
            size,
            local_rank,
            local_size,
            node,
            nodes,
            host,
            port,
            job,
            agent_store,
            self.reasons,
        )


def _first_node(reader: _Reader, variable: str) -> str:
    return expand_hosts(reader.text("master", variable), variable)[0]


def _complete_set(
    env: Environment, launcher: str, recognised_by: str, job: str, agent_store: bool = False
) -> Identity:
    for variable in _PLAIN_SET:
        _Reader(env, launcher, recognised_by).text(variable, variable)  # complains if it is missing
    reader = _Reader(env, launcher, recognised_by)
    return reader.identity(
        launcher,
        rank=reader.integer("rank", "RANK"),
        size=reader.integer("size", "WORLD_SIZE"),
        local_rank=reader.optional("local_rank", "LOCAL_RANK"),
        local_size=reader.optional("local_size", "LOCAL_WORLD_SIZE"),
        node=reader.optional("node", "GROUP_RANK"),
        nodes=reader.optional("nodes", "GROUP_WORLD_SIZE"),
        job=job,
        agent_store=agent_store,
    )


def _process_behind(descriptor: str) -> str:
    """The process at the other end of Hydra's socket, shared by all its ranks on this host.

    Hydra gives its jobs no id, and two jobs at once must not derive the same port.
    """
    try:
        with socket.socket(fileno=os.dup(int(descriptor))) as to_launcher:
            credentials = to_launcher.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            return str(struct.unpack("3i", credentials)[0])
    except (ValueError, OSError):  # not a number, not open, not a socket: no id then
        return ""


def _refuse_contradiction(one: Identity, other: Identity) -> None:
    if (one.rank, one.size) == (other.rank, other.size):
        return
    raise UsageError(
        f"two launchers disagree: {_claim(one)}, but {_claim(other)}: unset RANK and WORLD_SIZE "
        f"to be started by {other.launcher}, or unset the other two"
    )


def _claim(identity: Identity) -> str:
    rank, size = identity.reasons["rank"], identity.reasons["size"]
    return f"{rank}={identity.rank} {size}={identity.size}"


def _refuse_half_a_set(env: Environment) -> None:
    """A world of one where somebody meant many would train many models side by side."""
    for name, size in (("WORLD_SIZE", env.get("WORLD_SIZE")), ("PMI_SIZE", env.get("PMI_SIZE"))):
        if size is None or size in ("0", "1"):
            continue
        missing = " and ".join(each for each in _PLAIN_SET if each not in env)
        raise UsageError(
            f"{name}={size} is set, but {missing} {'are' if ' and ' in missing else 'is'} not: set "
            f"all of {', '.join(_PLAIN_SET)}, or unset {name}"
        )
    if "RANK" in env and env["RANK"] != "0":
        raise UsageError(f"RANK={env['RANK']} is set, but WORLD_SIZE is not: set it, or unset RANK")


def expand_hosts(text: str, variable: str = "the node list") -> list[str]:
    """Expand `rack1n[01-03,7],login` to its host names, in order, zero padding kept."""
    hosts: list[str] = []
    for item in _split_outside_brackets(text, variable):
        parts = re.split(r"\[([^\[\]]*)\]", item)  # literal, ranges, literal, ranges, …
        choices = [
            _expand_ranges(part, text, variable) if position % 2 else [part]
            for position, part in enumerate(parts)
        ]
        hosts.extend("".join(choice) for choice in product(*choices))
    return hosts


def expand_tasks_per_node(text: str, variable: str = "tasks per node") -> list[int]:
    """Expand `2(x3),1` to [2, 2, 2, 1]: how many tasks each node of a step runs."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise UsageError(f"{variable}={text!r} does not parse at {item!r}: expected 2(x3),1")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def _split_outside_brackets(text: str, variable: str) -> list[str]:
    items, depth, start = [], 0, 0
    for position, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if depth not in (0, 1):
            raise _unparsable(text, variable, position)
        if sign == "," and depth == 0:
            items.append(text[start:position])
            start = position + 1
    if depth != 0:
        raise _unparsable(text, variable, len(text))
    items.append(text[start:])
    if not all(item and not re.search(r"\s", item) for item in items):
        raise _unparsable(text, variable, start)
    return items


def _expand_ranges(ranges: str, text: str, variable: str) -> list[str]:
    expanded: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _unparsable(text, variable, text.find(item))
        first, last = match[1], match[2] or match[1]
        width = len(first) if first.startswith("0") else 0
        expanded.extend(str(n).zfill(width) for n in range(int(first), int(last) + 1))
    return expanded


def _unparsable(text: str, variable: str, position: int) -> UsageError:
    return UsageError(
        f"{variable}={text!r} does not parse at character {position + 1}: expected a list such as "
        "n[1-4,07],login1; correct it or set MASTER_ADDR and MASTER_PORT"
    )
