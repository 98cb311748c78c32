"""Cluster jobs as readable scripts: sbatch for Slurm, mpirun for MPI.

The command is quoted word by word for the shell. A value on an #SBATCH line, for which there is no
safe quoting, may contain only characters without special meaning.
"""

import re
import shlex
from collections.abc import Sequence

from tutti.world.errors import UsageError
from tutti.world.launchers import port_candidates


def slurm_script(
    command: Sequence[str],
    nodes: int,
    ranks_per_node: int,
    cpus_per_rank: int | None,
    directives: dict[str, str | None],
) -> str:
    """An sbatch script; `directives` maps long flags of sbatch to values (None: left out)."""
    if nodes < 1 or ranks_per_node < 1:
        raise UsageError(f"--nodes {nodes} and {ranks_per_node} ranks per node must be at least 1")
    # Since Slurm 22.05 a step does not inherit --cpus-per-task from its job.
    cpus = f" --cpus-per-task={cpus_per_rank}" if cpus_per_rank else ""
    counts = {
        "nodes": str(nodes),
        "ntasks-per-node": str(ranks_per_node),
        "cpus-per-task": None if cpus_per_rank is None else str(cpus_per_rank),
    }
    lines = ["#!/bin/bash"]
    for name, value in (counts | directives).items():
        if value is None:
            continue
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise UsageError(f"--sbatch {name!r} is not a flag of sbatch: use exclusive or mem=64G")
        if not re.fullmatch(r"[A-Za-z0-9._:,/@%+=\[\]-]*", value):
            raise UsageError(
                f"--{name} {value!r}: a value on an #SBATCH line may contain only letters, digits "
                "and .,_:/@%+=[]-"
            )
        lines.append(f"#SBATCH --{name}{f'={value}' if value else ''}")
    ranks = nodes * ranks_per_node
    lines += [
        "set -euo pipefail",
        "",
        f"# {ranks} ranks. tutti reads rank, node and master from srun's variables.",
        "# A rank that fails ends the step; otherwise the other ranks would wait for it.",
        f"srun --kill-on-bad-exit=1{cpus} {shlex.join(command)}\n",
    ]
    return "\n".join(lines)


def mpi_script(
    command: Sequence[str], hosts: Sequence[tuple[str, int]], mpirun: Sequence[str], flavour: str
) -> str:
    """A script that calls mpirun; `hosts` lists (name, number of ranks), rank 0 on the first."""
    ranks = sum(count for _, count in hosts)
    flags = ["-np", str(ranks), "--host" if flavour == "openmpi" else "-hosts"]
    flags.append(",".join(f"{name}:{count}" for name, count in hosts))
    if flavour == "openmpi":
        # Open MPI would bind each rank to one core; tutti binds each rank near its device.
        flags += ["--bind-to", "none"]
    if len(hosts) > 1 and flavour == "openmpi":
        flags += ["-x", f"MASTER_ADDR={hosts[0][0]}"]
    elif len(hosts) > 1:
        # Hydra gives the hosts no common job id from which each could derive the same port.
        port = port_candidates(shlex.join(command))[0]
        flags += ["-genv", "MASTER_ADDR", hosts[0][0], "-genv", "MASTER_PORT", str(port)]
    return (
        f"#!/bin/bash\n# {ranks} ranks on {len(hosts)} host{'s' * (len(hosts) != 1)}.\n"
        f"exec {shlex.join([*mpirun, *flags, *command])}\n"
    )


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """Parse `n1:4,n2:4`; a host without a number runs one rank."""
    hosts = []
    for item in text.split(","):
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(?::([1-9][0-9]*))?", item.strip())
        if match is None:
            raise UsageError(f"--hosts {text}: {item!r} is invalid: expected a list as n1:4,n2:4")
        hosts.append((match[1], int(match[2] or 1)))
    return hosts
