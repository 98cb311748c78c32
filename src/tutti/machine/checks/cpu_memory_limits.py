"""Checks limits.* and memory.*: ulimits, CPUs per rank, /dev/shm, host memory and NUMA nodes."""

from tutti.machine.checks.cluster import Cluster, Skip, require_gpus, require_known
from tutti.machine.checks.finding import Findings, fail, host_check, machine_check, passed, warn
from tutti.machine.cpu_numa import format_cpu_list, parse_cpu_list
from tutti.machine.recording import Machine
from tutti.measure.units import format_bytes

_MIB, _GIB = 1 << 20, 1 << 30
_MORE_CPUS = "request more CPUs (srun --cpus-per-task, mpirun --bind-to none)"


@machine_check("limits.memlock")
def memlock(machine: Machine) -> Findings:
    limit = require_known(machine, "limits.memlock_bytes", machine.limits.memlock_bytes)
    size = format_bytes(limit) if isinstance(limit, int) else limit
    if isinstance(limit, int) and machine.has_rdma and not machine.limits.ipc_lock:
        observed = f"memlock is {size}, but RDMA locks its buffers in memory"
        cure = "raise memlock for login shells and for the job daemon (slurmd: LimitMEMLOCK)"
        yield fail("machine", observed, cure=cure)
    yield passed(f"memlock {size}{'' if machine.has_rdma else '; enough without RDMA'}")


@host_check("limits.open_files")
def open_files(cluster: Cluster, host: int) -> Findings:
    machine = cluster.machines[host]
    limit = require_known(machine, "limits.open_files", machine.limits.open_files)
    needed = 65536 if machine.has_rdma or len(cluster.ranks) > 64 else 1024
    if isinstance(limit, int) and limit < needed:
        yield warn("machine", f"{limit} open files", f"at least {needed}", f"ulimit -n {needed}")
    yield passed(f"{limit} open files")


@machine_check("limits.processes")
def processes(machine: Machine) -> Findings:
    limit = require_known(machine, "limits.processes", machine.limits.processes)
    if isinstance(limit, int) and limit < 4096:
        yield warn("machine", f"{limit} processes and threads")
    yield passed(f"{limit} processes and threads")


@host_check("limits.cpus")
def cpus_for_ranks(cluster: Cluster, host: int) -> Findings:
    machine = cluster.machines[host]
    ranks = cluster.ranks_on(host) or len(machine.accelerators)
    allowed = cluster.cpus_on(host)
    quota = machine.limits.cgroup_cpus
    usable = min(quota, allowed) if isinstance(quota, int | float) else allowed
    if usable < allowed / 2:
        yield warn(
            "machine",
            f"{allowed} CPUs are visible, but the cgroup quota is {usable:g} CPUs",
            "a quota that covers all visible CPUs",
            f"export OMP_NUM_THREADS={max(1, int(usable) // max(1, ranks))}",
            cure="reduce threads and data-loader workers, or raise the quota (docker --cpus)",
        )
    cpus = f"{usable:g} CPU{'s' * (usable != 1)}"
    if ranks > 1 and usable < ranks:
        cure = f"use fewer ranks, or {_MORE_CPUS}"
        expected = "at least one CPU per rank, preferably two"
        yield warn("machine", f"{cpus} for {ranks} ranks", expected, cure=cure)
    elif ranks > 1 and machine.accelerators and usable < 2 * ranks:
        observed = f"{cpus} for {ranks} ranks with one GPU each"
        yield warn("machine", observed, "two CPUs per rank", cure=_MORE_CPUS)


@machine_check("limits.governor")
def governor(machine: Machine) -> Findings:
    governors = require_known(machine, "cpus.governors", machine.cpus.governors)
    if not governors:
        raise Skip("the machine has no frequency governor")
    if "powersave" in governors and machine.cpus.model and "Intel" not in machine.cpus.model:
        yield warn("machine", "the CPU governor is powersave")
    yield passed(f"governor {', '.join(governors)}")


@machine_check("limits.memory")
def cgroup_memory(machine: Machine) -> Findings:
    limit = require_known(machine, "limits.cgroup_memory_bytes", machine.limits.cgroup_memory_bytes)
    if isinstance(limit, int):
        # Pinned buffers, data-loader workers and checkpoint writing need about as much host memory
        # as one GPU has.
        needed = max([2 * _GIB, *(gpu.memory_bytes or 0 for gpu in machine.accelerators)])
        observed = f"the cgroup memory limit is {format_bytes(limit)}"
        if limit < needed:
            yield warn("machine", observed, f"at least {format_bytes(needed)}")
        yield passed(observed)
    else:
        yield passed("no cgroup memory limit")


@machine_check("memory.shm")
def shared_memory(machine: Machine) -> Findings:
    size = require_known(machine, "limits.shm_bytes", machine.limits.shm_bytes)
    free = require_known(machine, "limits.shm_free_bytes", machine.limits.shm_free_bytes)
    commands: tuple[str, ...] = ("sudo mount -o remount,size=8G /dev/shm",)
    if machine.container not in (None, "none"):
        commands = ("docker run --shm-size=8g …", "docker run --ipc=host …")
    free_space = f"{format_bytes(free)} of {format_bytes(size)} are free in /dev/shm"
    if size < _GIB:
        problem = fail if size <= 64 * _MIB else warn
        default = ", docker's default" if size == 64 * _MIB else ""
        observed = f"/dev/shm has {format_bytes(size)}{default}"
        yield problem("machine", observed, "at least 1 GiB", *commands)
    elif free < 256 * _MIB:
        cure = "delete files that dead jobs left in /dev/shm"
        yield warn("machine", free_space, "at least 256 MiB free", "ls -lt /dev/shm", cure=cure)
    yield passed(free_space)


@machine_check("memory.available")
def available_memory(machine: Machine) -> Findings:
    total = require_known(machine, "memory.total_bytes", machine.memory.total_bytes)
    free = require_known(machine, "memory.available_bytes", machine.memory.available_bytes)
    observed = f"{format_bytes(free)} of {format_bytes(total)} host memory are available"
    yield warn("machine", observed) if free < total * 0.05 else passed(observed)


@host_check("memory.affinity")
def gpu_affinity(cluster: Cluster, host: int) -> Findings:
    """Check that each rank may use CPUs of the NUMA node of its GPU.

    If no world was started, the CPUs of this process are compared with the NUMA nodes of all GPUs.
    """
    machine = cluster.machines[host]
    local_cpus = {
        _bare_uuid(gpu.uuid): (gpu.index, set(parse_cpu_list(gpu.cpus)))
        for gpu in require_gpus(machine)
        if gpu.cpus
    }
    if not local_cpus:
        reason = machine.reason_unknown("accelerators[0].cpus")
        raise Skip(reason or "the CPUs of the GPUs' NUMA nodes are unknown")
    if len(machine.numa) < 2:
        raise Skip("one NUMA node")
    placements = [  # (scope, CPUs of the rank, (GPU index, CPUs of the GPU's NUMA node))
        (f"rank:{rank.rank}", rank.machine.cpus.allowed, local_cpus[_bare_uuid(rank.gpu)])
        for rank in cluster.ranks
        if rank.host == host and _bare_uuid(rank.gpu) in local_cpus
    ]
    if not placements:
        allowed = machine.cpus.allowed
        placements = [(f"gpu:{local[0]}", allowed, local) for local in local_cpus.values()]
    for scope, allowed, (gpu_index, cpus) in placements:
        if not cpus & set(parse_cpu_list(allowed)):
            observed = (
                f"CPUs {allowed} are allowed, but none is on the NUMA node of GPU {gpu_index}"
            )
            yield warn(scope, observed, f"some of CPUs {format_cpu_list(cpus)}")


def _bare_uuid(uuid: str | None) -> str:
    """Return the UUID without the prefix "GPU-", which NVML adds and torch does not add."""
    return (uuid or "").removeprefix("GPU-")


@machine_check("memory.numa")
def numa_memory(machine: Machine) -> Findings:
    if len(machine.numa) < 2:
        raise Skip("one NUMA node")
    for node in machine.numa:
        free, total = node.free_bytes, node.memory_bytes
        if total and free is not None and free < min(total * 0.01, 512 * _MIB):
            yield warn("machine", f"NUMA node {node.id} has {format_bytes(free)} free")
