"""Limits: of this process, its container and its CPUs."""

from collections.abc import Iterator

from tutti.machine.checks.check import Check, on_machine
from tutti.machine.checks.finding import Skip, Verdict, fail, fine, warn
from tutti.machine.checks.known import gibibytes, known
from tutti.machine.checks.patient import Patient
from tutti.machine.observation import Machine

_MANY_FILES = 65536
_FEW_FILES = 1024
_MORE_CPUS = "ask for more CPUs (srun --cpus-per-task, mpirun --bind-to none)"


def has_rdma(machine: Machine) -> bool:
    """Whether any RDMA port is there to be used."""
    return any(port.state == "ACTIVE" for port in machine.rdma)


def _memlock(machine: Machine) -> Iterator[Verdict]:
    limit = known(machine, "limits.memlock_bytes", machine.limits.memlock_bytes)
    if limit == "unlimited" or machine.limits.ipc_lock or not has_rdma(machine):
        words = gibibytes(limit) if isinstance(limit, int) else limit
        yield fine(f"memlock {words}{'' if has_rdma(machine) else ', and no RDMA needs it'}")
        return
    assert isinstance(limit, int)
    yield fail(
        "machine",
        f"memlock is {gibibytes(limit)}, and RDMA must lock its buffers",
        "unlimited",
        "raise it for login shells and for the daemon that starts jobs (slurmd: LimitMEMLOCK)",
        "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/90-memlock.conf",
        "docker run --ulimit memlock=-1 …",
    )


def _open_files(patient: Patient, host: int) -> Iterator[Verdict]:
    machine = patient.machines[host]
    limit = known(machine, "limits.open_files", machine.limits.open_files)
    # Every rank holds a connection to every other one, and loaders hold files.
    large = has_rdma(machine) or len(patient.seats) > 64
    needed = _MANY_FILES if large else _FEW_FILES
    if isinstance(limit, int) and limit < needed:
        command = f"ulimit -n {needed}"
        yield warn("machine", f"{limit} open files", f"at least {needed}", "", command)
    else:
        yield fine(f"{limit} open files")


def _processes(machine: Machine) -> Iterator[Verdict]:
    limit = known(machine, "limits.processes", machine.limits.processes)
    if isinstance(limit, int) and limit < 4096:
        observed = f"{limit} processes and threads"
        yield warn("machine", observed, "at least 4096", "", "ulimit -u 4096")
    else:
        yield fine(f"{limit} processes and threads")


def _cpus(patient: Patient, host: int) -> Iterator[Verdict]:
    machine = patient.machines[host]
    ranks = patient.ranks_on(host) or len(machine.accelerators)
    mine = patient.cpus_on(host)
    quota = machine.limits.cgroup_cpus
    usable = float(mine)
    if isinstance(quota, int | float) and quota < mine:
        usable = quota
        if quota < mine / 2:
            observed = f"{mine} CPUs are shown, the container gets the time of {quota:g}"
            yield warn(
                "machine",
                observed,
                "as many CPUs as there is time for",
                "set threads and loader workers by the quota, or raise it (docker run --cpus)",
                f"export OMP_NUM_THREADS={max(1, int(quota) // max(1, ranks))}",
            )
    if ranks > 1 and usable < ranks:
        observed = f"{usable:g} CPU{'s' * (usable != 1)} for {ranks} ranks"
        expected = "one CPU for each rank, better two"
        yield warn("machine", observed, expected, f"use fewer ranks, or {_MORE_CPUS}")
    elif ranks > 1 and machine.accelerators and usable < 2 * ranks:
        observed = f"{usable:g} CPUs for {ranks} ranks with a GPU each"
        yield warn("machine", observed, "two CPUs for each rank", _MORE_CPUS)


def _governor(machine: Machine) -> Iterator[Verdict]:
    governors = known(machine, "cpus.governors", machine.cpus.governors)
    if not governors:
        raise Skip("the machine has no frequency governor")
    if "powersave" in governors and machine.cpus.model and "Intel" not in machine.cpus.model:
        command = "sudo cpupower frequency-set -g performance"
        yield warn("machine", "the CPUs' governor is powersave", "performance", "", command)
    else:
        yield fine(f"governor {', '.join(governors)}")


def _memory(machine: Machine) -> Iterator[Verdict]:
    limit = known(machine, "limits.cgroup_memory_bytes", machine.limits.cgroup_memory_bytes)
    if not isinstance(limit, int):
        yield fine("the container's memory is not limited")
        return
    # Pinned buffers, loader workers and a checkpoint in passing need about what one GPU holds.
    largest = max((gpu.memory_bytes or 0 for gpu in machine.accelerators), default=0)
    needed = max(2 << 30, largest)
    if limit < needed:
        observed = f"the container may use {gibibytes(limit)} of host memory"
        cure = "raise the limit (docker run --memory, Slurm --mem)"
        yield warn("machine", observed, f"at least {gibibytes(needed)}", cure)
    else:
        yield fine(f"the container may use {gibibytes(limit)}")


CHECKS = (
    Check(
        "limits.memlock",
        "locked memory, where there is RDMA",
        "NCCL registers its buffers with the NIC; with a few MiB it fails or falls back to TCP",
        "set memlock to unlimited",
        on_machine(_memlock),
    ),
    Check(
        "limits.open_files",
        "open files",
        "each rank connects to all others, and loaders open many files",
        "raise the soft limit (ulimit -n, LimitNOFILE)",
        _open_files,
    ),
    Check(
        "limits.processes",
        "processes and threads",
        "NCCL, gloo, OpenMP and loader workers start dozens for each rank",
        "raise the soft limit (ulimit -u)",
        on_machine(_processes),
    ),
    Check(
        "limits.cpus",
        "CPUs this process may use, and the container's quota, against ranks",
        "a rank needs a CPU to launch work and one to move data; beyond the quota all are stopped",
        "ask for more CPUs, or use fewer ranks and threads",
        _cpus,
    ),
    Check(
        "limits.governor",
        "the CPUs' frequency governor",
        "powersave delays every launch (on Intel's own driver it does not, and is passed)",
        "choose performance",
        on_machine(_governor),
    ),
    Check(
        "limits.memory",
        "the container's memory limit",
        "buffers, loaders and checkpoints need host memory; beyond the limit ranks are killed",
        "raise the limit",
        on_machine(_memory),
    ),
)
