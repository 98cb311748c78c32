"""Writes job scripts for clusters: sbatch scripts for Slurm, and mpirun scripts for MPI.

Each argument of the command is quoted for the shell. A value on an #SBATCH line cannot be quoted
safely, so such a value may contain only characters without a special meaning.
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
    """Return an sbatch script. `directives` maps long sbatch flags to values, or None to omit."""
    if nodes < 1 or ranks_per_node < 1:
        raise UsageError(
            f"--nodes {nodes} with {ranks_per_node} ranks per node has no ranks. Both numbers must "
            "be at least 1."
        )
    # Since Slurm 22.05, a step does not inherit --cpus-per-task from its job, so srun needs the
    # flag too.
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
            raise UsageError(
                f"--sbatch must be a flag of sbatch, such as exclusive or mem=64G, got {name!r}"
            )
        if not re.fullmatch(r"[A-Za-z0-9._:,/@%+=\[\]-]*", value):
            raise UsageError(
                f"--{name} may contain only letters, digits and .,_:/@%+=[]- on an #SBATCH line, "
                f"got {value!r}"
            )
        lines.append(f"#SBATCH --{name}{f'={value}' if value else ''}")
    ranks = nodes * ranks_per_node
    lines += [
        "set -euo pipefail",
        "",
        f"# {ranks} ranks. tutti reads rank, node and master from srun's variables.",
        "# If a rank fails, srun ends all ranks. Otherwise they would wait for the failed rank.",
        f"srun --kill-on-bad-exit=1{cpus} {shlex.join(command)}\n",
    ]
    return "\n".join(lines)


def mpi_script(
    command: Sequence[str], hosts: Sequence[tuple[str, int]], mpirun: Sequence[str], flavour: str
) -> str:
    """Return a script that calls mpirun. `hosts` lists (name, number of ranks)."""
    ranks = sum(count for _, count in hosts)
    flags = ["-np", str(ranks), "--host" if flavour == "openmpi" else "-hosts"]
    flags.append(",".join(f"{name}:{count}" for name, count in hosts))
    if flavour == "openmpi":
        # By default, Open MPI binds each rank to one core. tutti binds each rank to the CPUs near
        # its device instead.
        flags += ["--bind-to", "none"]
    if len(hosts) > 1 and flavour == "openmpi":
        flags += ["-x", f"MASTER_ADDR={hosts[0][0]}"]
    elif len(hosts) > 1:
        # Hydra, the launcher of MPICH, gives the ranks no common job id. So ranks on different
        # hosts cannot derive the same port from a job id, and the script sets the port.
        port = port_candidates(shlex.join(command))[0]
        flags += ["-genv", "MASTER_ADDR", hosts[0][0], "-genv", "MASTER_PORT", str(port)]
    return (
        f"#!/bin/bash\n# {ranks} ranks on {len(hosts)} host{'s' * (len(hosts) != 1)}.\n"
        f"exec {shlex.join([*mpirun, *flags, *command])}\n"
    )


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """Return (name, number of ranks) of each host in `n1:4,n2:4`. `n1` means `n1:1`."""
    hosts = []
    for item in text.split(","):
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(?::([1-9][0-9]*))?", item.strip())
        if match is None:
            raise UsageError(f"--hosts must be a list such as n1:4,n2:4, got {item!r} in {text}")
        hosts.append((match[1], int(match[2] or 1)))
    return hosts
