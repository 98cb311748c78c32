"""Cluster jobs as readable scripts: sbatch for Slurm, mpirun for MPI.

The command is quoted word by word for the shell. A value on an #SBATCH line, for which there is no
safe quoting, may contain only characters without special meaning.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.world.addresses import port_candidates
from tutti.world.errors import UsageError

_SAFE_VALUE = re.compile(r"[A-Za-z0-9._:,/@%+=\[\]-]+")


@dataclass(frozen=True)
class SlurmJob:
    """A Slurm job; `directives` are long flags of sbatch, None to leave one out."""

    command: Sequence[str]
    nodes: int
    ranks_per_node: int
    cpus_per_rank: int | None
    directives: dict[str, str | None]

    def script(self) -> str:
        """The sbatch script."""
        if self.nodes < 1 or self.ranks_per_node < 1:
            raise UsageError(
                f"--nodes {self.nodes} × {self.ranks_per_node} ranks per node: use 1 or more each"
            )
        directives = {
            "nodes": str(self.nodes),
            "ntasks-per-node": str(self.ranks_per_node),
            "cpus-per-task": None if self.cpus_per_rank is None else str(self.cpus_per_rank),
            **self.directives,
        }
        lines = [
            f"#SBATCH --{name}{f'={value}' if value else ''}"
            for name, value in directives.items()
            if value is not None and _check_directive(name, value)
        ]
        # Since Slurm 22.05 a step does not inherit --cpus-per-task from its job.
        cpus = f" --cpus-per-task={self.cpus_per_rank}" if self.cpus_per_rank else ""
        return "\n".join(
            [
                "#!/bin/bash",
                *lines,
                "set -euo pipefail",
                "",
                f"# {self.nodes * self.ranks_per_node} ranks. tutti reads rank, node and master "
                "from srun's variables.",
                "# A rank that fails ends the step: the others would wait for it.",
                f"srun --kill-on-bad-exit=1{cpus} {shlex.join(self.command)}",
                "",
            ]
        )


@dataclass(frozen=True)
class MpiJob:
    """An mpirun job; `hosts` is a list of (name, ranks on it), rank 0 on the first."""

    command: Sequence[str]
    hosts: Sequence[tuple[str, int]]
    mpirun: Sequence[str]
    flavour: str

    def script(self) -> str:
        """The shell script that calls mpirun."""
        ranks = sum(count for _, count in self.hosts)
        variables: dict[str, str] = {}
        if len(self.hosts) > 1:
            variables["MASTER_ADDR"] = self.hosts[0][0]
            if self.flavour == "mpich":
                # Hydra has no job id that all hosts share and from which to derive a port.
                variables["MASTER_PORT"] = str(port_candidates(shlex.join(self.command))[0])
        hosts = ",".join(f"{name}:{count}" for name, count in self.hosts)
        if self.flavour == "openmpi":
            # Open MPI would bind each rank to one core; tutti binds it near its device.
            flags = ["-np", str(ranks), "--host", hosts, "--bind-to", "none"]
            for name, value in variables.items():
                flags += ["-x", f"{name}={value}"]
        else:
            flags = ["-np", str(ranks), "-hosts", hosts]
            for name, value in variables.items():
                flags += ["-genv", name, value]
        return "\n".join(
            [
                "#!/bin/bash",
                f"# {ranks} ranks on {len(self.hosts)} host{'s' * (len(self.hosts) != 1)}.",
                f"exec {shlex.join([*self.mpirun, *flags, *self.command])}",
                "",
            ]
        )


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """Parse `n1:4,n2:4`; a host without a number runs one rank."""
    hosts = []
    for item in text.split(","):
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(?::([1-9][0-9]*))?", item.strip())
        if match is None:
            raise UsageError(f"--hosts {text}: {item!r} does not parse: write n1:4,n2:4")
        hosts.append((match[1], int(match[2] or 1)))
    return hosts


def _check_directive(flag: str, value: str) -> bool:
    if not re.fullmatch(r"[a-z][a-z0-9-]*", flag):
        raise UsageError(f"--sbatch {flag!r} is not a flag of sbatch: write exclusive or mem=64G")
    if value and not _SAFE_VALUE.fullmatch(value):
        raise UsageError(
            f"--{flag} {value!r}: a value on an #SBATCH line may contain only letters, digits "
            "and .,_:/@%+=[]-"
        )
    return True
