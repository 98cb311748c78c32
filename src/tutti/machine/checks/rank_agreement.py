"""Checks agreement.*: versions, variables, limits and hardware that all ranks should share.

The most common value is expected. Ranks or hosts with another value are reported.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tutti.machine.checks.cluster import Cluster, Skip
from tutti.machine.checks.finding import Findings, cluster_check, fail, passed, warn
from tutti.machine.checks.nccl_environment import LISTS, settings, shares_gpus
from tutti.machine.observation import Machine
from tutti.measure.units import format_bytes

Facts = Callable[[Machine], Mapping[str, str]]


def _differences(cluster: Cluster, facts: Facts, must_agree: Sequence[str] = ()) -> Findings:
    """For each fact, the ranks or hosts whose value is not the most common one.

    A difference in a fact of `must_agree` is a failure, otherwise a warning.
    """
    if len(cluster.ranks) < 2 and len(cluster.machines) < 2:
        raise Skip("one rank on one host: nothing to compare")
    # Processes of one host may differ, so ranks are compared. Hosts are compared only if no world
    # was started.
    views: list[tuple[int | None, Machine]] = [(r.rank, r.machine) for r in cluster.ranks]
    views = views or [(None, machine) for machine in cluster.machines]
    values_of = [facts(machine) for _, machine in views]
    for key in dict.fromkeys(key for values in values_of for key in values):
        values = [each.get(key, "not set") for each in values_of]
        counts = Counter(values)
        # If several values are equally common, the value of the first rank is expected.
        usual, number = max(counts.items(), key=lambda item: (item[1], item[0] == values[0]))
        for value in sorted(counts, key=lambda value: counts[value]):
            if value == usual:
                continue
            odd = [view for view, each in zip(views, values, strict=True) if each == value]
            hosts = list(dict.fromkeys(machine.host for _, machine in odd))
            scope = "machine" if len(hosts) == 1 else "world"
            if len(odd) == 1 and odd[0][0] is not None:
                scope = f"rank:{odd[0][0]}"
            yield (fail if key in must_agree else warn)(
                scope,
                f"{_names(odd, hosts)}: {key} {value}",
                f"{usual}, as {number} other{'s' * (number > 1)}",
                host=hosts[0] if len(hosts) == 1 else "",
            )


def _names(odd: Sequence[tuple[int | None, Machine]], hosts: Sequence[str]) -> str:
    ranks = [str(rank) for rank, _ in odd if rank is not None]
    names = ", ".join(hosts[:3]) + (" …" if len(hosts) > 3 else "")
    if not ranks:
        return names
    return f"{names} (rank {', '.join(ranks[:6])}{' …' if len(ranks) > 6 else ''})"


@cluster_check("agreement.versions")
def same_versions(cluster: Cluster) -> Findings:
    def facts(machine: Machine) -> Mapping[str, str]:
        system = {"kernel": machine.kernel, "architecture": machine.architecture}
        return machine.versions | {k: v for k, v in system.items() if v}

    yield from _differences(cluster, facts, ("torch", "nccl", "cuda", "tutti"))


@cluster_check("agreement.variables")
def same_variables(cluster: Cluster) -> Findings:
    def facts(machine: Machine) -> Mapping[str, str]:
        return {
            name: value
            for name, value in settings(machine).items()
            if name not in LISTS["per_process"]
            and not name.startswith(LISTS["per_process_prefixes"])
        }

    yield from _differences(cluster, facts)


@cluster_check("agreement.limits")
def same_limits(cluster: Cluster) -> Findings:
    def facts(machine: Machine) -> Mapping[str, str]:
        limits = {
            "memlock": machine.limits.memlock_bytes,
            "open files": machine.limits.open_files,
            "processes": machine.limits.processes,
            "stack": machine.limits.stack_bytes,
        }
        return {name: str(value) for name, value in limits.items() if value is not None}

    yield from _differences(cluster, facts)


@cluster_check("agreement.hardware")
def same_hardware(cluster: Cluster) -> Findings:
    if len(cluster.machines) < 2:
        raise Skip("one host: nothing to compare")

    def facts(machine: Machine) -> Mapping[str, str]:
        memory = machine.memory.total_bytes
        return {
            "GPUs": str(len(machine.accelerators)),
            "RDMA ports": str(len(machine.rdma)),
            "NUMA nodes": str(len(machine.numa)),
            # Rounded to 16 GiB, because the memory reserved by the firmware differs between hosts.
            **({"memory": format_bytes(round(memory / 2**34) * 2**34)} if memory else {}),
            **({"CPU": machine.cpus.model} if machine.cpus.model else {}),
        }

    yield from _differences(Cluster(cluster.machines), facts, ("GPUs", "RDMA ports"))


@cluster_check("agreement.gpus")
def one_gpu_per_rank(cluster: Cluster) -> Findings:
    on_gpus = [rank for rank in cluster.ranks if rank.gpu is not None]
    if not on_gpus:
        raise Skip("no rank uses a GPU")
    users = Counter((rank.host, rank.gpu) for rank in on_gpus)
    for (host, gpu), number in users.items():
        if number > 1 and not shares_gpus(on_gpus[0].machine.variables):
            ranks = [str(r.rank) for r in on_gpus if (r.host, r.gpu) == (host, gpu)]
            observed = f"ranks {', '.join(ranks)} use the same GPU ({gpu})"
            yield fail(f"rank:{ranks[1]}", observed, "one GPU per rank")
    if len(users) == len(on_gpus):
        yield passed(f"{len(on_gpus)} ranks, one GPU each", "world")
