"""Memory: /dev/shm and what is left in it, room for files, NUMA."""

from collections.abc import Iterator

from tutti.machine.checks.check import Check, on_machine
from tutti.machine.checks.finding import Skip, Verdict, fail, fine, warn
from tutti.machine.checks.known import gibibytes, gpus, known
from tutti.machine.checks.patient import Patient
from tutti.machine.cpu_numa import format_cpu_list, parse_cpu_list
from tutti.machine.observation import Machine

_MIB, _GIB = 1 << 20, 1 << 30


def _shm(machine: Machine) -> Iterator[Verdict]:
    size = known(machine, "limits.shm_bytes", machine.limits.shm_bytes)
    free = known(machine, "limits.shm_free_bytes", machine.limits.shm_free_bytes)
    commands: tuple[str, ...]
    if machine.container in (None, "none"):
        commands = ("sudo mount -o remount,size=8G /dev/shm",)
    else:
        commands = ("docker run --shm-size=8g …", "docker run --ipc=host …")
    if size <= 64 * _MIB:
        default = ", docker's default" if size == 64 * _MIB else ""
        observed = f"/dev/shm has {gibibytes(size)}{default}"
        yield fail("machine", observed, "at least 1 GiB", "", *commands)
    elif size < _GIB:
        observed = f"/dev/shm has {gibibytes(size)}"
        yield warn("machine", observed, "at least 1 GiB", "", *commands)
    elif free < 256 * _MIB:
        observed = f"{gibibytes(free)} of {gibibytes(size)} are free in /dev/shm"
        cure = "delete what dead jobs have left there"
        yield warn("machine", observed, "at least 256 MiB free", cure, "ls -lt /dev/shm")
    else:
        yield fine(f"{gibibytes(free)} of {gibibytes(size)} are free in /dev/shm")


def _pressure(machine: Machine) -> Iterator[Verdict]:
    total = known(machine, "memory.total_bytes", machine.memory.total_bytes)
    free = known(machine, "memory.available_bytes", machine.memory.available_bytes)
    if free < total * 0.05:
        observed = f"{gibibytes(free)} of {gibibytes(total)} host memory are available"
        command = "ps aux --sort=-rss | head"
        yield warn("machine", observed, "at least 5 %", "", command)
    else:
        yield fine(f"{gibibytes(free)} of {gibibytes(total)} are available")


def _affinity(patient: Patient, host: int) -> Iterator[Verdict]:
    """Ranks of a world by the GPU each would use; else GPUs none of whose CPUs may be used."""
    machine = patient.machines[host]
    near = {
        _bare(gpu.uuid): (gpu.index, set(parse_cpu_list(gpu.cpus)))
        for gpu in gpus(machine)
        if gpu.cpus
    }
    if not near:
        raise Skip(machine.why("accelerators[0].cpus") or "no GPU tells its CPUs")
    if len(machine.numa) < 2:
        raise Skip("one NUMA node: every CPU is near")
    seats = [seat for seat in patient.seats if seat.host == host and _bare(seat.gpu) in near]
    for seat in seats:
        index, cpus = near[_bare(seat.gpu)]
        if not cpus & set(parse_cpu_list(seat.machine.cpus.allowed)):
            observed = f"CPUs {seat.machine.cpus.allowed}, none of them near GPU {index}"
            yield warn(f"rank:{seat.rank}", observed, f"CPUs {format_cpu_list(cpus)}", "")
    if not seats:
        allowed = set(parse_cpu_list(machine.cpus.allowed))
        for index, cpus in near.values():
            if not cpus & allowed:
                observed = f"this process may use CPUs {machine.cpus.allowed} only"
                yield warn(f"gpu:{index}", observed, f"CPUs {format_cpu_list(cpus)} near it", "")


def _bare(uuid: str | None) -> str:
    """NVML writes GPU-… where torch writes the rest alone."""
    return (uuid or "").removeprefix("GPU-")


def _balancing(machine: Machine) -> Iterator[Verdict]:
    if len(machine.numa) < 2:
        raise Skip("one NUMA node")
    for node in machine.numa:
        if node.memory_bytes and node.free_bytes is not None:
            free, total = node.free_bytes, node.memory_bytes
            if free < total * 0.01 and free < 512 * _MIB:
                observed = f"NUMA node {node.id} has {gibibytes(free)} free"
                yield warn("machine", observed, "room for the pinned memory of its ranks", "")


CHECKS = (
    Check(
        "memory.shm",
        "size of /dev/shm and room in it",
        "NCCL between ranks of a host and the workers of data loaders exchange data there",
        "give it 1 GiB or more",
        on_machine(_shm),
    ),
    Check(
        "memory.available",
        "available host memory",
        "when it runs out the kernel kills ranks, or pages them out",
        "end what uses it",
        on_machine(_pressure),
    ),
    Check(
        "memory.affinity",
        "whether ranks may run on CPUs near their GPU",
        "launches and copies from the other socket are slower, and share its link",
        "bind by GPU (tutti.init does; srun --cpu-bind, docker --cpuset-cpus)",
        _affinity,
    ),
    Check(
        "memory.numa",
        "free memory on each NUMA node",
        "a full node hands out far memory without a word",
        "drop the page cache or end what fills the node",
        on_machine(_balancing),
    ),
)
