"""tutti submit slurm|mpi: writes a job script for a cluster, and submits it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tutti.cli.flags import OutputFile, parse, split_at_dashes
from tutti.world.errors import UsageError
from tutti.world.jobs import mpi_script, parse_hosts, slurm_script

_USAGE = """usage: tutti submit slurm [flags] -- COMMAND
       tutti submit mpi --hosts n1:4,n2:4 [flags] -- COMMAND

Writes a job script and submits it. --dry-run only prints the script.
`tutti submit slurm --help` and `tutti submit mpi --help` list the flags."""


@dataclass(frozen=True)
class Slurm:
    """Submit an sbatch script: tutti submit slurm --nodes 2 --gpus-per-node 8 -- python train.py"""

    USAGE_END = "-- COMMAND"
    nodes: int = 1
    """Number of nodes."""
    gpus_per_node: int = 0
    """Number of GPUs on each node."""
    ranks_per_node: int | None = None
    """Number of ranks on each node (default: one per GPU, or 1 without GPUs)."""
    cpus_per_rank: int | None = None
    """Number of CPU cores for each rank (default: the cluster's default)."""
    partition: str | None = None
    """Slurm partition."""
    time: str | None = None
    """Time limit in the format of sbatch, such as 2:00:00."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    mem: str | None = None
    """Memory per node in the format of sbatch, such as 64G."""
    job_name: str | None = None
    """Name of the job (default: the name of the script in COMMAND)."""
    output: str = "%x-%j.out"
    """Output file of the job. %x is the job name, and %j is the job id."""
    sbatch: tuple[str, ...] = ()
    """More flags for sbatch, without dashes, such as `--sbatch exclusive constraint=h200`."""
    script: OutputFile | None = None
    """File for the script (default: NAME.sbatch in the current directory)."""
    dry_run: bool = False
    """Only print the script. Do not write or submit it."""


@dataclass(frozen=True)
class Mpi:
    """Run a script that calls mpirun: tutti submit mpi --hosts n1:4,n2:4 -- python train.py"""

    USAGE_END = "-- COMMAND"
    hosts: str = "localhost:1"
    """Hosts, and the number of ranks on each host, such as `n1:4,n2:4`. Rank 0 runs on the first
    host."""
    mpirun: str = "mpirun"
    """The mpirun command. It may have flags, such as "mpirun --map-by node"."""
    flavour: Literal["auto", "openmpi", "mpich"] = "auto"
    """MPI implementation. `auto` detects it with mpirun --version."""
    script: OutputFile | None = None
    """File for the script (default: NAME.mpi.sh in the current directory)."""
    dry_run: bool = False
    """Only print the script. Do not write or run it."""


def main(arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return 0
    kind = arguments[0] if arguments else ""
    if kind not in ("slurm", "mpi"):
        raise UsageError(f"the scheduler must be slurm or mpi, got {kind!r}")
    flags, command = split_at_dashes(arguments[1:])
    program = f"tutti submit {kind}"
    options: Slurm | Mpi
    options = parse(Slurm, program, flags) if kind == "slurm" else parse(Mpi, program, flags)
    if not command:
        raise UsageError(f"the command is missing. Add it after --: {program} -- python train.py")
    if isinstance(options, Slurm):
        return _submit_slurm(options, command)
    return _submit_mpi(options, command)


def _submit_slurm(options: Slurm, command: list[str]) -> int:
    name = options.job_name or _job_name(command)
    extra = [flag.lstrip("-").partition("=") for flag in options.sbatch]
    gpus = options.gpus_per_node
    ranks = max(1, gpus) if options.ranks_per_node is None else options.ranks_per_node
    same_name = ("partition", "time", "account", "qos", "mem", "output")
    directives = {"job-name": name, "gpus-per-node": str(gpus) if gpus else None}
    directives |= {flag: getattr(options, flag) for flag in same_name}
    directives |= {flag: value for flag, _, value in extra}
    script = slurm_script(command, options.nodes, ranks, options.cpus_per_rank, directives)
    if options.dry_run:
        print(script, end="")
        return 0
    _require_program("sbatch", "Submit from a login node of the cluster, or use --dry-run")
    path = _write(options.script or Path(f"{name}.sbatch"), script)
    done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True)
    print(done.stdout, end="")
    if done.returncode != 0:
        raise UsageError(f"sbatch refused {path}: {' '.join(done.stderr.split())}")
    print(f"The script is {path}", file=sys.stderr)
    return 0


def _submit_mpi(options: Mpi, command: list[str]) -> int:
    mpirun = shlex.split(options.mpirun) or ["mpirun"]
    hosts = parse_hosts(options.hosts)
    flavour = _flavour(mpirun[0]) if options.flavour == "auto" else options.flavour
    script = mpi_script(command, hosts, mpirun, flavour)
    if options.dry_run:
        print(script, end="")
        return 0
    _require_program(mpirun[0], "Install Open MPI or MPICH, or use --dry-run")
    path = _write(options.script or Path(f"{_job_name(command)}.mpi.sh"), script)
    print(f"The script is {path}", file=sys.stderr, flush=True)
    # Replace this process, so that signals and terminal input reach mpirun directly.
    os.execvp("bash", ["bash", str(path)])


def _job_name(command: Sequence[str]) -> str:
    scripts = [argument for argument in command if argument.endswith(".py")]
    return re.sub(r"[^A-Za-z0-9._-]", "-", Path((scripts or command)[0]).stem) or "tutti"


def _flavour(mpirun: str) -> str:
    _require_program(mpirun, "Install Open MPI or MPICH, or use --flavour openmpi")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in version or "OpenRTE" in version:
        return "openmpi"
    if "HYDRA" in version or "Intel" in version:
        return "mpich"
    raise UsageError(
        f"{mpirun} --version names neither Open MPI nor MPICH. Add --flavour openmpi or mpich."
    )


def _require_program(program: str, cure: str) -> None:
    if shutil.which(program) is None:
        raise UsageError(f"{program} is not installed on this host. {cure}.")


def _write(path: Path, script: str) -> Path:
    try:
        if path.exists() and path.read_bytes() != script.encode():
            raise UsageError(
                f"{path} exists with different content. Remove this file, or use --script FILE."
            )
        path.write_text(script)
        path.chmod(0o755)
    except OSError as error:
        raise UsageError(f"--script {path}: {error.strerror}. Choose another file.") from None
    return path
