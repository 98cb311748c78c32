"""Agreement: what ranks and hosts of a world should have in common; the odd one out is named."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from tutti.machine.checks.check import Check, on_world
from tutti.machine.checks.environment import settings, shares_gpus
from tutti.machine.checks.finding import Skip, Verdict, fail, fine, warn
from tutti.machine.checks.known import gibibytes
from tutti.machine.checks.patient import Patient
from tutti.machine.observation import Machine

# Each process' own, or a host's: these differ by nature.
_OWN = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "CUDA_VISIBLE_DEVICES", "NCCL_HOSTID"),
    *("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE"),
    *("NCCL_DEBUG_FILE", "SLURM_STEP_ID", "SLURM_JOB_ID", "NCCL_TOPO_DUMP_FILE", "SLURM_PROCID"),
    *("TORCHELASTIC_ERROR_FILE", "TORCH_FR_DUMP_TEMP_FILE", "CUDA_MPS_PIPE_DIRECTORY"),
}
_OWN_PREFIXES = ("TUTTI_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI")
_MUST = ("torch", "nccl", "cuda", "tutti")


def _differences(
    patient: Patient,
    facts: Callable[[Machine], Mapping[str, str]],
    say: Callable[[str], Callable[..., Verdict]],
) -> Iterator[Verdict]:
    """For each fact, who has another value than most. A fact that all lack is none."""
    if len(patient.seats) < 2 and len(patient.machines) < 2:
        raise Skip("one rank on one host: nothing to compare")
    # By rank in a world, for processes of a host may differ; else by host.
    who = [(f"rank:{s.rank}", s.machine) for s in patient.seats] or [
        (m.host, m) for m in patient.machines
    ]
    told = [(name, machine, facts(machine)) for name, machine in who]
    keys = dict.fromkeys(key for _, _, values in told for key in values)
    for key in keys:
        values = [values.get(key, "not set") for _, _, values in told]
        counts = Counter(values)
        if len(counts) == 1:
            continue
        # Of two that differ neither is usual: the first rank's word counts.
        usual, most = max(counts.items(), key=lambda item: (item[1], item[0] == values[0]))
        for value in sorted(counts, key=lambda value: counts[value]):
            if value == usual:
                continue
            odd = [i for i, each in enumerate(values) if each == value]
            hosts = list(dict.fromkeys(told[i][1].host for i in odd))
            if patient.seats and len(odd) == 1:
                scope = told[odd[0]][0]
            else:
                scope = "machine" if len(hosts) == 1 else "world"
            yield say(key)(
                scope,
                f"{_names(odd, told)}: {key} {value}",
                f"{usual} as {most} other{'s' * (most > 1)}",
                host=hosts[0] if len(hosts) == 1 else "",
            )


def _names(odd: list[int], told: list[tuple[str, Machine, Mapping[str, str]]]) -> str:
    hosts = list(dict.fromkeys(told[i][1].host for i in odd))
    ranks = [told[i][0].removeprefix("rank:") for i in odd if told[i][0].startswith("rank:")]
    names = ", ".join(hosts[:3]) + (" …" if len(hosts) > 3 else "")
    if not ranks:
        return names
    shown = ", ".join(ranks[:6]) + (" …" if len(ranks) > 6 else "")
    return f"{names} (rank {shown})"


def _versions(patient: Patient) -> Iterator[Verdict]:
    def facts(machine: Machine) -> Mapping[str, str]:
        system = {"kernel": machine.kernel, "architecture": machine.architecture}
        return machine.versions | {k: v for k, v in system.items() if v}

    yield from _differences(patient, facts, lambda key: fail if key in _MUST else warn)


def _variables(patient: Patient) -> Iterator[Verdict]:
    def facts(machine: Machine) -> Mapping[str, str]:
        all_of_them = settings(machine)
        return {
            key: value
            for key, value in all_of_them.items()
            if key not in _OWN and not key.startswith(_OWN_PREFIXES)
        }

    yield from _differences(patient, facts, lambda key: warn)


def _limits(patient: Patient) -> Iterator[Verdict]:
    def facts(machine: Machine) -> Mapping[str, str]:
        limits = machine.limits
        found = {
            "memlock": limits.memlock_bytes,
            "open files": limits.open_files,
            "processes": limits.processes,
            "stack": limits.stack_bytes,
        }
        return {key: str(value) for key, value in found.items() if value is not None}

    yield from _differences(patient, facts, lambda key: warn)


def _hardware(patient: Patient) -> Iterator[Verdict]:
    if len(patient.machines) < 2:
        raise Skip("one host: nothing to compare")

    def facts(machine: Machine) -> Mapping[str, str]:
        memory = machine.memory.total_bytes
        return {
            "GPUs": str(len(machine.accelerators)),
            "RDMA ports": str(len(machine.rdma)),
            "NUMA nodes": str(len(machine.numa)),
            # Firmware keeps a little for itself, and not the same on every host.
            **({"memory": gibibytes(round(memory / 2**34) * 2**34)} if memory else {}),
            **({"CPU": machine.cpus.model} if machine.cpus.model else {}),
        }

    yield from _differences(
        Patient(patient.machines),
        facts,
        lambda key: fail if key in ("GPUs", "RDMA ports") else warn,
    )


def _mapping(patient: Patient) -> Iterator[Verdict]:
    seats = [seat for seat in patient.seats if seat.gpu is not None]
    if not seats:
        raise Skip("no rank on a GPU")
    users = Counter((seat.host, seat.gpu) for seat in seats)
    for (host, gpu), count in users.items():
        if count > 1 and not shares_gpus(seats[0].machine.variables):
            ranks = [str(seat.rank) for seat in seats if (seat.host, seat.gpu) == (host, gpu)]
            observed = f"ranks {', '.join(ranks)} use one GPU ({gpu})"
            yield fail(f"rank:{ranks[1]}", observed, "a GPU for each rank", "")
    if len(users) == len(seats):
        yield fine(f"{len(seats)} ranks, each on a GPU of its own", "world")


CHECKS = (
    Check(
        "agreement.versions",
        "versions of torch, CUDA, NCCL, driver, Python and kernel on all ranks",
        "ranks that run different code hang, or compute different things",
        "install the same on every host",
        on_world(_versions),
        "world",
    ),
    Check(
        "agreement.variables",
        "variables that steer NCCL, torch and gloo on all ranks",
        "ranks that choose another algorithm or transport wait for each other for ever",
        "export the same everywhere (srun --export, mpirun -x)",
        on_world(_variables),
        "world",
    ),
    Check(
        "agreement.limits",
        "limits of the processes on all ranks",
        "a daemon started with other limits hands them to its ranks",
        "set them in the daemon's unit (LimitMEMLOCK, LimitNOFILE), not in a login shell",
        on_world(_limits),
        "world",
    ),
    Check(
        "agreement.hardware",
        "number of GPUs and RDMA ports, CPUs and memory of all hosts",
        "the host that lacks something is the one that has lost it",
        "look at that host first",
        on_world(_hardware),
        "world",
    ),
    Check(
        "agreement.gpus",
        "whether two ranks would use one GPU",
        "they share its time and memory, and NCCL refuses them",
        "start a rank per GPU, or ask for it with --ranks-per-gpu",
        on_world(_mapping),
        "world",
    ),
)
