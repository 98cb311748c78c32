"""Checks agreement.*: versions, variables, limits and hardware that all ranks should share.

The most common value is expected. Ranks or hosts with another value are reported.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from tutti.machine.checks.cluster import Cluster, Skip
from tutti.machine.checks.finding import Findings, cluster_check, fail, passed, warn
from tutti.machine.checks.nccl_environment import LISTS, settings, shares_gpus
from tutti.machine.observation import Machine
from tutti.measure.units import format_bytes

Facts = dict[str, str]


def _differences(
    cluster: Cluster, read_facts: Callable[[Machine], Facts], must_agree: Sequence[str] = ()
) -> Findings:
    """For each fact, the ranks or hosts whose value is not the most common one.

    A difference in a fact of `must_agree` is a failure, otherwise a warning.
    """
    if len(cluster.ranks) < 2 and len(cluster.machines) < 2:
        raise Skip("one rank on one host: nothing to compare")
    # Processes of one host may differ, so ranks are compared. Hosts are compared only if no world
    # was started.
    processes = [(str(rank.rank), rank.machine) for rank in cluster.ranks]
    processes = processes or [("", machine) for machine in cluster.machines]
    facts = [read_facts(machine) for _, machine in processes]
    for key in dict.fromkeys(key for values in facts for key in values):
        values = [each.get(key, "not set") for each in facts]
        counts = Counter(values)
        # If several values are equally common, the value of the first rank is expected.
        usual, number = max(counts.items(), key=lambda item: (item[1], item[0] == values[0]))
        for value in sorted(set(counts) - {usual}, key=lambda value: counts[value]):
            different = [
                process for process, v in zip(processes, values, strict=True) if v == value
            ]
            ranks = [rank for rank, _ in different if rank]
            hosts = list(dict.fromkeys(machine.host for _, machine in different))
            names = _shorten(hosts, 3) + (f" (rank {_shorten(ranks, 6)})" if ranks else "")
            scope = "machine" if len(hosts) == 1 else "world"
            yield (fail if key in must_agree else warn)(
                f"rank:{ranks[0]}" if len(ranks) == 1 else scope,
                f"{names}: {key} {value}",
                f"{usual}, as {number} other{'s' * (number > 1)}",
                host=hosts[0] if len(hosts) == 1 else "",
            )


def _shorten(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:count]) + (" …" if len(names) > count else "")


@cluster_check("agreement.versions")
def same_versions(cluster: Cluster) -> Findings:
    def facts(machine: Machine) -> Facts:
        system = {"kernel": machine.kernel, "architecture": machine.architecture}
        return machine.versions | {k: v for k, v in system.items() if v}

    yield from _differences(cluster, facts, ("torch", "nccl", "cuda", "tutti"))


@cluster_check("agreement.variables")
def same_variables(cluster: Cluster) -> Findings:
    prefixes = LISTS["per_process_prefixes"]

    def facts(machine: Machine) -> Facts:
        variables = settings(machine)
        shared = variables.keys() - set(LISTS["per_process"])
        return {name: variables[name] for name in sorted(shared) if not name.startswith(prefixes)}

    yield from _differences(cluster, facts)


@cluster_check("agreement.limits")
def same_limits(cluster: Cluster) -> Findings:
    def facts(machine: Machine) -> Facts:
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

    def facts(machine: Machine) -> Facts:
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
            yield fail(f"rank:{ranks[1]}", f"ranks {', '.join(ranks)} use the same GPU ({gpu})")
    if len(users) == len(on_gpus):
        yield passed(f"{len(on_gpus)} ranks, one GPU each", "world")
